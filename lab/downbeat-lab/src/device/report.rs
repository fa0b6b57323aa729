//! The outcome of a run of a device policy.

use downbeat_core::device::Note;
use downbeat_core::{Duration, Time};
use downbeat_report::{Box, Dot, Page, Timeline};
use serde::Serialize;

/// The outcome of a run of a device policy.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct DeviceReport {
    /// Requests that count.
    pub requests: u64,
    /// Counted requests that were answered.
    pub answered: u64,
    /// Requests that were refused on arrival.
    pub rejected: u64,
    /// Requests that were given up.
    pub dropped: u64,
    /// Requests that were answered later than the target.
    pub late: u64,
    /// Whether the run ended before its last request, because it was certain to miss the target.
    pub gave_up: bool,
    /// Answers a second, from the first arrival to the last answer.
    pub throughput: f64,
    /// The mean time from arrival to answer.
    pub mean_ms: f64,
    /// Half of the answers took at most this.
    pub p50_ms: f64,
    /// 99% of the answers took at most this.
    pub p99_ms: f64,
    /// The slowest answer.
    pub max_ms: f64,
    /// The share of the units' time that was used.
    pub utilisation: f64,
    /// Launches.
    pub launches: u64,
    /// Batches that were made.
    pub batches: u64,
    /// Items of a batch when it was made, on average.
    pub mean_batch: f64,
    /// Times that requests joined a batch that ran.
    pub stretches: u64,
    /// Times that a batch was parted.
    pub splits: u64,
    /// Times that members left before the last stage.
    pub exits: u64,
    /// Times that other lanes came into use.
    pub switches: u64,
    /// Requests that found no room in the ring.
    pub ring_full: u64,
    /// The most slots of the ring that were in use at a time.
    pub most_slots: u32,
    /// The share of all computing that went into dummy items and padding tokens.
    pub padding: f64,
    /// Latency of each request in the order of arrival, milliseconds; NaN for no answer.
    #[serde(skip)]
    pub latencies_ms: Vec<f64>,
    /// Arrival of each request, seconds.
    #[serde(skip)]
    pub arrivals_s: Vec<f64>,
    /// Launches and copies with their times, if the run recorded them.
    #[serde(skip)]
    pub spans: Vec<Span>,
    /// Labels of the timeline's rows.
    #[serde(skip)]
    pub rows: Vec<String>,
}

/// A launch or copy in a timeline.
#[derive(Clone, PartialEq, Debug)]
pub struct Span {
    /// Index of the row: lanes, then copies in, then copies out.
    pub row: usize,
    /// The begin of the launch or copy.
    pub start: Time,
    /// The end of the launch or copy.
    pub end: Time,
    /// Items of a launch; 1 for a copy.
    pub rows: u32,
    /// The label in the timeline.
    pub label: String,
}

impl DeviceReport {
    pub(super) fn note(&mut self, note: &Note) {
        match note {
            Note::New { rows, .. } => {
                self.mean_batch += (f64::from(*rows) - self.mean_batch) / (self.batches + 1) as f64;
                self.batches += 1;
            }
            Note::Stretch { .. } => self.stretches += 1,
            Note::Split { .. } => self.splits += 1,
            Note::Exit { .. } => self.exits += 1,
            Note::Switch { .. } => self.switches += 1,
            Note::RingFull { .. } => self.ring_full += 1,
            Note::PrepareFailed { .. } | Note::Group { .. } => {}
        }
    }

    /// Sums up the latencies of the requests from `first` on.
    pub(super) fn summarise(&mut self, first: usize, slo: Duration) {
        let counted = self.latencies_ms.get(first..).unwrap_or_default();
        let mut answered: Vec<f64> = counted.iter().copied().filter(|latency| !latency.is_nan()).collect();
        answered.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| {
            let index = (answered.len() as f64 * share).ceil() as usize;
            answered.get(index.max(1) - 1).copied().unwrap_or(f64::NAN)
        };
        self.requests = counted.len() as u64;
        self.answered = answered.len() as u64;
        self.late = answered.iter().filter(|latency| **latency > slo.as_millis_f64()).count() as u64;
        self.mean_ms = answered.iter().sum::<f64>() / answered.len() as f64;
        (self.p50_ms, self.p99_ms, self.max_ms) = (at(0.5), at(0.99), at(1.0));
        let arrivals = self.arrivals_s.get(first..).unwrap_or_default();
        let ends = arrivals.iter().zip(counted).filter(|(_, latency)| !latency.is_nan());
        let last = ends.map(|(at, latency)| at + latency / 1e3).fold(0.0, f64::max);
        let begin = arrivals.first().copied().unwrap_or(0.0);
        self.throughput = if last > begin { answered.len() as f64 / (last - begin) } else { 0.0 };
    }

    /// Returns whether at most `tolerated` (a share) of the requests were refused, given up or
    /// late.
    pub fn holds(&self, tolerated: f64) -> bool {
        let bad = self.requests - self.answered + self.late;
        !self.gave_up && bad as f64 <= tolerated * self.requests as f64
    }

    /// Returns an HTML page without external parts: the launches and copies from `from` to `to`,
    /// and each request's arrival. Without a recording it shows no launch or copy.
    pub fn timeline(&self, title: &str, from: Duration, to: Duration, slo: Duration) -> String {
        let at = |time: Time| time.since(Time::ZERO).as_millis_f64();
        let drawn = |span: &Span| Box {
            row: span.row,
            start: at(span.start),
            end: at(span.end),
            label: span.label.clone(),
            colour: span.rows.max(1).ilog2() as usize,
            lost: false,
            hint: format!(
                "{}: {:.3} to {:.3} ms, {} items",
                self.rows[span.row],
                at(span.start),
                at(span.end),
                span.rows
            ),
        };
        let arrivals = self.arrivals_s.iter().zip(&self.latencies_ms).enumerate();
        let dots = arrivals.map(|(id, (arrival, latency))| Dot {
            at: arrival * 1e3,
            bad: latency.is_nan() || *latency > slo.as_millis_f64(),
            colour: 0,
            hint: format!("r{id}: {latency:.3} ms"),
        });
        let timeline = Timeline {
            title: title.to_owned(),
            unit: "ms".to_owned(),
            rows: self.rows.clone(),
            boxes: self.spans.iter().map(drawn).collect(),
            dots: dots.collect(),
        };
        Page::new(title).plots(&[timeline.svg(from.as_millis_f64(), to.as_millis_f64())]).html()
    }

    /// Returns the mean latency in milliseconds of the requests from `first` until before `end`, in
    /// the order of arrival.
    pub fn mean_ms_of(&self, first: usize, end: usize) -> f64 {
        let range = self.latencies_ms.get(first..end.min(self.latencies_ms.len())).unwrap_or_default();
        let answered: Vec<f64> = range.iter().copied().filter(|latency| !latency.is_nan()).collect();
        answered.iter().sum::<f64>() / answered.len() as f64
    }
}
