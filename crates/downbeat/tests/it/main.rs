//! Integration tests of the `downbeat` command.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod cluster;
mod cluster_etcd;
mod cluster_layout;
mod cluster_trust;
mod cluster_ucx;
mod command_line;
mod config_check;
mod ending;
mod engine_install;
mod isolation;
mod log_command;
mod logs;
#[allow(dead_code, reason = "the builders of the engine's tests, of which some are used here")]
#[path = "../../../engine/tests/it/model.rs"]
mod model;
#[path = "../../../sim/tests/it/pipeline_log.rs"]
mod pipeline_log;
mod pipelines;
mod plan;
mod ports;
mod profile;
mod serve;
mod simulate;
mod strange_servers;
mod untrusted;
mod web_pages;
mod what_if;
