//! A run of a cluster scheduler under virtual time.

use std::collections::BTreeMap;

use downbeat_core::cluster::{DropReason, IndexedHeap, ModelOptions, Request};
use downbeat_core::{BatchId, DeviceId, Duration, ModelId, RequestId, Time};
use rand_distr::{Distribution, Normal};
use rand_pcg::Pcg64;

use crate::arrivals::{Arrivals, BadArrivals, random};
use crate::checker::Checker;
use crate::cluster::{Cluster, Decision};
use crate::feed::Feed;
use crate::system::System;

/// A model and what is asked of it.
#[derive(Clone, Debug)]
pub struct Load {
    /// How it is scheduled.
    pub options: ModelOptions,
    /// Time from a request's arrival to its deadline.
    pub slo: Duration,
    /// The arrival process.
    pub arrivals: Arrivals,
    /// Requests per second.
    pub rate: f64,
}

/// A cluster, its load, and how long to look. By default there is neither a model nor a device, and 10 s count after a
/// warm-up of 1 s.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// Which scheduler decides.
    pub system: System,
    /// The models.
    pub loads: Vec<Load>,
    /// Devices, all free at the start.
    pub devices: u32,
    /// Arrivals before this are served but not counted.
    pub warm_up: Duration,
    /// Time in which arrivals count, after the warm-up.
    pub span: Duration,
    /// Standard deviation of an execution time as a share of the profile's; 0: exactly the profile's.
    pub noise: f64,
    /// Chooses all random numbers.
    pub seed: u64,
}

impl Default for Simulation {
    fn default() -> Self {
        Simulation {
            system: System::default(),
            loads: Vec::new(),
            devices: 0,
            warm_up: Duration::from_millis(1_000),
            span: Duration::from_millis(10_000),
            noise: 0.0,
            seed: 1,
        }
    }
}

/// What happened to the requests that count.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ModelReport {
    /// Arrivals that count.
    pub offered: u64,
    /// Finished by their deadline.
    pub good: u64,
    /// Finished after it.
    pub missed: u64,
    /// Not accepted.
    pub rejected: u64,
    /// Dropped, by reason.
    pub dropped: BTreeMap<DropReason, u64>,
    /// By size, from 0: how many batches were finished, those of the warm-up included.
    pub batch_sizes: Vec<u64>,
    /// Batches that were stopped to make room for another; their work was lost.
    pub preempted: u64,
}

impl ModelReport {
    /// Share of the arrivals that were not served in time.
    pub fn bad_share(&self) -> f64 {
        if self.offered == 0 { 0.0 } else { 1.0 - self.good as f64 / self.offered as f64 }
    }

    /// Mean size of a batch.
    pub fn mean_batch(&self) -> f64 {
        let batches: u64 = self.batch_sizes.iter().sum();
        let items: u64 = self.batch_sizes.iter().zip(0..).map(|(count, size)| count * size).sum();
        items as f64 / batches as f64
    }
}

/// The outcome of a run.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Report {
    /// By model.
    pub models: Vec<ModelReport>,
    /// By device: the share of the time in which it ran a batch, a preempted one included.
    pub busy: Vec<f64>,
}

impl Report {
    /// Requests finished by their deadline, of all models.
    pub fn good(&self) -> u64 {
        self.models.iter().map(|model| model.good).sum()
    }

    /// Mean of the devices' busy shares.
    pub fn mean_busy(&self) -> f64 {
        self.busy.iter().sum::<f64>() / self.busy.len() as f64
    }

    /// The largest share of any model's requests that was not served in time.
    pub fn worst_bad_share(&self) -> f64 {
        self.models.iter().map(ModelReport::bad_share).fold(0.0, f64::max)
    }
}

/// A batch on a device.
struct Running {
    batch: BatchId,
    model: ModelId,
    members: Vec<RequestId>,
    size: u32,
    start: Time,
}

struct World<C> {
    cluster: C,
    checker: Checker,
    report: Report,
    /// Arrivals from here on count.
    start: Time,
    next_request: u64,
    /// By device.
    running: Vec<Option<Running>>,
    /// By device: when its batch ends.
    ends: IndexedHeap<Time>,
    /// By device.
    busy: Vec<Duration>,
    noise: Option<Normal<f64>>,
    rng: Pcg64,
}

impl Simulation {
    /// Runs it. Panics, with the seed, if the scheduler breaks one of the [`Checker`]'s rules.
    ///
    /// # Errors
    /// If an arrival process has no positive, finite rate and shape.
    pub fn run(&self) -> Result<Report, BadArrivals> {
        self.system.run(self)
    }

    /// Runs it on this cluster scheduler, which has neither models nor devices yet, whatever [`Simulation::system`] says.
    /// Panics, with the seed, if the scheduler breaks one of the [`Checker`]'s rules.
    ///
    /// # Errors
    /// If an arrival process has no positive, finite rate and shape.
    pub fn run_on<C: Cluster>(&self, cluster: C) -> Result<Report, BadArrivals> {
        let start = Time::ZERO + self.warm_up;
        let mut world = World {
            cluster,
            checker: Checker::new(self.seed),
            report: Report { models: vec![ModelReport::default(); self.loads.len()], busy: Vec::new() },
            start,
            next_request: 0,
            running: (0..self.devices).map(|_| None).collect(),
            ends: IndexedHeap::new(),
            busy: vec![Duration::ZERO; self.devices as usize],
            noise: (self.noise > 0.0).then(|| Normal::new(1.0, self.noise).ok()).flatten(),
            rng: random(self.seed, u64::MAX),
        };
        for _ in 0..self.devices {
            world.cluster.add_device(Time::ZERO);
            world.checker.device();
        }
        for load in &self.loads {
            world.cluster.add_model(Time::ZERO, load.options.clone(), load.slo, load.rate);
            world.checker.model(load.options.max_batch.max(1), load.options.drop);
        }
        let mut feed = Feed::new(&self.loads, self.seed, start + self.span)?;
        let mut now = Time::ZERO;
        loop {
            let arrival = feed.peek().map_or(Time::MAX, |(at, _)| at);
            let end = world.ends.peek().map_or(Time::MAX, |(at, _)| at);
            let timeout = world.cluster.poll_timeout().unwrap_or(Time::MAX);
            // At one instant: completions, then arrivals, then timers.
            let next = end.min(arrival).min(timeout);
            if next == Time::MAX {
                break;
            }
            now = now.max(next);
            if end == next {
                world.complete(now);
            } else if arrival == next {
                let Some((_, index)) = feed.pop() else { break };
                world.arrive(now, ModelId(index), self.loads[index as usize].slo);
            } else {
                world.cluster.handle_timeout(now);
            }
            world.decide(now);
        }
        world.checker.end(now);
        let total = now.since(Time::ZERO).as_secs_f64();
        world.report.busy = world.busy.iter().map(|b| b.as_secs_f64() / total).collect();
        Ok(world.report)
    }
}

impl<C: Cluster> World<C> {
    fn arrive(&mut self, now: Time, model: ModelId, slo: Duration) {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let deadline = now + slo;
        let request = Request { id, model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
        self.checker.request(now, id, model, deadline, 1);
        let accepted = self.cluster.handle_request(now, request).is_ok();
        if !accepted {
            self.checker.rejection(now, id);
        }
        if now >= self.start {
            let report = &mut self.report.models[model.0 as usize];
            report.offered += 1;
            report.rejected += u64::from(!accepted);
        }
    }

    fn complete(&mut self, now: Time) {
        let Some((_, device)) = self.ends.pop() else { return };
        let Some(done) = self.stop(now, DeviceId(device)) else { return };
        let Running { batch, model, members, size, .. } = done;
        let report = &mut self.report.models[model.0 as usize];
        count(&mut report.batch_sizes, size);
        for member in &members {
            let known = self.checker.known(now, *member);
            let counts = known.arrival >= self.start;
            report.good += u64::from(counts && now <= known.deadline);
            report.missed += u64::from(counts && now > known.deadline);
        }
        self.checker.completion(now, DeviceId(device), batch, model, &members);
        self.cluster.recycle(members);
        self.cluster.handle_completion(now, DeviceId(device), batch);
    }

    fn decide(&mut self, now: Time) {
        while let Some(decision) = self.cluster.poll_decision() {
            if let Decision::Preempt { batch: _, device } = decision {
                self.ends.remove(device.0);
                let stopped = self.stop(now, device);
                let members = stopped.as_ref().map_or(&[][..], |stopped| &stopped.members);
                self.checker.decision(now, &decision, members);
                if let Some(Running { model, members, .. }) = stopped {
                    self.report.models[model.0 as usize].preempted += 1;
                    self.cluster.recycle(members);
                }
                continue;
            }
            self.checker.decision(now, &decision, &[]);
            match decision {
                Decision::Drop { request, model, reason } => {
                    if self.checker.known(now, request).arrival >= self.start {
                        *self.report.models[model.0 as usize].dropped.entry(reason).or_default() += 1;
                    }
                }
                Decision::Dispatch { batch, device, model, members, size, expected } => {
                    let took = match &self.noise {
                        None => expected,
                        // An execution does not end before it began.
                        Some(noise) => {
                            Duration::from_secs_f64(expected.as_secs_f64() * noise.sample(&mut self.rng).max(0.01))
                        }
                    };
                    self.running[device.0 as usize] = Some(Running { batch, model, members, size, start: now });
                    self.ends.set(device.0, now + took);
                }
                Decision::Preempt { .. } => {}
            }
        }
    }

    /// Takes what runs off the device and counts the time it ran.
    fn stop(&mut self, now: Time, device: DeviceId) -> Option<Running> {
        let running = self.running[device.0 as usize].take()?;
        self.busy[device.0 as usize] += now.since(running.start);
        Some(running)
    }
}

/// Adds one at `index`, behind zeros if nothing was there.
fn count(counts: &mut Vec<u64>, index: u32) {
    let index = index as usize;
    if counts.len() <= index {
        counts.resize(index + 1, 0);
    }
    counts[index] += 1;
}
