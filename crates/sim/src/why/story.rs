//! The story of one request.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::Time;
use downbeat_core::cluster::{DispatchReason, StartBound};
use serde::Serialize;

use super::arrival::Arrival;
use super::folder::LogFolder;
use super::outcome::Outcome;
use super::saved::{Remedy, remedies};
use super::window::{LoggedBatch, LoggedRequest, Window};
use super::words::{ms, told};

/// The story of one request, with its numbers. As text it is a paragraph.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Story {
    /// The request as it came.
    #[serde(flatten)]
    pub arrival: Arrival,
    /// How the request ended.
    pub outcome: Outcome,
    /// The requests that waited before this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ahead: Option<Ahead>,
    /// The batch that took the request.
    pub batch: Option<BatchStory>,
    /// The time from arrival to the end of the request; `None`: it has not ended.
    pub took_ms: Option<f64>,
    /// The time behind the deadline, of a late request.
    pub late_ms: Option<f64>,
    /// The time in the queue.
    pub waited_ms: Option<f64>,
    /// Why the request got no result, in words and numbers.
    pub because: Option<String>,
    /// What would have saved the request.
    pub remedies: Vec<Remedy>,
    /// Other requests of the same name.
    pub others: usize,
    #[serde(skip)]
    pub(super) others_by: String,
    /// The requests of the second that was asked for, and the bad ones.
    pub span: Option<(usize, usize)>,
}

/// The work that a request found when it came.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Ahead {
    /// Requests in the same queue.
    pub requests: usize,
    /// Their items.
    pub items: u64,
    /// The age of the oldest.
    pub oldest_ms: Option<f64>,
    /// Requests in other queues.
    pub in_other_queues: usize,
    /// By queue: the batches that ran.
    pub running: BTreeMap<String, usize>,
    /// When the first of these batches was done, after the arrival.
    pub first_free_ms: Option<f64>,
    /// The devices that ran them.
    pub devices: usize,
}

/// The batch of a request.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BatchStory {
    /// The id of the batch.
    pub batch: String,
    /// The device.
    pub device: String,
    /// The requests in the batch.
    pub requests: usize,
    /// The items in the batch.
    pub items: u32,
    /// When the batch left, after the request's arrival.
    pub left_after_ms: f64,
    /// The reason, as a word; `None`: a device policy made the batch.
    pub bound: Option<String>,
    /// The reason in words.
    pub why: Option<String>,
    /// How long the batch was expected to take.
    pub expected_ms: Option<f64>,
    /// How long the batch took.
    pub took_ms: Option<f64>,
}

impl Story {
    /// The story of a request of a window.
    pub(super) fn of(folder: &LogFolder, window: &Window, request: &LoggedRequest) -> Story {
        let story = Story::new(folder, window, request);
        let (ahead, remedies) = (Some(Ahead::of(window, request)), remedies(window, request, story.outcome));
        Story { ahead, remedies, ..story }
    }

    fn new(folder: &LogFolder, window: &Window, request: &LoggedRequest) -> Story {
        let (end, outcome) = (window.end_of(request), window.outcome_of(request));
        let over = end.or_else(|| window.left_queue(request));
        let since = |at: Time| ms(at.since(request.arrived()));
        let batch = window.batch_of(request);
        Story {
            arrival: Arrival {
                request: request.request.to_string(),
                id: request.id.clone(),
                trace: request.trace.map(|trace| trace.to_string()),
                model: request.queue.clone(),
                items: request.size,
                came_unix_ns: folder.unix_ns(request.arrived()),
                came_ms: ms(request.arrived().since(Time::ZERO)),
                budget_ms: (request.deadline < Time::MAX).then(|| since(request.deadline)),
            },
            outcome,
            ahead: None,
            batch: batch.map(|batch| BatchStory::of(batch, request)),
            took_ms: over.map(since),
            late_ms: end.filter(|end| *end > request.deadline).map(|end| ms(end.since(request.deadline))),
            waited_ms: batch.map(|batch| since(batch.left)).or(window.left_queue(request).map(since)),
            because: because(request),
            remedies: Vec::new(),
            others: 0,
            others_by: String::new(),
            span: None,
        }
    }
}

impl LogFolder {
    /// The story of a request of a window, without the work ahead of it and without remedies.
    pub fn brief(&self, window: &Window, request: &LoggedRequest) -> Story {
        Story::new(self, window, request)
    }
}

impl Ahead {
    fn of(window: &Window, request: &LoggedRequest) -> Ahead {
        let waits = |other: &&LoggedRequest| {
            other.at <= request.at
                && other.request != request.request
                && window.left_queue(other).is_some_and(|left| left > request.at)
        };
        let waiting: Vec<&LoggedRequest> =
            window.requests.iter().take_while(|other| other.at <= request.at).filter(waits).collect();
        let own: Vec<&&LoggedRequest> = waiting.iter().filter(|other| other.queue == request.queue).collect();
        let runs = |batch: &&LoggedBatch| batch.left <= request.at && batch.end.is_some_and(|end| end > request.at);
        let running: Vec<&LoggedBatch> = window.batches.iter().filter(runs).collect();
        let mut by_queue: BTreeMap<String, usize> = BTreeMap::new();
        for batch in &running {
            *by_queue.entry(batch.queue.clone()).or_default() += 1;
        }
        let first = running.iter().filter_map(|batch| batch.end).min();
        Ahead {
            requests: own.len(),
            items: own.iter().map(|other| u64::from(other.size)).sum(),
            oldest_ms: own.first().map(|oldest| ms(request.at.since(oldest.at))),
            in_other_queues: waiting.len() - own.len(),
            running: by_queue,
            first_free_ms: first.map(|first| ms(first.since(request.at))),
            devices: running.iter().map(|batch| &batch.device).collect::<BTreeSet<_>>().len(),
        }
    }
}

impl BatchStory {
    fn of(batch: &LoggedBatch, request: &LoggedRequest) -> BatchStory {
        BatchStory {
            batch: batch.batch.to_string(),
            device: batch.device.clone(),
            requests: batch.members.len(),
            items: batch.size,
            left_after_ms: ms(batch.left.since(request.arrived())),
            bound: batch.reason.map(|reason| reason.bound.name().to_owned()),
            why: batch.reason.map(|reason| why_then(&reason, request)),
            expected_ms: batch.expected.map(ms),
            took_ms: batch.end.map(|end| ms(end.since(batch.start))),
        }
    }
}

/// Why a batch left when it did. Times count from the request's arrival.
fn why_then(reason: &DispatchReason, request: &LoggedRequest) -> String {
    let after = |at: Time| match at.as_nanos().checked_sub(request.arrived().as_nanos()) {
        Some(nanos) => format!("{} after the request came", told(nanos as f64 / 1e6)),
        None => format!("{} before the request came", told(ms(request.arrived().since(at)))),
    };
    match reason.bound {
        StartBound::Device if reason.exec > Time::ZERO => {
            format!("it could have left {}, but all devices were busy", after(reason.exec))
        }
        bound => bound.why().to_owned(),
    }
}

/// Why a request got no result.
fn because(request: &LoggedRequest) -> Option<String> {
    if let Some(reject) = request.refused {
        return Some(reject.to_string());
    }
    if let Some(reason) = &request.refused_by_device {
        return Some(reason.clone());
    }
    if let Some((at, reason, detail)) = request.dropped {
        use downbeat_core::cluster::DropReason;
        let (needed, left) = (told(ms(detail.needed)), told(ms(detail.deadline.since(at))));
        return Some(match reason {
            DropReason::Hopeless => format!("alone on an idle device it needs {needed}, and {left} were left"),
            DropReason::Sacrificed => format!(
                "with {left} left it would have held its batch below the size of {} that keeps up with the load",
                detail.target
            ),
            DropReason::QueueTimeout => "it had waited for as long as its queue policy allows".to_owned(),
            DropReason::ModelRemoved => "its model was unloaded".to_owned(),
            DropReason::WaitTooLong => "it had waited for as long as a request without a deadline may".to_owned(),
        });
    }
    if request.dropped_by_device.is_some() {
        return Some("the device policy could no longer answer it in time".to_owned());
    }
    request.failed.as_ref().map(
        |(_, failure, error)| {
            if error.is_empty() { failure.to_string() } else { error.clone() }
        },
    )
}
