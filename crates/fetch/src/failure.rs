//! Why models could not be brought.

use std::io;
use std::path::{Path, PathBuf};

/// Why models could not be brought. Each message names the fault and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The address is none that can be read.
    #[error("{0}")]
    Address(String),
    /// The server of the models does not answer, or cannot answer now.
    #[error("{0}")]
    Unreachable(String),
    /// The server refuses the request: credentials are missing, wrong, or not sufficient.
    #[error("{0}")]
    Denied(String),
    /// The server has no such repository, bucket, revision or file.
    #[error("{0}")]
    Missing(String),
    /// The server answers in a way that is not understood.
    #[error("{0}")]
    Answer(String),
    /// A file changed while it was downloaded.
    #[error("{0}: the file changed while it was downloaded")]
    Changed(String),
    /// A file is not the one that was announced.
    #[error("{0}")]
    Checksum(String),
    /// The source has no model that could be served.
    #[error("{0}")]
    NoModel(String),
    /// A path in the listing cannot be a path in the cache.
    #[error("the file '{0}' of the source has a path that no folder of the cache can have")]
    Path(String),
    /// The disk of the cache has not enough space.
    #[error(
        "the models need {needed} more bytes, and {folder} has {free} free; free space there, or choose another folder \
         with --model-cache DIR", folder = .folder.display()
    )]
    NoSpace {
        /// The folder of the cache.
        folder: PathBuf,
        /// Bytes that the downloads need.
        needed: u64,
        /// Bytes that the disk has.
        free: u64,
    },
    /// A file of the cache cannot be read or written.
    #[error("model cache {path}: {1}; choose another folder with --model-cache DIR", path = .0.display())]
    Cache(PathBuf, String),
    /// Models should come from the cache alone, and it does not have all of them.
    #[error("{0}")]
    Offline(String),
}

impl FetchError {
    /// Whether the models in the cache may be served instead: no server called them wrong.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, FetchError::Unreachable(_))
    }

    /// The error of a file or folder of the cache.
    pub(crate) fn cache(path: &Path) -> impl FnOnce(io::Error) -> FetchError {
        move |error| {
            let reason = match error.kind() {
                io::ErrorKind::StorageFull => "the disk is full".to_owned(),
                io::ErrorKind::QuotaExceeded => "the disk quota is used up".to_owned(),
                io::ErrorKind::FileTooLarge => "the file would be larger than the limit of this process".to_owned(),
                _ => error.to_string(),
            };
            FetchError::Cache(path.to_owned(), reason)
        }
    }
}
