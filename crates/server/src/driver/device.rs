//! A device of the driver: a thread that runs one batch at a time.
//!
//! None is enqueued behind another ([`Lane::enqueue`]): in one process the scheduler sends a device its next batch when it is done with the one before, so that more requests can be in it,
//! and the next one is mostly another model's, whose lane is a stream of its own, where it would run beside and not behind.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use downbeat_core::{BatchId, DeviceId, DeviceProfiles, Time};
use downbeat_driver::{Cluster, Place};
use downbeat_engine::Lane;
use parking_lot::Mutex;

use super::desk::Floor;
use super::job::Job;
use crate::clock::Clock;
use crate::engine_run::{self, RunFailure, Watch};
use crate::executable::{Executable, Queue};
use crate::handoff::Handoff;
use crate::metrics::{DeviceMetrics, Reason};
use crate::plan::Outputs;
use crate::statistics::Phases;
use crate::watchdog::{Owner, Post, Watchdog};

/// A batch for a device.
pub struct Launch {
    /// The scheduler's name for it.
    pub batch: BatchId,
    /// Its requests, all of one queue.
    pub jobs: Vec<Job>,
    /// When it was dispatched.
    pub dispatched: Time,
}

/// Where the driver leaves a device's next batch.
pub struct DeviceSlot {
    id: DeviceId,
    index: usize,
    metrics: DeviceMetrics,
    /// How many devices the scheduler has.
    in_service: Arc<AtomicUsize>,
    /// The scheduler dispatches to free devices only.
    next: Handoff<Launch>,
}

impl DeviceSlot {
    /// An empty slot.
    pub fn new(id: DeviceId, index: usize, metrics: DeviceMetrics, in_service: Arc<AtomicUsize>) -> Self {
        DeviceSlot { id, index, metrics, in_service, next: Handoff::default() }
    }

    /// Takes the device out of service, unless it is the last: that one goes on, to answer with errors what is queued.
    fn retire(&self, cluster: &Cluster<Floor>) {
        let fewer = |devices: usize| (devices > 1).then(|| devices - 1);
        if self.in_service.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer).is_ok() {
            tracing::error!(device = self.index, "the device is lost and out of service");
            cluster.remove_device(self.id);
        }
    }

    /// The device's number, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Leaves a batch.
    pub fn launch(&self, launch: Launch) {
        self.next.put(launch);
    }

    /// Ends the device's thread after its present batch.
    pub fn stop(&self) {
        self.next.stop();
    }
}

/// A device's thread. There is another where the run of the one before does not end.
struct Worker {
    slot: Arc<DeviceSlot>,
    cluster: Arc<Cluster<Floor>>,
    watchdog: Arc<Watchdog>,
    /// What runs, for as long as it runs: whoever takes it answers it.
    flight: Mutex<Option<Flight>>,
}

/// A batch that runs.
struct Flight {
    batch: BatchId,
    jobs: Vec<Job>,
    begin: Time,
}

/// The thread was left behind: its batch is answered, and another has its place.
struct LeftBehind;

/// Starts a device's thread.
///
/// # Errors
/// If the operating system has no thread left.
pub fn start(
    slot: Arc<DeviceSlot>,
    cluster: Arc<Cluster<Floor>>,
    watchdog: Arc<Watchdog>,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let worker = Arc::new(Worker { slot, cluster, watchdog, flight: Mutex::default() });
    std::thread::Builder::new().name(format!("device-{}", worker.slot.index())).spawn(move || worker.work())
}

impl Worker {
    /// The life of the thread.
    fn work(self: Arc<Self>) {
        let owner: Weak<Worker> = Arc::downgrade(&self);
        let post = self.watchdog.post(owner);
        let Worker { slot, cluster, .. } = &*self;
        let clock = cluster.handler().clock;
        while let Some(launch) = slot.next.take() {
            slot.metrics.begin();
            let begin = clock.now();
            let batch = launch.batch;
            // The requests of a batch that ends in a panic are told so: their replies are dropped.
            let run = std::panic::catch_unwind(AssertUnwindSafe(|| self.run(launch, &post)));
            let ran = run.unwrap_or_else(|_| {
                tracing::error!(device = slot.index, "a batch ended in a panic: this is a defect");
                post.end();
                drop(self.flight.lock().take());
                Ok(Ran::default())
            });
            let Ok(ran) = ran else { return };
            slot.metrics.end(clock.now().since(begin));
            if let Some((queue, profiles)) = ran.refined {
                cluster.set_profile(queue, profiles);
            }
            cluster.complete(slot.id, batch);
            if ran.device_lost {
                slot.retire(cluster);
            }
        }
    }
}

impl Owner for Worker {
    fn is_awaited(&self) -> bool {
        let flight = self.flight.lock();
        flight.as_ref().is_none_or(|flight| flight.jobs.iter().any(|job| !job.call.reply.is_closed()))
    }

    /// Answers what runs on this thread, and gives the device another one.
    fn leave_behind(&self, reason: &str) {
        let Some(Flight { batch, jobs, begin }) = self.flight.lock().take() else { return };
        let Worker { slot, cluster, watchdog, .. } = self;
        let now = cluster.handler().clock.now();
        let failure = RunFailure::Ended(reason.to_owned());
        jobs.into_iter().for_each(|job| fail(job, slot.index, &failure, now));
        slot.metrics.end(now.since(begin));
        match start(slot.clone(), cluster.clone(), watchdog.clone()) {
            Ok(_) => cluster.complete(slot.id, batch),
            Err(error) => watchdog.give_up(format!("there is no thread left for device {}: {error}", slot.index)),
        }
    }
}

/// What came of a batch, for the scheduler.
#[derive(Default)]
struct Ran {
    /// The queue's new profiles, when there are some.
    refined: Option<(Place, DeviceProfiles)>,
    /// Whether nothing will run on the device any more.
    device_lost: bool,
}

impl Worker {
    /// Runs a batch and answers its requests.
    fn run(&self, launch: Launch, post: &Post) -> Result<Ran, LeftBehind> {
        let (device, clock) = (self.slot.index, self.cluster.handler().clock);
        let begin = clock.now();
        let mut jobs = launch.jobs;
        // Clients that left between dispatch and now leave the batch too; their tickets have counted them.
        jobs.retain(|job| !job.call.reply.is_closed());
        let Some(first) = jobs.first() else { return Ok(Ran::default()) };
        let executable = first.call.executable.clone();
        let queue = first.queue.clone();
        let rows: Vec<u32> = jobs.iter().map(|job| job.call.admitted.rows).collect();
        let total: u32 = rows.iter().sum();
        let state = executable.plan.assemble(jobs.iter().map(|job| &job.call.admitted));
        let limit = post.limit(queue.refiner.lock().profile().latency(total));
        let watch = Watch { post, health: executable.health(), device, limit };
        let assembled = clock.now();
        let flight = Flight { batch: launch.batch, jobs, begin };
        let segments = 0..executable.model().segments();
        let (flight, ran) = self.fly(flight, &executable, |lane| engine_run::run(&watch, lane, segments, state?))?;
        let computed = clock.now();
        let answers = ran.and_then(|state| Ok(executable.plan.separate(state, &rows)?));
        let separated = clock.now();
        let answers: Vec<Outputs> = match answers {
            Ok(answers) => answers,
            Err(failure) => {
                tracing::error!(model = %executable.name, version = %executable.version, batch = total, reason = %failure, "batch failed");
                self.answer_alone(&watch, &executable, flight, failure)?;
                return Ok(Ran { device_lost: executable.model().lost(device).is_some(), ..Ran::default() });
            }
        };
        let phases = Phases {
            compute_input: assembled.since(begin),
            compute_infer: computed.since(assembled),
            compute_output: separated.since(computed),
        };
        // A client that left while its request ran was counted by its ticket.
        let (jobs, answers): (Vec<Job>, Vec<Outputs>) =
            flight.jobs.into_iter().zip(answers).filter(|(job, _)| !job.call.reply.is_closed()).unzip();
        executable.metrics.record_batch(
            total,
            phases,
            jobs.iter().map(|job| {
                (begin.since(job.call.arrival), separated.since(job.call.arrival), separated > job.call.deadline)
            }),
        );
        executable.statistics.lock().record_batch(
            Clock::unix_millis(),
            total,
            phases,
            jobs.iter().map(|job| (begin.since(job.call.arrival), separated.since(job.call.arrival))),
        );
        // What the scheduler has to plan with is the time from dispatch to completion, not the engine's run alone.
        let refined = queue.refiner.lock().observe(total, separated.since(launch.dispatched));
        for (job, outputs) in jobs.into_iter().zip(answers) {
            // A client that left meanwhile has been computed for; there is nobody to tell.
            let _ = job.call.reply.send(Ok(outputs));
        }
        Ok(Ran {
            refined: refined.map(|profile| (queue.place, Queue::profiles(queue.kind, profile))),
            device_lost: false,
        })
    }

    /// Does something on the model's lane, with the batch left where the watchdog finds it.
    fn fly<T>(
        &self,
        flight: Flight,
        executable: &Executable,
        run: impl FnOnce(&mut dyn Lane) -> Result<T, RunFailure>,
    ) -> Result<(Flight, Result<T, RunFailure>), LeftBehind> {
        let device = self.slot.index;
        // A run that was left behind has the lane still.
        if let Some(reason) = executable.health().refuses() {
            return Ok((flight, Err(RunFailure::Refused(reason))));
        }
        *self.flight.lock() = Some(flight);
        let ran = match executable.lane(device) {
            Some(mut lane) => run(&mut **lane),
            None => Err(RunFailure::Engine(format!("the model has no lane on device {device}"))),
        };
        let flight = self.flight.lock().take().ok_or(LeftBehind)?;
        Ok((flight, ran))
    }

    /// After a batch failed: a request whose tensors the model cannot take must not cost others their answers, so each runs once more, alone. Not so where the batch
    /// took too long: each might take as long.
    fn answer_alone(
        &self,
        watch: &Watch<'_>,
        executable: &Executable,
        flight: Flight,
        failure: RunFailure,
    ) -> Result<(), LeftBehind> {
        let (device, clock) = (self.slot.index, self.cluster.handler().clock);
        let Flight { batch, mut jobs, begin } = flight;
        let mut failure = (jobs.len() == 1 || !matches!(failure, RunFailure::Engine(_))).then_some(failure);
        while let Some(job) = jobs.last() {
            if let Some(failure) = &failure {
                let now = clock.now();
                jobs.drain(..).for_each(|job| fail(job, device, failure, now));
                return Ok(());
            }
            let (segments, rows) = (executable.model().segments(), job.call.admitted.rows);
            let state = executable.plan.assemble(std::iter::once(&job.call.admitted));
            let alone =
                |lane: &mut dyn Lane| engine_run::run_alone(watch, lane, segments, &executable.plan, state?, rows);
            let (flight, ran) = self.fly(Flight { batch, jobs, begin }, executable, alone)?;
            jobs = flight.jobs;
            let Some(job) = jobs.pop() else { return Ok(()) };
            let now = clock.now();
            match ran {
                Ok(outputs) => {
                    executable.record_alone(job.call.admitted.rows, now.since(job.call.arrival));
                    // A client that is gone has nobody to tell.
                    let _ = job.call.reply.send(Ok(outputs));
                }
                Err(reason) => {
                    fail(job, device, &reason, now);
                    failure = (!matches!(reason, RunFailure::Engine(_))).then_some(reason);
                }
            }
        }
        Ok(())
    }
}

/// Answers a request that failed on a device. A client that left was counted by its ticket.
fn fail(job: Job, device: usize, failure: &RunFailure, now: Time) {
    if job.call.reply.is_closed() {
        return;
    }
    let error = job.call.executable.failure(device, failure);
    job.call.fail(Reason::of(failure), error, now);
}
