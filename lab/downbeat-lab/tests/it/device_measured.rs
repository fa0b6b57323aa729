//! Calibrations: measurements of an emulated device with known constants give these constants back.

use downbeat_lab::device::{
    Architecture, CalibratedModel, CalibratedPair, Calibration, EmulatedModel, MeasuredPoint, Platform, SegmentLaw,
    Sharing, slowdowns,
};
use proptest::prelude::*;

const UNITS: u32 = 132;

fn model(name: &str, segments: &[SegmentLaw]) -> CalibratedModel {
    let mut measured = Vec::new();
    for units in [8, 16, 32, 48, 64, 96, UNITS] {
        for batch in [1, 2, 4, 8, 16, 32] {
            let segments_us = segments.iter().map(|law| law.time_us(batch, units)).collect();
            measured.push(MeasuredPoint { batch, units, segments_us });
        }
    }
    CalibratedModel {
        name: name.to_owned(),
        measured_on: "known constants".to_owned(),
        input_bytes: 4,
        output_bytes: 4,
        launch_overhead_us: 0.0,
        worst_error: 0.0,
        segments: Vec::new(),
        measured,
    }
}

fn law(fixed_us: f64, work_us: f64, units_per_item: f64, most_units: f64) -> SegmentLaw {
    SegmentLaw { fixed_us, work_us, units_per_item, most_units }
}

fn is_close(found: f64, known: f64) -> bool {
    (found / known - 1.0).abs() < 0.01
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Within 1%, where the measurements reach both sides of the knee.
    #[test]
    fn known_constants_are_found_again(
        fixed in 50.0..500.0f64,
        work in 2_000.0..50_000.0f64,
        per_item in 4.0..30.0f64,
        most in 60.0..120.0f64,
    ) {
        let known = law(fixed, work, per_item, most);
        let mut calibration = Calibration::new("emulated", UNITS, 8);
        calibration.put_model(model("m", &[known]));
        calibration.fit().unwrap();
        let found = calibration.models[0].segments[0];
        prop_assert!(calibration.models[0].worst_error < 0.01, "{:?}", calibration.models[0].worst_error);
        prop_assert!(is_close(found.fixed_us, fixed), "{found:?} for {known:?}");
        prop_assert!(is_close(found.work_us, work), "{found:?} for {known:?}");
        prop_assert!(is_close(found.units_per_item, per_item), "{found:?} for {known:?}");
        prop_assert!(is_close(found.most_units, most), "{found:?} for {known:?}");
    }
}

/// 32 items use 64 units: the measurements cannot show a limit above that.
#[test]
fn constants_that_no_measurement_shows_are_taken_to_be_large() {
    let mut calibration = Calibration::new("emulated", UNITS, 8);
    calibration.put_model(model("m", &[law(50.0, 2_000.0, 2.0, 110.0)]));
    calibration.fit().unwrap();
    let found = calibration.models[0].segments[0];
    assert!(is_close(found.units_per_item, 2.0) && is_close(found.most_units, f64::from(UNITS)), "{found:?}");
}

/// Adds the times of pairs on a device with this sharing and crowding.
fn with_pairs(calibration: &mut Calibration, sharing: Sharing, crowding_permille: u32, issue_share: f64) {
    calibration.fit().unwrap();
    calibration.device.issue_share = issue_share;
    for batches in [[1, 1], [1, 8], [8, 1], [4, 16]] {
        let of = |name: &str, batch: u32| {
            let model = calibration.model(name, None).unwrap();
            let limits = downbeat_lab::device::DeviceLimits { sharing, crowding_permille, ..model.limits() };
            (model.work(downbeat_core::device::SegmentRange::new(0, 1), batch, 0, UNITS).kernels, limits)
        };
        let ((first, limits), (second, _)) = (of("a", batches[0]), of("b", batches[1]));
        let slow = slowdowns(limits, &[first, second]);
        let pair = CalibratedPair {
            models: ["a".to_owned(), "b".to_owned()],
            batches,
            alone_us: [100.0, 200.0],
            together_us: [100.0 * slow[0], 200.0 * slow[1]],
        };
        calibration.put_pair(pair);
    }
}

/// The search's step is 5 thousandths.
#[test]
fn sharing_and_crowding_are_found_again_from_pairs() {
    for (sharing, crowding, issue_share) in
        [(Sharing::InOrder, 40, 1.0), (Sharing::Proportional, 260, 0.5), (Sharing::InOrder, 0, 0.0)]
    {
        let mut calibration = Calibration::new("emulated", UNITS, 8);
        calibration.put_model(model("a", &[law(300.0, 8_000.0, 20.0, 132.0)]));
        calibration.put_model(model("b", &[law(150.0, 20_000.0, 30.0, 132.0)]));
        with_pairs(&mut calibration, sharing, crowding, issue_share);
        calibration.fit().unwrap();
        let device = &calibration.device;
        assert_eq!((device.sharing, device.issue_share), (sharing, issue_share));
        assert!(device.crowding_permille.abs_diff(crowding) <= 5, "{device:?}, known: {crowding}");
        assert!(device.pair_error.unwrap() < 0.01, "{device:?}");
    }
}

/// A network of many operators on a GPU of a paper, described by one segment and by six. Six
/// segments are no closer: each has steps of whole waves, which the law lacks and which the sum of
/// many operators smooths. TensorRT's convolutions by Winograd's algorithm fit less well. Their
/// blocks are four times as large. The part of their time that does not depend on the batch shrinks
/// with the units, unlike the law's fixed time.
#[test]
fn one_segment_or_six_describe_small_blocks_within_15_percent() {
    let error_with = |stages: usize, platform: Platform| {
        let mut measured = Vec::new();
        for units in [10, 20, 30, 40, 50, 60, 70, 80] {
            let whole = EmulatedModel::new(Architecture::ResNet50, platform);
            let boundaries = whole.segments(stages).unwrap();
            let operators = Architecture::ResNet50.operators(true, 0);
            for batch in [1, 2, 4, 8, 16, 32] {
                let time = |range: &[usize]| {
                    let kernels =
                        operators[range[0]..range[1]].iter().map(|operator| platform.kernel(operator, batch, units));
                    kernels.map(|kernel| (platform.gap + kernel.run).as_millis_f64() * 1e3).sum()
                };
                measured.push(MeasuredPoint { batch, units, segments_us: boundaries.windows(2).map(time).collect() });
            }
        }
        let mut calibration = Calibration::new("V100", 80, 1);
        calibration.put_model(CalibratedModel { measured, ..model("resnet50", &[]) });
        calibration.fit().unwrap();
        calibration.models[0].worst_error
    };
    let small = Platform { winograd_side: 1, winograd_items: 0.0, ..Platform::V100_TENSORRT };
    let (one, six) = (error_with(1, small), error_with(6, small));
    assert!(one < 0.15 && six < 0.15, "{six}, with one segment {one}");
    let (one, six) = (error_with(1, Platform::V100_TENSORRT), error_with(6, Platform::V100_TENSORRT));
    assert!((0.25..0.35).contains(&one) && (0.25..0.35).contains(&six), "{six}, with one segment {one}");
}

#[test]
fn a_file_is_read_as_it_was_written() {
    let mut calibration = Calibration::new("NVIDIA \"H200\"", UNITS, 8);
    calibration.put_model(model("a", &[law(300.0, 8_000.0, 20.0, 132.0), law(100.0, 900.0, 3.0, 64.0)]));
    calibration.put_model(model("b", &[law(150.0, 20_000.0, 30.0, 132.0)]));
    with_pairs(&mut calibration, Sharing::InOrder, 40, 1.0);
    calibration.fit().unwrap();
    let text = calibration.write().unwrap();
    assert_eq!(Calibration::read(&text).unwrap(), calibration, "{text}");
    let emulated = calibration.model("a", None).unwrap();
    let published = calibration.models[0].segments.iter().map(|law| law.time_us(4, UNITS)).sum::<f64>();
    assert!(is_close(emulated.time(4, 0).as_millis_f64() * 1e3, published));
    let part = calibration.model("a", Some(8)).unwrap();
    assert!(part.time(16, 0) > emulated.time(16, 0), "on fewer units");
}

#[test]
fn what_is_no_calibration_is_refused() {
    let refuses = |text: &str, expected: &str| {
        let error = Calibration::read(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refuses("", "missing field `device`");
    let device = |units: u32| {
        format!(
            "[device]\nname = \"g\"\nunits = {units}\ngrain = 8\nsharing = \"in-order\"\ncrowding_permille = 0\nissue_share = 1.0\n"
        )
    };
    refuses(&device(0), "device.units is 0; expected 1 to 65536");
    let model = |segment: &str| {
        let head = "[[model]]\nname = \"m\"\nmeasured_on = \"x\"\ninput_bytes = 1\noutput_bytes = 1\n";
        format!("{}{head}launch_overhead_us = 1.0\n{segment}", device(8))
    };
    refuses(&model(""), "model 'm' needs at least one [[model.segment]]");
    let segment = "[[model.segment]]\nfixed_us = nan\nwork_us = 1.0\nunits_per_item = 1.0\nmost_units = 8.0\n";
    refuses(&model(segment), "model 'm' needs at least one [[model.segment]]");
    let calibration = Calibration::read(&device(8)).unwrap();
    assert!(calibration.model("m", None).unwrap_err().to_string().contains("it has no model 'm'"));
    let other = calibration.check_device("g", 16).unwrap_err().to_string();
    assert!(other.contains("it is of g with 8 compute units, not of g with 16. Write another file"), "{other}");
}
