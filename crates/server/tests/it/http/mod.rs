//! The HTTP frontend.

mod bad_input;
mod bounded;
mod budget;
mod client;
mod inference;
mod lifecycle;
mod management;

use client::{Reply, Server, json_request};
