//! The scheduler as a server runs it: the thread that posts a request works it off, and a completed
//! batch makes place for the next.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use downbeat_core::cluster::{DispatchPolicy, DropPolicy, Output, Request, Shard};
use downbeat_core::journal::Journal;
use downbeat_core::{BatchId, DeviceId, Time};
use downbeat_driver::{Cluster, Handler, Moment, QueueHandle, Setup};
use downbeat_scheduler_bench::Workload;

use crate::gate::part::Plan;

const DEVICES: u32 = 64;
const MAX_BATCH: u32 = 32;
/// Requests per second, divided by the capacity of the devices.
const LOAD: f64 = 0.7;
const SEED: u64 = 1;

thread_local! {
    /// The batches at their devices, with their ends.
    static RUNNING: RefCell<BinaryHeap<Reverse<(Time, DeviceId, BatchId)>>> = const { RefCell::new(BinaryHeap::new()) };
}

/// Emulated devices, in virtual time.
#[derive(Default)]
struct Devices {
    now_ns: AtomicU64,
    answered: AtomicU64,
}

impl Handler for Devices {
    type Event = Request;
    type RequestTable = ();
    type Context = ();

    fn now(&self) -> Time {
        Time::from_nanos(self.now_ns.load(Ordering::Relaxed))
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, (): &mut (), request: Request) {
        let handled = shard.handle_request(moment.now, &request);
        self.answered.fetch_add(u64::from(handled.is_err()), Ordering::Relaxed);
    }

    fn carry_out(&self, moment: Moment, shard: &mut Journal<Shard>, (): &mut (), output: Output, (): &mut ()) {
        match output {
            Output::Dispatch { batch, device, members, expected, .. } => {
                self.answered.fetch_add(members.len() as u64, Ordering::Relaxed);
                shard.recycle(members);
                RUNNING.with_borrow_mut(|running| running.push(Reverse((moment.now + expected, device, batch))));
            }
            Output::Drop { .. } => drop(self.answered.fetch_add(1, Ordering::Relaxed)),
        }
    }
}

/// Counts requests of this many models.
pub fn run(plan: &Plan, models: u32) -> Result<()> {
    let (dispatch, drop) = (DispatchPolicy::Adaptive { consolidate: false }, DropPolicy::Adaptive);
    let mut workload = Workload::new(models, DEVICES, MAX_BATCH, dispatch, drop, SEED);
    workload.rate = LOAD * workload.capacity();
    let cluster = Cluster::new(Devices::default(), vec![()], Setup::new(DEVICES));
    let places: Vec<QueueHandle> = (0..models).map(|_| cluster.add_model(workload.options.clone())).collect();
    let mut requests = workload.requests();
    let now_ns = &cluster.handler().now_ns;
    let mut posted = 0;
    plan.run(|count| {
        for _ in 0..count {
            let (at, request) = requests.draw();
            let due = || {
                RUNNING.with_borrow_mut(|running| match running.peek() {
                    Some(Reverse((end, ..))) if *end <= at => running.pop(),
                    _ => None,
                })
            };
            while let Some(Reverse((end, device, batch))) = due() {
                now_ns.store(end.as_nanos(), Ordering::Relaxed);
                cluster.complete(device, batch, &mut ());
            }
            now_ns.store(at.as_nanos(), Ordering::Relaxed);
            cluster.ring_due();
            let place = places[request.model.0 as usize];
            cluster.post(place, Request { model: place.model, ..request }, &mut ());
        }
        posted += count;
        let answered = cluster.handler().answered.load(Ordering::Relaxed);
        anyhow::ensure!(answered + 100_000 > posted && answered > 0, "{answered} of {posted} requests were answered");
        Ok(())
    })
}
