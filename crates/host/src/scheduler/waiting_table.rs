//! The payloads of a shard's requests, and the handling of events and decisions.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use downbeat_core::cluster::{Output, PastArrival, Reject, Request, Shard, Ticket};
use downbeat_core::journal::Journal;
use downbeat_core::{Duration, ModelId, RequestId, Time};
use downbeat_driver::{Handler, Moment, QueueHandle};

use super::device_pool::DevicePool;
use crate::device::{CounterHasher, OwnLaunch, QueuedCall};

/// An event of a shard.
#[expect(clippy::large_enum_variant, reason = "nearly all are requests, and a box would cost each an allocation")]
pub enum Event {
    Submit(RequestId, QueuedCall),
    /// The client of a request has gone.
    Cancel(ModelId, RequestId),
}

/// The requests that wait in one shard: exactly the requests in its queues.
#[derive(Default)]
pub struct WaitingTable(HashMap<RequestId, (QueuedCall, Ticket), BuildHasherDefault<CounterHasher>>);

impl Handler for DevicePool {
    type Event = Event;
    type RequestTable = WaitingTable;
    type Context = OwnLaunch;

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, table: &mut WaitingTable, event: Event) {
        match event {
            Event::Submit(id, queued) => {
                let place = queued.queue.place;
                if self.rehearser.listens() {
                    self.rehearser.arrived(place.shard(), arrival(moment.now, &queued));
                }
                if !table.submit(moment, shard, id, queued) {
                    self.answered(place, moment.now, true);
                }
            }
            Event::Cancel(model, request) => {
                // The owner of the dropped ticket has counted the request.
                if let Some((_, ticket)) = table.0.get(&request)
                    && shard.handle_cancel(moment.now, model, *ticket)
                    && let Some(queued) = table.take(request)
                {
                    if let Some(charge) = &queued.call.charge {
                        charge.give_back();
                    }
                    self.answered(queued.queue.place, moment.now, false);
                }
            }
        }
    }

    fn carry_out(
        &self,
        moment: Moment,
        shard: &mut Journal<Shard>,
        table: &mut WaitingTable,
        output: Output,
        own: &mut OwnLaunch,
    ) {
        match output {
            Output::Dispatch { batch, device, mut members, reason, expected, .. } => {
                let note = |(_, queued): &(RequestId, QueuedCall)| {
                    if let Some(trace) = &queued.call.trace {
                        trace.left(moment.now, reason, expected);
                    }
                };
                let calls = members.drain(..).filter_map(|id| Some((id, table.take(id)?))).inspect(note).collect();
                shard.recycle(members);
                let (host, slot) = self.slot(device);
                host.grant(slot, batch, calls, (moment.now, Some(reason)), own);
            }
            Output::Drop { request, reason, .. } => {
                if let Some(queued) = table.take(request) {
                    let now = self.clock.now();
                    self.answered(queued.queue.place, now, true);
                    queued.call.drop_for(reason, now);
                }
            }
        }
    }
}

impl DevicePool {
    /// Records the answer to a request that got no batch.
    fn answered(&self, queue: QueueHandle, at: Time, lost: bool) {
        if self.rehearser.listens() {
            self.rehearser.answered(queue, at, 1, lost);
        }
    }
}

/// A request in the form that the rehearsal knows.
fn arrival(now: Time, queued: &QueuedCall) -> PastArrival {
    let deadline = queued.call.deadline;
    let budget = if deadline == Time::MAX { Duration::MAX } else { deadline.since(now) };
    let (model, size) = (queued.queue.place.model, queued.call.admitted.rows);
    PastArrival { at: now, budget, model, size, level: queued.level }
}

impl WaitingTable {
    /// Submits a request. Returns false if it was answered at once.
    fn submit(&mut self, moment: Moment, shard: &mut Journal<Shard>, id: RequestId, queued: QueuedCall) -> bool {
        let Moment { now, expected_free } = moment;
        let model = queued.queue.place.model;
        let request = Request {
            id,
            model,
            deadline: queued.call.deadline,
            queue_expiry: queued.queue_expiry,
            level: queued.level,
            size: queued.call.admitted.rows,
        };
        let bound = queued.call.loaded.queue_bound;
        if request.size > bound {
            queued.call.never_fits(request.size, bound, now);
            return false;
        }
        // Every device is busy for longer than the deadline allows. The request is refused now
        // rather than later.
        let start = now.max(expected_free);
        if queued.queue.drops() && start > now && start != Time::MAX && request.deadline != Time::MAX {
            let needed = queued.queue.least(request.size);
            if start + needed > request.deadline {
                let (needed, allowed) = (start.since(now) + needed, request.deadline.since(now));
                if queued.has_place {
                    queued.call.loaded.end_waiting(request.size);
                }
                queued.call.reject_busy(needed, allowed, now);
                return false;
            }
        }
        // The version's own bound, over all shapes and levels of its requests.
        if !queued.has_place && !queued.call.loaded.begin_waiting(request.size) {
            queued.reject(&Reject::QueueFull { bound }, now);
            return false;
        }
        match shard.handle_request(now, &request) {
            Ok(ticket) => {
                self.0.insert(id, (queued, ticket));
                true
            }
            Err(reject) => {
                queued.call.loaded.end_waiting(queued.call.admitted.rows);
                queued.reject(&reject, now);
                false
            }
        }
    }

    /// Takes out a request that no longer waits.
    fn take(&mut self, request: RequestId) -> Option<QueuedCall> {
        let (queued, _) = self.0.remove(&request)?;
        queued.call.loaded.end_waiting(queued.call.admitted.rows);
        Some(queued)
    }
}
