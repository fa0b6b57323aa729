//! Runs the scheduler of `downbeat-core` on this machine's threads, by way of `downbeat-driver`.
//!
//! There is no scheduler thread. Whoever has an event (a frontend with a request, a device with a completion, the
//! alarm with an expiry) works it off, unless somebody is at work there already, who will find it; why that is the way of a
//! server, `downbeat-driver` says. The models' queues are parted into shards, so that on a machine of many cores several frontends'
//! threads can schedule at once.
//!
//! `desk.rs` has the only calls of a shard's `handle_request` and `handle_cancel`, and each gets the time of this moment.

mod desk;
mod device;
mod job;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use downbeat_core::cluster::ModelOptions;
use downbeat_core::{DeviceId, DeviceKind, Duration, RequestId};
use downbeat_driver::{Cluster, LogSink, MAX_SHARDS, Place, Setup};
use parking_lot::{Mutex, RwLock};

use crate::clock::Clock;
use crate::decision_log::DecisionLog;
use crate::metrics::Metrics;
use crate::ticket::{self, Ticket};
use crate::watchdog::Watchdog;
pub(crate) use desk::CounterHasher;
use desk::Desk;
pub(crate) use desk::{Event, Floor};
use device::DeviceSlot;
pub use job::{Job, Waiting};

/// How much before its last moment a deferred batch starts: for an alarm that comes late, executions that take longer than
/// their profile, and the way of the answer, on a machine that has other things to do. It costs no capacity: while the devices are
/// busy a batch may still start until the last moment.
const WAKE_MARGIN: Duration = Duration::from_millis(5);

/// How long the end waits for threads, which a run that does not end may hold up.
const PATIENCE: Duration = Duration::from_millis(1_000);

/// The scheduler at work, with its devices. Dropping it stops the threads.
pub struct Driver {
    cluster: Arc<Cluster<Floor>>,
    next_request: AtomicU64,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    /// See [`DeviceSlot`].
    in_service: Arc<AtomicUsize>,
    log: Option<Arc<DecisionLog>>,
}

impl Driver {
    /// Starts `devices` device threads and the alarm. There are `kinds` of devices, equally many of each, one kind after another. The models' queues are parted into `shards` (at least one, at most
    /// [`MAX_SHARDS`]). `watchdog` looks after the runs. What it decides is written to `log`, if there is one, which has as many shards.
    ///
    /// Devices that come later ([`Driver::grow_to`]) share what these run on: the scheduler goes on planning with these.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn start(
        clock: Clock,
        devices: usize,
        kinds: usize,
        shards: usize,
        metrics: &Metrics,
        watchdog: &Arc<Watchdog>,
        log: Option<DecisionLog>,
    ) -> std::io::Result<Self> {
        let in_service = Arc::new(AtomicUsize::new(devices));
        let slots: Vec<_> = (0..devices).map(|index| slot(index, metrics, &in_service)).collect();
        let floor = Floor { clock, devices: RwLock::new(slots.clone()) };
        let desks = (0..shards.clamp(1, MAX_SHARDS)).map(|_| Desk::default()).collect();
        let log = log.map(Arc::new);
        let setup = Setup {
            wake_margin: WAKE_MARGIN,
            log: log.clone().map(|log| log as Arc<dyn LogSink>),
            planned: Some((devices / kinds) as u32),
            devices: (0..devices).map(|index| DeviceKind((index * kinds / devices) as u32)).collect(),
            kinds: kinds as u32,
            ..Setup::new(0)
        };
        let cluster = Arc::new(Cluster::new(floor, desks, setup));
        let mut threads = Vec::new();
        for slot in slots {
            threads.push(device::start(slot, cluster.clone(), watchdog.clone())?);
        }
        let alarmed = cluster.clone();
        threads.push(std::thread::Builder::new().name("alarm".to_owned()).spawn(move || alarmed.ring_alarms())?);
        Ok(Driver { cluster, next_request: AtomicU64::new(0), threads: Mutex::new(threads), in_service, log })
    }

    /// Adds devices until there are so many.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn grow_to(&self, devices: usize, metrics: &Metrics, watchdog: &Arc<Watchdog>) -> std::io::Result<()> {
        // Held throughout: the ids that the scheduler gives out are places in the list of slots.
        let mut threads = self.threads.lock();
        for index in self.devices()..devices {
            let slot = slot(index, metrics, &self.in_service);
            threads.push(device::start(slot.clone(), self.cluster.clone(), watchdog.clone())?);
            self.cluster.handler().devices.write().push(slot);
            self.in_service.fetch_add(1, Ordering::Relaxed);
            let id = self.cluster.add_device(DeviceKind(0));
            assert!(id == DeviceId(index as u32), "nobody else adds devices");
        }
        Ok(())
    }

    /// Passes on what has not been written of the decision log, so that not much is missing should the process be killed.
    pub fn flush_log(&self) {
        self.cluster.flush_log();
        if let Some(log) = &self.log {
            log.flush_devices();
        }
    }

    /// The decision log, if there is one.
    pub fn log(&self) -> Option<&DecisionLog> {
        self.log.as_deref()
    }

    /// Writes the decision log to its end. What is decided after this is not in it.
    pub fn close_log(&self) {
        if let Some(log) = &self.log {
            self.cluster.flush_log();
            log.close();
        }
    }

    /// How many devices there are.
    pub fn devices(&self) -> usize {
        self.cluster.handler().devices.read().len()
    }

    /// The clock that the scheduler's time comes from.
    pub fn clock(&self) -> Clock {
        self.cluster.handler().clock
    }

    /// Makes a queue in the scheduler.
    pub fn add_queue(&self, options: ModelOptions) -> Place {
        self.cluster.add_model(options)
    }

    /// Removes a queue if nothing waits in it; says whether nothing did.
    pub fn remove_empty_queue(&self, queue: Place) -> bool {
        self.cluster.remove_idle_model(queue)
    }

    /// Removes a queue; what waits in it is dropped as unloaded.
    pub fn remove_queue(&self, queue: Place) {
        self.cluster.remove_model(queue);
    }

    /// Hands a request over. The answer comes through the call's `reply`, always. Dropping the ticket cancels the request.
    pub fn submit(&self, waiting: Waiting, job: Job) -> Ticket {
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let queue = job.queue.place;
        let decider = ticket::Decider::Scheduler(self.cluster.clone(), queue);
        let executable = job.call.executable.clone();
        let ticket = Ticket::new(decider, executable.clone(), id, job.call.arrival);
        let gathers = job.queue.gathers;
        self.cluster.post(queue, Event::Submit(id, waiting, job));
        // Afterwards, so that of two requests that come at the same time the later finds the earlier.
        if gathers && let Some(other) = executable.gathers_in(queue) {
            self.cluster.flush_model(other);
        }
        ticket
    }
}

fn slot(index: usize, metrics: &Metrics, in_service: &Arc<AtomicUsize>) -> Arc<DeviceSlot> {
    Arc::new(DeviceSlot::new(DeviceId(index as u32), index, metrics.device(index), in_service.clone()))
}

impl Drop for Driver {
    #[expect(clippy::disallowed_methods, reason = "a thread whose run does not end cannot be joined")]
    fn drop(&mut self) {
        self.cluster.stop_alarm();
        for slot in self.cluster.handler().devices.read().iter() {
            slot.stop();
        }
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
