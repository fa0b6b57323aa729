//! The payloads of a shard's requests, and what events and decisions mean to them.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use downbeat_core::cluster::journal::Journal;
use downbeat_core::cluster::{Output, Reject, Request, Shard, Ticket};
use downbeat_core::{Duration, ModelId, RequestId, Time};
use downbeat_driver::{Handler, Moment};
use parking_lot::RwLock;

use super::device::{DeviceSlot, Launch};
use super::job::{Job, Waiting};
use crate::clock::Clock;

/// How often a request is let through to a model whose profile says that it cannot meet its own SLO, to learn
/// whether that is (still) true. Without it a profile that was measured in a bad moment would never be corrected.
const PROBE_EVERY: Duration = Duration::from_millis(1_000);

/// What comes to a shard.
#[expect(clippy::large_enum_variant, reason = "nearly all are requests, and a box would cost each an allocation")]
pub enum Event {
    /// A request.
    Submit(RequestId, Waiting, Job),
    /// Its client has gone.
    Cancel(ModelId, RequestId),
}

/// What the scheduler's decisions go to.
pub struct Floor {
    pub clock: Clock,
    /// By device id.
    pub devices: RwLock<Vec<Arc<DeviceSlot>>>,
}

/// The requests that wait in one shard.
#[derive(Default)]
pub struct Desk {
    /// Everything in the shard's queues is here, and nothing else.
    jobs: HashMap<RequestId, (Job, Ticket), BuildHasherDefault<CounterHasher>>,
    probed: BTreeMap<ModelId, Time>,
}

/// Hashes a request id, which is a counter: spreading it is enough.
#[derive(Default)]
pub struct CounterHasher(u64);

impl Hasher for CounterHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(20);
    }
}

impl Handler for Floor {
    type Event = Event;
    type Desk = Desk;

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, desk: &mut Desk, event: Event) {
        match event {
            Event::Submit(id, waiting, job) => desk.submit(moment, shard, id, waiting, job),
            Event::Cancel(model, request) => {
                // Counted by whoever dropped the ticket.
                if let Some((_, ticket)) = desk.jobs.get(&request)
                    && shard.handle_cancel(moment.now, model, *ticket)
                {
                    drop(desk.take(request));
                }
            }
        }
    }

    fn carry_out(&self, _: Moment, shard: &mut Journal<Shard>, desk: &mut Desk, output: Output) {
        match output {
            Output::Dispatch { batch, device, mut members, .. } => {
                let jobs = members.drain(..).filter_map(|id| desk.take(id)).collect();
                shard.recycle(members);
                let slot = self.devices.read().get(device.0 as usize).cloned();
                assert!(slot.is_some(), "the scheduler dispatched to a device that it was never given");
                if let Some(slot) = slot {
                    slot.launch(Launch { batch, jobs, dispatched: self.clock.now() });
                }
            }
            Output::Drop { request, reason, .. } => {
                if let Some(job) = desk.take(request) {
                    job.call.drop_for(reason, self.clock.now());
                }
            }
        }
    }
}

impl Desk {
    fn submit(&mut self, moment: Moment, shard: &mut Journal<Shard>, id: RequestId, waiting: Waiting, job: Job) {
        let Moment { now, expected_free } = moment;
        let model = job.queue.place.model;
        let mut request = Request {
            id,
            model,
            deadline: job.call.deadline,
            queue_expiry: waiting.queue_expiry,
            level: waiting.level,
            size: job.call.admitted.rows,
        };
        let bound = job.call.executable.queue_bound;
        if request.size > bound {
            return job.call.never_fits(request.size, bound, now);
        }
        // Every device is busy for longer than the deadline allows: known now, so said now.
        let start = now.max(expected_free);
        if job.queue.drops && start > now && start != Time::MAX && request.deadline != Time::MAX {
            let needed = job.queue.refiner.lock().profile().latency(request.size);
            if start + needed > request.deadline {
                let (needed, allowed) = (start.since(now) + needed, request.deadline.since(now));
                return job.call.reject_busy(needed, allowed, now);
            }
        }
        // The version's own bound, whatever the number of shapes and levels its requests are spread over.
        if !job.call.executable.begin_waiting(request.size) {
            return job.reject(&Reject::QueueFull { bound }, now);
        }
        let mut result = shard.handle_request(now, &request);
        if let Err(Reject::DeadlineImpossible { .. }) = result
            && job.call.deadline_is_slo
            && self.probed.get(&model).is_none_or(|last| now.since(*last) >= PROBE_EVERY)
        {
            self.probed.insert(model, now);
            request.deadline = Time::MAX;
            result = shard.handle_request(now, &request);
        }
        match result {
            Ok(ticket) => {
                self.jobs.insert(id, (job, ticket));
            }
            Err(reject) => {
                job.call.executable.end_waiting(job.call.admitted.rows);
                job.reject(&reject, now);
            }
        }
    }

    /// Takes out a request that waits no more.
    fn take(&mut self, request: RequestId) -> Option<Job> {
        let (job, _) = self.jobs.remove(&request)?;
        job.call.executable.end_waiting(job.call.admitted.rows);
        Some(job)
    }
}
