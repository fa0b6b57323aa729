//! GSLICE's claims on the emulated V100, with short runs. `lab/docs/gslice.md` lists the claims
//! that do not hold.

use downbeat_core::device::spatial::{ShareReason, SpatialOptions};
use downbeat_core::{Duration, Time};
use downbeat_lab::device::*;

fn make(name: &str) -> Figure {
    Figure::make(name, &FigureOptions { requests: 300, ..FigureOptions::default() }).unwrap()
}

/// The rows of a figure that begin with these cells.
fn rows<'a>(figure: &'a Figure, first: &[&str]) -> Vec<&'a Vec<String>> {
    let rows: Vec<_> =
        figure.table.iter().filter(|row| row.iter().zip(first).all(|(cell, text)| cell == text)).collect();
    assert!(!rows.is_empty(), "{first:?}: {figure}");
    rows
}

fn number(cell: &str) -> f64 {
    let digits = |c: char| !c.is_ascii_digit() && !matches!(c, '.' | '-');
    cell.split(digits).find(|text| !text.is_empty()).unwrap().parse().unwrap()
}

#[test]
fn figure_1_shares_beat_free_sharing_and_turns_in_throughput() {
    let figure = make("gslice-1");
    let last = |mode: &str| rows(&figure, &[mode, "3"])[0].clone();
    let (turns, free, shares) = (last("no MPS"), last("default MPS"), last("25/25/50%"));
    let all = |row: &[String]| number(&row[8]);
    assert!(all(&shares) > 1.3 * all(&free) && all(&shares) > 1.3 * all(&turns), "{figure}");
    let alone = rows(&figure, &["25/25/50%", "1"])[0];
    assert!((number(&alone[3]) / number(&shares[3]) - 1.0).abs() < 0.05, "others do not matter: {figure}");
    let alone = rows(&figure, &["default MPS", "1"])[0];
    assert!(number(&free[3]) > 2.0 * number(&alone[3]), "they do: {figure}");
    assert!(number(&free[6]) > 1.5 * number(&turns[6]), "the heavy model gets most: {figure}");
}

#[test]
fn figures_2_and_3_knees_differ_by_model_and_grow_with_the_batch() {
    let figure = make("gslice-2");
    let knee = |model: &str| number(&rows(&figure, &[model])[0][9]);
    // 30%, 60% and 70% in the paper. The order holds, the shares at 95% of the throughput do not.
    assert!(knee("alexnet") < knee("resnet50") && knee("resnet50") < knee("vgg19"), "{figure}");
    let figure = make("gslice-3");
    let knees: Vec<f64> = figure.table[1..].iter().map(|row| number(&row[9])).collect();
    assert!(knees.is_sorted() && knees[0] < knees[4], "{figure}");
}

#[test]
fn figure_5a_a_second_stream_helps_and_costs_latency() {
    let figure = make("gslice-5a");
    let [one, two] = ["1", "2"].map(|count| rows(&figure, &["1", count])[0].clone());
    // 1.66 in the paper.
    assert!((1.39..=1.85).contains(&(number(&two[2]) / number(&one[2]))), "{figure}");
    assert!(number(&two[3]) > number(&one[3]), "{figure}");
}

#[test]
fn figures_5b_and_5c_each_stream_idles_between_runs_and_two_use_more() {
    let figure = make("gslice-5b");
    let (one, two) = (rows(&figure, &["5b"]), rows(&figure, &["5c"]));
    for row in one.iter().chain(&two) {
        // 700 us after a run, and the launch of the next run.
        assert!((700.0..760.0).contains(&number(&row[5])), "{figure}");
    }
    assert!(two.len() == 2 && number(&two[0][6]) < 0.9 * number(&one[0][6]), "{figure}");
}

/// The paper's kernels do not overlap in streams. The emulated device's kernels do (see
/// lab/docs/gslice.md).
#[test]
fn figures_6_and_7_models_overlap_in_streams_too() {
    let figure = make("gslice-6");
    let of = |number_of: &str, model: &str| {
        rows(&figure, &[number_of]).into_iter().find(|row| row[2] == model).unwrap().clone()
    };
    let (streams, shares) = (of("6", "alexnet"), of("7", "alexnet"));
    assert!(number(&streams[7]) > 60.0 && number(&shares[7]) > number(&streams[7]), "{figure}");
    assert!(number(&of("7", "resnet50")[4]) < number(&of("6", "resnet50")[4]), "shares keep the latency: {figure}");
    assert!(number(&shares[4]) > number(&streams[4]), "but on 30% AlexNet takes longer: {figure}");
}

#[test]
fn figures_8_and_9_batches_within_the_slo_double_the_throughput() {
    let figure = make("gslice-8");
    for model in ["alexnet", "mobilenet", "resnet50", "vgg19", "vgg16"] {
        let row = rows(&figure, &[model, "GSLICE"])[0];
        assert!(number(&row[6]) >= 2.0 && number(&row[4]) <= 25.0, "{figure}");
        let [base, slab] = ["default MPS", "MPS+SLAB"].map(|mode| rows(&figure, &[model, mode])[0]);
        // Mobilenet takes nearly as long for each image of a batch.
        assert!(model == "mobilenet" || number(&row[7]) > number(&base[7]), "by GUE, too: {figure}");
        assert!(number(&row[3]) > number(&slab[3]), "copies beside computing and a second stream: {figure}");
    }
    assert_eq!(rows(&figure, &["mobilenet", "GSLICE"])[0][2], "2", "streams: {figure}");
}

#[test]
fn figure_10_shares_beat_default_mps_and_heavy_models_hold_up_no_light() {
    let figure = make("gslice-10");
    for combination in ["C1", "C2", "C3", "C4"] {
        let [free, slab, gslice] =
            ["default MPS", "MPS+SLAB", "GSLICE"].map(|mode| rows(&figure, &[combination, mode])[0].clone());
        assert!(number(&gslice[6]) >= 5.0 * number(&free[6]), "{figure}");
        // The sum of all images/s is lower than under MPS+SLAB, where AlexNet gets all that it can
        // use. With VGG-19 beside it, ResNet-50 gets next to nothing under MPS+SLAB.
        if combination != "C2" {
            let ms = number(gslice[3].split('(').nth(1).unwrap());
            assert!(ms <= 25.0, "ResNet-50 keeps its SLO in {combination}: {figure}");
            let more = if combination == "C1" { 1.3 } else { 5.0 };
            assert!(number(&gslice[3]) > more * number(&slab[3]), "ResNet-50 in {combination}: {figure}");
        }
    }
}

#[test]
fn figures_12c_and_14_slab_settles_in_500_ms_and_beats_clipper() {
    let figure = make("gslice-14");
    for slo in ["25", "35", "50", "75", "100"] {
        let [slab, code, paper] =
            ["SLAB", "Clipper's code", "Clipper's paper"].map(|rule| rows(&figure, &[slo, rule])[0]);
        assert!(number(&slab[5]) < 500.0 && number(&slab[5]) < number(&code[5]), "{figure}");
        assert!(number(&slab[3]) <= number(slo) && number(&slab[2]) > number(&code[2]), "{figure}");
        // Growing the batch by one until it is late gives a higher rate, with many late answers. At
        // 100 ms no batch was late in so short a run.
        assert!(slo == "100" || paper[8].starts_with('+') && number(&paper[2]) > number(&slab[2]), "{figure}");
    }
    assert!(number(&rows(&figure, &["100", "Clipper's paper"])[0][5]) > 1_000.0, "{figure}");
    assert_eq!(figure.to_string(), make("gslice-14").to_string(), "it follows from its seed");
}

#[test]
fn figure_15_a_new_model_waits_for_the_room_of_another() {
    let figure = make("gslice-15");
    let of = |mode: &str, model: &str| -> Vec<Vec<String>> {
        rows(&figure, &[mode]).into_iter().filter(|row| row[2] == model).cloned().collect()
    };
    let (gslice, free) = (of("GSLICE", "vgg19"), of("SLAB on default MPS", "vgg19"));
    assert_eq!(gslice[1][6], "30%", "{figure}");
    assert_eq!(gslice.last().unwrap()[6], "100%", "{figure}");
    // Both models run, each in its share: under free sharing VGG-19 has only batches of one.
    assert!(number(&gslice[1][3]) > 1.5 * number(&free[1][3]), "{figure}");
    assert!(number(&gslice.last().unwrap()[3]) > 5.0 * number(&gslice[1][3]), "{figure}");
}

#[test]
fn figure_16_shares_tune_themselves_and_service_goes_on_meanwhile() {
    let slo = Duration::from_millis(50);
    let seconds = |n: u64| Duration::from_millis(n * 1_000);
    let model = |architecture, prepares| SharingModel {
        load: SharingLoad::Even(35.0),
        prepares: seconds(prepares),
        ..SharingModel::new(architecture, slo, BatchedBy::Fixed(1))
    };
    let models = vec![model(Architecture::ResNet50, 5), model(Architecture::Vgg19, 12)];
    let shared = SharedBy::Gslice(SpatialOptions { spread: false, reserve: 0.0, ..SpatialOptions::new(80, 1) });
    let run = SpatialRun { platform: Platform::V100_TENSORRT, shared, models, span: seconds(20), seed: 1 };
    let mut restarted = run.clone();
    restarted.models.iter_mut().for_each(|model| model.restarts = true);
    let reports = run.play().unwrap();
    let at = |n: u64| Time::ZERO + seconds(n);
    let [resnet, vgg] = &reports[..] else { panic!("two models") };
    // 8% and 60% in the paper, where VGG-19 is slower on 30%.
    assert_eq!(resnet.shares[..2], [(at(0), 24), (at(7), 7)], "ready 5 s after the first look");
    let (changed, share) = vgg.shares[1];
    assert!(changed == at(14) && (32..=48).contains(&share), "{:?}", vgg.shares);
    assert!(matches!(vgg.asked[1].2, ShareReason::TooSmall { .. }) && resnet.asked[1].2 == ShareReason::TooLarge);
    let ((before, _), (after, ms)) = (vgg.within(at(0), at(14)), vgg.within(at(15), at(20)));
    // The paper's system answers all requests; here the lack is less than the 5% at which a share
    // changes.
    assert!(before < 28.0 && after >= 0.95 * 35.0 && ms < 50.0, "{before}, {after}, {ms}");
    let (rate, ms) = resnet.within(at(1), at(20));
    assert!((rate - 35.0).abs() < 0.5 && ms < 50.0, "{rate}, {ms}");
    // The change happens between two launches. Without standby lanes, the pause lasts as long as
    // making new lanes.
    assert!(vgg.longest_pause(at(0), at(20)) < Duration::from_millis(60), "never without service");
    let paused = |report: &SharingReport| report.longest_pause(at(0), at(20)).as_millis_f64();
    let restarted = restarted.play().unwrap();
    let pauses = [paused(&restarted[0]), paused(&restarted[1])];
    assert!((5_000.0..5_100.0).contains(&pauses[0]) && (12_000.0..12_100.0).contains(&pauses[1]), "{pauses:?}");
}

#[test]
fn a_reserve_answers_bursts_in_time_and_an_exact_share_does_not() {
    let slo = Duration::from_millis(50);
    let attained = |reserve| {
        let load = SharingLoad::Poisson(60.0);
        let model = SharingModel { load, ..SharingModel::new(Architecture::ResNet50, slo, BatchedBy::Fixed(1)) };
        let model = SharingModel { prepares: Duration::from_millis(100), ..model };
        let hold_down = Duration::from_millis(2_000);
        let options = SpatialOptions { reserve, hold_down, spread: false, ..SpatialOptions::new(80, 1) };
        let shared = SharedBy::Gslice(options);
        let (platform, span) = (Platform::V100_TENSORRT, Duration::from_millis(30_000));
        let reports = SpatialRun { platform, shared, models: vec![model], span, seed: 1 }.play().unwrap();
        let [from, until] = [10_000, 29_900].map(|ms| Time::ZERO + Duration::from_millis(ms));
        reports[0].attained(from, until, slo)
    };
    let (with, without) = (attained(0.25), attained(0.0));
    assert!(with > without + 0.1, "{with}, {without}");
}

/// The throughput of two streams is measured over the time in which either runs.
#[test]
fn a_model_with_two_streams_does_not_shrink_as_if_both_always_ran() {
    let slo = Duration::from_millis(25);
    let model = SharingModel {
        load: SharingLoad::Poisson(160.0),
        knee: Some(24),
        prepares: Duration::from_millis(500),
        streams: 2,
        ..SharingModel::new(Architecture::ResNet50, slo, BatchedBy::Slab)
    };
    let shared = SharedBy::Gslice(SpatialOptions { spread: false, ..SpatialOptions::new(80, 1) });
    let (platform, span) = (Platform::V100_TENSORRT, Duration::from_millis(14_000));
    let reports = SpatialRun { platform, shared, models: vec![model], span, seed: 1 }.play().unwrap();
    let [from, until] = [1_000, 13_900].map(|ms| Time::ZERO + Duration::from_millis(ms));
    let attained = reports[0].attained(from, until, slo + slo);
    assert!(attained > 0.95, "{attained}: {:?}", reports[0].asked);
}
