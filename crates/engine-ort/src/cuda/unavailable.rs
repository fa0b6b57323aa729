//! The reasons why no GPU can be used: one line for each reason, with its remedy.

use crate::library::FindError;

/// The reason why no GPU can be used: the fault or the missing part, and the remedy.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what}{advice}")]
pub struct CudaUnavailable {
    what: String,
    advice: String,
}

impl CudaUnavailable {
    pub(crate) fn new(what: impl Into<String>, advice: impl std::fmt::Display) -> CudaUnavailable {
        CudaUnavailable { what: what.into(), advice: format!(". {advice}") }
    }

    /// The reason without the remedy, for code that applies the remedy itself.
    pub(crate) fn what(&self) -> &str {
        &self.what
    }
}

/// The library does not start, or another one has been loaded by this process.
impl From<FindError> for CudaUnavailable {
    fn from(error: FindError) -> CudaUnavailable {
        CudaUnavailable { what: error.to_string(), advice: String::new() }
    }
}
