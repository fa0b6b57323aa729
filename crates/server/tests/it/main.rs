//! The frontends, over real sockets.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod classification;
mod grpc;
mod shared_memory;
mod support;
