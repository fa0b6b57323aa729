//! Training of a perceptron (Abacus §5.5), a step at a time.

use downbeat_core::device::overlap::{BadMlp, Layer, Mlp};
use rand::{Rng, RngExt};
use rand_distr::{Distribution, StandardNormal};

use crate::GroupSample;

/// §5.5: three hidden layers of 32.
const HIDDEN: [usize; 3] = [32, 32, 32];
/// Samples in a step.
const STEP: usize = 32;
/// Adam's two decay rates (Kingma and Ba 2015), and the first learning rate, which falls to zero
/// along a cosine.
const MOMENT: f32 = 0.9;
const SQUARE: f32 = 0.999;
const RATE: f64 = 4e-3;

/// Trains a perceptron with Adam on the logarithm of the time that groups take. The same samples
/// and random numbers give the same perceptron.
pub struct MlpTraining<R> {
    means: Vec<f32>,
    scales: Vec<f32>,
    /// Each sample's features on a common scale, and the logarithm of its time.
    rows: Vec<(Vec<f32>, f32)>,
    net: Net,
    rng: R,
    /// The order of the rows in this epoch, and the number of rows that are done.
    order: Vec<usize>,
    passed: usize,
    /// Steps that are done, and steps in all.
    step: u64,
    steps: u64,
    rate: f64,
}

impl<R: Rng> MlpTraining<R> {
    /// Trains a new perceptron with three hidden layers of 32, for this many passes through all
    /// samples.
    pub fn new(samples: &[&GroupSample], epochs: u32, mut rng: R) -> Self {
        let inputs = samples.first().map_or(0, |sample| sample.features.len());
        let (means, scales) = spread(samples, inputs);
        let rows = rows(samples, &means, &scales);
        let mut net = Net::new(inputs, &mut rng);
        if let Some(last) = net.layers.last_mut() {
            // The output starts at the mean.
            last.values.biases[0] = rows.iter().map(|(_, target)| target).sum::<f32>() / rows.len().max(1) as f32;
        }
        MlpTraining::begin(net, (means, scales), rows, epochs, (RATE, rng))
    }

    /// Continues the training of a perceptron, at a quarter of the learning rate.
    pub fn resume(mlp: &Mlp, samples: &[&GroupSample], epochs: u32, rng: R) -> Self {
        let (means, scales, layers) = mlp.parts();
        let rows = rows(samples, means, scales);
        let net = Net::of(layers.iter().cloned());
        MlpTraining::begin(net, (means.to_vec(), scales.to_vec()), rows, epochs, (RATE / 4.0, rng))
    }

    fn begin(
        net: Net,
        (means, scales): (Vec<f32>, Vec<f32>),
        rows: Vec<(Vec<f32>, f32)>,
        epochs: u32,
        (rate, rng): (f64, R),
    ) -> Self {
        let (order, steps) = ((0..rows.len()).collect(), u64::from(epochs) * rows.len().div_ceil(STEP) as u64);
        MlpTraining { means, scales, passed: rows.len(), rows, net, rng, order, step: 0, steps, rate }
    }

    /// Follows the gradients of the next 32 samples. Returns `false` at the end of the training.
    pub fn step(&mut self) -> bool {
        if self.step == self.steps {
            return false;
        }
        if self.passed == self.order.len() {
            self.passed = 0;
            for index in (1..self.order.len()).rev() {
                self.order.swap(index, self.rng.random_range(0..=index));
            }
        }
        self.step += 1;
        let end = (self.passed + STEP).min(self.order.len());
        let chosen = &self.order[self.passed..end];
        self.passed = end;
        let rate = self.rate * 0.5 * (1.0 + (std::f64::consts::PI * self.step as f64 / self.steps as f64).cos());
        chosen.iter().for_each(|index| self.net.learn(&self.rows[*index].0, self.rows[*index].1));
        self.net.step(rate as f32, self.step, chosen.len());
        true
    }

    /// Returns the trained perceptron.
    ///
    /// # Errors
    /// If there was no sample, or a weight is not a number.
    pub fn finish(self) -> Result<Mlp, BadMlp> {
        Mlp::new(self.means, self.scales, self.net.layers.into_iter().map(|layer| layer.values).collect())
    }
}

/// Trains a perceptron with three hidden layers of 32, for this many passes: [`MlpTraining`] to its
/// end.
///
/// # Errors
/// If there is no sample, or a weight is not a number.
pub fn train_mlp(samples: &[&GroupSample], epochs: u32, rng: impl Rng) -> Result<Mlp, BadMlp> {
    let mut training = MlpTraining::new(samples, epochs, rng);
    while training.step() {}
    training.finish()
}

fn rows(samples: &[&GroupSample], means: &[f32], scales: &[f32]) -> Vec<(Vec<f32>, f32)> {
    let normal = |sample: &&GroupSample| {
        let features = sample.features.iter().zip(means).zip(scales);
        (features.map(|((x, mean), scale)| (x - mean) / scale).collect::<Vec<f32>>(), sample.takes_ms.ln() as f32)
    };
    samples.iter().map(normal).collect()
}

/// Means and standard deviations of the features; a feature that does not vary has 1.
pub fn spread(samples: &[&GroupSample], inputs: usize) -> (Vec<f32>, Vec<f32>) {
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

/// A layer with the state of its training.
struct Learning {
    values: Layer,
    /// For weights, then for biases: the sum of a step's gradients, and Adam's two moments.
    state: [[Vec<f32>; 2]; 3],
}

struct Net {
    layers: Vec<Learning>,
    /// The input of each layer, and the output of the last.
    seen: Vec<Vec<f32>>,
}

impl Net {
    fn new(inputs: usize, rng: &mut impl Rng) -> Self {
        let sizes = [&[inputs][..], &HIDDEN, &[1]].concat();
        let layers = sizes.windows(2).map(|size| {
            let (from, to) = (size[0], size[1]);
            let scale = (2.0 / from.max(1) as f32).sqrt();
            let mut weight = || -> f32 { StandardNormal.sample(&mut *rng) };
            Layer { weights: (0..from * to).map(|_| weight() * scale).collect(), biases: vec![0.0; to] }
        });
        Net::of(layers)
    }

    fn of(layers: impl Iterator<Item = Layer>) -> Self {
        let learning = |values: Layer| {
            let zeros = || [vec![0.0; values.weights.len()], vec![0.0; values.biases.len()]];
            Learning { state: [zeros(), zeros(), zeros()], values }
        };
        Net { layers: layers.map(learning).collect(), seen: Vec::new() }
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
                // A value that ReLU has cut off has no gradient. Features are not cut.
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

    /// Follows the summed gradients of this many samples.
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
