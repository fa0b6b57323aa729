//! Predictors of a run: the device itself, or one that was trained on samples.

use std::sync::Arc;

use downbeat_core::device::overlap::{BadMlp, FeatureModel, GroupPart, LearnedPredictor, Mlp, Predictor};
use downbeat_core::{Duration, ModelId};
use downbeat_training::{error_below, mean_error, says, sets_of, train_mlp};

use super::abacus_cuts::ABACUS_MODELS;
use super::architecture::Architecture;
use super::failure::DeviceFailure;
use super::model::EmulatedModel;
use super::oracle::Oracle;
use super::overlap_compared::TRAINING;
use super::overlap_samples::{abacus_layout, draw_samples};
use super::platform::Platform;
use downbeat_sim::random;

/// How often the samples are gone through.
pub(super) const EPOCHS: u32 = 60;
/// For so many samples of training there is one of the test.
const TESTED: usize = 5;

/// A perceptron that was trained on groups (Abacus §5.4, §5.5), and how far it is off for groups that it was not trained with.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedPredictor {
    mlp: Mlp,
    /// Numbers in [`ABACUS_MODELS`], and how many of them were in a group.
    models: Vec<usize>,
    at_once: usize,
    /// Samples of the training.
    pub samples: usize,
    /// Mean absolute error of the test, as a share of what groups take.
    pub mean_error: f64,
    /// What 95% of the test's groups are not farther off than.
    pub error: f64,
}

/// What says how long groups of a run take.
#[derive(Clone, Debug, PartialEq)]
pub enum PredictedBy {
    /// The emulated device itself, without what differs from run to run; it says so many times as long: 1 for an oracle.
    Oracle {
        /// Times that the prediction is what the group takes.
        bias: f64,
    },
    /// A trained one.
    Trained(Arc<TrainedPredictor>),
}

/// The predictor of a run, whose models are numbered as the run has them.
#[derive(Debug)]
pub(super) enum RunPredictor {
    Oracle(Oracle),
    Trained(LearnedPredictor),
}

impl TrainedPredictor {
    /// One for all groups of up to `at_once` of these models, numbers in [`ABACUS_MODELS`], trained on `each` samples of each set of them. The test has samples of its own, by another seed.
    ///
    /// # Errors
    /// If the platform is not one of Abacus', or the training fails.
    pub fn train(
        platform: Platform,
        (models, at_once): (&[usize], usize),
        each: usize,
        (seed, threads): (u64, usize),
    ) -> Result<Self, DeviceFailure> {
        let sets: Vec<Vec<usize>> = (1..=at_once).flat_map(|count| sets_of(models, count)).collect();
        let draw = |each: usize, seed| draw_samples(platform, &sets, each, (seed, threads));
        let training = draw(each, seed.wrapping_add(1))?;
        let test = draw(each.div_ceil(TESTED), seed.wrapping_add(2))?;
        let bad = |bad: BadMlp| DeviceFailure(bad.to_string());
        let mlp = train_mlp(&training.iter().collect::<Vec<_>>(), EPOCHS, random(seed, TRAINING)).map_err(bad)?;
        let error = error_below(&mlp, &test.iter().collect::<Vec<_>>());
        let mean_error = mean_error(&test, |features| says(&mlp, features));
        Ok(TrainedPredictor { mlp, models: models.to_vec(), at_once, samples: training.len(), mean_error, error })
    }

    /// It, for these models, by their places. Of one that it was not trained with it says nothing.
    ///
    /// # Errors
    /// Never, if it was trained.
    pub fn of(&self, models: &[Architecture]) -> Result<LearnedPredictor, BadMlp> {
        let mut layout = abacus_layout(self.at_once);
        for (number, FeatureModel { model, .. }) in layout.models.iter_mut().enumerate() {
            let is_it = |other: &Architecture| self.models.contains(&number) && *other == ABACUS_MODELS[number];
            // Of a model that does not run there is no group.
            *model = ModelId(models.iter().position(is_it).map_or(u32::MAX, |place| place as u32));
        }
        LearnedPredictor::new(layout, self.mlp.clone())
    }
}

impl PredictedBy {
    /// The predictor, and the relative error that 95% of groups are within: what it was tested with and two deviations of a run, of which it knows nothing.
    pub(super) fn predictor(
        &self,
        architectures: &[Architecture],
        models: &[EmulatedModel],
        noise: f64,
    ) -> Result<(RunPredictor, f64), DeviceFailure> {
        let bad = |bad: BadMlp| DeviceFailure(bad.to_string());
        Ok(match self {
            PredictedBy::Oracle { bias } => (RunPredictor::Oracle(Oracle::new(models.to_vec(), *bias)), 2.0 * noise),
            PredictedBy::Trained(trained) => {
                (RunPredictor::Trained(trained.of(architectures).map_err(bad)?), trained.error + 2.0 * noise)
            }
        })
    }
}

impl Predictor for RunPredictor {
    fn predict(&self, groups: &[&[GroupPart]]) -> Vec<Option<Duration>> {
        match self {
            RunPredictor::Oracle(oracle) => oracle.predict(groups),
            RunPredictor::Trained(trained) => trained.predict(groups),
        }
    }
}
