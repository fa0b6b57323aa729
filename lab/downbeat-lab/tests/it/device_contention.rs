//! A device that launches share: no launch is faster than alone, none is lost, and no more than all
//! units are used.

use downbeat_core::device::{LaneId, SegmentRange};
use downbeat_core::{Duration, Time};
use downbeat_lab::device::{
    Architecture, Completed, ContendedDevice, DeviceLimits, Direction, EmulatedModel, Kernel, Platform, SLICE, Sharing,
    WHOLE_BANDWIDTH, Work,
};
use proptest::prelude::*;

const UNITS: u32 = 72;

fn limits() -> DeviceLimits {
    DeviceLimits {
        crowding_permille: 25,
        own_hosts: false,
        copy_bytes_per_second: 1e9,
        copy_fixed: Duration::from_nanos(100),
        ..DeviceLimits::plain(UNITS)
    }
}

fn kernel(issue: u64, run: u64, units: u32) -> Kernel {
    Kernel { issue: Duration::from_nanos(issue), run: Duration::from_nanos(run), units, draw: 0 }
}

fn work(kernels: &[Kernel]) -> Work {
    Work { kernels: kernels.to_vec(), ..Work::default() }
}

fn at(ns: u64) -> Time {
    Time::from_nanos(ns)
}

/// Runs until no work is under way. Returns the completions with their times.
fn drain(device: &mut ContendedDevice) -> Vec<(u64, Completed)> {
    let mut done = Vec::new();
    while let Some(next) = device.next_event() {
        assert!(device.used_units() <= UNITS);
        done.extend(device.advance(next).into_iter().map(|completed| (next.as_nanos(), completed)));
    }
    done
}

fn launch_ends(done: &[(u64, Completed)]) -> Vec<(u64, u64)> {
    let ends = done.iter().filter_map(|(at, completed)| match completed {
        Completed::Launch { token, .. } => Some((*token, *at)),
        Completed::Copy { .. } => None,
    });
    ends.collect()
}

/// A speed is rounded down, so that an end may be a nanosecond late.
fn assert_ends(done: &[(u64, Completed)], expected: [(u64, u64); 2]) {
    for ((token, end), (of, exact)) in launch_ends(done).into_iter().zip(expected) {
        assert!(token == of && (exact..=exact + 1).contains(&end), "{done:?}, not {expected:?}");
    }
}

#[test]
fn what_fits_side_by_side_is_not_slowed_down() {
    let mut device = ContendedDevice::new(limits(), 2);
    device.launch(Time::ZERO, LaneId(0), 7, work(&[kernel(0, 1000, 30)]));
    device.launch(Time::ZERO, LaneId(1), 8, work(&[kernel(0, 1500, 42)]));
    assert_eq!(device.advance(at(0)), []);
    assert_eq!(device.used_units(), 72);
    assert_eq!(launch_ends(&drain(&mut device)), [(7, 1000), (8, 1500)]);
}

#[test]
fn beyond_that_all_slow_down_in_proportion() {
    let mut device = ContendedDevice::new(limits(), 2);
    device.launch(Time::ZERO, LaneId(0), 7, work(&[kernel(0, 1000, 72)]));
    device.launch(Time::ZERO, LaneId(1), 8, work(&[kernel(0, 3000, 36)]));
    // 108 units are wanted. Both run at two thirds of the speed until the first is done at 1500;
    // 2000 are left of the other.
    assert_ends(&drain(&mut device), [(7, 1500), (8, 3500)]);
}

#[test]
fn in_order_the_first_takes_what_it_can_use_and_the_rest_is_left_over() {
    let mut device = ContendedDevice::new(DeviceLimits { sharing: Sharing::InOrder, ..limits() }, 3);
    device.launch(Time::ZERO, LaneId(0), 7, work(&[kernel(0, 1000, 60)]));
    device.launch(Time::ZERO, LaneId(1), 8, work(&[kernel(0, 1000, 24), kernel(0, 500, 72)]));
    device.launch(Time::ZERO, LaneId(2), 9, work(&[kernel(0, 1000, 72)]));
    // Until 1000 the second gets 12 of 24 units, and half of it is done. The third gets nothing
    // until then, and two thirds of the units after. At 1500 it has the device, with 667 of its
    // work left; the second's other kernel waits behind it.
    assert_eq!(launch_ends(&drain(&mut device)), [(7, 1000), (9, 2167), (8, 2667)]);
}

#[test]
fn issuing_is_shared_and_crowding_slows_it_down() {
    let mut device = ContendedDevice::new(DeviceLimits { crowding_permille: 500, ..limits() }, 2);
    device.launch(Time::ZERO, LaneId(0), 7, work(&[kernel(1000, 10, 1)]));
    device.launch(Time::ZERO, LaneId(1), 8, work(&[kernel(1000, 10, 1)]));
    // Two share, and each costs half as much again: 1000 * 2 * 1.5.
    assert_ends(&drain(&mut device), [(7, 3010), (8, 3010)]);
}

#[test]
fn copies_take_turns_each_way_and_disturb_no_kernel() {
    let mut device = ContendedDevice::new(limits(), 1);
    device.launch(Time::ZERO, LaneId(0), 7, work(&[kernel(0, 1000, 72)]));
    device.copy(Time::ZERO, Direction::In, 1, 400);
    device.copy(Time::ZERO, Direction::In, 2, 400);
    device.copy(Time::ZERO, Direction::Out, 3, 100);
    let copy = |direction, token| Completed::Copy { direction, token };
    let expected = [
        (200, copy(Direction::Out, 3)),
        (500, copy(Direction::In, 1)),
        (1000, copy(Direction::In, 2)),
        (1000, Completed::Launch { lane: LaneId(0), token: 7 }),
    ];
    assert_eq!(drain(&mut device), expected);
    assert!(device.is_idle());
}

#[test]
#[should_panic(expected = "l0 runs one launch at a time")]
fn a_lane_runs_one_launch_at_a_time() {
    let mut device = ContendedDevice::new(limits(), 1);
    device.launch(Time::ZERO, LaneId(0), 7, work(&[kernel(0, 1000, 72)]));
    device.advance(at(10));
    device.launch(at(10), LaneId(0), 8, work(&[kernel(0, 1000, 72)]));
}

#[test]
fn a_model_alone_takes_exactly_its_time() {
    for architecture in Architecture::ALL {
        let model = EmulatedModel::new(architecture, Platform::TITAN_CUDNN);
        let mut device = ContendedDevice::new(model.limits(), 1);
        device.launch(at(5), LaneId(0), 0, model.work(SegmentRange::new(0, 1), 3, 17, 72));
        let done = drain(&mut device);
        assert_eq!(launch_ends(&done), [(0, 5 + model.time(3, 17).as_nanos())], "{architecture}");
    }
}

#[test]
fn stages_are_the_whole_in_parts_of_nearly_equal_time() {
    for architecture in Architecture::ALL {
        let model = EmulatedModel::staged(architecture, Platform::TITAN_TENSORRT, 4).unwrap();
        assert_eq!(model.segment_count(), 4, "{architecture}");
        let profile = model.profile(&[64], 32).unwrap();
        let whole = EmulatedModel::new(architecture, Platform::TITAN_TENSORRT).time(32, 64).as_nanos();
        // One more stage costs the launch overhead and the issue of one more launch.
        let Platform { launch_overhead, issue, .. } = Platform::TITAN_TENSORRT;
        let more = 3 * (launch_overhead + issue).as_nanos();
        let found = profile.total(32, 64).as_nanos();
        assert!((whole..=whole + more).contains(&found), "{architecture}: {found} ns in stages, {whole} ns whole");
        for stage in 0..4 {
            let share = profile.time(stage, 32, 64).as_nanos() as f64 / whole as f64;
            assert!((0.12..0.40).contains(&share), "{architecture}: stage {stage} takes {share:.2} of the time");
        }
    }
}

#[test]
fn zero_stages_and_too_many_are_errors_that_name_the_most() {
    for stages in [0, 10_000] {
        let error = EmulatedModel::staged(Architecture::Vgg16, Platform::TITAN_TENSORRT, stages).unwrap_err();
        assert!(error.to_string().contains("can be cut into 1 to 21 stages"), "{error}");
        assert!(error.to_string().contains("can be cut into 1 to 21 stages"), "{error}");
    }
    let most = EmulatedModel::staged(Architecture::Vgg16, Platform::TITAN_TENSORRT, 21).unwrap();
    assert_eq!(most.segment_count(), 21);
}

#[test]
fn the_host_issues_ahead_and_a_gap_is_between_kernels() {
    let limits = DeviceLimits { ahead: 1, gap: Duration::from_nanos(10), ..limits() };
    let kernels = [kernel(100, 1000, 72), kernel(100, 50, 72), kernel(100, 50, 72)];
    let mut device = ContendedDevice::new(limits, 1);
    device.launch(Time::ZERO, LaneId(0), 7, work(&kernels));
    // The second is issued while the first runs, and begins 10 after it. The third may be issued
    // only from 1100 on and is the bottleneck.
    assert_eq!(launch_ends(&drain(&mut device)), [(7, 1250)]);
    assert_eq!(work(&kernels).alone(&limits).as_nanos(), 1250);
    let waiting = DeviceLimits { ahead: 0, ..limits };
    assert_eq!(work(&kernels).alone(&waiting).as_nanos(), 1400, "without, each waits for its issue");
}

#[test]
fn small_demands_for_bandwidth_are_met_and_others_share_the_rest() {
    let drawing = |draw: u32| Kernel { draw: WHOLE_BANDWIDTH / 10 * draw, ..kernel(0, 900, 10) };
    let mut device = ContendedDevice::new(limits(), 3);
    device.set_units(Time::ZERO, 0, 36);
    device.set_units(Time::ZERO, 1, 36);
    for (lane, draw) in [2, 8, 8].into_iter().enumerate() {
        device.launch_in(Time::ZERO, lane % 2, LaneId(lane as u32), lane as u64, work(&[drawing(draw)]));
    }
    device.advance(Time::ZERO);
    assert!((0.999..=1.0).contains(&device.drawn_bandwidth()), "{}", device.drawn_bandwidth());
    // Across partitions too: 4 tenths are left for each of the two, half of their demand; alone
    // they have a tenth more.
    let ends = launch_ends(&drain(&mut device));
    assert_eq!((ends[0], ends[1].0, ends[2].0), ((0, 900), 1, 2));
    assert!(ends[1..].iter().all(|(_, end)| end.abs_diff(1_620) <= 2), "{ends:?}");
}

#[test]
fn kernels_disturb_each_other_inside_a_partition_and_not_across() {
    let limits = DeviceLimits { interference_permille: 1_000, ..limits() };
    let run = |partitions: &[u32], where_: [usize; 2]| {
        let mut device = ContendedDevice::new(limits, 2);
        partitions.iter().enumerate().for_each(|(partition, units)| device.set_units(Time::ZERO, partition, *units));
        for (lane, partition) in where_.into_iter().enumerate() {
            device.launch_in(Time::ZERO, partition, LaneId(lane as u32), lane as u64, work(&[kernel(0, 1000, 36)]));
        }
        launch_ends(&drain(&mut device))
    };
    // Another launch has half of the units: half as long again.
    assert!(run(&[72], [0, 0]).iter().all(|(_, end)| end.abs_diff(1500) <= 1));
    assert_eq!(run(&[36, 36], [0, 1]), [(0, 1000), (1, 1000)]);
}

#[test]
fn time_slices_give_all_units_to_one_after_another() {
    let limits = DeviceLimits { sharing: Sharing::TimeSliced, ..limits() };
    let mut device = ContendedDevice::new(limits, 2);
    let takes = SLICE.as_nanos() * 3 / 2;
    for lane in 0..2 {
        device.launch(Time::ZERO, LaneId(lane), u64::from(lane), work(&[kernel(0, takes, 10)]));
    }
    // One slice each, then the remaining half of each.
    let slice = SLICE.as_nanos();
    assert_eq!(launch_ends(&drain(&mut device)), [(0, slice * 5 / 2), (1, slice * 3)]);
}

fn kernels() -> impl Strategy<Value = Vec<(u64, u64, u32)>> {
    prop::collection::vec((0..200u64, 1..2000u64, 1..=UNITS), 1..6)
}

proptest! {
    /// Launches at random times on lanes of their own: none is faster than alone, unit-nanoseconds
    /// are conserved, all end.
    #[test]
    fn work_is_conserved_and_nothing_is_faster_than_alone(
        launches in prop::collection::vec((0..3000u64, 0..300u64, kernels()), 1..10),
        copies in prop::collection::vec((0..3000u64, any::<bool>(), 0..5000u64), 0..5),
        in_order in any::<bool>(),
    ) {
        let sharing = if in_order { Sharing::InOrder } else { Sharing::Proportional };
        let mut device = ContendedDevice::new(DeviceLimits { sharing, ..limits() }, launches.len());
        let mut events: Vec<_> = launches.iter().enumerate().map(|(lane, launch)| (launch.0, Ok(lane))).collect();
        events.extend(copies.iter().enumerate().map(|(index, copy)| (copy.0, Err(index))));
        events.sort_by_key(|(time, _)| *time);
        let (mut done, mut copied) = (Vec::new(), 0);
        let mut wanted = 0u128;
        let mut works = Vec::new();
        for (_, overhead, kernels) in &launches {
            let kernels: Vec<_> = kernels.iter().map(|(issue, run, units)| kernel(*issue, *run, *units)).collect();
            wanted += kernels.iter().map(|k| u128::from(k.units) * u128::from(k.run.as_nanos())).sum::<u128>();
            works.push(Work { overhead: Duration::from_nanos(*overhead), kernels, ..Work::default() });
        }
        for (time, what) in events {
            while let Some(next) = device.next_event().filter(|next| next.as_nanos() <= time) {
                prop_assert!(device.used_units() <= UNITS);
                done.extend(device.advance(next).into_iter().map(|completed| (next.as_nanos(), completed)));
            }
            match what {
                Ok(lane) => device.launch(at(time), LaneId(lane as u32), lane as u64, works[lane].clone()),
                Err(copy) => {
                    let direction = if copies[copy].1 { Direction::In } else { Direction::Out };
                    device.copy(at(time), direction, copy as u64, copies[copy].2);
                }
            }
        }
        done.extend(drain(&mut device));
        let ends = launch_ends(&done);
        copied += done.len() - ends.len();
        prop_assert_eq!((ends.len(), copied), (launches.len(), copies.len()));
        for (token, end) in ends {
            let lane = token as usize;
            let least = launches[lane].0 + works[lane].alone(&limits()).as_nanos();
            prop_assert!(end >= least, "launch {} ended at {}, alone at {}", lane, end, least);
        }
        // Each kernel ends on a whole nanosecond: up to one is rounded up with all units in use.
        let most = wanted + u128::from(UNITS) * works.iter().map(|work| work.kernels.len() as u128).sum::<u128>();
        let used = device.used_unit_nanos();
        prop_assert!(used + 1 >= wanted && used <= most, "{} unit-nanoseconds were used of {} to {}", used, wanted, most);
    }
}
