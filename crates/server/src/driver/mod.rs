//! Runs the scheduler of `downbeat-core` on this machine's threads.
//!
//! There is no scheduler thread. Whoever has an event (a frontend with a request, a device with a completion, the
//! alarm with an expiry) puts it into the mailbox and tries to become the one who works it off; if somebody else is
//! at it already, that one will find the event, and nobody waits. So an event costs no wake-up and no context
//! switch, a device that completes a batch usually leaves with its next one in hand, and the scheduler itself stays
//! the single-threaded state machine that the simulator runs. The price: a frontend may work off others' events
//! before it returns to its own; an event takes about a microsecond.
//!
//! This file has the only calls of the scheduler's `handle_*`, and each gets the time of this moment.

mod alarm;
mod device;

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crossbeam_queue::SegQueue;
use downbeat_core::cluster::{self, DropReason, ModelOptions, Output, Reject, Request, Scheduler};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::clock::Clock;
use crate::error::ServiceError;
use crate::executable::{Executable, Queue};
use crate::metrics::{Metrics, Reason};
use crate::plan::{Admitted, Outputs};
use alarm::Alarm;
use device::{DeviceSlot, Launch};

/// How often a request is let through to a model whose profile says that it cannot meet its own SLO, to learn
/// whether that is (still) true. Without it a profile that was measured in a bad moment would never be corrected.
const PROBE_EVERY: Duration = Duration::from_millis(1_000);

/// A request on its way through the driver.
pub struct Job {
    /// Its tensors.
    pub admitted: Admitted,
    /// The model version that answers it.
    pub executable: Arc<Executable>,
    /// The scheduler's queue for its shape.
    pub queue: Arc<Queue>,
    /// When it came.
    pub arrival: Time,
    /// When it has to be finished; [`Time::MAX`] if it may take any time.
    pub deadline: Time,
    /// Whether the deadline is the model's SLO, not a limit that the client set.
    pub deadline_is_slo: bool,
    /// Where the answer goes. Closed: the client is gone.
    pub reply: oneshot::Sender<Result<Outputs, ServiceError>>,
}

/// When and how a request may wait.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// When it has been in the queue for too long; [`Time::MAX`]: never.
    pub queue_expiry: Time,
    /// Index of its priority level, 0 the most urgent.
    pub level: u32,
}

enum Event {
    Submit(RequestId, Waiting, Job),
    Cancel(ModelId, RequestId),
    Completed { device: DeviceId, batch: BatchId, refined: Option<(ModelId, LatencyProfile)> },
    Expired,
}

/// Hashes a request id, which is a counter: spreading it is enough.
#[derive(Default)]
struct CounterHasher(u64);

impl Hasher for CounterHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(20);
    }
}

/// How much before its last moment a deferred batch starts: for an alarm that comes late, executions that take longer than
/// their profile, and the way of the answer, on a machine that has other things to do. It costs no capacity: while the devices are
/// busy a batch may still start until the last moment.
const WAKE_MARGIN: Duration = Duration::from_millis(5);

/// What only one thread at a time touches.
struct State {
    scheduler: Scheduler,
    /// The queued requests. Everything in the scheduler's queues is here, and nothing else.
    jobs: HashMap<RequestId, (Job, cluster::Ticket), BuildHasherDefault<CounterHasher>>,
    probed: BTreeMap<ModelId, Time>,
}

/// What the frontends, the devices and the alarm share.
struct Shared {
    clock: Clock,
    mailbox: SegQueue<Event>,
    state: Mutex<State>,
    devices: Vec<Arc<DeviceSlot>>,
    alarm: Alarm,
}

/// The scheduler at work, with its devices. Dropping it stops the threads.
pub struct Driver {
    shared: Arc<Shared>,
    next_request: AtomicU64,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Driver {
    /// Starts `devices` device threads and the alarm.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn start(clock: Clock, devices: usize, metrics: &Metrics) -> std::io::Result<Self> {
        let mut scheduler = Scheduler::new();
        scheduler.set_wake_margin(clock.now(), WAKE_MARGIN);
        let slots: Vec<_> = (0..devices)
            .map(|index| {
                let id = scheduler.add_device(clock.now(), DeviceKind(0));
                Arc::new(DeviceSlot::new(id, index, metrics.device(index)))
            })
            .collect();
        let shared = Arc::new(Shared {
            clock,
            mailbox: SegQueue::new(),
            state: Mutex::new(State { scheduler, jobs: HashMap::default(), probed: BTreeMap::new() }),
            devices: slots.clone(),
            alarm: Alarm::default(),
        });
        let mut threads = Vec::new();
        for slot in slots {
            let shared = shared.clone();
            threads.push(
                std::thread::Builder::new()
                    .name(format!("device-{}", slot.index()))
                    .spawn(move || device::work(&slot, &shared))?,
            );
        }
        let alarmed = shared.clone();
        threads.push(std::thread::Builder::new().name("alarm".to_owned()).spawn(move || {
            while alarmed.alarm.wait(&alarmed.clock) {
                alarmed.post(Event::Expired);
            }
        })?);
        Ok(Driver { shared, next_request: AtomicU64::new(0), threads })
    }

    /// How many devices there are.
    pub fn devices(&self) -> usize {
        self.shared.devices.len()
    }

    /// The clock that the scheduler's time comes from.
    pub fn clock(&self) -> Clock {
        self.shared.clock
    }

    /// Makes a queue in the scheduler.
    pub fn add_queue(&self, options: ModelOptions) -> ModelId {
        self.shared.command(|scheduler, now| scheduler.add_model(now, options))
    }

    /// Removes a queue if nothing waits in it; says whether nothing did.
    pub fn remove_empty_queue(&self, queue: ModelId) -> bool {
        self.shared.command(|scheduler, now| {
            let empty = scheduler.queued(queue) == 0;
            if empty {
                scheduler.remove_model(now, queue);
            }
            empty
        })
    }

    /// Removes a queue; what waits in it is dropped as unloaded.
    pub fn remove_queue(&self, queue: ModelId) {
        self.shared.command(|scheduler, now| scheduler.remove_model(now, queue));
    }

    /// Hands a request over. The answer comes through `job.reply`, always. Dropping the ticket cancels the request.
    pub fn submit(&self, waiting: Waiting, job: Job) -> Ticket {
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let ticket = Ticket {
            shared: self.shared.clone(),
            executable: job.executable.clone(),
            model: job.queue.id,
            request: id,
            arrival: job.arrival,
            end: Some(Reason::Cancelled),
        };
        self.shared.post(Event::Submit(id, waiting, job));
        ticket
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.shared.alarm.stop();
        for slot in &self.shared.devices {
            slot.stop();
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so already.
            let _ = thread.join();
        }
    }
}

/// The right to cancel a request: by dropping it. Whoever drops it has the request counted, in whatever state it is.
pub struct Ticket {
    shared: Arc<Shared>,
    executable: Arc<Executable>,
    model: ModelId,
    request: RequestId,
    arrival: Time,
    /// What to count it as; `None`: it is answered.
    end: Option<Reason>,
}

impl Ticket {
    /// The request is answered: there is nothing left to cancel.
    pub fn close(mut self) {
        self.end = None;
    }

    /// The client's own time for the request is over.
    pub fn time_out(mut self) {
        self.end = Some(Reason::Timeout);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(reason) = self.end {
            self.executable.record_not_answered(reason, self.shared.clock.now().since(self.arrival));
            self.shared.post(Event::Cancel(self.model, self.request));
        }
    }
}

impl Shared {
    /// Leaves an event for whoever works off the mailbox: this thread, if nobody else does.
    fn post(&self, event: Event) {
        self.mailbox.push(event);
        self.work_off();
    }

    fn work_off(&self) {
        loop {
            // The fences order "event put in, lock tried" here against "lock released, mailbox seen empty" there:
            // one of the two threads sees the other.
            fence(Ordering::SeqCst);
            let Some(mut state) = self.state.try_lock() else { return };
            self.handle_mailbox(&mut state);
            drop(state);
            fence(Ordering::SeqCst);
            if self.mailbox.is_empty() {
                return;
            }
        }
    }

    /// Runs a rare command on the scheduler, waiting for the lock.
    fn command<R>(&self, command: impl FnOnce(&mut Scheduler, Time) -> R) -> R {
        let mut state = self.state.lock();
        let result = command(&mut state.scheduler, self.clock.now());
        self.carry_out(&mut state);
        drop(state);
        self.work_off();
        result
    }

    fn handle_mailbox(&self, state: &mut State) {
        while let Some(event) = self.mailbox.pop() {
            let now = self.clock.now();
            match event {
                Event::Submit(id, waiting, job) => state.handle_submit(now, id, waiting, job),
                Event::Cancel(model, request) => {
                    // Counted by whoever dropped the ticket.
                    if let Some((_, ticket)) = state.jobs.get(&request)
                        && state.scheduler.handle_cancel(now, model, *ticket)
                    {
                        drop(state.take(request));
                    }
                }
                Event::Completed { device, batch, refined } => {
                    if let Some((model, profile)) = refined {
                        state.scheduler.set_profile(now, model, profile);
                    }
                    state.scheduler.handle_completion(now, device, batch);
                }
                Event::Expired => state.scheduler.handle_timeout(now),
            }
            self.carry_out(state);
        }
        match state.scheduler.poll_timeout() {
            Some((when, _)) => self.alarm.set(when),
            None => self.alarm.set(Time::MAX),
        }
    }

    /// Carries out what the scheduler decided.
    fn carry_out(&self, state: &mut State) {
        while let Some(output) = state.scheduler.poll_output() {
            match output {
                Output::Dispatch { batch, device, mut members, .. } => {
                    let jobs = members.drain(..).filter_map(|id| state.take(id)).collect();
                    state.scheduler.recycle(members);
                    let slot = self.devices.iter().find(|slot| slot.id() == device);
                    assert!(slot.is_some(), "the scheduler dispatched to a device that it was never given");
                    if let Some(slot) = slot {
                        slot.launch(Launch { batch, jobs, dispatched: self.clock.now() });
                    }
                }
                Output::Drop { request, reason, .. } => {
                    if let Some(job) = state.take(request) {
                        job.drop_for(reason, self.clock.now());
                    }
                }
            }
        }
    }
}

impl State {
    fn handle_submit(&mut self, now: Time, id: RequestId, waiting: Waiting, job: Job) {
        let mut request = Request {
            id,
            model: job.queue.id,
            deadline: job.deadline,
            queue_expiry: waiting.queue_expiry,
            level: waiting.level,
            size: job.admitted.rows,
        };
        let bound = job.executable.queue_bound;
        if request.size > bound {
            let model = &job.executable.name;
            let message = format!(
                "a request of {} items can never wait for model '{model}': its queue holds at most {bound}",
                request.size
            );
            return job.fail(Reason::QueueFull, ServiceError::InvalidArgument(message), now);
        }
        // Every device is busy for longer than the deadline allows: known now, so said now.
        let start = now.max(self.scheduler.expected_free());
        if job.queue.drops && start > now && start != Time::MAX && request.deadline != Time::MAX {
            let needed = job.queue.refiner.lock().profile().latency(request.size);
            if start + needed > request.deadline {
                let (needed, allowed) = (start.since(now) + needed, request.deadline.since(now));
                return job.reject_busy(needed, allowed, now);
            }
        }
        // The version's own bound, whatever the number of shapes and levels its requests are spread over.
        if !job.executable.begin_waiting(request.size) {
            return job.reject(&Reject::QueueFull { bound }, now);
        }
        let mut result = self.scheduler.handle_request(now, request);
        if let Err(Reject::DeadlineImpossible { .. }) = result
            && job.deadline_is_slo
            && self.probed.get(&job.queue.id).is_none_or(|last| now.since(*last) >= PROBE_EVERY)
        {
            self.probed.insert(job.queue.id, now);
            request.deadline = Time::MAX;
            result = self.scheduler.handle_request(now, request);
        }
        match result {
            Ok(ticket) => {
                self.jobs.insert(id, (job, ticket));
            }
            Err(reject) => {
                job.executable.end_waiting(job.admitted.rows);
                job.reject(&reject, now);
            }
        }
    }

    /// Takes out a request that waits no more.
    fn take(&mut self, request: RequestId) -> Option<Job> {
        let (job, _) = self.jobs.remove(&request)?;
        job.executable.end_waiting(job.admitted.rows);
        Some(job)
    }
}

impl Job {
    /// Answers a request that was not admitted.
    fn reject(self, reject: &Reject, now: Time) {
        let model = &self.executable.name;
        let (reason, error) = match reject {
            Reject::QueueFull { bound } => {
                let profile = self.queue.refiner.lock().profile().clone();
                let batches = u64::from(bound.div_ceil(profile.max_batch()));
                (
                    Reason::QueueFull,
                    ServiceError::QueueFull {
                        message: format!(
                            "the queue of model '{model}' is full: it holds at most {bound}; try again later"
                        ),
                        retry_after: profile.latency(profile.max_batch()).saturating_mul(batches),
                    },
                )
            }
            Reject::DeadlineImpossible { needed, allowed } => (
                Reason::Impossible,
                ServiceError::DeadlineExceeded(format!(
                    "model '{model}' needs {needed} for this request even on an idle device, but its deadline allows \
                     {allowed}; allow more time ({})",
                    if self.deadline_is_slo { "the model's slo_ms" } else { "the request's timeout" }
                )),
            ),
            Reject::UnknownModel => {
                (Reason::Unloaded, ServiceError::Unavailable(format!("model '{model}' is being unloaded")))
            }
            other => (Reason::Engine, ServiceError::InvalidArgument(format!("model '{model}': {other}"))),
        };
        self.fail(reason, error, now);
    }

    /// Answers a request whose deadline is over before any device is expected to be done with it.
    fn reject_busy(self, needed: Duration, allowed: Duration, now: Time) {
        let message = format!(
            "model '{}' could not finish this request in less than {needed}, as all devices are busy, and its deadline \
             allows {allowed}",
            self.executable.name
        );
        self.fail(Reason::Impossible, ServiceError::DeadlineExceeded(message), now);
    }

    /// Answers a request that the scheduler dropped from its queue.
    fn drop_for(self, reason: DropReason, now: Time) {
        let model = &self.executable.name;
        let waited = now.since(self.arrival);
        let (reason, error) = match reason {
            DropReason::QueueTimeout => (
                Reason::QueueTimeout,
                ServiceError::DeadlineExceeded(format!(
                    "the request waited {waited} in the queue of model '{model}', longer than its queue policy allows"
                )),
            ),
            DropReason::ModelRemoved => {
                (Reason::Unloaded, ServiceError::Unavailable(format!("model '{model}' was unloaded")))
            }
            DropReason::Sacrificed => (
                Reason::Sacrificed,
                ServiceError::DeadlineExceeded(format!(
                    "dropped after {waited} in the queue of model '{model}': under this load it would have missed its \
                     deadline or cost those behind it theirs"
                )),
            ),
            DropReason::Hopeless => (
                Reason::Hopeless,
                ServiceError::DeadlineExceeded(format!(
                    "dropped after {waited} in the queue of model '{model}': it could no longer finish by its deadline"
                )),
            ),
        };
        self.fail(reason, error, now);
    }

    /// Answers with an error, and counts it.
    fn fail(self, reason: Reason, error: ServiceError, now: Time) {
        self.executable.record_not_answered(reason, now.since(self.arrival));
        // A receiver that is gone was counted all the same: the request was not answered.
        let _ = self.reply.send(Err(error));
    }
}
