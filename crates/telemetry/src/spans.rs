//! A traced request as spans of OpenTelemetry.
//!
//! ```text
//! infer MODEL ┬ receive
//!             ├ queue   why the batch left, or why the request was dropped
//!             ├ input
//!             ├ infer   a link to the span of the batch
//!             ├ output
//!             ├ step MODEL ─ queue, input, infer, output   (of an ensemble)
//!             └ send
//! ```

use std::borrow::Cow;
use std::sync::LazyLock;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use downbeat_core::Time;
use downbeat_service::traces::context::SpanPlace;
use downbeat_service::traces::record::{Outcome, Part, Run, TraceRecord, Wire};
use opentelemetry::trace::{Link, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

static SCOPE: LazyLock<InstrumentationScope> =
    LazyLock::new(|| InstrumentationScope::builder("downbeat").with_version(env!("CARGO_PKG_VERSION")).build());

/// The spans of a request, and of its batches that no request before it had.
pub fn spans(record: &TraceRecord) -> Vec<SpanData> {
    let mut spans = Spans { record, next: 0, done: Vec::new() };
    spans.root();
    let root = record.place;
    if let Some(received) = record.received {
        spans.child(root, "receive", (record.began, received));
    }
    for (place, part) in record.parts.iter().enumerate() {
        let above = if place == 0 { root } else { spans.step(root, part) };
        spans.part(above, part);
    }
    if let Some(answered) = record.answered {
        spans.child(root, "send", (answered, record.ended));
    }
    spans.done
}

struct Spans<'a> {
    record: &'a TraceRecord,
    /// Children so far.
    next: u64,
    done: Vec<SpanData>,
}

fn context(place: SpanPlace) -> SpanContext {
    let (trace, span) = (TraceId::from_bytes(place.trace.0), SpanId::from_bytes(place.span.to_be_bytes()));
    SpanContext::new(trace, span, TraceFlags::SAMPLED, false, TraceState::default())
}

fn link(place: SpanPlace) -> Link {
    Link::new(context(place), Vec::new(), 0)
}

fn number(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}

impl Spans<'_> {
    fn at(&self, time: Time) -> SystemTime {
        UNIX_EPOCH + Duration::from_nanos(self.record.unix_ns(time))
    }

    fn span(&self, place: SpanPlace, parent: u64, name: Cow<'static, str>, (start, end): (Time, Time)) -> SpanData {
        SpanData {
            span_context: context(place),
            parent_span_id: SpanId::from_bytes(parent.to_be_bytes()),
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name,
            start_time: self.at(start),
            end_time: self.at(end.max(start)),
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: SCOPE.clone(),
        }
    }

    /// The span of the whole request.
    fn root(&mut self) {
        let record = self.record;
        let name = format!("infer {}", record.model).into();
        let mut span = self.span(record.place, record.parent, name, (record.began, record.ended));
        (span.span_kind, span.parent_span_is_remote) = (SpanKind::Server, record.parent != 0);
        let (protocol, status_name) = match record.wire {
            Wire::Http => ("http", "http.response.status_code"),
            Wire::Grpc => ("grpc", "rpc.grpc.status_code"),
        };
        let attributes = &mut span.attributes;
        attributes.push(KeyValue::new("network.protocol.name", protocol));
        attributes.push(KeyValue::new("downbeat.model", record.model.clone()));
        if let Some(part) = record.parts.first() {
            attributes.push(KeyValue::new("downbeat.version", part.model.1.clone()));
        }
        if !record.id.is_empty() {
            attributes.push(KeyValue::new("downbeat.request.id", record.id.clone()));
        }
        if let Some(address) = record.client.address() {
            attributes.push(KeyValue::new("client.address", address.to_string()));
        }
        match &record.outcome {
            Outcome::Answered(status) => attributes.push(KeyValue::new(status_name, i64::from(*status))),
            Outcome::Failed(status, error) => {
                attributes.push(KeyValue::new(status_name, i64::from(*status)));
                span.status = Status::error(error.clone());
            }
            Outcome::Cancelled => span.status = Status::error("the client went away"),
        }
        self.done.push(span);
    }

    /// The place of the next span below `above`.
    fn below(&mut self, above: SpanPlace) -> SpanPlace {
        self.next += 1;
        let span = self.record.place.span.wrapping_add(self.next.wrapping_mul(0x9e37_79b9_7f4a_7c15)).max(1);
        SpanPlace { span, ..above }
    }

    fn child(&mut self, above: SpanPlace, name: &'static str, times: (Time, Time)) -> &mut SpanData {
        let place = self.below(above);
        let span = self.span(place, above.span, name.into(), times);
        self.done.push(span);
        let last = self.done.len() - 1;
        &mut self.done[last]
    }

    /// The span of an ensemble's step.
    fn step(&mut self, above: SpanPlace, part: &Part) -> SpanPlace {
        let place = self.below(above);
        let name = format!("step {}", part.model.0).into();
        let mut span = self.span(place, above.span, name, (part.began, part.ended.unwrap_or(self.record.ended)));
        span.attributes.push(KeyValue::new("downbeat.model", part.model.0.clone()));
        span.attributes.push(KeyValue::new("downbeat.version", part.model.1.clone()));
        self.done.push(span);
        place
    }

    /// The spans of the request to one model.
    fn part(&mut self, above: SpanPlace, part: &Part) {
        let began = part.run.as_ref().map(|run| run.began).or(part.unanswered.and(part.ended));
        // An ensemble has no queue of its own, and a request that was cancelled has no end.
        if let Some(began) = began {
            let queue = self.child(above, "queue", (part.began, began));
            if let Some(left) = part.left {
                queue.attributes.extend([
                    KeyValue::new("downbeat.batch.reason", left.reason.bound.name()),
                    KeyValue::new("downbeat.batch.items_left", i64::from(left.reason.left)),
                    KeyValue::new("downbeat.batch.expected_us", number(left.expected.as_nanos() / 1000)),
                ]);
            }
            if let Some(reason) = part.unanswered {
                queue.attributes.push(KeyValue::new("downbeat.not_answered.reason", reason.label()));
                queue.status = Status::error(reason.label());
            }
        }
        if let Some(run) = &part.run {
            self.run(above, part, run);
        }
    }

    fn run(&mut self, above: SpanPlace, part: &Part, run: &Run) {
        let [joined, ran] = run.between();
        self.child(above, "input", (run.began, joined));
        let batch = &run.batch;
        let attributes = [
            KeyValue::new("downbeat.batch.requests", number(batch.requests)),
            KeyValue::new("downbeat.batch.items", i64::from(batch.rows)),
        ];
        let infer = self.child(above, "infer", (joined, ran));
        infer.attributes.extend(attributes.clone());
        infer.links.links.push(link(batch.place));
        self.child(above, "output", (ran, run.ended));
        if !batch.is_told.swap(true, Relaxed) {
            let name = format!("batch {}", part.model.0).into();
            let mut span = self.span(batch.place, 0, name, (run.began, run.ended));
            span.attributes.push(KeyValue::new("downbeat.model", part.model.0.clone()));
            span.attributes.push(KeyValue::new("downbeat.version", part.model.1.clone()));
            span.attributes.extend(attributes);
            span.links.links.extend(batch.members.iter().map(|member| link(*member)));
            self.done.push(span);
        }
    }
}
