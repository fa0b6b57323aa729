//! The parts of a path that name something.

use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use percent_encoding::percent_decode_str;

use super::answer::HttpError;

/// `{model}` and `{version}`; the version is empty if the path has none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ModelPath {
    pub model: String,
    pub version: String,
}

impl ModelPath {
    /// The model of `POST /v2/models/{model}[/versions/{version}]/infer`; `None` if the request is
    /// another, or its path needs the router's error message.
    pub fn of_inference(method: &Method, path: &str) -> Option<ModelPath> {
        if method != Method::POST {
            return None;
        }
        let name = path.strip_prefix("/v2/models/")?.strip_suffix("/infer")?;
        let (model, version) = match name.find('/').and_then(|end| name.split_at_checked(end)) {
            Some((model, rest)) => (model, Some(rest.strip_prefix("/versions/")?)),
            None => (name, None),
        };
        if model.is_empty() || version.is_some_and(|version| version.is_empty() || version.contains('/')) {
            return None;
        }
        let version = version.unwrap_or_default();
        Some(ModelPath { model: decode(model)?, version: decode(version)? })
    }
}

/// `{region}`; empty if the path has none, which means all.
pub(super) struct RegionPath {
    pub name: String,
}

impl RegionPath {
    pub fn region(&self) -> Option<&str> {
        Some(self.name.as_str()).filter(|name| !name.is_empty())
    }
}

fn decode(text: &str) -> Option<String> {
    if !text.contains('%') {
        return Some(text.to_owned());
    }
    percent_decode_str(text).decode_utf8().ok().map(|text| text.into_owned())
}

impl<S: Send + Sync> FromRequestParts<S> for ModelPath {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        let parameters = raw(parts, state).await?;
        Ok(ModelPath { model: named(&parameters, "model"), version: named(&parameters, "version") })
    }
}

impl<S: Send + Sync> FromRequestParts<S> for RegionPath {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        Ok(RegionPath { name: named(&raw(parts, state).await?, "region") })
    }
}

/// The value of `{key}`; empty if the path has no such part.
fn named(parameters: &RawPathParams, key: &str) -> String {
    parameters.iter().find(|(name, _)| *name == key).map_or(String::new(), |(_, value)| value.to_owned())
}

async fn raw<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<RawPathParams, HttpError> {
    RawPathParams::from_request_parts(parts, state)
        .await
        .map_err(|e| HttpError::new(StatusCode::BAD_REQUEST, format!("the path {}: {e}", parts.uri.path())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inference(path: &str) -> Option<(String, String)> {
        ModelPath::of_inference(&Method::POST, path).map(|p| (p.model, p.version))
    }

    #[test]
    fn the_path_of_an_inference_names_model_and_version() {
        let named = |model: &str, version: &str| Some((model.to_owned(), version.to_owned()));
        assert_eq!(inference("/v2/models/m/infer"), named("m", ""));
        assert_eq!(inference("/v2/models/m/versions/3/infer"), named("m", "3"));
        assert_eq!(inference("/v2/models/a%20b%2Fc/infer"), named("a b/c", ""));
        assert_eq!(inference("/v2/models/infer/infer"), named("infer", ""));
        for other in [
            "/v2/models/infer",
            "/v2/models//infer",
            "/v2/models/m/versions//infer",
            "/v2/models/m/x/infer",
            "/v2/models/m/versions/1/2/infer",
            "/v2/models/%FF/infer",
            "/v2/models/m/infer/",
        ] {
            assert_eq!(inference(other), None, "{other}");
        }
        assert_eq!(ModelPath::of_inference(&Method::GET, "/v2/models/m/infer"), None);
    }
}
