//! Threads that keep others out of a mailbox.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use downbeat_core::cluster::*;
use downbeat_core::journal::Journal;
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_driver::{Cluster, Handler, LogSink, Moment, QueueHandle, Setup, TURN};

/// Records the dispatched batches. Its clock stands still.
#[derive(Default)]
struct Noted {
    dispatched: Mutex<Vec<(ModelId, DeviceId, BatchId)>>,
}

impl Handler for Noted {
    type Event = Request;
    type RequestTable = ();
    type Context = ();

    fn now(&self) -> Time {
        Time::from_nanos(1_000)
    }

    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, (): &mut (), request: Request) {
        shard.handle_request(moment.now, &request).unwrap();
    }

    fn carry_out(&self, _: Moment, _: &mut Journal<Shard>, (): &mut (), output: Output, (): &mut ()) {
        if let Output::Dispatch { batch, device, model, .. } = output {
            self.dispatched.lock().unwrap().push((model, device, batch));
        }
    }
}

fn cluster() -> Cluster<Noted> {
    let (wake_margin, network) = (Duration::ZERO, NetworkBudget::default());
    let log: Option<std::sync::Arc<dyn LogSink>> = None;
    let setup = Setup { devices: vec![DeviceKind(0)], planned: None, kinds: 1, network, wake_margin, log };
    Cluster::new(Noted::default(), vec![()], setup)
}

fn options() -> ModelOptions {
    let profile = LatencyProfile::linear(Duration::from_micros(2), Duration::from_micros(20), 8).unwrap();
    ModelOptions {
        profiles: profile.into(),
        max_batch: 8,
        drop: DropPolicy::HeadDrop,
        dispatch: DispatchPolicy::Eager,
        max_in_flight: u32::MAX,
        shares_limit: None,
        max_wait: Duration::MAX,
        levels: vec![PriorityLevel { max_queue: 8, timeout_action: TimeoutAction::Reject }],
    }
}

fn post(cluster: &Cluster<Noted>, queue: QueueHandle, id: u64) {
    let (deadline, queue_expiry) = (Time::MAX, Time::MAX);
    let id = RequestId(id);
    cluster.post(queue, Request { id, model: queue.model, deadline, queue_expiry, level: 0, size: 1 }, &mut ());
}

/// The device becomes free for a model whose removal is still far back in the matchmaker's mailbox.
/// The model gets the device and declines. Nothing may make the matchmaker ask the model again: a
/// thread that came along from the shard would never get to the message.
#[test]
fn a_removed_model_is_not_asked_again_and_again() {
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        let cluster = cluster();
        let [first, removed, last] = [(); 3].map(|()| cluster.add_model(options()));
        post(&cluster, first, 0);
        let (_, device, batch) = cluster.handler().dispatched.lock().unwrap()[0];
        // The request waits for the device.
        post(&cluster, removed, 1);
        {
            let _nobody_else_gets_in = cluster.own_matchmaker();
            cluster.complete(device, batch, &mut ());
            for _ in 0..2 * TURN {
                cluster.add_model(options());
            }
            cluster.remove_model(removed);
        }
        post(&cluster, last, 2);
        let dispatched =
            cluster.handler().dispatched.lock().unwrap().iter().map(|(model, ..)| *model).collect::<Vec<_>>();
        done.send(dispatched == [first.model, last.model]).unwrap();
    });
    let answered = is_done.recv_timeout(std::time::Duration::from_secs(60));
    assert_eq!(answered, Ok(true), "the device goes to the model that is there");
}

/// A probe asks by a visit whether a thread hangs in the scheduler.
#[test]
fn a_visit_waits_for_the_thread_inside_and_takes_its_messages() {
    let cluster = cluster();
    let queue = cluster.add_model(options());
    let has_left = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let inside = cluster.own_shard(0);
        let visitor = scope.spawn(|| {
            cluster.visit();
            assert!(has_left.load(Ordering::SeqCst), "the visit is over, and a thread is still inside");
        });
        post(&cluster, queue, 0);
        has_left.store(true, Ordering::SeqCst);
        drop(inside);
        visitor.join().unwrap();
    });
    assert_eq!(cluster.handler().dispatched.lock().unwrap().len(), 1, "the request was left behind");
}
