//! A perceptron with what it is compared with.

use downbeat_core::device::overlap::{BadMlp, Mlp};
use downbeat_core::quantiles;

use super::overlap_samples::OverlapSample;
use super::overlap_svm::SupportVectors;
use super::overlap_training::{mean_error, predict_linear, train_linear, train_mlp};

/// The most samples of a regression on support vectors, whose time grows with their square.
pub(super) const VECTORS: usize = 4_000;

/// An MLP, a linear regression and a regression on support vectors, trained on the same samples (Abacus figure 10).
#[derive(Clone, Debug)]
pub struct ComparedPredictors {
    /// The perceptron.
    pub mlp: Mlp,
    line: Vec<f64>,
    vectors: SupportVectors,
}

impl ComparedPredictors {
    /// Trains them, the perceptron so often through all samples.
    ///
    /// # Errors
    /// As [`train_mlp`].
    pub fn train(samples: &[&OverlapSample], epochs: u32, seed: u64) -> Result<Self, BadMlp> {
        let mlp = train_mlp(samples, epochs, seed)?;
        Ok(ComparedPredictors { mlp, line: train_linear(samples), vectors: vectors(samples) })
    }

    /// How far they are off on average: MLP, linear regression, support vectors.
    pub fn off(&self, test: &[&OverlapSample]) -> [f64; 3] {
        [
            mean_error(test.iter().copied(), |features| says(&self.mlp, features)),
            mean_error(test.iter().copied(), |features| predict_linear(&self.line, features)),
            mean_error(test.iter().copied(), |features| self.vectors.predict(features)),
        ]
    }
}

/// Milliseconds by a perceptron.
pub fn says(mlp: &Mlp, features: &[f32]) -> f64 {
    mlp.infer(features).first().copied().map_or(f64::NAN, f64::from)
}

/// The relative error that a perceptron is below for 95% of these.
pub fn error_below(mlp: &Mlp, test: &[&OverlapSample]) -> f64 {
    let off = test.iter().map(|sample| (says(mlp, &sample.features) / sample.takes_ms - 1.0).abs());
    quantiles(off, [0.95]).map_or(f64::NAN, |[error]| error)
}

/// A regression on as many of these as it takes, evenly.
pub(super) fn vectors(samples: &[&OverlapSample]) -> SupportVectors {
    let step = samples.len().div_ceil(VECTORS).max(1);
    SupportVectors::train(&samples.iter().step_by(step).copied().collect::<Vec<_>>())
}
