//! The gRPC frontend with a real client over loopback.

mod bad_input;
mod budget;
mod infer;
mod management;
mod server;
mod shutdown;
mod slow;
mod stream;
