//! The rehearsal of the scheduler. Its thread also trains the predictor of operator groups.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_queue::ArrayQueue;
use downbeat_core::cluster::{
    Behaviour, DispatchPolicy, ModelOptions, NetworkBudget, Order, OrderPolicy, PastArrival, Rehearsal,
    RehearsalDecision,
};
use downbeat_core::journal::cluster::TrialRecord;
use downbeat_core::{DeviceKind, DeviceProfiles, Duration, ModelId, Time};
use downbeat_driver::{Cluster, Handler, QueueHandle};
use downbeat_service::metrics::RehearsalMetrics;
use downbeat_service::report::scheduler_status::{
    CpuStatus, OrderStatus, QueueStatus, SchedulerStatus, Source, TrialStatus,
};
use parking_lot::{Condvar, Mutex};
use rustix::time::{ClockId, clock_gettime};

use super::arrival_rings::{ArrivalFeed, ArrivalRings, Event};
use super::remembered::Remembered;
use super::step_weights::{PipelineStage, StepWeights, WeightDecision};
use crate::run::activity::Activity;

/// How long before its latest start a deferred batch starts. On a machine with other work, this
/// leaves time for late alarms, for runs longer than their profile, and for the answer's way. The
/// margin costs no capacity: while the devices are busy, a batch may still start until its latest
/// start.
pub const WAKE_MARGIN: Duration = Duration::from_millis(5);

/// How often the thread looks for work, and takes new events.
const EVERY: Duration = Duration::from_millis(50);
/// The most arrivals and answers that a shard leaves for the rehearsal.
const MOST: usize = 16 << 10;
/// Replayed events between two looks at the clock: about 100 us.
const EVENTS: u64 = 256;
/// The thread may save up its share of this many seconds, so that a trial is not spread out
/// needlessly.
const SAVED: f64 = 0.5;
/// The most executions that wait for the rehearsal. Of more, the last ones stay.
const RUNS: usize = 256;
/// Seconds over which the reported share of a core is averaged.
const SAID_OVER: f64 = 10.0;

/// The inputs and the last results of the rehearsal.
pub struct Rehearser {
    /// The share of a core's time for the rehearsal; 0: no rehearsal.
    share: f64,
    order: OrderPolicy,
    /// Whether there is a decision log, which gets the trials.
    is_logged: bool,
    arrivals: ArrivalRings,
    /// Times of executions, as shares of their profiles' times.
    runs: ArrayQueue<(ModelId, f64)>,
    told: Mutex<Told>,
    /// The requests of the last minutes. Only its thread writes.
    remembered: Mutex<Remembered>,
    wake: Condvar,
    activity: Arc<Activity>,
    /// Whether there are pipelines whose weights are rehearsed.
    pipelines: AtomicBool,
}

#[derive(Default)]
struct Told {
    queues: BTreeMap<ModelId, Queue>,
    /// Changes that the thread has not read yet.
    changes: Vec<Change>,
    stopped: bool,
    trials: u64,
    changed: u64,
    lost: u64,
    /// The share of a core that the thread had lately.
    used: f64,
    /// The order of turns that a trial has found.
    order: Option<Order>,
    /// The last trial, and when it ended.
    last: Option<(Time, RehearsalDecision)>,
    /// The last decision about the weights of pipelines, until it is taken.
    weights: Option<WeightDecision>,
}

enum Change {
    /// All queues and devices are gone.
    Anew,
    Pipelines(Option<Box<PipelineStage>>),
    Dispatch(ModelId, DispatchPolicy),
    /// The number of devices of a kind.
    Devices(DeviceKind, u32),
    /// The networks of a queue's batches, by the kind of device.
    Network(ModelId, Vec<(DeviceKind, NetworkBudget)>),
    /// A queue of the model with this name; `None`: the queue is gone.
    Model(ModelId, Option<(String, Box<ModelOptions>)>),
    Profiles(ModelId, DeviceProfiles),
}

/// A queue of the scheduler.
struct Queue {
    queue: QueueHandle,
    /// The name of the queue's model.
    name: String,
    /// Whether the queue follows the rehearsal.
    adaptive: bool,
    consolidates: bool,
    /// The behaviour that a trial has set.
    set: Option<Behaviour>,
}

/// The scheduler that follows a rehearsal.
pub trait Rehearsed {
    /// The time by the scheduler's clock.
    fn now(&self) -> Time;

    /// The present behaviour of a queue; `None`: the queue is gone, or its scheduler does not tell.
    fn behaviour(&self, queue: QueueHandle) -> Option<Behaviour>;

    /// Sets the behaviour of a queue; `None`: the rule of the load decides.
    fn set_behaviour(&self, queue: QueueHandle, behaviour: Option<Behaviour>);

    /// Sets the order of turns.
    fn set_order(&self, order: Order);

    /// Writes a trial to the decision log of the queue's shard.
    fn note_trial(&self, queue: QueueHandle, trial: TrialRecord);
}

impl<H: Handler> Rehearsed for Cluster<H> {
    fn now(&self) -> Time {
        self.handler().now()
    }

    fn behaviour(&self, queue: QueueHandle) -> Option<Behaviour> {
        self.behaviour(queue)
    }

    fn set_behaviour(&self, queue: QueueHandle, behaviour: Option<Behaviour>) {
        self.set_behaviour(queue, behaviour);
    }

    fn set_order(&self, order: Order) {
        self.set_order(order);
    }

    fn note_trial(&self, queue: QueueHandle, trial: TrialRecord) {
        self.note_trial(queue, trial);
    }
}

impl Rehearser {
    /// A rehearser for a scheduler with so many shards and this order of turns. It has this `share`
    /// of a core's time. `is_logged`: whether there is a decision log.
    pub fn new(shards: usize, share: f64, is_logged: bool, order: OrderPolicy, activity: Arc<Activity>) -> Arc<Self> {
        Arc::new(Rehearser {
            share,
            order,
            is_logged,
            arrivals: ArrivalRings::new(shards, MOST),
            runs: ArrayQueue::new(RUNS),
            told: Mutex::default(),
            remembered: Mutex::default(),
            wake: Condvar::new(),
            activity,
            pipelines: AtomicBool::new(false),
        })
    }

    /// Whether the rehearsal wants requests and batches: it is on, and some model is adaptive.
    pub fn listens(&self) -> bool {
        self.arrivals.is_open()
    }

    /// Records that a request came to a shard.
    pub fn arrived(&self, shard: usize, arrival: PastArrival) {
        self.arrivals.push(shard, Event::Came(arrival));
    }

    /// Records that requests of a queue were answered, or that their clients have gone. `lost`:
    /// they were rejected or dropped.
    pub fn answered(&self, queue: QueueHandle, at: Time, requests: u32, lost: bool) {
        self.arrivals.push(queue.shard(), Event::Answered { at, model: queue.model, requests, lost });
    }

    /// Records a new queue of the scheduler, for requests of this model.
    pub fn added(&self, queue: QueueHandle, model: &str, options: &ModelOptions) {
        let adaptive = options.is_adaptive();
        let consolidates = options.dispatch.adaptive() == Some(true);
        let added = Queue { queue, name: model.to_owned(), adaptive, consolidates, set: None };
        self.tell(Change::Model(queue.model, Some((model.to_owned(), Box::new(options.clone())))));
        self.told.lock().queues.insert(queue.model, added);
    }

    /// Records that a queue is gone.
    pub fn removed(&self, queue: QueueHandle) {
        self.tell(Change::Model(queue.model, None));
        self.told.lock().queues.remove(&queue.model);
    }

    /// Records new profiles of a queue's batches.
    pub fn profiled(&self, queue: QueueHandle, profiles: DeviceProfiles) {
        self.tell(Change::Profiles(queue.model, profiles));
    }

    /// Records the number of devices of a kind.
    pub fn has_devices(&self, kind: DeviceKind, count: u32) {
        self.tell(Change::Devices(kind, count));
    }

    /// Records the networks of a queue's batches, by the kind of device. At first there is no network.
    pub fn has_network(&self, queue: QueueHandle, networks: Vec<(DeviceKind, NetworkBudget)>) {
        self.tell(Change::Network(queue.model, networks));
    }

    /// Forgets all queues and devices: another scheduler follows the rehearsal from now on.
    pub fn begin_anew(&self) {
        let mut told = self.told.lock();
        (told.queues, told.order, told.last) = Default::default();
        drop(told);
        self.tell(Change::Anew);
    }

    /// Records another dispatch policy of a queue.
    pub fn dispatches(&self, queue: QueueHandle, dispatch: DispatchPolicy) {
        self.tell(Change::Dispatch(queue.model, dispatch));
    }

    /// The requests of the last minutes; `None`: the rehearsal is off, and nothing is remembered.
    pub fn remembered(&self) -> Option<Remembered> {
        if self.share <= 0.0 {
            return None;
        }
        let told = self.told.lock();
        let (order, set) = (told.order, told.queues.iter().map(|(model, queue)| (*model, queue.set)));
        let set: BTreeMap<ModelId, Option<Behaviour>> = set.collect();
        drop(told);
        let mut remembered = self.remembered.lock().clone();
        remembered.found_order = order;
        for (model, queue) in &mut remembered.queues {
            queue.behaviour = set.get(model).copied().flatten();
        }
        Some(remembered)
    }

    /// Replaces the pipelines whose weights are rehearsed; `None`: there are none. The server calls
    /// this every second, which must not wake a thread that rests.
    pub fn has_pipelines(&self, stage: Option<PipelineStage>) {
        if self.share <= 0.0 {
            return;
        }
        let had_some = self.pipelines.swap(stage.is_some(), Ordering::Relaxed);
        if had_some || stage.is_some() {
            let mut told = self.told.lock();
            // Only the newest counts.
            told.changes.retain(|change| !matches!(change, Change::Pipelines(_)));
            told.changes.push(Change::Pipelines(stage.map(Box::new)));
        }
    }

    /// Records that a request of `rows` items came to a pipeline.
    pub fn pipeline_asked(&self, at: Time, budget: Duration, pipeline: u64, rows: u32) {
        if self.pipelines.load(Ordering::Relaxed) && self.listens() {
            self.arrivals.push(0, Event::Asked { at, budget, pipeline, rows });
        }
    }

    /// The last decision about weights, once.
    pub fn take_weights(&self) -> Option<WeightDecision> {
        self.told.lock().weights.take()
    }

    /// Leaves a change for the thread, if the rehearsal is on.
    fn tell(&self, change: Change) {
        if self.share > 0.0 {
            self.told.lock().changes.push(change);
            self.activity.stir();
        }
    }

    /// Records that a batch of a queue took `share` of its profile's time.
    pub fn ran(&self, queue: QueueHandle, share: f64) {
        self.runs.force_push((queue.model, share));
    }

    /// The behaviours of the scheduler's queues, and the result of the last trial.
    pub fn status(&self, scheduler: &impl Rehearsed) -> SchedulerStatus {
        let told = self.told.lock();
        let queue = |queue: &Queue| {
            let by = match queue.set {
                _ if !queue.adaptive => Source::Policy,
                Some(_) => Source::Trial,
                None => Source::StartRule,
            };
            (
                queue.queue,
                QueueStatus {
                    model: queue.name.clone(),
                    queue: queue.queue.model.to_string(),
                    by,
                    behaviour: queue.set,
                },
            )
        };
        let mut queues: Vec<(QueueHandle, QueueStatus)> = told.queues.values().map(queue).collect();
        let adaptive = |model: ModelId| told.queues.get(&model).is_some_and(|queue| queue.adaptive);
        let now = scheduler.now();
        let last = told.last.as_ref().map(|(at, decision)| TrialStatus::of(decision, now.since(*at), adaptive));
        let cpu = CpuStatus { budget: self.share, used: told.used };
        let (trials, changes, arrivals_lost) = (told.trials, told.changed, told.lost);
        let by = match (told.order, self.order) {
            (Some(_), _) => Source::Trial,
            (None, OrderPolicy::Fixed(_)) => Source::Policy,
            (None, OrderPolicy::Rehearsed) => Source::StartRule,
        };
        let order = OrderStatus { order: told.order.unwrap_or(self.order.first()), by };
        // Ask the shards without this lock: the thread in a shard may wait for the lock.
        drop(told);
        for (handle, status) in queues.iter_mut().filter(|(_, status)| status.by != Source::Policy) {
            status.behaviour = scheduler.behaviour(*handle).or(status.behaviour);
        }
        let models = queues.into_iter().map(|(_, status)| status).collect();
        SchedulerStatus { trials, changes, cpu, arrivals_lost, order, models, last_trial: last }
    }

    /// Ends [`Rehearser::work`].
    pub fn stop(&self) {
        self.told.lock().stopped = true;
        self.wake.notify_all();
        self.activity.stir();
    }

    /// The life of the thread. In the time that the rehearsal leaves over the thread does some of its
    /// `other` work, which tells whether there was any.
    pub fn work(&self, scheduler: &impl Rehearsed, mut other: impl FnMut() -> bool, metrics: &RehearsalMetrics) {
        // If the system refuses the low priority, the thread runs at the normal priority.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 19);
        let mut rehearsal = self.rehearsal();
        self.remembered.lock().order = self.order;
        let now = || scheduler.now();
        let (mut feed, mut account) = (ArrivalFeed::default(), CpuAccount::new(self.share, now()));
        let (mut idle, mut weights) = (false, StepWeights::default());
        while self.listen(&mut rehearsal, &mut weights, idle) {
            idle = false;
            self.hear((&mut rehearsal, &mut weights), &mut feed, now, metrics);
            account.pass(now());
            let heard = now();
            // The thread works no longer than it takes to fill a ring.
            while account.saved > 0.0 && now().since(heard) < EVERY {
                let used = rehearsal.step(EVENTS);
                if let Some(decision) = rehearsal.poll_decision() {
                    metrics.trials.inc();
                    metrics.changes.inc_by(u64::from(decision.changed));
                    self.say(scheduler, decision);
                }
                let worked = other();
                let weighed = self.weigh(&mut weights, metrics);
                account.spend();
                if used.max(weighed) < EVENTS && !worked {
                    idle = used.max(weighed) == 0;
                    break;
                }
            }
            metrics.cpu_seconds.inc_by(account.spent());
            self.told.lock().used = account.used();
        }
    }

    /// A rehearsal without models and devices.
    fn rehearsal(&self) -> Rehearsal {
        let mut rehearsal = Rehearsal::new(false, 1);
        rehearsal.set_order(self.order);
        rehearsal.set_delays(NetworkBudget::default(), WAKE_MARGIN);
        rehearsal
    }

    /// Goes on with the weights of pipelines. Returns the number of replayed events.
    fn weigh(&self, weights: &mut StepWeights, metrics: &RehearsalMetrics) -> u64 {
        let trials = weights.trials();
        let used = weights.step(EVENTS);
        metrics.weight_trials.inc_by(weights.trials() - trials);
        if let Some(decision) = weights.poll_decision() {
            metrics.weight_changes.inc();
            self.told.lock().weights = Some(decision);
        }
        used
    }

    /// Waits, and reads changes. Returns false if the thread must stop. An `idle` thread waits for
    /// the next run of a model.
    fn listen(&self, rehearsal: &mut Rehearsal, weights: &mut StepWeights, idle: bool) -> bool {
        let mut told = self.told.lock();
        if idle && !told.stopped && told.changes.is_empty() && self.activity.rests() {
            told.used = 0.0;
            drop(told);
            self.activity.wait();
            told = self.told.lock();
        } else if !told.stopped {
            self.wake.wait_for(&mut told, EVERY.into());
        }
        let (changes, stopped) = (std::mem::take(&mut told.changes), told.stopped);
        // The wish to consolidate holds if all adaptive queues have it.
        let mut adaptive = told.queues.values().filter(|queue| queue.adaptive).peekable();
        rehearsal.set_consolidate(adaptive.peek().is_some() && adaptive.all(|queue| queue.consolidates));
        let behaviours = |changes: &[Change]| {
            let is_told = changes.iter().any(|change| matches!(change, Change::Pipelines(Some(_))));
            is_told.then(|| told.queues.iter().map(|(model, queue)| (*model, queue.set)).collect::<BTreeMap<_, _>>())
        };
        let behaviours = behaviours(&changes).unwrap_or_default();
        drop(told);
        let mut remembered = self.remembered.lock();
        for change in changes {
            match change {
                Change::Anew => {
                    *remembered = Remembered { order: self.order, ..Remembered::default() };
                    *rehearsal = self.rehearsal();
                }
                Change::Model(model, None) => {
                    remembered.forget(model);
                    rehearsal.set_model(model, None);
                }
                Change::Model(model, Some((name, options))) => {
                    remembered.set_queue(model, name, (*options).clone());
                    rehearsal.set_model(model, Some(*options));
                }
                Change::Profiles(model, profiles) => {
                    remembered.set_profiles(model, profiles.clone());
                    rehearsal.set_profile(model, profiles);
                }
                Change::Devices(kind, count) => {
                    remembered.set_devices(kind, count);
                    rehearsal.set_devices(kind, count);
                }
                Change::Network(model, networks) => rehearsal.set_network(model, networks),
                Change::Dispatch(model, dispatch) => {
                    remembered.set_dispatch(model, dispatch.clone());
                    rehearsal.set_dispatch(model, dispatch);
                }
                Change::Pipelines(stage) => weights.set_stage(stage.map(|stage| *stage), &behaviours),
            }
        }
        while let Some((model, share)) = self.runs.pop() {
            remembered.ran(model, share);
            rehearsal.execution(model, share);
        }
        !stopped
    }

    /// Passes new events to the rehearsals.
    fn hear(
        &self,
        (rehearsal, weights): (&mut Rehearsal, &mut StepWeights),
        feed: &mut ArrivalFeed,
        now: impl Fn() -> Time,
        metrics: &RehearsalMetrics,
    ) {
        let adaptive = self.told.lock().queues.values().any(|queue| queue.adaptive);
        let (lost, skipped) = (feed.lost(), feed.skipped());
        feed.set_open(&self.arrivals, adaptive || weights.is_on(), &now);
        let events = feed.take(&self.arrivals, &now);
        let came = events.iter().filter_map(|event| if let Event::Came(came) = event { Some(*came) } else { None });
        let mut remembered = self.remembered.lock();
        came.for_each(|arrival| remembered.arrived(arrival));
        remembered.heard(feed.heard_until(), feed.skipped());
        drop(remembered);
        for event in events {
            match event {
                Event::Asked { at, budget, pipeline, rows } => weights.asked(at, budget, pipeline, rows),
                Event::Came(_) | Event::Answered { .. } if !adaptive => {}
                Event::Came(arrival) => rehearsal.arrival(arrival),
                Event::Answered { at, model, requests, lost } => rehearsal.answered(at, model, requests, lost),
            }
        }
        if feed.skipped() > skipped {
            rehearsal.missed_answers();
        }
        let lost = feed.lost() - lost;
        if lost > 0 {
            metrics.arrivals_lost.inc_by(lost);
            self.told.lock().lost += lost;
        }
    }

    /// Gives the scheduler's queues the behaviours that a trial has found.
    fn say(&self, scheduler: &impl Rehearsed, decision: RehearsalDecision) {
        let mut said = Vec::new();
        let mut told = self.told.lock();
        told.trials += 1;
        let trial = self.is_logged.then(|| TrialRecord::new(told.trials, &decision));
        // One queue of each shard with adaptive queues.
        let adaptive = told.queues.values().filter(|queue| queue.adaptive).map(|queue| queue.queue);
        let shards: BTreeMap<usize, QueueHandle> = adaptive.map(|queue| (queue.shard(), queue)).collect();
        if decision.changed {
            told.changed += 1;
            for queue in told.queues.values_mut().filter(|queue| queue.adaptive) {
                queue.set = decision.behaviours.get(queue.queue.model.0 as usize).copied().flatten();
                said.push((queue.queue, queue.set));
            }
            told.order = Some(decision.order).filter(|_| self.order == OrderPolicy::Rehearsed);
            tracing::debug!(?said, order = %decision.order, "the rehearsal found something better");
        }
        let order = told.order.filter(|_| decision.changed);
        told.last = Some((scheduler.now(), decision));
        drop(told);
        for (shard, trial) in shards.into_values().zip(trial.into_iter().cycle()) {
            scheduler.note_trial(shard, trial);
        }
        said.into_iter().for_each(|(queue, behaviour)| scheduler.set_behaviour(queue, behaviour));
        order.into_iter().for_each(|order| scheduler.set_order(order));
    }
}

/// The thread's use of a core, and its allowance.
struct CpuAccount {
    share: f64,
    /// Seconds that the thread may use now.
    saved: f64,
    passed_until: Time,
    /// Seconds that the thread has used until the last look, and the part of them that was
    /// reported.
    seen: f64,
    said: f64,
    /// Seconds that passed, and seconds that the thread used. Older seconds count less.
    lately: (f64, f64),
}

impl CpuAccount {
    fn new(share: f64, now: Time) -> Self {
        let seen = thread_seconds();
        CpuAccount { share, saved: 0.0, passed_until: now, seen, said: seen, lately: (0.0, 0.0) }
    }

    /// Adds the allowance for the time that has passed.
    fn pass(&mut self, now: Time) {
        let passed = now.since(self.passed_until).as_secs_f64();
        self.passed_until = now;
        self.saved = (self.saved + self.share * passed).min(SAVED * self.share.max(0.05));
        let kept = (-passed / SAID_OVER).exp();
        self.lately = (self.lately.0 * kept + passed, self.lately.1 * kept);
        self.spend();
    }

    /// Counts the thread's use since the last call.
    fn spend(&mut self) {
        let seconds = thread_seconds();
        let took = seconds - self.seen;
        self.seen = seconds;
        self.saved -= took;
        self.lately.1 += took;
    }

    /// Seconds used since the last call.
    fn spent(&mut self) -> f64 {
        self.seen - std::mem::replace(&mut self.said, self.seen)
    }

    /// The share of a core that the thread had lately.
    fn used(&self) -> f64 {
        self.lately.1 / self.lately.0.max(1e-9)
    }
}

/// The CPU seconds of this thread.
fn thread_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::from_nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64).as_secs_f64()
}
