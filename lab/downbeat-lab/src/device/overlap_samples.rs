//! Groups of operators of Abacus' models with their times on an emulated device.

use downbeat_core::ModelId;
use downbeat_core::device::overlap::{FeatureLayout, FeatureModel, GroupPart, Predictor};
use downbeat_training::{GroupSample, random_group};
use rand_pcg::Pcg64;

use super::abacus_cuts::{ABACUS_MODELS, abacus_cuts};
use super::failure::DeviceFailure;
use super::model::EmulatedModel;
use super::oracle::Oracle;
use super::overlap_run::OverlapInputs;
use super::platform::Platform;
use downbeat_sim::parallel;
use downbeat_sim::random;

/// Returns the features of a group of up to `at_once` of Abacus' models: `7 + 4 * at_once` numbers.
pub fn abacus_layout(at_once: usize) -> FeatureLayout {
    let known = |(model, architecture): (u32, _)| {
        let cuts = abacus_cuts(architecture).map_or(0, |cuts| cuts.len() - 1);
        FeatureModel { model: ModelId(model), operators: cuts as u16 }
    };
    FeatureLayout { models: (0..).zip(ABACUS_MODELS).map(known).collect(), at_once }
}

/// Draws `each` groups of each of these sets of Abacus' models, as the controller makes them. The
/// result depends on the seed and not on the threads. The features have room for as many models as
/// the largest set has.
///
/// # Errors
/// If the platform fuses operators, or a set has a model that is none of Abacus'.
pub fn draw_samples(
    platform: Platform,
    sets: &[Vec<usize>],
    each: usize,
    (seed, threads): (u64, usize),
) -> Result<Vec<GroupSample>, DeviceFailure> {
    let models = abacus_models(platform)?;
    if let Some(bad) = sets.iter().flatten().find(|model| **model >= models.len()) {
        return Err(DeviceFailure(format!("there is no model {bad} of Abacus: they are 0 to {}", models.len() - 1)));
    }
    let layout = abacus_layout(sets.iter().map(Vec::len).max().unwrap_or(0));
    let of_set = |(set, of): &(usize, &Vec<usize>)| {
        let (mut rng, oracle) = (random(seed, *set as u64), Oracle::new(models.clone(), 1.0));
        let one = |_| {
            let group = emulated_group(&models, of, &mut rng);
            let mut features = Vec::with_capacity(layout.len());
            let takes_ms = oracle.predict(&[&group]).pop().flatten()?.as_millis_f64();
            layout.extend(&mut features, &group).then_some(GroupSample { features, takes_ms, set: *set })
        };
        (0..each).filter_map(one).collect::<Vec<_>>()
    };
    let jobs: Vec<(usize, &Vec<usize>)> = sets.iter().enumerate().collect();
    Ok(parallel::map(&jobs, threads, of_set, |_| ()).concat())
}

/// Returns Abacus' models cut into its operators, by their numbers in [`ABACUS_MODELS`].
pub(super) fn abacus_models(platform: Platform) -> Result<Vec<EmulatedModel>, DeviceFailure> {
    ABACUS_MODELS.iter().map(|model| EmulatedModel::abacus(*model, platform)).collect()
}

/// Draws a group of some of Abacus' models, of any of table 1's sizes.
pub(super) fn emulated_group(models: &[EmulatedModel], set: &[usize], rng: &mut Pcg64) -> Vec<GroupPart> {
    let inputs = |model: usize, rng: &mut Pcg64| {
        let (rows, length) = OverlapInputs::Any.draw(rng);
        (rows, if models[model].has_length() { length } else { 0 })
    };
    random_group(set, rng, |model| models[model].segment_count(), inputs)
}
