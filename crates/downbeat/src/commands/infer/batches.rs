//! Divides rows among requests, and joins the rows of their answers.

use anyhow::{Context, bail};
use bytes::Bytes;
use downbeat_protocol::infer::element_count;
use downbeat_protocol::{InferResponse, InferTensor};

use super::values::Texts;
use super::wanted::Rows;

/// The inputs of each request: all rows, in parts that the model takes at once.
///
/// # Errors
/// If an input's data is shorter than its shape.
pub fn split(inputs: Vec<InferTensor>, rows: Rows) -> anyhow::Result<Vec<Vec<InferTensor>>> {
    let most = match rows {
        Rows::UpTo(most) => most.max(1),
        Rows::One => 1,
        Rows::Any | Rows::None => usize::MAX,
    };
    let rows =
        inputs.first().and_then(|input| input.shape.first()).map_or(0, |rows| usize::try_from(*rows).unwrap_or(0));
    if rows <= most {
        return Ok(vec![inputs]);
    }
    let mut parts: Vec<Vec<InferTensor>> = (0..rows.div_ceil(most)).map(|_| Vec::with_capacity(inputs.len())).collect();
    for input in &inputs {
        let mut rest = input.data.clone();
        for (place, part) in parts.iter_mut().enumerate() {
            let its = most.min(rows - place * most);
            let length = length_of(input, &rest, its, rows)
                .filter(|length| *length <= rest.len())
                .with_context(|| format!("input '{}' has fewer rows than its shape says", input.name))?;
            let mut shape = input.shape.clone();
            if let Some(first) = shape.first_mut() {
                *first = its as i64;
            }
            part.push(InferTensor { shape, data: rest.split_to(length), ..input.clone() });
        }
    }
    Ok(parts)
}

/// Bytes of the next `part` of all `rows` of a tensor, whose further data is `rest`.
fn length_of(tensor: &InferTensor, rest: &[u8], part: usize, rows: usize) -> Option<usize> {
    if tensor.datatype.size().is_some() {
        return (tensor.data.len() / rows).checked_mul(part);
    }
    let row = element_count(tensor.shape.get(1..)?).ok()?;
    let mut texts = Texts(rest);
    for _ in 0..row.checked_mul(part)? {
        texts.next()?;
    }
    Some(rest.len() - texts.0.len())
}

/// Joins the rows of all answers into one answer. `rows` are the rows of each request.
///
/// # Errors
/// If an output does not have a row for each row of its request.
pub fn join(answers: Vec<InferResponse>, rows: &[i64]) -> anyhow::Result<InferResponse> {
    let mut answers = answers.into_iter().zip(rows);
    let Some((mut all, first)) = answers.next() else { bail!("there is no answer") };
    let mut rest = answers.peekable();
    if rest.peek().is_none() {
        return Ok(all);
    }
    let mut data: Vec<Vec<u8>> = all.outputs.iter().map(|output| output.data.to_vec()).collect();
    all.outputs.iter().try_for_each(|output| check_rows(output, *first))?;
    for (answer, rows) in rest {
        if answer.outputs.len() != all.outputs.len() {
            bail!("the answers of the server have different outputs");
        }
        for ((output, more), data) in all.outputs.iter_mut().zip(&answer.outputs).zip(&mut data) {
            check_rows(more, *rows)?;
            if output.shape.get(1..) != more.shape.get(1..) || output.name != more.name {
                bail!(
                    "output '{}' has the shape {:?} in one answer and {:?} in another; send the rows apart",
                    output.name,
                    output.shape,
                    more.shape
                );
            }
            if let Some(first) = output.shape.first_mut() {
                *first += rows;
            }
            data.extend_from_slice(&more.data);
        }
    }
    for (output, data) in all.outputs.iter_mut().zip(data) {
        output.data = Bytes::from(data);
    }
    Ok(all)
}

fn check_rows(output: &InferTensor, rows: i64) -> anyhow::Result<()> {
    if output.shape.first() == Some(&rows) {
        return Ok(());
    }
    bail!(
        "output '{}' of shape {:?} has no row for each of the request's {rows} rows, so that the answers of several \
         requests cannot be joined; send at most as many rows as the model takes at once",
        output.name,
        output.shape
    )
}

#[cfg(test)]
mod tests {
    use downbeat_core::tensor::DataType;

    use super::*;

    fn tensor(datatype: DataType, shape: &[i64], data: &[u8]) -> InferTensor {
        let data = Bytes::copy_from_slice(data);
        InferTensor { name: "x".into(), datatype, shape: shape.to_vec(), parameters: Default::default(), data }
    }

    fn answer(output: InferTensor) -> InferResponse {
        InferResponse { outputs: vec![output], ..InferResponse::default() }
    }

    #[test]
    fn rows_are_divided_and_joined_in_order() {
        let numbers = tensor(DataType::Uint8, &[5, 2], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let texts = tensor(DataType::Bytes, &[5, 1], b"\x01\0\0\0a\0\0\0\0\x02\0\0\0bc\0\0\0\0\x01\0\0\0d");
        let parts = split(vec![numbers.clone(), texts.clone()], Rows::UpTo(2)).unwrap();
        assert_eq!(parts.iter().map(|part| part[0].shape[0]).collect::<Vec<_>>(), [2, 2, 1]);
        assert_eq!(parts[1][0].data.as_ref(), [4, 5, 6, 7]);
        assert_eq!(parts[1][1].data.as_ref(), b"\x02\0\0\0bc\0\0\0\0");
        for place in [0, 1] {
            let answers = parts.iter().map(|part| answer(part[place].clone())).collect();
            assert_eq!(join(answers, &[2, 2, 1]).unwrap().outputs[0], [&numbers, &texts][place].clone());
        }
        assert_eq!(split(vec![numbers.clone()], Rows::Any).unwrap().len(), 1);
        assert_eq!(split(vec![numbers], Rows::One).unwrap().len(), 5);
    }

    #[test]
    fn outputs_without_a_row_for_each_row_are_refused() {
        let whole = tensor(DataType::Uint8, &[1], &[7]);
        let error = join(vec![answer(whole.clone()), answer(whole.clone())], &[2, 2]).unwrap_err().to_string();
        assert!(error.contains("no row for each of the request's 2 rows"), "{error}");
        assert_eq!(join(vec![answer(whole.clone())], &[2]).unwrap().outputs[0], whole, "one answer stays as it is");
        assert!(split(vec![tensor(DataType::Bytes, &[3], b"\x09\0\0\0a")], Rows::One).is_err());
    }
}
