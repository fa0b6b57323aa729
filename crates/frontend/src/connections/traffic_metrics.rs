//! The metrics of a process's ports.
//!
//! Requests only add to the count of their answer's code (`traffic.rs`). Bytes and connections are read
//! from the connections' own counts at each scrape.

use std::sync::atomic::Ordering::Relaxed;

use downbeat_service::metric_table;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;

use super::open::Connections;
use super::protocol::Protocol;

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
