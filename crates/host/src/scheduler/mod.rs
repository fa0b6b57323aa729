//! Runs the scheduler of `downbeat-core` on this machine's threads, by way of `downbeat-driver`.
//!
//! There is no scheduler thread. A thread with an event (a frontend with a request, a device with a
//! completion, the alarm with an expiry) handles it. If another thread is already at work there,
//! that thread finds the event. `downbeat-driver` says why a server works this way. The models'
//! queues are divided into shards, so that on a machine with many cores several frontends' threads
//! can schedule at once.
//!
//! `waiting_table.rs` has the only calls of a shard's `handle_request` and `handle_cancel`. Each
//! call gets the present time.

mod arrival_rings;
mod device_pool;
mod rehearser;
mod remembered;
mod step_weights;
mod waiting_table;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use downbeat_core::cluster::{ModelOptions, Order};
use downbeat_core::device::PartitionId;
use downbeat_core::journal::QueueName;
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_driver::{Cluster, LogSink, MAX_SHARDS, Moment, QueueHandle, Setup};
use downbeat_engine::Part;
use downbeat_service::clock::Clock;
use downbeat_service::metrics::{Metrics, TenantMetrics};
use downbeat_service::options::ServerOptions;
use downbeat_service::report::scheduler_status::SchedulerStatus;
use parking_lot::Mutex;
use smallvec::SmallVec;
use waiting_table::{Event, WaitingTable};

use crate::decision_log::DecisionLog;
use crate::device::{DeviceHost, OwnLaunch, Placement, QueuedCall};
use crate::device_map::ModelDevices;
use crate::groups::group_predictor::GroupPredictor;
use crate::groups::retraining::GroupRetrainer;
use crate::pipeline_log::PipelineLog;
use crate::request::queue::Queue;
use crate::request_log::RequestLog;
use crate::run::watchdog::Watchdog;

pub use device_pool::{DevicePool, HearsOfSlots, SlotDone};
pub use rehearser::{Rehearsed, Rehearser, WAKE_MARGIN};
pub use remembered::{Remembered, RememberedQueue};
pub use step_weights::{PipelineStage, WeightDecision};

/// How long [`Driver`]'s drop waits for threads, which an endless run may hold up.
const PATIENCE: Duration = Duration::from_millis(1_000);

/// The running scheduler, with its devices. Dropping it stops the threads.
pub struct Driver {
    cluster: Arc<Cluster<DevicePool>>,
    next_request: AtomicU64,
    next_model: AtomicU32,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    predictor: Arc<GroupPredictor>,
    log: Option<Arc<DecisionLog>>,
    pipelines: Option<PipelineLog>,
    requests: Option<RequestLog>,
    tenants: TenantMetrics,
}

impl Driver {
    /// Starts the devices, the slots and the alarm. The devices are divided into `parts`. `kinds`:
    /// the kind of each partition of each device; each partition has a slot. The options set the
    /// number of shards (at least one, at most [`MAX_SHARDS`]). `watchdog` looks after the runs.
    /// Decisions are written to `log`, which has as many shards and devices.
    ///
    /// One thread rehearses the behaviour of adaptive models, and trains the predictor of operator
    /// groups with the served groups. The thread may use [`ServerOptions::rehearsal_cpu`] of a
    /// core's time.
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
        let rehearser = Rehearser::new(shards, rehearsal_cpu, log.is_some(), options.order, activity);
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
        let pipelines = sink.clone().map(PipelineLog::new);
        let requests = sink.map(|sink| RequestLog::new(sink, clock));
        let driver = Driver {
            cluster,
            next_request,
            next_model,
            threads,
            predictor,
            log,
            pipelines,
            requests,
            tenants: metrics.tenants(),
        };
        for host in driver.hosts() {
            let scheduler = Arc::downgrade(&driver.cluster);
            host.belongs_to(scheduler);
        }
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
            for (kind, count) in (0..).map(DeviceKind).zip(planned_devices(kinds)) {
                rehearser.has_devices(kind, count);
            }
            let mut retrainer = GroupRetrainer::new(driver.predictor.clone());
            let work = move || {
                let train = || {
                    retrainer.step(|is_adopted| {
                        metrics.trainings.inc();
                        metrics.adoptions.inc_by(u64::from(is_adopted));
                        if is_adopted {
                            cluster.handler().hosts.iter().for_each(|host| host.tell_groups());
                        }
                    })
                };
                rehearser.work(&*cluster, train, &metrics);
            };
            let thread = std::thread::Builder::new().name("rehearsal".to_owned()).spawn(work)?;
            driver.threads.lock().push(thread);
        }
        Ok(driver)
    }

    /// Adds slots to undivided devices, in turn, until there are `slots`. Slots beyond one for each
    /// device share their device. The scheduler goes on planning with the number of devices.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn grow_to(&self, slots: usize) -> std::io::Result<()> {
        let devices = self.devices();
        self.add_slots((0..slots).map(|index| (index % devices, PartitionId::default(), DeviceKind(0))))
    }

    /// Adds the missing ones of these slots. Each slot has a device, a partition, and the
    /// partition's kind.
    fn add_slots(&self, slots: impl Iterator<Item = (usize, PartitionId, DeviceKind)>) -> std::io::Result<()> {
        // Held throughout, because the scheduler's ids are places in the list of slots.
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

    /// Waits for the threads that work in the scheduler. Returns if none of them hangs.
    pub fn visit(&self) {
        self.cluster.visit();
    }

    /// Passes on the unwritten part of the decision log, so that a killed process loses little of
    /// it.
    pub fn flush_log(&self) {
        self.cluster.flush_log();
        self.hosts().iter().for_each(|host| host.flush_log());
        self.pipelines.iter().for_each(PipelineLog::flush);
        self.requests.iter().for_each(RequestLog::flush);
    }

    /// The log of the requests of pipelines; `None`: nothing is logged.
    pub fn pipeline_log(&self) -> Option<&PipelineLog> {
        self.pipelines.as_ref()
    }

    /// The log of clients' requests; `None`: nothing is logged.
    pub fn request_log(&self) -> Option<&RequestLog> {
        self.requests.as_ref()
    }

    /// Writes the decision log to its end. Later decisions are not logged.
    pub fn close_log(&self) {
        if let Some(log) = &self.log {
            self.flush_log();
            log.close();
        }
    }

    fn rehearser(&self) -> &Rehearser {
        &self.cluster.handler().rehearser
    }

    /// The behaviours of the scheduler's queues, and their reasons.
    pub fn status(&self) -> SchedulerStatus {
        self.rehearser().status(&*self.cluster)
    }

    /// The counters of tenants.
    pub fn tenant_metrics(&self) -> TenantMetrics {
        self.tenants.clone()
    }

    /// The predictor of operator groups.
    pub fn predictor(&self) -> &Arc<GroupPredictor> {
        &self.predictor
    }

    /// From now on [`Driver::grant`] grants the slots, and `hears` learns when they are done. No
    /// request may be submitted then.
    pub fn is_granted_from_afar(&self, hears: HearsOfSlots) {
        let was_free = self.cluster.handler().granted_from_afar.set(hears).is_ok();
        assert!(was_free, "a device has one scheduler");
    }

    /// Gives a slot a batch that another process's scheduler has made. The slot must be free, and
    /// must [run](Self::runs) the batch's model.
    pub fn grant(&self, slot: DeviceId, batch: BatchId, jobs: Vec<(RequestId, QueuedCall)>, own: &mut OwnLaunch) {
        let (host, lane) = self.cluster.handler().slot(slot);
        host.grant(lane, batch, jobs, (self.clock().now(), None), own);
    }

    /// By slot: its device and its partition.
    pub fn slots(&self) -> Vec<(usize, usize)> {
        let slots = self.cluster.handler().slots.read();
        slots.iter().map(|(host, lane)| (host.device, host.slot_partition(*lane).0 as usize)).collect()
    }

    /// Whether a slot exists, is in service, and runs the batches of a queue.
    pub fn runs(&self, slot: DeviceId, queue: &Queue) -> bool {
        let pool = self.cluster.handler();
        let slot = pool.slots.read().get(slot.0 as usize).cloned();
        let Some((host, lane)) = slot.filter(|(host, _)| pool.is_in_service(host.device)) else { return false };
        let partition = host.slot_partition(lane);
        queue.on_device(host.device).is_some_and(|model| model.lost().is_none())
            && queue.placed.devices.contains(&host.device)
            && queue.placed.partitions.contains(&partition)
    }

    /// The devices, by number.
    pub fn hosts(&self) -> &[Arc<DeviceHost>] {
        &self.cluster.handler().hosts
    }

    /// The number of devices.
    pub fn devices(&self) -> usize {
        self.hosts().len()
    }

    /// A number for a new model.
    pub fn next_model(&self) -> ModelId {
        ModelId(self.next_model.fetch_add(1, Ordering::Relaxed))
    }

    /// A number for a new request.
    pub fn next_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    /// How many numbers requests have got so far.
    pub fn requests(&self) -> u64 {
        self.next_request.load(Ordering::Relaxed)
    }

    /// The clock of the scheduler's time.
    pub fn clock(&self) -> Clock {
        self.cluster.handler().clock
    }

    /// The present time, and when a device is expected to be free.
    pub fn moment(&self) -> Moment {
        self.cluster.moment()
    }

    /// Adds a queue for requests of a model to the scheduler. Batches run on the devices of
    /// `placed`, with the latencies of `profiles`, by site. `models`: the version on each device.
    pub fn add_queue(
        &self,
        name: QueueName,
        options: ModelOptions,
        placed: &ModelDevices,
        profiles: Vec<LatencyProfile>,
        models: Box<[Arc<Placement>]>,
    ) -> Arc<Queue> {
        let place = self.cluster.add_model(options.clone());
        self.rehearser().added(place, &name.model, &options);
        self.cluster.name_model(place, name);
        Arc::new(Queue::new(place, options, placed, profiles, models, self.clock().now()))
    }

    /// Adds a queue beside `own`, for requests beyond their tenants' shares. It gets only time that no
    /// other queue needs, in batches of at most `max_batch`. The rehearsal does not hear of it.
    pub fn add_lent_queue(
        &self,
        name: QueueName,
        own: &Queue,
        max_batch: u32,
        models: Box<[Arc<Placement>]>,
    ) -> Arc<Queue> {
        let profiles = own.profiles();
        let options = ModelOptions { max_batch, ..own.options_beside(&profiles) };
        let place = self.cluster.add_model(options.clone());
        self.cluster.set_lent(place);
        self.cluster.name_model(place, name);
        Arc::new(Queue::new(place, options, &own.placed, profiles, models, self.clock().now()))
    }

    /// Removes a queue if no request waits in it. Returns whether it was removed.
    pub fn remove_empty_queue(&self, queue: QueueHandle) -> bool {
        let removed = self.cluster.remove_idle_model(queue);
        if removed {
            self.rehearser().removed(queue);
        }
        removed
    }

    /// Removes a queue. Its waiting requests are dropped as unloaded.
    pub fn remove_queue(&self, queue: QueueHandle) {
        self.cluster.remove_model(queue);
        self.rehearser().removed(queue);
    }

    /// Sets the part of the devices, percent, that steps of pipelines may count on in a queue, so that
    /// their batches leave early; `None`: no step uses the queue.
    pub fn leave_early(&self, queue: &Queue, share: Option<u8>) {
        if queue.set_step_share(share) {
            let dispatch = queue.dispatch();
            self.rehearser().dispatches(queue.place, dispatch.clone());
            self.cluster.set_dispatch(queue.place, dispatch);
        }
    }

    /// The requests of the last minutes; `None`: the rehearsal is off, and nothing is remembered.
    pub fn remembered(&self) -> Option<Remembered> {
        self.rehearser().remembered()
    }

    /// Tells the rehearsal which pipelines are in service; `None`: there are none.
    pub fn rehearse_pipelines(&self, stage: Option<PipelineStage>) {
        self.rehearser().has_pipelines(stage);
    }

    /// Records that a request of `rows` items came to a pipeline, which has this number and this time
    /// for the request.
    pub fn pipeline_asked(&self, at: Time, budget: Duration, pipeline: u64, rows: u32) {
        self.rehearser().pipeline_asked(at, budget, pipeline, rows);
    }

    /// The weights that the last trial of pipelines found, once.
    pub fn take_weights(&self) -> Option<WeightDecision> {
        self.rehearser().take_weights()
    }

    /// Hands a request over. The answer always comes through the call's `reply`. `own`: the calling
    /// thread's wish for a launch.
    pub fn submit(&self, id: RequestId, queued: QueuedCall, own: &mut OwnLaunch) {
        let (place, loaded) = (queued.queue.place, queued.queue.gathers.then(|| queued.call.loaded.clone()));
        self.cluster.post(place, Event::Submit(id, queued), own);
        // This comes afterwards, so that of two simultaneous requests the later finds the earlier.
        if let Some(other) = loaded.and_then(|loaded| loaded.gathers_in(place)) {
            self.cluster.flush_model(other, own);
        }
    }

    /// Hands over several requests, which can share batches. A request whose client has gone is
    /// left out: its ticket has counted it.
    pub fn submit_all(&self, requests: impl Iterator<Item = (RequestId, QueuedCall)>, own: &mut OwnLaunch) {
        let mut overtaken: SmallVec<[QueueHandle; 1]> = SmallVec::new();
        let events = requests.filter_map(|(id, queued)| {
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
        });
        self.cluster.post_all(events, own);
        overtaken.into_iter().for_each(|queue| self.cluster.flush_model(queue, own));
    }

    /// Cancels a request.
    pub fn cancel(&self, queue: QueueHandle, id: RequestId) {
        self.cluster.post(queue, Event::Cancel(queue.model, id), &mut OwnLaunch::default());
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

/// The number of devices of each kind that the scheduler plans with. The parts of a divided device
/// share the device.
fn planned_devices(kinds: &[Vec<DeviceKind>]) -> Vec<u32> {
    let mut counts = vec![0; kinds.iter().flatten().max().map_or(1, |kind| kind.0 as usize + 1)];
    for kind in kinds.iter().flatten() {
        counts[kind.0 as usize] += 1;
    }
    counts.iter().map(|count: &u32| (*count).min(kinds.len() as u32)).collect()
}
