//! A device policy at work for one model version on one device: its lanes, its requests, and the lock around them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::device::{
    DeviceDrop, DeviceModel, DeviceOutput, DeviceReject, DeviceRequest, DeviceScheduler, LaneId, LaunchId, SlotRun,
    Span,
};
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_engine::{Lane, LoadError};
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use super::desk::{Desk, Entry};
use super::device_log::{DeviceLogHead, Logged};
use super::exits::Exit;
use super::history::{History, PastLaunch};
use super::lane::{self, Outcome, Work};
use super::metrics::LaneMetrics;
use super::occupancy::Occupancy;
use super::tensors::BatchTensors;
use crate::call::Call;
use crate::clock::Clock;
use crate::decision_log::DeviceFile;
use crate::engine_run::RunFailure;
use crate::error::ServiceError;
use crate::handoff::Handoff;
use crate::metrics::Reason;
use crate::model_health::ModelHealth;
use crate::plan::{Admitted, Outputs};
use crate::watchdog::Watchdog;

/// How often a request is let through to a model whose profile says that it cannot meet its own SLO, to learn whether it does.
const PROBE_EVERY: Duration = Duration::from_millis(1_000);

/// The one model that it has.
const MODEL: ModelId = ModelId(0);

/// What a runtime is made of.
pub struct Setup {
    pub model: String,
    pub device: usize,
    pub clock: Clock,
    pub tensors: BatchTensors,
    pub policy: DeviceModel,
    /// Where its events are written down, if anywhere.
    pub log: Option<(DeviceLogHead, Arc<DeviceFile>)>,
    /// The policy's name.
    pub policy_name: &'static str,
    /// One for each lane of the policy, warm.
    pub engines: Vec<Box<dyn Lane>>,
    /// Segments of the whole model.
    pub segments: usize,
    /// What its batches take.
    pub profile: LatencyProfile,
    /// Where requests may leave before the last segment.
    pub exits: Arc<[Exit]>,
    pub metrics: LaneMetrics,
    pub occupancy: Arc<Occupancy>,
    /// Looks after the runs.
    pub watchdog: Arc<Watchdog>,
    /// Of the model version.
    pub health: Arc<ModelHealth>,
    /// Makes another lane of the model.
    pub new_lane: NewLane,
}

/// Makes another lane of a model on a device.
pub type NewLane = Box<dyn Fn() -> Result<Box<dyn Lane>, LoadError> + Send + Sync>;

/// A device policy at work for one model version on one device.
///
/// One lock guards the policy and what it decides about. It is held for a decision, never while tensors are copied, an engine runs or a client is
/// answered: what was decided is gathered under it and carried out after.
pub struct Runtime {
    model: String,
    device: usize,
    clock: Clock,
    tensors: BatchTensors,
    policy_name: &'static str,
    segments: usize,
    profile: LatencyProfile,
    exits: Arc<[Exit]>,
    metrics: LaneMetrics,
    occupancy: Arc<Occupancy>,
    watchdog: Arc<Watchdog>,
    health: Arc<ModelHealth>,
    new_lane: NewLane,
    lanes: Vec<Handoff<Work>>,
    inner: Mutex<Inner>,
    alarm: Condvar,
    history: Mutex<History>,
    outstanding: AtomicU32,
    next_request: AtomicU64,
}

struct Inner {
    scheduler: Logged,
    desk: Desk,
    /// Launches that run.
    running: u32,
    /// When the alarm will look next by itself.
    alarm_at: Time,
    probed: Option<Time>,
    stopped: bool,
}

/// What was decided under the lock, to be carried out after it.
#[derive(Default)]
struct Actions {
    writes: SmallVec<[Write; 1]>,
    launches: SmallVec<[(usize, Work); 2]>,
    replies: Vec<(Entry, LaunchId)>,
    drops: Vec<(Entry, DeviceDrop)>,
}

/// Inputs on their way into the ring.
struct Write {
    request: RequestId,
    slots: SlotRun,
    /// `None`: the client has gone.
    input: Option<Arc<Admitted>>,
}

impl Runtime {
    /// Starts the lanes' threads and the alarm.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn start(setup: Setup) -> std::io::Result<Arc<Self>> {
        let mut scheduler = DeviceScheduler::new();
        scheduler.handle_model(setup.clock.now(), MODEL, Some(setup.policy)).map_err(std::io::Error::other)?;
        let lanes = scheduler.lanes(MODEL).len();
        assert_eq!(setup.engines.len(), lanes, "each lane of the policy has one of the engine");
        let inner = Inner {
            scheduler: Logged::new(scheduler, setup.log),
            desk: Desk::default(),
            running: 0,
            alarm_at: Time::MAX,
            probed: None,
            stopped: false,
        };
        let runtime = Arc::new(Runtime {
            model: setup.model,
            device: setup.device,
            clock: setup.clock,
            tensors: setup.tensors,
            policy_name: setup.policy_name,
            segments: setup.segments,
            profile: setup.profile,
            exits: setup.exits,
            metrics: setup.metrics,
            occupancy: setup.occupancy,
            watchdog: setup.watchdog,
            health: setup.health,
            new_lane: setup.new_lane,
            lanes: (0..lanes).map(|_| Handoff::default()).collect(),
            inner: Mutex::new(inner),
            alarm: Condvar::new(),
            history: Mutex::default(),
            outstanding: AtomicU32::new(0),
            next_request: AtomicU64::new(0),
        });
        let start = || -> std::io::Result<()> {
            for (index, engine) in setup.engines.into_iter().enumerate() {
                lane::start(runtime.clone(), index, Some(engine))?;
            }
            let its = runtime.clone();
            let name = format!("alarm-{}", runtime.device);
            std::thread::Builder::new().name(name).spawn(move || its.ring_alarms())?;
            Ok(())
        };
        // Threads that have started end at once if another cannot.
        start().inspect_err(|_| runtime.stop())?;
        Ok(runtime)
    }

    /// Ends the threads once their present launches are over. What waits is not answered: to be called when nothing does.
    pub fn stop(&self) {
        self.inner.lock().stopped = true;
        self.alarm.notify_all();
        for lane in &self.lanes {
            lane.stop();
        }
    }

    /// Takes a request in, which has `length`; gives its name. The answer comes through the call's `reply`, always.
    pub fn submit(&self, mut call: Call, length: u32) -> RequestId {
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let rows = call.admitted.rows;
        let padded = self.tensors.padded_length(length);
        let (rejected, actions) = self.decide(|inner, now| {
            let mut request = DeviceRequest { id, model: MODEL, deadline: call.deadline, size: rows, length: padded };
            let mut result = inner.scheduler.handle_request(now, &request);
            if let Err(DeviceReject::DeadlineImpossible { .. }) = result
                && call.deadline_is_slo
                && inner.probed.is_none_or(|last| now.since(last) >= PROBE_EVERY)
            {
                inner.probed = Some(now);
                request.deadline = Time::MAX;
                result = inner.scheduler.handle_request(now, &request);
            }
            match result {
                Ok(()) => {
                    self.outstanding.fetch_add(rows, Ordering::Relaxed);
                    let input = Arc::new(std::mem::take(&mut call.admitted));
                    inner.desk.insert(id, Entry::new(call, input, length));
                    None
                }
                Err(reject) => Some((call, reject, now)),
            }
        });
        if let Some((call, reject, now)) = rejected {
            self.reject(call, reject, rows, now);
        }
        self.carry_out(actions, None);
        id
    }

    fn reject(&self, call: Call, reject: DeviceReject, rows: u32, now: Time) {
        let reject = match reject {
            DeviceReject::QueueFull { bound } if rows > bound => return call.never_fits(rows, bound, now),
            DeviceReject::QueueFull { bound } => Reject::QueueFull { bound },
            DeviceReject::DeadlineImpossible { needed, allowed } => Reject::DeadlineImpossible { needed, allowed },
            other => {
                let message = format!("model '{}': {other}", self.model);
                return call.fail(Reason::Engine, ServiceError::InvalidArgument(message), now);
            }
        };
        call.reject(&reject, &self.profile, now);
    }

    /// The client of a request has gone. It was counted by whoever says so.
    pub fn cancel(&self, request: RequestId) {
        let (_, actions) = self.decide(|inner, now| {
            let Some(entry) = inner.desk.remove(request) else { return };
            self.outstanding.fetch_sub(entry.rows, Ordering::Relaxed);
            inner.scheduler.handle_cancel(now, MODEL, request);
        });
        self.carry_out(actions, None);
    }

    /// A lane begins a launch.
    pub(super) fn begin(&self) -> Time {
        let now = self.clock.now();
        self.occupancy.begin(now);
        now
    }

    /// A lane has ended a launch, which it had from `begin` to `end`.
    pub(super) fn finish(&self, work: Work, begin: Time, end: Time, outcome: Outcome) {
        let Work { launch, members, .. } = work;
        self.occupancy.end(end);
        let asked = members.iter().map(|m| u64::from(m.rows) * u64::from(m.length)).sum();
        self.metrics.record_launch(&launch, asked, end.since(begin));
        self.history.lock().push(&launch, begin, end);
        let ((answered, failed, now), actions) = self.decide(|inner, now| {
            let (mut answered, mut failed) = (Vec::new(), Vec::new());
            inner.running -= 1;
            for (request, reason) in outcome.failed {
                // Before the completion, so that it goes no further.
                inner.scheduler.handle_cancel(now, MODEL, request);
                failed.extend(inner.desk.remove(request).map(|entry| (entry, reason)));
            }
            for (request, outputs) in outcome.answers {
                if outcome.alone {
                    inner.scheduler.handle_cancel(now, MODEL, request);
                    answered.extend(inner.desk.remove(request).map(|entry| (entry, outputs)));
                } else {
                    inner.desk.answer(request, outputs, begin, outcome.phases);
                }
            }
            if let Some(state) = outcome.state {
                inner.desk.keep(&members, state, begin, outcome.phases);
            }
            let exits: SmallVec<[RequestId; 4]> = outcome.exits.iter().map(|(request, _)| *request).collect();
            for (request, outputs) in outcome.exits {
                inner.desk.exit(request, outputs);
            }
            inner.scheduler.handle_completion(now, launch.id, Span { start: begin, end }, &exits);
            (answered, failed, now)
        });
        self.answer_alone(answered, failed, now);
        self.carry_out(actions, Some(launch.rows));
    }

    /// Answers the members of a launch that failed as a whole.
    fn answer_alone(&self, answered: Vec<(Entry, Outputs)>, failed: Vec<(Entry, RunFailure)>, now: Time) {
        for (entry, outputs) in answered {
            self.outstanding.fetch_sub(entry.rows, Ordering::Relaxed);
            entry.call.executable.record_alone(entry.rows, now.since(entry.call.arrival));
            // A client that is gone has nobody to tell.
            let _ = entry.call.reply.send(Ok(outputs));
        }
        for (entry, reason) in failed {
            self.outstanding.fetch_sub(entry.rows, Ordering::Relaxed);
            let failure = entry.call.executable.failure(self.device, &reason);
            entry.call.fail(Reason::of(&reason), failure, now);
        }
    }

    /// Tells the policy something, and takes what it decides.
    fn decide<R>(&self, tell: impl FnOnce(&mut Inner, Time) -> R) -> (R, Actions) {
        let begin = self.clock.now();
        let mut actions = Actions::default();
        let told = {
            let mut inner = self.inner.lock();
            // Read under the lock: for the policy time never goes back.
            let told = tell(&mut inner, self.clock.now());
            self.settle(&mut inner, &mut actions);
            told
        };
        self.metrics.record_decision(self.clock.now().since(begin));
        (told, actions)
    }

    /// Takes the policy's decisions, and sees to it that the alarm rings in time.
    fn settle(&self, inner: &mut Inner, actions: &mut Actions) {
        while let Some(output) = inner.scheduler.poll_output() {
            match output {
                DeviceOutput::Admit { request, slots, .. } => {
                    let input = inner.desk.get(request).and_then(|entry| entry.input.clone());
                    actions.writes.push(Write { request, slots, input });
                }
                DeviceOutput::Launch(launch) => {
                    inner.running += 1;
                    let lane = launch.lane.0 as usize;
                    actions.launches.push((lane, inner.desk.work(launch)));
                }
                DeviceOutput::Reply { request, launch } => {
                    actions.replies.extend(inner.desk.remove(request).map(|entry| (entry, launch)));
                }
                DeviceOutput::Drop { request, reason } => {
                    actions.drops.extend(inner.desk.remove(request).map(|entry| (entry, reason)));
                }
                DeviceOutput::Note { note, .. } => self.metrics.record_note(&note),
                other => {
                    tracing::error!(model = self.model, ?other, "a decision that nobody carries out: this is a defect")
                }
            }
        }
        let at = inner.scheduler.poll_timeout().map_or(Time::MAX, |(at, _)| at);
        if at < inner.alarm_at {
            inner.alarm_at = at;
            self.alarm.notify_one();
        }
    }

    /// Carries out what was decided, and what follows from it. `rows`: items of the launch that has ended.
    fn carry_out(&self, mut actions: Actions, rows: Option<u32>) {
        loop {
            let Actions { writes, launches, replies, drops } = actions;
            for (lane, work) in launches {
                self.slot(lane).put(work);
            }
            self.reply(replies, rows.unwrap_or(0));
            for (entry, DeviceDrop::Hopeless | DeviceDrop::Removed) in drops {
                self.outstanding.fetch_sub(entry.rows, Ordering::Relaxed);
                entry.call.drop_for(DropReason::Hopeless, self.clock.now());
            }
            if writes.is_empty() {
                return;
            }
            let written: SmallVec<[bool; 1]> = writes.iter().map(|write| self.write(write)).collect();
            ((), actions) = self.decide(|inner, now| {
                for (write, written) in writes.into_iter().zip(written) {
                    if written && let Some(entry) = inner.desk.get(write.request) {
                        entry.slots = Some(write.slots);
                        // Later segments may fail when the slots have long been given to others.
                        if self.segments == 1 {
                            entry.input = None;
                        }
                    }
                    inner.scheduler.handle_input(now, MODEL, write.request);
                }
            });
        }
    }

    /// Copies inputs into the ring. Not written: their launch takes them from where they are.
    fn write(&self, write: &Write) -> bool {
        write.input.as_ref().is_some_and(|input| self.tensors.write(input, write.slots))
    }

    fn reply(&self, replies: Vec<(Entry, LaunchId)>, rows: u32) {
        let now = self.clock.now();
        let Some((first, _)) = replies.first() else { return };
        let (executable, phases) = (first.call.executable.clone(), first.phases);
        let times = |entry: &Entry| {
            let call = &entry.call;
            (entry.begin.unwrap_or(now).since(call.arrival), now.since(call.arrival), now > call.deadline)
        };
        executable.metrics.record_batch(rows, phases, replies.iter().map(|(entry, _)| times(entry)));
        executable.statistics.lock().record_batch(
            Clock::unix_millis(),
            rows,
            phases,
            replies.iter().map(|(entry, _)| times(entry)).map(|(queued, took, _)| (queued, took)),
        );
        for (entry, launch) in replies {
            self.outstanding.fetch_sub(entry.rows, Ordering::Relaxed);
            let Some(outputs) = entry.outputs else {
                tracing::error!(
                    model = self.model,
                    ?launch,
                    "a request was to be answered without outputs: this is a defect"
                );
                continue;
            };
            // A client that left meanwhile has been computed for; there is nobody to tell.
            let _ = entry.call.reply.send(Ok(outputs));
        }
    }

    /// The life of the alarm's thread.
    fn ring_alarms(&self) {
        let mut inner = self.inner.lock();
        while !inner.stopped {
            let now = self.clock.now();
            let at = inner.scheduler.poll_timeout().map_or(Time::MAX, |(at, _)| at);
            if at <= now {
                let mut actions = Actions::default();
                inner.scheduler.handle_timeout(now);
                self.settle(&mut inner, &mut actions);
                drop(inner);
                self.carry_out(actions, None);
                inner = self.inner.lock();
                continue;
            }
            inner.alarm_at = at;
            match self.clock.instant(at) {
                Some(instant) => {
                    self.alarm.wait_until(&mut inner, instant);
                }
                None => self.alarm.wait(&mut inner),
            }
        }
    }

    pub(super) fn slot(&self, lane: usize) -> &Handoff<Work> {
        &self.lanes[lane]
    }

    pub(super) fn device(&self) -> usize {
        self.device
    }

    pub(super) fn model(&self) -> &str {
        &self.model
    }

    /// Whether the client of a request is still there.
    pub(super) fn is_awaited(&self, request: RequestId) -> bool {
        self.inner.lock().desk.get(request).is_some()
    }

    pub(super) fn profile(&self) -> &LatencyProfile {
        &self.profile
    }

    pub(super) fn watchdog(&self) -> &Arc<Watchdog> {
        &self.watchdog
    }

    pub(super) fn health(&self) -> &Arc<ModelHealth> {
        &self.health
    }

    /// Another lane of the model on the device.
    pub(super) fn new_lane(&self) -> Result<Box<dyn Lane>, String> {
        (self.new_lane)().map_err(|error| error.to_string())
    }

    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    pub(super) fn segments(&self) -> usize {
        self.segments
    }

    /// The exits after a segment.
    pub(super) fn exits_after(&self, segment: usize) -> impl Iterator<Item = &Exit> {
        self.exits.iter().filter(move |exit| exit.segment() == segment)
    }

    pub(super) fn tensors(&self) -> &BatchTensors {
        &self.tensors
    }

    /// Items that were taken in and are not answered.
    pub(super) fn outstanding(&self) -> u32 {
        self.outstanding.load(Ordering::Relaxed)
    }

    /// Items that wait for a launch.
    pub(super) fn waiting(&self) -> u32 {
        self.inner.lock().scheduler.stats(MODEL).waiting
    }

    /// Brings the gauges up to date.
    pub(super) fn update_metrics(&self) {
        let (running, stats) = {
            let inner = self.inner.lock();
            (inner.running, inner.scheduler.stats(MODEL))
        };
        self.metrics.set(self.lanes.len(), running, stats);
    }

    /// The policy's name, its lanes' largest batches, and the launches that ended at `from` or later, with whether all of them are there.
    pub(super) fn past(&self, from: Time) -> (&'static str, Vec<u32>, Vec<PastLaunch>, bool) {
        let lanes = {
            let inner = self.inner.lock();
            let specs = inner.scheduler.lanes(MODEL).iter().filter_map(|lane: &LaneId| inner.scheduler.lane(*lane));
            specs.map(|lane| lane.max_rows).collect()
        };
        let (launches, complete) = self.history.lock().since(from);
        (self.policy_name, lanes, launches, complete)
    }
}
