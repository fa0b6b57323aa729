//! Integration tests of the supplies of models, against servers in this process.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod bad_servers;
mod hub;
mod processes;
mod server;
mod sources;
