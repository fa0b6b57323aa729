//! The scheduler as a server runs it: threads post requests and completions, and whoever posts works.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Result, anyhow, ensure};
use downbeat_core::cluster::journal::Journal;
use downbeat_core::cluster::{Output, Request, Shard};
use downbeat_core::{BatchId, DeviceId, Duration, Time};
use downbeat_driver::{Cluster, Handler, MAX_SHARDS, Moment, QueueHandle, Setup};

use super::report::Measurement;
use super::single_thread::{Counts, WARM_UP, measurement};
use super::workload::{SLO, Workload};
use crate::allocations::Counter;
use crate::clock::{Clock, thread_cpu};

/// Requests that a thread posts between two looks at the clock and at its devices.
const BURST: u64 = 8;
/// Requests that may have been posted and not been worked off yet, of all threads. A server's clients wait for their answers.
const MOST_AHEAD: u64 = 4096;

thread_local! {
    /// The batches that this thread sent to their devices: their ends.
    static RUNNING: RefCell<BinaryHeap<Reverse<(Time, DeviceId, BatchId)>>> = const { RefCell::new(BinaryHeap::new()) };
}

/// What all threads share.
struct Posting {
    clock: Clock,
    /// By shard: requests that it has worked off.
    handled: Vec<AtomicU64>,
    /// By thread: requests that it has posted.
    posted: Vec<AtomicU64>,
}

/// What a shard has beside its queues.
#[derive(Default)]
struct Table {
    index: usize,
    counts: Counts,
}

impl Handler for Posting {
    type Event = Request;
    type RequestTable = Table;

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, table: &mut Table, request: Request) {
        table.counts.requests += 1;
        table.counts.rejected += u64::from(shard.handle_request(moment.now, &request).is_err());
        self.handled[table.index].store(table.counts.requests, Ordering::Relaxed);
    }

    fn carry_out(&self, moment: Moment, shard: &mut Journal<Shard>, table: &mut Table, output: Output) {
        match output {
            Output::Dispatch { batch, device, members, expected, .. } => {
                let end = moment.now + expected;
                table.counts.batch(&members, end);
                shard.recycle(members);
                RUNNING.with_borrow_mut(|running| running.push(Reverse((end, device, batch))));
            }
            Output::Drop { .. } => table.counts.dropped += 1,
        }
    }
}

/// Has `threads` threads post requests of all models for `length` of real time, after a warm-up, as fast as they are worked off, with the devices
/// that the thread which dispatched to them looks after. The models' queues are in `shards` shards.
///
/// # Errors
/// If a request is lost or answered twice, or no batch leaves.
pub fn run(workload: &Workload, threads: u32, shards: u32, length: Duration) -> Result<Measurement> {
    let most = workload.models.min(MAX_SHARDS as u32);
    ensure!((1..=most).contains(&shards), "--shards: at most one a model, and {MAX_SHARDS}");
    let zeros = |n: u32| (0..n).map(|_| AtomicU64::new(0)).collect();
    let posting = Posting { clock: Clock::start(), handled: zeros(shards), posted: zeros(threads) };
    let tables = (0..shards as usize).map(|index| Table { index, ..Table::default() }).collect();
    let cluster = Cluster::new(posting, tables, Setup::new(workload.devices));
    let places: Vec<QueueHandle> = (0..workload.models).map(|_| cluster.add_model(workload.options.clone())).collect();
    let (measuring, stopped) = (AtomicBool::new(false), AtomicBool::new(false));
    let measured = std::thread::scope(|scope| {
        scope.spawn(|| cluster.ring_alarms());
        let posting: Vec<_> = (0..threads as usize)
            .map(|index| {
                let (cluster, places, measuring, stopped) = (&cluster, &places, &measuring, &stopped);
                scope.spawn(move || post(cluster, workload, places, index, measuring, stopped))
            })
            .collect();
        let clock = cluster.handler().clock;
        let counts = || (0..shards as usize).fold(Counts::default(), |sum, at| sum.plus(cluster.own_shard(at).counts));
        clock.sleep_until(Time::ZERO + WARM_UP);
        let (before, began, counter) = (counts(), clock.now(), Counter::start());
        measuring.store(true, Ordering::Relaxed);
        clock.sleep_until(began + length);
        stopped.store(true, Ordering::Relaxed);
        let (after, wall) = (counts(), clock.now().since(began));
        let allocations = counter.map(Counter::stop);
        let cpu = posting.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Vec<_>>();
        cluster.stop_alarm();
        let cpu: Option<Vec<Duration>> = cpu.into_iter().map(Result::ok).collect();
        cpu.map(|cpu| {
            (after.since(before), wall, cpu.into_iter().fold(Duration::ZERO, |sum, cpu| sum + cpu), allocations)
        })
    });
    let (counts, wall, cpu, allocations) = measured.ok_or_else(|| anyhow!("a thread that posts panicked: a defect"))?;
    for shard in 0..shards as usize {
        let shard_now = cluster.own_shard(shard);
        let own = places.iter().filter(|place| place.shard() == shard);
        shard_now.counts.check(own.map(|place| u64::from(shard_now.queued(place.model))).sum())?;
    }
    let offered = Workload { rate: counts.requests as f64 / wall.as_secs_f64(), ..workload.clone() };
    measurement(&offered, threads, counts, wall, cpu, allocations)
}

/// The life of a thread that posts; the CPU time that it took after the warm-up.
fn post(
    cluster: &Cluster<Posting>,
    workload: &Workload,
    places: &[QueueHandle],
    index: usize,
    measuring: &AtomicBool,
    stopped: &AtomicBool,
) -> Duration {
    let bench = cluster.handler();
    let own = Workload { rate: 1.0, seed: workload.seed + index as u64, ..workload.clone() };
    let mut requests = own.requests();
    let mut before = None;
    let sum = |counters: &[AtomicU64]| counters.iter().map(|n| n.load(Ordering::Relaxed)).sum::<u64>();
    while !stopped.load(Ordering::Relaxed) {
        let now = bench.clock.now();
        if before.is_none() && measuring.load(Ordering::Relaxed) {
            before = Some(thread_cpu());
        }
        // What completes may dispatch to another device, so that the heap is not held meanwhile.
        let next = || {
            RUNNING.with_borrow_mut(|running| {
                running.peek_mut().filter(|top| top.0.0 <= now).map(std::collections::binary_heap::PeekMut::pop)
            })
        };
        while let Some(Reverse((_, device, batch))) = next() {
            cluster.complete(device, batch);
        }
        if sum(&bench.posted).saturating_sub(sum(&bench.handled)) > MOST_AHEAD {
            std::hint::spin_loop();
            continue;
        }
        for _ in 0..BURST {
            let (_, request) = requests.draw();
            let deadline = now + SLO;
            let request = Request { deadline, id: downbeat_core::RequestId(deadline.as_nanos()), ..request };
            let place = places[request.model.0 as usize];
            cluster.post(place, Request { model: place.model, ..request });
        }
        bench.posted[index].fetch_add(BURST, Ordering::Relaxed);
    }
    thread_cpu().saturating_sub(before.unwrap_or_else(thread_cpu))
}
