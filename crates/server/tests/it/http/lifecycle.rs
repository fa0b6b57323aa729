//! Connections: cancelled, drained, slow, idle.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use downbeat_server::http::HttpOptions;
use serde_json::json;

use super::client::post_bytes;
use super::{Server, json_request};

fn slow_request() -> Vec<u8> {
    let body = json!({"inputs": [{"name": "x", "shape": [1, 784], "datatype": "FP32", "data": vec![1.0; 784]}]});
    post_bytes("/v2/models/slow/infer", &[], body.to_string().as_bytes())
}

/// Waits until `condition` holds; a test that would wait for ever fails by the test runner's own limit.
async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    connection.send(slow_request()).await;
    until(|| server.service.waiting.load(SeqCst) == 1).await;
    drop(connection);
    until(|| server.service.waiting.load(SeqCst) == 0).await;
    assert_eq!(server.service.cancelled.load(SeqCst), 1);
    assert_eq!(server.post("/v2/models/simple/infer", json_request().to_string()).await.status, 200);
}

#[tokio::test]
async fn a_stopping_server_answers_what_it_has() {
    let server = Server::start().await;
    let address = server.address;
    let mut busy = server.connect().await;
    let mut idle = server.connect().await;
    assert_eq!(idle.get("/v2/health/live").await.status, 200);
    busy.send(slow_request()).await;
    let service = std::sync::Arc::clone(&server.service);
    until(|| service.waiting.load(SeqCst) == 1).await;
    let stopped = server.stop();
    assert!(idle.is_closed().await, "an idle connection is closed at once");
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "nobody is accepted any more");
    assert!(!stopped.is_finished());
    service.release();
    assert_eq!(busy.reply().await.status, 200);
    assert!(busy.is_closed().await);
    stopped.await.unwrap();
}

#[tokio::test]
async fn draining_has_an_end() {
    let options = HttpOptions { drain_timeout: Duration::from_millis(50), ..HttpOptions::default() };
    let server = Server::with_options(options).await;
    let mut busy = server.connect().await;
    busy.send(slow_request()).await;
    let service = std::sync::Arc::clone(&server.service);
    until(|| service.waiting.load(SeqCst) == 1).await;
    server.stop().await.unwrap();
    assert!(busy.is_closed().await);
    assert_eq!(service.cancelled.load(SeqCst), 1);
}

#[tokio::test]
async fn half_a_head_or_body_is_not_waited_for_but_idleness_is() {
    let options = HttpOptions { receive_timeout: Duration::from_millis(50), ..HttpOptions::default() };
    let server = Server::with_options(options).await;
    let mut idle = server.connect().await;
    assert_eq!(idle.get("/v2/health/live").await.status, 200);
    let mut working = server.connect().await;
    working.send(slow_request()).await;

    let mut half_head = server.connect().await;
    half_head.send("GET /v2/health/live HTT").await;
    assert!(half_head.is_closed().await);

    let mut half_body = server.connect().await;
    let request = post_bytes("/v2/models/simple/infer", &[], json_request().to_string().as_bytes());
    half_body.send(&request[..request.len() - 10]).await;
    assert!(half_body.is_closed().await);

    let mut second_half_head = server.connect().await;
    assert_eq!(second_half_head.get("/v2/health/live").await.status, 200);
    second_half_head.send("GET /v2").await;
    assert!(second_half_head.is_closed().await);

    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!(idle.get("/v2/health/live").await.status, 200, "an idle connection may stay");
    server.service.release();
    assert_eq!(working.reply().await.status, 200, "an answer may take longer than a request");
}
