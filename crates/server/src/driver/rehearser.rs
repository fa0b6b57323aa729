//! The rehearsal of the scheduler, on a thread of its own.

use std::collections::BTreeMap;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use downbeat_core::cluster::{
    Arrival, Behaviour, DispatchPolicy, ModelOptions, NetworkBudget, Rehearsal, RehearsalDecision,
};
use downbeat_core::{DeviceKind, DeviceProfiles, Duration, ModelId};
use downbeat_driver::{Cluster, QueueHandle};
use parking_lot::{Condvar, Mutex};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::WAKE_MARGIN;
use super::device_pool::DevicePool;
use crate::metrics::RehearsalMetrics;

/// How often it looks for work.
const EVERY: std::time::Duration = std::time::Duration::from_millis(50);
/// Arrivals that a shard leaves for it, at most; it does not rehearse those beyond.
const MOST: usize = 8 << 10;
/// Replayed events between two looks at the clock: about 100 us.
const EVENTS: u64 = 256;
/// Time that it may have saved up, so that a trial is not spread over more than it has to be.
const SAVED: f64 = 0.5;
/// Executions that are left for it, at most: of more, the last.
const RUNS: usize = 256;

/// What the rehearsal is told, and what it said last.
pub struct Rehearser {
    /// By shard: what came, for whoever is in the shard to fill.
    arrivals: Box<[ArrayQueue<Arrival>]>,
    /// What executions took of what their profiles say.
    runs: ArrayQueue<(ModelId, f64)>,
    told: Mutex<Told>,
    wake: Condvar,
    said: Mutex<Vec<ModelBehaviour>>,
}

#[derive(Default)]
struct Told {
    changes: Vec<Change>,
    stopped: bool,
}

enum Change {
    Added(QueueHandle, String, Box<ModelOptions>),
    Removed(ModelId),
    Profiles(ModelId, DeviceProfiles),
}

/// What a queue of the scheduler does, as `GET /v2/scheduler` says it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ModelBehaviour {
    /// The model.
    pub model: String,
    /// What it does.
    pub behaviour: Behaviour,
    /// The share of its scheduler's bad requests in the rehearsal, of the model that fared worst and of all, by rate: as it was, 1.1 and 1.25 times that.
    pub bad: Vec<(f64, f64)>,
}

impl Rehearser {
    /// For a scheduler of so many shards.
    pub fn new(shards: usize) -> Arc<Self> {
        Arc::new(Rehearser {
            arrivals: (0..shards).map(|_| ArrayQueue::new(MOST)).collect(),
            runs: ArrayQueue::new(RUNS),
            told: Mutex::default(),
            wake: Condvar::new(),
            said: Mutex::default(),
        })
    }

    /// A request came to a shard.
    pub fn arrived(&self, shard: usize, arrival: Arrival) {
        // Where it does not fit, the rehearsal is seconds behind: it sees the load end here.
        let _ = self.arrivals[shard].push(arrival);
    }

    /// The scheduler has another queue, for requests of this model.
    pub fn added(&self, queue: QueueHandle, model: &str, options: ModelOptions) {
        self.told.lock().changes.push(Change::Added(queue, model.to_owned(), Box::new(options)));
    }

    /// A queue is gone.
    pub fn removed(&self, queue: QueueHandle) {
        self.told.lock().changes.push(Change::Removed(queue.model));
    }

    /// What batches of a queue take is another.
    pub fn profiled(&self, queue: QueueHandle, profiles: DeviceProfiles) {
        self.told.lock().changes.push(Change::Profiles(queue.model, profiles));
    }

    /// A batch of a queue took `share` of what its profile says.
    pub fn ran(&self, queue: QueueHandle, share: f64) {
        self.runs.force_push((queue.model, share));
    }

    /// What the models do that were told something.
    pub fn said(&self) -> Vec<ModelBehaviour> {
        self.said.lock().clone()
    }

    /// Ends [`Rehearser::work`].
    pub fn stop(&self) {
        self.told.lock().stopped = true;
        self.wake.notify_all();
    }

    /// The life of the thread, which takes `share` of a core's time: on devices of these kinds.
    pub fn work(&self, cluster: &Cluster<DevicePool>, devices: &[u32], share: f64, metrics: &RehearsalMetrics) {
        // Without the right to it, at normal priority.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 19);
        let mut rehearsal = Rehearsal::new(false, 1);
        rehearsal.set_delays(NetworkBudget::default(), WAKE_MARGIN);
        for (kind, count) in (0..).map(DeviceKind).zip(devices) {
            rehearsal.set_devices(kind, *count);
        }
        let mut queues = BTreeMap::new();
        let (mut saved, mut before) = (0.0, cluster.handler().clock.now());
        while self.listen(&mut rehearsal, &mut queues) {
            let now = cluster.handler().clock.now();
            saved = (saved + share * now.since(before).as_secs_f64()).min(SAVED * share.max(0.05));
            before = now;
            while saved > 0.0 {
                let begin = thread_seconds();
                let used = rehearsal.step(EVENTS);
                let took = thread_seconds() - begin;
                saved -= took;
                metrics.cpu_seconds.inc_by(took.max(0.0));
                if let Some(decision) = rehearsal.poll_decision() {
                    metrics.trials.inc();
                    metrics.changes.inc_by(u64::from(decision.changed));
                    self.say(cluster, &queues, &decision);
                }
                if used < EVENTS {
                    break;
                }
            }
        }
    }

    /// Waits, and hears what was told; `false`: it is to stop.
    fn listen(&self, rehearsal: &mut Rehearsal, queues: &mut BTreeMap<ModelId, Queue>) -> bool {
        let mut told = self.told.lock();
        if !told.stopped {
            self.wake.wait_for(&mut told, EVERY);
        }
        let changes = std::mem::take(&mut told.changes);
        let stopped = told.stopped;
        drop(told);
        for change in changes {
            match change {
                Change::Added(queue, name, options) => {
                    let adaptive = options.is_adaptive();
                    let consolidates = options.dispatch == DispatchPolicy::Adaptive { consolidate: true };
                    rehearsal.set_model(queue.model, Some(*options));
                    queues.insert(queue.model, Queue { queue, name, adaptive, consolidates });
                }
                Change::Removed(model) => {
                    rehearsal.set_model(model, None);
                    queues.remove(&model);
                }
                Change::Profiles(model, profiles) => rehearsal.set_profile(model, profiles),
            }
        }
        std::iter::from_fn(|| self.runs.pop()).for_each(|(model, share)| rehearsal.execution(model, share));
        // The wish holds if all that could have it do.
        let mut adaptive = queues.values().filter(|queue| queue.adaptive).peekable();
        rehearsal.set_consolidate(adaptive.peek().is_some() && adaptive.all(|queue| queue.consolidates));
        let mut came: Vec<Arrival> =
            self.arrivals.iter().flat_map(|shard| std::iter::from_fn(|| shard.pop())).collect();
        came.sort_by_key(|arrival| arrival.at);
        came.into_iter().for_each(|arrival| rehearsal.arrival(arrival));
        !stopped
    }

    /// Tells the scheduler's queues what to do.
    fn say(&self, cluster: &Cluster<DevicePool>, queues: &BTreeMap<ModelId, Queue>, decision: &RehearsalDecision) {
        let bad = decision.tried.iter().find(|tried| tried.behaviours == decision.behaviours);
        let bad = bad.map_or(Vec::new(), |tried| tried.bad.clone());
        let mut said = Vec::new();
        for Queue { queue, name, adaptive, .. } in queues.values() {
            let behaviour = decision.behaviours.get(queue.model.0 as usize).copied().flatten();
            if decision.changed && *adaptive {
                cluster.set_behaviour(*queue, behaviour);
            }
            if let Some(behaviour) = behaviour.filter(|_| *adaptive) {
                said.push(ModelBehaviour { model: name.clone(), behaviour, bad: bad.clone() });
            }
        }
        if decision.changed {
            tracing::debug!(?said, "the rehearsal found something better");
        }
        *self.said.lock() = said;
    }
}

/// A queue of the scheduler.
struct Queue {
    queue: QueueHandle,
    /// Its model.
    name: String,
    /// It does what the rehearsal says.
    adaptive: bool,
    consolidates: bool,
}

/// What this thread has had of a core.
fn thread_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::from_nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64).as_secs_f64()
}
