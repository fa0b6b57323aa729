//! Abacus' parts by themselves: the search compared with all possible groups, figures 8 and 12, the
//! perceptron, margins.

use downbeat_core::device::SegmentRange;
use downbeat_core::device::overlap::*;
use downbeat_core::{Duration, ModelId, RequestId};
use proptest::prelude::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn part(model: u32, first: u16, end: u16) -> GroupPart {
    let operators = SegmentRange::new(first, end);
    GroupPart { request: RequestId(u64::from(model)), model: ModelId(model), operators, rows: 1, length: 0 }
}

/// Milliseconds by model and operator; each shorter request adds a share of its time to the
/// longest.
struct Table {
    operators: Vec<Vec<u64>>,
    share: u64,
}

impl Table {
    fn takes(&self, group: &[GroupPart]) -> Duration {
        let of = |part: &GroupPart| {
            let range = usize::from(part.operators.first)..usize::from(part.operators.end);
            self.operators[part.model.0 as usize][range].iter().sum::<u64>()
        };
        let (longest, all) = (group.iter().map(of).max().unwrap(), group.iter().map(of).sum::<u64>());
        Duration::from_micros(longest * 1000 + (all - longest) * 10 * self.share)
    }
}

impl Predictor for Table {
    fn predict(&self, groups: &[&[GroupPart]]) -> Vec<Option<Duration>> {
        groups.iter().map(|group| Some(self.takes(group))).collect()
    }
}

fn search(predictor: &Table, ways: usize) -> GroupSearch<'_, Table> {
    GroupSearch { predictor, margins: None, ways }
}

#[test]
fn figure_12_all_of_q3_and_q2_and_the_first_two_operators_of_q1() {
    // q3 takes 10 of the 25 ms, with q2 15; each operator of q1 takes 5 more.
    let table = Table { operators: vec![vec![5; 4], vec![1, 1, 1, 2], vec![5; 2]], share: 100 };
    let queries = [part(2, 0, 2), part(1, 0, 4), part(0, 0, 4)];
    let found = search(&table, 3).find(&queries, ms(25));
    assert_eq!(found.parts, [part(2, 0, 2), part(1, 0, 4), part(0, 0, 2)]);
    assert_eq!(found.predicted, Some(ms(25)), "none of the headroom is left");
    assert_eq!(found.passes, 2, "among queries, then among operators");
}

#[test]
fn section_6_2_who_does_not_fit_alone_is_in_no_group() {
    let table = Table { operators: vec![vec![5; 4], vec![1]], share: 100 };
    assert_eq!(search(&table, 4).find(&[part(0, 0, 4), part(1, 0, 1)], ms(19)).parts, []);
    assert_eq!(
        search(&table, 4).find(&[part(0, 1, 4), part(1, 0, 1)], ms(19)).parts.len(),
        2,
        "what is left of it does"
    );
}

/// All groups among which the search chooses: some requests whole, then some operators of the next.
fn groups(candidates: &[GroupPart]) -> Vec<Vec<GroupPart>> {
    let mut groups = Vec::new();
    for (whole, next) in candidates.iter().enumerate() {
        for end in next.operators.first + 1..=next.operators.end {
            if whole > 0 || end == next.operators.end {
                let operators = SegmentRange { end, ..next.operators };
                groups.push([&candidates[..whole], &[GroupPart { operators, ..*next }]].concat());
            }
        }
    }
    groups
}

proptest! {
    #[test]
    fn the_search_finds_the_largest_group_that_fits(
        operators in prop::collection::vec(prop::collection::vec(0..9u64, 1..13), 1..6),
        skipped in prop::collection::vec(0..12u16, 5),
        share in 0..200u64,
        headroom in 1..120u64,
        ways in 1..8usize,
    ) {
        let candidates: Vec<GroupPart> = operators.iter().zip(&skipped).zip(0..).map(|((operators, skipped), model)| {
            let end = operators.len() as u16;
            part(model, (*skipped).min(end - 1), end)
        }).collect();
        let table = Table { operators, share };
        let all = groups(&candidates);
        let best = all.iter().rfind(|group| table.takes(group) <= ms(headroom));
        let found = search(&table, ways).find(&candidates, ms(headroom));
        let fits = all.iter().map(|group| table.takes(group) <= ms(headroom));
        if fits.clone().is_sorted_by(|a, b| a >= b) {
            prop_assert_eq!(found.parts.as_slice(), best.map_or(&[][..], Vec::as_slice));
        }
        if !found.parts.is_empty() {
            prop_assert_eq!(found.predicted, Some(table.takes(&found.parts)));
            prop_assert!(table.takes(&found.parts) <= ms(headroom), "whatever the predictor says, the group was said to fit");
        }
    }
}

#[test]
fn section_6_3_a_multi_way_search_takes_a_logarithm_of_passes() {
    for most in 0..60 {
        for ways in 1..9 {
            for largest in 0..=most {
                let mut passes = 0;
                let found = multi_way(most, ways, |tries| {
                    passes += 1;
                    assert!(tries.len() <= ways && tries.is_sorted_by(|a, b| a < b), "{tries:?}");
                    tries.iter().map(|count| *count <= largest).collect()
                });
                assert_eq!(found, largest, "of {most} by {ways} ways");
                let most_passes = ((most + 1) as f64).ln() / ((ways + 1) as f64).ln();
                assert!(f64::from(passes) <= most_passes.ceil() + 1e-9, "{passes} passes, {most} by {ways} ways");
            }
        }
    }
}

#[test]
fn section_7_7_four_ways_search_52_operators_in_three_passes() {
    let table = Table { operators: vec![vec![1; 52], vec![1; 18]], share: 100 };
    let found = search(&table, 4).find(&[part(1, 0, 18), part(0, 0, 52)], ms(47));
    assert_eq!((found.parts[1], found.passes), (part(0, 0, 29), 4), "one among requests, three among operators");
}

fn layout(models: u32, at_once: usize) -> FeatureLayout {
    let models = (0..models).map(|model| FeatureModel { model: ModelId(model), operators: 52 }).collect();
    FeatureLayout { models, at_once }
}

#[test]
fn figure_8_features_are_a_bit_a_model_and_four_numbers_a_member() {
    let layout = layout(7, 2);
    assert_eq!(layout.len(), 7 + 4 * 2);
    let mut features = Vec::new();
    let bert = GroupPart { rows: 16, length: 64, ..part(6, 3, 12) };
    let resnet = GroupPart { rows: 32, ..part(1, 0, 35) };
    assert!(layout.extend(&mut features, &[bert, resnet]));
    let expected = [0, 1, 0, 0, 0, 0, 1, 0, 35, 32, 0, 3, 12, 16, 64].map(|number| number as f32);
    assert_eq!(features, expected, "in the order of models, not of urgency");
    assert!(layout.extend(&mut features, &[bert]));
    assert_eq!(features[15 + 7..], [3.0, 12.0, 16.0, 64.0, 0.0, 0.0, 0.0, 0.0], "zeros where fewer run");
}

#[test]
fn what_a_predictor_was_not_trained_for_has_no_features() {
    let layout = layout(7, 2);
    let mut features = Vec::new();
    let unknown: [&[GroupPart]; 5] = [
        &[part(7, 0, 1)],
        &[part(0, 0, 1), part(1, 0, 1), part(2, 0, 1)],
        &[part(0, 0, 1), part(0, 1, 2)],
        &[part(0, 0, 53)],
        &[],
    ];
    for group in unknown {
        assert!(!layout.extend(&mut features, group), "{group:?}");
        assert!(features.is_empty(), "{group:?} leaves nothing behind");
    }
}

fn numbers(count: usize, seed: u32) -> Vec<f32> {
    (0..count as u32)
        .map(|index| (index.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 20) as f32 / 4096.0 - 0.5)
        .collect()
}

/// Three layers of 32, of made-up weights.
fn made_up(inputs: usize) -> (Vec<f32>, Vec<f32>, Vec<Layer>) {
    let sizes = [inputs, 32, 32, 32, 1];
    let layer = |(sizes, seed): (&[usize], u32)| Layer {
        weights: numbers(sizes[0] * sizes[1], seed).into_iter().map(|weight| weight * 0.2).collect(),
        biases: numbers(sizes[1], seed + 7),
    };
    (vec![1.0; inputs], vec![8.0; inputs], sizes.windows(2).zip(0..).map(layer).collect())
}

#[test]
fn a_perceptron_is_its_layers_with_relu_between_them() {
    let layer = |weights: &[f32], biases: &[f32]| Layer { weights: weights.to_vec(), biases: biases.to_vec() };
    // (x - 1) / 2 = (1, -2). The first hidden value is 1*3 + -2*1 + 0.5 = 1.5. The second is 1*1 +
    // -2*4 = -7, and ReLU makes it 0.
    let layers = vec![layer(&[3.0, 1.0, 1.0, 4.0], &[0.5, 0.0]), layer(&[2.0, 100.0], &[-1.0])];
    let mlp = Mlp::new(vec![1.0; 2], vec![2.0; 2], layers).unwrap();
    assert_eq!(mlp.infer(&[3.0, -3.0]), [2.0_f32.exp()]);
}

#[test]
fn four_groups_in_one_pass_have_the_answers_of_four_passes() {
    let (means, scales, layers) = made_up(15);
    let predictor = LearnedPredictor::new(layout(7, 2), Mlp::new(means, scales, layers).unwrap()).unwrap();
    let groups = [vec![part(0, 0, 18)], vec![part(0, 0, 18), part(3, 2, 9)], vec![part(9, 0, 1)], vec![part(6, 1, 12)]];
    let all: Vec<&[GroupPart]> = groups.iter().map(Vec::as_slice).collect();
    let together = predictor.predict(&all);
    let alone: Vec<_> = all.iter().flat_map(|group| predictor.predict(&[group])).collect();
    assert_eq!(together, alone);
    assert_eq!(together.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false, true], "one is unknown");
    assert!(together[0] != together[1] && together[1] != together[3]);
}

#[test]
fn a_predictor_with_nan_is_refused_and_says_what_to_do() {
    for bad in [f32::NAN, f32::INFINITY] {
        let (means, scales, mut layers) = made_up(15);
        layers[2].weights[17] = bad;
        let error = Mlp::new(means, scales, layers).unwrap_err();
        assert!(matches!(error, BadMlp::Number { layer: 2, what: "weights", .. }));
        assert!(error.to_string().ends_with("train it again"), "{error}");
    }
    let (means, mut scales, layers) = made_up(15);
    scales[3] = 0.0;
    assert!(matches!(Mlp::new(means, scales, layers), Err(BadMlp::Number { what: "scales", .. })));
    assert_eq!(Mlp::new(vec![], vec![], vec![]), Err(BadMlp::Empty));
}

#[test]
fn a_predictor_of_another_shape_is_refused() {
    let (means, scales, mut layers) = made_up(15);
    layers[1].weights.pop();
    let expected = BadMlp::Shape { layer: 1, what: "weights", found: 1023, expected: 1024 };
    assert_eq!(Mlp::new(means.clone(), scales.clone(), layers.clone()), Err(expected));
    layers.truncate(1);
    let expected = BadMlp::Shape { layer: 0, what: "biases", found: 32, expected: 1 };
    assert_eq!(Mlp::new(means.clone(), scales.clone(), layers), Err(expected), "the last has one output");
    let whole = Mlp::new(means, scales, made_up(15).2).unwrap();
    assert!(matches!(
        LearnedPredictor::new(layout(7, 3), whole.clone()),
        Err(BadMlp::Shape { found: 15, expected: 19, .. })
    ));
    let mut text = serde_json::to_value(LearnedPredictor::new(layout(7, 2), whole).unwrap()).unwrap();
    assert!(serde_json::from_value::<LearnedPredictor>(text.clone()).is_ok());
    text["mlp"]["layers"][0]["biases"] = serde_json::json!([0.0]);
    assert!(serde_json::from_value::<LearnedPredictor>(text).is_err(), "a file is checked as well");
}

#[test]
fn what_goes_beyond_numbers_is_no_prediction() {
    let (means, scales, mut layers) = made_up(15);
    layers.iter_mut().for_each(|layer| layer.weights.iter_mut().for_each(|weight| *weight = 1e30));
    let predictor = LearnedPredictor::new(layout(7, 2), Mlp::new(means, scales, layers).unwrap()).unwrap();
    assert_eq!(predictor.predict(&[&[part(0, 0, 18)]]), [None]);
}

#[test]
fn a_margin_is_the_predictors_own_error_and_then_what_groups_took() {
    let mut margin = ErrorMargin::new(0.25);
    assert_eq!((margin.expected(ms(100)), margin.bound(ms(100))), (ms(100), ms(125)));
    (0..7).for_each(|_| margin.handle_group(ms(10), ms(20)));
    assert_eq!(margin.bound(ms(100)), ms(125), "seven are too few");
    margin.handle_group(ms(10), ms(20));
    assert_eq!((margin.expected(ms(100)), margin.bound(ms(100))), (ms(200), ms(200)), "it says half of what it takes");
    (0..30).for_each(|index| margin.handle_group(ms(10), ms(5 + index % 3)));
    assert_eq!((margin.expected(ms(100)), margin.bound(ms(100))), (ms(60), ms(200)));
    (0..64).for_each(|_| margin.handle_group(ms(10), ms(5)));
    assert_eq!(margin.bound(ms(100)), ms(50), "what was long ago is forgotten");
    margin.handle_group(Duration::ZERO, ms(5));
    assert_eq!(margin.bound(ms(100)), ms(50));
}
