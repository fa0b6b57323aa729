//! The writer of spans: it sends them by OTLP over HTTP, in the form of protobuf.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use downbeat_service::traces::record::TraceRecord;
use downbeat_service::traces::writing::{self, Writes};
use downbeat_service::traces::{Traces, Writer};
use opentelemetry::KeyValue;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanExporter as _;
use tokio::runtime::{Builder, Runtime};

use crate::spans::spans;

/// The variable with the service's name in spans, which OpenTelemetry defines.
const SERVICE_NAME: &str = "OTEL_SERVICE_NAME";
/// The path at which a collector takes spans.
const PATH: &str = "/v1/traces";
/// A collector that keeps silent for longer gets no spans of that batch.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// Starts the thread that sends spans to the collector at `address`.
///
/// # Errors
/// If the address is no address of HTTP, or the operating system has no thread left.
pub fn start(traces: &Arc<Traces>, service: &str, address: &str) -> anyhow::Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let endpoint = endpoint(address);
    // rustls must be told the provider of its algorithms. The program has ring alone.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().timeout(ANSWERS_WITHIN).build()?;
    let mut exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(&endpoint)
        .with_timeout(ANSWERS_WITHIN)
        .build()
        .with_context(|| format!("'{address}' is no address; expected one such as http://localhost:4318"))?;
    exporter.set_resource(&resource(service));
    tracing::info!(endpoint = without_secret(&endpoint), "the server sends spans of traced requests");
    writing::start(traces, Writer::Otlp, Collector { runtime, exporter })?;
    Ok(())
}

/// The whole address: a bare host gets a scheme, and an address without a path gets OTLP's.
fn endpoint(address: &str) -> String {
    let whole = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let host = whole.split_once("://").map_or("", |(_, rest)| rest);
    match host.trim_end_matches('/').contains('/') {
        true => whole,
        false => format!("{}{PATH}", whole.trim_end_matches('/')),
    }
}

/// An address without the user and password that it may have.
fn without_secret(address: &str) -> String {
    match address.split_once("://").map(|(scheme, rest)| (scheme, rest.split_once('@'))) {
        Some((scheme, Some((_, host)))) => format!("{scheme}://{host}"),
        _ => address.to_owned(),
    }
}

/// The attributes of this server, also those that OpenTelemetry's variables name.
fn resource(service: &str) -> Resource {
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let resource = Resource::builder().with_attribute(version);
    match std::env::var_os(SERVICE_NAME) {
        Some(_) => resource.build(),
        None => resource.with_service_name(service.to_owned()).build(),
    }
}

/// A collector of spans.
struct Collector {
    runtime: Runtime,
    exporter: SpanExporter,
}

impl Writes for Collector {
    fn write(&mut self, records: &[Arc<TraceRecord>]) -> Result<(), String> {
        let spans: Vec<_> = records.iter().flat_map(|record| spans(record)).collect();
        if spans.is_empty() {
            return Ok(());
        }
        let export = self.exporter.export(spans);
        self.runtime.block_on(export).map_err(|error| format!("the collector takes no spans: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_gets_the_parts_that_it_lacks() {
        for (given, whole) in [
            ("localhost:4318", "http://localhost:4318/v1/traces"),
            ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
            ("https://collector/v1/traces", "https://collector/v1/traces"),
            ("https://api.example.com/otlp/mine", "https://api.example.com/otlp/mine"),
        ] {
            assert_eq!(endpoint(given), whole);
        }
        assert_eq!(without_secret("https://me:secret@host/v1/traces"), "https://host/v1/traces");
    }
}
