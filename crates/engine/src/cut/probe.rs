//! Batches with which a model is tried when it is cut.

use std::collections::BTreeMap;

use downbeat_core::tensor::{Signature, TensorSpec};

use crate::cut::boundary::MeasuredValue;
use crate::tensor::buffer::Buffer;
use crate::tensor::fill::Fill;
use crate::tensor::{Tensor, elements, shape};

/// Lengths of dimensions that vary, beside the batch. A model is tried with each pair until one
/// runs.
const LENGTHS: [(usize, usize); 3] = [(64, 96), (16, 24), (224, 256)];

/// The batches of a probe: the sizes of dimensions that vary, and the contents.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    /// Size of every dimension that varies, but for the batch.
    pub length: usize,
    /// A second length for one run, which shows the dimensions that vary with the length.
    pub other_length: usize,
    fill: Fill,
}

/// Whether every input has a batch as its axis 0.
pub fn has_batch(signature: &Signature) -> Result<(), String> {
    let without = signature.inputs.iter().find(|i| i.dims.first().is_none_or(|d| *d >= 0));
    match without {
        Some(input) => Err(format!(
            "the model cannot be cut: the first axis of input '{}' {:?} is not a batch of varying size. Export the model with a dynamic first axis",
            input.name, input.dims
        )),
        None if signature.inputs.is_empty() => Err("the model cannot be cut: it has no inputs".into()),
        None => Ok(()),
    }
}

/// The first probe that the model runs with, and the result of `run`.
pub fn first<T>(signature: &Signature, run: impl Fn(Probe) -> Result<T, String>) -> Result<(Probe, T), String> {
    let mut last = String::new();
    for probe in probes(signature) {
        match run(probe) {
            Ok(made) => return Ok((probe, made)),
            Err(reason) => last = reason,
        }
    }
    Err(format!("the model cannot be cut: no batch of the trial runs: {last}"))
}

/// The probes to try the model with, the likeliest first.
fn probes(signature: &Signature) -> Vec<Probe> {
    let varies = signature.inputs.iter().any(|i| i.dims.iter().skip(1).any(|d| *d < 0));
    let lengths = if varies { &LENGTHS[..] } else { &LENGTHS[..1] };
    let probe = |fill| {
        move |(length, other_length): &(usize, usize)| Probe { length: *length, other_length: *other_length, fill }
    };
    Fill::ALL.into_iter().flat_map(|fill| lengths.iter().map(probe(fill))).collect()
}

impl Probe {
    /// The batch sizes and lengths whose shapes are compared.
    pub fn sizes(&self) -> [(usize, usize); 3] {
        [(1, self.length), (2, self.length), (3, self.other_length)]
    }

    /// The inputs at these sizes, by name.
    pub fn input_values(&self, signature: &Signature) -> BTreeMap<String, MeasuredValue> {
        let value = |input: &TensorSpec| {
            let [one, two, three] = self.sizes().map(|(batch, length)| shape(input, batch, length));
            (input.name.clone(), MeasuredValue::new(input.clone(), &one, &[(2, &two), (3, &three)]))
        };
        signature.inputs.iter().map(value).collect()
    }

    /// Makes the inputs of a batch.
    ///
    /// # Errors
    /// If the batch is larger than memory.
    pub fn inputs(&self, signature: &Signature, batch: usize, length: usize) -> Result<Vec<Tensor>, String> {
        let tensor = |spec: &TensorSpec| {
            let shape = shape(spec, batch, length);
            let size = self.fill.size(spec.datatype);
            let count = elements(&shape).filter(|n| n.checked_mul(size).is_some_and(|bytes| bytes <= 1 << 30));
            let count = count.ok_or_else(|| format!("input '{}': shape {shape:?} is too large to try", spec.name))?;
            let mut data =
                Buffer::try_with_capacity(count * size).map_err(|e| format!("input '{}': {e}", spec.name))?;
            self.fill.write(&spec.name, spec.datatype, count, &mut data);
            Ok(Tensor { datatype: spec.datatype, shape, data })
        };
        signature.inputs.iter().map(tensor).collect()
    }
}
