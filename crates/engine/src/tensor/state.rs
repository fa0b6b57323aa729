//! The state of a batch on its way through a model.

use downbeat_core::tensor::DataType;

use crate::tensor::Tensor;
use crate::tensor::buffer::{Buffer, DeviceError, OutOfMemory};
use crate::tensor::strings;

/// The tensors of a batch on its way through a model.
///
/// Between segments a batch may be divided ([`State::split`]) and batches may be joined
/// ([`State::join`]). Axis 0 of every tensor is the batch at such a place.
#[derive(Debug, Default)]
pub struct State {
    /// The tensors; [`crate::Lane::run`] says which.
    pub tensors: Vec<Tensor>,
}

/// The reason why batches cannot be divided or joined, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StateError(String);

impl From<OutOfMemory> for StateError {
    fn from(error: OutOfMemory) -> Self {
        StateError(error.to_string())
    }
}

impl From<DeviceError> for StateError {
    fn from(error: DeviceError) -> Self {
        StateError(error.to_string())
    }
}

impl StateError {
    fn empty() -> Self {
        StateError("a batch has at least one row".into())
    }
}

impl State {
    /// Rows of the batch: axis 0 of its first tensor; 0 if there is none.
    pub fn rows(&self) -> usize {
        self.tensors.first().and_then(|t| t.shape.first()).map_or(0, |d| *d)
    }

    /// A copy in memory of its own, on the host. Blocks the caller until a device has written the
    /// tensors.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn copy(&mut self) -> Result<State, StateError> {
        let copy = |tensor: &mut Tensor| {
            tensor.data.fetch()?;
            let data = Buffer::from(tensor.data.as_slice());
            Ok(Tensor { datatype: tensor.datatype, shape: tensor.shape.clone(), data })
        };
        Ok(State { tensors: self.tensors.iter_mut().map(copy).collect::<Result<_, StateError>>()? })
    }

    /// Divides the batch along axis 0 into batches of these numbers of rows, in order. The parts
    /// share the memory; no byte is copied. A part begins at a whole element. Engines that need
    /// more alignment copy it.
    ///
    /// # Errors
    /// If a part is empty, or the parts do not add up to the batch.
    pub fn split(self, rows: &[usize]) -> Result<Vec<State>, StateError> {
        let asked = rows.iter().fold(0usize, |sum, n| sum.saturating_add(*n));
        if rows.is_empty() || rows.contains(&0) {
            return Err(StateError::empty());
        }
        for (tensor, t) in self.tensors.iter().enumerate() {
            let has = t.shape.first().map_or(0, |d| *d);
            if has != asked {
                return Err(StateError(format!("the parts have {asked} rows in all, but tensor {tensor} has {has}")));
            }
        }
        if rows.len() == 1 {
            return Ok(vec![self]);
        }
        let mut parts: Vec<State> =
            rows.iter().map(|_| State { tensors: Vec::with_capacity(self.tensors.len()) }).collect();
        for (index, tensor) in self.tensors.into_iter().enumerate() {
            let Tensor { datatype, shape, data } = tensor;
            let ends = ends(datatype, &shape, &data, rows)
                .ok_or_else(|| StateError(format!("tensor {index}: its bytes do not divide into {asked} rows")))?;
            for ((part, rows), data) in parts.iter_mut().zip(rows).zip(data.split(&ends)) {
                let mut shape = shape.clone();
                if let Some(first) = shape.first_mut() {
                    *first = *rows;
                }
                part.tensors.push(Tensor { datatype, shape, data });
            }
        }
        Ok(parts)
    }

    /// Joins batches at the same place of one model, in order, along axis 0. A single batch is not
    /// copied. Tensors on a device are fetched to the host; [`crate::Lane::join`] joins them on the
    /// device.
    ///
    /// # Errors
    /// If there is no batch, or the tensors differ in more than their rows.
    pub fn join(mut states: Vec<State>) -> Result<State, StateError> {
        let joined = State::joined(&states)?;
        if states.len() == 1 {
            return Ok(states.pop().unwrap_or_default());
        }
        for tensor in states.iter_mut().flat_map(|state| &mut state.tensors) {
            tensor.data.fetch()?;
        }
        let tensors = joined.into_iter().enumerate().map(|(index, (datatype, shape))| {
            let all = || states.iter().filter_map(|s| s.tensors.get(index));
            let mut data = Buffer::try_with_capacity(all().map(|t| t.data.len()).sum())?;
            all().for_each(|t| data.extend_from_slice(t.data.as_slice()));
            Ok(Tensor { datatype, shape, data })
        });
        Ok(State { tensors: tensors.collect::<Result<_, OutOfMemory>>()? })
    }

    /// Datatypes and shapes of the joined tensors of batches at the same place of one model.
    ///
    /// # Errors
    /// If there is no batch, or the tensors differ in more than their rows.
    pub fn joined(states: &[State]) -> Result<Vec<(DataType, Vec<usize>)>, StateError> {
        let Some((first, others)) = states.split_first() else { return Err(StateError::empty()) };
        for other in others {
            let (expected, got) = (first.tensors.len(), other.tensors.len());
            let alike = |(a, b): (&Tensor, &Tensor)| a.datatype == b.datatype;
            if expected != got || !first.tensors.iter().zip(&other.tensors).all(alike) {
                return Err(StateError(format!(
                    "the batches are not at the same place of the same model: {expected} and {got} tensors, or of other datatypes"
                )));
            }
            for (tensor, (a, b)) in first.tensors.iter().zip(&other.tensors).enumerate() {
                let row = |t: &Tensor| t.shape.get(1..).map(<[usize]>::to_vec);
                match (row(a), row(b)) {
                    (Some(a), Some(b)) if a == b => {}
                    (a, b) => {
                        let (expected, got) = (a.unwrap_or_default(), b.unwrap_or_default());
                        return Err(StateError(format!(
                            "tensor {tensor}: rows of {expected:?} and of {got:?} cannot be in one batch"
                        )));
                    }
                }
            }
        }
        let joined = first.tensors.iter().enumerate().map(|(index, like)| {
            let mut shape = like.shape.clone();
            if let Some(rows) = shape.first_mut() {
                *rows = states.iter().filter_map(|s| s.tensors.get(index)?.shape.first()).sum();
            }
            (like.datatype, shape)
        });
        Ok(joined.collect())
    }
}

/// The end of each part in the bytes; `None` if the bytes are not as many as the shape says.
fn ends(datatype: DataType, shape: &[usize], data: &Buffer, rows: &[usize]) -> Option<Vec<usize>> {
    let row = crate::tensor::elements(shape.get(1..)?)?;
    let mut done = 0usize;
    let counts = rows.iter().map(|rows| {
        done = done.checked_add(rows.checked_mul(row)?)?;
        Some(done)
    });
    let counts: Vec<usize> = counts.collect::<Option<_>>()?;
    let total = *counts.last()?;
    if let Some(size) = datatype.size() {
        return (total.checked_mul(size)? == data.len()).then(|| counts.iter().map(|n| n * size).collect());
    }
    // The end of each string, after the start of the first.
    let mut places = vec![0];
    for string in strings::split(data.as_slice()) {
        places.push(places.last()? + 4 + string.ok()?.len());
    }
    (places.len() == total + 1).then(|| counts.iter().filter_map(|n| places.get(*n).copied()).collect())
}
