//! Abacus' claims on the emulated A100, with short runs and a perfect predictor.
//! `lab/docs/abacus.md` lists the claims that do not hold.

use downbeat_core::device::SegmentRange;
use downbeat_core::device::overlap::{GroupPart, Predictor};
use downbeat_core::{Duration, ModelId, RequestId};
use downbeat_lab::device::*;
use downbeat_sim::random;
use downbeat_training::{GroupSample, GroupSampler, SampledModel, mean_error, sets_of, train_mlp};

const ABACUS: OverlapServing = OverlapServing::Abacus { at_once: 4, worth: 0.0, by: PredictedBy::Oracle { bias: 1.0 } };

fn run(serving: OverlapServing, models: &[Architecture], rate: f64) -> OverlapReport {
    run_for(250, serving, models, rate)
}

fn run_for(queries: u32, serving: OverlapServing, models: &[Architecture], rate: f64) -> OverlapReport {
    let (models, platform, inputs) = (models.to_vec(), Platform::A100_CUDNN, OverlapInputs::Any);
    let run = OverlapRun { platform, models, serving, rate, queries, inputs, target_on: platform, seed: 1 };
    let report = run.play().unwrap();
    assert_eq!(report.in_time + report.late + report.dropped, queries, "every query is answered or dropped once");
    report
}

const PAIRS: [[Architecture; 2]; 3] = [
    [Architecture::ResNet50, Architecture::ResNet152],
    [Architecture::ResNet101, Architecture::InceptionV3],
    [Architecture::ResNet152, Architecture::Vgg19],
];

#[test]
fn models_have_as_many_operators_as_abacus_counts() {
    let counted = [18, 35, 52, 14, 19, 22, 12];
    for (architecture, count) in ABACUS_MODELS.into_iter().zip(counted) {
        let model = EmulatedModel::abacus(architecture, Platform::A100_CUDNN).unwrap();
        assert_eq!(model.segment_count(), count, "{architecture}");
        let whole = EmulatedModel::new(architecture, Platform::A100_CUDNN);
        assert_eq!(model.time(8, 32), whole.time(8, 32), "{architecture}: cuts change nothing of the whole");
    }
    assert!(EmulatedModel::abacus(Architecture::AlexNet, Platform::A100_CUDNN).is_err(), "none of theirs");
    assert!(EmulatedModel::abacus(Architecture::ResNet50, Platform::V100_TENSORRT).is_err(), "fused");
}

fn part(model: u32, range: (u16, u16), rows: u32) -> GroupPart {
    let operators = SegmentRange::new(range.0, range.1);
    GroupPart { request: RequestId(u64::from(model)), model: ModelId(model), operators, rows, length: 64 }
}

#[test]
fn the_oracle_says_what_a_group_takes_and_more_operators_take_longer() {
    let models: Vec<EmulatedModel> = [Architecture::ResNet50, Architecture::BertBase]
        .map(|model| EmulatedModel::abacus(model, Platform::A100_CUDNN).unwrap())
        .to_vec();
    let alone = models[0].time(8, 64);
    let oracle = Oracle::new(models, 1.0);
    let groups: Vec<Vec<GroupPart>> = (1..=12).map(|end| vec![part(0, (0, 18), 8), part(1, (0, end), 8)]).collect();
    let groups: Vec<&[GroupPart]> = groups.iter().map(Vec::as_slice).collect();
    let takes: Vec<Duration> = oracle.predict(&groups).into_iter().flatten().collect();
    assert_eq!(oracle.predict(&[&groups[0][..1]]), [Some(alone)]);
    assert!(takes.len() == 12 && takes.is_sorted() && takes[0] >= alone && takes[11] > takes[0], "{takes:?}");
}

#[test]
fn section_7_2_targets_are_twice_the_largest_query_alone() {
    let run = OverlapRun {
        platform: Platform::A100_CUDNN,
        models: ABACUS_MODELS.to_vec(),
        serving: ABACUS,
        rate: 1.0,
        queries: 1,
        inputs: OverlapInputs::Any,
        target_on: Platform::A100_CUDNN,
        seed: 1,
    };
    let targets: Vec<f64> = run.targets().unwrap().into_iter().map(Duration::as_millis_f64).collect();
    let alone = EmulatedModel::abacus(Architecture::ResNet152, Platform::A100_CUDNN).unwrap().time(32, 0);
    assert!((targets[2] / (2.0 * alone.as_millis_f64()) - 1.0).abs() < 1e-6, "{targets:?}");
    // Held out: §7.1 has 50 to 150 ms. The targets of ResNet-50 and BERT are shorter here.
    let within = targets.iter().filter(|target| (50.0..=150.0).contains(*target)).count();
    assert_eq!(within, 5, "{targets:?}");
}

#[test]
fn figure_15_fewer_violations_than_fcfs_sjf_and_edf_with_drop() {
    let baselines = [OverlapServing::Fcfs, OverlapServing::SJF, OverlapServing::Edf];
    let sum =
        |serving: OverlapServing| PAIRS.iter().map(|pair| run(serving.clone(), pair, 50.0).violations()).sum::<f64>();
    let abacus = sum(ABACUS);
    for baseline in baselines {
        let theirs = sum(baseline.clone());
        assert!(abacus < 0.9 * theirs, "{baseline:?}: {theirs:.2}, Abacus {abacus:.2}");
    }
}

#[test]
fn figure_14_abacus_answers_in_time_and_free_sharing_does_not() {
    for pair in PAIRS {
        // Of 250 queries the slowest 1% are three, and the margin has not settled.
        let [abacus, free] = [ABACUS, OverlapServing::Free].map(|serving| run_for(1_000, serving, &pair, 50.0));
        assert!(abacus.tail() < 1.1 && free.tail() > 1.2, "{pair:?}: {:.2}, free {:.2}", abacus.tail(), free.tail());
    }
}

#[test]
fn a_group_takes_the_oracles_time_but_for_the_noise_of_runs() {
    let report = run(ABACUS, &PAIRS[0], 120.0);
    let off = report.ratios.iter().map(|ratio| (ratio - 1.0).abs()).sum::<f64>() / report.ratios.len() as f64;
    assert!(report.ratios.len() > 30 && off < 0.05, "{off:.3} of {}", report.ratios.len());
}

#[test]
fn section_6_3_most_groups_under_load_are_decided_beside_the_one_before() {
    let stats = run(ABACUS, &PAIRS[0], 150.0).stats;
    assert!(stats.waited_for * 4 < stats.passes, "{stats:?}");
    assert!(stats.passes < 6 * stats.groups, "{stats:?}");
}

#[test]
fn a_biased_oracle_costs_little() {
    let of = |bias| {
        PAIRS.iter().map(move |pair| {
            let by = PredictedBy::Oracle { bias };
            run(OverlapServing::Abacus { at_once: 4, worth: 0.1, by }, pair, 80.0).violations()
        })
    };
    let right: f64 = of(1.0).sum();
    for bias in [0.5, 2.0] {
        let biased: f64 = of(bias).sum();
        assert!(biased < right + 3.0 * 0.03, "x{bias}: {biased:.3}, right {right:.3}");
    }
}

#[test]
fn equal_seeds_are_equal_runs() {
    assert_eq!(run(ABACUS, &PAIRS[1], 90.0), run(ABACUS, &PAIRS[1], 90.0));
}

#[test]
fn what_cannot_run_says_why() {
    let run = |models: Vec<Architecture>, rate| {
        let (platform, inputs) = (Platform::A100_CUDNN, OverlapInputs::Smallest);
        OverlapRun { platform, models, serving: ABACUS, rate, queries: 1, inputs, target_on: platform, seed: 1 }.play()
    };
    assert!(run(vec![], 1.0).is_err());
    assert!(run(vec![Architecture::UNet], 1.0).unwrap_err().to_string().contains("model of Abacus"));
    assert!(run(vec![Architecture::Vgg16], 0.0).is_err());
    assert!(run(vec![Architecture::Vgg16], 10.0).is_ok());
}

fn sets(count: usize) -> Vec<Vec<usize>> {
    sets_of(&[0, 1, 2, 3, 4, 5, 6], count)
}

#[test]
fn section_5_4_samples_are_groups_as_the_controller_makes_them() {
    for (at_once, count) in [(1, 7), (2, 21), (3, 35), (4, 35)] {
        let sets = sets(at_once);
        assert_eq!(sets.len(), count, "sets of {at_once}");
        let samples = draw_samples(Platform::A100_CUDNN, &sets, 3, (5, 2)).unwrap();
        assert_eq!(samples.len(), count * 3);
        let (layout, mut new) = (abacus_layout(at_once), 0);
        for GroupSample { features, takes_ms, set } in &samples {
            let bits: Vec<usize> = (0..7).filter(|model| features[*model] == 1.0).collect();
            assert_eq!(bits, sets[*set]);
            let is_done = |(slot, model): (usize, &usize)| {
                let (first, end) = (features[7 + 4 * slot], features[8 + 4 * slot]);
                assert!(first < end, "{features:?}");
                end == f32::from(layout.models[*model].operators)
            };
            assert!(sets[*set].iter().enumerate().map(is_done).filter(|done| *done).count() > 0, "one is done");
            new += (0..at_once).filter(|slot| features[7 + 4 * slot] == 0.0).count();
            assert!(*takes_ms > 0.0);
        }
        let share = new as f64 / (samples.len() * at_once) as f64;
        assert!(
            (0.4..0.75).contains(&share),
            "half of them begin with their first operator, and others by chance: {share}"
        );
        assert_eq!(samples, draw_samples(Platform::A100_CUDNN, &sets, 3, (5, 1)).unwrap(), "by the seed alone");
    }
    assert!(draw_samples(Platform::A100_CUDNN, &[vec![0, 7]], 1, (1, 1)).is_err(), "none of theirs");
}

#[test]
fn figure_10_a_perceptron_predicts_what_a_line_cannot() {
    let samples = draw_samples(Platform::A100_CUDNN, &sets(2), 60, (1, 1)).unwrap();
    let (test, training): (Vec<_>, Vec<_>) = samples.iter().enumerate().partition(|(index, _)| index % 5 == 0);
    let [test, training] = [test, training].map(|some| some.into_iter().map(|(_, one)| one).collect::<Vec<_>>());
    let (mlp, line) = (train_mlp(&training, 30, random(1, 0)).unwrap(), train_linear(&training));
    let off = mean_error(test.iter().copied(), |x| f64::from(mlp.infer(x)[0]));
    let off_line = mean_error(test.iter().copied(), |x| predict_linear(&line, x));
    assert!(off < 0.25 && off_line > 0.25 && off < 0.5 * off_line, "perceptron {off:.3}, line {off_line:.3}");
    assert_eq!(mlp, train_mlp(&training, 30, random(1, 0)).unwrap(), "by the seed alone");
}

#[test]
fn support_vectors_follow_what_is_no_line_within_what_costs_nothing() {
    let sample = |x: f32| GroupSample { features: vec![x], takes_ms: 20.0 + f64::from((3.0 * x).sin()), set: 0 };
    let samples: Vec<_> = (0..60).map(|index| sample(index as f32 / 15.0)).collect();
    let vectors = SupportVectors::train(&samples.iter().collect::<Vec<_>>());
    for at in [0.31, 1.57, 2.22, 3.4] {
        let sample = sample(at);
        let off = (vectors.predict(&sample.features) - sample.takes_ms).abs();
        assert!(off < 0.2, "at {at}: {off}");
    }
}

#[test]
fn a_trained_predictor_says_how_far_it_is_off_and_serves_a_run() {
    let trained = TrainedPredictor::train(Platform::A100_CUDNN, (&[0, 2, 5], 2), 150, (1, 2)).unwrap();
    assert_eq!(trained.samples, 6 * 150, "three models alone and three pairs");
    assert!(trained.mean_error < 0.2 && trained.error > trained.mean_error, "{trained:?}");
    let by = PredictedBy::Trained(std::sync::Arc::new(trained));
    let serving = OverlapServing::Abacus { at_once: 4, worth: 0.0, by };
    // The order of models is not the predictor's.
    let report = run(serving.clone(), &[Architecture::Vgg19, Architecture::ResNet50], 100.0);
    let off = report.ratios.iter().map(|ratio| (ratio - 1.0).abs()).sum::<f64>() / report.ratios.len() as f64;
    assert!(report.ratios.len() > 20 && off < 0.25, "{off:.3} of {}", report.ratios.len());
    let baseline = run(OverlapServing::Fcfs, &[Architecture::Vgg19, Architecture::ResNet50], 100.0);
    assert!(report.violations() < baseline.violations(), "{:.3}", report.violations());
    // The predictor was not trained for this model, so queries run one at a time.
    let other = run(serving, &[Architecture::Vgg16, Architecture::ResNet50], 100.0);
    assert_eq!((other.stats.together, other.ratios.len()), (0, 0));
}

#[test]
fn a_line_is_found_where_there_is_one() {
    let sample = |x: f32, y: f32| GroupSample { features: vec![x, y], takes_ms: f64::from(9.0 + 2.0 * x - y), set: 0 };
    let samples: Vec<_> = (0..40).map(|index| sample((index % 7) as f32, (index % 5) as f32)).collect();
    let line = train_linear(&samples.iter().collect::<Vec<_>>());
    assert!(mean_error(&samples, |x| predict_linear(&line, x)) < 1e-3, "{line:?}");
}

#[test]
fn a_training_on_nothing_or_on_what_is_no_number_says_so() {
    assert!(train_mlp(&[], 1, random(1, 0)).is_err());
    let bad = GroupSample { features: vec![1.0, f32::NAN], takes_ms: 3.0, set: 0 };
    let message = train_mlp(&[&bad], 1, random(1, 0)).unwrap_err().to_string();
    assert!(message.ends_with("train it again"), "{message}");
    let platform = Platform::V100_TENSORRT;
    assert!(TrainedPredictor::train(platform, (&[0, 1], 2), 1, (1, 1)).is_err(), "none of Abacus' devices");
}

#[test]
fn section_7_5_an_instance_has_its_part_of_the_device() {
    let whole = EmulatedModel::abacus(Architecture::ResNet152, Platform::A100_CUDNN).unwrap().time(32, 0);
    let on = |units, memory| {
        EmulatedModel::abacus(Architecture::ResNet152, Platform::a100_instance(units, memory)).unwrap().time(32, 0)
    };
    let times = [on(4, 4), on(2, 2), on(1, 1)].map(|takes| takes.as_secs_f64() / whole.as_secs_f64());
    assert!(times[0] > 1.5 && times[0] < 2.2, "{times:?}");
    assert!(times[1] > 1.7 * times[0] && times[2] > 1.7 * times[1], "half of it takes nearly twice as long: {times:?}");
}

fn cluster(by: SpreadBy, serving: OverlapServing, devices: usize, rate: f64) -> OverlapReport {
    let platform = Platform::A100_CUDNN;
    let (models, inputs) = (vec![Architecture::ResNet50, Architecture::BertBase], OverlapInputs::Any);
    let run = OverlapRun { platform, models, serving, rate, queries: 400, inputs, target_on: platform, seed: 3 };
    let target = Duration::from_millis(100);
    let report =
        OverlapCluster { run, devices, target, popularity: downbeat_sim::Popularity::Equal, by }.play().unwrap();
    assert_eq!(report.in_time + report.late + report.dropped, 400, "every query is answered or dropped once");
    report
}

#[test]
fn section_7_6_clockwork_drops_and_more_devices_answer_more() {
    let clockwork = |devices| cluster(SpreadBy::Clockwork, OverlapServing::Fcfs, devices, 900.0);
    let (few, many) = (clockwork(2), clockwork(4));
    // A launch deviates by 4.1%: requests that began with no time to spare may be late.
    assert!(few.late < 30 && few.dropped > 40, "{} late, {} dropped", few.late, few.dropped);
    assert!(many.in_time > few.in_time, "{} of {}", many.in_time, few.in_time);
    let abacus = |devices| cluster(SpreadBy::Turn, ABACUS, devices, 900.0);
    assert!(abacus(4).in_time > abacus(2).in_time);
    assert_eq!(clockwork(3), clockwork(3), "by the seed alone");
}

/// Abacus §5.4, figure 9.
#[test]
fn groups_follow_from_seed_and_index_and_one_of_their_models_is_done() {
    let model = |operators| SampledModel { operators, rows: vec![1, 8], lengths: Vec::new() };
    let with_length = SampledModel { lengths: vec![16, 64], ..model(1) };
    let sets = vec![vec![0], vec![1], vec![0, 1], vec![0, 1, 2]];
    let sampler = GroupSampler { models: vec![model(5), with_length, model(3)], sets };
    let (mut firsts, mut ends, mut done) = ([0; 5], [0; 6], [0; 4]);
    for index in 0..2_000 {
        let (set, group) = sampler.group(index, random(7, index)).unwrap();
        assert_eq!(sampler.group(index, random(7, index)), Some((set, group.clone())));
        assert_eq!(group.iter().map(|part| part.model.0 as usize).collect::<Vec<_>>(), sampler.sets[set]);
        let of = |part: &GroupPart| &sampler.models[part.model.0 as usize];
        let is_done = |part: &&GroupPart| part.operators.end == of(part).operators;
        assert!(group.iter().any(|part| is_done(&part)), "{group:?}");
        done[group.iter().filter(is_done).count()] += 1;
        for part in &group {
            assert!(part.operators.first < part.operators.end && part.operators.end <= of(part).operators);
            if part.model.0 == 0 {
                firsts[usize::from(part.operators.first)] += 1;
                ends[usize::from(part.operators.end)] += 1;
            }
            assert!(of(part).rows.contains(&part.rows));
            assert!(of(part).lengths.contains(&part.length) || part.length == 0 && of(part).lengths.is_empty());
        }
    }
    assert!(firsts[1..].iter().all(|count| *count > 50), "others go on anywhere: {firsts:?}");
    assert!(firsts[0] > firsts[1..].iter().sum(), "newcomers begin with their first operator: {firsts:?}");
    assert!(ends[1..].iter().all(|count| *count > 20) && ends[5] > ends[1..5].iter().sum(), "{ends:?}");
    assert!(done[1] > 100 && done[2] > 100 && done[3] > 50, "one of them is done, or several: {done:?}");
    assert_eq!(GroupSampler { sets: Vec::new(), ..sampler }.group(3, random(7, 3)), None);
}
