//! Runs the scheduler of `downbeat-core` on this machine's threads, by way of `downbeat-driver`.
//!
//! There is no scheduler thread. Whoever has an event (a frontend with a request, a device with a completion, the
//! alarm with an expiry) works it off, unless somebody is at work there already, who will find it; why that is the way of a
//! server, `downbeat-driver` says. The models' queues are parted into shards, so that on a machine of many cores several frontends'
//! threads can schedule at once.
//!
//! `waiting_table.rs` has the only calls of a shard's `handle_request` and `handle_cancel`, and each gets the time of this moment.

mod arrival_rings;
mod device_pool;
mod device_rehearser;
mod queued_call;
mod rehearser;
mod scheduler_status;
mod waiting_table;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use downbeat_core::cluster::{ModelOptions, Order};
use downbeat_core::device::PartitionId;
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId};
use downbeat_driver::{Cluster, LogSink, MAX_SHARDS, Moment, QueueHandle, Setup};
use downbeat_engine::Part;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::auto_model::DeviceSet;
use crate::clock::Clock;
use crate::decision_log::DecisionLog;
use crate::group_predictor::GroupPredictor;
use crate::host::DeviceHost;
use crate::loaded_version::LoadedVersion;
use crate::metrics::Metrics;
use crate::options::ServerOptions;
use crate::placement::Placed;
use crate::queue::Queue;
use crate::retraining::GroupRetrainer;
use crate::watchdog::Watchdog;
pub use device_pool::{DevicePool, HearsOfSlots, SlotDone};
pub use device_rehearser::DeviceEvents;
use device_rehearser::DeviceRehearser;
pub use queued_call::QueuedCall;
use rehearser::Rehearser;
pub use scheduler_status::SchedulerStatus;
pub use waiting_table::CounterHasher;
use waiting_table::{Event, WaitingTable};

/// How much before its last moment a deferred batch starts: for an alarm that comes late, executions that take longer than
/// their profile, and the way of the answer, on a machine that has other things to do. It costs no capacity: while the devices are
/// busy a batch may still start until the last moment.
pub const WAKE_MARGIN: Duration = Duration::from_millis(5);

/// How long the end waits for threads, which a run that does not end may hold up.
const PATIENCE: Duration = Duration::from_millis(1_000);

/// The scheduler at work, with its devices. Dropping it stops the threads.
pub struct Driver {
    cluster: Arc<Cluster<DevicePool>>,
    next_request: AtomicU64,
    next_model: AtomicU32,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    predictor: Arc<GroupPredictor>,
    log: Option<Arc<DecisionLog>>,
}

impl Driver {
    /// Starts the devices, which are divided into `parts`, with a slot for each of `kinds`, the kinds of each device's partitions, and the alarm. The models' queues are parted into as many shards
    /// as the options say (at least one, at most [`MAX_SHARDS`]). `watchdog` looks after the runs. Its decisions are written to `log`, which has as many shards and devices.
    ///
    /// What adaptive models do is rehearsed, and what predicts groups of operators is trained with those that were served, in [`ServerOptions::rehearsal_cpu`] of a core's time.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn start(
        clock: Clock,
        parts: &[Part],
        kinds: &[Vec<DeviceKind>],
        options: &ServerOptions,
        metrics: &Metrics,
        watchdog: &Arc<Watchdog>,
        log: Option<DecisionLog>,
    ) -> std::io::Result<Self> {
        let devices = kinds.len();
        let log = log.map(Arc::new);
        let sink = log.clone().map(|log| log as Arc<dyn LogSink>);
        let host =
            |device| DeviceHost::start(device, parts, clock, metrics.device(device), watchdog.clone(), sink.clone());
        let (shards, rehearsal_cpu) = (options.scheduler_shards().clamp(1, MAX_SHARDS), options.rehearsal_cpu);
        let activity = watchdog.activity().clone();
        let rehearser = Rehearser::new(clock, shards, rehearsal_cpu, log.is_some(), options.order, activity);
        let pool = DevicePool::new(clock, (0..devices).map(host).collect::<Result<_, _>>()?, rehearser.clone());
        let tables = (0..shards).map(|_| WaitingTable::default()).collect();
        let setup = Setup {
            wake_margin: WAKE_MARGIN,
            log: sink.clone(),
            planned: Some(devices as u32),
            kinds: kinds.iter().flatten().max().map_or(1, |kind| kind.0 + 1),
            ..Setup::new(0)
        };
        let cluster = Arc::new(Cluster::new(pool, tables, setup));
        if options.order.first() != Order::default() {
            cluster.set_order(options.order.first());
        }
        let (next_request, next_model, threads) = Default::default();
        let predictor = Arc::new(GroupPredictor::open(&options.device, rehearsal_cpu > 0.0));
        let driver = Driver { cluster, next_request, next_model, threads, predictor, log };
        driver.hosts().iter().for_each(|host| host.belongs_to(&driver.cluster));
        let partitions = |(device, kinds): (usize, &Vec<DeviceKind>)| {
            let slot = move |(partition, kind)| (device, PartitionId(partition as u32), kind);
            kinds.clone().into_iter().enumerate().map(slot)
        };
        driver.add_slots(kinds.iter().enumerate().flat_map(partitions))?;
        let alarmed = driver.cluster.clone();
        let alarm = std::thread::Builder::new().name("alarm".to_owned()).spawn(move || alarmed.ring_alarms())?;
        driver.threads.lock().push(alarm);
        if rehearsal_cpu > 0.0 {
            let (cluster, metrics) = (driver.cluster.clone(), metrics.rehearsal());
            let kinds = planned_devices(kinds);
            let retrainer = GroupRetrainer::new(driver.predictor.clone());
            let work = move || rehearser.work(&cluster, &kinds, retrainer, &metrics);
            let thread = std::thread::Builder::new().name("rehearsal".to_owned()).spawn(work)?;
            driver.threads.lock().push(thread);
        }
        Ok(driver)
    }

    /// Adds slots until there are so many, to devices that are not divided, in turn. Beyond one for each device they share what that one is: the scheduler goes on planning with the devices.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn grow_to(&self, slots: usize) -> std::io::Result<()> {
        let devices = self.devices();
        self.add_slots((0..slots).map(|index| (index % devices, PartitionId::default(), DeviceKind(0))))
    }

    /// Adds those of these slots that are not there yet: each on a partition of a device, which is of a kind.
    fn add_slots(&self, slots: impl Iterator<Item = (usize, PartitionId, DeviceKind)>) -> std::io::Result<()> {
        // Held throughout: the ids that the scheduler gives out are places in the list of slots.
        let mut threads = self.threads.lock();
        let pool = self.cluster.handler();
        let there = pool.slots.read().len();
        for (index, (device, partition, kind)) in slots.enumerate().skip(there) {
            let (host, slot) = (&pool.hosts[device], DeviceId(index as u32));
            let (lane, thread) = host.add_slot(slot, partition)?;
            threads.push(thread);
            pool.slots.write().push((host.clone(), lane));
            let id = self.cluster.add_device(kind);
            assert!(id == slot, "nobody else adds devices");
        }
        Ok(())
    }

    /// Passes on what has not been written of the decision log, so that not much is missing should the process be killed.
    pub fn flush_log(&self) {
        self.cluster.flush_log();
        self.hosts().iter().for_each(|host| host.flush_log());
    }

    /// Writes the decision log to its end. What is decided after this is not in it.
    pub fn close_log(&self) {
        if let Some(log) = &self.log {
            self.flush_log();
            log.close();
        }
    }

    fn rehearser(&self) -> &Rehearser {
        &self.cluster.handler().rehearser
    }

    /// What the scheduler's queues do, and why.
    pub fn status(&self) -> SchedulerStatus {
        self.rehearser().status(&self.cluster)
    }

    /// What predicts groups of operators.
    pub fn predictor(&self) -> &Arc<GroupPredictor> {
        &self.predictor
    }

    /// The rehearsal of device policies.
    pub fn policies(&self) -> &DeviceRehearser {
        &self.rehearser().devices
    }

    /// Where it hears of requests.
    pub fn device_events(&self) -> Arc<DeviceEvents> {
        self.policies().events.clone()
    }

    /// These versions of a model are in service from now on, and no others.
    pub fn serves<'a>(&self, model: &str, versions: impl Iterator<Item = &'a Arc<LoadedVersion>>) {
        let its = |version: &'a Arc<LoadedVersion>| {
            let queue = version.queues().first().map(|(_, queue)| queue.place.model);
            Some((version.auto.clone()?, queue))
        };
        let slots = |on: &DeviceSet| {
            let host = on.devices.first().and_then(|device| self.hosts().get(*device));
            host.map_or(1, |host| host.slots(on.partition))
        };
        self.policies().serves(model, versions.filter_map(its).collect(), slots);
    }

    /// From now on slots are granted by [`Driver::grant`], and `hears` is told when they are done. Nothing may be submitted then.
    pub fn is_granted_from_afar(&self, hears: HearsOfSlots) {
        let was_free = self.cluster.handler().granted_from_afar.set(hears).is_ok();
        assert!(was_free, "a device has one scheduler");
    }

    /// Gives a slot a batch that a scheduler elsewhere has made. The slot has none, and [`runs`](Self::runs) its model.
    pub fn grant(&self, slot: DeviceId, batch: BatchId, jobs: Vec<(RequestId, QueuedCall)>) {
        let (host, lane) = self.cluster.handler().slot(slot);
        host.grant(lane, batch, jobs, self.clock().now());
    }

    /// By slot: the device and the partition that it is on.
    pub fn slots(&self) -> Vec<(usize, usize)> {
        let slots = self.cluster.handler().slots.read();
        slots.iter().map(|(host, lane)| (host.device, host.slot_partition(*lane).0 as usize)).collect()
    }

    /// Whether a slot is there and in service, and runs a version.
    pub fn runs(&self, slot: DeviceId, loaded: &LoadedVersion) -> bool {
        let pool = self.cluster.handler();
        let slot = pool.slots.read().get(slot.0 as usize).cloned();
        let Some((host, lane)) = slot.filter(|(host, _)| pool.is_in_service(host.device)) else { return false };
        let partition = host.slot_partition(lane);
        let is_placed = |(_, queue): &(_, Arc<Queue>)| {
            queue.placed.devices.contains(&host.device) && queue.placed.partitions.contains(&partition)
        };
        loaded.hosts.on_device(host.device).is_some_and(|model| model.lost().is_none())
            && loaded.queues().first().is_some_and(is_placed)
    }

    pub fn hosts(&self) -> &[Arc<DeviceHost>] {
        &self.cluster.handler().hosts
    }

    pub fn devices(&self) -> usize {
        self.hosts().len()
    }

    pub fn next_model(&self) -> ModelId {
        ModelId(self.next_model.fetch_add(1, Ordering::Relaxed))
    }

    pub fn next_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    /// The clock that the scheduler's time comes from.
    pub fn clock(&self) -> Clock {
        self.cluster.handler().clock
    }

    /// What the time is, and when a device is expected to be free.
    pub fn moment(&self) -> Moment {
        self.cluster.moment()
    }

    /// Makes a queue in the scheduler for requests of a model, for batches on the devices of `placed` that take what `profiles` say, by site.
    pub fn add_queue(
        &self,
        model: &str,
        options: ModelOptions,
        placed: &Placed,
        profiles: Vec<LatencyProfile>,
    ) -> Arc<Queue> {
        let place = self.cluster.add_model(options.clone());
        self.rehearser().added(place, model, &options);
        Arc::new(Queue::new(place, options, placed, profiles, self.clock().now()))
    }

    /// Removes a queue if nothing waits in it; says whether nothing did.
    pub fn remove_empty_queue(&self, queue: QueueHandle) -> bool {
        let removed = self.cluster.remove_idle_model(queue);
        if removed {
            self.rehearser().removed(queue);
        }
        removed
    }

    /// Removes a queue; what waits in it is dropped as unloaded.
    pub fn remove_queue(&self, queue: QueueHandle) {
        self.cluster.remove_model(queue);
        self.rehearser().removed(queue);
    }

    /// Hands a request over. The answer comes through the call's `reply`, always.
    pub fn submit(&self, id: RequestId, queued: QueuedCall) {
        let (place, loaded) = (queued.queue.place, queued.queue.gathers.then(|| queued.call.loaded.clone()));
        self.cluster.post(place, Event::Submit(id, queued));
        // Afterwards, so that of two requests that come at the same time the later finds the earlier.
        if let Some(other) = loaded.and_then(|loaded| loaded.gathers_in(place)) {
            self.cluster.flush_model(other);
        }
    }

    /// Hands several requests over, which can share batches. Whose client has gone meanwhile is left out: its ticket has counted it.
    pub fn submit_all(&self, requests: impl Iterator<Item = (RequestId, QueuedCall)>) {
        let mut overtaken: SmallVec<[QueueHandle; 1]> = SmallVec::new();
        self.cluster.post_all(requests.filter_map(|(id, queued)| {
            let (call, place) = (&queued.call, queued.queue.place);
            if call.reply.is_closed() {
                if queued.has_place {
                    call.loaded.end_waiting(call.admitted.rows);
                }
                return None;
            }
            if queued.queue.gathers {
                overtaken.extend(call.loaded.gathers_in(place));
            }
            Some((place, Event::Submit(id, queued)))
        }));
        overtaken.into_iter().for_each(|queue| self.cluster.flush_model(queue));
    }

    /// A request is waited for no more.
    pub fn cancel(&self, queue: QueueHandle, id: RequestId) {
        self.cluster.post(queue, Event::Cancel(queue.model, id));
    }
}

impl Drop for Driver {
    #[expect(clippy::disallowed_methods, reason = "a thread whose run does not end cannot be joined")]
    fn drop(&mut self) {
        self.cluster.stop_alarm();
        self.rehearser().stop();
        self.hosts().iter().for_each(|host| host.stop());
        let clock = self.clock();
        let until = clock.now() + PATIENCE;
        for thread in self.threads.get_mut().drain(..) {
            while !thread.is_finished() && clock.now() < until {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        self.close_log();
    }
}

/// As how many devices of each kind the scheduler plans: on a device that is divided, its parts share what it is.
fn planned_devices(kinds: &[Vec<DeviceKind>]) -> Vec<u32> {
    let mut counts = vec![0; kinds.iter().flatten().max().map_or(1, |kind| kind.0 as usize + 1)];
    for kind in kinds.iter().flatten() {
        counts[kind.0 as usize] += 1;
    }
    counts.iter().map(|count: &u32| (*count).min(kinds.len() as u32)).collect()
}
