//! The scheduler as a server runs it: threads post requests and completions, and the posting thread
//! does the work.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, anyhow, ensure};
use downbeat_core::cluster::{Output, Request, Shard};
use downbeat_core::journal::Journal;
use downbeat_core::{BatchId, DeviceId, Duration, RequestId, Time};
use downbeat_driver::{Cluster, Handler, MAX_SHARDS, Moment, QueueHandle, Setup};

use crate::allocations::Counter;
use crate::multi_thread::Wait;
use crate::report::Measurement;
use crate::single_thread::{Counts, WARM_UP, measurement};
use crate::workload::{SLO, Workload};
use downbeat_bench::clock::{Clock, thread_cpu};

/// Requests that a thread posts between two checks of the clock and its devices.
const BURST: u64 = 8;
/// The most requests, of all threads, that are posted and not yet worked off. A server's clients
/// wait for their answers.
const MOST_AHEAD: u64 = 4096;

thread_local! {
    /// The batches that this thread sent to their devices, with their ends.
    static RUNNING: RefCell<BinaryHeap<Reverse<(Time, DeviceId, BatchId)>>> = const { RefCell::new(BinaryHeap::new()) };
}

/// The state that all threads share.
struct Posting {
    clock: Clock,
    /// By shard: the number of requests that it has worked off.
    handled: Vec<Count>,
    /// By thread: the number of requests that it has posted.
    posted: Vec<Count>,
}

/// A counter on cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Count(AtomicU64);

/// The state of a shard besides its queues.
#[derive(Default)]
struct Table {
    index: usize,
    counts: Counts,
    /// The counts of the warm-up.
    before: Option<Counts>,
}

impl Handler for Posting {
    type Event = Request;
    type RequestTable = Table;
    type Context = ();

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, table: &mut Table, request: Request) {
        if table.before.is_none() && moment.now >= Time::ZERO + WARM_UP {
            table.before = Some(table.counts);
        }
        table.counts.requests += 1;
        table.counts.events += 1;
        table.counts.rejected += u64::from(shard.handle_request(moment.now, &request).is_err());
        self.handled[table.index].0.store(table.counts.requests, Ordering::Relaxed);
    }

    fn carry_out(&self, moment: Moment, shard: &mut Journal<Shard>, table: &mut Table, output: Output, (): &mut ()) {
        match output {
            Output::Dispatch { batch, device, members, expected, .. } => {
                let end = moment.now + expected;
                table.counts.batch(&members, end);
                table.counts.events += 1;
                shard.recycle(members);
                RUNNING.with_borrow_mut(|running| running.push(Reverse((end, device, batch))));
            }
            Output::Drop { .. } => table.counts.dropped += 1,
        }
    }
}

/// The time that a thread took after the warm-up.
struct Took {
    wall: Duration,
    cpu: Duration,
    allocations: Option<u64>,
}

/// Lets `threads` threads post requests of all models for `length` of real time, after a warm-up,
/// as fast as requests are worked off. The thread that dispatched to a device looks after the
/// device. The models' queues are in `shards` shards.
///
/// # Errors
/// If a request is lost or answered twice, or no batch leaves.
pub fn run(workload: &Workload, threads: u32, shards: u32, length: Duration) -> Result<Measurement> {
    let most = workload.models.min(MAX_SHARDS as u32);
    ensure!((1..=most).contains(&shards), "--shards: at most one a model, and {MAX_SHARDS}");
    let zeros = |n: u32| (0..n).map(|_| Count::default()).collect();
    let posting = Posting { clock: Clock::start(), handled: zeros(shards), posted: zeros(threads) };
    let tables = (0..shards as usize).map(|index| Table { index, ..Table::default() }).collect();
    let cluster = Cluster::new(posting, tables, Setup::new(workload.devices));
    let places: Vec<QueueHandle> = (0..workload.models).map(|_| cluster.add_model(workload.options.clone())).collect();
    let took = std::thread::scope(|scope| {
        scope.spawn(|| cluster.ring_alarms());
        let post = |index| Poster { cluster: &cluster, places: &places, index }.post(workload, length);
        let posting: Vec<_> = (0..threads as usize).map(|index| scope.spawn(move || post(index))).collect();
        let took: Vec<_> = posting.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        cluster.stop_alarm();
        took
    });
    let (mut wall, mut cpu, mut allocations) = (Duration::ZERO, Duration::ZERO, None);
    for took in took {
        let took = took.map_err(|_| anyhow!("a thread that posts panicked: a defect"))?;
        (wall, cpu, allocations) = (wall.max(took.wall), cpu + took.cpu, allocations.or(took.allocations));
    }
    let mut counts = Counts::default();
    for index in 0..shards as usize {
        let shard = cluster.own_shard(index);
        let own = places.iter().filter(|place| place.shard() == index);
        shard.counts.check(own.map(|place| u64::from(shard.queued(place.model))).sum())?;
        counts = counts.plus(shard.counts.since(shard.before.unwrap_or(shard.counts)));
    }
    let offered = Workload { rate: counts.requests as f64 / wall.as_secs_f64(), ..workload.clone() };
    measurement(&offered, threads, counts, wall, cpu, allocations)
}

/// A thread that posts.
struct Poster<'a> {
    cluster: &'a Cluster<Posting>,
    places: &'a [QueueHandle],
    index: usize,
}

impl Poster<'_> {
    /// Runs the thread. It watches the clock itself, so that it needs no other thread to end.
    fn post(self, workload: &Workload, length: Duration) -> Took {
        let Posting { clock, handled, posted } = self.cluster.handler();
        let own = Workload { rate: 1.0, seed: workload.seed + self.index as u64, ..workload.clone() };
        let mut requests = own.requests();
        let mut began: Option<(Time, Duration, Option<Counter>)> = None;
        let mut wait = Wait::default();
        let sum = |counters: &[Count]| counters.iter().map(|Count(n)| n.load(Ordering::Relaxed)).sum::<u64>();
        loop {
            let now = clock.now();
            self.complete(now);
            match &began {
                None if now >= Time::ZERO + WARM_UP => {
                    began = Some((now, thread_cpu(), (self.index == 0).then(Counter::start).flatten()));
                }
                Some((at, ..)) if now >= *at + length => break,
                _ => {}
            }
            if sum(posted).saturating_sub(sum(handled)) > MOST_AHEAD {
                wait.once();
                continue;
            }
            wait = Wait::default();
            for _ in 0..BURST {
                let (_, request) = requests.draw();
                let (place, deadline) = (self.places[request.model.0 as usize], now + SLO);
                let id = RequestId(deadline.as_nanos());
                self.cluster.post(place, Request { id, model: place.model, deadline, ..request }, &mut ());
            }
            posted[self.index].0.fetch_add(BURST, Ordering::Relaxed);
        }
        let (at, cpu, counter) = began.unwrap_or_else(|| (clock.now(), thread_cpu(), None));
        let allocations = counter.map(Counter::stop);
        Took { wall: clock.now().since(at), cpu: thread_cpu().saturating_sub(cpu), allocations }
    }

    /// Completes the batches on this thread's devices until `now`. A completion may dispatch
    /// another batch, so the heap is not borrowed meanwhile.
    fn complete(&self, now: Time) {
        let due = |top: &PeekMut<'_, Reverse<(Time, DeviceId, BatchId)>>| top.0.0 <= now;
        let next = || RUNNING.with_borrow_mut(|running| running.peek_mut().filter(due).map(PeekMut::pop));
        while let Some(Reverse((_, device, batch))) = next() {
            self.cluster.complete(device, batch, &mut ());
        }
    }
}
