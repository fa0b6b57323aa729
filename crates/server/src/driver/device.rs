//! A device of the driver: a thread that runs one batch at a time.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use downbeat_core::{BatchId, DeviceId, LatencyProfile, Time};
use downbeat_driver::{Cluster, Place};
use downbeat_engine::Lane;

use super::desk::Floor;
use super::job::Job;
use crate::clock::Clock;
use crate::engine_run;
use crate::executable::Executable;
use crate::handoff::Handoff;
use crate::metrics::{DeviceMetrics, Reason};
use crate::plan::Outputs;
use crate::statistics::Phases;

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

/// The life of a device's thread.
pub fn work(slot: &DeviceSlot, cluster: &Cluster<Floor>) {
    let clock = cluster.handler().clock;
    while let Some(launch) = slot.next.take() {
        slot.metrics.begin();
        let begin = clock.now();
        let batch = launch.batch;
        // The requests of a batch that ends in a panic are told so: their replies are dropped.
        let run = std::panic::catch_unwind(AssertUnwindSafe(|| run(slot.index, launch, &clock)));
        let ran = run.unwrap_or_else(|_| {
            tracing::error!(device = slot.index, "a batch ended in a panic: this is a defect");
            Ran::default()
        });
        slot.metrics.end(clock.now().since(begin));
        if let Some((queue, profile)) = ran.refined {
            cluster.set_profile(queue, profile);
        }
        cluster.complete(slot.id, batch);
        if ran.device_lost {
            slot.retire(cluster);
        }
    }
}

/// What came of a batch, for the scheduler.
#[derive(Default)]
struct Ran {
    /// The queue's new profile, when there is one.
    refined: Option<(Place, LatencyProfile)>,
    /// Whether nothing will run on the device any more.
    device_lost: bool,
}

/// Runs a batch and answers its requests.
fn run(device: usize, launch: Launch, clock: &Clock) -> Ran {
    let begin = clock.now();
    let mut jobs = launch.jobs;
    // Clients that left between dispatch and now leave the batch too; their tickets have counted them.
    jobs.retain(|job| !job.call.reply.is_closed());
    let Some(first) = jobs.first() else { return Ran::default() };
    let executable = first.call.executable.clone();
    let queue = first.queue.clone();
    let rows: Vec<u32> = jobs.iter().map(|job| job.call.admitted.rows).collect();
    let total: u32 = rows.iter().sum();
    let state = executable.plan.assemble(jobs.iter().map(|job| &job.call.admitted));
    let assembled = clock.now();
    let ran = state.and_then(|state| {
        on_lane(device, &executable, |lane| engine_run::run(lane, 0..executable.model().segments(), state))
    });
    let computed = clock.now();
    let answers = ran.and_then(|state| executable.plan.separate(state, &rows));
    let separated = clock.now();
    let answers: Vec<Outputs> = match answers {
        Ok(answers) => answers,
        Err(reason) => {
            tracing::error!(model = %executable.name, version = %executable.version, batch = total, %reason, "batch failed");
            answer_alone(device, &executable, jobs, reason, clock);
            return Ran { device_lost: executable.model().lost(device).is_some(), ..Ran::default() };
        }
    };
    let phases = Phases {
        compute_input: assembled.since(begin),
        compute_infer: computed.since(assembled),
        compute_output: separated.since(computed),
    };
    // A client that left while its request ran was counted by its ticket.
    let (jobs, answers): (Vec<Job>, Vec<Outputs>) =
        jobs.into_iter().zip(answers).filter(|(job, _)| !job.call.reply.is_closed()).unzip();
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
    Ran { refined: refined.map(|profile| (queue.place, profile)), device_lost: false }
}

/// Does something on the model's lane on a device.
fn on_lane<T>(
    device: usize,
    executable: &Executable,
    run: impl FnOnce(&mut dyn Lane) -> Result<T, String>,
) -> Result<T, String> {
    let lane = executable.lane(device).ok_or_else(|| format!("the model has no lane on device {device}"))?;
    run(&mut **lane.lock())
}

/// After a batch failed for `reason`: a request whose tensors the model cannot take must not cost others their answers,
/// so each runs once more, alone.
fn answer_alone(device: usize, executable: &Executable, jobs: Vec<Job>, reason: String, clock: &Clock) {
    let alone = jobs.len() == 1;
    for job in jobs {
        let result = if alone {
            Err(reason.clone())
        } else {
            let (segments, rows) = (executable.model().segments(), job.call.admitted.rows);
            let state = executable.plan.assemble(std::iter::once(&job.call.admitted));
            state.and_then(|state| {
                on_lane(device, executable, |lane| engine_run::run_alone(lane, segments, &executable.plan, state, rows))
            })
        };
        let now = clock.now();
        match result {
            Ok(outputs) => {
                executable.record_alone(job.call.admitted.rows, now.since(job.call.arrival));
                // A client that is gone has nobody to tell.
                let _ = job.call.reply.send(Ok(outputs));
            }
            Err(reason) => {
                job.call.fail(Reason::Engine, executable.failure(device, &reason), now);
            }
        }
    }
}
