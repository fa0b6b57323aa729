//! The payloads of a shard's requests, and what events and decisions mean to them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use downbeat_core::cluster::journal::Journal;
use downbeat_core::cluster::{Output, Reject, Request, Shard, Ticket};
use downbeat_core::{ModelId, RequestId, Time};
use downbeat_driver::{Handler, Moment};

use super::device_pool::DevicePool;
use super::job::{Job, Waiting};

/// What comes to a shard.
#[expect(clippy::large_enum_variant, reason = "nearly all are requests, and a box would cost each an allocation")]
pub enum Event {
    /// A request.
    Submit(RequestId, Waiting, Job),
    /// Its client has gone.
    Cancel(ModelId, RequestId),
}

/// The requests that wait in one shard: everything in its queues, and nothing else.
#[derive(Default)]
pub struct WaitingTable(HashMap<RequestId, (Job, Ticket), BuildHasherDefault<CounterHasher>>);

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

impl Handler for DevicePool {
    type Event = Event;
    type Desk = WaitingTable;

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, table: &mut WaitingTable, event: Event) {
        match event {
            Event::Submit(id, waiting, job) => table.submit(moment, shard, id, waiting, job),
            Event::Cancel(model, request) => {
                // Counted by whoever dropped the ticket.
                if let Some((_, ticket)) = table.0.get(&request)
                    && shard.handle_cancel(moment.now, model, *ticket)
                {
                    drop(table.take(request));
                }
            }
        }
    }

    fn carry_out(&self, _: Moment, shard: &mut Journal<Shard>, table: &mut WaitingTable, output: Output) {
        match output {
            Output::Dispatch { batch, device, mut members, .. } => {
                let jobs = members.drain(..).filter_map(|id| Some((id, table.take(id)?))).collect();
                shard.recycle(members);
                let (host, slot) = self.slot(device);
                host.grant(slot, batch, jobs, self.clock.now());
            }
            Output::Drop { request, reason, .. } => {
                if let Some(job) = table.take(request) {
                    job.call.drop_for(reason, self.clock.now());
                }
            }
        }
    }
}

impl WaitingTable {
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
            let needed = job.queue.least(request.size);
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
            && job.call.may_probe(now)
        {
            request.deadline = Time::MAX;
            result = shard.handle_request(now, &request);
        }
        match result {
            Ok(ticket) => {
                self.0.insert(id, (job, ticket));
            }
            Err(reject) => {
                job.call.executable.end_waiting(job.call.admitted.rows);
                job.reject(&reject, now);
            }
        }
    }

    /// Takes out a request that waits no more.
    fn take(&mut self, request: RequestId) -> Option<Job> {
        let (job, _) = self.0.remove(&request)?;
        job.call.executable.end_waiting(job.call.admitted.rows);
        Some(job)
    }
}
