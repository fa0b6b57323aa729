//! The writer of spans: it sends them by OTLP over HTTP, in the form of protobuf.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use downbeat_service::traces::record::TraceRecord;
use downbeat_service::traces::writer::{Writer, Writes};
use downbeat_service::traces::{Traces, writing};
use opentelemetry::KeyValue;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanExporter as _;
use reqwest::Url;
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
    let endpoint = endpoint(address).with_context(|| {
        format!("'{address}' is no address of a collector; expected one such as http://localhost:4318")
    })?;
    // rustls must be told the provider of its algorithms. The program has ring alone.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().timeout(ANSWERS_WITHIN).build()?;
    let mut exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(endpoint.as_str())
        .with_timeout(ANSWERS_WITHIN)
        .build()?;
    exporter.set_resource(&resource(service));
    tracing::info!(host = endpoint.host_str(), path = endpoint.path(), "the server sends spans of traced requests");
    writing::start(traces, Writer::Otlp, Collector { runtime: None, exporter })?;
    Ok(())
}

/// The whole address: a bare host gets a scheme, and an address without a path gets OTLP's. `None`: the
/// text is no address of HTTP.
fn endpoint(address: &str) -> Option<Url> {
    let whole = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let mut url = Url::parse(&whole).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())?;
    if url.path() == "/" {
        url.set_path(PATH);
    }
    Some(url)
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
    /// Made in the writer's thread, by the first write: an asynchronous thread must not drop it.
    runtime: Option<Runtime>,
    exporter: SpanExporter,
}

impl Writes for Collector {
    fn write(&mut self, records: &[Arc<TraceRecord>]) -> Result<(), String> {
        let spans: Vec<_> = records.iter().flat_map(|record| spans(record)).collect();
        if spans.is_empty() {
            return Ok(());
        }
        let runtime = match &self.runtime {
            Some(runtime) => runtime,
            None => {
                let made = Builder::new_current_thread().enable_all().build();
                self.runtime.insert(made.map_err(|error| format!("the writer cannot start: {error}"))?)
            }
        };
        let export = self.exporter.export(spans);
        runtime.block_on(export).map_err(|error| format!("the collector takes no spans: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_none_is_an_error_at_the_start() {
        let traces = Traces::off();
        for wrong in ["", "http://", "ftp://host", "ht!tp://host", "http://host:port"] {
            let error = start(&traces, "test", wrong).unwrap_err().to_string();
            assert!(error.contains("expected one such as http://localhost:4318"), "{wrong}: {error}");
        }
    }

    #[test]
    fn an_address_gets_the_parts_that_it_lacks() {
        for (given, whole) in [
            ("localhost:4318", "http://localhost:4318/v1/traces"),
            ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
            ("https://collector/v1/traces", "https://collector/v1/traces"),
            ("https://api.example.com/otlp/mine", "https://api.example.com/otlp/mine"),
        ] {
            assert_eq!(endpoint(given).unwrap().as_str(), whole);
        }
    }
}
