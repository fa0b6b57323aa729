//! A device that launches share: nothing is faster than alone, nothing is lost, and no more is used than there is.

use downbeat_core::device::{LaneId, SegmentRange};
use downbeat_core::{Duration, Time};
use downbeat_sim::device::{
    Architecture, Completed, ContendedDevice, DeviceLimits, Direction, EmulatedModel, Kernel, Platform, Sharing, Work,
    measure_mix,
};
use proptest::prelude::*;

const UNITS: u32 = 72;

fn limits() -> DeviceLimits {
    DeviceLimits {
        units: UNITS,
        sharing: Sharing::Proportional,
        crowding_permille: 25,
        copy_bytes_per_second: 1e9,
        copy_fixed: Duration::from_nanos(100),
    }
}

fn kernel(issue: u64, run: u64, units: u32) -> Kernel {
    Kernel { issue: Duration::from_nanos(issue), run: Duration::from_nanos(run), units }
}

fn work(kernels: &[Kernel]) -> Work {
    Work { overhead: Duration::ZERO, kernels: kernels.to_vec() }
}

fn at(ns: u64) -> Time {
    Time::from_nanos(ns)
}

/// Runs until nothing is under way: what is done when.
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
    // 108 units are wanted: two thirds of the speed until the first is done at 1500, 2000 are left of the other.
    assert_eq!(launch_ends(&drain(&mut device)), [(7, 1500), (8, 3500)]);
}

#[test]
fn in_order_the_first_takes_what_it_can_use_and_the_rest_is_left_over() {
    let mut device = ContendedDevice::new(DeviceLimits { sharing: Sharing::InOrder, ..limits() }, 3);
    device.launch(Time::ZERO, LaneId(0), 7, work(&[kernel(0, 1000, 60)]));
    device.launch(Time::ZERO, LaneId(1), 8, work(&[kernel(0, 1000, 24), kernel(0, 500, 72)]));
    device.launch(Time::ZERO, LaneId(2), 9, work(&[kernel(0, 1000, 72)]));
    // 12 of 24 units are left for the second until 1000, when half of it is done; the third gets nothing until then and two thirds of the
    // units after. At 1500 it has the device, 667 of it are left; the second's other kernel waits behind it.
    assert_eq!(launch_ends(&drain(&mut device)), [(7, 1000), (9, 2167), (8, 2667)]);
}

#[test]
fn issuing_is_shared_and_crowding_slows_it_down() {
    let mut device = ContendedDevice::new(DeviceLimits { crowding_permille: 500, ..limits() }, 2);
    device.launch(Time::ZERO, LaneId(0), 7, work(&[kernel(1000, 10, 1)]));
    device.launch(Time::ZERO, LaneId(1), 8, work(&[kernel(1000, 10, 1)]));
    // Two share, and each costs half as much again: 1000 * 2 * 1.5.
    assert_eq!(launch_ends(&drain(&mut device)), [(7, 3010), (8, 3010)]);
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
        device.launch(at(5), LaneId(0), 0, model.work(SegmentRange::new(0, 1), 3, 17));
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
        let overhead = Platform::TITAN_TENSORRT.launch_overhead.as_nanos();
        assert_eq!(profile.total(32, 64).as_nanos(), whole + 3 * overhead, "{architecture}");
        for stage in 0..4 {
            let share = profile.time(stage, 32, 64).as_nanos() as f64 / whole as f64;
            assert!((0.12..0.40).contains(&share), "{architecture}: stage {stage} takes {share:.2} of the time");
        }
    }
}

#[test]
fn more_stages_than_operators_and_none_are_errors_that_say_how_many_there_are() {
    for stages in [0, 10_000] {
        let error = EmulatedModel::staged(Architecture::Vgg16, Platform::TITAN_TENSORRT, stages).unwrap_err();
        assert!(error.to_string().contains("can be cut into 1 to 21 stages"), "{error}");
        assert!(error.to_string().contains("can be cut into 1 to 21 stages"), "{error}");
    }
    let most = EmulatedModel::staged(Architecture::Vgg16, Platform::TITAN_TENSORRT, 21).unwrap();
    assert_eq!(most.segment_count(), 21);
}

/// E²bird figure 12 and table 4: what is best for ResNet152 and 32 items, in rank and order of magnitude.
#[test]
fn e2bird_section_7_3_1_figure_12_a_few_large_batches_are_best_and_many_small_ones_are_four_times_as_slow() {
    let model = EmulatedModel::new(Architecture::ResNet152, Platform::TITAN_CUDNN);
    let mean = |mix: &str| measure_mix(&model, &mix.parse().unwrap()).mean.as_millis_f64();
    let (few, one, many) = (mean("8,8,16"), mean("32"), mean(&["1"; 32].join(",")));
    assert!(few < one * 0.97, "8,8,16 take {few:.1}, one of 32 {one:.1} ms (published: 85.3 and 93.7)");
    assert!((3.5..4.5).contains(&(many / few)), "32 of one take {many:.1} ms (published: four times the best)");
    assert!(mean("4,4,8") < mean("16"), "table 4's mix for 16 items is better than one batch");
    assert!(mean("4") <= mean("1,1,2"), "and 4 items are best together");
}

fn kernels() -> impl Strategy<Value = Vec<(u64, u64, u32)>> {
    prop::collection::vec((0..200u64, 1..2000u64, 1..=UNITS), 1..6)
}

proptest! {
    /// Launches at random times on lanes of their own: none is faster than alone, unit-nanoseconds are conserved, all end.
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
            works.push(Work { overhead: Duration::from_nanos(*overhead), kernels });
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
            let least = launches[lane].0 + works[lane].alone().as_nanos();
            prop_assert!(end >= least, "launch {} ended at {}, alone at {}", lane, end, least);
        }
        // Each kernel ends on a whole nanosecond: up to one is rounded up with all units in use.
        let most = wanted + u128::from(UNITS) * works.iter().map(|work| work.kernels.len() as u128).sum::<u128>();
        let used = device.used_unit_nanos();
        prop_assert!(used + 1 >= wanted && used <= most, "{} unit-nanoseconds were used of {} to {}", used, wanted, most);
    }
}
