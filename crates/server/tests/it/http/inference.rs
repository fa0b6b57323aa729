//! Inference over HTTP: every form of request and answer.

use std::io::{Read, Write};

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use downbeat_protocol::http::{RequestForm, parse_response, write_request};
use downbeat_protocol::{InferRequest, InferTensor, Parameter};
use serde_json::json;

use super::client::post_bytes;
use super::{Reply, Server, json_request};

fn scores_input(batch: usize) -> InferRequest {
    let data: Vec<u8> = (0..784 * batch).flat_map(|i| ((i % 7) as f32).to_le_bytes()).collect();
    InferRequest {
        inputs: vec![InferTensor {
            name: "x".to_owned(),
            datatype: DataType::Fp32,
            shape: vec![batch as i64, 784],
            parameters: Default::default(),
            data: Bytes::from(data),
        }],
        ..Default::default()
    }
}

fn header_length(reply: &Reply) -> Option<usize> {
    reply.headers.get("inference-header-content-length").map(|text| text.parse().unwrap())
}

#[tokio::test]
async fn json_in_json_out() {
    let server = Server::start().await;
    let reply = server.post("/v2/models/simple/infer", json_request().to_string()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.headers["content-type"], "application/json");
    let sums: Vec<i32> = (1..17).collect();
    let differences: Vec<i32> = (-1..15).collect();
    assert_eq!(
        reply.json(),
        json!({
            "id": "42",
            "model_name": "simple",
            "model_version": "1",
            "outputs": [
                {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16], "data": sums},
                {"name": "OUTPUT1", "datatype": "INT32", "shape": [1, 16], "data": differences},
            ],
        })
    );
    let reply = server.post("/v2/models/simple/versions/1/infer", json_request().to_string()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
}

#[tokio::test]
async fn binary_in_binary_out() {
    let server = Server::start().await;
    let encoded = write_request(&scores_input(3), RequestForm::BINARY).unwrap();
    let length = encoded.header_length.unwrap().to_string();
    let reply = server
        .connect()
        .await
        .post("/v2/models/scores/infer", &[("Inference-Header-Content-Length", &length)], &encoded.bytes)
        .await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.headers["content-type"], "application/octet-stream");
    let length = header_length(&reply);
    let response = parse_response(Bytes::from(reply.body), length).unwrap();
    let output = &response.outputs[0];
    assert_eq!((output.shape.as_slice(), output.data.len()), ([3, 10].as_slice(), 120));
    let first = f32::from_le_bytes(output.data[..4].try_into().unwrap());
    let expected: f32 = (0..784).step_by(10).map(|i| (i % 7) as f32).sum();
    assert_eq!(first, expected);
}

#[tokio::test]
async fn each_output_has_the_form_that_was_asked_for() {
    let server = Server::start().await;
    let mut request = json_request();
    request["outputs"] = json!([
        {"name": "OUTPUT0", "parameters": {"binary_data": true}},
        {"name": "OUTPUT1"},
    ]);
    let reply = server.post("/v2/models/simple/infer", request.to_string()).await;
    let header: serde_json::Value = serde_json::from_slice(&reply.body[..header_length(&reply).unwrap()]).unwrap();
    assert_eq!(header["outputs"][0]["parameters"], json!({"binary_data_size": 64}));
    assert_eq!(header["outputs"][1]["data"][0], json!(-1));
    assert_eq!(reply.body.len(), header_length(&reply).unwrap() + 64);

    request["outputs"] = json!([{"name": "OUTPUT1", "parameters": {"binary_data": false}}]);
    request["parameters"] = json!({"binary_data_output": true});
    let reply = server.post("/v2/models/simple/infer", request.to_string()).await;
    assert_eq!(header_length(&reply), None);
    assert_eq!(reply.json()["outputs"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn parameters_reach_the_service() {
    let server = Server::start().await;
    let mut request = json_request();
    request["parameters"] = json!({"timeout": 5000, "priority": 2, "binary_data_output": true, "mine": "x", "p": 0.5});
    let reply = server.post("/v2/models/simple/infer", request.to_string()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let seen = server.service.last_request.lock().take().unwrap();
    let expected = [
        ("mine", Parameter::String("x".to_owned())),
        ("p", Parameter::Double(0.5)),
        ("priority", Parameter::Int64(2)),
        ("timeout", Parameter::Int64(5000)),
    ];
    assert_eq!(seen.parameters, expected.map(|(k, v)| (k.to_owned(), v)).into());
}

#[tokio::test]
async fn a_raw_body_is_the_only_input() {
    let server = Server::start().await;
    let data = scores_input(2).inputs[0].data.clone();
    let raw = [("Inference-Header-Content-Length", "0")];
    let mut connection = server.connect().await;
    let reply = connection.post("/v2/models/scores/infer", &raw, &data).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let length = header_length(&reply);
    let response = parse_response(Bytes::from(reply.body), length).unwrap();
    assert_eq!(response.outputs[0].shape, [2, 10]);
    let message = connection.post("/v2/models/scores/infer", &raw, &data[1..]).await.error(400);
    assert!(message.contains("6271 bytes do not fit input 'x', FP32 [-1, 784]"), "{message}");
    let message = connection.post("/v2/models/simple/infer", &raw, &data).await.error(400);
    assert!(
        message.contains("Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in"),
        "{message}"
    );
}

#[tokio::test]
async fn compressed_both_ways() {
    let server = Server::start().await;
    let encoded = write_request(&scores_input(60), RequestForm::JSON).unwrap();
    let plain = server.post("/v2/models/scores/infer", &encoded.bytes).await;
    assert_eq!(plain.status, 200);

    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&encoded.bytes).unwrap();
    let mut zlib = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    zlib.write_all(&encoded.bytes).unwrap();
    for (coding, body) in [("gzip", gzip.finish().unwrap()), ("deflate", zlib.finish().unwrap())] {
        let headers = [("content-encoding", coding), ("accept-encoding", coding)];
        let reply = server.connect().await.post("/v2/models/scores/infer", &headers, &body).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        assert_eq!(reply.headers["content-encoding"], coding);
        let mut text = Vec::new();
        match coding {
            "gzip" => flate2::read::GzDecoder::new(&*reply.body).read_to_end(&mut text).unwrap(),
            _ => flate2::read::ZlibDecoder::new(&*reply.body).read_to_end(&mut text).unwrap(),
        };
        assert_eq!(text, plain.body);
    }
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    let mut bytes = Vec::new();
    for id in 0..10 {
        let mut request = json_request();
        request["id"] = json!(id.to_string());
        bytes.extend(post_bytes("/v2/models/simple/infer", &[], request.to_string().as_bytes()));
    }
    connection.send(bytes).await;
    for id in 0..10 {
        assert_eq!(connection.reply().await.json()["id"], json!(id.to_string()));
    }
}

#[tokio::test]
async fn a_body_in_chunks_is_a_body() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    let body = json_request().to_string();
    let (a, b) = body.split_at(body.len() / 2);
    connection
        .send(format!(
            "POST /v2/models/simple/infer HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n\
             {:x}\r\n{a}\r\n{:x}\r\n{b}\r\n0\r\n\r\n",
            a.len(),
            b.len()
        ))
        .await;
    assert_eq!(connection.reply().await.status, 200);
}

#[tokio::test]
async fn megabytes_come_back_as_they_were() {
    let server = Server::start().await;
    let data: Vec<u8> = (0..5_000_001_u32).map(|i| (i * 31 % 251) as u8).collect();
    let request = InferRequest {
        inputs: vec![InferTensor {
            name: "UINT8".to_owned(),
            datatype: DataType::Uint8,
            shape: vec![1, data.len() as i64],
            parameters: Default::default(),
            data: Bytes::from(data),
        }],
        ..Default::default()
    };
    let encoded = write_request(&request, RequestForm::BINARY).unwrap();
    let length = encoded.header_length.unwrap().to_string();
    let headers = [("Inference-Header-Content-Length", length.as_str())];
    let reply = server.connect().await.post("/v2/models/echo/infer", &headers, &encoded.bytes).await;
    assert_eq!(reply.status, 200);
    let length = header_length(&reply);
    let response = parse_response(Bytes::from(reply.body), length).unwrap();
    assert!(response.outputs[0].data == request.inputs[0].data);
}

#[tokio::test]
async fn infinities_and_nan_come_back_as_they_were_sent_and_are_taken_again() {
    let server = Server::start().await;
    for datatype in ["FP16", "BF16", "FP32", "FP64"] {
        let echo = async |data: &str| {
            let body = format!(
                r#"{{"inputs":[{{"name":"{datatype}","datatype":"{datatype}","shape":[1,3],"data":{data}}}]}}"#
            );
            let reply = server.post("/v2/models/echo/infer", body).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let text = String::from_utf8(reply.body).unwrap();
            text.split_once(r#""data":"#).unwrap().1.trim_end_matches("}]}").to_owned()
        };
        let words = "[Infinity,-Infinity,NaN]";
        let answer = echo(words).await;
        assert_eq!(answer, words, "{datatype}");
        assert_eq!(echo(&answer).await, words, "{datatype}: an answer is a request again");
        assert_eq!(echo("[[Inf, -Inf, null]]").await, words, "{datatype}");
        assert_eq!(echo(r#"["Infinity", "-Infinity", "NaN"]"#).await, words, "{datatype}");
    }
}

#[tokio::test]
async fn a_bare_string_is_one_element() {
    let server = Server::start().await;
    let body = json!({"inputs": [{"name": "BYTES", "datatype": "BYTES", "shape": [1, 1], "data": "text"}]});
    let reply = server.post("/v2/models/echo/infer", body.to_string()).await;
    assert_eq!(reply.json()["outputs"][0]["data"], json!(["text"]), "{reply:?}");
}
