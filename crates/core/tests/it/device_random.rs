//! Device policies under random requests, cancellations and exits; [`World`] checks each step.

use downbeat_core::device::*;
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};
use proptest::prelude::*;

use crate::device_world::World;

#[derive(Clone, Debug)]
struct Arrival {
    gap_us: u64,
    size: u32,
    length: u32,
    deadline_us: Option<u64>,
    cancel_after_us: Option<u64>,
    exit: Option<u16>,
}

fn arrival() -> impl Strategy<Value = Arrival> {
    let gap = prop_oneof![Just(0), 1..300u64, 300..5_000u64];
    let often = |n: u32| proptest::bool::weighted(1.0 / f64::from(n));
    let cancel = (often(6), 0..9_000u64).prop_map(|(is, at)| is.then_some(at));
    let exit = (often(5), 0..5u16).prop_map(|(is, at)| is.then_some(at));
    let deadline = (often(3), 500..20_000u64).prop_map(|(is, at)| is.then_some(at));
    (gap, prop_oneof![4 => Just(1u32), 1 => 2..4u32], 1..40u32, deadline, cancel, exit).prop_map(
        |(gap_us, size, length, deadline_us, cancel_after_us, exit)| Arrival {
            gap_us,
            size,
            length,
            deadline_us,
            cancel_after_us,
            exit,
        },
    )
}

/// Times of `segments` segments for lengths 1 and 40: a fixed part, and one for each item and
/// length, flat up to some size.
fn profile(segments: usize, fixed_us: u64, item_us: u64, flat: u64, varies: bool) -> SegmentProfile {
    let table = |segment: usize, length: u64| {
        let item = if segment.is_multiple_of(2) { item_us } else { item_us / 2 + 1 };
        let latency = |rows: u64| Duration::from_micros(fixed_us + item * rows.max(flat) * length + 1);
        LatencyProfile::from_table((1..=16).map(latency).collect()).unwrap()
    };
    let lengths: &[u32] = if varies { &[1, 40] } else { &[0] };
    let of = |segment| lengths.iter().map(|length| table(segment, u64::from((*length).max(1)))).collect();
    SegmentProfile::new(lengths.to_vec(), &(0..segments).map(of).collect::<Vec<_>>()).unwrap()
}

/// Sends the requests. Returns the world after the last answer, and how many were sent.
fn run(policy: Box<dyn DevicePolicy>, profile: SegmentProfile, ring: u32, varies: bool, arrivals: &[Arrival]) -> World {
    let mut world = World::new(policy, profile, ring, Duration::from_micros(20));
    let mut events: Vec<(Time, u64, Option<&Arrival>)> = Vec::new();
    let mut now = Time::ZERO;
    for (index, arrival) in arrivals.iter().enumerate() {
        now += Duration::from_micros(arrival.gap_us);
        events.push((now, index as u64, Some(arrival)));
        if let Some(after) = arrival.cancel_after_us {
            events.push((now + Duration::from_micros(after), index as u64, None));
        }
        if let Some(stage) = arrival.exit {
            world.exit_after(RequestId(index as u64), stage);
        }
    }
    events.sort_by_key(|(at, id, arrival)| (*at, *id, arrival.is_none()));
    for (at, id, arrival) in events {
        let id = RequestId(id);
        match arrival {
            Some(Arrival { size, length, deadline_us, .. }) => world.request(
                at,
                DeviceRequest {
                    id,
                    model: ModelId(0),
                    deadline: deadline_us.map_or(Time::MAX, |after| at + Duration::from_micros(after)),
                    size: *size,
                    length: if varies { *length } else { 0 },
                },
            ),
            None => world.cancel(at, id),
        }
    }
    world.finish();
    world
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Each request is answered, dropped or cancelled once, by the launch that completed it; no
    /// lane runs two launches; stages run in order.
    #[test]
    fn staged(
        arrivals in prop::collection::vec(arrival(), 1..60),
        segments in 1..6usize, pairs in 1..4u16, max_batch in 3..16u32, ring in prop_oneof![Just(0u32), Just(16), 17..40u32],
        (by_length, by_operator, by_load, drop, always) in any::<(bool, bool, bool, bool, bool)>(),
        (fixed, item, flat) in (0..400u64, 0..60u64, 1..8u64),
    ) {
        let profile = profile(segments, fixed, item, flat, by_length);
        let joining = if always { Joining::Always } else { Joining::IfSooner };
        let policy = Box::new(Staged::new(StagedOptions {
            profile: profile.clone(), pairs, max_batch, by_length, by_operator, by_load, window: None, comp_wait: None, joining,
            ring_slots: ring, drop, queue_bound: 50,
        }));
        run(policy, profile, ring, by_length, &arrivals);
    }

    #[test]
    fn elastic(
        arrivals in prop::collection::vec(arrival(), 1..60),
        max in 4..16u32, ring in 16..40u32, (enhanced, drop) in any::<(bool, bool)>(), cores in prop::option::of((1..4u32, 0..400u64)), (fixed, item) in (0..400u64, 0..60u64),
    ) {
        let profile = profile(1, fixed, item, 1, false);
        let all = |load: u32| (load, LaneMix::all(load, 8)[load as usize % 3].clone());
        let mixes = if enhanced { MixTable::enhanced(vec![all(4), all(8), all(16)]).unwrap() } else { MixTable::naive(max) };
        let policy = Box::new(Elastic::new(ElasticOptions {
            profile: profile.clone(), mixes, max_running: max, ring_slots: ring, drop, queue_bound: 50,
            cores: cores.map(|(count, brief)| Cores { count, brief: Duration::from_micros(brief) }),
        }));
        run(policy, profile, ring, false, &arrivals);
    }

    #[test]
    fn windowed(
        arrivals in prop::collection::vec(arrival(), 1..60),
        max_batch in 3..16u32, window in 0..3_000u64, ahead in 0..3u32, fill in any::<bool>(), drop in any::<bool>(), (fixed, item) in (0..400u64, 0..60u64),
    ) {
        let profile = profile(1, fixed, item, 1, true);
        let policy = Box::new(Windowed::new(WindowedOptions {
            profile: profile.clone(), max_batch, window: Duration::from_micros(window), fill, drop, queue_bound: 50, ahead,
        }));
        run(policy, profile, 0, true, &arrivals);
    }

    /// The ring gives each slot to one owner at a time, in order, and gets all slots back.
    #[test]
    fn ring(slots in 1..20u32, steps in prop::collection::vec((any::<bool>(), 1..6u32, any::<prop::sample::Index>()), 1..80)) {
        let mut ring = InputRing::new(slots);
        let mut out: Vec<RingRun> = Vec::new();
        for (allocate, count, which) in steps {
            if allocate {
                if let Some(run) = ring.allocate(count) {
                    let mine = |run: &RingRun| (0..run.count).map(|i| (run.first + i) % slots).collect::<Vec<_>>();
                    let new = mine(&run);
                    prop_assert!(out.iter().flat_map(mine).all(|slot| !new.contains(&slot)), "a slot is given out twice");
                    out.push(run);
                }
            } else if !out.is_empty() {
                ring.release(out.remove(which.index(out.len())));
            }
            prop_assert!(out.iter().map(|run| run.count).sum::<u32>() <= ring.occupied());
        }
        for run in out { ring.release(run); }
        prop_assert_eq!(ring.occupied(), 0);
        prop_assert!(ring.allocate(slots).is_some());
    }
}
