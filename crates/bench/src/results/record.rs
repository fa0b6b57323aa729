//! The record of a run's requests.

use std::collections::BTreeMap;

use downbeat_core::{Duration, Time};
use hdrhistogram::Histogram;

use crate::results::outcome::{Failed, Failure};

/// Longest latency that histograms can tell from longer ones, in nanoseconds: one hour.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// A histogram of durations in nanoseconds, three significant digits, up to an hour.
pub fn histogram() -> Histogram<u64> {
    // Constant bounds: 1 to an hour at three digits is always a valid histogram.
    Histogram::new_with_bounds(1, LONGEST_NS, 3).unwrap_or_else(|e| unreachable!("constant bounds are valid: {e}"))
}

/// Adds one duration.
pub fn record(histogram: &mut Histogram<u64>, duration: Duration) {
    histogram.saturating_record(duration.as_nanos().max(1));
}

/// The part of a run whose requests count, and the rules that judge them.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Requests scheduled before this are warm-up.
    pub start: Time,
    /// Requests scheduled from this time on do not count either.
    pub end: Time,
    /// An answer that takes longer than this is late.
    pub slo: Option<Duration>,
    /// Length of an interval of the time series.
    pub interval: Duration,
}

impl Window {
    /// Whether a request scheduled at `time` counts.
    pub fn contains(&self, time: Time) -> bool {
        time >= self.start && time < self.end
    }
}

/// Requests that failed in the same way.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FailureCount {
    /// The number of requests.
    pub count: u64,
    /// The message of the first one.
    pub example: String,
}

/// The requests of one model. `scheduled = ok + sum of failures` once a run is over.
#[derive(Clone, Debug)]
pub struct ModelRecord {
    /// Requests that were due.
    pub scheduled: u64,
    /// Requests that were answered well, in time or not.
    pub ok: u64,
    /// The part of `ok` that was later than the SLO.
    pub late: u64,
    /// Failed requests, by failure.
    pub failures: BTreeMap<Failure, FailureCount>,
    /// Nanoseconds from the scheduled time to the end of the answer, for the requests of `ok`.
    pub latency: Histogram<u64>,
}

impl Default for ModelRecord {
    fn default() -> Self {
        ModelRecord { scheduled: 0, ok: 0, late: 0, failures: BTreeMap::new(), latency: histogram() }
    }
}

impl ModelRecord {
    /// Requests that failed.
    pub fn failed(&self) -> u64 {
        self.failures.values().map(|f| f.count).sum()
    }

    /// Requests that failed or were late.
    pub fn bad(&self) -> u64 {
        self.failed() + self.late
    }

    /// Adds the requests of `other`.
    pub fn merge(&mut self, other: &ModelRecord) {
        self.scheduled += other.scheduled;
        self.ok += other.ok;
        self.late += other.late;
        for (failure, theirs) in &other.failures {
            let ours = self.failures.entry(*failure).or_default();
            ours.count += theirs.count;
            if ours.example.is_empty() {
                ours.example.clone_from(&theirs.example);
            }
        }
        // Equal bounds everywhere: adding cannot fail.
        let _ = self.latency.add(&other.latency);
    }
}

/// One interval of the time series. Requests count in the interval of their scheduled time.
#[derive(Clone, Debug, Default)]
pub struct Interval {
    /// Requests that were due.
    pub scheduled: u64,
    /// Requests that were answered well and in time.
    pub good: u64,
    /// Requests that failed or were late.
    pub bad: u64,
    /// Sum of the latencies of answered requests, in nanoseconds.
    pub latency_sum_ns: u64,
    /// The longest of these latencies, in nanoseconds.
    pub latency_max_ns: u64,
    /// Requests that were answered, in time or not.
    pub answered: u64,
}

/// Most intervals kept; later requests are counted in the last one.
const MOST_INTERVALS: usize = 100_000;

/// The record of one thread, or of a whole run.
#[derive(Clone, Debug)]
pub struct Record {
    /// The requests of each model.
    pub models: Vec<ModelRecord>,
    /// The intervals from the start of the window.
    pub series: Vec<Interval>,
    /// Nanoseconds from a request's scheduled time until the generator turned to it: a delay of the
    /// generator's own.
    pub lateness: Histogram<u64>,
    /// Nanoseconds that each request then waited for a free connection: the server's answers were
    /// slow.
    pub connection_wait: Histogram<u64>,
    /// Requests started in the whole run, warm-up included.
    pub started: u64,
    /// CPU time of the load threads in the whole run.
    pub cpu: Duration,
    /// Length of the whole run, warm-up and the wait for the last answers included.
    pub elapsed: Duration,
    /// Most connections open at once, over all threads.
    pub connections: u64,
    /// Most requests waiting for a connection at once, over all threads.
    pub backlog: u64,
    /// Whether the run was stopped early.
    pub stopped: bool,
}

impl Record {
    /// An empty record of `models` models.
    pub fn new(models: usize) -> Self {
        Record {
            models: vec![ModelRecord::default(); models],
            series: Vec::new(),
            lateness: histogram(),
            connection_wait: histogram(),
            started: 0,
            cpu: Duration::ZERO,
            elapsed: Duration::ZERO,
            connections: 0,
            backlog: 0,
            stopped: false,
        }
    }

    fn interval(&mut self, window: &Window, scheduled: Time) -> &mut Interval {
        let length = window.interval.as_nanos().max(1);
        let index = usize::try_from(scheduled.since(window.start).as_nanos() / length)
            .unwrap_or(usize::MAX)
            .min(MOST_INTERVALS - 1);
        if self.series.len() <= index {
            self.series.resize_with(index + 1, Interval::default);
        }
        &mut self.series[index]
    }

    /// Counts a request of `model` that was due at `scheduled`.
    pub fn scheduled(&mut self, window: &Window, model: usize, scheduled: Time) {
        self.started += 1;
        if window.contains(scheduled) {
            self.models[model].scheduled += 1;
            self.interval(window, scheduled).scheduled += 1;
        }
    }

    /// Counts a good answer at `now` to the request of `model` that was due at `scheduled`. Returns
    /// whether it was late.
    pub fn answered(&mut self, window: &Window, model: usize, scheduled: Time, now: Time) -> bool {
        let latency = now.since(scheduled);
        let late = window.slo.is_some_and(|slo| latency > slo);
        if !window.contains(scheduled) {
            return late;
        }
        let record_of_model = &mut self.models[model];
        record_of_model.ok += 1;
        record_of_model.late += u64::from(late);
        record(&mut record_of_model.latency, latency);
        let interval = self.interval(window, scheduled);
        interval.good += u64::from(!late);
        interval.bad += u64::from(late);
        interval.answered += 1;
        interval.latency_sum_ns = interval.latency_sum_ns.saturating_add(latency.as_nanos());
        interval.latency_max_ns = interval.latency_max_ns.max(latency.as_nanos());
        late
    }

    /// Counts a failure of the request of `model` that was due at `scheduled`.
    pub fn failed(&mut self, window: &Window, model: usize, scheduled: Time, failed: Failed) {
        if !window.contains(scheduled) {
            return;
        }
        let count = self.models[model].failures.entry(failed.failure).or_default();
        count.count += 1;
        if count.example.is_empty() {
            count.example = failed.message;
        }
        self.interval(window, scheduled).bad += 1;
    }

    /// Adds the record of another thread of the same run.
    pub fn merge(&mut self, other: &Record) {
        for (ours, theirs) in self.models.iter_mut().zip(&other.models) {
            ours.merge(theirs);
        }
        if self.series.len() < other.series.len() {
            self.series.resize_with(other.series.len(), Interval::default);
        }
        for (ours, theirs) in self.series.iter_mut().zip(&other.series) {
            ours.scheduled += theirs.scheduled;
            ours.good += theirs.good;
            ours.bad += theirs.bad;
            ours.answered += theirs.answered;
            ours.latency_sum_ns = ours.latency_sum_ns.saturating_add(theirs.latency_sum_ns);
            ours.latency_max_ns = ours.latency_max_ns.max(theirs.latency_max_ns);
        }
        // Equal bounds everywhere: adding cannot fail.
        let _ = self.lateness.add(&other.lateness);
        let _ = self.connection_wait.add(&other.connection_wait);
        self.started += other.started;
        self.cpu += other.cpu;
        self.elapsed = self.elapsed.max(other.elapsed);
        self.connections += other.connections;
        self.backlog += other.backlog;
        self.stopped |= other.stopped;
    }

    /// The sum over all models.
    pub fn total(&self) -> ModelRecord {
        let mut total = ModelRecord::default();
        for model in &self.models {
            total.merge(model);
        }
        total
    }
}
