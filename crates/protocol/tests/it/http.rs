//! The HTTP form.

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use downbeat_protocol::http::{
    OutputForms, RequestForm, config_to_json, parse_request, parse_response, statistics_from_json, statistics_to_json,
    write_request, write_response,
};
use downbeat_protocol::inference::{InferStatistics, ModelConfig, ModelStatistics, StatisticDuration};
use downbeat_protocol::{InferRequest, InferResponse, InferTensor, Parameter, Parameters, RequestedOutput};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::tensors::{Tensor, any_json_tensor, any_tensor};

fn any_parameters() -> impl Strategy<Value = Parameters> {
    let value = prop_oneof![
        any::<bool>().prop_map(Parameter::Bool),
        any::<i64>().prop_map(Parameter::Int64),
        ((1_u64 << 63)..).prop_map(Parameter::Uint64),
        (-1e300..1e300_f64).prop_map(Parameter::Double),
        prop::sample::select(vec![f64::INFINITY, f64::NEG_INFINITY]).prop_map(Parameter::Double),
        any::<String>().prop_map(Parameter::String),
    ];
    btree_map("[ a-z\"\\\\é]{0,12}", value, 0..4)
}

fn input((name, parameters, (datatype, shape, data)): (String, Parameters, Tensor)) -> InferTensor {
    InferTensor { name, datatype, shape, parameters, data }
}

fn output((name, parameters, (datatype, shape, data)): (String, Parameters, Tensor)) -> InferTensor {
    InferTensor { name, datatype, shape, parameters, data }
}

fn any_request(tensor: impl Strategy<Value = Tensor>) -> impl Strategy<Value = InferRequest> {
    let inputs = vec((any::<String>(), any_parameters(), tensor).prop_map(input), 0..4);
    let outputs = vec(
        (any::<String>(), any_parameters()).prop_map(|(name, parameters)| RequestedOutput { name, parameters }),
        0..3,
    );
    (any::<String>(), any_parameters(), inputs, outputs).prop_map(|(id, parameters, inputs, outputs)| InferRequest {
        model_name: "m".to_owned(),
        model_version: "1".to_owned(),
        id,
        parameters,
        inputs,
        outputs,
    })
}

fn any_response(tensor: impl Strategy<Value = Tensor>) -> impl Strategy<Value = InferResponse> {
    let outputs = vec((any::<String>(), any_parameters(), tensor).prop_map(output), 0..4);
    (any::<String>(), any::<String>(), any_parameters(), outputs).prop_map(|(id, model_name, parameters, outputs)| {
        InferResponse { model_name, model_version: "3".to_owned(), id, parameters, outputs }
    })
}

proptest! {
    #[test]
    fn a_binary_request_is_read_back(request in any_request(any_tensor())) {
        let encoded = write_request(&request, RequestForm::BINARY).unwrap();
        let (read, forms) =
            parse_request("m".to_owned(), "1".to_owned(), encoded.bytes, encoded.header_length).unwrap();
        prop_assert_eq!(read, request);
        prop_assert!(forms.is_binary("anything"));
    }

    #[test]
    fn a_json_request_is_read_back(request in any_request(any_json_tensor())) {
        let encoded = write_request(&request, RequestForm::JSON).unwrap();
        prop_assert_eq!(encoded.header_length, None);
        let (read, forms) = parse_request("m".to_owned(), "1".to_owned(), encoded.bytes, None).unwrap();
        prop_assert_eq!(read, request);
        prop_assert!(!forms.is_binary("anything"));
    }

    #[test]
    fn a_binary_response_is_read_back(response in any_response(any_tensor())) {
        let encoded = write_response(&response, &OutputForms::all(true)).unwrap();
        prop_assert_eq!(parse_response(encoded.bytes, encoded.header_length).unwrap(), response);
    }

    #[test]
    fn a_json_response_is_read_back(response in any_response(any_json_tensor())) {
        let encoded = write_response(&response, &OutputForms::all(false)).unwrap();
        prop_assert_eq!(encoded.header_length, None);
        prop_assert_eq!(parse_response(encoded.bytes, None).unwrap(), response);
    }

    #[test]
    fn noise_is_an_error_and_no_panic(body in vec(any::<u8>(), 0..300), length in prop::option::of(0_usize..400)) {
        let body = Bytes::from(body);
        let _ = parse_request(String::new(), String::new(), body.clone(), length);
        let _ = parse_response(body.clone(), length);
        let _ = statistics_from_json(&body);
    }

    /// Bodies nearer to the protocol than noise: a valid request with some bytes changed, cut or
    /// doubled.
    #[test]
    fn a_damaged_request_is_no_panic(
        request in any_request(any_tensor()),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
        length_off in -3_i64..4,
    ) {
        for form in [RequestForm::BINARY, RequestForm::JSON] {
            let Ok(encoded) = write_request(&request, form) else { continue };
            let mut bytes = encoded.bytes.to_vec();
            for (place, value) in &damage {
                let place = place.index(bytes.len());
                bytes[place] = *value;
            }
            let length = encoded.header_length.map(|n| n.saturating_add_signed(length_off as isize));
            let whole = Bytes::from(bytes);
            let part = whole.slice(..cut.index(whole.len()));
            for body in [whole, part] {
                if let Ok((read, _)) = parse_request(String::new(), String::new(), body, length) {
                    // Accepted data has the size that the request states.
                    for input in read.inputs.iter().filter(|i| !i.parameters.contains_key("shared_memory_region")) {
                        downbeat_protocol::infer::check_data(input.datatype, &input.shape, &input.data).unwrap();
                    }
                }
            }
        }
    }
}

fn parse_data(datatype: &str, shape: &[i64], data: Value) -> Result<Bytes, String> {
    let body = json!({"inputs": [{"name": "x", "data": data, "shape": shape, "datatype": datatype}]}).to_string();
    parse_request(String::new(), String::new(), Bytes::from(body), None)
        .map(|(mut request, _)| request.inputs.remove(0).data)
        .map_err(|e| e.to_string())
}

#[test]
fn json_data_may_be_flat_or_nested_and_come_before_its_datatype() {
    let flat = parse_data("INT16", &[2, 1, 2], json!([1, 2, 3, -4])).unwrap();
    assert_eq!(&flat[..], [1, 0, 2, 0, 3, 0, 0xfc, 0xff]);
    assert_eq!(parse_data("INT16", &[2, 1, 2], json!([[[1, 2]], [[3, -4]]])).unwrap(), flat);
    assert_eq!(parse_data("FP32", &[1], json!([1])).unwrap(), 1_f32.to_le_bytes()[..]);
    assert_eq!(parse_data("BYTES", &[2], json!(["a", "ü"])).unwrap(), b"\x01\0\0\0a\x02\0\0\0\xc3\xbc"[..]);
    assert_eq!(parse_data("BOOL", &[4], json!([true, false, 1, 0])).unwrap(), [1, 0, 1, 0][..]);
    assert_eq!(parse_data("UINT64", &[1], json!([u64::MAX])).unwrap(), [0xff; 8][..]);
    assert_eq!(parse_data("FP32", &[0, 3], json!([])).unwrap(), Bytes::new());
    assert_eq!(parse_data("FP32", &[], json!([2.5])).unwrap(), 2.5_f32.to_le_bytes()[..]);
}

#[test]
fn half_precision_in_json_is_rounded_and_its_range_is_kept() {
    assert_eq!(parse_data("FP16", &[2], json!([1.0, 0.1])).unwrap(), [0x00, 0x3c, 0x66, 0x2e][..]);
    assert_eq!(parse_data("BF16", &[2], json!([1.0, -2])).unwrap(), [0x80, 0x3f, 0x00, 0xc0][..]);
    assert_eq!(
        parse_data("FP16", &[1], json!([70000])).unwrap_err(),
        "input 'x': FP16 [1]: 70000 is out of the range of FP16 at line 1 column 6 of `data`"
    );
    for (datatype, value) in
        [("FP32", json!(1e39)), ("UINT8", json!(256)), ("UINT8", json!(-1)), ("INT8", json!(-129)), ("BOOL", json!(2))]
    {
        let error = parse_data(datatype, &[1], json!([value])).unwrap_err();
        assert!(error.contains(&format!("out of the range of {datatype}")), "{error}");
    }
}

/// The values of an answer's output `y` in JSON, in their written form.
fn written(datatype: DataType, data: Bytes) -> String {
    let shape = vec![(data.len() / datatype.size().unwrap()) as i64];
    let output = InferTensor { name: "y".to_owned(), datatype, shape, parameters: Parameters::new(), data };
    let response = InferResponse { outputs: vec![output], ..Default::default() };
    let text = write_response(&response, &OutputForms::default()).unwrap().bytes;
    let read = parse_response(text.clone(), None).unwrap();
    assert_eq!(read.outputs, response.outputs, "a client reads what was written");
    let text = String::from_utf8(text.to_vec()).unwrap();
    text.split_once(r#""data":"#).unwrap().1.trim_end_matches("}]}").to_owned()
}

#[test]
fn infinities_and_nan_are_three_words_as_in_triton() {
    let values = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -0.0, 1.5];
    let expected = "[Infinity,-Infinity,NaN,-0.0,1.5]";
    assert_eq!(written(DataType::Fp64, values.iter().flat_map(|v| v.to_le_bytes()).collect()), expected);
    assert_eq!(written(DataType::Fp32, values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect()), expected);
    let half = |v: &f64| half::f16::from_f64(*v).to_le_bytes();
    assert_eq!(written(DataType::Fp16, values.iter().flat_map(half).collect()), expected);
    let half = |v: &f64| half::bf16::from_f64(*v).to_le_bytes();
    assert_eq!(written(DataType::Bf16, values.iter().flat_map(half).collect()), expected);
}

#[test]
fn null_is_nan_among_floats_and_an_error_elsewhere() {
    let first = parse_data("FP32", &[2], json!([null, 1.5])).unwrap();
    assert!(f32::from_le_bytes(first[..4].try_into().unwrap()).is_nan());
    for datatype in ["FP16", "BF16"] {
        parse_data(datatype, &[1], json!([null])).unwrap();
    }
    let error = parse_data("INT64", &[1], json!([null])).unwrap_err();
    assert!(error.contains("invalid type: null, expected a list of integers"), "{error}");
    let error = parse_data("BYTES", &[1], json!([null])).unwrap_err();
    assert!(error.contains("invalid type: null, expected a list of strings"), "{error}");
}

#[test]
fn words_for_numbers_stand_in_data_and_parameters_alone() {
    let parse = |text: &str| parse_request(String::new(), String::new(), Bytes::copy_from_slice(text.as_bytes()), None);
    let tensor = |datatype: &str, data: &str| {
        parse(&format!(r#"{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":[1],"data":{data}}}]}}"#))
    };
    for (datatype, data, expected) in [
        ("INT32", "[NaN]", "invalid type: NaN, expected a list of integers"),
        ("UINT8", "[-Inf]", "invalid type: -Infinity, expected a list of integers"),
        ("BOOL", "[Infinity]", "invalid type: Infinity, expected a list of true and false"),
        // The answer must not have the text `NaN`.
        ("BYTES", "[NaN]", "invalid type: NaN, expected a list of strings"),
        ("FP32", r#"[{"n":0,"m":0}]"#, "invalid type: map, expected a list of numbers"),
        ("FP32", "[1e400]", "number out of range"),
    ] {
        let error = tensor(datatype, data).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(tensor("BYTES", r#"["NaN"]"#).unwrap().0.inputs[0].data, b"\x03\0\0\0NaN"[..]);
    let error = parse(r#"{"id":NaN,"inputs":[]}"#).unwrap_err().to_string();
    assert!(error.contains("`id`: ") && error.contains("are allowed only in `data` and as parameters"), "{error}");

    let (request, _) = parse(r#"{"parameters":{"a":Infinity,"b":-Inf,"c":"NaN"},"inputs":[]}"#).unwrap();
    let expected = [
        ("a", Parameter::Double(f64::INFINITY)),
        ("b", Parameter::Double(f64::NEG_INFINITY)),
        ("c", Parameter::String("NaN".to_owned())),
    ];
    assert_eq!(request.parameters, expected.map(|(k, v)| (k.to_owned(), v)).into());
    let again = write_request(&request, RequestForm::JSON).unwrap().bytes;
    assert_eq!(parse_request(String::new(), String::new(), again, None).unwrap().0, request);
}

#[test]
fn a_single_element_needs_no_list() {
    assert_eq!(parse_data("BYTES", &[1], json!("text")).unwrap(), b"\x04\0\0\0text"[..]);
    assert_eq!(parse_data("BYTES", &[1, 1], json!("")).unwrap(), [0; 4][..]);
    assert_eq!(parse_data("FP32", &[], json!(2.5)).unwrap(), 2.5_f32.to_le_bytes()[..]);
    assert_eq!(parse_data("BOOL", &[1], json!(true)).unwrap(), [1][..]);
    let error = parse_data("BYTES", &[2], json!("text")).unwrap_err();
    assert!(error.contains("expected 2 elements in `data`, got 1"), "{error}");
    let error = parse_data("INT8", &[1], json!("text")).unwrap_err();
    assert!(error.contains("expected a list of integers"), "{error}");
}

#[test]
fn binary_inputs_are_slices_of_the_body() {
    let json = json!({"inputs": [
        {"name": "a", "shape": [2], "datatype": "UINT8", "parameters": {"binary_data_size": 2}},
        {"name": "b", "shape": [3], "datatype": "UINT8", "parameters": {"binary_data_size": 3, "k": true}},
    ]})
    .to_string();
    let body = Bytes::from([json.as_bytes(), &[1, 2, 3, 4, 5]].concat());
    let (request, _) = parse_request(String::new(), String::new(), body.clone(), Some(json.len())).unwrap();
    assert_eq!(request.inputs[1].data.as_ptr(), body[json.len() + 2..].as_ptr());
    assert_eq!(request.inputs[1].parameters, [("k".to_owned(), Parameter::Bool(true))].into());
}

#[test]
fn a_shape_that_promises_much_reserves_little() {
    let error = parse_data("FP64", &[1 << 40], json!([1, 2])).unwrap_err();
    assert!(error.contains("expected 1099511627776 elements in `data`, got 2"), "{error}");
}

#[test]
fn tensors_in_shared_memory_have_no_data() {
    let place: Parameters = [
        ("shared_memory_region".to_owned(), Parameter::String("r".to_owned())),
        ("shared_memory_byte_size".to_owned(), Parameter::Int64(8)),
    ]
    .into();
    let request = InferRequest {
        inputs: vec![InferTensor {
            name: "a".to_owned(),
            datatype: DataType::Fp32,
            shape: vec![2],
            parameters: place.clone(),
            data: Bytes::new(),
        }],
        ..Default::default()
    };
    for form in [RequestForm::BINARY, RequestForm::JSON] {
        let encoded = write_request(&request, form).unwrap();
        let (read, _) = parse_request(String::new(), String::new(), encoded.bytes, encoded.header_length).unwrap();
        assert_eq!(read.inputs, request.inputs);
    }
    let response = InferResponse {
        outputs: vec![InferTensor {
            name: "y".to_owned(),
            datatype: DataType::Fp32,
            shape: vec![2],
            parameters: place,
            data: Bytes::new(),
        }],
        ..Default::default()
    };
    for binary in [true, false] {
        let encoded = write_response(&response, &OutputForms::all(binary)).unwrap();
        assert_eq!(encoded.header_length, None);
        // As from Triton: its clients take any parameters for those of binary data.
        let text: Value = serde_json::from_slice(&encoded.bytes).unwrap();
        assert_eq!(text["outputs"], json!([{"name": "y", "datatype": "FP32", "shape": [2]}]));
        let read = parse_response(encoded.bytes, None).unwrap();
        assert_eq!((read.outputs[0].name.as_str(), read.outputs[0].data.len()), ("y", 0));
    }
}

#[test]
fn words_for_what_is_no_number_are_taken_with_and_without_quotes() {
    let body = |data: &str| {
        let text = format!(r#"{{"id":"\"NaN","inputs":[{{"name":"x","datatype":"FP32","shape":[4],"data":{data}}}]}}"#);
        parse_request(String::new(), String::new(), Bytes::from(text), None)
    };
    for data in [
        "[NaN, Infinity, -Infinity, 1]",
        r#"["NaN", "Infinity", "-Infinity", 1]"#,
        "[NaN,Inf,-Inf,1.0]",
        "[-NaN, Infinity, [-Infinity], 1]",
        "[null, Infinity, -Infinity, 1]",
    ] {
        let (request, _) = body(data).unwrap();
        assert_eq!(request.id, "\"NaN");
        let values: Vec<f32> = request.inputs[0].data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert!(values[0].is_nan());
        assert_eq!(values[1..], [f32::INFINITY, f32::NEG_INFINITY, 1.0]);
    }
    for data in [
        "[NaN, 1, 2",
        "[nan, 1, 2, 3]",
        "[NaNa, 1, 2, 3]",
        r#"[NaN, "#,
        "[\"NaN, 1",
        "[--Inf, 1, 2, 3]",
        "[Infinit, 1, 2, 3]",
    ] {
        body(data).unwrap_err();
    }
    assert!(parse_data("INT32", &[1], json!(["NaN"])).unwrap_err().contains("a list of integers"));
}

#[test]
fn statistics_are_read_back() {
    let some = |count| Some(StatisticDuration { count, ns: count * 10 });
    let statistics = ModelStatistics {
        name: "m".to_owned(),
        version: "1".to_owned(),
        last_inference: 1 << 60,
        inference_count: 9,
        execution_count: 3,
        inference_stats: Some(InferStatistics { success: some(9), queue: some(9), ..Default::default() }),
        ..Default::default()
    };
    let text = statistics_to_json(vec![statistics.clone()]);
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["model_stats"][0]["last_inference"], json!(1_u64 << 60), "a number, not a string");
    assert_eq!(value["model_stats"][0]["inference_stats"]["fail"], json!({"count": 0, "ns": 0}));
    let read = statistics_from_json(text.as_bytes()).unwrap().remove(0);
    assert_eq!((read.last_inference, read.inference_count), (1 << 60, 9));
    assert_eq!(read.inference_stats.unwrap().queue, some(9));
    let theirs = r#"{"model_stats":[{"name":"a","later_field":[1]}],"more":{}}"#;
    assert_eq!(statistics_from_json(theirs.as_bytes()).unwrap()[0].name, "a");
}

#[test]
fn a_configuration_has_the_names_of_the_proto_file() {
    let config = ModelConfig { name: "m".to_owned(), max_batch_size: 4, ..Default::default() };
    let value: Value = serde_json::from_str(&config_to_json(&config)).unwrap();
    assert_eq!((&value["name"], &value["max_batch_size"]), (&json!("m"), &json!(4)));
    assert_eq!(value["default_model_filename"], "", "defaults are written");
    assert_eq!(value.get("dynamic_batching"), None, "absent messages are not");
}
