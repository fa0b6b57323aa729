//! Models: from a folder in the repository to answers of a version in service.
//!
//! | module | has |
//! |---|---|
//! | [`registry`] | the life cycle of models: loads, unloads, and the state of each |
//! | [`load`] | a load step by step: engine, trial, policy, warm-up |
//! | [`measure`] | measures latencies, and stores the profiles |
//! | [`loaded_version`] | a version in service |
//! | [`serving`] | the way of a request to a version and back |
//! | [`preprocess`] | pictures and texts to a model's inputs |
//!
//! No request waits for a load.

mod calls;
pub mod load;
pub mod loaded_version;
pub mod measure;
mod partitions;
mod policy_guard;
pub mod preprocess;
pub mod registry;
pub mod serving;
