//! A request that waits for its answer.

use std::sync::Arc;

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_service::error::ServiceError;
use downbeat_service::refusal::{self, FullBatch};
use downbeat_service::report::missed::Miss;
use downbeat_service::tenants::Charge;
use downbeat_service::traces::open::TracePart;
use downbeat_service::unanswered::Unanswered;

use crate::request::batch_codec::Admitted;
use crate::request::reply::{Answered, Reply};
use crate::request::step_mark::StepMark;
use crate::request::version_record::Version;

/// A request that waits for its answer.
pub struct Call {
    /// The request's tensors, checked.
    pub admitted: Admitted,
    /// The version that the request is for.
    pub loaded: Arc<Version>,
    /// When the request arrived.
    pub arrival: Time,
    /// When it must be finished; [`Time::MAX`] if it may take any time.
    pub deadline: Time,
    /// Whether the deadline is the model's SLO, not a limit that the client set.
    pub deadline_is_slo: bool,
    /// Whether it came to a device's policy without a deadline, to measure the model.
    pub is_probe: bool,
    /// The step of a pipeline that it is.
    pub step: Option<Arc<StepMark>>,
    /// The device time that its tenant was charged; `None`: the server has no tenants.
    pub charge: Option<Box<Charge>>,
    /// The part of the trace that takes the marks of this call; `None`: the request is not traced.
    pub trace: Option<Box<TracePart>>,
    /// The receiver of the answer. Closed: the client is gone.
    pub reply: Reply,
}

impl Call {
    /// Whether a request runs without a deadline as a probe, though the model's `profile` says that
    /// it cannot meet its own.
    pub fn may_probe(&mut self, profile: &LatencyProfile, now: Time) -> bool {
        let doubt = profile.doubt(self.admitted.rows, self.deadline.since(now));
        let needed = profile.latency(self.admitted.rows);
        self.is_probe = doubt.is_some_and(|doubt| self.loaded.probes.lock().tries(now, doubt, needed));
        self.is_probe
    }

    /// Answers a request that was not admitted. `profile` is that of its batches.
    pub fn reject(mut self, reject: &Reject, profile: &LatencyProfile, now: Time) {
        // Such a request cannot run on idle devices either: its tenant's share is not the reason.
        if let Reject::DeadlineImpossible { .. } = reject
            && let Some(charge) = self.charge.take()
        {
            charge.give_back();
        }
        let full = FullBatch { items: profile.max_batch(), takes: profile.latency(profile.max_batch()) };
        let (reason, error) = refusal::rejected(&self.loaded.name, reject, self.deadline_is_slo, full);
        self.fail(reason, error, now);
    }

    /// Answers a request of more items than the queue can ever hold.
    pub fn never_fits(self, rows: u32, bound: u32, now: Time) {
        let model = &self.loaded.name;
        let message = format!(
            "Exceeds maximum queue size: a request of {rows} items can never wait for model '{model}', whose queue holds at most {bound}"
        );
        self.fail(Unanswered::QueueFull, ServiceError::InvalidArgument(message), now);
    }

    /// Answers a request whose deadline comes before any device is expected to finish it.
    pub fn reject_busy(self, needed: Duration, allowed: Duration, now: Time) {
        let error = refusal::busy_until(&self.loaded.name, needed, allowed);
        self.fail(Unanswered::Impossible, error, now);
    }

    /// Answers a request that the scheduler dropped from its queue.
    pub fn drop_for(self, reason: DropReason, now: Time) {
        let (reason, error) = refusal::dropped(&self.loaded.name, reason, now.since(self.arrival));
        self.fail(reason, error, now);
    }

    /// Answers with an error, and counts it.
    pub fn fail(self, reason: Unanswered, error: ServiceError, now: Time) {
        let error = match &self.charge {
            None => error,
            Some(charge) => charge.refuse(now, &self.loaded.name, reason, error),
        };
        self.loaded.record_not_answered(reason, now.since(self.arrival));
        if let Some(trace) = &self.trace {
            trace.failed(reason, now);
        }
        // The request counts as unanswered even if its client has gone.
        let miss = Some(Box::new(Miss::Unanswered(reason)));
        self.reply.send_answered(Answered { answer: Err(error), miss });
    }
}
