//! Frontends for clients: HTTP, gRPC, connections, shared memory.

mod compression;
pub mod connections;
pub mod extension;
pub mod grpc;
mod health_port;
pub mod http;
pub mod metrics_port;
pub mod ports;
pub mod shared_memory;
