//! The files of a source, as its server lists them.

use std::collections::BTreeSet;

use crate::digest::Expected;
use crate::failure::FetchError;

/// Most files of one source.
pub(crate) const MOST_FILES: usize = 10_000;

/// Files up to this size, bytes, come along although no model names them: configurations, labels,
/// vocabularies.
pub(crate) const SMALL: u64 = 16 << 20;

/// A file of a source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RemoteFile {
    /// The path in the snapshot.
    pub(crate) path: String,
    /// The file's name for its server: a path, a key or an address.
    pub(crate) locator: String,
    /// Bytes; `None`: the server does not say.
    pub(crate) size: Option<u64>,
    /// The validator of the content: an ETag, or a time. `None`: the server has none.
    pub(crate) tag: Option<String>,
    /// The announced digest of the content.
    pub(crate) expected: Option<Expected>,
}

/// The files of a source at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listing {
    /// The commit, if the source has revisions.
    pub(crate) revision: Option<String>,
    /// The files to bring.
    pub(crate) files: Vec<RemoteFile>,
    /// The files to bring if a model names them as its external data.
    pub(crate) others: Vec<RemoteFile>,
    /// A line about a choice that was made.
    pub(crate) note: Option<String>,
}

/// Checks that a path of a listing stays in the folder that it is written to.
///
/// # Errors
/// If the path climbs, is absolute, is too long, or has characters that no path should have.
pub(crate) fn check_path(path: &str) -> Result<(), FetchError> {
    let is_name = |part: &str| {
        !matches!(part, "" | "." | "..")
            && part.len() <= 255
            && !part.chars().any(|c| c.is_control() || matches!(c, '\\' | ':'))
    };
    let shown = || path.chars().take(128).flat_map(char::escape_default).collect();
    if path.len() <= 1024 && path.split('/').all(is_name) { Ok(()) } else { Err(FetchError::Path(shown())) }
}

/// Checks that files can lie in one folder: no path twice, and no file where another path has a
/// folder. Markers of folders (objects of zero bytes) are left out.
///
/// # Errors
/// If there are too many files, or two paths exclude each other.
pub(crate) fn check_tree(files: &mut Vec<RemoteFile>) -> Result<(), FetchError> {
    if files.len() > MOST_FILES {
        let message = format!("the source has more than {MOST_FILES} files; give the address of a folder with fewer");
        return Err(FetchError::NoModel(message));
    }
    let mut folders = BTreeSet::new();
    for file in files.iter() {
        check_path(&file.path)?;
        let ends = file.path.match_indices('/').map(|(at, _)| file.path[..at].to_owned());
        folders.extend(ends);
    }
    files.retain(|file| !(file.size == Some(0) && folders.contains(&file.path)));
    let mut seen = BTreeSet::new();
    match files.iter().find(|file| folders.contains(&file.path) || !seen.insert(file.path.as_str())) {
        Some(file) => Err(FetchError::Path(file.path.clone())),
        None => Ok(()),
    }
}

/// The path of external data that the model at `model` names as `location`.
pub(crate) fn beside(model: &str, location: &str) -> String {
    match model.rsplit_once('/') {
        Some((folder, _)) => format!("{folder}/{location}"),
        None => location.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, size: u64) -> RemoteFile {
        RemoteFile { path: path.to_owned(), locator: path.to_owned(), size: Some(size), tag: None, expected: None }
    }

    #[test]
    fn no_path_leads_out_of_the_folder() {
        for path in ["a", "a/b.onnx", "1/model.onnx", "ü/x y"] {
            check_path(path).unwrap();
        }
        let long = "x".repeat(256);
        for path in ["", "/a", "../a", "a/../../b", "a//b", "a/.", "a\\b", "c:x", "a\nb", "a/", &long] {
            assert!(matches!(check_path(path), Err(FetchError::Path(_))), "{path:?}");
        }
    }

    #[test]
    fn files_of_one_tree_do_not_exclude_each_other() {
        let mut files = vec![file("a", 0), file("a/b", 3), file("c", 0)];
        check_tree(&mut files).unwrap();
        assert_eq!(files.iter().map(|f| f.path.as_str()).collect::<Vec<_>>(), ["a/b", "c"], "a marks a folder");
        assert!(check_tree(&mut vec![file("a", 1), file("a/b", 3)]).is_err());
        assert!(check_tree(&mut vec![file("a", 1), file("a", 3)]).is_err());
        assert!(check_tree(&mut (0..=MOST_FILES).map(|n| file(&n.to_string(), 1)).collect()).is_err());
    }
}
