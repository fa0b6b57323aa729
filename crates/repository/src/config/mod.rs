//! A configuration: its text, its fields, its checks, and the words of its errors.

pub(crate) mod batching;
pub(crate) mod check;
pub(crate) mod config_source;
pub(crate) mod field_index;
pub(crate) mod finding;
pub mod names;
pub(crate) mod parameters;
pub mod policy;
pub(crate) mod warmup;
