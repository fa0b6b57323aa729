//! The outcome of requests, in the log or in a simulation.

use std::collections::BTreeMap;

use downbeat_core::cluster::DropReason;
use downbeat_core::{Duration, Time, quantiles};
use serde::Serialize;

use super::interval::{Interval, Spread};
use crate::tables::report::Report;

/// The outcome of requests.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Figures {
    /// The number of requests.
    pub requests: u64,
    /// Requests that were answered by their deadline.
    pub in_time: u64,
    /// Requests that were answered after their deadline.
    pub late: u64,
    /// Requests that were not accepted.
    pub rejected: u64,
    /// Dropped requests, by reason.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Requests whose outcome the log does not name: they were cancelled, or the log ended before.
    /// They do not count in the attainment.
    pub unknown: u64,
    /// The share of the requests that were answered in time; 1 if there were none.
    pub attainment: f64,
    /// How sure the share is; `None`: there were no requests.
    pub interval: Option<Interval>,
    /// Requests a second that were answered in time.
    pub goodput: f64,
    /// The median time from arrival to the start of the batch, of answered requests, in
    /// milliseconds. `None`: no request was answered.
    pub delay_p50_ms: Option<f64>,
    /// The 99th percentile of the same time.
    pub delay_p99_ms: Option<f64>,
    /// The median time from arrival to answer, of answered requests, in milliseconds.
    pub answer_p50_ms: Option<f64>,
    /// The 99th percentile of the same time.
    pub answer_p99_ms: Option<f64>,
}

/// The times of answered requests, and the parts of the log that requests come in.
#[derive(Clone, Debug, Default)]
pub(super) struct Samples {
    /// From arrival to the start of the batch.
    pub waits: Vec<Duration>,
    /// From arrival to the answer.
    pub answers: Vec<Duration>,
    /// The requests of each part of the log's time.
    pub parts: Spread,
}

impl Samples {
    /// The samples of both.
    pub fn with(mut self, other: &Samples) -> Samples {
        self.waits.extend(&other.waits);
        self.answers.extend(&other.answers);
        Samples { parts: self.parts.with(&other.parts), ..self }
    }

    /// The samples of a model in a simulation.
    pub fn simulated(report: &Report, model: usize) -> Samples {
        let mut samples = Samples::default();
        if let Some(of) = report.models.get(model) {
            (samples.waits, samples.answers) = (of.waits.clone(), of.answers.clone());
        }
        for window in &report.windows {
            let counts = [&window.offered, &window.good].map(|counts| counts.get(model).copied().unwrap_or_default());
            let [requests, in_time] = counts.map(u64::from);
            samples.parts.add(window.start.since(Time::ZERO), report.span, (requests, in_time));
        }
        samples
    }
}

/// The figures of a model.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ModelFigures {
    /// The log's name of the model: `m0`.
    pub model: String,
    /// The outcome of the model's requests.
    #[serde(flatten)]
    pub figures: Figures,
}

/// The words for a reason.
pub(super) fn word(reason: DropReason) -> &'static str {
    match reason {
        DropReason::Hopeless => "hopeless",
        DropReason::Sacrificed => "sacrificed",
        DropReason::QueueTimeout => "queue timeout",
        DropReason::ModelRemoved => "model removed",
        DropReason::WaitTooLong => "waited too long",
    }
}

impl Figures {
    /// The figures of a model in a simulation.
    pub(super) fn simulated(report: &Report, model: usize, samples: &Samples) -> Figures {
        let Some(of) = report.models.get(model) else { return Figures::default() };
        let dropped = of.dropped.iter().map(|(reason, count)| (word(*reason), *count)).collect();
        let counts = Figures {
            requests: of.offered,
            in_time: of.good,
            late: of.missed,
            rejected: of.rejected,
            dropped,
            ..Figures::default()
        };
        counts.finished(report.span, samples)
    }

    /// Completes the figures that follow from the counts and samples.
    pub(super) fn finished(self, span: Duration, samples: &Samples) -> Figures {
        let quantiles = |of: &[Duration]| {
            let found = quantiles(of.iter().map(|span| span.as_nanos()), [0.5, 0.99]);
            found.map_or([None; 2], |found| found.map(|ns| Some(Duration::from_nanos(ns).as_millis_f64())))
        };
        let [delay_p50_ms, delay_p99_ms] = quantiles(&samples.waits);
        let [answer_p50_ms, answer_p99_ms] = quantiles(&samples.answers);
        let known = self.requests - self.unknown.min(self.requests);
        Figures {
            attainment: if known == 0 { 1.0 } else { self.in_time as f64 / known as f64 },
            interval: samples.parts.interval(),
            goodput: self.in_time as f64 / span.as_secs_f64(),
            delay_p50_ms,
            delay_p99_ms,
            answer_p50_ms,
            answer_p99_ms,
            ..self
        }
    }

    /// Adds up the counts.
    pub(super) fn sum<'a>(all: impl Iterator<Item = &'a Figures>) -> Figures {
        all.fold(Figures::default(), |mut sum, figures| {
            sum.requests += figures.requests;
            sum.in_time += figures.in_time;
            sum.late += figures.late;
            sum.rejected += figures.rejected;
            sum.unknown += figures.unknown;
            for (reason, count) in &figures.dropped {
                *sum.dropped.entry(reason).or_default() += count;
            }
            sum
        })
    }
}

/// The median of these spans; `None` if there are none.
pub(super) fn median(spans: impl IntoIterator<Item = Duration>) -> Option<Duration> {
    quantiles(spans.into_iter().map(Duration::as_nanos), [0.5]).map(|[median]| Duration::from_nanos(median))
}
