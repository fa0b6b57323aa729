//! The error of predictions of groups.

use downbeat_core::device::overlap::Mlp;
use downbeat_core::quantiles;

use crate::GroupSample;

/// Milliseconds that a perceptron predicts.
pub fn says(mlp: &Mlp, features: &[f32]) -> f64 {
    mlp.infer(features).first().copied().map_or(f64::NAN, f64::from)
}

/// The error of a predicted time (milliseconds) of a group, as a share of the measured time.
pub fn relative_error(sample: &GroupSample, predicted: f64) -> f64 {
    (predicted / sample.takes_ms - 1.0).abs()
}

/// Mean absolute error as a share of the measured times (Abacus equation 1).
pub fn mean_error<'a>(samples: impl IntoIterator<Item = &'a GroupSample>, predict: impl Fn(&[f32]) -> f64) -> f64 {
    let one = |sample: &GroupSample| relative_error(sample, predict(&sample.features));
    let (sum, count) = samples.into_iter().fold((0.0, 0.0), |(sum, count), sample| (sum + one(sample), count + 1.0));
    sum / count
}

/// The relative error that 95% of a perceptron's predictions stay below; NaN without samples.
pub fn error_below(mlp: &Mlp, test: &[&GroupSample]) -> f64 {
    let off = test.iter().map(|sample| relative_error(sample, says(mlp, &sample.features)));
    quantiles(off, [0.95]).map_or(f64::NAN, |[error]| error)
}
