//! A request whose pictures or texts are made into tensors, before it joins its model's queue.

use std::sync::Arc;

use downbeat_core::{Duration, Time};
use downbeat_host::request::batch_codec::ShapeKey;
use downbeat_protocol::InferRequest;
use downbeat_service::budget::Reservation;
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::refusal::{busy_until, queue_full};
use downbeat_service::unanswered::Unanswered;

use super::intake::RETRY_AFTER;
use super::missed::Refused;
use super::{Limits, Serving, hold_inputs};
use crate::loaded_version::LoadedVersion;
use crate::preprocess::Preprocess;
use crate::serving::Model;

/// A place in a model's queue, held by a request that is not ready to join it. Dropping it gives it
/// up, and counts the request unless it was answered.
pub(super) struct HeldPlace<'a> {
    loaded: &'a LoadedVersion,
    rows: u32,
    arrival: Time,
    clock: Clock,
    /// The count that the end belongs to; `None`: no count.
    end: Option<Unanswered>,
    /// Whether the request still holds the place itself.
    is_held: bool,
}

impl HeldPlace<'_> {
    /// The request has joined the queue and keeps its place. With `joins_with_it` false, the device
    /// counts places by itself.
    pub fn pass_on(mut self, joins_with_it: bool) {
        self.end = None;
        self.is_held = !joins_with_it;
    }
}

impl Drop for HeldPlace<'_> {
    fn drop(&mut self) {
        if self.is_held {
            self.loaded.end_waiting(self.rows);
        }
        if let Some(reason) = self.end {
            self.loaded.record_not_answered(reason, self.clock.now().since(self.arrival));
        }
    }
}

/// A request that has become tensors.
pub(super) struct Prepared<'a> {
    /// The place in the queue that it joins now.
    pub place: HeldPlace<'a>,
    /// The bytes of its tensors in the budget, until it is answered.
    pub held: Reservation,
}

impl Serving {
    /// Makes a request's pictures or texts into the tensors that its model takes.
    ///
    /// **How it waits.** The request takes its place in the model's queue at once, with its size
    /// and its deadline, and gives it up when it is answered. A request that finds no place, or
    /// could not be ready in time, is refused before decoding. Then separate threads decode it,
    /// while batches run and others queue, and the scheduler gets it when it is ready. So every
    /// decision is about ready requests, and no device waits for a decoder. (Symphony §4.3 asks for
    /// the time when requests are ready: here that is always now.)
    ///
    /// The wait costs the request no turn. Queues are in order of deadlines, which count from
    /// arrival, and the threads work in the same order. The cost is that batches that wait for more
    /// requests do not know of the ones that are nearly ready; such batches wait until it is nearly
    /// too late anyway. The queue of a text depends on its shape, which is not known before either.
    ///
    /// # Errors
    /// `InvalidArgument` if an item is none, `QueueFull` and `DeadlineExceeded` as for any request.
    pub(super) async fn prepare<'a>(
        &'a self,
        served: &'a Model,
        loaded: &'a LoadedVersion,
        preprocess: &Arc<Preprocess>,
        request: &mut InferRequest,
        limits: &Limits,
        arrival: Time,
    ) -> Result<Prepared<'a>, Refused> {
        let items = preprocess.take(request, &loaded.codec)?;
        let work = preprocess.look(&items)?;
        let rows = items.len() as u32;
        let held = hold_inputs(&self.budget, &served.input_bytes, &loaded.name, work.bytes());
        let _input_bytes = held.inspect_err(|_| loaded.record_not_answered(Unanswered::QueueFull, Duration::ZERO))?;
        let mut held = self.budget.reservation();
        held.grow(work.bytes())?;
        let mut place = self.hold_place(loaded, rows, arrival)?;
        let latest = self.latest_begin(loaded, rows, limits.deadline);
        if let Err(error) = self.check_in_time(loaded, preprocess, limits, latest) {
            place.end = Some(Unanswered::Impossible);
            return Err(Refused { reason: place.end, error });
        }
        let made = preprocess.make(request, (items, work), &mut held, limits, latest, arrival).await;
        made.map_err(|(reason, error)| {
            place.end = reason;
            Refused { reason, error }
        })?;
        Ok(Prepared { place, held })
    }

    /// A place in a version's queue.
    fn hold_place<'a>(
        &self,
        loaded: &'a LoadedVersion,
        rows: u32,
        arrival: Time,
    ) -> Result<HeldPlace<'a>, ServiceError> {
        let clock = self.driver.clock();
        // The device counts the requests that wait on it.
        let is_full = loaded.hosts.is_routed && loaded.waiting().saturating_add(rows) > loaded.queue_bound;
        if is_full || !loaded.begin_waiting(rows) {
            loaded.record_not_answered(Unanswered::QueueFull, clock.now().since(arrival));
            return Err(queue_full(&loaded.name, loaded.queue_bound, RETRY_AFTER));
        }
        Ok(HeldPlace { loaded, rows, arrival, clock, end: Some(Unanswered::Cancelled), is_held: true })
    }

    /// The latest time to be ready, for a run by itself on an idle device.
    fn latest_begin(&self, loaded: &LoadedVersion, rows: u32, deadline: Time) -> Time {
        if deadline == Time::MAX {
            return Time::MAX;
        }
        // If shapes vary, the request's queue is not known yet.
        let queue = if loaded.codec.has_varying_shapes() { None } else { loaded.queue(&ShapeKey::new()) };
        match queue {
            Some(queue) if !queue.drops() => Time::MAX,
            Some(queue) => deadline - queue.least(rows),
            None => deadline,
        }
    }

    /// Refuses a request at once that could not be ready, or have a device, in time.
    fn check_in_time(
        &self,
        loaded: &LoadedVersion,
        preprocess: &Preprocess,
        limits: &Limits,
        latest: Time,
    ) -> Result<(), ServiceError> {
        if latest == Time::MAX {
            return Ok(());
        }
        let moment = self.driver.moment();
        let free = match loaded.hosts.is_routed {
            true => moment.now + loaded.hosts.free_in(),
            false if moment.expected_free == Time::MAX => moment.now,
            false => moment.expected_free,
        };
        let start = preprocess.begins(moment.now, limits.deadline).max(free);
        // A request that can begin now is let through: the model's profile may be wrong.
        if start <= moment.now || start <= latest {
            return Ok(());
        }
        let (needed, allowed) =
            (start.since(moment.now) + limits.deadline.since(latest), limits.deadline.since(moment.now));
        Err(busy_until(&loaded.name, needed, allowed))
    }
}
