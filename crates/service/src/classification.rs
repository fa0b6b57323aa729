//! Classification: the largest values of an output, with their places and labels, instead of all
//! values.

use std::cmp::Ordering;

use bytes::{BufMut, BytesMut};
use downbeat_core::tensor::DataType;
use downbeat_protocol::InferTensor;
use half::{bf16, f16};

use crate::error::ServiceError;

/// A number of an output; all of one output are of one kind.
#[derive(Clone, Copy)]
pub enum Number {
    /// A signed integer.
    Signed(i64),
    /// An unsigned integer.
    Unsigned(u64),
    /// A floating-point number.
    Real(f64),
}

impl Number {
    /// By size, the largest last. NaN is smaller than every number, the sign of zero does not
    /// count.
    fn rank(self, other: Self) -> Ordering {
        match (self, other) {
            (Number::Signed(a), Number::Signed(b)) => a.cmp(&b),
            (Number::Unsigned(a), Number::Unsigned(b)) => a.cmp(&b),
            (Number::Real(a), Number::Real(b)) => a.partial_cmp(&b).unwrap_or_else(|| b.is_nan().cmp(&a.is_nan())),
            _ => Ordering::Equal,
        }
    }

    /// The nearest real number.
    pub fn real(self) -> f64 {
        match self {
            Number::Signed(value) => value as f64,
            Number::Unsigned(value) => value as f64,
            Number::Real(value) => value,
        }
    }

    /// The number as C's `std::to_string` writes it (Triton's form).
    fn text(self) -> String {
        match self {
            Number::Signed(value) => value.to_string(),
            Number::Unsigned(value) => value.to_string(),
            Number::Real(value) if value.is_nan() => "nan".into(),
            Number::Real(value) => format!("{value:.6}"),
        }
    }
}

/// The numbers of a tensor; `None` if its elements are no numbers.
pub fn numbers(datatype: DataType, data: &[u8]) -> Option<Vec<Number>> {
    fn read<const N: usize>(data: &[u8], number: impl Fn([u8; N]) -> Number) -> Vec<Number> {
        data.as_chunks::<N>().0.iter().map(|bytes| number(*bytes)).collect()
    }
    let numbers = match datatype {
        DataType::Uint8 => read(data, |b| Number::Unsigned(u8::from_le_bytes(b).into())),
        DataType::Uint16 => read(data, |b| Number::Unsigned(u16::from_le_bytes(b).into())),
        DataType::Uint32 => read(data, |b| Number::Unsigned(u32::from_le_bytes(b).into())),
        DataType::Uint64 => read(data, |b| Number::Unsigned(u64::from_le_bytes(b))),
        DataType::Int8 => read(data, |b| Number::Signed(i8::from_le_bytes(b).into())),
        DataType::Int16 => read(data, |b| Number::Signed(i16::from_le_bytes(b).into())),
        DataType::Int32 => read(data, |b| Number::Signed(i32::from_le_bytes(b).into())),
        DataType::Int64 => read(data, |b| Number::Signed(i64::from_le_bytes(b))),
        DataType::Fp16 => read(data, |b| Number::Real(f16::from_le_bytes(b).to_f64())),
        DataType::Bf16 => read(data, |b| Number::Real(bf16::from_le_bytes(b).to_f64())),
        DataType::Fp32 => read(data, |b| Number::Real(f32::from_le_bytes(b).into())),
        DataType::Fp64 => read(data, |b| Number::Real(f64::from_le_bytes(b))),
        DataType::Bool | DataType::Bytes => return None,
    };
    Some(numbers)
}

/// Replaces an output's values by its `count` largest, each as a `BYTES` element `value:index` or
/// `value:index:label`. Equal values: the lower index first. NaN: after all others. `batched`: each
/// row has its own.
///
/// # Errors
/// `InvalidArgument` if it holds no numbers.
pub fn classify(output: &mut InferTensor, count: usize, batched: bool, labels: &[String]) -> Result<(), ServiceError> {
    let numbers = numbers(output.datatype, &output.data).ok_or_else(|| {
        ServiceError::InvalidArgument(format!(
            "output '{}': 'classification' needs numbers, and its datatype is {}",
            output.name, output.datatype
        ))
    })?;
    let rows = if batched { output.shape.first().copied() } else { None };
    let row_count = usize::try_from(rows.unwrap_or(1)).unwrap_or(0);
    let width = numbers.len().checked_div(row_count).unwrap_or(0);
    if width * row_count != numbers.len() {
        return Err(ServiceError::Internal(format!(
            "output '{}' has {} elements, which its shape {:?} does not explain",
            output.name,
            numbers.len(),
            output.shape
        )));
    }
    let count = count.min(width);
    let mut data = BytesMut::new();
    let mut order: Vec<usize> = Vec::with_capacity(width);
    for row in numbers.chunks_exact(width.max(1)) {
        let descending = |a: &usize, b: &usize| match (row.get(*a), row.get(*b)) {
            (Some(x), Some(y)) => y.rank(*x).then(a.cmp(b)),
            _ => a.cmp(b),
        };
        order.clear();
        order.extend(0..row.len());
        if count < order.len() {
            order.select_nth_unstable_by(count, descending);
            order.truncate(count);
        }
        order.sort_unstable_by(descending);
        for index in &order {
            let Some(value) = row.get(*index) else { continue };
            let mut text = format!("{}:{index}", value.text());
            if let Some(label) = labels.get(*index).filter(|label| !label.is_empty()) {
                text.push(':');
                text.push_str(label);
            }
            data.put_u32_le(u32::try_from(text.len()).unwrap_or(u32::MAX));
            data.put_slice(text.as_bytes());
        }
    }
    output.shape = rows.into_iter().chain([i64::try_from(count).unwrap_or(i64::MAX)]).collect();
    output.datatype = DataType::Bytes;
    output.data = data.freeze();
    Ok(())
}
