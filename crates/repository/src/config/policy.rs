//! The policies for a model's batches, by the names of the tables in `downbeat-core`.

pub use downbeat_core::cluster::{DispatchPolicy, DropPolicy};
pub use downbeat_core::device::PolicyName;
