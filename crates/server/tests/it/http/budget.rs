//! The memory that bodies hold: bounded for all together, and zero where the head alone decides the
//! answer.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use downbeat_frontend::http::HttpOptions;
use downbeat_service::budget::ByteBudget;

use super::client::Connection;
use super::{Server, json_request};

const MIB: usize = 1 << 20;

async fn server(limit: usize) -> (Server, Arc<ByteBudget>) {
    let budget = ByteBudget::new(limit as u64);
    let options = HttpOptions { budget: Arc::clone(&budget), ..HttpOptions::default() };
    (Server::with_options(options).await, budget)
}

/// Sends the head of a request with a body of `size` bytes, and the first `sent` bytes of the body.
async fn begin(connection: &mut Connection, model: &str, size: usize, sent: usize) {
    let head = format!("POST /v2/models/{model}/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n");
    connection.send(head).await;
    connection.send(vec![b' '; sent]).await;
}

async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn half_a_body_for_an_unknown_model_is_answered_for_free() {
    let (server, budget) = server(MIB).await;
    let mut connections = Vec::new();
    for _ in 0..4 {
        let mut connection = server.connect().await;
        begin(&mut connection, "nope", 8 * MIB, 4 * MIB).await;
        assert!(connection.reply().await.error(404).contains("nope"));
        assert_eq!(budget.in_flight(), 0);
        connections.push(connection);
    }
    // A client that sends the rest of its body all the same can go on.
    let mut connection = connections.remove(0);
    connection.send(vec![b' '; 4 * MIB]).await;
    assert_eq!(connection.post("/v2/models/simple/infer", &[], json_request().to_string()).await.status, 200);
    for (path, status) in [("/v2/nowhere", 404), ("/v2/models/simple", 405)] {
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", 8 * MIB);
        let mut connection = server.connect().await;
        connection.send(head).await;
        connection.send(vec![b' '; 4 * MIB]).await;
        connection.reply().await.error(status);
    }
    let mut asking = server.connect().await;
    let head =
        "POST /v2/models/nope/infer HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n";
    asking.send(head).await;
    let reply = asking.reply().await;
    reply.error(404);
    assert_eq!(reply.headers["connection"], "close");
    assert_eq!((budget.in_flight(), budget.refused()), (0, 0));
}

#[tokio::test]
async fn bodies_beyond_the_budget_are_refused_and_let_go() {
    let (server, budget) = server(8 * MIB).await;
    let mut half = Vec::new();
    for _ in 0..2 {
        let mut connection = server.connect().await;
        begin(&mut connection, "simple", 4 * MIB, 3 * MIB).await;
        half.push(connection);
    }
    until(|| budget.in_flight() == 6 * MIB as u64).await;

    let mut third = server.connect().await;
    begin(&mut third, "simple", 4 * MIB, 3 * MIB).await;
    let reply = third.reply().await;
    let message = reply.error(503);
    assert!(message.contains("8388608") && message.contains("--max-in-flight-bytes"), "{message}");
    assert_eq!(reply.headers["retry-after"], "1");
    assert_eq!((budget.in_flight(), budget.refused()), (6 * MIB as u64, 1));
    // Small requests always have room, on this connection too.
    third.send(vec![b' '; MIB]).await;
    assert_eq!(third.post("/v2/models/simple/infer", &[], json_request().to_string()).await.status, 200);

    drop(half);
    until(|| budget.in_flight() == 0).await;
    let padded = format!("{}{}", json_request(), " ".repeat(MIB));
    assert_eq!(third.post("/v2/models/simple/infer", &[], padded).await.status, 200);
    until(|| budget.in_flight() == 0).await;
}

#[tokio::test]
async fn compressed_bodies_count_by_their_unpacked_size() {
    let (server, budget) = server(8 * MIB).await;
    let gzipped = |size: usize| {
        let body = format!("{{\"parameters\":{{\"config\":\"{}\"}}}}", " ".repeat(size));
        let mut coded = Vec::new();
        flate2::bufread::GzEncoder::new(body.as_bytes(), flate2::Compression::fast()).read_to_end(&mut coded).unwrap();
        coded
    };
    for path in ["/v2/repository/models/simple/load", "/v2/models/simple/infer"] {
        let mut connection = server.connect().await;
        let reply = connection.post(path, &[("content-encoding", "gzip")], gzipped(16 * MIB)).await;
        assert!(reply.error(413).contains("--max-in-flight-bytes"), "{path}");
        until(|| budget.in_flight() == 0).await;
    }
    let mut connection = server.connect().await;
    let load =
        connection.post("/v2/repository/models/simple/load", &[("content-encoding", "gzip")], gzipped(MIB)).await;
    assert_eq!(load.status, 200, "{load:?}");
}

#[tokio::test]
async fn a_body_that_the_budget_could_never_hold_is_too_large() {
    let (server, budget) = server(MIB).await;
    let reply = server.post("/v2/models/simple/infer", vec![b' '; 2 * MIB]).await;
    assert!(reply.error(413).contains("--max-in-flight-bytes"));
    until(|| budget.in_flight() == 0).await;
}
