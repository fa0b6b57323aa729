//! Compares an answer of a new version with the old version's answer, or with its declared outputs.

use downbeat_host::run::difference::is_near;
use downbeat_protocol::{InferResponse, InferTensor, RequestedOutput};
use downbeat_repository::TensorBinding;
use downbeat_service::classification::{Number, numbers};

/// How an answer of the new version breaks the old version's declaration, if it does.
pub fn misfit(declared: &[TensorBinding], wanted: &[RequestedOutput], answer: &InferResponse) -> Option<String> {
    for InferTensor { name, datatype, shape, .. } in &answer.outputs {
        let Some(binding) = declared.iter().find(|binding| binding.client.name == *name) else {
            return Some(format!("the old version has no output '{name}'"));
        };
        let dims = &binding.client.dims;
        let fits = dims.len() == shape.len() && dims.iter().zip(shape).all(|(dim, size)| *dim < 0 || dim == size);
        if *datatype != binding.datatype() || !fits {
            return Some(format!(
                "output '{name}' is {datatype} {shape:?}; the old version declares {} {dims:?}",
                binding.datatype()
            ));
        }
    }
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|output| output.name == name);
    let lacks = |name: &&str| is_wanted(name) && answer.outputs.iter().all(|output| output.name != *name);
    let missing = declared.iter().map(|binding| binding.client.name.as_str()).find(lacks);
    missing.map(|name| format!("output '{name}' is missing"))
}

/// Whether two answers have the same outputs with the same types and shapes.
pub fn have_same_form(a: &InferResponse, b: &InferResponse) -> bool {
    let form = |output: &InferTensor| (output.name.clone(), output.datatype, output.shape.clone());
    a.outputs.iter().map(form).eq(b.outputs.iter().map(form))
}

/// The first difference between two answers, in words.
pub fn difference(old: &InferResponse, new: &InferResponse, tolerance: f64) -> Option<String> {
    if !have_same_form(old, new) {
        let form = |answer: &InferResponse| {
            let outputs = answer.outputs.iter();
            let each = outputs.map(|output| format!("'{}' {} {:?}", output.name, output.datatype, output.shape));
            each.collect::<Vec<_>>().join(", ")
        };
        return Some(format!("the outputs are {}; the old version's are {}", form(new), form(old)));
    }
    old.outputs.iter().zip(&new.outputs).find_map(|(old, new)| {
        if old.data == new.data {
            return None;
        }
        let all = [old, new].map(|output| numbers(output.datatype, &output.data));
        let [Some(a), Some(b)] = all else { return Some(format!("output '{}' differs", old.name)) };
        let differ = |(a, b): &(Number, Number)| match (a, b) {
            (Number::Real(a), Number::Real(b)) => !is_near(*a, *b, tolerance),
            (Number::Signed(a), Number::Signed(b)) => a != b,
            (Number::Unsigned(a), Number::Unsigned(b)) => a != b,
            _ => true,
        };
        let (index, (a, b)) = a.into_iter().zip(b).enumerate().find(|(_, pair)| differ(pair))?;
        Some(format!("element {index} of output '{}' is {}; the old version's is {}", old.name, b.real(), a.real()))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use downbeat_core::tensor::{DataType, TensorSpec};

    use super::*;

    fn output(name: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> InferTensor {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        InferTensor { name, datatype, shape, parameters: Default::default(), data: data.into() }
    }

    fn answer(outputs: Vec<InferTensor>) -> InferResponse {
        InferResponse { outputs, ..InferResponse::default() }
    }

    fn reals(values: &[f32]) -> InferResponse {
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        answer(vec![output("y", DataType::Fp32, &[1, values.len() as i64], data)])
    }

    #[test]
    fn numbers_may_differ_by_the_tolerance_and_whole_numbers_may_not() {
        let old = reals(&[1.0, f32::NAN, 1000.0]);
        assert_eq!(difference(&old, &reals(&[1.001, f32::NAN, 1000.5]), 1e-3), None);
        let words = difference(&old, &reals(&[1.01, f32::NAN, 1000.0]), 1e-3).unwrap();
        assert!(words.starts_with("element 0 of output 'y' is 1.0"), "{words}");
        assert!(difference(&old, &reals(&[1.0, 0.0, 1000.0]), 1e-3).is_some());
        let whole = |value| answer(vec![output("y", DataType::Int32, &[1], i32::to_le_bytes(value).to_vec())]);
        assert_eq!(
            difference(&whole(7), &whole(8), 1e3).unwrap(),
            "element 0 of output 'y' is 8; the old version's is 7"
        );
        let text = |byte| answer(vec![output("y", DataType::Bytes, &[1], vec![1, 0, 0, 0, byte])]);
        assert_eq!(difference(&text(b'a'), &text(b'a'), 0.0), None);
        assert_eq!(difference(&text(b'a'), &text(b'b'), 0.0).unwrap(), "output 'y' differs");
    }

    #[test]
    fn answers_of_another_form_differ_and_do_not_fit() {
        let old = reals(&[1.0, 2.0]);
        assert!(difference(&old, &reals(&[1.0]), 1.0).unwrap().starts_with("the outputs are 'y' FP32 [1, 1]"));
        let binding = |name: &str| TensorBinding {
            client: TensorSpec { name: name.to_owned(), datatype: DataType::Fp32, dims: vec![-1, 2] },
            model_index: 0,
            model_dims: vec![-1, 2],
            labels: Arc::from([]),
            batched: true,
            optional: false,
        };
        let declared = [binding("y"), binding("z")];
        let wanted = [RequestedOutput { name: "y".to_owned(), ..RequestedOutput::default() }];
        assert_eq!(misfit(&declared, &wanted, &old), None);
        assert_eq!(misfit(&declared, &[], &old).unwrap(), "output 'z' is missing");
        let words = misfit(&declared, &wanted, &reals(&[1.0])).unwrap();
        assert_eq!(words, "output 'y' is FP32 [1, 1]; the old version declares FP32 [-1, 2]");
        let other = answer(vec![output("x", DataType::Fp32, &[1, 2], vec![0; 8])]);
        assert_eq!(misfit(&declared, &[], &other).unwrap(), "the old version has no output 'x'");
    }
}
