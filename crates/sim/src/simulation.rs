//! A run of the production scheduler under virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use downbeat_core::cluster::{DropReason, IndexedHeap, ModelOptions, Output, Request, Scheduler};
use downbeat_core::{BatchId, DeviceId, Duration, ModelId, RequestId, Time};
use rand_distr::{Distribution, Normal};
use rand_pcg::Pcg64;

use crate::arrivals::{ArrivalStream, Arrivals, BadArrivals, random};
use crate::checker::Checker;

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

/// A cluster, its load, and how long to look.
#[derive(Clone, Debug)]
pub struct Simulation {
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
    /// Batches by size, those of the warm-up included.
    pub batch_sizes: BTreeMap<u32, u64>,
}

impl ModelReport {
    /// Share of the arrivals that were not served in time.
    pub fn bad_share(&self) -> f64 {
        if self.offered == 0 { 0.0 } else { 1.0 - self.good as f64 / self.offered as f64 }
    }

    /// Mean size of a batch.
    pub fn mean_batch(&self) -> f64 {
        let (batches, items) = self
            .batch_sizes
            .iter()
            .fold((0, 0), |(n, items), (size, count)| (n + count, items + u64::from(*size) * count));
        items as f64 / batches as f64
    }
}

/// The outcome of a run.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Report {
    /// By model.
    pub models: Vec<ModelReport>,
    /// By device: the share of the time in which it ran a batch.
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

/// One step of the world. Ordered so that what happens at one instant always happens in the same order.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Completion {
    at: Time,
    batch: BatchId,
    device: DeviceId,
    model: ModelId,
    members: Vec<RequestId>,
}

struct World {
    scheduler: Scheduler,
    checker: Checker,
    report: Report,
    /// By request: its deadline, and whether it counts.
    requests: Vec<(Time, bool)>,
    completions: BinaryHeap<Reverse<Completion>>,
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
        let mut world = World {
            scheduler: Scheduler::new(),
            checker: Checker::new(self.seed),
            report: Report { models: vec![ModelReport::default(); self.loads.len()], busy: Vec::new() },
            requests: Vec::new(),
            completions: BinaryHeap::new(),
            busy: vec![Duration::ZERO; self.devices as usize],
            noise: (self.noise > 0.0).then(|| Normal::new(1.0, self.noise).ok()).flatten(),
            rng: random(self.seed, u64::MAX),
        };
        for _ in 0..self.devices {
            world.scheduler.add_device(Time::ZERO);
            world.checker.device();
        }
        let mut streams: Vec<ArrivalStream> = Vec::with_capacity(self.loads.len());
        let mut arrivals = IndexedHeap::new();
        for (index, load) in self.loads.iter().enumerate() {
            world.scheduler.add_model(Time::ZERO, load.options.clone());
            world.checker.model(load.options.max_batch, load.options.drop);
            let mut stream = load.arrivals.stream(load.rate, self.seed, index as u64)?;
            arrivals.set(index as u32, stream.next_arrival());
            streams.push(stream);
        }

        let start = Time::ZERO + self.warm_up;
        let end = start + self.span;
        let mut now = Time::ZERO;
        loop {
            let arrival = arrivals.peek().map_or(Time::MAX, |(at, _): (Time, u32)| at);
            let completion = world.completions.peek().map_or(Time::MAX, |c| c.0.at);
            let timeout = world.scheduler.poll_timeout().map_or(Time::MAX, |(at, _)| at);
            // At one instant: completions, then arrivals, then timers.
            let next = completion.min(arrival).min(timeout);
            if next == Time::MAX {
                break;
            }
            now = now.max(next);
            if completion == next {
                world.complete(now);
            } else if arrival == next {
                let Some((_, index)) = arrivals.peek() else { break };
                let load = &self.loads[index as usize];
                world.arrive(now, ModelId(index), load.slo, now >= start);
                let following = streams[index as usize].next_arrival();
                if following < end {
                    arrivals.set(index, following);
                } else {
                    arrivals.remove(index);
                }
            } else {
                world.scheduler.handle_timeout(now);
            }
            world.decide(now);
        }
        world.checker.end(now);
        let total = now.since(Time::ZERO).as_secs_f64();
        world.report.busy = world.busy.iter().map(|b| b.as_secs_f64() / total).collect();
        Ok(world.report)
    }
}

impl World {
    fn arrive(&mut self, now: Time, model: ModelId, slo: Duration, counts: bool) {
        let id = RequestId(self.requests.len() as u64);
        let deadline = now + slo;
        self.requests.push((deadline, counts));
        let request = Request { id, model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
        let accepted = self.scheduler.handle_request(now, request).is_ok();
        self.checker.request(id, model, deadline, 1, accepted);
        if counts {
            let report = &mut self.report.models[model.0 as usize];
            report.offered += 1;
            report.rejected += u64::from(!accepted);
        }
    }

    fn complete(&mut self, now: Time) {
        let Some(Reverse(Completion { batch, device, model, members, .. })) = self.completions.pop() else { return };
        self.checker.completion(now, device, batch);
        let report = &mut self.report.models[model.0 as usize];
        for member in &members {
            let (deadline, counts) = self.requests[member.0 as usize];
            report.good += u64::from(counts && now <= deadline);
            report.missed += u64::from(counts && now > deadline);
        }
        self.scheduler.recycle(members);
        self.scheduler.handle_completion(now, device, batch);
    }

    fn decide(&mut self, now: Time) {
        while let Some(output) = self.scheduler.poll_output() {
            self.checker.output(now, &output);
            match output {
                Output::Drop { request, model, reason } => {
                    if self.requests[request.0 as usize].1 {
                        *self.report.models[model.0 as usize].dropped.entry(reason).or_default() += 1;
                    }
                }
                Output::Dispatch { batch, device, model, members, size, expected } => {
                    *self.report.models[model.0 as usize].batch_sizes.entry(size).or_default() += 1;
                    let took = match &self.noise {
                        None => expected,
                        // An execution does not end before it began.
                        Some(noise) => {
                            Duration::from_secs_f64(expected.as_secs_f64() * noise.sample(&mut self.rng).max(0.01))
                        }
                    };
                    self.busy[device.0 as usize] += took;
                    self.completions.push(Reverse(Completion { at: now + took, batch, device, model, members }));
                }
            }
        }
    }
}
