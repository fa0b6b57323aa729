//! A loaded, warm model version: all that a device needs to run its batches.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use downbeat_core::{DeviceKind, DeviceProfiles, Duration, LatencyProfile, Time};
use downbeat_driver::Place;
use downbeat_engine::{Lane, LoadError, Model, Place as EnginePlace, Share};
use parking_lot::{Mutex, MutexGuard, RwLock};
use smallvec::SmallVec;
use tempfile::TempDir;

use crate::clock::Clock;
use crate::engine_run::RunFailure;
use crate::error::ServiceError;
use crate::lanes::LaneGroup;
use crate::metrics::{ModelMetrics, Reason};
use crate::model_health::ModelHealth;
use crate::plan::{Admitted, BatchPlan, ShapeKey};
use crate::refiner::ProfileRefiner;
use crate::statistics::{Phases, Statistics};

/// A model version in service. Lives until its last request is answered, also after a newer version took its place.
pub struct Executable {
    /// Model name.
    pub name: String,
    /// Version, as its folder is called.
    pub version: String,
    /// How requests become batches and batches become answers.
    pub plan: Arc<BatchPlan>,
    /// Prometheus metrics of this version.
    pub metrics: ModelMetrics,
    /// The protocol's statistics of this version; one lock a batch.
    pub statistics: Mutex<Statistics>,
    /// The most items that may wait in all queues together.
    pub queue_bound: u32,
    /// The scheduler's queue for each shape of request; one if shapes do not vary.
    queues: RwLock<BTreeMap<ShapeKey, Arc<Queue>>>,
    model: Arc<dyn Model>,
    lanes: Lanes,
    /// The queue that the last request joined, of those that gather.
    last_gathered: Mutex<Option<Place>>,
    waiting: AtomicU32,
    health: Arc<ModelHealth>,
    /// The devices that make its batches themselves; `None`: the scheduler does.
    group: Option<LaneGroup>,
    /// The folder of its file, where that was made for it: an engine may read it again as long as there are lanes.
    _folder: Option<TempDir>,
}

/// The scheduler's queue for the requests of one shape.
pub struct Queue {
    /// Where it is in the scheduler.
    pub place: Place,
    /// Whether requests that cannot make their deadline are given up.
    pub drops: bool,
    /// Whether requests wait for others of their shape, for a time that is set.
    pub gathers: bool,
    /// The kind of the devices that its batches run on; `None`: any.
    pub kind: Option<DeviceKind>,
    /// Learns the latency of its batches from what they take.
    pub refiner: Mutex<ProfileRefiner>,
    /// When it was last used, nanoseconds of the server's clock.
    pub last_used_ns: AtomicU64,
}

impl Queue {
    /// What the scheduler is told of how long its batches take on `kind` (see there).
    pub fn profiles(kind: Option<DeviceKind>, profile: LatencyProfile) -> DeviceProfiles {
        match kind {
            Some(kind) => DeviceProfiles::only(kind, profile),
            None => profile.into(),
        }
    }
}

/// Where a version runs.
pub enum LanesWanted {
    /// On each of so many devices, by a lane of its own, of which the one on a device may be made before.
    EachDevice(usize, Option<(usize, Box<dyn Lane>)>),
    /// On any device, in so many lanes: the devices are alike, and no more of its batches run at once.
    AnyDevice(usize),
}

/// The lanes of a version.
enum Lanes {
    /// By device; `None`: it was lost.
    EachDevice(Vec<Option<Mutex<Box<dyn Lane>>>>),
    AnyDevice(Vec<Mutex<Box<dyn Lane>>>),
}

/// A lane that nobody else uses now.
pub type HeldLane<'a> = MutexGuard<'a, Box<dyn Lane>>;

impl Executable {
    /// A version with its lanes.
    ///
    /// # Errors
    /// If the engine has no memory for a lane.
    pub fn new(
        name: String,
        version: String,
        plan: Arc<BatchPlan>,
        model: Arc<dyn Model>,
        lanes: LanesWanted,
        metrics: ModelMetrics,
        queue_bound: u32,
    ) -> Result<Self, LoadError> {
        let lanes = match lanes {
            LanesWanted::EachDevice(devices, mut first) => {
                let lane = |device| {
                    let works = model.lost(device).is_none();
                    if let Some((_, lane)) = first.take_if(|(on, _)| works && *on == device) {
                        return Ok(Some(Mutex::new(lane)));
                    }
                    let lane = works.then(|| model.lane_at(EnginePlace { device, share: Share::Whole }));
                    lane.transpose().map(|lane| lane.map(Mutex::new))
                };
                Lanes::EachDevice((0..devices).map(lane).collect::<Result<_, _>>()?)
            }
            LanesWanted::AnyDevice(lanes) => {
                Lanes::AnyDevice((0..lanes).map(|_| model.lane().map(Mutex::new)).collect::<Result<_, _>>()?)
            }
        };
        let health = Arc::new(ModelHealth::new(name.clone(), version.clone()));
        Ok(Executable {
            health,
            name,
            version,
            plan,
            metrics,
            statistics: Mutex::default(),
            queue_bound,
            queues: RwLock::default(),
            model,
            lanes,
            last_gathered: Mutex::new(None),
            waiting: AtomicU32::new(0),
            group: None,
            _folder: None,
        })
    }

    /// The same version, which keeps `folder` as long as it lives.
    #[must_use]
    pub fn keeping(mut self, folder: Option<TempDir>) -> Self {
        self._folder = folder;
        self
    }

    /// The same version, routed to devices that make its batches themselves.
    #[must_use]
    pub fn routed(mut self, group: LaneGroup) -> Self {
        self.group = Some(group);
        self
    }

    /// The devices that make its batches themselves; `None`: the scheduler does.
    pub fn group(&self) -> Option<&LaneGroup> {
        self.group.as_ref()
    }

    /// The engine's model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// Whether a request may ever have the memory that its run takes.
    ///
    /// # Errors
    /// `InvalidArgument`, with what it would take and what runs may.
    pub fn check_memory(&self, request: &Admitted) -> Result<(), ServiceError> {
        let Some(memory) = self.model.run_memory() else { return Ok(()) };
        let shape = |(index, item): (usize, &[i64])| {
            let item: SmallVec<[usize; 6]> = item.iter().map(|d| (*d).max(0) as usize).collect();
            (self.plan.engine_shape(index, request.rows as usize, &item), request.input(index))
        };
        let inputs: SmallVec<[_; 4]> = self.plan.item_shapes(request).enumerate().map(shape).collect();
        memory
            .check(inputs.iter().map(|(shape, data)| (&shape[..], *data)))
            .map_err(|error| ServiceError::InvalidArgument(format!("model '{}': {error}", self.name)))
    }

    /// Why it runs nowhere any more, if that is so.
    pub fn lost(&self) -> Option<String> {
        let first = self.model.lost(0)?;
        let is_lost = |device| self.model.lost(device).is_some();
        let all = match (&self.group, &self.lanes) {
            (Some(group), _) => group.devices().all(is_lost),
            (None, Lanes::EachDevice(lanes)) => (0..lanes.len()).all(is_lost),
            // What runs anywhere runs where nothing is lost.
            (None, Lanes::AnyDevice(_)) => false,
        };
        all.then_some(first)
    }

    /// What became of its runs that took too long.
    pub fn health(&self) -> &Arc<ModelHealth> {
        &self.health
    }

    /// Why it is not ready at `now`, if that is so.
    pub fn not_ready(&self, now: Time) -> Option<String> {
        self.lost().or_else(|| self.health.not_ready(now))
    }

    /// What a client is told of a request that failed on a device.
    pub fn failure(&self, device: usize, failure: &RunFailure) -> ServiceError {
        let name = &self.name;
        match (self.model.lost(device), failure) {
            (Some(lost), _) => ServiceError::Unavailable(format!("model '{name}': {lost}")),
            (None, RunFailure::Engine(reason)) => {
                ServiceError::Internal(format!("model '{name}' failed on this request: {reason}"))
            }
            (None, RunFailure::Ended(reason)) => ServiceError::DeadlineExceeded(format!("model '{name}': {reason}")),
            (None, RunFailure::Refused(reason)) => ServiceError::Unavailable(format!("model '{name}': {reason}")),
        }
    }

    /// A lane for a batch on a device, once nobody else uses it; `None` if the version has none there.
    pub fn lane(&self, device: usize) -> Option<HeldLane<'_>> {
        match &self.lanes {
            Lanes::EachDevice(lanes) => Some(lanes.get(device)?.as_ref()?.lock()),
            Lanes::AnyDevice(lanes) => {
                let free = lanes.iter().find_map(Mutex::try_lock);
                free.or_else(|| Some(lanes.get(device % lanes.len().max(1))?.lock()))
            }
        }
    }

    /// Every lane, each once nobody else uses it.
    pub fn lanes(&self) -> impl Iterator<Item = HeldLane<'_>> {
        let (each, any) = match &self.lanes {
            Lanes::EachDevice(lanes) => (&lanes[..], &[][..]),
            Lanes::AnyDevice(lanes) => (&[][..], &lanes[..]),
        };
        each.iter().flatten().chain(any).map(Mutex::lock)
    }

    /// A request has joined this queue, where it waits for others. Those that wait in the queue given back wait in vain: requests
    /// of another shape have begun to come.
    pub fn gathers_in(&self, queue: Place) -> Option<Place> {
        self.last_gathered.lock().replace(queue).filter(|before| *before != queue)
    }

    /// The queue for requests of this shape, if there is one yet.
    pub fn queue(&self, key: &ShapeKey) -> Option<Arc<Queue>> {
        self.queues.read().get(key).cloned()
    }

    /// Makes `queue` the one for requests of this shape.
    ///
    /// # Errors
    /// With the one there is, if somebody was faster.
    pub fn insert_queue(&self, key: ShapeKey, queue: Arc<Queue>) -> Result<(), Arc<Queue>> {
        use std::collections::btree_map::Entry;
        match self.queues.write().entry(key) {
            Entry::Vacant(place) => {
                place.insert(queue);
                Ok(())
            }
            Entry::Occupied(there) => Err(there.get().clone()),
        }
    }

    /// Takes out the queue for one shape, if it is still this one; says whether it was.
    pub fn remove_queue(&self, key: &ShapeKey, queue: &Arc<Queue>) -> bool {
        let mut queues = self.queues.write();
        let is_it = queues.get(key).is_some_and(|there| Arc::ptr_eq(there, queue));
        if is_it {
            queues.remove(key);
        }
        is_it
    }

    /// All queues with their shapes.
    pub fn queues(&self) -> Vec<(ShapeKey, Arc<Queue>)> {
        self.queues.read().iter().map(|(key, queue)| (key.clone(), queue.clone())).collect()
    }

    /// Items that wait now, all shapes.
    pub fn waiting(&self) -> u32 {
        let routed = self.group.as_ref().map_or(0, LaneGroup::waiting);
        routed + self.waiting.load(Ordering::Relaxed)
    }

    /// Counts `rows` items into the queue; false if there is no room for them. Exact, also where the version's shapes are in several
    /// shards.
    pub fn begin_waiting(&self, rows: u32) -> bool {
        let more = |waiting: u32| Some(waiting.saturating_add(rows)).filter(|waiting| *waiting <= self.queue_bound);
        self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Counts `rows` items out of the queue.
    pub fn end_waiting(&self, rows: u32) {
        self.waiting.fetch_sub(rows, Ordering::Relaxed);
    }

    /// Counts a request that was answered by a run of its own after its batch had failed, `took` after its arrival.
    pub fn record_alone(&self, rows: u32, took: Duration) {
        let none =
            Phases { compute_input: Duration::ZERO, compute_infer: Duration::ZERO, compute_output: Duration::ZERO };
        self.metrics.record_batch(rows, none, std::iter::once((Duration::ZERO, took, false)));
        let request = std::iter::once((Duration::ZERO, took));
        self.statistics.lock().record_batch(Clock::unix_millis(), rows, none, request);
    }

    /// Counts a request that got no result, `after` its arrival.
    pub fn record_not_answered(&self, reason: Reason, after: Duration) {
        self.metrics.record_not_answered(reason);
        self.statistics.lock().record_failure(after);
    }
}
