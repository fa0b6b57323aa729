//! `generate` and `generate_stream`.

use downbeat_frontend::http::HttpOptions;
use serde_json::{Value, json};

use super::client::post_bytes;
use super::{Connection, Reply, Server};

const ONE: &str = "/v2/models/repeat/generate";
const MANY: &str = "/v2/models/repeat/generate_stream";

/// The events of a reply whose body is chunked.
fn events(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
    let text = std::str::from_utf8(&reply.body).unwrap();
    let events = text.split_terminator("\n\n");
    events.map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()).collect()
}

fn out(value: i32) -> Value {
    json!({"model_name": "repeat", "model_version": "1", "OUT": value})
}

#[tokio::test]
async fn a_model_with_one_answer_takes_both() {
    let server = Server::start().await;
    let request =
        json!({"id": "7", "INPUT0": (0..16).collect::<Vec<_>>(), "parameters": {"INPUT1": vec![1; 16], "user": "me"}});
    let expected = json!({
        "id": "7", "model_name": "simple", "model_version": "1",
        "OUTPUT0": (1..17).collect::<Vec<_>>(), "OUTPUT1": (-1..15).collect::<Vec<_>>(),
    });
    let reply = server.post("/v2/models/simple/versions/1/generate", request.to_string()).await;
    assert_eq!((reply.status, reply.headers["content-type"].as_str()), (200, "application/json"), "{reply:?}");
    assert_eq!(reply.json(), expected);
    let sent = server.service.last_request.lock().clone().unwrap();
    assert_eq!(sent.parameters["user"], downbeat_protocol::Parameter::String("me".to_owned()));
    let reply = server.post("/v2/models/simple/generate_stream", request.to_string()).await;
    assert_eq!((reply.status, events(&reply)), (200, vec![expected]));
}

#[tokio::test]
async fn a_single_string_needs_no_list() {
    let server = Server::start().await;
    let reply =
        server.post("/v2/models/echo/generate", json!({"BYTES": "hello", "BOOL": [true, false]}).to_string()).await;
    assert_eq!(
        reply.json(),
        json!({"model_name": "echo", "model_version": "1", "BYTES": "hello", "BOOL": [true, false]})
    );
}

#[tokio::test]
async fn each_answer_is_an_event() {
    let server = Server::start().await;
    let reply = server.post(MANY, json!({"IN": [5, 6, 7]}).to_string()).await;
    assert_eq!((reply.status, events(&reply)), (200, vec![out(5), out(6), out(7)]));
    assert_eq!(reply.headers["cache-control"], "no-cache");
    let reply = server.post(MANY, json!({"IN": 5, "end": "with_last"}).to_string()).await;
    assert_eq!(events(&reply), [out(5)]);
    let reply = server.post(MANY, json!({"IN": []}).to_string()).await;
    assert_eq!((reply.status, events(&reply)), (200, vec![]));
}

#[tokio::test]
async fn the_status_is_that_of_the_first_answer() {
    let server = Server::start().await;
    let failed = |at: usize| json!({"error": format!("answer {at} was asked to fail")});
    let reply = server.post(MANY, json!({"IN": [5, 6], "fail_at": 0}).to_string()).await;
    assert_eq!((reply.status, events(&reply)), (500, vec![failed(0), out(6)]));
    let reply = server.post(MANY, json!({"IN": [5, 6], "fail_at": 1}).to_string()).await;
    assert_eq!((reply.status, events(&reply)), (200, vec![out(5), failed(1)]));
}

#[tokio::test]
async fn generate_takes_exactly_one_answer() {
    let server = Server::start().await;
    for end in ["alone", "with_last"] {
        let reply = server.post(ONE, json!({"IN": [5], "end": end}).to_string()).await;
        assert_eq!((reply.status, reply.json()), (200, out(5)));
    }
    for (values, given) in [(vec![], "none"), (vec![1; 100_000], "more than 1")] {
        let error = server.post(ONE, json!({"IN": values}).to_string()).await.error(400);
        assert!(
            error.starts_with("generate expects model to produce exactly 1 response, use generate stream"),
            "{error}"
        );
        assert!(error.ends_with(given), "{error}");
    }
    // The model with more answers has stopped.
    server.service.repeat.wait_for_left(1).await;
    let error = server.post(ONE, json!({"IN": [5], "fail_at": 0}).to_string()).await.error(500);
    assert_eq!(error, "answer 0 was asked to fail");
}

#[tokio::test]
async fn infer_of_a_decoupled_model_is_refused() {
    let server = Server::start().await;
    let input = json!({"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}]});
    let error = server.post("/v2/models/repeat/infer", input.to_string()).await.error(501);
    assert_eq!(
        error,
        "HTTP end point doesn't support models with decoupled transaction policy; send requests for model 'repeat' to \
         its generate_stream, or over gRPC by ModelStreamInfer"
    );
}

#[tokio::test]
async fn errors_before_the_work_are_json() {
    let options = HttpOptions { max_body_bytes: 1000, ..HttpOptions::default() };
    let server = Server::with_options(options).await;
    for path in ["generate", "generate_stream"] {
        let path = |model: &str| format!("/v2/models/{model}/{path}");
        for (model, body, status, expected) in [
            ("nowhere", "{}", 404, "unknown model 'nowhere'"),
            ("repeat", "{", 400, "EOF"),
            ("repeat", "[1]", 400, "not a JSON object"),
            ("repeat", "", 400, "model 'repeat' has one input"),
            ("repeat", r#"{"IN": [[1]]}"#, 400, "a list within a list"),
            ("repeat", r#"{"IN": "x"}"#, 400, "input 'IN'"),
            ("repeat", r#"{"IN": 1, "x": {}}"#, 400, "parameter 'x' has invalid type"),
            ("full", "{}", 400, "input 'x' is missing"),
            ("full", &format!(r#"{{"x": [{}1]}}"#, "1,".repeat(50)), 400, "can not convert input 'x'"),
        ] {
            let error = server.post(&path(model), body).await.error(status);
            assert!(error.contains(expected), "{model} {body}: {error}");
        }
        let many = format!(r#"{{"IN": [{}1]}}"#, "1,".repeat(300));
        let error = server.post(&path("repeat"), &many).await.error(400);
        assert!(error.contains("exceeds the maximum allowed input size of 1000"), "{error}");
        let long = format!(r#"{{"x": "{}"}}"#, "x".repeat(1000));
        let error = server.post(&path("repeat"), long).await.error(413);
        assert!(error.contains("expected at most 1000 bytes"), "{error}");
        let mut connection = server.connect().await;
        assert_eq!(connection.get(&path("repeat")).await.status, 405);
    }
}

#[tokio::test]
async fn a_compressed_request_is_read() {
    let server = Server::start().await;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, br#"{"IN": [5]}"#).unwrap();
    let body = encoder.finish().unwrap();
    let reply = server.connect().await.post(ONE, &[("Content-Encoding", "gzip")], body).await;
    assert_eq!(reply.json(), out(5));
}

#[tokio::test]
async fn events_come_as_the_model_gives_them_and_end_with_the_connection() {
    let server = Server::start().await;
    let mut connection: Connection = server.connect().await;
    let body = json!({"IN": vec![1; 100_000], "delay_ms": 1}).to_string();
    connection.send(post_bytes(MANY, &[], body.as_bytes())).await;
    // The first events are here long before the last.
    server.service.repeat.wait_for_sent(2).await;
    connection.wait_for("data: ").await;
    assert!(*server.service.repeat.sent.borrow() < 100_000);
    drop(connection);
    server.service.repeat.wait_for_left(1).await;
}

#[tokio::test]
async fn a_slow_reader_holds_up_its_request_and_ends_it() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    let body = json!({"IN": vec![1; 10_000], "bytes": 1 << 20, "patience_ms": 50}).to_string();
    connection.send(post_bytes(MANY, &[], body.as_bytes())).await;
    server.service.repeat.wait_for_left(1).await;
    let sent = *server.service.repeat.sent.borrow();
    assert!(sent < 200, "{sent} answers of 1 MiB are somewhere");
    let reply = connection.reply().await;
    let last = events(&reply).pop().unwrap();
    assert!(last["error"].as_str().unwrap().starts_with("the client took no answer for 50ms"), "{last}");
}
