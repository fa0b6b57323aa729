//! Addresses of models. Example: `hf://org/name@v1/onnx/model.onnx` is a file of revision `v1`.

use downbeat_repository::{derived_name, stem};
use url::Url;

use crate::failure::FetchError;

/// The hub that `HF_ENDPOINT` replaces.
pub(crate) const HUB: &str = "https://huggingface.co";

/// An address of models.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Address {
    /// A repository of a hub.
    Hub {
        /// `ORGANISATION/NAME`.
        repository: String,
        /// A branch, tag or commit.
        revision: String,
        /// The ONNX file in the repository; `None`: one is chosen.
        file: Option<String>,
    },
    /// An object of an object store, or all objects below a prefix.
    Store(Url),
    /// A file of a web server.
    Web(Url),
}

impl Address {
    /// Reads an address. `hub` is the address of the hub: a file's or repository's page there
    /// stands for the repository.
    ///
    /// # Errors
    /// If the address names no source that is known.
    pub(crate) fn parse(text: &str, hub: &str) -> Result<Self, FetchError> {
        let wrong = |why: &str| Err(FetchError::Address(format!("'{text}': {why}")));
        let Some((scheme, rest)) = text.split_once("://") else { return wrong("expected SCHEME://...") };
        match scheme.to_ascii_lowercase().as_str() {
            "hf" => Self::of_hub(text, rest),
            "http" | "https" => {
                let below_hub = text.strip_prefix(hub.trim_end_matches('/')).and_then(|rest| rest.strip_prefix('/'));
                if let Some(page) = below_hub.and_then(of_page) {
                    return Self::of_hub(text, &page);
                }
                match Url::parse(text) {
                    Ok(url) if url.path().to_ascii_lowercase().ends_with(".onnx") => Ok(Address::Web(url)),
                    Ok(_) => wrong("expected the address of a file that ends in .onnx"),
                    Err(error) => wrong(&error.to_string()),
                }
            }
            "s3" | "s3a" | "gs" | "az" | "azure" | "abfs" | "abfss" => match Url::parse(text) {
                Ok(url) if url.host_str().is_some_and(|bucket| !bucket.is_empty()) => Ok(Address::Store(url)),
                Ok(_) => wrong("expected the name of a bucket after ://"),
                Err(error) => wrong(&error.to_string()),
            },
            _ => wrong("unknown scheme; known are hf, s3, gs, az, https and http"),
        }
    }

    fn of_hub(text: &str, rest: &str) -> Result<Self, FetchError> {
        let wrong = |why: &str| {
            let form = "expected hf://ORGANISATION/NAME, hf://ORGANISATION/NAME@REVISION or \
                        hf://ORGANISATION/NAME/PATH.onnx";
            Err(FetchError::Address(format!("'{text}': {why}; {form}")))
        };
        let is_part = |part: &str| {
            !part.is_empty()
                && part != "."
                && part != ".."
                && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        let mut parts = rest.trim_end_matches('/').splitn(3, '/');
        let (Some(organisation), Some(name)) = (parts.next(), parts.next()) else {
            return wrong("the name of the repository is missing");
        };
        let file = parts.next().map(str::to_owned);
        let (name, revision) = match name.split_once('@') {
            Some((_, "")) => return wrong("the revision after '@' is missing"),
            Some((name, revision)) => (name, revision),
            None => (name, "main"),
        };
        if !is_part(organisation) || !is_part(name) {
            return wrong("the name of the repository has characters that no repository has");
        }
        // A branch such as `refs/pr/1` is written with %2F, as in the hub's own addresses.
        let revision = revision.replace("%2F", "/").replace("%2f", "/");
        if let Some(file) = &file
            && !file.to_ascii_lowercase().ends_with(".onnx")
        {
            return wrong("the path in the repository does not end in .onnx");
        }
        Ok(Address::Hub { repository: format!("{organisation}/{name}"), revision, file })
    }

    /// The name of the model, or of the folder of models.
    pub(crate) fn name(&self) -> String {
        let of_path = |url: &Url| {
            let last = url.path_segments().and_then(|mut parts| parts.rfind(|part| !part.is_empty()));
            stem(last.or_else(|| url.host_str()).unwrap_or_default()).to_owned()
        };
        derived_name(&match self {
            Address::Hub { repository, .. } => repository.rsplit('/').next().unwrap_or_default().to_owned(),
            Address::Store(url) | Address::Web(url) => of_path(url),
        })
    }
}

/// The address after `hf://` for a page of the hub: `ORG/NAME/blob/REVISION/PATH` and like.
fn of_page(path: &str) -> Option<String> {
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    match parts[..] {
        [organisation, name] => Some(format!("{organisation}/{name}")),
        [organisation, name, "tree", revision] => Some(format!("{organisation}/{name}@{revision}")),
        [organisation, name, "blob" | "resolve", revision, ..] if parts.len() > 4 => {
            Some(format!("{organisation}/{name}@{revision}/{}", parts[4..].join("/")))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(text: &str) -> Option<(String, String, Option<String>)> {
        match Address::parse(text, HUB) {
            Ok(Address::Hub { repository, revision, file }) => Some((repository, revision, file)),
            _ => None,
        }
    }

    #[test]
    fn a_hub_address_has_a_repository_a_revision_and_a_file() {
        let of = |repository: &str, revision: &str, file: Option<&str>| {
            Some((repository.to_owned(), revision.to_owned(), file.map(str::to_owned)))
        };
        assert_eq!(hub("hf://org/net"), of("org/net", "main", None));
        assert_eq!(hub("hf://org/net@v1.0/onnx/a.onnx"), of("org/net", "v1.0", Some("onnx/a.onnx")));
        assert_eq!(hub("hf://org/net@refs%2Fpr%2F1"), of("org/net", "refs/pr/1", None));
        for page in ["", "/", "/tree/main", "?library=onnx"] {
            assert_eq!(hub(&format!("{HUB}/org/net{page}")), of("org/net", "main", None), "{page}");
        }
        let page = format!("{HUB}/org/net/blob/main/onnx/model.onnx");
        assert_eq!(hub(&page), of("org/net", "main", Some("onnx/model.onnx")));
    }

    #[test]
    fn wrong_addresses_are_told_how_to_be() {
        for (text, part) in [
            ("hf://net", "hf://ORGANISATION/NAME"),
            ("hf://org/net@", "revision after '@' is missing"),
            ("hf://../net", "characters that no repository has"),
            ("hf://org/net/weights.bin", "does not end in .onnx"),
            ("https://host/model", "a file that ends in .onnx"),
            ("s3:///models", "name of a bucket"),
            ("ftp://host/a.onnx", "known are hf, s3, gs, az, https"),
        ] {
            let error = Address::parse(text, HUB).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn names_follow_from_addresses() {
        for (text, name) in [
            ("hf://org/net@v1/onnx/a.onnx", "net"),
            ("s3://bucket/models/cats/", "cats"),
            ("s3://bucket", "bucket"),
            ("gs://bucket/a/resnet50.onnx", "resnet50"),
            ("https://host/a%20b/Cat.ONNX?sig=x", "Cat"),
            ("https://host/my%20net.onnx", "my_20net"),
        ] {
            assert_eq!(Address::parse(text, HUB).unwrap().name(), name, "{text}");
        }
    }
}
