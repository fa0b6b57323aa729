//! What came of requests, in the log or in a simulation.

use std::collections::BTreeMap;

use downbeat_core::cluster::DropReason;
use downbeat_core::{Duration, quantiles};
use serde::Serialize;

use crate::report::ModelReport;

/// What came of requests.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Figures {
    /// Requests that came.
    pub requests: u64,
    /// Answered by their deadline.
    pub in_time: u64,
    /// Answered after it.
    pub late: u64,
    /// Not accepted.
    pub rejected: u64,
    /// Dropped, by reason.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Neither: of these the log says nothing more. They were cancelled, or it ended before. They do not count in the attainment.
    pub unknown: u64,
    /// Share of the requests that was answered in time; 1 of none.
    pub attainment: f64,
    /// Answered in time, per second.
    pub goodput: f64,
    /// Milliseconds from arrival to the start of the batch that half of the answered requests do not exceed; none: nothing was
    /// answered.
    pub delay_p50_ms: Option<f64>,
    /// The same of 99%.
    pub delay_p99_ms: Option<f64>,
}

/// The figures of a model.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ModelFigures {
    /// As the log calls it: `m0`.
    pub model: String,
    /// What came of its requests.
    #[serde(flatten)]
    pub figures: Figures,
}

/// A reason in words.
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
    /// Of a model in a simulation.
    pub(super) fn simulated(report: &ModelReport, span: Duration) -> Figures {
        let dropped = report.dropped.iter().map(|(reason, count)| (word(*reason), *count)).collect();
        let counts = Figures {
            requests: report.offered,
            in_time: report.good,
            late: report.missed,
            rejected: report.rejected,
            dropped,
            ..Figures::default()
        };
        counts.finished(span, report.waits.iter().copied())
    }

    /// With what follows from the counts.
    pub(super) fn finished(self, span: Duration, waits: impl IntoIterator<Item = Duration>) -> Figures {
        let waits = quantiles(waits.into_iter().map(Duration::as_nanos), [0.5, 0.99]);
        let [p50, p99] =
            waits.map_or([None; 2], |waits| waits.map(|ns| Some(Duration::from_nanos(ns).as_millis_f64())));
        let known = self.requests - self.unknown.min(self.requests);
        Figures {
            attainment: if known == 0 { 1.0 } else { self.in_time as f64 / known as f64 },
            goodput: self.in_time as f64 / span.as_secs_f64(),
            delay_p50_ms: p50,
            delay_p99_ms: p99,
            ..self
        }
    }

    /// The counts of all of them together.
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

/// The median of these spans; `None` of nothing.
pub(super) fn median(spans: impl IntoIterator<Item = Duration>) -> Option<Duration> {
    quantiles(spans.into_iter().map(Duration::as_nanos), [0.5]).map(|[median]| Duration::from_nanos(median))
}
