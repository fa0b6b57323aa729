//! Spans on their way to a collector that speaks OTLP over HTTP.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use downbeat_core::{Duration, Time};
use downbeat_protocol::InferRequest;
use downbeat_service::client::Client;
use downbeat_service::clock::Clock;
use downbeat_service::metrics::statistics::Phases;
use downbeat_service::options::TraceOptions;
use downbeat_service::traces::Traces;
use downbeat_service::traces::open::{OpenTrace, batch_ran};
use downbeat_service::traces::record::Wire;
use downbeat_service::unanswered::Unanswered;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;

const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// Starts a collector that answers with this status. Returns its address, and the spans of each export.
fn collector(status: u16) -> (String, Receiver<Vec<Span>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (sender, spans) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut length = 0;
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                line.clear();
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let request = ExportTraceServiceRequest::decode(&body[..]).unwrap();
            let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
            // The test may be over.
            let _ = sender.send(scopes.flat_map(|scope| scope.spans).collect());
            let answer = format!("HTTP/1.1 {status} Status\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            reader.get_mut().write_all(answer.as_bytes()).unwrap();
        }
    });
    (address, spans)
}

/// Traces whose spans go to a collector, and the metrics.
fn traces(address: &str) -> (Arc<Traces>, prometheus::Registry) {
    let options = TraceOptions { otlp: Some(address.to_owned()), rate: 1, ..TraceOptions::default() };
    let (traces, metrics) = (Traces::new(Clock::start(), &options).unwrap(), prometheus::Registry::new());
    downbeat_telemetry::start(&traces, "test", &metrics).unwrap();
    (traces, metrics)
}

fn begin(traces: &Arc<Traces>, traceparent: Option<&str>) -> OpenTrace {
    let began = traces.began().unwrap();
    traces.begin((Wire::Grpc, Client::HERE), "digits", began, traceparent).unwrap()
}

fn counted(metrics: &prometheus::Registry, name: &str) -> f64 {
    let families = metrics.gather();
    let family = families.iter().find(|family| family.name() == name).unwrap();
    family.get_metric().iter().map(|metric| metric.get_counter().get_value()).sum()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn requests_of_one_batch_link_to_one_span_of_the_batch() {
    let (address, received) = collector(200);
    let (traces, metrics) = traces(&address);
    let open: Vec<OpenTrace> = (0..2).map(|_| begin(&traces, Some(SAMPLED))).collect();
    let at = |ms| Time::ZERO + Duration::from_millis(ms);
    let parts: Vec<_> = open
        .iter()
        .map(|open| {
            let mut request = InferRequest::default();
            open.received(&mut request);
            traces.take(&mut request).unwrap().part(("digits", "1"), false, at(1)).unwrap()
        })
        .collect();
    let ms = Duration::from_millis;
    let phases = Phases { compute_input: ms(1), compute_infer: ms(2), compute_output: ms(1) };
    batch_ran(parts.iter().map(|part| (&**part, at(3))), (3, 4), phases, at(7));
    for open in open {
        open.answered();
        open.outcome(0, None);
    }
    traces.flush();
    let spans: Vec<Span> = received.try_iter().flatten().collect();
    let named = |name: &str| -> Vec<&Span> { spans.iter().filter(|span| span.name == name).collect() };
    let (roots, runs) = (named("infer digits"), named("infer"));
    let [batch] = named("batch digits")[..] else { panic!("{spans:?}") };
    assert_eq!((roots.len(), runs.len(), named("queue").len(), named("output").len()), (2, 2, 2, 2));
    for (root, run) in roots.iter().zip(&runs) {
        assert_eq!(hex(&root.trace_id), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!((hex(&root.parent_span_id), &run.parent_span_id), ("00f067aa0ba902b7".to_owned(), &root.span_id));
        assert_eq!((&run.links[0].trace_id, &run.links[0].span_id), (&batch.trace_id, &batch.span_id));
        assert_eq!(run.end_time_unix_nano - run.start_time_unix_nano, 2_000_000);
    }
    let members: Vec<_> = batch.links.iter().map(|link| &link.span_id).collect();
    assert_eq!(members, roots.iter().map(|root| &root.span_id).collect::<Vec<_>>());
    assert_eq!(counted(&metrics, "downbeat_traces_written_total"), 2.0);
}

#[test]
fn a_request_without_a_result_has_the_reason() {
    let (address, received) = collector(200);
    let (traces, _) = traces(&address);
    let open = begin(&traces, None);
    let mut request = InferRequest::default();
    open.received(&mut request);
    let part = traces.take(&mut request).unwrap().part(("digits", "1"), false, Time::ZERO).unwrap();
    part.failed(Unanswered::Hopeless, Time::ZERO + Duration::from_millis(5));
    open.outcome(4, Some("too late"));
    drop(open);
    traces.flush();
    let spans: Vec<Span> = received.try_iter().flatten().collect();
    let queue = spans.iter().find(|span| span.name == "queue").unwrap();
    assert_eq!(queue.attributes[0].key, "downbeat.not_answered.reason");
    assert_eq!(queue.status.as_ref().unwrap().message, "deadline_hopeless");
    let root = spans.iter().find(|span| span.name == "infer digits").unwrap();
    assert_eq!(root.status.as_ref().unwrap().message, "too late");
}

#[test]
fn traces_that_no_collector_takes_are_lost_and_counted() {
    let (refusing, _spans) = collector(400);
    // The test gave this port back: connections to the port are refused.
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    for address in [refusing, nobody] {
        let (traces, metrics) = traces(&address);
        for _ in 0..3 {
            drop(begin(&traces, None));
        }
        traces.flush();
        assert_eq!(counted(&metrics, "downbeat_traces_lost_total"), 3.0, "{address}");
        assert_eq!(counted(&metrics, "downbeat_traces_written_total"), 0.0, "{address}");
    }
}
