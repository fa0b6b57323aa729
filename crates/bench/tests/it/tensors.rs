//! Requests fit the model's metadata, and the rules of the command line.

use downbeat_bench::client::request::Envelope;
use downbeat_bench::client::tensors::{InputRules, from_json};
use downbeat_bench::load::seed::Stream;
use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_protocol::InferTensor;
use downbeat_protocol::http::RequestForm;
use downbeat_protocol::inference::ModelInferRequest;
use prost::Message;

fn spec(name: &str, datatype: DataType, dims: &[i64]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), datatype, dims: dims.to_vec() }
}

fn rules(batch: u32, shapes: &[&str], lognormal: &[&str], ranges: &[&str]) -> anyhow::Result<InputRules> {
    let owned = |words: &[&str]| words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
    InputRules::parse(batch, &owned(shapes), &owned(lognormal), &owned(ranges))
}

fn generate(rules: &InputRules, specs: &[TensorSpec]) -> anyhow::Result<Vec<InferTensor>> {
    rules.generate(specs, &mut Stream::Data(0).random(5))
}

#[test]
fn every_datatype_has_data_of_its_size() {
    let rules = rules(3, &[], &[], &[]).expect("valid");
    for datatype in DataType::ALL {
        let tensors = generate(&rules, &[spec("x", datatype, &[-1, 5])]).expect("fits");
        assert_eq!(tensors[0].shape, [3, 5]);
        let expected = datatype.size().map(|size| 15 * size);
        // Strings of "0" or "1", each with a length of four bytes.
        assert_eq!(tensors[0].data.len(), expected.unwrap_or(15 * 5), "{datatype}");
    }
}

#[test]
fn variable_dimensions_need_a_rule_and_the_error_shows_one() {
    let encoder = [spec("ids", DataType::Int64, &[-1, -1]), spec("mask", DataType::Int64, &[-1, -1])];
    let error = generate(&rules(1, &[], &[], &[]).expect("valid"), &encoder).expect_err("no size");
    assert!(error.to_string().contains("--shape ids:64"), "{error}");
    let both = rules(2, &["ids:7", "mask:2,7"], &[], &[]).expect("valid");
    let tensors = generate(&both, &encoder).expect("fits");
    assert_eq!((&tensors[0].shape[..], &tensors[1].shape[..]), (&[2, 7][..], &[2, 7][..]));
    let wrong = rules(1, &["x:1,5"], &[], &[]).expect("valid");
    let error = generate(&wrong, &[spec("x", DataType::Fp32, &[-1, 4])]).expect_err("does not fit");
    assert!(error.to_string().contains("--shape x:1,5"), "{error}");
}

#[test]
fn lognormal_sizes_are_equal_within_a_request_and_have_their_median() {
    let rules = rules(1, &[], &["*:4.11,0.52,300"], &[]).expect("valid");
    let specs = [spec("ids", DataType::Int32, &[-1, -1]), spec("mask", DataType::Int32, &[-1, -1])];
    let mut random = Stream::Data(0).random(9);
    let mut sizes: Vec<i64> = (0..4000)
        .map(|_| {
            let tensors = rules.generate(&specs, &mut random).expect("fits");
            assert_eq!(tensors[0].shape, tensors[1].shape);
            tensors[0].shape[1]
        })
        .collect();
    sizes.sort_unstable();
    // RTE of workloads.md: p5 29, p50 56, p95 157 as measured on the text. The fit gives 26, 61,
    // 143.
    let at = |q: f64| sizes[(q * 4000.0) as usize] as f64;
    assert!((at(0.5) - 61.0).abs() < 3.0, "median {}", at(0.5));
    assert!((at(0.05) - 26.0).abs() < 3.0 && (at(0.95) - 143.0).abs() < 10.0, "{} {}", at(0.05), at(0.95));
    assert!(sizes[3999] <= 300);
}

#[test]
fn integers_stay_within_their_range_and_reach_both_ends() {
    let rules = rules(1, &[], &[], &["ids:3,6"]).expect("valid");
    let tensors = generate(&rules, &[spec("ids", DataType::Int64, &[-1, 400])]).expect("fits");
    let (values, _) = tensors[0].data.as_chunks::<8>();
    let values: std::collections::BTreeSet<i64> = values.iter().map(|v| i64::from_le_bytes(*v)).collect();
    assert_eq!(values.into_iter().collect::<Vec<_>>(), [3, 4, 5, 6]);
}

#[test]
fn rules_about_inputs_that_no_model_has_are_refused() {
    let specs = [spec("x", DataType::Fp32, &[-1, -1])];
    let error = rules(1, &["y:4"], &[], &[]).expect("valid").check_names(&[&specs[0]]).expect_err("unknown");
    assert!(error.to_string().contains("'y'") && error.to_string().contains("are x"), "{error}");
    for wrong in ["x", "x:", "x:a", "x:-1", ":4"] {
        assert!(rules(1, &[wrong], &[], &[]).is_err(), "{wrong}");
    }
    assert!(rules(1, &[], &["x:1"], &[]).is_err() && rules(1, &[], &[], &["x:2,1"]).is_err());
    assert!(rules(0, &[], &[], &[]).is_err());
}

#[test]
fn too_large_requests_are_refused_before_memory_is_taken() {
    let rules = rules(1, &["x:1000000,1000000"], &[], &[]).expect("valid");
    let error = generate(&rules, &[spec("x", DataType::Fp64, &[-1, -1, -1])]).expect_err("8 TB");
    assert!(error.to_string().contains('x'), "{error}");
}

#[test]
fn a_file_is_read_back_as_it_was_written() {
    let text = r#"[{"inputs": [{"name": "a", "datatype": "INT64", "shape": [2, 2], "data": [[1, -9007199254740993], [3, 4]]},
        {"name": "s", "datatype": "BYTES", "shape": [2], "data": ["é", ""]},
        {"name": "b", "datatype": "BOOL", "shape": [1], "data": [true]}]}]"#;
    let requests = from_json(text).expect("valid");
    let written = Envelope::default().http("h:1", RequestForm::JSON, &requests[0]).expect("numbers and text");
    let written = String::from_utf8_lossy(&written);
    assert!(written.contains("[1,-9007199254740993,3,4]") && written.contains("[\"é\",\"\"]"), "{written}");
    assert_eq!(requests[0][2].data[..], [1]);
    for (wrong, says) in [
        (
            r#"{"inputs": [{"name": "a", "datatype": "FP32", "shape": [3], "data": [1, 2]}]}"#,
            "3 elements in `data`, got 2",
        ),
        (r#"{"inputs": [{"name": "a", "datatype": "FP31", "shape": [1], "data": [1]}]}"#, "FP31"),
        (r#"{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": ["x"]}]}"#, "input 'a'"),
        (r#"{"inputs": 3}"#, "request 0"),
        ("[]", "no request"),
        ("{", "JSON"),
    ] {
        let error = format!("{:#}", from_json(wrong).expect_err(wrong));
        assert!(error.contains(says), "{wrong}: {error}");
    }
}

#[test]
fn a_file_may_have_infinity_and_nan() {
    let one = r#"{"inputs": [{"name": "a", "datatype": "FP32", "shape": [3], "data": [Infinity, -Infinity, NaN]}]}"#;
    for text in [one.to_owned(), format!("[{one}]")] {
        let data = &from_json(&text).expect("words are numbers")[0][0].data;
        let values: Vec<f32> = data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        assert_eq!(values[..2], [f32::INFINITY, f32::NEG_INFINITY]);
        assert!(values[2].is_nan());
    }
}

#[test]
fn requests_are_what_the_protocol_says() {
    let envelope = Envelope {
        model: "a/b".to_owned(),
        version: "2".to_owned(),
        timeout_us: Some(5),
        priority: Some(1),
        headers: vec![("X-Id".to_owned(), "7".to_owned())],
    };
    let tensor = InferTensor {
        name: "x".to_owned(),
        datatype: DataType::Uint8,
        shape: vec![1, 3],
        parameters: Default::default(),
        data: vec![1, 2, 3].into(),
    };
    let binary = envelope.http("h:1", RequestForm::BINARY, std::slice::from_ref(&tensor)).expect("bytes");
    let text = String::from_utf8_lossy(&binary);
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("POST /v2/models/a%2Fb/versions/2/infer HTTP/1.1\r\nHost: h:1\r\n"), "{head}");
    assert!(head.contains("\r\nX-Id: 7"), "{head}");
    let number = |name: &str| {
        let line = head.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_else(|| panic!("{name} in {head}"));
        line.trim().parse::<usize>().expect("a number")
    };
    assert_eq!(number("Content-Length:"), body.len());
    let (json, data) = body.split_at(number("Inference-Header-Content-Length:"));
    assert_eq!(data.as_bytes(), [1, 2, 3]);
    let json: serde_json::Value = serde_json::from_str(json).expect("JSON");
    assert_eq!(json["inputs"][0]["parameters"]["binary_data_size"], 3);
    assert_eq!(json["parameters"], serde_json::json!({"timeout": 5, "priority": 1, "binary_data_output": true}));

    let json = envelope.http("h:1", RequestForm::JSON, std::slice::from_ref(&tensor)).expect("JSON");
    assert!(String::from_utf8_lossy(&json).contains(r#""data":[1,2,3]"#));

    let grpc = envelope.grpc(&[tensor]).expect("short");
    assert_eq!(grpc[..5], [&[0][..], &(grpc.len() as u32 - 5).to_be_bytes()].concat());
    let message = ModelInferRequest::decode(&grpc[5..]).expect("a message");
    assert_eq!((message.model_name.as_str(), message.model_version.as_str()), ("a/b", "2"));
    assert_eq!(message.raw_input_contents[0][..], [1, 2, 3]);
    assert!(message.parameters.contains_key("timeout") && message.parameters.contains_key("priority"));
}
