//! Tests of the load generator: its random processes, its accounting against servers that
//! misbehave, its search and its reports.

mod arrivals;
mod capacity;
mod command;
mod grpc;
mod http;
mod report;
mod response;
mod servers;
#[path = "../../examples/support/service.rs"]
mod service;
mod tensors;
