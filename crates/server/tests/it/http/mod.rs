//! The HTTP frontend.

mod bad_input;
mod bounded;
mod budget;
mod client;
mod generate;
mod inference;
mod lifecycle;
mod management;

use client::{Connection, Reply, Server, json_request};
