//! A multilayer perceptron with given weights.

use serde::{Deserialize, Serialize};

/// One layer: `outputs = weights * inputs + biases`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Layer {
    /// The weights by input, then by output: `inputs * outputs` numbers.
    pub weights: Vec<f32>,
    /// The biases, one an output.
    pub biases: Vec<f32>,
}

/// Layers with ReLU between them (Abacus §5.5: three hidden layers of 32), in single precision.
/// Inputs are first brought to a common scale. The last layer gives the logarithm of the result, so
/// that the result is above zero and its errors are relative.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Mlp {
    /// The number that is subtracted from each input.
    means: Vec<f32>,
    /// The number that each difference is then divided by.
    scales: Vec<f32>,
    layers: Vec<Layer>,
}

/// A perceptron as it was read, before its numbers are checked.
#[derive(Deserialize)]
struct Unchecked {
    means: Vec<f32>,
    scales: Vec<f32>,
    layers: Vec<Layer>,
}

/// The reason why numbers form no perceptron.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadMlp {
    /// There is no layer or no input.
    #[error("a predictor needs at least one layer and one feature; train it again")]
    Empty,
    /// The number of weights, biases or scales does not fit.
    #[error(
        "layer {layer} of the predictor has {found} {what}, expected {expected}; the file is damaged or of another build: train the predictor again"
    )]
    Shape {
        /// The layer, from 0.
        layer: usize,
        /// The kind of number: weights, biases, scales or features.
        what: &'static str,
        /// The count that was found.
        found: usize,
        /// The count that was expected.
        expected: usize,
    },
    /// A weight is NaN or infinite, or a scale is not above zero.
    #[error(
        "layer {layer} of the predictor has an unusable number among its {what} ({value}): its training failed; train it again"
    )]
    Number {
        /// The layer, from 0.
        layer: usize,
        /// The kind of number: weights, biases, means or scales.
        what: &'static str,
        /// The bad number, as text.
        value: String,
    },
}

impl TryFrom<Unchecked> for Mlp {
    type Error = BadMlp;

    fn try_from(Unchecked { means, scales, layers }: Unchecked) -> Result<Self, BadMlp> {
        Mlp::new(means, scales, layers)
    }
}

impl Mlp {
    /// The perceptron of these layers. The last layer has one output.
    ///
    /// # Errors
    /// If sizes do not fit each other, or a number is NaN or infinite.
    pub fn new(means: Vec<f32>, scales: Vec<f32>, layers: Vec<Layer>) -> Result<Self, BadMlp> {
        let shape = |layer, what, found, expected| match found == expected {
            true => Ok(()),
            false => Err(BadMlp::Shape { layer, what, found, expected }),
        };
        let numbers = |layer, what, values: &[f32], is_good: fn(f32) -> bool| {
            let bad = values.iter().find(|value| !is_good(**value));
            bad.map_or(Ok(()), |value| Err(BadMlp::Number { layer, what, value: value.to_string() }))
        };
        let Some(last) = layers.len().checked_sub(1).filter(|_| !means.is_empty()) else { return Err(BadMlp::Empty) };
        shape(0, "scales", scales.len(), means.len())?;
        numbers(0, "means", &means, f32::is_finite)?;
        numbers(0, "scales", &scales, |scale| scale.is_finite() && scale > 0.0)?;
        let mut inputs = means.len();
        for (index, layer) in layers.iter().enumerate() {
            let outputs = if index == last { 1 } else { layer.biases.len().max(1) };
            shape(index, "biases", layer.biases.len(), outputs)?;
            shape(index, "weights", layer.weights.len(), inputs * outputs)?;
            numbers(index, "weights", &layer.weights, f32::is_finite)?;
            numbers(index, "biases", &layer.biases, f32::is_finite)?;
            inputs = outputs;
        }
        Ok(Mlp { means, scales, layers })
    }

    /// The numbers subtracted from the inputs, the numbers that then divide them, and the layers.
    pub fn parts(&self) -> (&[f32], &[f32], &[Layer]) {
        (&self.means, &self.scales, &self.layers)
    }

    /// The number of inputs.
    pub fn inputs(&self) -> usize {
        self.means.len()
    }

    /// The outputs for several inputs in a row, in one pass through the layers. An output is NaN or
    /// infinite if it exceeds single precision. An incomplete last input is ignored.
    pub fn infer(&self, inputs: &[f32]) -> Vec<f32> {
        let rows = inputs.len() / self.inputs();
        let mut values = Vec::with_capacity(rows * self.inputs());
        for row in inputs.chunks_exact(self.inputs()) {
            values.extend(row.iter().zip(&self.means).zip(&self.scales).map(|((x, mean), scale)| (x - mean) / scale));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let width = values.len() / rows.max(1);
            let mut next = Vec::with_capacity(rows * layer.biases.len());
            for row in values.chunks_exact(width.max(1)) {
                let begin = next.len();
                next.extend_from_slice(&layer.biases);
                let sums = &mut next[begin..];
                for (x, weights) in row.iter().zip(layer.weights.chunks_exact(layer.biases.len())) {
                    sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += x * weight);
                }
                if index + 1 < self.layers.len() {
                    sums.iter_mut().for_each(|sum| *sum = sum.max(0.0));
                }
            }
            values = next;
        }
        values.iter().map(|value| value.exp()).collect()
    }
}
