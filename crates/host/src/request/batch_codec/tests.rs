//! Requests that fit and do not, and batches made of them and parted.

use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_protocol::{InferRequest, InferTensor};
use proptest::prelude::*;

use super::*;

fn binding(name: &str, datatype: DataType, dims: &[i64]) -> TensorBinding {
    TensorBinding {
        client: TensorSpec { name: name.to_owned(), datatype, dims: dims.to_vec() },
        model_index: 0,
        model_dims: dims.to_vec(),
        labels: [].into(),
        batched: true,
        optional: false,
    }
}

fn codec() -> BatchCodec {
    let mut text = binding("text", DataType::Bytes, &[-1, -1]);
    text.model_index = 1;
    // The configuration's order is not the engine's.
    BatchCodec::new(vec![text, binding("x", DataType::Int16, &[-1, 2])], vec![], 8)
}

fn input(name: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> InferTensor {
    InferTensor {
        name: name.to_owned(),
        datatype,
        shape: shape.to_vec(),
        parameters: Default::default(),
        data: data.into(),
    }
}

fn strings(elements: &[&[u8]]) -> Vec<u8> {
    elements.iter().flat_map(|e| [&(e.len() as u32).to_le_bytes()[..], e].concat()).collect()
}

fn request(inputs: Vec<InferTensor>) -> InferRequest {
    InferRequest { model_name: "m".to_owned(), inputs, ..Default::default() }
}

fn good() -> Vec<InferTensor> {
    vec![
        input("text", DataType::Bytes, &[2, 1], strings(&[b"a", b""])),
        input("x", DataType::Int16, &[2, 2], vec![1; 8]),
    ]
}

/// Sizes that the configuration fixes do not vary, though they vary in the file.
#[test]
fn the_largest_batch_and_longest_request_bound_the_shapes() {
    let (mut table, image) =
        (binding("table", DataType::Fp32, &[-1]), binding("image", DataType::Fp32, &[-1, 3, 64, 64]));
    table.batched = false;
    let codec = BatchCodec::new(vec![binding("ids", DataType::Int64, &[-1, -1]), image, table], vec![], 8);
    let range = |name: &str, least: &[usize], most: &[Option<usize>]| ShapeRange {
        name: name.to_owned(),
        least: least.into(),
        most: most.into(),
    };
    let image = range("image", &[1, 3, 64, 64], &[Some(8), Some(3), Some(64), Some(64)]);
    let of = |longest: Option<usize>| {
        vec![range("ids", &[1, 1], &[Some(8), longest]), image.clone(), range("table", &[1], &[longest])]
    };
    assert_eq!(codec.shape_ranges(Some(128)), of(Some(128)));
    assert_eq!(codec.shape_ranges(None), of(None));
}

#[test]
fn a_request_that_does_not_fit_is_told_what_was_expected() {
    type Change = fn(&mut Vec<InferTensor>);
    let cases: [(Change, &str); 8] = [
        (|i| i[1].name = "y".into(), "unexpected inference input 'y' for model 'm'; its inputs are ['x','text']"),
        (
            |i| i.truncate(1),
            "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['text'], but missing required input(s) ['x']. Please provide all required input(s).",
        ),
        (|i| i[1].datatype = DataType::Fp32, "inference input 'x' data-type is 'FP32', but model 'm' expects 'INT16'"),
        (
            |i| i[1].shape = vec![2, 3],
            "unexpected shape for input 'x' for model 'm'. Expected [-1,2], got [2,3]. (-1: any size; the first dimension is the batch)",
        ),
        (
            |i| i[1].data = vec![0; 7].into(),
            "input byte size mismatch for input 'x' for model 'm'. Expected 8, got 7 (shape [2,2] of INT16)",
        ),
        (
            |i| i[0].shape = vec![1, 2],
            "input 'text' batch size does not match other inputs for 'm': this input has 1, another input has 2",
        ),
        (
            |i| i[0].data = vec![9, 0, 0, 0, 1].into(),
            "expected 2 string elements for inference input 'text' for model 'm', got data that end inside an element (shape [2,1]; each element is its length as a little-endian 32-bit number, then its bytes)",
        ),
        (
            |i| i[0].shape = vec![i64::MAX, i64::MAX],
            "input byte size mismatch for input 'text' for model 'm'. Expected a shape with fewer elements, got 9 (shape [9223372036854775807,9223372036854775807] of BYTES)",
        ),
    ];
    for (change, message) in cases {
        let mut inputs = good();
        change(&mut inputs);
        let error = codec().admit(&mut request(inputs)).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let large =
        vec![input("text", DataType::Bytes, &[9, 0], vec![]), input("x", DataType::Int16, &[9, 2], vec![0; 36])];
    let error = codec().admit(&mut request(large)).unwrap_err();
    assert!(error.to_string().contains("inference request batch-size must be <= 8 for 'm'"), "{error}");
    assert_eq!(codec().admit(&mut request(good())).unwrap().rows, 2);
}

#[test]
fn an_optional_input_that_is_left_out_has_its_value_in_each_item() {
    let mut x = binding("x", DataType::Int16, &[-1, 2]);
    x.optional = true;
    let mut text = binding("text", DataType::Bytes, &[-1, -1]);
    text.model_index = 1;
    let value = |shape: &[usize]| {
        let value = DefaultValue { shape: shape.to_vec(), data: vec![1, 0, 2, 0].into() };
        BTreeMap::from([("x".to_owned(), value)])
    };
    let codec = || BatchCodec::new(vec![x.clone(), text.clone()], vec![], 8);
    assert!(codec().with_defaults(&value(&[2, 2])).unwrap_err().contains("set max_batch_size: 0"));
    assert!(codec().with_defaults(&value(&[1, 3])).unwrap_err().contains("'x' should have shape [-1,2]"));
    let codec = codec().with_defaults(&value(&[1, 2])).unwrap();
    let only_text = || vec![input("text", DataType::Bytes, &[2, 1], strings(&[b"a", b""]))];
    let left_out = codec.admit(&mut request(only_text())).unwrap();
    assert_eq!((left_out.rows, &left_out.inputs[0][..]), (2, &[1, 0, 2, 0, 1, 0, 2, 0][..]));
    let sent = codec.admit(&mut request(good())).unwrap();
    assert_eq!(&sent.inputs[0][..], [1; 8]);
    assert_eq!(codec.shape_key(&left_out), codec.shape_key(&sent), "they share batches");
    let told = |inputs| codec.admit(&mut request(inputs)).unwrap_err().to_string();
    assert!(told(vec![]).starts_with("expected number of inputs between 1 and 2 but got 0 inputs for model 'm'"));
    assert!(told(vec![only_text().remove(0), only_text().remove(0)]).starts_with("expected number of inputs"));
}

#[test]
fn requests_of_different_shapes_have_different_keys() {
    let key = |words: i64, data: Vec<u8>| {
        let mut inputs = good();
        inputs[0] = input("text", DataType::Bytes, &[2, words], data);
        codec().shape_key(&codec().admit(&mut request(inputs)).unwrap())
    };
    assert_eq!(key(1, strings(&[b"a", b"b"])), key(1, strings(&[b"longer", b""])));
    assert_ne!(key(1, strings(&[b"a", b"b"])), key(2, strings(&[b"a", b"b", b"c", b"d"])));
}

proptest! {
    /// Requests that enter a batch come out of it unchanged, each with its own rows.
    #[test]
    fn a_batch_separates_into_what_it_was_made_of(
        members in prop::collection::vec(prop::collection::vec((any::<[i16; 2]>(), ".{0,5}"), 1..4), 1..6)
    ) {
        let mut text = binding("text", DataType::Bytes, &[-1, 1]);
        text.model_index = 1;
        let both = vec![binding("x", DataType::Int16, &[-1, 2]), text];
        let codec = BatchCodec::new(both.clone(), both, 64);
        let admitted: Vec<Admitted> = members
            .iter()
            .map(|rows| {
                let numbers = rows.iter().flat_map(|(x, _)| x.iter().flat_map(|v| v.to_le_bytes())).collect();
                let words: Vec<&[u8]> = rows.iter().map(|(_, word)| word.as_bytes()).collect();
                let n = rows.len() as i64;
                codec.admit(&mut request(vec![
                    input("x", DataType::Int16, &[n, 2], numbers),
                    input("text", DataType::Bytes, &[n, 1], strings(&words)),
                ])).unwrap()
            })
            .collect();
        let rows: Vec<u32> = admitted.iter().map(|a| a.rows).collect();
        let state = codec.assemble(admitted.iter()).unwrap();
        prop_assert_eq!(&state.tensors[0].shape, &vec![rows.iter().sum::<u32>() as usize, 2]);
        let outputs = codec.separate(state, &rows).unwrap();
        for (given, got) in admitted.iter().zip(&outputs) {
            prop_assert_eq!(&given.inputs[0], &got[0].data);
            prop_assert_eq!(&given.inputs[1], &got[1].data);
            prop_assert_eq!(&got[0].shape, &vec![i64::from(given.rows), 2]);
        }
    }
}
