//! The model repository: its layout, `config.pbtxt`, and the definitions of models.
//!
//! [`ModelRepository::definition`] reads a model's folder, and [`ModelDefinition::complete`] adds
//! the facts of the model file. This crate loads no model, and knows no network: a [`Supply`] brings
//! models from elsewhere. It reads nothing outside the repository's folder, unless
//! [`ModelRepository::with_follow_symlinks`] lets symbolic links lead out.
//!
//! ```
//! use downbeat_repository::ModelRepository;
//!
//! let repository = ModelRepository::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models"))?;
//! assert_eq!(repository.scan()?.names, ["digits", "encoder", "mlp"]);
//! let mlp = repository.definition("mlp", None)?;
//! assert_eq!(mlp.parameter("slo_ms"), Some("250"));
//! # Ok::<(), downbeat_repository::RepositoryError>(())
//! ```
//!
//! A `config.pbtxt` is read with Triton's own schema. `docs/reference/config_pbtxt.md` lists the
//! fields and parameters that have a meaning here; other parameters are kept for clients to read.

mod binding;
mod boundary;
mod completion;
pub mod config;
mod definition;
mod ensemble;
mod layout;
mod model_files;
mod other_model;
mod repositories;
mod repository;
mod row_verdict;
mod source;
mod version_folder;

pub use binding::TensorBinding;
pub use config::batching::{Batching, Level};
pub use config::finding::{ConfigError, Finding, Position, did_you_mean, nearest};
pub use config::parameters::rollout_terms;
pub use config::warmup::{Warmup, WarmupData, WarmupInput};
pub use definition::{ModelDefinition, ModelFormat};
pub use downbeat_core::UnknownName;
pub use ensemble::wiring::StepModel;
pub use ensemble::{Ensemble, EnsembleStep};
pub use layout::{derived_name, stem};
pub use repositories::ModelRepositories;
pub use repository::{Fingerprint, ModelRepository, RepositoryError, Scan};
pub use row_verdict::{RowDependence, RowVerdict, VerdictSource};
pub use source::{ModelSource, Origin, Supply, SupplyError};
pub use version_folder::{CONFIG_FILE, few, is_onnx_name};
