//! GSLICE's division of a device: the fair share by tables and properties, the controller step by
//! step and under random events.

use std::collections::BTreeMap;

use downbeat_core::device::spatial::*;
use downbeat_core::device::*;
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};
use proptest::prelude::*;

const A: ModelId = ModelId(0);
const B: ModelId = ModelId(1);
const SLO: Duration = Duration::from_millis(50);

/// A duration of so many ms that ends now.
fn ran(now: Time, ms: u64) -> Span {
    Span { start: now - Duration::from_millis(ms), end: now }
}

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_millis(ms)
}

fn divide(units: u32, grain: u32, spread: bool, claims: &[(f64, f64)]) -> Option<Vec<u32>> {
    let claims: Vec<Claim> = claims.iter().map(|(demand, weight)| Claim { demand: *demand, weight: *weight }).collect();
    FairShare { units, grain, spread }.divide(&claims)
}

/// A division: units, grain, whether idle units are given away, demands, shares.
type Division = (u32, u32, bool, &'static [u32], &'static [u32]);

#[test]
fn section_3_2_3_smallest_demand_first_the_rest_by_weight() {
    let by_demand = |units, grain, spread, demands: &[u32]| {
        let claims: Vec<(f64, f64)> = demands.iter().map(|demand| (f64::from(*demand), f64::from(*demand))).collect();
        divide(units, grain, spread, &claims).unwrap()
    };
    let table: [Division; 13] = [
        (100, 1, false, &[30, 60], &[30, 60]),
        (100, 1, true, &[30, 60], &[33, 67]),
        (100, 1, true, &[30], &[100]),
        (100, 1, false, &[30, 70], &[30, 70]),
        (100, 1, false, &[60, 100], &[37, 63]),
        (100, 1, false, &[20, 60, 60], &[20, 40, 40]),
        (100, 1, false, &[60, 20, 90], &[32, 20, 48]),
        (10, 1, false, &[3, 4, 100], &[3, 3, 4]),
        (100, 10, false, &[25, 61], &[30, 70]),
        (132, 8, false, &[60, 100], &[64, 64]),
        (132, 8, true, &[8, 8], &[64, 64]),
        (4, 2, false, &[100, 1], &[2, 2]),
        (80, 1, true, &[], &[]),
    ];
    for (units, grain, spread, demands, shares) in table {
        assert_eq!(by_demand(units, grain, spread, demands), shares, "{demands:?} of {units} by {grain}, {spread}");
    }
    assert_eq!(divide(4, 2, false, &[(1.0, 1.0); 3]), None, "more models than steps");
}

proptest! {
    #[test]
    fn nobody_envies_and_no_more_is_given_than_there_is(
        units in 1..200u32,
        grain in 1..12u32,
        spread: bool,
        claims in prop::collection::vec((0.0..250.0f64, 0.1..100.0f64), 1..8),
    ) {
        let Some(shares) = divide(units, grain, spread, &claims) else {
            prop_assert!(claims.len() as u32 > units / grain);
            return Ok(());
        };
        let steps = units / grain;
        let demand = |index: usize| ((claims[index].0 / f64::from(grain)).ceil() as u32).clamp(1, steps);
        let gets: Vec<u32> = shares.iter().map(|share| share / grain).collect();
        let sum: u32 = gets.iter().sum();
        prop_assert!(shares.iter().all(|share| share % grain == 0 && *share >= grain));
        prop_assert!(sum <= steps);
        let is_scarce = (0..gets.len()).map(demand).sum::<u32>() >= steps;
        if is_scarce || spread {
            prop_assert_eq!(sum, steps, "nothing is left while somebody wants it");
        }
        for (one, mine) in gets.iter().enumerate() {
            if is_scarce || !spread {
                prop_assert!(*mine <= demand(one), "none above its demand unless the device is idle");
            }
            for (other, theirs) in gets.iter().enumerate() {
                // A model that wants more has as much as any other for its weight, up to a step.
                let fair = f64::from(mine + 1) * claims[other].1 / claims[one].1;
                let envies = *mine < demand(one) && theirs > mine && f64::from(*theirs) > fair + 1e-9;
                prop_assert!(!envies, "{one} envies {other}: {:?} of {:?}", gets, claims);
            }
        }
    }
}

/// A device with the orders that it got.
struct Device {
    spatial: Spatial,
    now: Time,
}

impl Device {
    fn new(options: SpatialOptions) -> Self {
        Device { spatial: Spatial::new(options), now: Time::ZERO }
    }

    fn come(&mut self, id: ModelId, knee: Option<u32>) -> Vec<SpatialOutput> {
        let batch = BatchControl::Slab(Slab::new(SLO, 32));
        self.spatial.handle_model(self.now, id, Some(SpatialModel { slo: SLO, knee, batch }));
        self.outputs()
    }

    /// The outputs, without the limits of models.
    fn outputs(&mut self) -> Vec<SpatialOutput> {
        let all = std::iter::from_fn(|| self.spatial.poll_output());
        all.filter(|output| !matches!(output, SpatialOutput::Limit { .. })).collect()
    }

    fn prepared(&mut self, id: ModelId, made: bool) -> Vec<SpatialOutput> {
        self.spatial.handle_prepared(self.now, id, made);
        self.outputs()
    }

    fn window(&mut self, id: ModelId, items: u64, arrivals: u64, latency_ms: u64) {
        let second = Duration::from_millis(1_000);
        let latency = Duration::from_millis(latency_ms);
        let window = MeasuredWindow { span: second, busy: second, items, arrivals: Some(arrivals), latency };
        self.spatial.handle_window(id, &window);
    }

    fn look(&mut self, now: Time) -> Vec<SpatialOutput> {
        self.now = now;
        self.spatial.handle_timeout(now);
        self.outputs()
    }

    fn active(&self, id: ModelId) -> u32 {
        self.spatial.share(id).unwrap().active
    }
}

fn prepare(model: ModelId, units: u32, reason: ShareReason) -> SpatialOutput {
    SpatialOutput::Prepare { model, units, reason }
}

fn switch(model: ModelId, units: u32) -> SpatialOutput {
    SpatialOutput::Switch { model, units }
}

fn as_in_figure_16() -> Device {
    let mut device = Device::new(SpatialOptions { spread: false, reserve: 0.0, ..SpatialOptions::new(100, 1) });
    for id in [A, B] {
        assert_eq!(device.come(id, None), [prepare(id, 30, ShareReason::Came)], "30% where nobody knows the knee");
        assert_eq!(device.prepared(id, true), [switch(id, 30)]);
    }
    device
}

#[test]
fn figure_16_shares_follow_what_is_measured_when_the_hold_down_is_over() {
    let mut device = as_in_figure_16();
    let measure = |device: &mut Device| {
        device.window(A, 131, 35, 8);
        device.window(B, 15, 35, 65);
    };
    measure(&mut device);
    assert_eq!(device.spatial.poll_timeout(), Some((at(2_000), SpatialTimeout::Period)));
    assert_eq!(device.look(at(1_000)), [], "not yet");
    let too_small = ShareReason::TooSmall { latency: 0.065, throughput: 15.0 };
    let due = [prepare(A, 9, ShareReason::TooLarge), prepare(B, 70, too_small)];
    assert_eq!(device.look(at(2_000)), due, "8.02% of steps of 1%");
    measure(&mut device);
    assert_eq!(device.look(at(4_000)), [], "once");
    assert_eq!(device.prepared(B, true), [switch(B, 70)], "there is room");
    assert_eq!(device.prepared(A, true), [switch(A, 9)]);
    measure(&mut device);
    assert_eq!(device.look(at(12_000)), [], "held down");
    assert_eq!(device.look(at(14_000)).len(), 2, "10 s after the change, at the next look");
    let mut device = as_in_figure_16();
    measure(&mut device);
    device.look(at(2_000));
    device.prepared(A, true);
    device.prepared(B, true);
    assert_eq!(device.look(at(23_000)), [], "what was measured before says nothing any more");
}

#[test]
fn section_3_3_1_a_batch_that_misses_the_slo_shrinks_before_five() {
    let mut device = as_in_figure_16();
    device.now = at(10_100);
    device.window(B, 10, 10, 80);
    for batch in 1..=5 {
        device.spatial.handle_batch(device.now, B, 1, ran(device.now, 80));
        let outputs = device.outputs();
        assert_eq!(outputs.len(), usize::from(batch == 5), "{outputs:?}");
    }
    assert_eq!(device.spatial.share(B).unwrap().target, 42, "30% and 30 ms of 80 more");
}

#[test]
fn section_3_2_2_one_unsuitable_share_has_all_models_asked() {
    let mut device = as_in_figure_16();
    device.now = at(10_100);
    device.window(A, 15, 35, 40);
    device.window(B, 10, 10, 80);
    for _ in 0..5 {
        device.spatial.handle_batch(device.now, B, 1, ran(device.now, 80));
    }
    assert_eq!(device.spatial.share(B).unwrap().target, 42, "30% and 30 ms of 80 more");
    assert_eq!(device.spatial.share(A).unwrap().target, 58, "70% for 35 a second, of what B leaves");
}

#[test]
fn section_3_2_4_who_grows_waits_for_those_who_shrink() {
    let mut device = Device::new(SpatialOptions::new(100, 1));
    assert_eq!(device.come(A, Some(70)), [prepare(A, 100, ShareReason::Came)], "nobody else wants the rest");
    assert_eq!(device.prepared(A, true), [switch(A, 100)]);
    device.now = at(1_000);
    // Figure 15: 70% and 30%, within the hold-down.
    assert_eq!(device.come(B, None), [prepare(A, 70, ShareReason::OtherCame(B)), prepare(B, 30, ShareReason::Came)]);
    assert_eq!(device.prepared(B, true), [], "the device is full");
    assert_eq!((device.active(A), device.active(B)), (100, 0));
    assert_eq!(device.prepared(A, true), [switch(A, 70), switch(B, 30)]);
    device.spatial.handle_model(at(2_000), A, None);
    assert_eq!(device.outputs(), [prepare(B, 100, ShareReason::OtherWent(A))]);
    assert_eq!(device.active(B), 30, "it goes on until the lanes are there");
    assert_eq!(device.prepared(B, true), [switch(B, 100)]);
}

#[test]
fn lanes_that_cannot_be_made_change_nothing_but_what_the_others_may_have() {
    let mut device = Device::new(SpatialOptions::new(100, 1));
    device.come(A, Some(70));
    device.prepared(A, true);
    device.come(B, None);
    device.prepared(B, true);
    assert_eq!(device.prepared(A, false), [], "A keeps all, and B, which is ready, waits");
    assert_eq!((device.active(A), device.active(B)), (100, 0));
    assert_eq!(device.prepared(A, true), [], "it was not asked for");
    assert_eq!(device.look(at(9_000)), []);
    let again = device.look(at(12_000));
    assert!(matches!(again[..], [SpatialOutput::Prepare { model: A, units: 70, .. }]), "{again:?}");
    assert_eq!(device.prepared(A, true), [switch(A, 70), switch(B, 30)]);
}

#[test]
fn a_share_that_was_set_by_hand_is_left_alone() {
    let mut device = as_in_figure_16();
    device.spatial.handle_share(at(1_000), B, Some(20)).unwrap();
    assert_eq!(device.outputs(), [prepare(B, 20, ShareReason::ByHand)]);
    assert_eq!(device.prepared(B, true), [switch(B, 20)]);
    device.window(B, 15, 35, 65);
    assert_eq!(device.look(at(60_000)), []);
    assert_eq!(device.come(ModelId(2), Some(90)), [prepare(ModelId(2), 50, ShareReason::Came)]);
    let share = device.spatial.share(B).unwrap();
    assert!(share.by_hand && share.active == 20 && share.target == 20);
    // B has 20, and the third model needs at least 1.
    for units in [0, 80, 200] {
        let wrong = BadShare::Units { units, grain: 1, most: 79 };
        assert_eq!(device.spatial.handle_share(at(60_000), A, Some(units)), Err(wrong));
    }
    assert_eq!(device.spatial.handle_share(at(60_000), ModelId(9), Some(1)), Err(BadShare::NoModel(ModelId(9))));
    device.spatial.handle_share(at(60_000), B, None).unwrap();
    assert!(!device.spatial.share(B).unwrap().by_hand);
}

#[test]
fn a_model_without_room_waits_until_another_goes() {
    let mut device = Device::new(SpatialOptions::new(16, 8));
    for id in 0..2 {
        device.come(ModelId(id), None);
    }
    assert_eq!(device.come(ModelId(2), None), [SpatialOutput::NoRoom { model: ModelId(2) }]);
    device.spatial.handle_model(at(1), A, None);
    assert_eq!(device.outputs(), [prepare(ModelId(2), 8, ShareReason::OtherWent(A))]);
}

#[test]
fn a_batch_of_the_former_share_does_not_judge_the_new_share() {
    let mut device = Device::new(SpatialOptions::new(100, 1));
    device.come(A, Some(70));
    device.prepared(A, true);
    device.come(B, None);
    device.prepared(B, true);
    device.now = at(1_000);
    device.prepared(A, true);
    for (now, limit) in [(1_010, 1), (1_019, 1), (1_021, 2)] {
        device.spatial.handle_batch(at(now), A, 1, ran(at(now), 20));
        assert_eq!(device.spatial.limit(A), Some(limit), "{now} ms");
    }
}

/// Under a load that goes up and down faster than shares may change (§3.2.1).
#[test]
fn section_3_2_1_a_square_wave_changes_shares_once_a_hold_down() {
    let mut device = as_in_figure_16();
    let mut changes = Vec::new();
    for second in 1..=120 {
        let (items, arrivals) = if second % 6 < 3 { (100, 10) } else { (100, 300) };
        device.window(A, items, arrivals, 20);
        for output in device.look(at(second * 1_000)) {
            if let SpatialOutput::Prepare { model: A, .. } = output {
                changes.push(second);
                device.prepared(A, true);
            }
        }
    }
    assert!(changes.len() >= 2, "{changes:?}");
    assert!(changes.windows(2).all(|pair| pair[1] - pair[0] >= 10), "{changes:?}");
}

#[derive(Clone, Debug)]
enum Event {
    Come(u32, Option<u32>),
    Go(u32),
    Prepared(u32, bool),
    Batch(u32, u32, u64),
    Window(u32, u64, Option<u64>, u64),
    ByHand(u32, Option<u32>),
    Pass(u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let id = || 0..5u32;
    let event = prop_oneof![
        2 => (id(), prop::option::of(1..120u32)).prop_map(|(id, knee)| Event::Come(id, knee)),
        1 => id().prop_map(Event::Go),
        8 => (id(), prop::bool::weighted(0.8)).prop_map(|(id, made)| Event::Prepared(id, made)),
        4 => (id(), 1..33u32, 1..120u64).prop_map(|(id, rows, ms)| Event::Batch(id, rows, ms)),
        6 => (id(), 0..200u64, prop::option::of(0..200u64), 1..120u64)
            .prop_map(|(id, items, arrivals, ms)| Event::Window(id, items, arrivals, ms)),
        1 => (id(), prop::option::of(0..120u32)).prop_map(|(id, share)| Event::ByHand(id, share)),
        6 => (1..6_000u64).prop_map(Event::Pass),
    ];
    prop::collection::vec(event, 1..150)
}

proptest! {
    /// The models' shares never exceed the device. A share changes only by lanes that were asked
    /// for and are ready, and every request for lanes gets an answer.
    #[test]
    fn shares_are_kept_whatever_happens(events in events(), units in 4..100u32, grain in 1..9u32, spread: bool) {
        let options = SpatialOptions { spread, ..SpatialOptions::new(units.max(grain), grain) };
        let mut device = Device::new(options);
        let (mut active, mut asked) = (BTreeMap::<ModelId, u32>::new(), BTreeMap::<ModelId, (u32, bool)>::new());
        let mut held = BTreeMap::<ModelId, u32>::new();
        for event in events {
            let now = device.now;
            match event {
                Event::Come(id, knee) => {
                    let batch = BatchControl::Slab(Slab::new(SLO, 32));
                    device.spatial.handle_model(now, ModelId(id), Some(SpatialModel { slo: SLO, knee, batch }));
                }
                Event::Go(id) => {
                    device.spatial.handle_model(now, ModelId(id), None);
                    for map in [&mut active, &mut held] {
                        map.remove(&ModelId(id));
                    }
                    asked.remove(&ModelId(id));
                }
                Event::Prepared(id, made) => {
                    if let Some((_, ready @ false)) = asked.get_mut(&ModelId(id)) {
                        *ready = made;
                        if !made {
                            asked.remove(&ModelId(id));
                        }
                    }
                    device.spatial.handle_prepared(now, ModelId(id), made);
                }
                Event::Batch(id, rows, ms) => {
                    device.spatial.handle_batch(now, ModelId(id), rows, ran(now, ms));
                }
                Event::Window(id, items, arrivals, ms) => {
                    let (span, latency) = (Duration::from_millis(1_000), Duration::from_millis(ms));
                    let window = MeasuredWindow { span, busy: span, items, arrivals, latency };
                    device.spatial.handle_window(ModelId(id), &window);
                }
                Event::ByHand(id, share) => {
                    if device.spatial.handle_share(now, ModelId(id), share).is_ok() {
                        held.remove(&ModelId(id));
                        held.extend(share.map(|share| (ModelId(id), share)));
                    }
                }
                Event::Pass(ms) => {
                    device.now = now + Duration::from_millis(ms);
                    device.spatial.handle_timeout(device.now);
                }
            }
            while let Some(output) = device.spatial.poll_output() {
                match output {
                    SpatialOutput::Prepare { model, units, .. } => {
                        prop_assert!(units % grain == 0 && units >= grain);
                        prop_assert!(!matches!(asked.get(&model), Some((_, false))), "one at a time");
                        asked.insert(model, (units, false));
                    }
                    SpatialOutput::Switch { model, units } => {
                        prop_assert_eq!(asked.remove(&model), Some((units, true)), "to lanes that are ready");
                        active.insert(model, units);
                    }
                    SpatialOutput::Discard { model } => prop_assert!(asked.remove(&model).is_some()),
                    SpatialOutput::Limit { rows, .. } => prop_assert!((1..=32).contains(&rows)),
                    SpatialOutput::NoRoom { .. } => {}
                }
                prop_assert!(active.values().sum::<u32>() <= options.units, "{:?}", active);
            }
            for (id, units) in &active {
                prop_assert_eq!(device.active(*id), *units);
            }
            for (id, share) in &held {
                let state = device.spatial.share(*id).unwrap();
                prop_assert!(state.by_hand && (state.target == *share || state.target == state.active));
            }
        }
    }
}

/// "GSLICE's active-standby": the policy inside does not know that it moves.
#[test]
fn section_3_2_4_a_model_moves_between_launches_and_loses_nothing() {
    let whole = LatencyProfile::from_table((1..=4).map(Duration::from_millis).collect()).unwrap();
    let profile = SegmentProfile::new(vec![0], &[vec![whole]]).unwrap();
    let options = ElasticOptions {
        profile,
        mixes: MixTable::naive(4),
        max_running: 2,
        ring_slots: 8,
        drop: false,
        queue_bound: 16,
        cores: None,
    };
    let mut scheduler = DeviceScheduler::new();
    let next = |scheduler: &mut DeviceScheduler| std::iter::from_fn(|| scheduler.poll_output()).collect::<Vec<_>>();
    scheduler.handle_layout(at(0), &Layout { shared_lanes: vec![1, 0] }).unwrap();
    let model = ModelSpec::new(&options, PartitionId(0)).build().unwrap();
    scheduler.handle_model(at(0), A, Some(model)).unwrap();
    let former = scheduler.lanes(A).to_vec();
    let mut answered = Vec::new();
    let mut running = Vec::new();
    let mut note = |outputs: Vec<DeviceOutput>, running: &mut Vec<Launch>| {
        for output in outputs {
            match output {
                DeviceOutput::Launch(launch) => running.push(launch),
                DeviceOutput::Reply { request, .. } => answered.push(request),
                _ => {}
            }
        }
    };
    for id in 0..6 {
        let request = DeviceRequest { id: RequestId(id), model: A, deadline: Time::MAX, size: 1, length: 0 };
        scheduler.handle_request(at(0), &request).unwrap();
        note(next(&mut scheduler), &mut running);
        scheduler.handle_input(at(0), A, RequestId(id));
        note(next(&mut scheduler), &mut running);
    }
    assert_eq!(running.iter().map(|launch| launch.rows).sum::<u32>(), 2);
    assert!(!scheduler.handle_switch(at(1), A), "nothing is ready");
    scheduler.handle_move(at(1), A, PartitionId(1)).unwrap();
    assert!(matches!(next(&mut scheduler)[..], [DeviceOutput::Prepare { partition: PartitionId(1), .. }]));
    assert_eq!(scheduler.handle_move(at(1), A, PartitionId(1)), Err(BadMove::Busy(A)));
    scheduler.handle_prepared(at(2), A, Ok(()));
    assert!(next(&mut scheduler).is_empty() && scheduler.lanes(A) == former, "it goes on where it is");
    assert!(scheduler.handle_switch(at(3), A));
    assert!(matches!(next(&mut scheduler)[..], [DeviceOutput::Switch { .. }, DeviceOutput::Free { .. }]));
    let lanes = scheduler.lanes(A).to_vec();
    let mut elsewhere = 0;
    while let Some(launch) = (!running.is_empty()).then(|| running.remove(0)) {
        elsewhere += u32::from(lanes.contains(&launch.lane));
        scheduler.handle_completion(at(4), launch.id, Span { start: at(0), end: at(4) }, &[]);
        note(next(&mut scheduler), &mut running);
    }
    assert!(elsewhere > 0);
    answered.sort_unstable();
    assert_eq!(answered, (0..6).map(RequestId).collect::<Vec<_>>(), "each once");
    assert_eq!(scheduler.lane(former[0]), None, "what was there before has gone");
}
