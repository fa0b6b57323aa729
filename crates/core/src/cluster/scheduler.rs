//! The cluster scheduler: all model queues and the matchmaker on one thread.

use std::collections::VecDeque;

use super::dispatch_policy::DispatchPolicy;
use super::indexed_heap::IndexedHeap;
use super::matchmaker::{Grant, Matchmaker};
use super::model_queue::{ModelOptions, ModelQueue};
use super::request_queue::{Request, Ticket};
use crate::ids::{BatchId, DeviceId, ModelId, RequestId};
use crate::profile::LatencyProfile;
use crate::time::{Duration, Time};

/// The cluster scheduler: requests and completions in, dispatches and drops out.
///
/// A pure state machine. The driver calls a `handle_*` (or a command: `add_*`, `remove_*`, `set_*`) with the time of the
/// event, then takes every [`Scheduler::poll_output`], then asks [`Scheduler::poll_timeout`] when to call
/// [`Scheduler::handle_timeout`] if nothing else happens before. A call too early, too late or once too
/// often does no harm: whatever is due by the time of an event is done before the event.
///
/// Time never goes back: an event with an earlier time than its predecessor is taken as of the predecessor's.
///
/// Each accepted request is answered exactly once: it is a member of one [`Output::Dispatch`], or is the subject of one [`Output::Drop`],
/// or a [`Scheduler::handle_cancel`] returned `true` for it.
#[derive(Debug, Default)]
pub struct Scheduler {
    now: Time,
    /// By model; `None` once it is removed.
    queues: Vec<Option<Box<ModelQueue>>>,
    matchmaker: Matchmaker,
    /// By model: when its queue needs attention.
    wakes: IndexedHeap<Time>,
    outputs: VecDeque<Output>,
    next_batch: u64,
    /// Vectors given back by [`Scheduler::recycle`].
    spare: Vec<Vec<RequestId>>,
    stats: Stats,
    wake_margin: Duration,
}

/// A decision.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Output {
    /// Run this batch now.
    Dispatch {
        /// To be named in [`Scheduler::handle_completion`].
        batch: BatchId,
        /// Where.
        device: DeviceId,
        /// Of which model.
        model: ModelId,
        /// The requests, in queue order. To be given back with [`Scheduler::recycle`].
        members: Vec<RequestId>,
        /// Items: the sum of the members' sizes.
        size: u32,
        /// `l(size)`.
        expected: Duration,
    },
    /// This request will not run.
    Drop {
        /// The request.
        request: RequestId,
        /// Its model.
        model: ModelId,
        /// Why.
        reason: DropReason,
    },
}

/// Why a request left the queue without running.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DropReason {
    /// It could not have met its deadline even alone: `now + l(size) > deadline`.
    Hopeless,
    /// It would have held its batch below the target size ([`super::DropPolicy::WindowDrop`]).
    Sacrificed,
    /// Its `queue_expiry` passed, and its level says [`super::TimeoutAction::Reject`].
    QueueTimeout,
    /// Its model was removed.
    ModelRemoved,
}

/// Why a request was not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Reject {
    /// Its level's queue has no room.
    #[error("the queue is full: its bound is {bound} items")]
    QueueFull {
        /// [`super::PriorityLevel::max_queue`].
        bound: u32,
    },
    /// It cannot meet its deadline even on an idle device.
    #[error("the deadline cannot be met: execution takes {needed}, {allowed} are left")]
    DeadlineImpossible {
        /// `l(size)`.
        needed: Duration,
        /// Time to the deadline.
        allowed: Duration,
    },
    /// It is larger than a batch may be.
    #[error("the request is larger than the largest batch ({max_batch})")]
    TooLarge {
        /// [`ModelOptions::max_batch`].
        max_batch: u32,
    },
    /// There is no such model, or not any more.
    #[error("there is no such model")]
    UnknownModel,
    /// A request of no items.
    #[error("the request has a batch dimension of 0")]
    ZeroSize,
    /// The model has no such priority level.
    #[error("the model has no such priority level")]
    UnknownLevel,
}

/// What a wake-up is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeoutReason {
    /// A candidate may start (its `exec`), and a device is free.
    Schedulable(ModelId),
    /// A candidate expires, or a request becomes hopeless or has waited for too long.
    QueueDue(ModelId),
}

/// What has happened so far, in numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Batches dispatched.
    pub batches: u64,
    /// Items in them.
    pub items: u64,
    /// Completions that named no running batch: late, duplicate, or of a removed device.
    pub stray_completions: u64,
    /// Events that came with an earlier time than their predecessor.
    pub time_reversals: u64,
}

/// Spare vectors kept, at most.
const MAX_SPARE: usize = 1024;

impl Scheduler {
    /// Without models and devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Items that wait for `model`.
    pub fn queued(&self, model: ModelId) -> u32 {
        self.queue(model).map_or(0, ModelQueue::queued)
    }

    /// Devices present.
    pub fn devices(&self) -> u32 {
        self.matchmaker.devices()
    }

    /// Devices without a batch.
    pub fn free_devices(&self) -> u32 {
        self.matchmaker.free_devices()
    }

    /// When the next device is expected to be free: `Time::ZERO` if one is, `Time::MAX` if there is none at all.
    pub fn expected_free(&self) -> Time {
        self.matchmaker.expected_free()
    }

    /// The batch size that the model's window drop aims at; zero if there is no such model.
    pub fn target(&self, model: ModelId) -> u32 {
        self.queue(model).map_or(0, ModelQueue::target)
    }

    /// What has happened so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// A request has arrived. The ticket is for [`Scheduler::handle_cancel`].
    ///
    /// # Errors
    /// If it cannot be accepted; then it is answered by that, and nothing else will be said of it.
    pub fn handle_request(&mut self, now: Time, request: Request) -> Result<Ticket, Reject> {
        let now = self.advance(now);
        let queue = self.queues.get_mut(request.model.0 as usize).and_then(Option::as_deref_mut);
        let ticket = queue.ok_or(Reject::UnknownModel)?.enqueue(now, &request)?;
        self.refresh(now, request.model);
        self.dispatch(now);
        Ok(ticket)
    }

    /// A client is no longer interested. `true`: the request that `model` gave this ticket to was queued and has left. `false`: it is
    /// not there any more (it runs, or was answered before).
    pub fn handle_cancel(&mut self, now: Time, model: ModelId, ticket: Ticket) -> bool {
        let now = self.advance(now);
        let Some(queue) = self.queues.get_mut(model.0 as usize).and_then(Option::as_deref_mut) else { return false };
        if !queue.cancel(ticket) {
            return false;
        }
        self.refresh(now, model);
        self.dispatch(now);
        true
    }

    /// A batch is done, well or badly: its device is free. One that does not run there (late, duplicate, unknown, of a removed
    /// device) is counted and ignored.
    pub fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        let now = self.advance(now);
        match self.matchmaker.completed(device, batch) {
            Some(_) => self.dispatch(now),
            None => self.stats.stray_completions += 1,
        }
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        self.advance(now);
    }

    /// Adds a model.
    pub fn add_model(&mut self, now: Time, options: ModelOptions) -> ModelId {
        let now = self.advance(now);
        let id = self.matchmaker.add_model(options.max_in_flight);
        assert!(id.0 as usize == self.queues.len(), "queues are indexed by the matchmaker's model ids");
        let mut queue = ModelQueue::new(now, options, self.matchmaker.devices());
        queue.set_wake_margin(self.wake_margin);
        self.queues.push(Some(Box::new(queue)));
        id
    }

    /// Removes a model. Its queued requests are dropped, its running batches go on. Unknown: nothing happens.
    pub fn remove_model(&mut self, now: Time, model: ModelId) {
        self.advance(now);
        let Some(mut queue) = self.queues.get_mut(model.0 as usize).and_then(Option::take) else { return };
        queue.clear();
        while let Some(dropped) = queue.pop_dropped() {
            self.outputs.push_back(Output::Drop { request: dropped.request, model, reason: dropped.reason });
        }
        self.wakes.remove(model.0);
        self.matchmaker.remove_model(model);
    }

    /// Replaces a model's latency profile, also for what is queued. Unknown: nothing happens.
    pub fn set_profile(&mut self, now: Time, model: ModelId, profile: LatencyProfile) {
        let now = self.advance(now);
        if let Some(queue) = self.queues.get_mut(model.0 as usize).and_then(Option::as_deref_mut) {
            queue.set_profile(profile);
            self.refresh(now, model);
            self.dispatch(now);
        }
    }

    /// Replaces a model's dispatch policy, also for what is queued. Unknown: nothing happens.
    pub fn set_dispatch(&mut self, now: Time, model: ModelId, dispatch: DispatchPolicy) {
        let now = self.advance(now);
        if let Some(queue) = self.queues.get_mut(model.0 as usize).and_then(Option::as_deref_mut) {
            queue.set_dispatch(dispatch);
            self.refresh(now, model);
            self.dispatch(now);
        }
    }

    /// How late the driver's wake-ups may come (zero at first, as in the simulator). A batch that is deferred on purpose starts
    /// at least this much before the moment at which a member would be lost. It matters where `l(b+1)` is close to `l(b)`, so that
    /// the schedulable window is narrower than the clock is punctual, and for queue expiries.
    pub fn set_wake_margin(&mut self, now: Time, margin: Duration) {
        let now = self.advance(now);
        self.wake_margin = margin;
        for index in 0..self.queues.len() {
            if let Some(queue) = &mut self.queues[index] {
                queue.set_wake_margin(margin);
                self.refresh(now, ModelId(index as u32));
            }
        }
        self.dispatch(now);
    }

    /// Adds a device, free.
    pub fn add_device(&mut self, now: Time) -> DeviceId {
        let now = self.advance(now);
        let id = self.matchmaker.add_device();
        self.devices_changed();
        self.dispatch(now);
        id
    }

    /// Removes a device. A batch that runs on it is no longer waited for. Unknown: nothing happens.
    pub fn remove_device(&mut self, now: Time, device: DeviceId) {
        let now = self.advance(now);
        if self.matchmaker.remove_device(device) {
            self.devices_changed();
            self.dispatch(now);
        }
    }

    /// The next decision.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call [`Scheduler::handle_timeout`] if nothing happens before, and what for.
    pub fn poll_timeout(&self) -> Option<(Time, TimeoutReason)> {
        let due = self.wakes.peek().map(|(at, model)| (at, TimeoutReason::QueueDue(ModelId(model))));
        let exec = self.matchmaker.poll_timeout().map(|(at, model)| (at, TimeoutReason::Schedulable(model)));
        match (due, exec) {
            (Some(due), Some(exec)) => Some(if due.0 < exec.0 { due } else { exec }),
            (due, exec) => due.or(exec),
        }
    }

    /// Gives the member vector of a dispatch back, for reuse.
    pub fn recycle(&mut self, mut members: Vec<RequestId>) {
        if self.spare.len() < MAX_SPARE {
            members.clear();
            self.spare.push(members);
        }
    }

    fn queue(&self, model: ModelId) -> Option<&ModelQueue> {
        self.queues.get(model.0 as usize)?.as_deref()
    }

    /// Moves time on and does everything that was due by then.
    fn advance(&mut self, now: Time) -> Time {
        if now < self.now {
            self.stats.time_reversals += 1;
        }
        self.now = self.now.max(now);
        let now = self.now;
        while let Some((at, model)) = self.wakes.peek()
            && at <= now
        {
            self.refresh(now, ModelId(model));
            assert!(
                self.wakes.get(model).is_none_or(|next| next > now),
                "a queue that was attended to has nothing due, or time would stand still"
            );
        }
        self.dispatch(now);
        now
    }

    /// Has the queue work out its candidate and passes on what came of it.
    fn refresh(&mut self, now: Time, model: ModelId) {
        let Some(queue) = self.queues.get_mut(model.0 as usize).and_then(Option::as_deref_mut) else { return };
        let candidate = queue.update(now);
        while let Some(dropped) = queue.pop_dropped() {
            self.outputs.push_back(Output::Drop { request: dropped.request, model, reason: dropped.reason });
        }
        match queue.wake() {
            Some(at) => self.wakes.set(model.0, at),
            None => {
                self.wakes.remove(model.0);
            }
        }
        self.matchmaker.inform_candidate(model, candidate);
    }

    /// Brings candidates and devices together until one of them runs out.
    fn dispatch(&mut self, now: Time) {
        while let Some(grant) = self.matchmaker.poll_grant(now) {
            self.granted(now, grant);
        }
    }

    fn granted(&mut self, now: Time, grant: Grant) {
        let Grant { model, device } = grant;
        let queue = self.queues[model.0 as usize].as_deref_mut();
        let queue = queue.unwrap_or_else(|| panic!("a removed model has no candidate to be granted a device"));
        let mut members = self.spare.pop().unwrap_or_default();
        let size = queue.take(now, &mut members);
        if size == 0 {
            self.matchmaker.declined(grant);
            self.recycle(members);
        } else {
            let expected = queue.profile().latency(size);
            let batch = BatchId(self.next_batch);
            self.next_batch += 1;
            self.stats.batches += 1;
            self.stats.items += u64::from(size);
            self.matchmaker.started(grant, batch, now + expected);
            self.outputs.push_back(Output::Dispatch { batch, device, model, members, size, expected });
        }
        self.refresh(now, model);
    }

    fn devices_changed(&mut self) {
        let devices = self.matchmaker.devices();
        for queue in self.queues.iter_mut().flatten() {
            queue.set_devices(devices);
        }
    }
}
