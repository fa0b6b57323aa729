//! The model repository: layout, `config.pbtxt`, and what a model needs to be served.

pub mod names;
pub mod policy;
