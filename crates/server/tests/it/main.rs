//! The frontends, over real sockets.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod grpc;
mod support;
