//! Groups of operators with what they take: what a predictor is trained and judged with.

use downbeat_core::device::SegmentRange;
use downbeat_core::device::overlap::{FeatureLayout, FeatureModel, GroupPart, Predictor};
use downbeat_core::{ModelId, RequestId};
use rand::RngExt;
use rand_pcg::Pcg64;

use super::abacus_cuts::ABACUS_MODELS;
use super::failure::DeviceFailure;
use super::model::EmulatedModel;
use super::oracle::Oracle;
use super::overlap_run::OverlapInputs;
use super::platform::Platform;
use crate::arrivals::random;

/// A group and what it takes.
#[derive(Clone, Debug, PartialEq)]
pub struct OverlapSample {
    /// As the predictor sees it.
    pub features: Vec<f32>,
    /// Milliseconds from its begin to its barrier, the mean of many runs.
    pub takes_ms: f64,
    /// Which pair of models it is of, in the order of [`OverlapSample::pairs`].
    pub pair: usize,
}

impl OverlapSample {
    /// All pairs of Abacus' models, by their numbers in [`ABACUS_MODELS`].
    pub fn pairs() -> Vec<(usize, usize)> {
        let count = ABACUS_MODELS.len();
        (0..count).flat_map(|one| (one + 1..count).map(move |other| (one, other))).collect()
    }

    /// How a group of two of Abacus' models is seen: 7 + 4 * 2 numbers.
    pub fn layout() -> FeatureLayout {
        let known = |(model, architecture): (u32, _)| {
            let cuts = super::abacus_cuts::abacus_cuts(architecture).map_or(0, |cuts| cuts.len() - 1);
            FeatureModel { model: ModelId(model), operators: cuts as u16 }
        };
        FeatureLayout { models: (0..).zip(ABACUS_MODELS).map(known).collect(), at_once: 2 }
    }

    /// So many groups of each pair (Abacus §5.4): as the controller makes them, one of two requests or both are done in the group, some have come for it and begin with their first operator, and what is left
    /// open is random.
    ///
    /// # Errors
    /// If the platform is not one of theirs.
    pub fn draw(platform: Platform, each: usize, seed: u64) -> Result<Vec<OverlapSample>, DeviceFailure> {
        let models: Vec<EmulatedModel> =
            ABACUS_MODELS.iter().map(|model| EmulatedModel::abacus(*model, platform)).collect::<Result<_, _>>()?;
        let (layout, oracle) = (OverlapSample::layout(), Oracle::new(models.clone(), 1.0));
        let mut samples = Vec::with_capacity(each * 21);
        for (pair, (one, other)) in OverlapSample::pairs().into_iter().enumerate() {
            let mut rng = random(seed, pair as u64);
            for _ in 0..each {
                // 0: the first is done in the group, 1: the other, 2: both.
                let done = rng.random_range(0..3);
                let group = [(one, done != 1), (other, done != 0)]
                    .map(|(model, is_done)| part(&models[model], model, is_done, &mut rng));
                let takes = oracle.predict(&[&group]).pop().flatten();
                let mut features = Vec::with_capacity(layout.len());
                if let (Some(takes), true) = (takes, layout.extend(&mut features, &group)) {
                    samples.push(OverlapSample { features, takes_ms: takes.as_millis_f64(), pair });
                }
            }
        }
        Ok(samples)
    }
}

/// Operators of one model.
fn part(emulated: &EmulatedModel, model: usize, is_done: bool, rng: &mut Pcg64) -> GroupPart {
    let count = emulated.segment_count();
    let is_new = rng.random_range(0..2) == 0;
    let first = if is_new { 0 } else { rng.random_range(0..count) };
    let end = if is_done { count } else { rng.random_range(first + 1..=count) };
    let (rows, length) = OverlapInputs::Any.draw(rng);
    let length = if emulated.has_length() { length } else { 0 };
    GroupPart {
        request: RequestId(model as u64),
        model: ModelId(model as u32),
        operators: SegmentRange::new(first, end),
        rows,
        length,
    }
}
