//! Support vector regression, which the paper compares with the perceptron (Abacus §5.5).

use downbeat_training::{GroupSample, spread};

/// The largest weight of a sample, the milliseconds of error that cost nothing, and the most passes
/// over the samples.
const MOST: f64 = 100.0;
const FREE: f64 = 0.1;
const ROUNDS: u32 = 100;

/// A regression on support vectors with a Gaussian kernel, whose width is the number of features.
///
/// The crates for this regression are made for fewer samples. With smartcore 0.7 a fit of 1,600
/// takes two seconds and one of 6,000 half a minute; linfa-svm brings 13 crates more.
#[derive(Clone, Debug)]
pub struct SupportVectors {
    means: Vec<f32>,
    scales: Vec<f32>,
    /// Samples of the training, scaled to common units.
    rows: Vec<Vec<f32>>,
    weights: Vec<f32>,
}

impl SupportVectors {
    /// Finds the weights by coordinate descent on the dual problem, with the constant in the
    /// kernel. Time and memory grow with the square of the number of samples.
    pub fn train(samples: &[&GroupSample]) -> Self {
        let inputs = samples.first().map_or(0, |sample| sample.features.len());
        let (means, scales) = spread(samples, inputs);
        let mut found = SupportVectors { means, scales, rows: Vec::new(), weights: Vec::new() };
        found.rows = samples.iter().map(|sample| found.scaled(&sample.features)).collect();
        let kernel: Vec<Vec<f32>> = found.rows.iter().map(|row| found.kernel(row)).collect();
        let (mut weights, mut sums) = (vec![0.0_f64; samples.len()], vec![0.0_f32; samples.len()]);
        for _ in 0..ROUNDS {
            let mut moved = 0.0_f64;
            for (index, row) in kernel.iter().enumerate() {
                let own = f64::from(row[index]);
                let best = weights[index] + (samples[index].takes_ms - f64::from(sums[index])) / own;
                let best = (best.abs() - FREE / own).clamp(0.0, MOST).copysign(best);
                let change = best - weights[index];
                if change != 0.0 {
                    weights[index] = best;
                    sums.iter_mut().zip(row).for_each(|(sum, k)| *sum += change as f32 * k);
                    moved = moved.max(change.abs());
                }
            }
            if moved < 1e-3 * MOST {
                break;
            }
        }
        found.weights = weights.into_iter().map(|weight| weight as f32).collect();
        found
    }

    /// Returns the predicted milliseconds of a group with these features.
    pub fn predict(&self, features: &[f32]) -> f64 {
        let near = self.kernel(&self.scaled(features));
        near.iter().zip(&self.weights).map(|(k, weight)| f64::from(k * weight)).sum()
    }

    fn scaled(&self, features: &[f32]) -> Vec<f32> {
        let scales = self.means.iter().zip(&self.scales);
        features.iter().zip(scales).map(|(x, (mean, scale))| (x - mean) / scale).collect()
    }

    fn kernel(&self, of: &[f32]) -> Vec<f32> {
        let near = |row: &Vec<f32>| {
            let distance: f32 = row.iter().zip(of).map(|(a, b)| (a - b) * (a - b)).sum();
            1.0 + (-distance / of.len().max(1) as f32).exp()
        };
        self.rows.iter().map(near).collect()
    }
}
