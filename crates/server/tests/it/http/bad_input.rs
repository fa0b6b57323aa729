//! Requests that are wrong. Each gets a status and a message that tells the mistake and the
//! expected value, and the next good request is answered.

use std::io::Write;

use downbeat_frontend::http::HttpOptions;
use serde_json::{Value, json};

use super::client::{Connection, post_bytes};
use super::{Server, json_request};

const SIMPLE: &str = "/v2/models/simple/infer";

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "'{part}' is missing in: {message}");
    }
}

async fn assert_answers(connection: &mut Connection) {
    assert_eq!(connection.post(SIMPLE, &[], json_request().to_string()).await.status, 200);
}

/// Sends a request to `simple` that `change` made wrong, then a good one on the same connection.
async fn refused(change: impl FnOnce(&mut Value), parts: &[&str]) {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    let mut request = json_request();
    change(&mut request);
    let message = connection.post(SIMPLE, &[], request.to_string()).await.error(400);
    assert_says(&message, parts);
    assert_answers(&mut connection).await;
}

#[tokio::test]
async fn a_tensor_that_is_wrong() {
    refused(|r| r["inputs"][0]["name"] = json!("INPUT9"), &["'INPUT9'", "expected", "INPUT0"]).await;
    refused(|r| r["inputs"][0]["shape"] = json!([1, 17]), &["'INPUT0'", "[1, 17]", "expected 17 elements", "got 16"])
        .await;
    refused(|r| r["inputs"][0]["shape"] = json!([1, 8]), &["'INPUT0'", "[1, 8]", "expected 8 elements", "got more"])
        .await;
    refused(|r| r["inputs"][0]["shape"] = json!([16]), &["'INPUT0'", "[16]", "expected [-1, 16]"]).await;
    refused(|r| r["inputs"][0]["shape"] = json!([-1, 16]), &["'INPUT0'", "[-1, 16]", "negative size -1"]).await;
    refused(|r| r["inputs"][0]["shape"] = json!([i64::MAX, i64::MAX]), &["'INPUT0'", "exceed maximum size"]).await;
    refused(|r| r["inputs"][0]["shape"] = json!([4, (1_i64 << 60) + 2]), &["byte size overflow for input 'INPUT0'"])
        .await;
    refused(|r| r["inputs"][0]["shape"] = json!([1.5, 16]), &["`inputs[0].shape[0]`: invalid type: floating point"])
        .await;
    refused(|r| r["inputs"][0]["datatype"] = json!("INT31"), &["'INPUT0'", "'INT31'", "expected", "INT32"]).await;
    refused(|r| r["inputs"][0]["datatype"] = json!("FP32"), &["'INPUT0'", "FP32", "expected INT32"]).await;
    refused(|r| r["inputs"][0]["data"][3] = json!(2.5), &["'INPUT0'", "2.5", "list of integers"]).await;
    refused(|r| r["inputs"][0]["data"][3] = json!("7"), &["'INPUT0'", "\"7\"", "list of integers"]).await;
    refused(|r| r["inputs"][0]["data"][3] = json!(null), &["'INPUT0'", "null", "list of integers"]).await;
    refused(|r| r["inputs"][0]["data"][3] = json!("NaN"), &["'INPUT0'", "NaN", "list of integers"]).await;
    refused(|r| r["inputs"][0]["data"][3] = json!({}), &["'INPUT0'", "map", "list of integers"]).await;
    refused(|r| r["inputs"][0]["data"][3] = json!(1_i64 << 31), &["'INPUT0'", "2147483648", "range of INT32"]).await;
    refused(|r| r["inputs"][0]["data"] = json!(5), &["'INPUT0'", "expected 16 elements", "got 1"]).await;
    refused(|r| drop(r["inputs"][0].as_object_mut().unwrap().remove("data")), &["'INPUT0' has no data", "expected"])
        .await;
}

#[tokio::test]
async fn a_request_that_is_wrong() {
    refused(|r| drop(r["inputs"].as_array_mut().unwrap().pop()), &["'INPUT1' is missing"]).await;
    refused(|r| r["outputs"] = json!([{"name": "OUTPUT7"}]), &["'OUTPUT7'"]).await;
    refused(|r| drop(r.as_object_mut().unwrap().remove("inputs")), &["missing field `inputs`"]).await;
    refused(|r| r["inputs"] = json!({}), &["invalid type: map", "expected a sequence"]).await;
    refused(|r| r["id"] = json!(7), &["`id`", "integer `7`", "expected a string"]).await;
    refused(|r| r["parameters"] = json!({"a": [1]}), &["sequence", "true, false, a number or a string"]).await;
    refused(|r| r["parameters"] = json!({"binary_data_output": 1}), &["binary_data_output", "true or false"]).await;
    refused(
        |r| r["outputs"] = json!([{"name": "OUTPUT0", "parameters": {"binary_data": "yes"}}]),
        &["'OUTPUT0'", "binary_data", "true or false"],
    )
    .await;
    refused(|r| r["inputs"][0]["parameters"] = json!({"binary_data_size": -1}), &["binary_data_size", "-1"]).await;
    refused(|r| r["inputs"][0]["parameters"] = json!({"binary_data_size": 64}), &["'INPUT0'", "both"]).await;
    refused(|r| *r = json!([]), &["expected an inference request object"]).await;
}

#[tokio::test]
async fn text_that_is_no_json() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    for body in ["", "{", "garbage", "{\"inputs\": [}", "\u{0}\u{1}", "{\"inputs\": []} x"] {
        let message = connection.post(SIMPLE, &[], body).await.error(400);
        assert_says(&message, &["not the JSON of an inference request", "line 1"]);
    }
    connection.post(SIMPLE, &[], b"\xff\xfe{}").await.error(400);
    for path in ["/v2/repository/index", "/v2/repository/models/simple/load", "/v2/logging", "/v2/trace/setting"] {
        let message = connection.post(path, &[], "{nonsense").await.error(400);
        assert_says(&message, &["not the expected JSON"]);
    }
    assert_answers(&mut connection).await;
}

#[tokio::test]
async fn json_nested_a_hundred_thousand_deep() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    let deep = |count: usize, open: &str, close: &str| open.repeat(count) + "1" + &close.repeat(count);
    let lists = deep(100_000, "[", "]");
    let objects = deep(100_000, "{\"a\":", "}");
    let tensor =
        |data: &str| format!(r#"{{"inputs":[{{"name":"INPUT0","shape":[1],"datatype":"INT32","data":{data}}}]}}"#);
    let message = connection.post(SIMPLE, &[], tensor(&deep(101, "[", "]"))).await.error(400);
    assert_says(&message, &["JSON nesting depth exceeds maximum allowed limit (100)"]);
    let message = connection.post(SIMPLE, &[], tensor(&deep(100, "[", "]"))).await.error(400);
    assert_says(&message, &["has shape [1]; expected [-1, 16]"]);
    let message = connection.post(SIMPLE, &[], tensor(&lists)).await.error(400);
    assert_says(&message, &["'INPUT0'", "JSON nesting depth exceeds maximum allowed limit (100)"]);
    for body in [
        tensor(&objects),
        lists.clone(),
        objects.clone(),
        format!(r#"{{"inputs":[],"parameters":{{"a":{lists}}}}}"#),
        format!(r#"{{"inputs":{objects}}}"#),
    ] {
        connection.post(SIMPLE, &[], body).await.error(400);
    }
    for path in ["/v2/repository/index", "/v2/repository/models/simple/load", "/v2/logging"] {
        connection.post(path, &[], &lists).await.error(400);
        connection.post(path, &[], "[]").await.error(400);
        // The server skips the value where the field means nothing.
        let reply = connection.post(path, &[], format!(r#"{{"parameters":{objects}}}"#)).await;
        assert!([200, 400].contains(&reply.status), "{reply:?}");
    }
    assert_answers(&mut connection).await;
}

#[tokio::test]
async fn binary_data_of_the_wrong_size() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    let request = |size0: usize, size1: usize| {
        json!({"inputs": [
            {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "parameters": {"binary_data_size": size0}},
            {"name": "INPUT1", "shape": [1, 16], "datatype": "INT32", "parameters": {"binary_data_size": size1}},
        ]})
        .to_string()
    };
    let mut send = async |json: String, tail: usize, length: Option<&str>| {
        let whole = json.len().to_string();
        let header = [("inference-header-content-length", length.unwrap_or(&whole))];
        connection.post(SIMPLE, &header, [json.as_bytes(), &vec![1; tail]].concat()).await
    };
    assert_eq!(send(request(64, 64), 128, None).await.status, 200);
    let message = send(request(60, 64), 124, None).await.error(400);
    assert_says(&message, &["'INPUT0'", "INT32 of shape [1, 16] is 64 bytes, got 60"]);
    let message = send(request(64, 64), 100, None).await.error(400);
    assert_says(&message, &["'INPUT1'", "binary_data_size is 64", "only 36 bytes"]);
    let message = send(request(64, 64), 130, None).await.error(400);
    assert_says(&message, &["2 bytes at the end", "expected 128", "got 130"]);
    let message = send(request(64, usize::MAX >> 1), 128, None).await.error(400);
    assert_says(&message, &["'INPUT1'", "only 64 bytes"]);
    let message = send(request(64, 64), 128, Some("999999")).await.error(400);
    assert_says(&message, &["Inference-Header-Content-Length is 999999", "only"]);
    let message = send(request(64, 64), 128, Some("3")).await.error(400);
    assert_says(&message, &["3 bytes of JSON"]);
    for text in ["-1", "abc", "99999999999999999999999999"] {
        let message = send(request(64, 64), 128, Some(text)).await.error(400);
        assert_says(&message, &["Inference-Header-Content-Length", text, "expected the length of the JSON"]);
    }
    let message = connection.post(SIMPLE, &[], request(64, 64)).await.error(400);
    assert_says(&message, &["'INPUT0'", "only 0 bytes"]);

    let strings = |tail: &[u8]| {
        let json = json!({"inputs": [{"name": "BYTES", "shape": [2, 1], "datatype": "BYTES",
            "parameters": {"binary_data_size": tail.len()}}]})
        .to_string();
        (json.len().to_string(), [json.as_bytes(), tail].concat())
    };
    for (tail, says) in [
        (&b"\x01\0\0\0a\x02\0\0\0b"[..], "element 1 has a length of 2 bytes, but only 1"),
        (b"\x01\0\0\0a", "has 2 elements, got 1"),
        (b"\x01\0\0\0a\x01\0", "2 bytes are left after BYTES element 1"),
        (b"\xff\xff\xff\xffa", "4294967295 bytes"),
    ] {
        let (length, body) = strings(tail);
        let headers = [("inference-header-content-length", length.as_str())];
        let message = connection.post("/v2/models/echo/infer", &headers, body).await.error(400);
        assert_says(&message, &["'BYTES'", says]);
    }
    assert_answers(&mut connection).await;
}

#[tokio::test]
async fn bytes_that_json_cannot_carry() {
    let server = Server::start().await;
    let json = json!({"inputs": [{"name": "BYTES", "shape": [1], "datatype": "BYTES",
        "parameters": {"binary_data_size": 5}}]})
    .to_string();
    let length = json.len().to_string();
    let body = [json.as_bytes(), b"\x01\0\0\0\xff"].concat();
    let mut connection = server.connect().await;
    let headers = [("inference-header-content-length", length.as_str())];
    let message = connection.post("/v2/models/echo/infer", &headers, body).await.error(400);
    assert_says(&message, &["output 'BYTES'", "not UTF-8", "binary_data"]);
    assert_answers(&mut connection).await;
}

#[tokio::test]
async fn a_path_or_method_that_is_not_there() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    for path in ["/", "/v1/models/simple:predict", "/v2/models/simple/nonsense"] {
        let message = connection.get(path).await.error(404);
        assert_says(&message, &[path, "no such path", "/v2/openapi.yaml"]);
    }
    let reply = connection.get(SIMPLE).await;
    assert_says(&reply.error(405), &["GET", SIMPLE, "Allow"]);
    assert_eq!(reply.headers["allow"], "POST");
    let reply = connection.post("/v2/health/live", &[], "").await;
    assert_eq!(reply.headers["allow"], "GET,HEAD");
    reply.error(405);
    let request = json_request().to_string();
    let message = connection.post("/v2/models/nobody/infer", &[], &request).await.error(404);
    assert_says(&message, &["'nobody'", "expected one of"]);
    let message = connection.post("/v2/models/simple/versions/9/infer", &[], &request).await.error(404);
    assert_says(&message, &["'9'", "it has 1"]);
    connection.post("/v2/models/%FF/infer", &[], &request).await.error(400);
    assert_answers(&mut connection).await;
}

#[tokio::test]
async fn what_the_scheduler_refuses() {
    let server = Server::start().await;
    let body =
        json!({"inputs": [{"name": "x", "shape": [1, 784], "datatype": "FP32", "data": vec![0; 784]}]}).to_string();
    let reply = server.post("/v2/models/full/infer", &body).await;
    assert_says(&reply.error(503), &["queue of model 'full'"]);
    assert_eq!(reply.headers["retry-after"], "2", "1.5 s, rounded up");
    let reply = server.post("/v2/models/late/infer", &body).await;
    reply.error(504);
    assert!(!reply.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn a_body_that_is_too_large() {
    let options = HttpOptions { max_body_bytes: 10_000, ..HttpOptions::default() };
    let server = Server::with_options(options).await;
    let mut connection = server.connect().await;
    let message = connection.post(SIMPLE, &[], vec![b' '; 10_001]).await.error(413);
    assert_says(&message, &["10001 bytes", "at most 10000 bytes"]);
    assert_answers(&mut connection).await;

    connection
        .send("POST /v2/models/simple/infer HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        .await;
    for _ in 0..3 {
        connection.send(format!("1000\r\n{}\r\n", " ".repeat(4096))).await;
    }
    connection.send("0\r\n\r\n").await;
    assert_says(&connection.reply().await.error(413), &["more than 10000 bytes"]);
    assert_answers(&mut connection).await;

    let mut bomb = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    bomb.write_all(&vec![b' '; 1_000_000]).unwrap();
    let bomb = bomb.finish().unwrap();
    assert!(bomb.len() < 10_000);
    let message = connection.post(SIMPLE, &[("content-encoding", "gzip")], &bomb).await.error(413);
    assert_says(&message, &["once decompressed", "at most 10000 bytes"]);
    assert_answers(&mut connection).await;

    // A client that asks before it sends (`expect: 100-continue`) gets the refusal before it sends,
    // and the connection ends.
    let mut asking = server.connect().await;
    asking
        .send(format!(
            "POST {SIMPLE} HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 20000\r\n\r\n"
        ))
        .await;
    let reply = asking.reply().await;
    reply.error(413);
    assert_eq!(reply.headers["connection"], "close");
    assert!(asking.is_closed().await);

    // The server does not read so long a body to its end.
    let mut huge = server.connect().await;
    huge.send(format!("POST {SIMPLE} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000000\r\n\r\n")).await;
    assert_says(&huge.reply().await.error(413), &["100000000000 bytes"]);
    assert!(huge.is_closed().await);
    assert_answers(&mut server.connect().await).await;
}

#[tokio::test]
async fn a_body_that_is_cut_off() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    let request = post_bytes(SIMPLE, &[], json_request().to_string().as_bytes());
    connection.send(&request[..request.len() - 5]).await;
    connection.finish_writing().await;
    if let Some(reply) = connection.try_reply().await {
        assert_says(&reply.error(400), &["ended before its announced length"]);
    }
    assert!(connection.is_closed().await);
    assert_answers(&mut server.connect().await).await;
}

#[tokio::test]
async fn a_coding_that_is_wrong() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    let body = json_request().to_string();
    let reply = connection.post(SIMPLE, &[("content-encoding", "br")], &body).await;
    assert_says(&reply.error(415), &["\"br\"", "expected one of gzip, deflate and identity"]);
    assert_eq!(reply.headers["accept-encoding"], "gzip, deflate, identity");
    for coding in ["gzip", "deflate"] {
        let message = connection.post(SIMPLE, &[("content-encoding", coding)], &body).await.error(400);
        assert_says(&message, &["Content-Encoding", coding]);
    }
    assert_answers(&mut connection).await;
}

#[tokio::test]
async fn bytes_that_are_no_http() {
    let server = Server::start().await;
    for bytes in [&b"\x16\x03\x01\x02\x00\x01\x00"[..], b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", &[0xff; 4096]] {
        let mut connection = server.connect().await;
        connection.send(bytes).await;
        connection.finish_writing().await;
        if let Some(reply) = connection.try_reply().await {
            assert!((400..=505).contains(&reply.status), "{reply:?}");
        }
        assert!(connection.is_closed().await);
    }
    let mut connection = server.connect().await;
    let head = format!("GET /v2 HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "a".repeat(2 << 20));
    tokio::select! {
        () = connection.send(head) => {}
        () = tokio::time::sleep(std::time::Duration::from_secs(5)) => {}
    }
    assert_answers(&mut server.connect().await).await;
}
