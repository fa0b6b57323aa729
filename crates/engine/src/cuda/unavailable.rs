//! Why no GPU can be used: one line for each reason, with what to do.

use crate::onnxruntime::FindError;

/// Why no GPU can be used: what is wrong or missing, and what to do.
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

    /// The same without what to do, for who does it.
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
