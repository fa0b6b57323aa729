//! Traces of requests: which requests are traced, and the marks that they leave on their way.
//!
//! ```text
//! frontend: begin ─▶ marks of frontend, scheduler and device ─▶ frontend drops its hold ─▶ record
//! record ─▶ a bounded queue for each writer (file, OTLP, access log) ─▶ the writer's thread
//! ```
//!
//! While no writer wants requests, a request costs one look at [`Traces::is_on`]. No request waits
//! for a writer: a record that finds its writer's queue full is lost, and counted.

mod access_log;
pub mod context;
pub mod open;
pub mod record;
pub mod settings;
pub mod triton_file;
pub mod writer;
pub mod writing;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use access_log::AccessLog;
use downbeat_core::Time;
use downbeat_protocol::{InferRequest, Parameter};
use parking_lot::Mutex;
use prometheus::core::Collector;
use prometheus::{IntCounterVec, Opts};

use crate::client::Client;
use crate::clock::Clock;
use crate::error::ServiceError;
use crate::options::TraceOptions;
use context::{Numbers, Parent, SpanPlace};
use open::{Marks, OpenTrace, TRACE, Trace};
use record::{TraceRecord, Wire};
use settings::{Change, SettingsTable, TraceChange, TraceSettings};
use triton_file::TritonFiles;
use writer::{Job, Writer};

/// Records that wait for one writer, at most.
const MOST_WAITING: usize = 2048;

/// The traces of a server.
pub struct Traces {
    clock: Clock,
    options: TraceOptions,
    /// Whether a request may be traced.
    is_on: AtomicBool,
    settings: Mutex<SettingsTable>,
    /// The open traces, by number. The requests in flight bound them.
    open: Mutex<HashMap<u64, Arc<Trace>>>,
    next: AtomicU64,
    numbers: Numbers,
    /// Requests that the access log might have.
    accesses: AtomicU64,
    queues: [OnceLock<SyncSender<Job>>; Writer::ALL.len()],
    written: IntCounterVec,
    lost: IntCounterVec,
}

impl std::fmt::Debug for Traces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Traces").field("is_on", &self.is_on).finish_non_exhaustive()
    }
}

impl Traces {
    /// The traces of a server with this clock, without a writer yet.
    ///
    /// # Errors
    /// If a counter cannot be made: a defect.
    pub fn new(clock: Clock, options: &TraceOptions) -> Result<Arc<Traces>, prometheus::Error> {
        let counter = |name: &str, help: &str| IntCounterVec::new(Opts::new(name, help), &["writer"]);
        let start = TraceSettings {
            is_on: options.level.unwrap_or(options.file.is_some() || options.otlp.is_some()),
            rate: options.rate.max(1),
            count: options.count,
            log_frequency: options.log_frequency,
        };
        Ok(Arc::new(Traces {
            clock,
            options: options.clone(),
            is_on: AtomicBool::new(false),
            settings: Mutex::new(SettingsTable::new(start)),
            open: Mutex::default(),
            next: AtomicU64::new(1),
            numbers: Numbers::default(),
            accesses: AtomicU64::new(0),
            queues: Default::default(),
            written: counter("downbeat_traces_written_total", "Traces that a writer has written")?,
            lost: counter(
                "downbeat_traces_lost_total",
                "Traces that are lost: the writer's queue was full, or its file or collector failed",
            )?,
        }))
    }

    /// The traces of a server that never traces.
    pub fn off() -> Arc<Traces> {
        Traces::new(Clock::start(), &TraceOptions::default()).expect("the names of metrics are valid")
    }

    /// The options that the server was started with.
    pub fn options(&self) -> &TraceOptions {
        &self.options
    }

    /// The counters, if the server has a writer.
    pub fn metrics(&self) -> Vec<Box<dyn Collector>> {
        let writers = Writer::ALL.into_iter().filter(|writer| self.has(*writer));
        let labels: Vec<&str> = writers.map(Writer::label).collect();
        if labels.is_empty() {
            return Vec::new();
        }
        // A counter that has counted nothing shows 0.
        for label in labels {
            self.written.with_label_values(&[label]);
            self.lost.with_label_values(&[label]);
        }
        vec![Box::new(self.written.clone()), Box::new(self.lost.clone())]
    }

    /// Attaches a writer. It takes its records from the result. Once for each writer.
    pub fn attach(&self, writer: Writer) -> Receiver<Job> {
        let (queue, records) = sync_channel(MOST_WAITING);
        let was_free = self.queues[writer as usize].set(queue).is_ok();
        assert!(was_free, "a writer is attached once, so that it has all records");
        self.switch(&self.settings.lock());
        records
    }

    /// Starts the writers of files: of Triton's traces, and of the access log.
    ///
    /// # Errors
    /// If a file cannot be made, or the operating system has no thread left.
    pub fn start_files(self: &Arc<Self>) -> anyhow::Result<()> {
        if let Some(path) = &self.options.file {
            writing::start(self, Writer::File, TritonFiles::open(path)?)?;
        }
        if let Some(path) = &self.options.access_log {
            writing::start(self, Writer::Access, AccessLog::open(path)?)?;
        }
        Ok(())
    }

    /// Waits until all writers have written all records.
    pub fn flush(&self) {
        for queue in self.queues.iter().filter_map(OnceLock::get) {
            let (done, is_done) = sync_channel(1);
            // An error: the writer's thread has ended by a panic, which the log has.
            if queue.send(Job::Flush(done)).is_ok() {
                let _ = is_done.recv();
            }
        }
    }

    fn has(&self, writer: Writer) -> bool {
        self.queues[writer as usize].get().is_some()
    }

    /// Whether traces can go anywhere.
    fn has_destination(&self) -> bool {
        self.has(Writer::File) || self.has(Writer::Otlp)
    }

    fn switch(&self, settings: &SettingsTable) {
        let is_on = self.has(Writer::Access) || (self.has_destination() && settings.is_on());
        self.is_on.store(is_on, Relaxed);
    }

    /// Whether a request may be traced now.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    /// The settings of a model, or of the server.
    pub fn settings(&self, model: Option<&str>) -> TraceSettings {
        self.settings.lock().get(model)
    }

    /// Changes the settings of a model, or of the server. Returns them after the change.
    ///
    /// # Errors
    /// `InvalidArgument` if traces are switched on and have no destination.
    pub fn change(&self, model: Option<&str>, change: TraceChange) -> Result<TraceSettings, ServiceError> {
        if change.is_on == Change::Set(true) && !self.has_destination() {
            return Err(ServiceError::InvalidArgument(
                "trace_level cannot be TIMESTAMPS: the server has no destination for traces; start it with \
                 --trace-file FILE or --otlp-endpoint URL"
                    .to_owned(),
            ));
        }
        let mut settings = self.settings.lock();
        settings.change(model, change);
        self.switch(&settings);
        Ok(settings.get(model))
    }

    /// The present time of the server's clock, if a request may be traced.
    pub fn began(&self) -> Option<Time> {
        self.is_on().then(|| self.clock.now())
    }

    /// Begins the trace of a request for `model`, if a writer wants the request. `began`: when the first
    /// byte of the request came; `traceparent`: the value of the header.
    #[cold]
    pub fn begin(
        self: &Arc<Self>,
        (wire, client): (Wire, Client),
        model: &str,
        began: Time,
        traceparent: Option<&str>,
    ) -> Option<OpenTrace> {
        let parent = traceparent.and_then(Parent::of_traceparent);
        let (writers, verdict) = self.writers_for(model, parent);
        if writers == 0 {
            return None;
        }
        let place = SpanPlace {
            trace: parent.map_or_else(|| self.numbers.trace(), |parent| parent.place.trace),
            span: self.numbers.span(),
        };
        let number = self.next_number();
        let trace = Arc::new(Trace {
            traces: self.clone(),
            number,
            writers,
            verdict,
            place,
            parent: parent.map_or(0, |parent| parent.place.span),
            wire,
            client,
            began,
            marks: Mutex::new(Marks { model: model.to_owned(), ..Marks::default() }),
        });
        self.open.lock().insert(number, trace.clone());
        Some(OpenTrace(trace))
    }

    /// The writers that want a request. For spans, the flag of a client's `traceparent` wins over the rate.
    fn writers_for(&self, model: &str, parent: Option<Parent>) -> (u8, Option<settings::Verdict>) {
        let mut writers = 0;
        let mut wants = |writer: Writer, is_wanted: bool| {
            if is_wanted && self.has(writer) {
                writers |= writer.bit();
            }
        };
        let verdict = self.settings.lock().decide(model);
        if let Some(verdict) = &verdict {
            wants(Writer::File, verdict.is_next);
            wants(Writer::Otlp, parent.map_or(verdict.is_next, |parent| parent.is_sampled));
        }
        let rate = u64::from(self.options.access_log_rate.max(1));
        wants(Writer::Access, self.accesses.fetch_add(1, Relaxed).is_multiple_of(rate));
        (writers, verdict)
    }

    /// The trace of a request that a frontend gave to the service. The number of the trace stays among
    /// the request's parameters, for the steps of an ensemble.
    pub fn of(&self, request: &InferRequest) -> Option<Arc<Trace>> {
        if !self.is_on() {
            return None;
        }
        match request.parameters.get(TRACE) {
            Some(Parameter::Uint64(number)) => self.open.lock().get(number).cloned(),
            _ => None,
        }
    }

    /// As [`Traces::of`], and takes the trace out of the parameters: a model does not see it.
    pub fn take(&self, request: &mut InferRequest) -> Option<Arc<Trace>> {
        let trace = self.of(request)?;
        request.parameters.remove(TRACE);
        Some(trace)
    }

    /// Takes a number of a trace out of a request that has none: a client wrote it.
    pub fn unmark(request: &mut InferRequest) {
        request.parameters.remove(TRACE);
    }

    fn close(&self, number: u64) {
        self.open.lock().remove(&number);
    }

    fn next_number(&self) -> u64 {
        self.next.fetch_add(1, Relaxed)
    }

    fn write(&self, writers: u8, record: TraceRecord) {
        let record = Arc::new(record);
        for writer in Writer::ALL.into_iter().filter(|writer| writers & writer.bit() != 0) {
            let Some(queue) = self.queues[writer as usize].get() else { continue };
            if queue.try_send(Job::Record(record.clone())).is_err() {
                self.lost(writer, 1);
            }
        }
    }

    /// Counts traces that a writer has written.
    pub fn written(&self, writer: Writer, traces: u64) {
        self.written.with_label_values(&[writer.label()]).inc_by(traces);
    }

    /// Counts traces that a writer has lost.
    pub fn lost(&self, writer: Writer, traces: u64) {
        self.lost.with_label_values(&[writer.label()]).inc_by(traces);
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::Duration;
    use downbeat_core::journal::requests::Trace as TraceId;

    use super::record::{Batch, Outcome, Part, Run};
    use super::*;
    use crate::metrics::statistics::Phases;

    /// The record of a request for version 3 of a model. The request came at 1 ms, and ran from 4 to 8 ms.
    pub fn record(model: &str) -> TraceRecord {
        let at = |ms| Time::ZERO + Duration::from_millis(ms);
        let place = |span| SpanPlace { trace: TraceId([7; 16]), span };
        let ms = Duration::from_millis;
        let phases = Phases { compute_input: ms(1), compute_infer: ms(2), compute_output: ms(1) };
        let batch = Batch { place: place(9), requests: 4, rows: 8, members: vec![place(1)], is_told: false.into() };
        let run = Run { batch: Arc::new(batch), began: at(4), phases, ended: at(8) };
        let part = Part {
            number: 1,
            parent: None,
            model: (model.to_owned(), "3".to_owned()),
            began: at(2),
            left: None,
            run: Some(run),
            unanswered: None,
            ended: Some(at(8)),
        };
        TraceRecord {
            zero_unix_ns: 0,
            number: 1,
            scope: "".into(),
            log_frequency: 0,
            place: place(1),
            parent: 0,
            wire: Wire::Http,
            client: Client::HERE,
            model: model.to_owned(),
            id: "mine \"7\"".to_owned(),
            began: at(1),
            received: Some(at(2)),
            answered: Some(at(9)),
            ended: at(10),
            outcome: Outcome::Answered(200),
            parts: vec![part],
        }
    }

    fn traces(options: &TraceOptions) -> Arc<Traces> {
        Traces::new(Clock::start(), options).unwrap()
    }

    fn begin(traces: &Arc<Traces>, traceparent: Option<&str>) -> Option<OpenTrace> {
        traces.begin((Wire::Http, Client::HERE), "m", traces.began()?, traceparent)
    }

    const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    const NOT_SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

    #[test]
    fn without_a_destination_traces_stay_off() {
        let traces = traces(&TraceOptions { level: Some(true), ..TraceOptions::default() });
        assert!(!traces.is_on() && begin(&traces, Some(SAMPLED)).is_none() && traces.metrics().is_empty());
        let change = TraceChange { is_on: Change::Set(true), ..TraceChange::default() };
        let error = traces.change(None, change).unwrap_err().to_string();
        assert!(error.contains("--trace-file") && error.contains("--otlp-endpoint"), "{error}");
    }

    #[test]
    fn a_client_that_traces_gets_its_spans_whatever_the_rate_is() {
        let options = TraceOptions { otlp: Some("http://localhost".to_owned()), ..TraceOptions::default() };
        let traces = traces(&options);
        let jobs = traces.attach(Writer::Otlp);
        assert!(begin(&traces, None).is_none(), "one request in 1000 is traced");
        assert!(begin(&traces, Some(NOT_SAMPLED)).is_none());
        let trace = begin(&traces, Some(SAMPLED)).unwrap();
        assert!(
            trace.traceparent().starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-")
                && trace.traceparent().ends_with("-01")
        );
        drop(trace);
        let Ok(Job::Record(record)) = jobs.try_recv() else { panic!("the record goes to its writer") };
        assert_eq!((record.parent, &record.outcome), (0x00f0_67aa_0ba9_02b7, &Outcome::Cancelled));
        assert!(traces.open.lock().is_empty());
    }

    #[test]
    fn a_record_that_finds_the_queue_full_is_lost_and_counted() {
        let options = TraceOptions { access_log: Some("-".into()), ..TraceOptions::default() };
        let traces = traces(&options);
        let jobs = traces.attach(Writer::Access);
        for _ in 0..MOST_WAITING + 3 {
            drop(begin(&traces, None).unwrap());
        }
        assert_eq!(traces.lost.with_label_values(&["access_log"]).get(), 3);
        assert_eq!(jobs.try_iter().count(), MOST_WAITING);
    }

    #[test]
    fn the_marks_of_a_request_reach_its_record() {
        let options = TraceOptions { access_log: Some("-".into()), ..TraceOptions::default() };
        let traces = traces(&options);
        let jobs = traces.attach(Writer::Access);
        let open = begin(&traces, None).unwrap();
        let mut request = InferRequest { id: "mine".to_owned(), ..InferRequest::default() };
        open.received(&mut request);
        let trace = traces.take(&mut request).unwrap();
        assert!(request.parameters.is_empty(), "the model does not see the number of the trace");
        let part = trace.part(("m", "1"), false, traces.clock.now()).unwrap();
        open::batch_ran([(&*part, traces.clock.now())].into_iter(), (1, 2), Phases::default(), traces.clock.now());
        open.answered();
        open.outcome(200, None);
        drop(open);
        let Ok(Job::Record(record)) = jobs.try_recv() else { panic!("the record goes to its writer") };
        assert_eq!((record.id.as_str(), &record.outcome), ("mine", &Outcome::Answered(200)));
        assert_eq!(record.parts[0].run.as_ref().unwrap().batch.members, [record.place]);
        assert!(record.began <= record.received.unwrap() && record.received <= record.answered);
    }
}
