//! Predictors of a run: the device itself, or a perceptron that was trained on samples.

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

/// The passes over the samples in training.
pub(super) const EPOCHS: u32 = 60;
/// The samples of training for each sample of the test.
const TESTED: usize = 5;

/// A perceptron that was trained on groups (Abacus §5.4, §5.5), with its error for groups outside
/// the training.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedPredictor {
    mlp: Mlp,
    /// Numbers in [`ABACUS_MODELS`], and the most models in a group.
    models: Vec<usize>,
    at_once: usize,
    /// Samples of the training.
    pub samples: usize,
    /// Mean absolute error of the test, as a share of the groups' times.
    pub mean_error: f64,
    /// The relative error that 95% of the test's groups stay within.
    pub error: f64,
}

/// The kind of predictor of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum PredictedBy {
    /// The emulated device itself, without noise. The predictions are `bias` times the true time: 1
    /// for an oracle.
    Oracle {
        /// The prediction as a multiple of the group's true time.
        bias: f64,
    },
    /// A trained perceptron.
    Trained(Arc<TrainedPredictor>),
}

/// The predictor of a run, with models numbered as in the run.
#[derive(Debug)]
pub(super) enum RunPredictor {
    Oracle(Oracle),
    Trained(LearnedPredictor),
}

impl TrainedPredictor {
    /// Trains a predictor for all groups of up to `at_once` of these models, given by their numbers
    /// in [`ABACUS_MODELS`]. Training uses `each` samples of each set of models. The test has
    /// samples of its own, from another seed.
    ///
    /// # Errors
    /// If the platform fuses operators, or the training fails.
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

    /// Returns the predictor for these models, numbered by their places. The predictor is silent on
    /// models outside the training.
    ///
    /// # Errors
    /// Never, for a trained predictor.
    pub fn of(&self, models: &[Architecture]) -> Result<LearnedPredictor, BadMlp> {
        let mut layout = abacus_layout(self.at_once);
        for (number, FeatureModel { model, .. }) in layout.models.iter_mut().enumerate() {
            let is_it = |other: &Architecture| self.models.contains(&number) && *other == ABACUS_MODELS[number];
            // A model that does not run is in no group.
            *model = ModelId(models.iter().position(is_it).map_or(u32::MAX, |place| place as u32));
        }
        LearnedPredictor::new(layout, self.mlp.clone())
    }
}

impl PredictedBy {
    /// Returns the predictor, and the relative error that 95% of groups stay within. This is the
    /// error of the test plus two deviations of the noise, which no predictor knows.
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
