//! A perceptron and the predictors that the paper compares with it: a linear regression and support
//! vectors.

use downbeat_core::device::overlap::{BadMlp, Mlp};
use downbeat_training::{GroupSample, mean_error, says, train_mlp};

use super::overlap_linear::{predict_linear, train_linear};
use super::overlap_svm::SupportVectors;
use downbeat_sim::random;

/// The most samples of a regression on support vectors, whose time grows with their square.
pub(super) const VECTORS: usize = 4_000;

/// The stream of random numbers for trainings.
pub(super) const TRAINING: u64 = 77;

/// An MLP, a linear regression and a regression on support vectors, trained on the same samples
/// (Abacus figure 10).
#[derive(Clone, Debug)]
pub struct ComparedPredictors {
    /// The perceptron.
    pub mlp: Mlp,
    line: Vec<f64>,
    vectors: SupportVectors,
}

impl ComparedPredictors {
    /// Trains all three, the perceptron with `epochs` passes over the samples.
    ///
    /// # Errors
    /// As [`train_mlp`].
    pub fn train(samples: &[&GroupSample], epochs: u32, seed: u64) -> Result<Self, BadMlp> {
        let mlp = train_mlp(samples, epochs, random(seed, TRAINING))?;
        Ok(ComparedPredictors { mlp, line: train_linear(samples), vectors: vectors(samples) })
    }

    /// Returns the mean errors: MLP, linear regression, support vectors.
    pub fn off(&self, test: &[&GroupSample]) -> [f64; 3] {
        [
            mean_error(test.iter().copied(), |features| says(&self.mlp, features)),
            mean_error(test.iter().copied(), |features| predict_linear(&self.line, features)),
            mean_error(test.iter().copied(), |features| self.vectors.predict(features)),
        ]
    }
}

/// Trains a regression on at most [`VECTORS`] of these samples, taken at even steps.
pub(super) fn vectors(samples: &[&GroupSample]) -> SupportVectors {
    let step = samples.len().div_ceil(VECTORS).max(1);
    SupportVectors::train(&samples.iter().step_by(step).copied().collect::<Vec<_>>())
}
