//! How many messages a batch costs between a shard and the matchmaker, when each has a thread.

use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_core::cluster::*;
use downbeat_core::journal::Journal;
use downbeat_core::{BatchId, DeviceId, Duration, LatencyProfile, RequestId, Time};
use downbeat_driver::{Cluster, Handler, Moment, OwnMatchmaker, OwnShard, QueueHandle, Setup};

/// A clock that the test sets. The request table has the dispatched batches.
#[derive(Default)]
struct Timed(AtomicU64);

impl Handler for Timed {
    type Event = Request;
    type RequestTable = Vec<(DeviceId, BatchId, usize)>;
    type Context = ();

    fn now(&self) -> Time {
        Time::from_nanos(self.0.load(Ordering::SeqCst))
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, _: &mut Self::RequestTable, request: Request) {
        shard.handle_request(moment.now, &request).unwrap();
    }

    fn carry_out(
        &self,
        _: Moment,
        _: &mut Journal<Shard>,
        batches: &mut Self::RequestTable,
        output: Output,
        (): &mut (),
    ) {
        if let Output::Dispatch { batch, device, members, .. } = output {
            batches.push((device, batch, members.len()));
        }
    }
}

fn cluster(dispatch: DispatchPolicy) -> (Cluster<Timed>, QueueHandle) {
    let cluster = Cluster::new(Timed::default(), vec![Vec::new()], Setup::new(1));
    let profile = LatencyProfile::linear(Duration::from_micros(2), Duration::from_micros(20), 64).unwrap();
    let queue = cluster.add_model(ModelOptions::new(profile, dispatch, DropPolicy::WindowDrop));
    (cluster, queue)
}

/// A request a microsecond arrives. Returns the messages that the matchmaker got.
fn arrive(
    requests: u64,
    queue: QueueHandle,
    shard: &mut OwnShard<'_, Timed>,
    matchmaker: &mut OwnMatchmaker<'_, Timed>,
) -> usize {
    let mut messages = 0;
    for n in 1..=requests {
        let now = Time::from_nanos(1_000 * n);
        shard.handler().0.store(now.as_nanos(), Ordering::SeqCst);
        let (id, deadline) = (RequestId(n), Time::from_nanos(1_000_000));
        let request = Request { id, model: queue.model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
        shard.handle(now, request);
        messages += matchmaker.turn(usize::MAX);
    }
    messages
}

/// Turns until nothing happens any more. Returns the messages that the matchmaker got.
fn settle(shard: &mut OwnShard<'_, Timed>, matchmaker: &mut OwnMatchmaker<'_, Timed>) -> usize {
    let mut messages = 0;
    loop {
        let (granted, got) = (shard.turn(usize::MAX), matchmaker.turn(usize::MAX));
        messages += got;
        if granted + got == 0 {
            return messages;
        }
    }
}

/// Symphony §5.5: the matchmaker "only needs to pick up the latest candidate". A batch of any size
/// costs three messages: the batch may leave, the batch has left, the batch is done.
#[test]
fn a_deferred_batch_costs_three_messages_whatever_its_size() {
    for requests in [1, 5, 40] {
        let (cluster, queue) = cluster(DispatchPolicy::Deferred);
        let (mut shard, mut matchmaker) = (cluster.own_shard(0), cluster.own_matchmaker());
        assert_eq!(arrive(requests, queue, &mut shard, &mut matchmaker), 0, "no batch may leave yet");
        let mut messages = 0;
        while shard.is_empty() {
            // The queue may want to be looked at before its candidate may be sent.
            let due = shard.poll_timeout().unwrap();
            cluster.handler().0.store(due.as_nanos(), Ordering::SeqCst);
            messages += settle(&mut shard, &mut matchmaker);
        }
        let [(device, batch, members)] = shard[..] else { panic!("{} batches", shard.len()) };
        assert_eq!(members as u64, requests);
        shard.complete(device, batch);
        messages += settle(&mut shard, &mut matchmaker);
        assert_eq!(messages, 3, "{requests} requests");
    }
}

/// The matchmaker may keep a device for a candidate that a lent queue must not delay, so it must know
/// the candidate early.
#[test]
fn beside_a_lent_queue_nothing_is_held_back() {
    let (cluster, queue) = cluster(DispatchPolicy::Deferred);
    let lent = cluster.add_model(ModelOptions::new(
        LatencyProfile::linear(Duration::from_micros(2), Duration::from_micros(20), 64).unwrap(),
        DispatchPolicy::Eager,
        DropPolicy::WindowDrop,
    ));
    let (mut shard, mut matchmaker) = (cluster.own_shard(0), cluster.own_matchmaker());
    assert_eq!(arrive(3, queue, &mut shard, &mut matchmaker), 0);
    cluster.set_lent(lent);
    assert!(matchmaker.poll_timeout().is_none());
    shard.turn(usize::MAX);
    matchmaker.turn(usize::MAX);
    let (at, model) = matchmaker.poll_timeout().expect("the candidate's timer");
    assert!(model == queue.model && at > cluster.handler().now());
}
