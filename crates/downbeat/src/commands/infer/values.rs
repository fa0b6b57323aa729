//! Values from a file or the command line, on their way to the input that they fill.

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use downbeat_core::tensor::DataType;
use downbeat_protocol::InferTensor;
use downbeat_protocol::infer::element_count;

use super::wanted::{Rows, Wanted, WantedInput};

/// Values with the shape that their file gives them.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    /// The type of the elements.
    pub datatype: DataType,
    /// The sizes.
    pub shape: Vec<i64>,
    /// The elements in the protocol's binary form.
    pub data: Vec<u8>,
}

impl Values {
    /// The datatype and the sizes: `FP64 [2, 3]`.
    pub fn form(&self) -> String {
        format!("{} {:?}", self.datatype, self.shape)
    }

    /// Makes the values into an input of a model: with its datatype, and with its dimensions. `shown`
    /// names the source of the values in errors.
    ///
    /// # Errors
    /// If the values do not fit; the message has both forms.
    pub fn into_input(self, wanted: &Wanted, input: &WantedInput, shown: &str) -> anyhow::Result<InferTensor> {
        let has = self.form();
        let not_fitting =
            |why: &str| anyhow!("input '{}' wants {}, but {shown} has {has}{why}", input.name, input.form());
        let Some(shape) = fit(&self.shape, input, wanted.rows) else { return Err(not_fitting("")) };
        let data = converted(self, input.datatype).map_err(|why| not_fitting(&format!(": {why}")))?;
        Ok(InferTensor {
            name: input.name.clone(),
            datatype: input.datatype,
            shape,
            parameters: Default::default(),
            data: Bytes::from(data),
        })
    }
}

/// The shape in which values of this shape fill an input; `None` if they do not fit.
///
/// Values fit as they are, as one row, or as a list of rows whose elements lie side by side.
fn fit(shape: &[i64], input: &WantedInput, rows: Rows) -> Option<Vec<i64>> {
    let fits = |shape: &[i64], wanted: &[i64]| {
        shape.len() == wanted.len() && shape.iter().zip(wanted).all(|(size, want)| *want == -1 || size == want)
    };
    let row = input.row();
    let count = i64::try_from(element_count(shape).ok()?).ok()?;
    let row_count = row.iter().try_fold(1_i64, |all, size| (*size >= 0).then(|| all.checked_mul(*size))?);
    if !input.has_rows {
        let is_flat = matches!(shape, [] | [_] | [1, _]) && row_count == Some(count);
        return fits(shape, row).then(|| shape.to_vec()).or(is_flat.then(|| row.to_vec()));
    }
    debug_assert!(rows != Rows::None, "an input has rows exactly if its model has them");
    if shape.first().is_some_and(|_| fits(shape.get(1..).unwrap_or_default(), row)) {
        return Some(shape.to_vec());
    }
    let one = || std::iter::once(1).chain(shape.iter().copied()).collect();
    if fits(shape, row) {
        return Some(one());
    }
    let size = row_count.filter(|size| *size > 0)?;
    let rows = (count % size == 0).then(|| count / size)?;
    // A table has a row for each row of the input, whose elements lie side by side.
    let is_list = match shape {
        [_, columns] => *columns == size,
        shape => shape.len() <= 1,
    };
    is_list.then(|| std::iter::once(rows).chain(row.iter().copied()).collect())
}

/// The elements as another datatype. Floating-point numbers are rounded to a shorter type. All other
/// conversions keep each value.
fn converted(values: Values, to: DataType) -> Result<Vec<u8>, String> {
    use DataType::Bytes;
    let from = values.datatype;
    if from == to {
        return Ok(values.data);
    }
    match (from, to) {
        (Bytes, _) => return Err("texts are no numbers".to_owned()),
        (_, Bytes) => return Err("numbers are no texts".to_owned()),
        _ if from.is_float() && !to.is_float() => {
            return Err(format!("convert the values to {to} yourself, by rounding or not"));
        }
        _ => {}
    }
    let mut out = Vec::new();
    let count = values.data.len() / from.size().unwrap_or(1);
    out.try_reserve_exact(count.saturating_mul(to.size().unwrap_or(1)))
        .map_err(|_| format!("{count} elements are more than the memory holds"))?;
    for (place, number) in Numbers::of(from, &values.data).enumerate() {
        push(&mut out, to, number)
            .ok_or_else(|| format!("element {place} is {number}, which is out of the range of {to}"))?;
    }
    Ok(out)
}

/// An element that is no text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// An integer or a truth value.
    Integer(i128),
    /// A floating-point number.
    Float(f64),
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Number::Integer(value) => write!(f, "{value}"),
            Number::Float(value) => write!(f, "{value}"),
        }
    }
}

/// Appends a number in the binary form of a datatype; `None` if the datatype cannot hold the number.
pub fn push(out: &mut Vec<u8>, datatype: DataType, number: Number) -> Option<()> {
    let float = match number {
        Number::Integer(value) => value as f64,
        Number::Float(value) => value,
    };
    // A finite value must not become infinite.
    let fits = |rounded: f64| (rounded.is_finite() || !float.is_finite()).then_some(());
    macro_rules! integer {
        ($type:ty) => {{
            let Number::Integer(value) = number else { return None };
            out.extend(<$type>::try_from(value).ok()?.to_le_bytes());
        }};
    }
    match datatype {
        DataType::Bool => {
            let Number::Integer(value @ (0 | 1)) = number else { return None };
            out.push(u8::from(value == 1));
        }
        DataType::Uint8 => integer!(u8),
        DataType::Uint16 => integer!(u16),
        DataType::Uint32 => integer!(u32),
        DataType::Uint64 => integer!(u64),
        DataType::Int8 => integer!(i8),
        DataType::Int16 => integer!(i16),
        DataType::Int32 => integer!(i32),
        DataType::Int64 => integer!(i64),
        DataType::Fp16 => {
            let value = half::f16::from_f64(float);
            fits(value.to_f64())?;
            out.extend(value.to_le_bytes());
        }
        DataType::Bf16 => {
            let value = half::bf16::from_f64(float);
            fits(value.to_f64())?;
            out.extend(value.to_le_bytes());
        }
        DataType::Fp32 => {
            fits(f64::from(float as f32))?;
            out.extend((float as f32).to_le_bytes());
        }
        DataType::Fp64 => out.extend(float.to_le_bytes()),
        DataType::Bytes => return None,
    }
    Some(())
}

/// The elements of a tensor of numbers, one after the other. A tensor of texts has none.
pub struct Numbers<'a> {
    datatype: DataType,
    rest: &'a [u8],
}

impl<'a> Numbers<'a> {
    /// The elements of `data`, in the binary form of the datatype.
    pub fn of(datatype: DataType, data: &'a [u8]) -> Self {
        Numbers { datatype, rest: data }
    }
}

impl Iterator for Numbers<'_> {
    type Item = Number;

    fn next(&mut self) -> Option<Number> {
        macro_rules! take {
            ($type:ty) => {{
                let (bytes, rest) = self.rest.split_first_chunk()?;
                self.rest = rest;
                <$type>::from_le_bytes(*bytes)
            }};
        }
        Some(match self.datatype {
            DataType::Bool => Number::Integer(i128::from(take!(u8) != 0)),
            DataType::Uint8 => Number::Integer(take!(u8).into()),
            DataType::Uint16 => Number::Integer(take!(u16).into()),
            DataType::Uint32 => Number::Integer(take!(u32).into()),
            DataType::Uint64 => Number::Integer(take!(u64).into()),
            DataType::Int8 => Number::Integer(take!(i8).into()),
            DataType::Int16 => Number::Integer(take!(i16).into()),
            DataType::Int32 => Number::Integer(take!(i32).into()),
            DataType::Int64 => Number::Integer(take!(i64).into()),
            DataType::Fp16 => Number::Float(take!(half::f16).to_f64()),
            DataType::Bf16 => Number::Float(take!(half::bf16).to_f64()),
            DataType::Fp32 => Number::Float(take!(f32).into()),
            DataType::Fp64 => Number::Float(take!(f64)),
            DataType::Bytes => return None,
        })
    }
}

/// The elements of a tensor of texts. A cut text ends the list.
pub struct Texts<'a>(pub &'a [u8]);

impl<'a> Iterator for Texts<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (length, after) = self.0.split_first_chunk::<4>()?;
        let (text, rest) = after.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)?;
        self.0 = rest;
        Some(text)
    }
}

/// Appends a text with its length.
///
/// # Errors
/// If the text is longer than the protocol can say.
pub fn push_text(out: &mut Vec<u8>, text: &[u8]) -> anyhow::Result<()> {
    let length = u32::try_from(text.len()).context("the text or picture is longer than 4 GiB")?;
    out.extend(length.to_le_bytes());
    out.extend_from_slice(text);
    Ok(())
}

/// Joins inputs of one name into one: rows after rows.
///
/// # Errors
/// If the rows are of different shapes.
pub fn joined(parts: Vec<InferTensor>, input: &WantedInput) -> anyhow::Result<InferTensor> {
    let mut parts = parts.into_iter();
    let Some(mut all) = parts.next() else { bail!("input '{}' has no values", input.name) };
    let mut data = Vec::new();
    for part in parts {
        let (Some((rows, row)), Some((more, other))) = (all.shape.split_first(), part.shape.split_first()) else {
            bail!("input '{}' takes one value, but several are given", input.name);
        };
        if !input.has_rows {
            bail!("input '{}' takes one value, but several are given; the model has no rows", input.name);
        }
        if row != other {
            bail!("input '{}' has rows of different shapes, {row:?} and {other:?}; send them apart", input.name);
        }
        let rows = rows + more;
        if data.is_empty() {
            data = all.data.to_vec();
        }
        data.extend_from_slice(&part.data);
        if let Some(first) = all.shape.first_mut() {
            *first = rows;
        }
    }
    if !data.is_empty() {
        all.data = Bytes::from(data);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(datatype: DataType, shape: &[i64], has_rows: bool) -> WantedInput {
        WantedInput { name: "x".into(), datatype, shape: shape.to_vec(), optional: false, has_rows }
    }

    fn fitted(shape: &[i64], wanted: &[i64]) -> Option<Vec<i64>> {
        fit(shape, &input(DataType::Fp32, wanted, true), Rows::UpTo(8))
    }

    #[test]
    fn values_fit_as_they_are_as_one_row_and_as_a_flat_list_of_rows() {
        assert_eq!(fitted(&[5, 3], &[-1, 3]), Some(vec![5, 3]));
        assert_eq!(fitted(&[3], &[-1, 3]), Some(vec![1, 3]));
        assert_eq!(fitted(&[6], &[-1, 3]), Some(vec![2, 3]));
        assert_eq!(fitted(&[4], &[-1, 1]), Some(vec![4, 1]));
        assert_eq!(fitted(&[4, 1], &[-1]), Some(vec![4]));
        assert_eq!(fitted(&[5, 6], &[-1, 2, 3]), Some(vec![5, 2, 3]));
        assert_eq!(fitted(&[], &[-1, 1]), Some(vec![1, 1]));
        assert_eq!(fitted(&[7], &[-1, -1]), Some(vec![1, 7]));
        assert_eq!(fitted(&[2, 7], &[-1, -1]), Some(vec![2, 7]));
        for wrong in [&[5, 4][..], &[4], &[2, 3, 1], &[-1, 3], &[i64::MAX, i64::MAX]] {
            assert_eq!(fitted(wrong, &[-1, 3]), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_model_without_rows_takes_its_own_shape_or_a_flat_list() {
        let fitted = |shape: &[i64], wanted: &[i64]| fit(shape, &input(DataType::Fp32, wanted, false), Rows::None);
        assert_eq!(fitted(&[], &[]), Some(vec![]));
        assert_eq!(fitted(&[1], &[]), Some(vec![]));
        assert_eq!(fitted(&[6], &[2, 3]), Some(vec![2, 3]));
        assert_eq!(fitted(&[3, 2], &[2, 3]), None);
        assert_eq!(fitted(&[0], &[0]), Some(vec![0]));
    }

    fn floats(values: &[f64]) -> Values {
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Values { datatype: DataType::Fp64, shape: vec![values.len() as i64], data }
    }

    #[test]
    fn numbers_are_converted_if_the_other_type_holds_them() {
        let shorter = converted(floats(&[1.5, f64::NAN, f64::INFINITY]), DataType::Fp32).unwrap();
        assert_eq!(shorter[..4], 1.5_f32.to_le_bytes());
        let error = converted(floats(&[0.0, 1e300]), DataType::Fp32).unwrap_err();
        assert!(error.starts_with("element 1 is 1000") && error.ends_with("out of the range of FP32"), "{error}");
        assert!(converted(floats(&[1e6]), DataType::Fp16).is_err());
        assert!(
            converted(floats(&[1.0]), DataType::Int64).unwrap_err().contains("convert the values to INT64 yourself")
        );
        let integers = |values: &[i64]| Values {
            datatype: DataType::Int64,
            shape: vec![values.len() as i64],
            data: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        assert_eq!(converted(integers(&[1, 0]), DataType::Bool).unwrap(), [1, 0]);
        assert_eq!(converted(integers(&[200]), DataType::Uint8).unwrap(), [200]);
        for (value, to) in [(2, DataType::Bool), (-1, DataType::Uint64), (128, DataType::Int8), (1, DataType::Bytes)] {
            assert!(converted(integers(&[value]), to).is_err(), "{value} {to}");
        }
    }

    #[test]
    fn what_does_not_fit_is_told_with_both_forms() {
        let wanted = Wanted::of(&[("x", DataType::Fp32, &[-1, 4])]);
        let error = floats(&[1.0, 2.0, 3.0]).into_input(&wanted, &wanted.inputs[0], "a.npy").unwrap_err();
        assert_eq!(error.to_string(), "input 'x' wants FP32 [rows, 4], but a.npy has FP64 [3]");
    }

    #[test]
    fn a_cut_text_ends_the_list() {
        let mut data = Vec::new();
        push_text(&mut data, b"ab").unwrap();
        data.extend([9, 0, 0, 0, 1]);
        assert_eq!(Texts(&data).collect::<Vec<_>>(), [b"ab"]);
    }
}
