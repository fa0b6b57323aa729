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
}

impl RunError {
    /// A failure of this batch.
    pub fn new(engine: &'static str, reason: impl Into<String>) -> RunError {
        RunError { engine, reason: reason.into(), of_device: false, of_executor: false }
    }
}
