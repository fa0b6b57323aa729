//! The measurements of a run, as data (JSON) and as a table.

use std::collections::BTreeMap;
use std::fmt;

use downbeat_core::Duration;
use downbeat_report::Table;
use hdrhistogram::Histogram;
use serde::Serialize;

use crate::args::{Body, Protocol};
use crate::load::Pace;
use crate::load::capacity::Capacity;
use crate::load::plan::Plan;
use crate::load::run::Outcome;
use crate::results::record::{Interval, ModelRecord, Record};
use crate::results::statistics::ModelStatistics;

/// Lateness of the generator that never matters, nanoseconds.
const TOLERATED_LATENESS_NS: u64 = 1_000_000;
/// Most points of a distribution function.
const MOST_POINTS: usize = 400;

/// Whether the generator sent requests when they were due. The 99th percentile of its lateness must
/// be at most 1 ms, or a tenth of the 99th percentile of the latencies. Latencies include the
/// lateness.
pub fn keeps_up(record: &Record) -> bool {
    let late = record.lateness.value_at_quantile(0.99);
    late <= TOLERATED_LATENESS_NS || late <= record.total().latency.value_at_quantile(0.99) / 10
}

/// Durations in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Distribution {
    /// Mean.
    pub mean: f64,
    /// Shortest.
    pub min: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Longest.
    pub max: f64,
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

impl Distribution {
    /// The distribution of a histogram in nanoseconds; `None` if it is empty.
    pub fn of(histogram: &Histogram<u64>) -> Option<Self> {
        if histogram.is_empty() {
            return None;
        }
        let at = |q| ms(histogram.value_at_quantile(q));
        Some(Distribution {
            mean: histogram.mean() / 1e6,
            min: ms(histogram.min()),
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            p999: at(0.999),
            max: ms(histogram.max()),
        })
    }
}

/// The requests of one model, or of all.
#[derive(Clone, Debug, Serialize)]
pub struct ModelReport {
    /// Model name; `all` for the sum.
    pub name: String,
    /// The model's share of the requests, 0 to 1.
    pub share: f64,
    /// Requests that were due in the measured time.
    pub scheduled: u64,
    /// Requests that were answered well.
    pub ok: u64,
    /// The part of `ok` that was later than the SLO.
    pub late: u64,
    /// Requests that failed or were late.
    pub bad: u64,
    /// `bad` as a percentage of `scheduled`.
    pub bad_percent: f64,
    /// Failures by kind.
    pub failures: BTreeMap<String, FailureReport>,
    /// Requests that were due, per second.
    pub offered_per_second: f64,
    /// Good answers per second, in time or not.
    pub answered_per_second: f64,
    /// Good answers in time, per second.
    pub goodput_per_second: f64,
    /// Latency of answered requests, from the scheduled time, milliseconds.
    pub latency_ms: Option<Distribution>,
    /// Points of the distribution function: milliseconds, and the part of the answered requests
    /// that took at most that long.
    pub latency_cdf: Vec<(f64, f64)>,
    /// The server's own counters for the measured time.
    pub server: Option<ServerReport>,
}

/// Failures of a kind.
#[derive(Clone, Debug, Serialize)]
pub struct FailureReport {
    /// The number of failures.
    pub count: u64,
    /// The message of the first failure.
    pub example: String,
}

/// The server's counters of a model between two readings, before and after the measured time.
#[derive(Clone, Debug, Serialize)]
pub struct ServerReport {
    /// The counters.
    #[serde(flatten)]
    pub counters: ModelStatistics,
    /// Mean items per execution.
    pub mean_batch: Option<f64>,
}

/// One point in time.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// Seconds since the measured time began, at the start of the interval.
    pub seconds: f64,
    /// Requests that were due, per second.
    pub offered_per_second: f64,
    /// Requests that were answered well and in time, per second.
    pub good_per_second: f64,
    /// Requests that failed or were late, per second.
    pub bad_per_second: f64,
    /// Mean latency of answered requests, milliseconds.
    pub mean_ms: Option<f64>,
    /// Longest latency of answered requests, milliseconds.
    pub max_ms: Option<f64>,
}

/// The cost of the measuring itself, and whether it disturbed the measurement.
#[derive(Clone, Debug, Serialize)]
pub struct GeneratorReport {
    /// CPU time per request of the whole run, user and system, microseconds.
    pub cpu_us_per_request: f64,
    /// The busy part of the load threads' time, 0 to 1.
    pub busy: f64,
    /// Load threads.
    pub threads: usize,
    /// Most connections open at once.
    pub connections: u64,
    /// Lateness of the generator in turning to requests, milliseconds; `None` in a closed loop.
    pub lateness_ms: Option<Distribution>,
    /// Milliseconds from the scheduled time to the sending, for requests that found no free
    /// connection.
    pub connection_wait_ms: Option<Distribution>,
    /// Requests that had to wait for a connection.
    pub waited_for_connection: u64,
    /// Most requests waiting for a connection at once.
    pub backlog: u64,
    /// Whether the generator kept up, see [`keeps_up`].
    pub kept_up: bool,
    /// Requests of the whole run, warm-up included.
    pub requests: u64,
}

/// The whole report of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this program.
    pub version: &'static str,
    /// The server.
    pub url: String,
    /// `http` or `grpc`.
    pub protocol: &'static str,
    /// `binary` or `json`.
    pub tensors: &'static str,
    /// The way of offering requests, in words.
    pub load: String,
    /// The seed of all random numbers.
    pub seed: u64,
    /// Seconds of warm-up, which are not measured.
    pub warmup_s: f64,
    /// Seconds of the measured time.
    pub measured_s: f64,
    /// An answer later than this is bad.
    pub slo_ms: Option<f64>,
    /// All models together.
    pub total: ModelReport,
    /// The requests of each model.
    pub models: Vec<ModelReport>,
    /// The measurements over time.
    pub series: Vec<Point>,
    /// Length of an interval of `series`.
    pub interval_s: f64,
    /// The generator.
    pub generator: GeneratorReport,
    /// The capacity, if it was searched. The rest of the report is then about the run at that rate.
    pub capacity: Option<Capacity>,
    /// Whether a person has ended the run early. The report then covers the time until that.
    pub interrupted: bool,
    /// Remarks to read before believing the numbers.
    pub warnings: Vec<String>,
}

/// The distribution function at even fractions that become denser towards 1.
fn cdf(histogram: &Histogram<u64>) -> Vec<(f64, f64)> {
    let total = histogram.len();
    let mut seen = 0;
    let mut points: Vec<(f64, f64)> = Vec::new();
    for value in histogram.iter_recorded() {
        seen += value.count_since_last_iteration();
        points.push((ms(value.value_iterated_to()), seen as f64 / total as f64));
    }
    if points.len() <= MOST_POINTS {
        return points;
    }
    // Even steps in percentile would lose the tail. Steps that are even in `log(1 - fraction)` show
    // it.
    let mut thinned: Vec<(f64, f64)> = Vec::new();
    let place = |fraction: f64| {
        let even = fraction * MOST_POINTS as f64 / 2.0;
        let tail = -(1.0 - fraction).max(1e-7).log10() * MOST_POINTS as f64 / 14.0;
        (even + tail) as u64
    };
    for (i, point) in points.iter().enumerate() {
        if i + 1 == points.len() || thinned.last().is_none_or(|last| place(last.1) != place(point.1)) {
            thinned.push(*point);
        }
    }
    thinned
}

impl ModelReport {
    fn new(name: &str, share: f64, record: &ModelRecord, measured: Duration, server: Option<ModelStatistics>) -> Self {
        let per_second = |n: u64| {
            let seconds = measured.as_secs_f64();
            if seconds > 0.0 { n as f64 / seconds } else { 0.0 }
        };
        let bad = record.bad();
        ModelReport {
            name: name.to_owned(),
            share,
            scheduled: record.scheduled,
            ok: record.ok,
            late: record.late,
            bad,
            bad_percent: if record.scheduled == 0 { 0.0 } else { bad as f64 / record.scheduled as f64 * 100.0 },
            failures: record
                .failures
                .iter()
                .map(|(kind, f)| (kind.to_string(), FailureReport { count: f.count, example: f.example.clone() }))
                .collect(),
            offered_per_second: per_second(record.scheduled),
            answered_per_second: per_second(record.ok),
            goodput_per_second: per_second(record.ok - record.late),
            latency_ms: Distribution::of(&record.latency),
            latency_cdf: cdf(&record.latency),
            server: server.map(|counters| ServerReport { mean_batch: counters.mean_batch(), counters }),
        }
    }
}

impl GeneratorReport {
    fn new(plan: &Plan, record: &Record) -> Self {
        let closed = matches!(plan.pace, Pace::Closed(_));
        GeneratorReport {
            cpu_us_per_request: record.cpu.as_secs_f64() * 1e6 / record.started.max(1) as f64,
            busy: record.cpu.as_secs_f64() / (record.elapsed.as_secs_f64() * plan.threads as f64).max(1e-9),
            threads: plan.threads,
            connections: record.connections,
            lateness_ms: if closed { None } else { Distribution::of(&record.lateness) },
            connection_wait_ms: Distribution::of(&record.connection_wait),
            waited_for_connection: record.connection_wait.len(),
            backlog: record.backlog,
            kept_up: keeps_up(record),
            requests: record.started,
        }
    }
}

/// The points of a run's time series, one for each interval.
fn series(record: &Record, interval: Duration) -> Vec<Point> {
    let seconds = interval.as_secs_f64();
    let point = |(i, interval): (usize, &Interval)| Point {
        seconds: i as f64 * seconds,
        offered_per_second: interval.scheduled as f64 / seconds,
        good_per_second: interval.good as f64 / seconds,
        bad_per_second: interval.bad as f64 / seconds,
        mean_ms: (interval.answered > 0).then(|| ms(interval.latency_sum_ns / interval.answered.max(1))),
        max_ms: (interval.answered > 0).then(|| ms(interval.latency_max_ns)),
    };
    record.series.iter().enumerate().map(point).collect()
}

/// The load in words: the user's, or the rate that the capacity search ended with.
fn load_text(plan: &Plan, capacity: Option<&Capacity>) -> String {
    let Some(capacity) = capacity else { return plan.pace_text.clone() };
    let rate = capacity.rate.or(capacity.failed_rate).unwrap_or(0.0);
    let cv = plan.search.map_or(1.0, |s| s.gaps.coefficient_of_variation());
    format!("open loop, gaps of coefficient of variation {cv:.2}, {rate:.1}/s")
}

impl Report {
    /// The report of a run, and of the search that led to it.
    pub fn new(plan: &Plan, outcome: &Outcome, capacity: Option<Capacity>) -> Self {
        let record = &outcome.record;
        let closed = matches!(plan.pace, Pace::Closed(_));
        let shares: f64 = plan.models.iter().map(|m| m.share).sum();
        let models: Vec<ModelReport> = plan
            .models
            .iter()
            .zip(&record.models)
            .zip(&outcome.statistics)
            .map(|((model, record), server)| {
                let share = model.share / shares;
                ModelReport::new(&model.envelope.model, share, record, outcome.measured, server.clone())
            })
            .collect();
        let mut report = Report {
            version: env!("CARGO_PKG_VERSION"),
            url: plan.target.url(),
            protocol: plan.target.protocol.name(),
            tensors: match (plan.target.protocol, plan.body) {
                (Protocol::Http, Body::Json) => "json",
                _ => "binary",
            },
            load: load_text(plan, capacity.as_ref()),
            seed: plan.seed,
            warmup_s: plan.warmup.as_secs_f64(),
            measured_s: outcome.measured.as_secs_f64(),
            slo_ms: plan.slo.map(Duration::as_millis_f64),
            total: ModelReport::new("all", 1.0, &record.total(), outcome.measured, None),
            models,
            series: series(record, outcome.window.interval),
            interval_s: outcome.window.interval.as_secs_f64(),
            generator: GeneratorReport::new(plan, record),
            interrupted: outcome.interrupted || capacity.as_ref().is_some_and(|c| c.interrupted),
            capacity,
            warnings: Vec::new(),
        };
        report.warnings = report.find_warnings(closed);
        report
    }

    fn find_warnings(&self, closed: bool) -> Vec<String> {
        let mut warnings = Vec::new();
        let generator = &self.generator;
        if self.interrupted {
            warnings.push(
                "the run was interrupted: these are the figures until then; requests without an answer count as \
                 failures."
                    .to_owned(),
            );
        }
        if !closed && !generator.kept_up {
            let late = generator.lateness_ms.as_ref().map_or(0.0, |l| l.p99);
            warnings.push(format!(
                "the generator could not keep up: 1% of the requests were handled {late:.2} ms or more after they were \
                 due, and this delay is part of their latencies. Use more --threads or a machine of its own.",
            ));
        }
        if generator.busy > 0.9 {
            warnings.push(format!(
                "the load threads were busy {:.0}% of the time, and may have limited the load. Use more --threads.",
                generator.busy * 100.0
            ));
        }
        if !closed && generator.waited_for_connection > 0 {
            warnings.push(format!(
                "{} requests waited for a free connection, at most {} at once; the wait is part of their latencies{}.",
                generator.waited_for_connection,
                generator.backlog,
                if self.protocol == "http" { " (see --max-connections)" } else { "" },
            ));
        }
        if self.total.scheduled > 0 && self.total.scheduled < 100 {
            warnings.push(format!("only {} requests: percentiles above 90 mean little", self.total.scheduled));
        }
        if self.capacity.as_ref().is_some_and(|c| c.generator_limited) {
            warnings.push(
                "in a trial that failed, the generator itself was late: the capacity may be higher. Use more --threads."
                    .to_owned(),
            );
        }
        warnings
    }
}

/// A number with three to four significant digits; `–` for `None`.
pub fn short_or_none(value: Option<f64>) -> String {
    value.map_or("–".to_owned(), short)
}

/// A number with three to four significant digits.
pub fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 1000.0 => 0,
        v if v >= 100.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

impl Report {
    /// The table of all models, with a row for the sum if there are several.
    pub(crate) fn table(&self) -> Table<&ModelReport> {
        let all = (self.models.len() > 1).then_some(&self.total);
        let latency =
            |of: fn(&Distribution) -> f64| move |model: &&ModelReport| short_or_none(model.latency_ms.as_ref().map(of));
        Table::of(self.models.iter().chain(all))
            .text("model", |m| &m.name)
            .number("offered/s", |m| short(m.offered_per_second))
            .number("goodput/s", |m| short(m.goodput_per_second))
            .number("ok", |m| m.ok)
            .number("bad", |m| m.bad)
            .number("bad %", |m| format!("{:.2}", m.bad_percent))
            .number("mean ms", latency(|l| l.mean))
            .number("p50", latency(|l| l.p50))
            .number("p90", latency(|l| l.p90))
            .number("p99", latency(|l| l.p99))
            .number("p99.9", latency(|l| l.p999))
            .number("max", latency(|l| l.max))
    }
}

impl Report {
    /// Writes a model's failures, its late requests and the server's counters.
    fn tell_model(&self, model: &ModelReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (kind, failure) in &model.failures {
            write!(f, "  {}: {} x {kind}", model.name, failure.count)?;
            match failure.example.trim() {
                "" => writeln!(f)?,
                example => writeln!(f, ": {}", example.lines().next().unwrap_or_default())?,
            }
        }
        if model.late > 0 {
            writeln!(f, "  {}: {} x late (> {} ms)", model.name, model.late, short(self.slo_ms.unwrap_or(0.0)))?;
        }
        if let Some(server) = &model.server
            && server.counters.executions > 0
        {
            let c = &server.counters;
            writeln!(
                f,
                "  {}: server ran {} batches, mean size {}; queue {} ms, compute {} ms",
                model.name,
                c.executions,
                short(server.mean_batch.unwrap_or(0.0)),
                short(c.queue.mean_ms()),
                short(c.compute_infer.mean_ms()),
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for GeneratorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "generator: {} us CPU a request, {:.0}% busy ({} thread{}), {} connections",
            short(self.cpu_us_per_request),
            self.busy * 100.0,
            self.threads,
            if self.threads == 1 { "" } else { "s" },
            self.connections,
        )?;
        if let Some(late) = &self.lateness_ms {
            let (p50, p99, max) = (short(late.p50), short(late.p99), short(late.max));
            write!(f, "; late by p50 {p50} p99 {p99} max {max} ms")?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {} tensors, {}", self.url, self.tensors, self.load)?;
        let (warmup, measured, seed) = (short(self.warmup_s), short(self.measured_s), self.seed);
        writeln!(f, "warm-up {warmup} s, measured {measured} s, seed {seed}")?;
        if let Some(capacity) = &self.capacity {
            write!(f, "\n{capacity}\n")?;
        }
        writeln!(f)?;
        self.table().fmt(f)?;
        self.models.iter().try_for_each(|model| self.tell_model(model, f))?;
        writeln!(f, "\n{}", self.generator)?;
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        Ok(())
    }
}
