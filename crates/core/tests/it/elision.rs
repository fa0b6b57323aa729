//! A queue says which updates may be left out, and shortens others. The decisions stay the same.

use downbeat_core::cluster::*;
use downbeat_core::{DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use proptest::prelude::*;

use crate::random_events::{behaviours, drops};

const KIND: DeviceKind = DeviceKind(0);

#[derive(Clone, Debug)]
enum Event {
    Wait(u64),
    Request { slo_us: u64, size: u32, level: u32, expiry_us: Option<u64> },
    Cancel(usize),
    Take,
    Devices(u32),
    Behaviour(Option<Behaviour>),
}

fn models() -> impl Strategy<Value = ModelOptions> {
    let timeout = (0..3000u64, prop::collection::vec(1..9u32, 0..2))
        .prop_map(|(us, preferred)| DispatchPolicy::Timeout { delay: Duration::from_micros(us), preferred });
    let dispatch = prop_oneof![
        4 => Just(DispatchPolicy::Deferred),
        1 => Just(DispatchPolicy::Latest),
        2 => (0..=100u8).prop_map(|share| DispatchPolicy::Deferred.of_step(share)),
        2 => (any::<bool>(), 0..=100u8)
            .prop_map(|(consolidate, share)| DispatchPolicy::Adaptive { consolidate }.of_step(share)),
        1 => Just(DispatchPolicy::Eager),
        2 => any::<bool>().prop_map(|consolidate| DispatchPolicy::Adaptive { consolidate }),
        1 => timeout,
    ];
    let level = PriorityLevel { max_queue: u32::MAX, timeout_action: TimeoutAction::Reject };
    (1..200u64, 1..400u64, 1..40u32, drops(), dispatch, 1..3usize).prop_map(
        move |(alpha, beta, max_batch, drop, dispatch, levels)| {
            let (alpha, beta) = (Duration::from_micros(alpha), Duration::from_micros(beta));
            let profile = LatencyProfile::linear(alpha, beta, max_batch).unwrap();
            ModelOptions { levels: vec![level; levels], ..ModelOptions::new(profile, dispatch, drop) }
        },
    )
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let slo = prop_oneof![8 => Just(6000u64), 2 => 0..9000u64];
    let size = prop_oneof![12 => Just(1u32), 1 => 1..5u32];
    let level = prop_oneof![6 => Just(0u32), 1 => Just(1u32)];
    let expiry = prop_oneof![12 => Just(None), 1 => (0..4000u64).prop_map(Some)];
    let request = (slo, size, level, expiry).prop_map(|(slo_us, size, level, expiry_us)| Event::Request {
        slo_us,
        size,
        level,
        expiry_us,
    });
    let event = prop_oneof![
        6 => (0..60u64).prop_map(Event::Wait),
        1 => (0..3000u64).prop_map(Event::Wait),
        24 => request,
        1 => any::<usize>().prop_map(Event::Cancel),
        1 => Just(Event::Take),
        1 => (0..9u32).prop_map(Event::Devices),
        1 => behaviours().prop_map(Event::Behaviour),
    ];
    prop::collection::vec(event, 0..250)
}

fn dropped(queue: &mut ModelQueue) -> Vec<Dropped> {
    std::iter::from_fn(|| queue.pop_dropped()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// The queue `exact` is updated wholly after each change and at each wake-up of either queue.
    /// The queue `lazy` is updated only when and as far as it has to be. Whenever a batch may
    /// start, both know the same.
    ///
    /// A target is worked out at the first update after a change of the devices, or after 100 ms.
    /// An update at another time would find another mean budget. Therefore `exact` has every update
    /// of `lazy`. `exact` foresees no growth, since foreseen growth would wake `exact` while `lazy`
    /// sleeps.
    #[test]
    fn updates_that_may_be_left_out_are_missed_by_nobody(
        options in models(),
        events in events(),
        start in prop_oneof![Just(0), 90_000..100_000u64],
    ) {
        let mut now = Time::ZERO + Duration::from_micros(start);
        let mut exact = ModelQueue::new(now, options.clone());
        let mut lazy = ModelQueue::new(now, options);
        exact.set_devices(KIND, 3);
        lazy.set_devices(KIND, 3);
        let mut tickets = Vec::new();
        for (id, event) in (0..).map(RequestId).zip(&events) {
            match event {
                Event::Wait(us) => {
                    let until = now + Duration::from_micros(*us);
                    while let Some(at) = [exact.wake(), lazy.wake()].into_iter().flatten().min().filter(|at| *at <= until) {
                        prop_assert!(at > now, "time would stand still at {now:?}");
                        now = at;
                        update_wholly(&mut exact, now);
                        if lazy.wake().is_some_and(|at| at <= now) {
                            lazy.update(now);
                        }
                        compare(now, &mut exact, &mut lazy)?;
                    }
                    now = until;
                }
                Event::Request { slo_us, size, level, expiry_us } => {
                    let deadline = now + Duration::from_micros(*slo_us);
                    let queue_expiry = expiry_us.map_or(Time::MAX, |us| now + Duration::from_micros(us));
                    let request = Request { id, model: ModelId(0), deadline, queue_expiry, level: *level, size: *size };
                    let result = exact.enqueue(now, &request);
                    prop_assert_eq!(result, lazy.enqueue(now, &request));
                    if let Ok(ticket) = result {
                        tickets.push(ticket);
                        update_wholly(&mut exact, now);
                        if !lazy.is_settled() {
                            lazy.update(now);
                        }
                    }
                }
                Event::Cancel(n) => {
                    let Some(&ticket) = tickets.get(n % tickets.len().max(1)) else { continue };
                    let left = exact.cancel(ticket);
                    prop_assert_eq!(left, lazy.cancel(ticket));
                    if left {
                        update_wholly(&mut exact, now);
                        lazy.update(now);
                    }
                }
                Event::Devices(devices) => {
                    let changed = exact.set_devices(KIND, *devices);
                    prop_assert_eq!(changed, lazy.set_devices(KIND, *devices));
                    if changed {
                        update_wholly(&mut exact, now);
                        lazy.update(now);
                    }
                }
                Event::Behaviour(behaviour) => {
                    exact.set_behaviour(*behaviour);
                    lazy.set_behaviour(*behaviour);
                    update_wholly(&mut exact, now);
                    lazy.update(now);
                }
                Event::Take => {
                    let (mut a, mut b) = (Vec::new(), Vec::new());
                    let departures = [exact.take(now, KIND, Time::ZERO, &mut a), lazy.take(now, KIND, Time::ZERO, &mut b)];
                    // The comparison leaves out the start of the window: each queue reports it as
                    // of its last update.
                    let [x, y] = departures.map(|d| d.map(|d| (d.size, d.start, d.expected, d.reason.latest, d.reason.left)));
                    prop_assert_eq!(x, y);
                    prop_assert_eq!(a, b);
                    update_wholly(&mut exact, now);
                    lazy.update(now);
                }
            }
            compare(now, &mut exact, &mut lazy)?;
        }
    }
}

/// An update that leaves nothing out and foresees no growth.
fn update_wholly(queue: &mut ModelQueue, now: Time) {
    queue.set_wake_margin(Duration::ZERO);
    queue.update(now);
    queue.set_wake_margin(Duration::ZERO);
}

fn compare(now: Time, exact: &mut ModelQueue, lazy: &mut ModelQueue) -> Result<(), TestCaseError> {
    prop_assert_eq!(dropped(exact), dropped(lazy));
    let (a, b) = (exact.candidate(KIND), lazy.candidate(KIND));
    prop_assert_eq!(a.is_some(), b.is_some());
    let (Some(a), Some(b)) = (a, b) else { return Ok(()) };
    prop_assert_eq!(a.exec <= now, b.exec <= now, "{:?} instead of {:?} at {:?}", b, a, now);
    if a.exec <= now {
        prop_assert_eq!((a.size, a.latest), (b.size, b.latest), "at {:?}", now);
    } else {
        prop_assert!(lazy.wake().is_some_and(|at| at <= a.exec) || b.exec == a.exec, "{:?} would be missed", a);
    }
    Ok(())
}
