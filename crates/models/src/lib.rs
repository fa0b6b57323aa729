//! Models of the server: registry, loading, measuring, serving.

pub mod load;
pub mod loaded_version;
pub mod measure;
mod partitions;
mod policy_guard;
pub mod preprocess;
pub mod registry;
pub mod serving;
