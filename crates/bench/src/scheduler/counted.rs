//! The scheduler by a number of requests, so that its instructions can be counted: one thread, virtual time, no look at a clock.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use anyhow::Result;
use downbeat_core::cluster::journal::Journal;
use downbeat_core::cluster::{Output, Request, Shard};
use downbeat_core::{BatchId, DeviceId, Time};
use downbeat_driver::{Cluster, Handler, Moment, QueueHandle, Setup};

use super::single_thread::{Counts, WARM_UP, World};
use super::workload::{Requests, Workload};

/// The single-threaded scheduler after its warm-up. Equal workloads make equal decisions.
///
/// Count the instructions of a run of N requests and of a run of 2N. The difference divided by N is the cost of a request, without the warm-up. The cost
/// includes drawing the request ([`Requests::draw`]) and the emulated devices (one heap).
pub struct CountedScheduler(World);

impl CountedScheduler {
    /// Runs the warm-up.
    pub fn new(workload: &Workload) -> Self {
        CountedScheduler(World::warmed_up(workload))
    }

    /// Hands the scheduler so many more requests, with all that is due meanwhile.
    ///
    /// # Errors
    /// If a request is lost or answered twice.
    #[inline(never)]
    pub fn serve(&mut self, requests: u64) -> Result<()> {
        let until = self.0.counts.requests + requests;
        while self.0.counts.requests < until {
            self.0.step();
        }
        self.0.check()
    }
}

thread_local! {
    /// The virtual time of this thread.
    static NOW: Cell<Time> = const { Cell::new(Time::ZERO) };
    /// The batches that run: their ends.
    static RUNNING: RefCell<BinaryHeap<Reverse<(Time, DeviceId, BatchId)>>> = const { RefCell::new(BinaryHeap::new()) };
}

struct VirtualHandler;

impl Handler for VirtualHandler {
    type Event = Request;
    type RequestTable = Counts;

    fn now(&self) -> Time {
        NOW.get()
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, counts: &mut Counts, request: Request) {
        counts.requests += 1;
        counts.rejected += u64::from(shard.handle_request(moment.now, &request).is_err());
    }

    fn carry_out(&self, moment: Moment, shard: &mut Journal<Shard>, counts: &mut Counts, output: Output) {
        match output {
            Output::Dispatch { batch, device, members, expected, .. } => {
                let end = moment.now + expected;
                counts.batch(&members, end);
                shard.recycle(members);
                RUNNING.with_borrow_mut(|running| running.push(Reverse((end, device, batch))));
            }
            Output::Drop { .. } => counts.dropped += 1,
        }
    }
}

/// The driver's cluster after its warm-up, on the calling thread: it posts requests, completes batches, and rings the alarms. A thread has one such cluster at a time.
///
/// The cost of a request includes its drawing and the emulated devices, as with [`CountedScheduler`].
pub struct CountedCluster {
    cluster: Cluster<VirtualHandler>,
    places: Vec<QueueHandle>,
    requests: Requests,
    next: (Time, Request),
}

impl CountedCluster {
    /// Runs the warm-up, with the models' queues in so many shards.
    pub fn new(workload: &Workload, shards: usize) -> Result<Self> {
        NOW.set(Time::ZERO);
        RUNNING.with_borrow_mut(BinaryHeap::clear);
        let cluster = Cluster::new(VirtualHandler, vec![Counts::default(); shards], Setup::new(workload.devices));
        let places = (0..workload.models).map(|_| cluster.add_model(workload.options.clone())).collect();
        let mut requests = workload.requests();
        let next = requests.draw();
        let mut counted = CountedCluster { cluster, places, requests, next };
        while counted.next.0 < Time::ZERO + WARM_UP {
            counted.post_next();
        }
        counted.check()?;
        Ok(counted)
    }

    /// Posts so many more requests, with all that is due meanwhile.
    ///
    /// # Errors
    /// If a request is lost or answered twice.
    #[inline(never)]
    pub fn serve(&mut self, requests: u64) -> Result<()> {
        for _ in 0..requests {
            self.post_next();
        }
        self.check()
    }

    fn post_next(&mut self) {
        let (at, request) = std::mem::replace(&mut self.next, self.requests.draw());
        loop {
            let ends = RUNNING.with_borrow(|running| running.peek().map_or(Time::MAX, |Reverse((end, ..))| *end));
            let due = self.cluster.next_alarm().unwrap_or(Time::MAX);
            if ends.min(due) > at {
                break;
            }
            NOW.set(NOW.get().max(ends.min(due)));
            if due < ends {
                self.cluster.ring_due();
            } else if let Some(Reverse((_, device, batch))) = RUNNING.with_borrow_mut(BinaryHeap::pop) {
                self.cluster.complete(device, batch);
            }
        }
        NOW.set(at);
        self.cluster.post(self.places[request.model.0 as usize], request);
    }

    fn check(&self) -> Result<()> {
        for index in 0..self.cluster.shards() {
            let shard = self.cluster.own_shard(index);
            let own = self.places.iter().filter(|place| place.shard() == index);
            shard.check(own.map(|place| u64::from(shard.queued(place.model))).sum())?;
        }
        Ok(())
    }
}
