//! The errors of loads and runs.

use std::path::PathBuf;

/// The reason why a model was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error("{path}: {reason}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The fault and its remedy.
        reason: String,
    },
    /// The file is read, but it is not a model that this engine can run.
    #[error("{path}: {engine} cannot run this model: {reason}", path = path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// The engine.
        engine: &'static str,
        /// The fault and its remedy.
        reason: String,
    },
    /// The process that loaded the model has ended.
    #[error("{path}: {engine} cannot run this model: {reason}", path = path.display())]
    Died {
        /// The file.
        path: PathBuf,
        /// The engine.
        engine: &'static str,
        /// The end of the process, in words.
        reason: String,
        /// The number of the signal that ended it.
        signal: Option<i32>,
    },
}

impl LoadError {
    /// The fault and its remedy, without the names of the file and of the engine.
    pub fn into_reason(self) -> String {
        match self {
            LoadError::File { reason, .. } | LoadError::Model { reason, .. } | LoadError::Died { reason, .. } => reason,
        }
    }
}

/// The reason why a run failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{engine}: {reason}")]
pub struct RunError {
    /// The engine.
    pub engine: &'static str,
    /// The engine's own words.
    pub reason: String,
    /// Whether the device has failed, for any batch: it is lost, or out of memory.
    pub of_device: bool,
    /// Whether the executor process has ended, or is not yet up again.
    pub of_executor: bool,
    /// The kind of error that the model itself names; `None`: the model names none.
    pub code: Option<ErrorCode>,
}

/// A kind of error that a model's code names for a request: those of Triton's `TritonError`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are Triton's own")]
pub enum ErrorCode {
    Unknown,
    Internal,
    NotFound,
    InvalidArgument,
    Unavailable,
    Unsupported,
    AlreadyExists,
    Cancelled,
}

impl ErrorCode {
    const ALL: [ErrorCode; 8] = [
        ErrorCode::Unknown,
        ErrorCode::Internal,
        ErrorCode::NotFound,
        ErrorCode::InvalidArgument,
        ErrorCode::Unavailable,
        ErrorCode::Unsupported,
        ErrorCode::AlreadyExists,
        ErrorCode::Cancelled,
    ];

    /// The code of Triton's number (`TRITONSERVER_Error_Code`).
    pub fn of_number(number: u32) -> ErrorCode {
        ErrorCode::ALL.get(number as usize).copied().unwrap_or(ErrorCode::Unknown)
    }
}

impl RunError {
    /// A failure of this batch.
    pub fn new(engine: &'static str, reason: impl Into<String>) -> RunError {
        RunError { engine, reason: reason.into(), of_device: false, of_executor: false, code: None }
    }
}
