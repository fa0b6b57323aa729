//! The model repository: layout, `config.pbtxt`, and what a model needs to be served.
//!
//! [`ModelRepository::definition`] reads a model's folder, [`ModelDefinition::complete`] fills in what only the model
//! file knows. Nothing here loads a model, and nothing outside the repository's folder is read.

mod batching;
mod binding;
mod check;
mod completion;
mod config_source;
mod definition;
mod field_index;
mod finding;
pub mod names;
pub mod policy;
mod repository;
mod warmup;

pub use batching::{Batching, Level, TimeoutAction};
pub use binding::TensorBinding;
pub use definition::{ModelDefinition, ModelFormat};
pub use finding::{ConfigError, Finding, Position, did_you_mean, nearest};
pub use repository::{CONFIG_FILE, Fingerprint, ModelRepository, RepositoryError, Scan};
pub use warmup::{Warmup, WarmupData, WarmupInput};
