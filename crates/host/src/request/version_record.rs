//! The part of a model version that its requests touch on their way: its names, its counts, and the
//! errors of its failures.
//!
//! Devices and the scheduler know a version by its record alone. The rest of the version knows the
//! devices.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use downbeat_core::Duration;
use downbeat_core::probes::Probes;
use downbeat_driver::QueueHandle;
use downbeat_engine::{ErrorCode, Model, RunError};
use downbeat_protocol::inference::ModelStatistics;
use downbeat_service::error::ServiceError;
use downbeat_service::metrics::ModelMetrics;
use downbeat_service::metrics::statistics::Phases;
use downbeat_service::metrics::trouble::Counts;
use downbeat_service::report::missed::MissedRequests;
use downbeat_service::unanswered::Unanswered;
use parking_lot::Mutex;

use crate::run::activity::Activity;
use crate::run::engine_run::RunFailure;

/// A version in service, as its requests hold it: it leaves its devices after its last request.
pub type Version = dyn Deref<Target = VersionRecord> + Send + Sync;

/// The part of a model version that its requests touch on their way.
pub struct VersionRecord {
    /// The model's name.
    pub name: String,
    /// The version's number.
    pub version: String,
    /// The most items that may wait in all queues together.
    pub queue_bound: u32,
    /// Probes of a device's policy: which requests it tries though the profile says they are late.
    /// The scheduler's queues have their own.
    pub probes: Mutex<Probes>,
    metrics: ModelMetrics,
    /// The loaded model.
    pub model: Arc<dyn Model>,
    activity: Arc<Activity>,
    waiting: AtomicU32,
    /// The queue that the last request joined, if that queue gathers requests.
    last_gathered: Mutex<Option<QueueHandle>>,
}

impl VersionRecord {
    /// The record of a version without requests.
    pub fn new(
        (name, version): (String, String),
        model: Arc<dyn Model>,
        metrics: ModelMetrics,
        activity: Arc<Activity>,
        queue_bound: u32,
    ) -> Self {
        let (probes, waiting, last_gathered) = Default::default();
        VersionRecord { name, version, queue_bound, probes, metrics, model, activity, waiting, last_gathered }
    }

    /// Why it waits for its executor process; `None` if it does not.
    pub fn restarting(&self) -> Option<String> {
        self.model.executor()?.down()
    }

    /// The error for an answer that the model's code gives.
    pub fn failed_answer(&self, error: RunError) -> ServiceError {
        self.failure(0, &RunFailure::of_request(error))
    }

    /// The error for the client of a request that failed on a device.
    pub fn failure(&self, device: usize, failure: &RunFailure) -> ServiceError {
        let name = &self.name;
        match (self.model.lost(device).or_else(|| self.restarting()), failure) {
            // The request itself was answered, by the model's own code.
            (_, RunFailure::Named(code, reason)) => named(*code, reason.clone()),
            (Some(lost), _) => ServiceError::Unavailable(format!("model '{name}': {lost}")),
            (None, RunFailure::Engine(reason)) => {
                ServiceError::Internal(format!("model '{name}' failed on this request: {reason}"))
            }
            (None, RunFailure::Ended(reason)) => ServiceError::DeadlineExceeded(format!("model '{name}': {reason}")),
            (None, RunFailure::Refused(reason)) => ServiceError::Unavailable(format!("model '{name}': {reason}")),
        }
    }

    /// Notes that a request has joined this queue, which gathers requests. Returns another queue
    /// whose requests wait in vain, as requests of another shape have begun to come.
    pub fn gathers_in(&self, queue: QueueHandle) -> Option<QueueHandle> {
        self.last_gathered.lock().replace(queue).filter(|before| *before != queue)
    }

    /// Items that wait in the scheduler's queues, all shapes.
    pub fn queued(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Counts `rows` items into the queue; false if there is no room for them. The count is exact,
    /// even if the version's shapes are in several shards.
    pub fn begin_waiting(&self, rows: u32) -> bool {
        let more = |waiting: u32| Some(waiting.saturating_add(rows)).filter(|waiting| *waiting <= self.queue_bound);
        self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Counts `rows` items out of the queue.
    pub fn end_waiting(&self, rows: u32) {
        self.waiting.fetch_sub(rows, Ordering::Relaxed);
    }

    /// The version's requests by time, and its launches by size.
    pub fn histograms(&self) -> [Vec<u64>; 2] {
        self.metrics.histograms()
    }

    /// The protocol's statistics of the version.
    pub fn statistics(&self) -> ModelStatistics {
        self.metrics.statistics(&self.name, &self.version)
    }

    /// The last requests that missed.
    pub fn missed(&self) -> &MissedRequests {
        self.metrics.missed()
    }

    /// The outcomes of the version's requests.
    pub fn counts(&self) -> Counts {
        self.metrics.counts()
    }

    /// Counts a launch of `rows` items for requests that waited, took, and were late as given.
    pub fn record_batch(
        &self,
        rows: u32,
        phases: Phases,
        requests: impl ExactSizeIterator<Item = (Duration, Duration, bool)> + Clone,
    ) {
        self.metrics.record_batch(rows, phases, requests);
    }

    /// Notes that the first answer of a decoupled model came `after` the arrival of its request.
    pub fn record_first_answer(&self, after: Duration) {
        self.metrics.record_first_answer(after);
    }

    /// Counts a request that got no result, `after` its arrival.
    pub fn record_not_answered(&self, reason: Unanswered, after: Duration) {
        // A model that refuses all requests runs nothing, and the server would rest instead of
        // naming the trouble.
        self.activity.stir();
        self.metrics.record_not_answered(reason, after);
    }
}

/// The error that a model's own code names. Clients get its words alone, as from Triton.
fn named(code: ErrorCode, reason: String) -> ServiceError {
    match code {
        ErrorCode::Unknown | ErrorCode::Internal => ServiceError::Internal(reason),
        ErrorCode::NotFound => ServiceError::NotFound(reason),
        ErrorCode::InvalidArgument => ServiceError::InvalidArgument(reason),
        ErrorCode::Unavailable | ErrorCode::Cancelled => ServiceError::Unavailable(reason),
        ErrorCode::Unsupported => ServiceError::Unimplemented(reason),
        ErrorCode::AlreadyExists => ServiceError::AlreadyExists(reason),
    }
}
