//! Tests that messages are read and written without loss, and that errors name the wrong part.

use proptest::prelude::*;
use prost::Message;

use super::*;

fn message(inputs: Vec<InferInputTensor>, raw: Vec<Bytes>) -> ModelInferRequest {
    ModelInferRequest { model_name: "m".into(), inputs, raw_input_contents: raw, ..Default::default() }
}

fn input(datatype: &str, shape: &[i64], contents: Option<InferTensorContents>) -> InferInputTensor {
    InferInputTensor {
        name: "x".into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
        contents,
        ..Default::default()
    }
}

#[test]
fn the_model_is_told_by_the_first_bytes() {
    let bytes = message(vec![], vec![]).encode_to_vec();
    assert_eq!(bytes, b"\x0a\x01m");
    assert_eq!(model_name(&bytes), Peek::Name("m"));
    assert_eq!(model_name(b"\x0a\x01m\x12\x01"), Peek::Name("m"));
    for short in [&b""[..], b"\x0a", b"\x0a\x80", b"\x0a\x05abcd"] {
        assert_eq!(model_name(short), Peek::Short, "{short:?}");
    }
    for other in [&b"\x12\x011"[..], b"\x0a\xff\xff\xff\x7fx", b"\x0a\x01\xff", &[0xff; 20]] {
        assert_eq!(model_name(other), Peek::Unknown, "{other:?}");
    }
}

#[test]
fn what_a_message_becomes_is_bounded_before_it_is_read() {
    let empty_tensors = [0x2a, 0].repeat(1000);
    assert!(decoded_bytes(&empty_tensors) >= 1000 * 2 * size_of::<InferInputTensor>() as u64);
    let empty_raw = [0x3a, 0].repeat(1000);
    assert!(decoded_bytes(&empty_raw) >= 1000 * 2 * size_of::<Bytes>() as u64);
    // A large raw tensor is a slice of its message; numbers are converted.
    let raw = message(vec![input("UINT8", &[1_000_000], None)], vec![vec![1; 1_000_000].into()]);
    assert!(decoded_bytes(&raw.encode_to_vec()) < 10_000);
    let contents = InferTensorContents { int64_contents: vec![1; 1_000_000], ..Default::default() };
    let typed = message(vec![input("INT64", &[1_000_000], Some(contents))], vec![]);
    assert!(decoded_bytes(&typed.encode_to_vec()) >= 24_000_000);
    let strings = InferTensorContents { bytes_contents: vec![Bytes::new(); 1000], ..Default::default() };
    let typed = message(vec![input("BYTES", &[1000], Some(strings))], vec![]);
    assert!(decoded_bytes(&typed.encode_to_vec()) >= 1000 * (2 * size_of::<Bytes>() as u64 + 4));
}

fn typed(datatype: &str, contents: InferTensorContents) -> Vec<u8> {
    let message = message(vec![input(datatype, &[2], Some(contents))], vec![]);
    request_from_message(message).unwrap().inputs[0].data.to_vec()
}

fn error(message: ModelInferRequest) -> String {
    request_from_message(message).unwrap_err().to_string()
}

#[test]
fn typed_contents_of_every_datatype_are_read() {
    let none = InferTensorContents::default;
    let ints = || InferTensorContents { int_contents: vec![-2, 3], ..none() };
    let uints = || InferTensorContents { uint_contents: vec![2, 255], ..none() };
    assert_eq!(typed("BOOL", InferTensorContents { bool_contents: vec![true, false], ..none() }), [1, 0]);
    assert_eq!(typed("INT8", ints()), [0xfe, 3]);
    assert_eq!(typed("INT16", ints()), [0xfe, 0xff, 3, 0]);
    assert_eq!(typed("INT32", ints()), [0xfe, 0xff, 0xff, 0xff, 3, 0, 0, 0]);
    let longs = InferTensorContents { int64_contents: vec![-2, 3], ..none() };
    assert_eq!(typed("INT64", longs), [(-2_i64).to_le_bytes(), 3_i64.to_le_bytes()].concat());
    assert_eq!(typed("UINT8", uints()), [2, 255]);
    assert_eq!(typed("UINT16", uints()), [2, 0, 255, 0]);
    assert_eq!(typed("UINT32", uints()), [2, 0, 0, 0, 255, 0, 0, 0]);
    let longs = InferTensorContents { uint64_contents: vec![u64::MAX, 1], ..none() };
    assert_eq!(typed("UINT64", longs), [u64::MAX.to_le_bytes(), 1_u64.to_le_bytes()].concat());
    let floats = InferTensorContents { fp32_contents: vec![1.5, -0.0], ..none() };
    assert_eq!(typed("FP32", floats), [1.5_f32.to_le_bytes(), (-0.0_f32).to_le_bytes()].concat());
    let floats = InferTensorContents { fp64_contents: vec![1.5, f64::INFINITY], ..none() };
    assert_eq!(typed("FP64", floats), [1.5_f64.to_le_bytes(), f64::INFINITY.to_le_bytes()].concat());
    let strings = InferTensorContents { bytes_contents: vec!["ab".into(), Bytes::new()], ..none() };
    assert_eq!(typed("BYTES", strings), [2, 0, 0, 0, b'a', b'b', 0, 0, 0, 0]);
}

#[test]
fn wrong_contents_are_named() {
    let ints = |values: &[i32]| InferTensorContents { int_contents: values.to_vec(), ..Default::default() };
    let uints = |values: &[u32]| InferTensorContents { uint_contents: values.to_vec(), ..Default::default() };
    let cases = [
        (message(vec![input("INT32", &[3], Some(ints(&[1, 2])))], vec![]), "shape [3] has 3 elements, got 2"),
        (
            message(vec![input("FP32", &[2], Some(ints(&[1, 2])))], vec![]),
            "FP32 has 2 elements in 'int_contents'; expected them in 'fp32_contents'",
        ),
        (message(vec![input("INT8", &[2], Some(ints(&[1, 128])))], vec![]), "element 1 is 128, which INT8 cannot hold"),
        (
            message(vec![input("UINT16", &[1], Some(uints(&[65_536])))], vec![]),
            "element 0 is 65536, which UINT16 cannot hold",
        ),
        (message(vec![input("FP16", &[1], Some(ints(&[1])))], vec![]), "FP16 has no typed contents"),
        (message(vec![input("BF16", &[1], Some(ints(&[1])))], vec![]), "BF16 has no typed contents"),
        (message(vec![input("FLOAT", &[1], None)], vec![vec![0; 4].into()]), "unknown datatype 'FLOAT'"),
        (message(vec![input("INT32", &[2], None)], vec![]), "has no data; expected 'contents'"),
        (message(vec![input("INT32", &[2], None)], vec![vec![0; 7].into()]), "is 8 bytes, got 7 bytes"),
        (message(vec![input("INT32", &[-1], Some(ints(&[])))], vec![]), "negative size -1"),
        (
            message(vec![input("INT32", &[2], Some(ints(&[1, 2])))], vec![vec![0; 8].into()]),
            "contents field must not be specified when using raw_input_contents for",
        ),
    ];
    for (message, expected) in cases {
        let error = error(message);
        assert!(error.starts_with("input 'x': ") && error.contains(expected), "{error} / {expected}");
    }
}

#[test]
fn raw_tensors_are_counted() {
    let four = || Bytes::from_static(&[0; 4]);
    let two = message(vec![input("INT32", &[1], None), input("INT32", &[1], None)], vec![four()]);
    assert_eq!(error(two), "input 'x': has no data: 'raw_input_contents' has only 1 tensors");
    let one = message(vec![input("INT32", &[1], None)], vec![four(), four()]);
    assert!(error(one).starts_with("'raw_input_contents' has 2 tensors, expected one for each of the 1 inputs"));
}

#[test]
fn a_parameter_needs_a_value() {
    let mut message = message(vec![], vec![]);
    message.parameters.insert("priority".into(), InferParameter { parameter_choice: None });
    assert_eq!(error(message), "parameter 'priority' of the request has no value; expected one");
}

#[test]
fn raw_tensors_are_not_copied() {
    let data = Bytes::from(vec![7; 4096]);
    let message = message(vec![input("UINT8", &[4096], None)], vec![data.clone()]);
    let request = request_from_message(message).unwrap();
    assert_eq!(request.inputs[0].data.as_ptr(), data.as_ptr());
    let message = request_to_message(request);
    assert_eq!(message.raw_input_contents[0].as_ptr(), data.as_ptr());
}

#[test]
fn an_input_in_shared_memory_has_no_raw_tensor() {
    let mut shared = input("INT32", &[1], None);
    let region = InferParameter { parameter_choice: Some(ParameterChoice::StringParam("r".into())) };
    shared.parameters.insert(SHARED_MEMORY.into(), region);
    let raw = Bytes::from_static(&[1, 0, 0, 0]);
    let message = message(vec![shared.clone(), input("INT32", &[1], None)], vec![raw.clone()]);
    let request = request_from_message(message.clone()).unwrap();
    assert_eq!(request.inputs[0].data, Bytes::new());
    assert_eq!(request.inputs[1].data, raw);
    assert_eq!(request_to_message(request), message);
    shared.contents = Some(InferTensorContents::default());
    assert!(error(self::message(vec![shared], vec![])).contains("has both 'contents'"));
}

#[test]
fn an_output_in_shared_memory_may_have_an_empty_raw_tensor_or_none() {
    let region = InferParameter { parameter_choice: Some(ParameterChoice::StringParam("r".into())) };
    let output = |name: &str, shared: bool| InferOutputTensor {
        name: name.into(),
        datatype: "INT32".into(),
        shape: vec![1],
        parameters: shared.then(|| (SHARED_MEMORY.to_owned(), region.clone())).into_iter().collect(),
        contents: None,
    };
    let raw = Bytes::from_static(&[1, 0, 0, 0]);
    for raws in [vec![Bytes::new(), raw.clone()], vec![raw.clone()]] {
        let outputs = vec![output("a", true), output("b", false)];
        let message = ModelInferResponse { outputs, raw_output_contents: raws, ..Default::default() };
        let response = response_from_message(message).unwrap();
        assert_eq!(response.outputs[0].data, Bytes::new());
        assert_eq!(response.outputs[1].data, raw);
    }
}

fn parameters() -> impl Strategy<Value = Parameters> {
    let value = prop_oneof![
        any::<bool>().prop_map(Parameter::Bool),
        any::<i64>().prop_map(Parameter::Int64),
        any::<u64>().prop_map(Parameter::Uint64),
        (-1e300..1e300).prop_map(Parameter::Double),
        ".{0,8}".prop_map(Parameter::String),
    ];
    proptest::collection::btree_map("[a-z]{1,6}", value, 0..3)
}

/// A name, datatype, shape and data that go together.
fn tensor() -> impl Strategy<Value = (String, DataType, Vec<i64>, Bytes)> {
    let shape = proptest::collection::vec(0_i64..4, 0..3);
    (".{0,8}", 0..DataType::ALL.len(), shape, any::<u8>()).prop_map(|(name, datatype, shape, fill)| {
        let datatype = DataType::ALL[datatype];
        let count = element_count(&shape).unwrap();
        let data = match datatype.size() {
            Some(size) => vec![fill; count * size],
            None => [3, 0, 0, 0, fill, fill, fill].repeat(count),
        };
        (name, datatype, shape, data.into())
    })
}

proptest! {
    #[test]
    fn a_request_survives_the_wire(
        names in proptest::array::uniform3(".{0,8}"),
        request_parameters in parameters(),
        tensors in proptest::collection::vec((tensor(), parameters()), 0..4),
        outputs in proptest::collection::vec((".{0,8}", parameters()), 0..3),
    ) {
        let [model_name, model_version, id] = names;
        let request = InferRequest {
            model_name,
            model_version,
            id,
            parameters: request_parameters,
            inputs: tensors
                .into_iter()
                .map(|((name, datatype, shape, data), parameters)| InferTensor { name, datatype, shape, parameters, data })
                .collect(),
            outputs: outputs.into_iter().map(|(name, parameters)| RequestedOutput { name, parameters }).collect(),
        };
        let wire = prost::Message::encode_to_vec(&request_to_message(request.clone()));
        let message = prost::Message::decode(Bytes::from(wire)).unwrap();
        prop_assert_eq!(request_from_message(message), Ok(request));
    }

    #[test]
    fn an_answer_survives_the_wire(
        names in proptest::array::uniform3(".{0,8}"),
        response_parameters in parameters(),
        tensors in proptest::collection::vec((tensor(), parameters()), 0..4),
    ) {
        let [model_name, model_version, id] = names;
        let response = InferResponse {
            model_name,
            model_version,
            id,
            parameters: response_parameters,
            outputs: tensors
                .into_iter()
                .map(|((name, datatype, shape, data), parameters)| InferTensor { name, datatype, shape, parameters, data })
                .collect(),
        };
        let wire = prost::Message::encode_to_vec(&response_to_message(response.clone()));
        let message = prost::Message::decode(Bytes::from(wire)).unwrap();
        prop_assert_eq!(response_from_message(message), Ok(response));
    }

    #[test]
    fn any_bytes_are_an_answer_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(message) = prost::Message::decode(Bytes::from(bytes)) {
            let _ = request_from_message(message);
        }
    }
}
