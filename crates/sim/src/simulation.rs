//! A run of a cluster scheduler under virtual time.

use downbeat_core::cluster::{IndexedHeap, ModelOptions, Request};
use downbeat_core::{BatchId, Duration, ModelId, RequestId, Time};
use rand_distr::{Distribution, Normal};
use rand_pcg::Pcg64;

use crate::arrivals::{Arrivals, BadArrivals, random};
use crate::checker::Checker;
use crate::cluster::{Cluster, Decision};
use crate::feed::Feed;
use crate::pace::Pace;
use crate::report::Report;
use crate::system::System;
use crate::tally::{Run, Tally};

/// A model and what is asked of it.
#[derive(Clone, Debug)]
pub struct Load {
    /// How it is scheduled.
    pub options: ModelOptions,
    /// Time from a request's arrival to its deadline.
    pub slo: Duration,
    /// The arrival process.
    pub arrivals: Arrivals,
    /// Requests per second, before [`Load::pace`] changes it.
    pub rate: f64,
    /// How the rate changes over time.
    pub pace: Pace,
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
    /// End the run early once it is certain that more than this share of some model's requests is dropped or late.
    pub give_up_above: Option<f64>,
    /// Length of the windows of time of [`Report::windows`]; zero: none.
    pub window: Duration,
    /// Record every batch and request.
    pub record: bool,
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
            give_up_above: None,
            window: Duration::ZERO,
            record: false,
        }
    }
}

struct World<C> {
    cluster: C,
    checker: Checker,
    tally: Tally,
    next_request: u64,
    /// By device.
    running: Vec<Option<(BatchId, Run)>>,
    /// By device: when its batch ends.
    ends: IndexedHeap<Time>,
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
        let mut world = World {
            cluster,
            checker: Checker::new(self.seed),
            tally: Tally::new(self),
            next_request: 0,
            running: (0..self.devices).map(|_| None).collect(),
            ends: IndexedHeap::new(),
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
        let mut feed = Feed::new(&self.loads, self.seed, Time::ZERO + self.warm_up + self.span)?;
        let mut now = Time::ZERO;
        loop {
            let arrival = feed.peek().map_or(Time::MAX, |(at, _)| at);
            let end = world.ends.peek().map_or(Time::MAX, |(at, _)| at);
            let timeout = world.cluster.poll_timeout().unwrap_or(Time::MAX);
            // At one instant: completions, then arrivals, then timers.
            let next = end.min(arrival).min(timeout);
            if next == Time::MAX {
                world.checker.end(now);
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
            if world.tally.gave_up() {
                break;
            }
        }
        Ok(world.tally.report(now))
    }
}

impl<C: Cluster> World<C> {
    fn arrive(&mut self, now: Time, model: ModelId, slo: Duration) {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let deadline = now + slo;
        let request = Request { id, model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
        self.checker.request(now, id, model, deadline, 1);
        self.tally.arrival(now, model);
        if self.cluster.handle_request(now, request).is_err() {
            self.checker.rejection(now, id);
            self.tally.rejection(now, model);
        }
    }

    fn complete(&mut self, now: Time) {
        let Some((_, device)) = self.ends.pop() else { return };
        let Some((batch, run)) = self.running[device as usize].take() else { return };
        self.tally.stopped(now, &run, false);
        self.checker.completion(now, run.device, batch);
        for member in &run.members {
            let known = self.checker.finished(now, *member, run.model);
            self.tally.finished(now, &run, *member, &known);
        }
        self.cluster.recycle(run.members);
        self.cluster.handle_completion(now, run.device, batch);
    }

    fn decide(&mut self, now: Time) {
        while let Some(decision) = self.cluster.poll_decision() {
            self.checker.decision(now, &decision);
            match decision {
                Decision::Drop { request, model, reason } => {
                    self.tally.dropped(self.checker.known(now, request), model, reason);
                }
                Decision::Dispatch { batch, device, model, members, size, expected, .. } => {
                    let took = match &self.noise {
                        None => expected,
                        // An execution does not end before it began.
                        Some(noise) => {
                            Duration::from_secs_f64(expected.as_secs_f64() * noise.sample(&mut self.rng).max(0.01))
                        }
                    };
                    let run = self.tally.started(now, device, model, members, size);
                    self.running[device.0 as usize] = Some((batch, run));
                    self.ends.set(device.0, now + took);
                }
                Decision::Preempt { batch: _, device } => {
                    self.ends.remove(device.0);
                    let Some((_, run)) = self.running[device.0 as usize].take() else { continue };
                    self.tally.stopped(now, &run, true);
                    for member in &run.members {
                        self.checker.waits_again(now, *member, run.model);
                    }
                    self.cluster.recycle(run.members);
                }
            }
        }
    }
}
