//! The scheduler on several threads. Some threads run the queues of models; each has its share of
//! the load and of the devices. One more thread runs the matchmaker.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Result, anyhow, ensure};
use downbeat_core::cluster::{Output, Request, Shard};
use downbeat_core::journal::Journal;
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, ModelId, Time};
use downbeat_driver::{Cluster, Handler, Moment, OwnShard, QueueHandle, Setup, TURN};
use hdrhistogram::Histogram;

use crate::report::{Latency, Measurement};
use crate::single_thread::{Counts, WARM_UP, measurement};
use crate::workload::{Requests, Workload};
use downbeat_bench::clock::{Clock, thread_cpu};

/// Requests that a thread handles between two checks of its mailbox and its devices.
const BURST: usize = 16;
/// The largest lead of one thread's virtual time over another's: a fiftieth of the SLO.
const LEAD: Duration = Duration::from_millis(2);

thread_local! {
    /// The virtual time of this thread.
    static NOW: Cell<Time> = const { Cell::new(Time::ZERO) };
}

/// The state that all threads share.
struct Bench {
    clock: Clock,
    /// True if time is real.
    paced: bool,
    /// By shard: its virtual time, nanoseconds.
    shard_ns: Vec<AtomicU64>,
    /// The matchmaker has seen every message sent by this virtual time, in nanoseconds.
    matchmaker_ns: AtomicU64,
    /// By device: the time when it became free, in nanoseconds.
    freed_ns: Vec<AtomicU64>,
}

/// A thread's knowledge of its shard.
struct RequestTable {
    counts: Counts,
    /// The running batches of this thread, with their ends.
    completions: BinaryHeap<Reverse<(Time, DeviceId, BatchId)>>,
    /// By model: the time from which its batch may start, past or future; `Time::MAX` without a
    /// batch.
    open: Vec<Time>,
    latency: Histogram<u64>,
}

impl Handler for Bench {
    /// The time when the event was due comes with it.
    type Event = (Time, Request);
    type RequestTable = RequestTable;
    type Context = ();

    fn now(&self) -> Time {
        if self.paced { self.clock.now() } else { NOW.get() }
    }

    fn handle(
        &self,
        moment: Moment,
        shard: &mut Journal<Shard>,
        table: &mut RequestTable,
        (due, request): (Time, Request),
    ) {
        table.counts.requests += 1;
        table.counts.events += 1;
        table.counts.rejected += u64::from(shard.handle_request(moment.now, &request).is_err());
        table.follow(shard, request.model, due);
    }

    fn carry_out(
        &self,
        moment: Moment,
        shard: &mut Journal<Shard>,
        table: &mut RequestTable,
        output: Output,
        (): &mut (),
    ) {
        match output {
            Output::Dispatch { batch, device, model, members, expected, .. } => {
                let now = self.now();
                let freed = Time::from_nanos(self.freed_ns[device.0 as usize].load(Ordering::Relaxed));
                let due = table.open[model.0 as usize].min(now).max(freed);
                table.latency.saturating_record(now.since(due).as_nanos());
                let end = moment.now + expected;
                table.counts.batch(&members, end);
                shard.recycle(members);
                table.completions.push(Reverse((end, device, batch)));
                table.open[model.0 as usize] = Time::MAX;
                table.follow(shard, model, now);
            }
            Output::Drop { .. } => table.counts.dropped += 1,
        }
    }
}

impl RequestTable {
    fn new(workload: &Workload) -> Result<Self> {
        Ok(RequestTable {
            counts: Counts::default(),
            completions: BinaryHeap::with_capacity(workload.devices as usize),
            open: vec![Time::MAX; workload.models as usize],
            latency: Histogram::new_with_bounds(1, 60_000_000_000, 3)?,
        })
    }

    /// Updates the time from which the model's batch may start, after an event that was due at
    /// `due`.
    fn follow(&mut self, shard: &Journal<Shard>, model: ModelId, due: Time) {
        let open = &mut self.open[model.0 as usize];
        *open = match shard.machine().queue(model).and_then(|queue| queue.candidate(DeviceKind(0))) {
            None => Time::MAX,
            Some(candidate) if candidate.exec > due => candidate.exec,
            // The batch could start before, or this event opened it.
            Some(_) => due.min(*open),
        };
    }
}

/// The results of a thread after the warm-up.
struct Served {
    counts: Counts,
    wall: Duration,
    cpu: Duration,
    latency: Histogram<u64>,
}

/// Runs `threads` threads of model queues and one of the matchmaker for `length` of real time,
/// after a warm-up. If the load is `paced`, they run at the workload's rate in real time, else as
/// fast as they can in virtual time. Virtual time is each thread's own. No thread is ahead of the
/// matchmaker by more than [`LEAD`], so that the results do not depend on how threads are
/// scheduled.
///
/// # Errors
/// If a request is lost or answered twice, or there are more threads than models.
pub fn run(workload: &Workload, threads: u32, length: Duration, paced: bool) -> Result<Measurement> {
    ensure!(threads <= workload.models, "--threads: at most one a model, of which there are {}", workload.models);
    let tables = (0..threads).map(|_| RequestTable::new(workload)).collect::<Result<_>>()?;
    let zeros = |n: u32| (0..n).map(|_| AtomicU64::new(0)).collect();
    let bench = Bench {
        clock: Clock::start(),
        paced,
        shard_ns: zeros(threads),
        matchmaker_ns: AtomicU64::new(0),
        freed_ns: zeros(workload.devices),
    };
    let cluster = Cluster::new(bench, tables, Setup::new(workload.devices));
    let places: Vec<QueueHandle> = (0..workload.models).map(|_| cluster.add_model(workload.options.clone())).collect();
    let (measuring, stopped) = (AtomicBool::new(false), AtomicBool::new(false));
    let (shards, matchmaker) = std::thread::scope(|scope| {
        let matchmaker = scope.spawn(|| matchmake(&cluster, &measuring, &stopped));
        let shards: Vec<_> = (0..threads as usize)
            .map(|index| {
                let own = places.iter().filter(|place| place.shard() == index).map(|place| place.model).collect();
                let load = Load::new(workload, own, index, paced);
                let (cluster, measuring, stopped) = (&cluster, &measuring, &stopped);
                scope.spawn(move || load.serve(index, cluster.own_shard(index), length, measuring, stopped))
            })
            .collect();
        let shards: Vec<_> = shards.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        stopped.store(true, Ordering::Relaxed);
        (shards, matchmaker.join())
    });
    let panicked = "a thread of the scheduler panicked: a defect";
    let matchmaker = matchmaker.map_err(|_| anyhow!(panicked))?;
    let mut cpu = matchmaker;
    let mut wall = Duration::ZERO;
    let mut counts = Counts::default();
    let mut latency = Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3)?;
    for served in shards {
        let served = served.map_err(|_| anyhow!(panicked))??;
        counts = counts.plus(served.counts);
        wall = wall.max(served.wall);
        cpu += served.cpu;
        latency.add(&served.latency)?;
    }
    let measured = measurement(workload, threads, counts, wall, cpu, None)?;
    let matchmaker_ns_per_request = Some(matchmaker.as_nanos() as f64 / counts.requests as f64);
    let measured = Measurement { matchmaker_ns_per_request, ..measured };
    Ok(Measurement { latency_us: paced.then(|| Latency::of(&latency)), ..measured })
}

/// Runs the matchmaker's thread. Returns the CPU time that it took after the warm-up.
fn matchmake(cluster: &Cluster<Bench>, measuring: &AtomicBool, stopped: &AtomicBool) -> Duration {
    let bench = cluster.handler();
    let mut matchmaker = cluster.own_matchmaker();
    let mut before = None;
    let mut wait = Wait::default();
    while !stopped.load(Ordering::Relaxed) {
        // Read before the mailbox: every message sent by then is in the mailbox.
        let by = bench.shard_ns.iter().map(|ns| ns.load(Ordering::Acquire)).min().unwrap_or(0);
        NOW.set(Time::from_nanos(by));
        let messages = matchmaker.turn(TURN);
        let advanced = messages < TURN && bench.matchmaker_ns.swap(by, Ordering::AcqRel) != by;
        if before.is_none() && measuring.load(Ordering::Relaxed) {
            before = Some(thread_cpu());
        }
        if messages > 0 || advanced {
            wait = Wait::default();
        } else if bench.paced {
            std::hint::spin_loop();
        } else {
            wait.once();
        }
    }
    thread_cpu().saturating_sub(before.unwrap_or_else(thread_cpu))
}

/// A thread's share of the load.
struct Load {
    requests: Requests,
    /// The models of the thread's shard; the stream numbers them from zero.
    models: Vec<ModelId>,
    next: (Time, Request),
    paced: bool,
    wait: Wait,
}

/// A wait for another thread: at first for one that runs beside this one, then for one that needs
/// this core. The cost of the wait is charged, but is less than that of spinning.
#[derive(Clone, Copy, Default)]
pub(super) struct Wait(u32);

impl Wait {
    pub fn once(&mut self) {
        self.0 += 1;
        match self.0 {
            ..200 => std::hint::spin_loop(),
            _ => std::thread::park_timeout(std::time::Duration::from_micros(20)),
        }
    }
}

impl Load {
    fn new(workload: &Workload, models: Vec<ModelId>, index: usize, paced: bool) -> Self {
        let share = models.len() as f64 / f64::from(workload.models);
        let own = Workload {
            models: models.len() as u32,
            rate: workload.rate * share,
            seed: workload.seed + index as u64,
            ..workload.clone()
        };
        let mut requests = own.requests();
        let next = requests.draw();
        Load { requests, models, next, paced, wait: Wait::default() }
    }

    /// Draws the next request, if it is due by `now`.
    fn draw(&mut self, now: Time) -> Option<(Time, Request)> {
        if self.next.0 > now {
            return None;
        }
        let (due, mut request) = std::mem::replace(&mut self.next, self.requests.draw());
        request.model = self.models[request.model.0 as usize];
        Some((due, request))
    }

    /// Returns the time: the clock's, or in virtual time that of the next event. If this event is
    /// too far ahead of the matchmaker, the thread waits for the others.
    fn advance(&mut self, shard: &OwnShard<'_, Bench>) -> Time {
        let bench = shard.handler();
        if self.paced {
            return bench.clock.now();
        }
        let completion = shard.completions.peek().map_or(Time::MAX, |Reverse((end, ..))| *end);
        let timer = shard.poll_timeout().unwrap_or(Time::MAX);
        let next = self.next.0.min(completion).min(timer).max(NOW.get());
        let limit = Time::from_nanos(bench.matchmaker_ns.load(Ordering::Acquire)) + LEAD;
        if next >= limit {
            self.wait.once();
        } else {
            self.wait = Wait::default();
        }
        let now = next.min(limit);
        NOW.set(now);
        now
    }

    /// Runs a shard's thread.
    fn serve(
        mut self,
        index: usize,
        mut shard: OwnShard<'_, Bench>,
        length: Duration,
        measuring: &AtomicBool,
        stopped: &AtomicBool,
    ) -> Result<Served> {
        let bench = shard.handler();
        let mut before = None;
        let mut steps = 0u64;
        loop {
            let now = self.advance(&shard);
            steps += 1;
            if bench.paced || steps.is_multiple_of(1024) {
                let real = bench.clock.now();
                match before {
                    None if now >= Time::ZERO + WARM_UP => {
                        measuring.store(true, Ordering::Relaxed);
                        shard.latency.reset();
                        before = Some((shard.counts, real, thread_cpu()));
                    }
                    // All threads end together, because none can go on without the others.
                    Some((counts, began, cpu)) if real >= began + length || stopped.load(Ordering::Relaxed) => {
                        stopped.store(true, Ordering::Relaxed);
                        let cpu = thread_cpu().saturating_sub(cpu);
                        shard.counts.check(self.models.iter().map(|model| u64::from(shard.queued(*model))).sum())?;
                        let RequestTable { counts: all, latency, .. } = &*shard;
                        let latency = latency.clone();
                        return Ok(Served { counts: all.since(counts), wall: real.since(began), cpu, latency });
                    }
                    _ => {}
                }
            }
            shard.turn(TURN);
            while let Some(Reverse((end, device, batch))) = shard.completions.peek().copied()
                && end <= now
            {
                shard.completions.pop();
                shard.counts.events += 1;
                bench.freed_ns[device.0 as usize].store(end.as_nanos(), Ordering::Relaxed);
                shard.complete(device, batch);
            }
            for _ in 0..BURST {
                let Some(event) = self.draw(now) else { break };
                shard.handle(now, event);
            }
            // Stored after every message sent by now.
            bench.shard_ns[index].store(now.as_nanos(), Ordering::Release);
        }
    }
}
