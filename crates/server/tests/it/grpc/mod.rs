//! The gRPC frontend with a real client over loopback.

mod infer;
mod server;
