//! Requests without a deadline wait for earlier requests only.

use downbeat_core::cluster::*;
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use proptest::prelude::*;

const CLIENTS: usize = 32;
const SHAPES: u32 = 16;

/// The longest wait in a closed loop. Each client sends its next request when it has its answer. A
/// request takes the next of `shapes`, and each shape has a queue.
fn longest_wait(profile: &LatencyProfile, dispatch: DispatchPolicy, shapes: &[u32]) -> Duration {
    let mut scheduler = Scheduler::new();
    scheduler.add_device(Time::ZERO, DeviceKind(0));
    for _ in 0..SHAPES {
        scheduler.add_model(Time::ZERO, ModelOptions::new(profile.clone(), dispatch.clone(), DropPolicy::Adaptive));
    }
    let mut now = Time::ZERO;
    let mut arrivals = Vec::new();
    let mut running: Option<(Time, DeviceId, BatchId, Vec<RequestId>)> = None;
    let mut longest = Duration::ZERO;
    let (mut idle_clients, mut served) = (CLIENTS, 0);
    while served < 4 * shapes.len() {
        for _ in 0..std::mem::take(&mut idle_clients) {
            let id = RequestId(arrivals.len() as u64);
            let model = ModelId(shapes[arrivals.len() % shapes.len()]);
            arrivals.push(now);
            let request = Request { id, model, deadline: Time::MAX, queue_expiry: Time::MAX, level: 0, size: 1 };
            scheduler.handle_request(now, request).unwrap();
        }
        while let Some(output) = scheduler.poll_output() {
            let Output::Dispatch { batch, device, members, expected, .. } = output else { panic!("{output:?}") };
            for member in &members {
                longest = longest.max(now.since(arrivals[member.0 as usize]));
            }
            assert!(running.replace((now + expected, device, batch, members)).is_none());
        }
        let (done, device, batch, members) = running.take().expect("the device is never idle");
        (now, idle_clients, served) = (done, members.len(), served + members.len());
        scheduler.recycle(members);
        scheduler.handle_completion(now, device, batch);
    }
    longest
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    /// A request waits only for batches of earlier requests: at most one for each other client, and
    /// the batch that runs.
    #[test]
    fn nobody_waits_for_more_than_those_before_it(
        // Shapes are not equally frequent: small ids come more often.
        shapes in prop::collection::vec((0..SHAPES, 0..SHAPES).prop_map(|(a, b)| a.min(b)), 400),
    ) {
        let profile = LatencyProfile::linear(Duration::from_micros(100), Duration::from_micros(900), 8).unwrap();
        let all_others = profile.latency(8).saturating_mul(CLIENTS as u64);
        for dispatch in [DispatchPolicy::Adaptive { consolidate: false }, DispatchPolicy::Eager, DispatchPolicy::Deferred] {
            prop_assert!(longest_wait(&profile, dispatch, &shapes) <= all_others);
        }
    }
}
