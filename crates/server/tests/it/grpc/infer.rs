//! `ModelInfer`.

use std::time::Duration;

use downbeat_core::tensor::DataType;
use downbeat_protocol::inference as pb;
use downbeat_protocol::inference::infer_parameter::ParameterChoice;
use tonic::codec::CompressionEncoding;
use tonic::{Code, Request};

use super::server::{Server, check_good, input, int64, parameter, simple, string};
use crate::support::shared_object::SharedObject;
use crate::support::strings;

#[tokio::test]
async fn a_request_is_answered() {
    let server = Server::start().await;
    check_good(&mut server.client().await).await;
}

#[tokio::test]
async fn every_datatype_goes_there_and_back_raw() {
    let server = Server::start().await;
    let mut client = server.client().await;
    for datatype in DataType::ALL {
        let data: Vec<u8> = match datatype.size() {
            Some(size) => (0..6 * size).map(|i| i as u8 & 1).collect(),
            None => [3, 0, 0, 0, 0, 0xff, b'c'].repeat(6),
        };
        let request = pb::ModelInferRequest {
            model_name: "echo".into(),
            inputs: vec![input("x", datatype.name(), &[2, 3])],
            raw_input_contents: vec![data.clone().into()],
            ..Default::default()
        };
        let response = client.model_infer(request).await.unwrap().into_inner();
        assert_eq!(response.outputs[0].datatype, datatype.name());
        assert_eq!(response.outputs[0].shape, [2, 3]);
        assert_eq!(response.raw_output_contents, [data]);
    }
}

#[tokio::test]
async fn typed_contents_are_taken() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let mut text = input("x", "BYTES", &[2]);
    text.contents =
        Some(pb::InferTensorContents { bytes_contents: vec!["a".into(), "bc".into()], ..Default::default() });
    let mut numbers = input("y", "FP32", &[1]);
    numbers.contents = Some(pb::InferTensorContents { fp32_contents: vec![2.5], ..Default::default() });
    let request =
        pb::ModelInferRequest { model_name: "echo".into(), inputs: vec![text, numbers], ..Default::default() };
    let response = client.model_infer(request).await.unwrap().into_inner();
    assert_eq!(strings(&response.raw_output_contents[0]), ["a", "bc"]);
    assert_eq!(response.raw_output_contents[1], 2.5_f32.to_le_bytes().to_vec());
}

#[tokio::test]
async fn large_tensors_go_there_and_back() {
    let server = Server::start().await;
    let mut client = server.client().await.max_decoding_message_size(usize::MAX);
    let data: Vec<u8> = (0..48_u32 << 20).map(|i| (i >> 12) as u8).collect();
    let request = pb::ModelInferRequest {
        model_name: "echo".into(),
        inputs: vec![input("x", "UINT8", &[48 << 20])],
        raw_input_contents: vec![data.clone().into()],
        ..Default::default()
    };
    let response = client.model_infer(request).await.unwrap().into_inner();
    assert!(response.raw_output_contents[0] == data);
}

#[tokio::test]
async fn the_timeout_of_the_call_bounds_the_request() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let mut timeout_of = async |own: Option<i64>, call: Option<Duration>| {
        let (mut request, _) = simple("t");
        request.parameters.extend(own.map(|own| ("timeout".to_owned(), int64(own))));
        let mut request = Request::new(request);
        if let Some(call) = call {
            request.set_timeout(call);
        }
        let response = client.model_infer(request).await.unwrap().into_inner();
        response.parameters.get("timeout").and_then(|value| value.parameter_choice.clone())
    };
    let hour = Some(Duration::from_secs(3600));
    assert_eq!(timeout_of(None, None).await, None);
    assert_eq!(timeout_of(Some(70), None).await, Some(ParameterChoice::Int64Param(70)));
    assert_eq!(timeout_of(Some(70), hour).await, Some(ParameterChoice::Int64Param(70)));
    // The client sends the time that is left.
    let Some(ParameterChoice::Uint64Param(left)) = timeout_of(None, hour).await else { panic!("no timeout") };
    assert!((3_590_000_000..=3_600_000_000).contains(&left), "{left}");
    let own = timeout_of(Some(7_200_000_000), hour).await;
    assert!(matches!(own, Some(ParameterChoice::Uint64Param(left)) if left <= 3_600_000_000), "{own:?}");
}

#[tokio::test]
async fn every_error_has_its_status() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let cases = [
        ("invalid", Code::InvalidArgument),
        ("not_found", Code::NotFound),
        ("exists", Code::AlreadyExists),
        ("too_large", Code::ResourceExhausted),
        ("queue_full", Code::ResourceExhausted),
        ("deadline", Code::DeadlineExceeded),
        ("unavailable", Code::Unavailable),
        ("unimplemented", Code::Unimplemented),
        ("internal", Code::Internal),
    ];
    for (name, code) in cases {
        let (mut request, _) = simple("e");
        request.parameters.insert("fail".into(), string(name));
        let status = client.model_infer(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{name}");
        assert_eq!(status.message(), format!("asked to fail with {name}"));
        let metadata = |key| status.metadata().get(key).map(|value| value.to_str().unwrap());
        let back = if name == "queue_full" { (Some("2"), Some("1500")) } else { (None, None) };
        assert_eq!((metadata("retry-after"), metadata("grpc-retry-pushback-ms")), back);
        check_good(&mut client).await;
    }
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_its_request() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let held = || {
        let (mut request, _) = simple("held");
        request.parameters.insert("hold".into(), parameter(ParameterChoice::BoolParam(true)));
        request
    };
    // The client gives up the call and keeps the connection.
    let call = tokio::spawn({
        let (mut client, request) = (client.clone(), held());
        async move { client.model_infer(request).await }
    });
    server.service.wait_for_started(1).await;
    call.abort();
    server.service.wait_for_cancelled(1).await;
    // The client's deadline.
    let mut late = Request::new(held());
    late.set_timeout(Duration::from_millis(30));
    assert!(client.model_infer(late).await.is_err());
    server.service.wait_for_cancelled(2).await;
    // The client closes the connection.
    let mut other = server.client().await;
    let call = tokio::spawn(async move { other.model_infer(held()).await });
    server.service.wait_for_started(3).await;
    call.abort();
    server.service.wait_for_cancelled(3).await;
    check_good(&mut client).await;
}

#[tokio::test]
async fn a_burst_of_cancelled_calls_leaves_the_connection() {
    let server = Server::start().await;
    let mut client = server.client().await;
    for _ in 0..4 {
        let calls: Vec<_> = (0..100)
            .map(|_| {
                let (mut client, (mut request, _)) = (client.clone(), simple("held"));
                request.parameters.insert("hold".into(), parameter(ParameterChoice::BoolParam(true)));
                tokio::spawn(async move { client.model_infer(request).await })
            })
            .collect();
        tokio::task::yield_now().await;
        calls.iter().for_each(tokio::task::JoinHandle::abort);
        check_good(&mut client).await;
    }
}

#[tokio::test]
async fn answers_are_compressed_for_clients_that_compress() {
    let server = Server::start().await;
    let plain = server.client().await;
    for (encoding, name) in [(CompressionEncoding::Gzip, "gzip"), (CompressionEncoding::Deflate, "deflate")] {
        let mut client = plain.clone().send_compressed(encoding).accept_compressed(encoding);
        let (request, sums) = simple("compressed");
        let response = client.model_infer(request).await.unwrap();
        assert_eq!(response.metadata().get("grpc-encoding").unwrap(), name);
        assert_eq!(response.get_ref().raw_output_contents[0], super::server::bytes(&sums));
        // Many clients accept compression without wanting it.
        let mut client = plain.clone().accept_compressed(encoding);
        let response = client.model_infer(simple("plain").0).await.unwrap();
        assert_eq!(response.metadata().get("grpc-encoding"), None);
    }
}

#[tokio::test]
async fn only_the_outputs_asked_for_are_given() {
    let server = Server::start().await;
    let (mut request, _) = simple("some");
    request.outputs =
        vec![pb::model_infer_request::InferRequestedOutputTensor { name: "OUTPUT1".into(), ..Default::default() }];
    let response = server.client().await.model_infer(request).await.unwrap().into_inner();
    assert_eq!(response.outputs.len(), 1);
    assert_eq!(response.outputs[0].name, "OUTPUT1");
    assert_eq!(response.raw_output_contents.len(), 1);
}

fn requested(
    name: &str,
    parameters: &[(&str, pb::InferParameter)],
) -> pb::model_infer_request::InferRequestedOutputTensor {
    pb::model_infer_request::InferRequestedOutputTensor {
        name: name.into(),
        parameters: parameters.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
    }
}

#[tokio::test]
async fn classes_are_given_by_row_if_the_model_batches() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let values: Vec<u8> = [1.0_f32, 4.0, 3.0, 2.0, 8.0, 6.0, 7.0, 5.0].map(f32::to_le_bytes).concat();
    let request = |model: &str| pb::ModelInferRequest {
        model_name: model.into(),
        inputs: vec![input("LABELLED", "FP32", &[2, 4])],
        outputs: vec![requested("LABELLED", &[("classification", int64(2))])],
        raw_input_contents: vec![values.clone().into()],
        ..Default::default()
    };
    let response = client.model_infer(request("batch_echo")).await.unwrap().into_inner();
    assert_eq!((response.outputs[0].datatype.as_str(), &response.outputs[0].shape[..]), ("BYTES", &[2, 2][..]));
    assert_eq!(
        strings(&response.raw_output_contents[0]),
        ["4.000000:1:bee", "3.000000:2", "8.000000:0:ant", "7.000000:2"]
    );
    let response = client.model_infer(request("echo")).await.unwrap().into_inner();
    assert_eq!(response.outputs[0].shape, [2]);
    assert_eq!(strings(&response.raw_output_contents[0]), ["8.000000:4", "7.000000:6"]);
    let mut wrong = request("echo");
    wrong.outputs = vec![requested("LABELLED", &[("classification", int64(0))])];
    let answered = server.service.answered();
    assert_eq!(client.model_infer(wrong).await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(server.service.answered(), answered, "it is refused before it runs");
    check_good(&mut client).await;
}

#[tokio::test]
async fn tensors_go_through_shared_memory() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let object = SharedObject::new("grpc", 192);
    let register =
        pb::SystemSharedMemoryRegisterRequest { name: "r".into(), key: object.key.clone(), offset: 0, byte_size: 192 };
    client.system_shared_memory_register(register.clone()).await.unwrap();
    let again = client.system_shared_memory_register(register.clone()).await.unwrap_err();
    assert_eq!(again.code(), Code::AlreadyExists);
    let (mut request, sums) = simple("shared");
    object.write(64, &request.raw_input_contents[1]);
    request.raw_input_contents.truncate(1);
    let place = [
        ("shared_memory_region", string("r")),
        ("shared_memory_byte_size", int64(64)),
        ("shared_memory_offset", int64(64)),
    ];
    request.inputs[1].parameters = place.clone().map(|(name, value)| (name.to_owned(), value)).into();
    let mut there = place;
    there[2].1 = int64(128);
    request.outputs = vec![requested("OUTPUT0", &there), requested("OUTPUT1", &[])];
    let response = client.model_infer(request.clone()).await.unwrap().into_inner();
    assert_eq!(object.read(128, 64), super::server::bytes(&sums));
    assert_eq!(response.raw_output_contents[0].len(), 0);
    assert_eq!(response.raw_output_contents[1].len(), 64);
    assert_eq!(response.outputs[0].parameters["shared_memory_region"], string("r"));

    let status = client.system_shared_memory_status(pb::SystemSharedMemoryStatusRequest::default()).await.unwrap();
    let region = &status.get_ref().regions["r"];
    assert_eq!((region.key.as_str(), region.offset, region.byte_size), (object.key.as_str(), 0, 192));
    client.system_shared_memory_unregister(pb::SystemSharedMemoryUnregisterRequest { name: "r".into() }).await.unwrap();
    let gone = client.model_infer(request).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
    assert_eq!(gone.message(), "input 'INPUT1': shared memory region 'r' is not registered");
    check_good(&mut client).await;
}
