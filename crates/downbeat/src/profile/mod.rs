//! `downbeat profile`: measurements of models, and their reports.

pub(crate) mod group_report;
pub mod group_samples;
pub(crate) mod mix_report;
pub(crate) mod profile_command;
pub(crate) mod profile_groups;
pub(crate) mod profile_report;
pub(crate) mod profile_shares;
pub mod profiled_model;
pub mod share_report;
pub mod watched;
