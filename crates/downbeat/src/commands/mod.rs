//! The commands of `downbeat` that neither serve, nor profile, nor offer load.

pub(crate) mod config_check;
pub(crate) mod device_advice_command;
pub(crate) mod engine_command;
pub(crate) mod import;
pub(crate) mod infer;
pub(crate) mod key_command;
pub(crate) mod log_command;
pub(crate) mod manual;
pub(crate) mod plan_command;
pub(crate) mod plan_report;
pub mod simulate;
pub(crate) mod timeline_command;
pub(crate) mod timeline_requests;
pub(crate) mod top;
pub(crate) mod what_if_command;
