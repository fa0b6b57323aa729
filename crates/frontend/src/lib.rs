//! Frontends for clients: HTTP, gRPC, and the connections under both.
//!
//! | module | has |
//! |---|---|
//! | [`connections`] | accepts connections, bounds them, and ends them |
//! | [`http`], [`grpc`] | the protocol on its two wires |
//! | [`extension`], [`shared_memory`] | classification, and tensors in memory that client and server share |
//! | [`own_file`], [`reloaded`], [`tls`] | files of secrets; values that follow their files; certificates |
//! | [`ports`], [`metrics_port`] | the ports of a process, and the port for scrapes and probes |
//!
//! A frontend reaches models only through the trait [`Service`](downbeat_service::service::Service).

pub mod access;
mod compression;
pub mod connections;
pub mod extension;
pub mod grpc;
mod health_port;
pub mod http;
pub mod liveness;
pub mod metrics_port;
pub mod own_file;
pub mod ports;
pub mod reloaded;
mod settings;
pub mod shared_memory;
pub mod tls;
mod trace;
