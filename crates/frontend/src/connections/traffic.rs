//! Counts connections, answers and bytes of a process's ports, for its metrics.
//!
//! Requests only add to the count of their answer's code. Bytes and connections are read from the
//! connections' own counts at each scrape.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use downbeat_service::metric_table;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;

use super::open::Connections;
use super::protocol::Protocol;

/// HTTP has codes from 100 to 599, and gRPC from 0 to 16. Each code has a count.
const CODES: usize = 500;
/// HTTP's lowest code.
const FIRST_OF_HTTP: u16 = 100;

/// Answers, connections and bytes of one protocol's ports since the start.
#[derive(Debug)]
pub(crate) struct Traffic {
    /// Answers by code, from the protocol's lowest code on.
    answers: [AtomicU64; CODES],
    /// Connections that were taken in.
    pub(super) accepted: AtomicU64,
    /// Connections that were refused.
    pub(super) refused: AtomicU64,
    /// Bytes read on connections that have ended.
    pub(super) received: AtomicU64,
    /// Bytes written on connections that have ended.
    pub(super) sent: AtomicU64,
}

impl Default for Traffic {
    fn default() -> Self {
        let [accepted, refused, received, sent] = Default::default();
        Traffic { answers: [const { AtomicU64::new(0) }; CODES], accepted, refused, received, sent }
    }
}

impl Traffic {
    /// Counts an answer over HTTP.
    pub fn count_http(&self, status: http::StatusCode) {
        self.count(status.as_u16().saturating_sub(FIRST_OF_HTTP));
    }

    /// Counts an answer over gRPC. An error without messages has its code in the headers; all other
    /// answers begin well.
    pub fn count_grpc(&self, headers: &http::HeaderMap) {
        let code = headers.get("grpc-status").and_then(|code| code.to_str().ok()?.parse().ok());
        self.count(code.unwrap_or(0));
    }

    fn count(&self, place: u16) {
        if let Some(count) = self.answers.get(usize::from(place)) {
            count.fetch_add(1, Relaxed);
        }
    }

    /// The codes that were sent, and how often.
    fn codes(&self, protocol: Protocol) -> impl Iterator<Item = (String, u64)> {
        let first = if protocol == Protocol::Http { usize::from(FIRST_OF_HTTP) } else { 0 };
        let counts = self.answers.iter().map(|count| count.load(Relaxed));
        (first..).zip(counts).filter(|(_, count)| *count > 0).map(|(code, count)| (code.to_string(), count))
    }
}

metric_table! {
    /// The metrics of ports.
    struct Table {
        open: IntGaugeVec["protocol"], "downbeat_connections", "Open connections of clients";
        accepted: IntCounterVec["protocol"], "downbeat_connections_accepted_total", "Connections of clients that were taken in";
        refused: IntCounterVec["protocol"], "downbeat_connections_refused_total", "Connections refused because there, or at their address, were as many as may be";
        answers: IntCounterVec["protocol", "code"], "downbeat_answers_total",
            "Answers by code: the status of HTTP, or the code of gRPC. A stream of gRPC counts with the code with which it begins";
        received: IntCounterVec["protocol"], "downbeat_received_bytes_total", "Bytes that clients sent, as the network moved them";
        sent: IntCounterVec["protocol"], "downbeat_sent_bytes_total", "Bytes that clients were sent, as the network moved them";
    }
}

/// The metrics of the connections of a process's ports. Reads their counts at each scrape.
pub(crate) struct TrafficMetrics {
    connections: Connections,
    table: Table,
}

impl TrafficMetrics {
    /// Adds the metrics of these connections to a registry.
    ///
    /// # Errors
    /// If the registry has such metrics already: a defect.
    pub fn register(registry: &prometheus::Registry, connections: &Connections) -> Result<(), prometheus::Error> {
        // A registry of its own makes the table; the collector hands the table on.
        let table = Table::register(&prometheus::Registry::new())?;
        registry.register(Box::new(TrafficMetrics { connections: connections.clone(), table }))
    }

    fn parts(&self) -> [&dyn Collector; 6] {
        let Table { open, accepted, refused, answers, received, sent } = &self.table;
        [open, accepted, refused, answers, received, sent]
    }
}

impl Collector for TrafficMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.parts().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for protocol in [Protocol::Http, Protocol::Grpc] {
            let labels = [protocol.name()];
            let (traffic, now) = (self.connections.traffic(protocol), self.connections.open_now(protocol));
            self.table.open.with_label_values(&labels).set(i64::try_from(now.connections).unwrap_or(i64::MAX));
            for (counter, count) in [
                (&self.table.accepted, traffic.accepted.load(Relaxed)),
                (&self.table.refused, traffic.refused.load(Relaxed)),
                (&self.table.received, traffic.received.load(Relaxed) + now.received),
                (&self.table.sent, traffic.sent.load(Relaxed) + now.sent),
            ] {
                let counter = counter.with_label_values(&labels);
                // A connection that ends meanwhile is counted in neither sum for a moment.
                counter.inc_by(count.saturating_sub(counter.get()));
            }
            for (code, count) in traffic.codes(protocol) {
                let counter = self.table.answers.with_label_values(&[protocol.name(), &code]);
                counter.inc_by(count.saturating_sub(counter.get()));
            }
        }
        self.parts().into_iter().flat_map(Collector::collect).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_by_their_protocols_codes() {
        let (http, grpc) = (Traffic::default(), Traffic::default());
        for status in [200, 200, 503, 599, 600, 999] {
            http.count_http(http::StatusCode::from_u16(status).unwrap());
        }
        let mut failed = http::HeaderMap::new();
        failed.insert("grpc-status", http::HeaderValue::from_static("14"));
        grpc.count_grpc(&failed);
        grpc.count_grpc(&http::HeaderMap::new());
        let told = |traffic: &Traffic, protocol| traffic.codes(protocol).collect::<Vec<_>>();
        let codes = |codes: &[(&str, u64)]| codes.iter().map(|(code, n)| ((*code).to_owned(), *n)).collect::<Vec<_>>();
        assert_eq!(told(&http, Protocol::Http), codes(&[("200", 2), ("503", 1), ("599", 1)]));
        assert_eq!(told(&grpc, Protocol::Grpc), codes(&[("0", 1), ("14", 1)]));
    }
}
