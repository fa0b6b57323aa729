//! Training of predictors of groups: a perceptron (Abacus §5.5), and the linear regression that it is compared with.

use downbeat_core::device::overlap::{BadMlp, Layer, Mlp};
use rand::RngExt;
use rand_distr::{Distribution, StandardNormal};
use rand_pcg::Pcg64;

use super::overlap_samples::OverlapSample;
use crate::arrivals::random;

/// §5.5: three hidden layers of 32.
const HIDDEN: [usize; 3] = [32, 32, 32];
/// Samples of a step.
const STEP: usize = 32;
/// Of Adam (Kingma and Ba 2015), and the first rate, which goes down to nothing along a cosine.
const MOMENT: f32 = 0.9;
const SQUARE: f32 = 0.999;
const RATE: f64 = 4e-3;

/// Trains a perceptron of three hidden layers of 32 to the logarithm of what groups take, so often through all samples. The same samples and seed give the same perceptron.
///
/// # Errors
/// If there is no sample, or what came of it is not a number.
pub fn train_mlp(samples: &[&OverlapSample], epochs: u32, seed: u64) -> Result<Mlp, BadMlp> {
    let inputs = samples.first().map_or(0, |sample| sample.features.len());
    let (means, scales) = spread(samples, inputs);
    let normal = |sample: &&OverlapSample| {
        let features = sample.features.iter().zip(&means).zip(&scales);
        (features.map(|((x, mean), scale)| (x - mean) / scale).collect::<Vec<f32>>(), sample.takes_ms.ln() as f32)
    };
    let rows: Vec<(Vec<f32>, f32)> = samples.iter().map(normal).collect();
    let mut rng = random(seed, 77);
    let mut net = Net::new(inputs, &mut rng);
    if let Some(last) = net.layers.last_mut() {
        // It begins with the mean.
        last.values.biases[0] = rows.iter().map(|(_, target)| target).sum::<f32>() / rows.len().max(1) as f32;
    }
    let mut order: Vec<usize> = (0..rows.len()).collect();
    let (mut step, steps) = (0, u64::from(epochs) * rows.len().div_ceil(STEP) as u64);
    for _ in 0..epochs {
        for index in (1..order.len()).rev() {
            order.swap(index, rng.random_range(0..=index));
        }
        for chosen in order.chunks(STEP) {
            step += 1;
            let rate = RATE * 0.5 * (1.0 + (std::f64::consts::PI * step as f64 / steps as f64).cos());
            chosen.iter().for_each(|index| net.learn(&rows[*index].0, rows[*index].1));
            net.step(rate as f32, step, chosen.len());
        }
    }
    Mlp::new(means, scales, net.layers.into_iter().map(|layer| layer.values).collect())
}

/// Means and standard deviations of features; 1 for those that do not differ.
pub(super) fn spread(samples: &[&OverlapSample], inputs: usize) -> (Vec<f32>, Vec<f32>) {
    let count = samples.len().max(1) as f64;
    let mean_of = |column: usize, of: &dyn Fn(f64) -> f64| {
        samples.iter().map(|sample| of(f64::from(sample.features[column]))).sum::<f64>() / count
    };
    let one = |column| {
        let mean = mean_of(column, &|x| x);
        let deviation = mean_of(column, &|x| (x - mean).powi(2)).sqrt();
        (mean as f32, if deviation > 1e-9 { deviation as f32 } else { 1.0 })
    };
    (0..inputs).map(one).unzip()
}

/// A layer with what it learns by.
struct Learning {
    values: Layer,
    /// Of weights, then of biases: the sum of gradients of a step, and Adam's two moments.
    state: [[Vec<f32>; 2]; 3],
}

struct Net {
    layers: Vec<Learning>,
    /// What each layer was given, and what came of the last.
    seen: Vec<Vec<f32>>,
}

impl Net {
    fn new(inputs: usize, rng: &mut Pcg64) -> Self {
        let sizes = [&[inputs][..], &HIDDEN, &[1]].concat();
        let layers = sizes.windows(2).map(|size| {
            let (from, to) = (size[0], size[1]);
            let scale = (2.0 / from.max(1) as f32).sqrt();
            let mut weight = || -> f32 { StandardNormal.sample(&mut *rng) };
            let values = Layer { weights: (0..from * to).map(|_| weight() * scale).collect(), biases: vec![0.0; to] };
            let zeros = || [vec![0.0; from * to], vec![0.0; to]];
            Learning { values, state: [zeros(), zeros(), zeros()] }
        });
        Net { layers: layers.collect(), seen: Vec::new() }
    }

    /// Adds the gradient of the squared error of one sample.
    fn learn(&mut self, features: &[f32], target: f32) {
        self.seen.clear();
        self.seen.push(features.to_vec());
        let last = self.layers.len() - 1;
        for (index, layer) in self.layers.iter().enumerate() {
            let mut sums = layer.values.biases.clone();
            for (x, weights) in self.seen[index].iter().zip(layer.values.weights.chunks_exact(sums.len())) {
                sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += x * weight);
            }
            if index < last {
                sums.iter_mut().for_each(|sum| *sum = sum.max(0.0));
            }
            self.seen.push(sums);
        }
        let mut gradient = vec![self.seen[last + 1][0] - target];
        for (index, layer) in self.layers.iter_mut().enumerate().rev() {
            let (given, width) = (&self.seen[index], gradient.len());
            let [sums, ..] = &mut layer.state;
            sums[1].iter_mut().zip(&gradient).for_each(|(sum, g)| *sum += g);
            let mut before = vec![0.0; given.len()];
            for (row, x) in given.iter().enumerate() {
                let at = row * width..(row + 1) * width;
                let weights = &layer.values.weights[at.clone()];
                // A value that ReLU has cut off teaches nothing; features are not cut.
                if index == 0 || *x > 0.0 {
                    before[row] = weights.iter().zip(&gradient).map(|(weight, g)| weight * g).sum();
                }
                if *x != 0.0 {
                    sums[0][at].iter_mut().zip(&gradient).for_each(|(sum, g)| *sum += x * g);
                }
            }
            gradient = before;
        }
    }

    /// Follows the gradients of so many samples.
    fn step(&mut self, rate: f32, step: u64, samples: usize) {
        let step = i32::try_from(step).unwrap_or(i32::MAX);
        let (first, second) = (1.0 - MOMENT.powi(step), 1.0 - SQUARE.powi(step));
        for Learning { values, state: [sums, moments, squares] } in &mut self.layers {
            for (part, values) in [&mut values.weights, &mut values.biases].into_iter().enumerate() {
                let state = sums[part].iter_mut().zip(&mut moments[part]).zip(&mut squares[part]);
                for (value, ((sum, moment), square)) in values.iter_mut().zip(state) {
                    let gradient = std::mem::take(sum) / samples as f32;
                    *moment = MOMENT * *moment + (1.0 - MOMENT) * gradient;
                    *square = SQUARE * *square + (1.0 - SQUARE) * gradient * gradient;
                    *value -= rate * (*moment / first) / ((*square / second).sqrt() + 1e-8);
                }
            }
        }
    }
}

/// The linear regression of what groups take on their features, by least squares: a constant, then one number a feature.
pub fn train_linear(samples: &[&OverlapSample]) -> Vec<f64> {
    let width = samples.first().map_or(0, |sample| sample.features.len()) + 1;
    let mut rows = vec![vec![0.0; width + 1]; width];
    for sample in samples {
        let x: Vec<f64> = [1.0].into_iter().chain(sample.features.iter().map(|x| f64::from(*x))).collect();
        for (row, a) in rows.iter_mut().zip(&x) {
            row.iter_mut().zip(&x).for_each(|(sum, b)| *sum += a * b);
            row[width] += a * sample.takes_ms;
        }
    }
    for (index, row) in rows.iter_mut().enumerate() {
        // Bits add up to the constant: without this there is no one solution.
        row[index] += 1e-6 * samples.len() as f64;
    }
    for pivot in 0..width {
        let best = (pivot..width).max_by(|a, b| rows[*a][pivot].abs().total_cmp(&rows[*b][pivot].abs()));
        rows.swap(pivot, best.unwrap_or(pivot));
        let of = rows[pivot].clone();
        for (index, row) in rows.iter_mut().enumerate().filter(|(index, _)| *index != pivot) {
            let factor = if of[pivot] == 0.0 { 0.0 } else { row[pivot] / of[pivot] };
            debug_assert!(index < width, "as many rows as unknowns");
            row.iter_mut().zip(&of).for_each(|(value, by)| *value -= factor * by);
        }
    }
    rows.iter().enumerate().map(|(index, row)| row[width] / row[index]).collect()
}

/// What a linear regression says of features.
pub fn predict_linear(coefficients: &[f64], features: &[f32]) -> f64 {
    let (constant, rest) = coefficients.split_first().unwrap_or((&0.0, &[]));
    constant + rest.iter().zip(features).map(|(factor, x)| factor * f64::from(*x)).sum::<f64>()
}

/// Mean absolute error as a share of what groups take (Abacus equation 1).
pub fn mean_error<'a>(samples: impl IntoIterator<Item = &'a OverlapSample>, predict: impl Fn(&[f32]) -> f64) -> f64 {
    let one = |sample: &OverlapSample| (predict(&sample.features) / sample.takes_ms - 1.0).abs();
    let (sum, count) = samples.into_iter().fold((0.0, 0.0), |(sum, count), sample| (sum + one(sample), count + 1.0));
    sum / count
}
