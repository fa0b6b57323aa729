//! The model repository: its layout, `config.pbtxt`, and the definitions of models.
//!
//! [`ModelRepository::definition`] reads a model's folder, and [`ModelDefinition::complete`] adds
//! the facts of the model file. This crate loads no model. It reads nothing outside the
//! repository's folder, unless [`ModelRepository::with_follow_symlinks`] lets symbolic links lead
//! out.
//!
//! A `config.pbtxt` is read with Triton's own schema. These `parameters` (strings, as all
//! parameters) have a meaning here; others are kept for clients to read:
//!
//! | parameter | meaning |
//! |---|---|
//! | `slo_ms` | the model's SLO: milliseconds from arrival to answer, queueing included |
//! | `scheduler` | its dispatch policy: `adaptive`, `consolidating`, `eager`, `deferred`, `timeout`, `latest` or `route` ([`policy::DispatchPolicy`]) |
//! | `device_policy` | the policy that makes its batches on a device: a name of the table of device policies ([`policy::PolicyName`]) |
//! | `drop` | its drop policy: `adaptive`, `window`, `head` or `none` ([`policy::DropPolicy`]) |
//! | `run_once` | `true`: in a cluster, a request that may have run on a lost backend does not run again |
//! | `pixel_scale`, `pixel_offset` | for `downbeat infer`: an 8-bit sample `s` of a picture is sent as `s * scale + offset` |

mod batching;
mod binding;
mod boundary;
mod check;
mod completion;
mod config_source;
mod definition;
mod field_index;
mod finding;
mod model_files;
pub mod names;
mod parameters;
pub mod policy;
mod repositories;
mod repository;
mod row_verdict;
mod version_folder;
mod warmup;

pub use batching::{Batching, Level};
pub use binding::TensorBinding;
pub use definition::{ModelDefinition, ModelFormat};
pub use downbeat_core::UnknownName;
pub use finding::{ConfigError, Finding, Position, did_you_mean, nearest};
pub use repositories::ModelRepositories;
pub use repository::{CONFIG_FILE, Fingerprint, ModelRepository, RepositoryError, Scan};
pub use row_verdict::{RowDependence, RowVerdict, VerdictSource};
pub use warmup::{Warmup, WarmupData, WarmupInput};
