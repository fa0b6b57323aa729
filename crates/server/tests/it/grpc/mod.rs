//! The gRPC frontend with a real client over loopback.

mod bad_input;
mod infer;
mod management;
mod server;
mod shutdown;
mod stream;
