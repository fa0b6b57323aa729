//! Writers of traces: their start, and the writer of spans for a collector of OpenTelemetry.
//!
//! The records of traced requests come from [`downbeat_service::traces`]. This crate alone knows
//! OpenTelemetry's libraries, so that no other part of the server waits for their build.

mod otlp;
mod spans;

use std::sync::Arc;

use anyhow::Context;
use downbeat_service::traces::Traces;

/// Starts the writers that the options of `traces` name, and adds their counters to a registry of
/// metrics.
///
/// # Errors
/// If a file cannot be made, the collector's address is none, or the operating system has no thread
/// left.
pub fn start(traces: &Arc<Traces>, service: &str, metrics: &prometheus::Registry) -> anyhow::Result<()> {
    traces.start_files()?;
    if let Some(address) = &traces.options().otlp {
        otlp::start(traces, service, address).context("the collector of spans (--otlp-endpoint)")?;
    }
    for counter in traces.metrics() {
        metrics.register(counter)?;
    }
    Ok(())
}
