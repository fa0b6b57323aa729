//! The measurements of the scheduler, as data (JSON) and as a table.

use std::collections::BTreeSet;
use std::fmt;

use downbeat_report::Table;
use hdrhistogram::Histogram;
use serde::Serialize;

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Measurement {
    /// Models.
    pub models: u32,
    /// Devices.
    pub devices: u32,
    /// Threads of the scheduler.
    pub threads: u32,
    /// Requests offered a second: of virtual time, or of real time in a paced run.
    pub offered_rate: f64,
    /// Requests measured.
    pub requests: u64,
    /// Events (requests, completions, timers) a request.
    pub events_per_request: f64,
    /// Timers that fired for each batch.
    pub wakes_per_batch: f64,
    /// Requests over the CPU time of the loop. A paced run never rests: there it is the rate that
    /// was kept up.
    pub requests_per_second_per_core: f64,
    /// Wall time of the loop a request, everything in it included.
    pub wall_ns_per_request: f64,
    /// CPU time of the loop a request, everything in it included.
    pub cpu_ns_per_request: f64,
    /// CPU time of the loop an event.
    pub cpu_ns_per_event: f64,
    /// CPU time of the matchmaker's thread a request, if it has one. It is part of the above, and
    /// mostly waiting.
    pub matchmaker_ns_per_request: Option<f64>,
    /// CPU time of drawing a request, measured alone; it is part of the above.
    pub generator_ns_per_request: f64,
    /// Calls of the allocator a request; `None` where the program does not count them.
    pub allocations_per_request: Option<f64>,
    /// Batches.
    pub batches: u64,
    /// Their mean size.
    pub mean_batch: f64,
    /// Share of the requests that were rejected, dropped or late.
    pub bad_share: f64,
    /// The time from an event's due time until its decisions were taken, with the wait for earlier
    /// events; paced runs only.
    pub latency_us: Option<Latency>,
    /// From when an event was handed in until its decisions had been taken; paced runs only.
    pub handling_us: Option<Latency>,
}

/// Microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latency {
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Longest.
    pub max: f64,
}

impl Latency {
    /// Of a histogram in nanoseconds.
    pub(super) fn of(histogram: &Histogram<u64>) -> Self {
        let at = |q| histogram.value_at_quantile(q) as f64 / 1e3;
        Latency { p50: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), max: histogram.max() as f64 / 1e3 }
    }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Latency { p50, p90, p99, p999, max } = self;
        write!(f, "p50 {p50:.2} us, p90 {p90:.2} us, p99 {p99:.2} us, p99.9 {p999:.2} us, max {max:.0} us")
    }
}

impl fmt::Display for Measurement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Measurement { models, devices, threads, .. } = self;
        writeln!(
            f,
            "{models} models, {devices} devices, {threads} thread(s), {:.0} requests/s offered",
            self.offered_rate
        )?;
        writeln!(f, "  requests/s/core      {:.0}", self.requests_per_second_per_core)?;
        let (wall, cpu) = (self.wall_ns_per_request, self.cpu_ns_per_request);
        let drawing = self.generator_ns_per_request;
        writeln!(f, "  ns/request           {wall:.1} wall, {cpu:.1} CPU, of which drawing requests {drawing:.1}")?;
        if let Some(ns) = self.matchmaker_ns_per_request {
            writeln!(f, "  matchmaker           {ns:.1} of the CPU ns/request, waiting included")?;
        }
        let events = self.events_per_request;
        writeln!(f, "  ns/event             {:.1} CPU, {events:.3} events/request", self.cpu_ns_per_event)?;
        match self.allocations_per_request {
            Some(allocations) => writeln!(f, "  allocations/request  {allocations:.6}")?,
            None => writeln!(f, "  allocations/request  not counted by this program")?,
        }
        let (batches, mean, wakes) = (self.batches, self.mean_batch, self.wakes_per_batch);
        writeln!(f, "  batches              {batches}, mean size {mean:.1}, {wakes:.2} timers each")?;
        writeln!(f, "  bad                  {:.3}% of {} requests", self.bad_share * 100.0, self.requests)?;
        if let Some(latency) = self.latency_us {
            writeln!(f, "  decision, from due   {latency}")?;
        }
        if let Some(handling) = self.handling_us {
            writeln!(f, "  decision, handed in  {handling}")?;
        }
        Ok(())
    }
}

/// Several runs.
#[derive(Serialize)]
#[serde(transparent)]
pub(super) struct Sweep(pub Vec<Measurement>);

/// Cost an event, as a table of models by devices.
impl fmt::Display for Sweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let models: BTreeSet<u32> = self.0.iter().map(|m| m.models).collect();
        let devices: BTreeSet<u32> = self.0.iter().map(|m| m.devices).collect();
        writeln!(f, "CPU ns an event (mean batch); models down, devices across")?;
        let table = devices.into_iter().fold(Table::of(models).number("", |models| *models), |table, devices| {
            let cost = |models: &u32| {
                let run = self.0.iter().find(|run| run.models == *models && run.devices == devices)?;
                Some(format!("{:.1} ({:.1})", run.cpu_ns_per_event, run.mean_batch))
            };
            table.some(&devices.to_string(), cost)
        });
        table.fmt(f)
    }
}
