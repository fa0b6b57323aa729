//! The options of a server: their table, their sources, their checks.

pub(crate) mod device_groups;
pub(crate) mod draft;
pub(crate) mod forms;
pub(crate) mod key;
pub(crate) mod keys;
pub(crate) mod options_file;
#[cfg_attr(not(feature = "remote"), path = "remote_models/absent.rs")]
pub(crate) mod remote_models;
pub(crate) mod resolve;
pub(crate) mod serve_flags;
pub(crate) mod trace_config;
pub(crate) mod triton_flags;
pub mod units;
