//! The single-threaded scheduler, its load and its devices, in one loop.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hint::black_box;

use anyhow::{Result, ensure};
use downbeat_core::cluster::{Output, Request, Scheduler};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, RequestId, Time};
use hdrhistogram::Histogram;

use crate::allocations::Counter;
use crate::report::{Latency, Measurement};
use crate::workload::{Requests, Workload};
use downbeat_bench::clock::{Clock, thread_cpu};

/// The time until queues, batches and tables are steady: three SLOs, in which devices and rate
/// meter settle.
pub(super) const WARM_UP: Duration = Duration::from_millis(300);
/// Requests between two checks of the clock.
const CHUNK: u64 = 1 << 16;

/// The scheduler with its load and its devices.
pub(super) struct World {
    scheduler: Scheduler,
    requests: Requests,
    /// The request that arrives next.
    next: (Time, Request),
    completions: BinaryHeap<Reverse<(Time, DeviceId, BatchId)>>,
    pub counts: Counts,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub requests: u64,
    pub events: u64,
    pub wakes: u64,
    pub rejected: u64,
    pub dropped: u64,
    /// Requests in batches that end in time.
    pub good: u64,
    /// Requests in batches that end after their deadline.
    pub late: u64,
    pub batches: u64,
}

impl Counts {
    fn with(self, other: Counts, together: fn(u64, u64) -> u64) -> Counts {
        Counts {
            requests: together(self.requests, other.requests),
            events: together(self.events, other.events),
            wakes: together(self.wakes, other.wakes),
            rejected: together(self.rejected, other.rejected),
            dropped: together(self.dropped, other.dropped),
            good: together(self.good, other.good),
            late: together(self.late, other.late),
            batches: together(self.batches, other.batches),
        }
    }

    pub fn plus(self, other: Counts) -> Counts {
        self.with(other, |a, b| a + b)
    }

    pub fn since(self, before: Counts) -> Counts {
        self.with(before, |now, then| now - then)
    }

    /// A batch that ends at `end`. The ids of its members are their deadlines.
    pub fn batch(&mut self, members: &[RequestId], end: Time) {
        let good = members.iter().filter(|id| id.0 >= end.as_nanos()).count();
        self.good += good as u64;
        self.late += (members.len() - good) as u64;
        self.batches += 1;
    }

    /// Checks that every request so far has had exactly one end, or waits.
    pub fn check(&self, queued: u64) -> Result<()> {
        let Counts { requests, rejected, dropped, good, late, .. } = self;
        let known = rejected + dropped + good + late + queued;
        ensure!(known == *requests, "{requests} requests were offered, but {known} were answered or wait: a defect");
        Ok(())
    }
}

/// Runs as fast as it can, in virtual time, for about `length` of real time.
///
/// # Errors
/// If a request is lost or answered twice.
pub fn run(workload: &Workload, length: Duration) -> Result<Measurement> {
    let mut world = World::warmed_up(workload);
    let clock = Clock::start();
    let before = world.counts;
    let counter = Counter::start();
    let (wall, cpu) = (clock.now(), thread_cpu());
    let end = wall + length;
    loop {
        let until = world.counts.requests + CHUNK;
        while world.counts.requests < until {
            world.step();
        }
        if clock.now() >= end {
            break;
        }
    }
    let (wall, cpu) = (clock.now().since(wall), thread_cpu().saturating_sub(cpu));
    let allocations = counter.map(Counter::stop);
    let counts = world.counts.since(before);
    world.check()?;
    measurement(workload, 1, counts, wall, cpu, allocations)
}

/// Runs in real time for `length`, and measures the time until each event's decisions were taken.
/// One measure starts when the event was due, which includes the wait for earlier events. The other
/// starts when the event was handed in.
///
/// # Errors
/// If a request is lost or answered twice.
pub fn run_paced(workload: &Workload, length: Duration) -> Result<Measurement> {
    let mut world = World::warmed_up(workload);
    let mut latency = Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3)?;
    let mut handling = latency.clone();
    // Real time goes on from where the warm-up's virtual time ended.
    let clock = Clock::start();
    let real = || Time::ZERO + WARM_UP + clock.now().since(Time::ZERO);
    let mut now = real();
    let before = world.counts;
    let counter = Counter::start();
    let (wall, cpu) = (now, thread_cpu());
    let end = now + length;
    while now < end {
        let begin = now;
        let due = world.step_by(now);
        now = real();
        if let Some(due) = due {
            latency.saturating_record(now.since(due).as_nanos());
            handling.saturating_record(now.since(begin).as_nanos());
        }
    }
    let (wall, cpu) = (now.since(wall), thread_cpu().saturating_sub(cpu));
    let allocations = counter.map(Counter::stop);
    let counts = world.counts.since(before);
    world.check()?;
    let (latency_us, handling_us) = (Some(Latency::of(&latency)), Some(Latency::of(&handling)));
    Ok(Measurement { latency_us, handling_us, ..measurement(workload, 1, counts, wall, cpu, allocations)? })
}

impl World {
    fn new(workload: &Workload) -> Self {
        let mut scheduler = Scheduler::new();
        for _ in 0..workload.devices {
            scheduler.add_device(Time::ZERO, DeviceKind(0));
        }
        for _ in 0..workload.models {
            scheduler.add_model(Time::ZERO, workload.options.clone());
        }
        let mut requests = workload.requests();
        let next = requests.draw();
        let completions = BinaryHeap::with_capacity(workload.devices as usize);
        World { scheduler, requests, next, completions, counts: Counts::default() }
    }

    /// After the warm-up, in virtual time.
    pub fn warmed_up(workload: &Workload) -> Self {
        let mut world = Self::new(workload);
        while world.next.0 < Time::ZERO + WARM_UP {
            world.step();
        }
        world
    }

    /// Returns the next completion, arrival and timer, in the order in which events of one instant
    /// are handled.
    fn due(&self) -> (Time, Time, Time) {
        let completion = self.completions.peek().map_or(Time::MAX, |Reverse((at, ..))| *at);
        let timer = self.scheduler.poll_timeout().map_or(Time::MAX, |(at, _)| at);
        (completion, self.next.0, timer)
    }

    /// Handles the next event at its own time.
    pub fn step(&mut self) {
        let (completion, arrival, timer) = self.due();
        let now = completion.min(arrival).min(timer);
        self.handle(now, completion == now, arrival == now);
    }

    /// Handles the next event at `now` if it is due by then. Returns the time when it was due.
    fn step_by(&mut self, now: Time) -> Option<Time> {
        let (completion, arrival, timer) = self.due();
        let due = completion.min(arrival).min(timer);
        if due > now {
            return None;
        }
        self.handle(now, completion == due, arrival == due);
        Some(due)
    }

    fn handle(&mut self, now: Time, completion: bool, arrival: bool) {
        self.counts.events += 1;
        if completion {
            if let Some(Reverse((_, device, batch))) = self.completions.pop() {
                self.scheduler.handle_completion(now, device, batch);
            }
        } else if arrival {
            let (_, request) = std::mem::replace(&mut self.next, self.requests.draw());
            self.counts.requests += 1;
            self.counts.rejected += u64::from(self.scheduler.handle_request(now, request).is_err());
        } else {
            self.counts.wakes += 1;
            self.scheduler.handle_timeout(now);
        }
        while let Some(output) = self.scheduler.poll_output() {
            match output {
                Output::Dispatch { batch, device, members, expected, .. } => {
                    let end = now + expected;
                    self.counts.batch(&members, end);
                    self.scheduler.recycle(members);
                    self.completions.push(Reverse((end, device, batch)));
                }
                Output::Drop { .. } => self.counts.dropped += 1,
            }
        }
    }

    pub fn check(&self) -> Result<()> {
        self.counts.check(self.requests.models().map(|model| u64::from(self.scheduler.queued(model))).sum())
    }
}

pub(super) fn measurement(
    workload: &Workload,
    threads: u32,
    counts: Counts,
    wall: Duration,
    cpu: Duration,
    allocations: Option<u64>,
) -> Result<Measurement> {
    let Counts { requests, events, wakes, rejected, dropped, good, late, batches } = counts;
    ensure!(batches > 0, "no batch left in the measured time; measure for more --seconds, or offer more");
    let per = |span: Duration, n: u64| span.as_nanos() as f64 / n as f64;
    Ok(Measurement {
        models: workload.models,
        devices: workload.devices,
        threads,
        offered_rate: workload.rate,
        requests,
        events_per_request: events as f64 / requests as f64,
        wakes_per_batch: wakes as f64 / batches as f64,
        requests_per_second_per_core: requests as f64 / cpu.as_secs_f64(),
        wall_ns_per_request: per(wall, requests),
        cpu_ns_per_request: per(cpu, requests),
        cpu_ns_per_event: per(cpu, events),
        matchmaker_ns_per_request: None,
        generator_ns_per_request: generator_cost(workload, requests.min(4 << 20)),
        allocations_per_request: allocations.map(|n| n as f64 / requests as f64),
        batches,
        mean_batch: (good + late) as f64 / batches as f64,
        bad_share: (rejected + dropped + late) as f64 / requests as f64,
        latency_us: None,
        handling_us: None,
    })
}

/// CPU nanoseconds to draw one request, alone.
fn generator_cost(workload: &Workload, requests: u64) -> f64 {
    let mut stream = workload.requests();
    let before = thread_cpu();
    for _ in 0..requests {
        black_box(stream.draw());
    }
    thread_cpu().saturating_sub(before).as_nanos() as f64 / requests as f64
}
