//! Frontends, drivers (the only clock), model life cycle, metrics.

pub mod autoscale;
pub mod call;
pub mod clock;
pub mod decision_log;
mod device_options;
pub mod driver;
mod engine_run;
mod engines;
pub mod error;
pub mod executable;
pub mod extension;
pub mod grpc;
mod handoff;
pub mod http;
pub mod lanes;
pub mod loader;
pub mod logging;
pub mod metrics;
mod metrics_port;
pub mod mix_profiler;
pub mod options;
pub mod pair_profiler;
pub mod plan;
pub mod profiler;
pub mod refiner;
pub mod registry;
pub mod segment_profiler;
mod serve;
pub mod service;
pub mod serving;
pub mod share_profiler;
pub mod shared_memory;
pub mod statistics;
mod ticket;
mod warm_up;

pub use serve::serve;
