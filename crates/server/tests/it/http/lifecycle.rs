//! Connections: cancelled, drained, slow, idle.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use downbeat_frontend::connections::{ConnectionOptions, Stage};
use downbeat_frontend::http::HttpOptions;
use serde_json::json;

use super::client::{Connection, post_bytes};
use super::{Server, json_request};

fn slow_request() -> Vec<u8> {
    let body = json!({"inputs": [{"name": "x", "shape": [1, 784], "datatype": "FP32", "data": vec![1.0; 784]}]});
    post_bytes("/v2/models/slow/infer", &[], body.to_string().as_bytes())
}

/// Waits until `condition` holds; a test that would wait for ever fails by the test runner's own
/// limit.
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

fn short(transfer_ms: u64) -> ConnectionOptions {
    ConnectionOptions { transfer_timeout: Some(Duration::from_millis(transfer_ms)), ..ConnectionOptions::default() }
}

#[tokio::test]
async fn a_stopping_server_answers_what_it_has() {
    let linger = Duration::from_millis(100);
    let server = Server::with_connections(HttpOptions::default(), ConnectionOptions { linger, ..short(30_000) }).await;
    let mut busy = server.connect().await;
    let mut idle = server.connect().await;
    assert_eq!(idle.get("/v2/health/live").await.status, 200);
    busy.send(slow_request()).await;
    until(|| server.service.waiting.load(SeqCst) == 1).await;
    server.stage.send(Stage::Draining).unwrap();
    assert!(idle.is_closed().await, "an idle connection is closed");
    assert!(tokio::net::TcpStream::connect(server.address).await.is_err(), "nobody is accepted any more");
    assert!(!server.task.is_finished());
    server.service.release();
    let reply = busy.reply().await;
    assert_eq!((reply.status, reply.headers["connection"].as_str()), (200, "close"));
    assert!(busy.is_closed().await);
    server.task.await.unwrap();
}

#[tokio::test]
async fn a_leaving_server_ends_each_connection_with_its_answer() {
    let server = Server::start().await;
    let mut before = server.connect().await;
    assert!(!before.get("/v2/health/live").await.headers.contains_key("connection"));
    server.stage.send(Stage::Leaving).unwrap();
    // The port learns of the drain by itself.
    loop {
        let reply = before.get("/v2/health/live").await;
        assert_eq!(reply.status, 200);
        if reply.headers.get("connection").is_some_and(|value| value == "close") {
            break;
        }
    }
    assert!(before.is_closed().await);
    let mut late = server.connect().await;
    let reply = late.post("/v2/models/simple/infer", &[], json_request().to_string()).await;
    assert_eq!((reply.status, reply.headers["connection"].as_str()), (200, "close"));
    // A client that connects before the drain, and sends only during the drain.
    let mut last = server.connect().await;
    server.stage.send(Stage::Draining).unwrap();
    let reply = last.get("/v2/health/live").await;
    assert_eq!((reply.status, reply.headers["connection"].as_str()), (200, "close"));
    server.task.await.unwrap();
}

#[tokio::test]
async fn draining_has_an_end() {
    let server = Server::start().await;
    let mut busy = server.connect().await;
    busy.send(slow_request()).await;
    until(|| server.service.waiting.load(SeqCst) == 1).await;
    server.stage.send(Stage::Draining).unwrap();
    server.stage.send(Stage::Stopped).unwrap();
    server.task.await.unwrap();
    assert!(busy.is_closed().await);
    assert_eq!(server.service.cancelled.load(SeqCst), 1);
}

#[tokio::test]
async fn half_a_head_or_body_is_not_waited_for_but_idleness_is() {
    let server = Server::with_connections(HttpOptions::default(), short(50)).await;
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
    let reply = half_body.reply().await;
    assert!(reply.error(408).contains("expected at least 25 (--transfer-timeout, --min-rate)"), "{reply:?}");
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

#[tokio::test]
async fn a_body_that_trickles_in_is_refused_and_a_slow_one_is_not() {
    let options = ConnectionOptions { min_rate: 400, ..short(250) };
    let server = Server::with_connections(HttpOptions::default(), options).await;
    let body = json_request().to_string();
    let request = post_bytes("/v2/models/simple/infer", &[], body.as_bytes());
    let (head, body) = request.split_at(request.len() - body.len());

    let mut trickling = server.connect().await;
    trickling.send(head).await;
    let mut reply = None;
    for byte in body {
        // The server may have closed the connection.
        trickling.try_send([*byte]).await;
        reply = tokio::time::timeout(Duration::from_millis(10), trickling.try_reply()).await.ok().flatten();
        if reply.is_some() {
            break;
        }
    }
    assert_eq!(reply.expect("it is answered before its end").status, 408);

    let padding = vec![b' '; 2000];
    let request = post_bytes("/v2/models/simple/infer", &[], &[&padding[..], body].concat());
    let mut slow = server.connect().await;
    for piece in request.chunks(300) {
        slow.send(piece).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(slow.reply().await.status, 200);
}

#[tokio::test]
async fn an_answer_that_is_not_read_ends_the_connection() {
    let server = Server::with_connections(HttpOptions::default(), short(100)).await;
    let mut connection = server.connect().await;
    // Far more answers than sockets hold. The server stops reading before they are all sent.
    let requests = "GET /v2/openapi.yaml HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(1000);
    while connection.try_send(&requests).await {}
}

#[tokio::test]
async fn an_idle_connection_ends_after_its_time() {
    let idle_timeout = Some(Duration::from_millis(50));
    let server = Server::with_connections(HttpOptions::default(), ConnectionOptions { idle_timeout, ..short(30_000) });
    let server = server.await;
    let mut unused = server.connect().await;
    let mut used = server.connect().await;
    let mut working = server.connect().await;
    working.send(slow_request()).await;
    assert_eq!(used.get("/v2/health/live").await.status, 200);
    assert!(unused.is_closed().await && used.is_closed().await);
    tokio::time::sleep(Duration::from_millis(150)).await;
    server.service.release();
    assert_eq!(working.reply().await.status, 200);
}

/// A connection with a request under way, the `count`th. A connection has to be unused for a moment
/// to make room.
async fn busy(server: &Server, count: usize) -> Connection {
    loop {
        let mut connection = server.connect().await;
        connection.try_send(slow_request()).await;
        tokio::select! {
            () = until(|| server.service.waiting.load(SeqCst) == count) => return connection,
            _ = connection.try_reply() => {}
        }
    }
}

#[tokio::test]
async fn at_the_cap_an_idle_connection_makes_room_and_a_busy_one_does_not() {
    let options = ConnectionOptions { max: 2, ..ConnectionOptions::default() };
    let server = Server::with_connections(HttpOptions::default(), options).await;
    let mut busy = busy(&server, 1).await;
    let mut unused = server.connect().await;
    let mut third = self::busy(&server, 2).await;
    assert!(unused.is_closed().await);
    let mut fourth = server.connect().await;
    let refused = fourth.reply().await;
    assert!(refused.error(503).contains("(2, --max-connections)"), "{refused:?}");
    assert_eq!(refused.headers["connection"], "close");
    assert!(fourth.is_closed().await);
    server.service.release();
    server.service.release();
    assert_eq!((busy.reply().await.status, third.reply().await.status), (200, 200));
}

#[tokio::test]
async fn an_answer_does_not_wait_for_the_next_request() {
    let server = Server::start().await;
    let mut connection = server.connect().await;
    for rest in ["\r\n", "GET"] {
        connection.send(format!("GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n{rest}")).await;
        assert_eq!(connection.reply().await.status, 200);
    }
}

#[tokio::test]
async fn a_head_that_cannot_be_read_is_answered() {
    let server = Server::start().await;
    for (head, status) in [("GET / HTTP/7.0\r\n\r\n", 400), ("nonsense\0\r\n\r\nmore of it", 400)] {
        let mut connection = server.connect().await;
        connection.send(head).await;
        assert_eq!(connection.reply().await.status, status, "{head:?}");
        assert!(connection.is_closed().await);
    }
    let mut connection = server.connect().await;
    connection.send(format!("GET / HTTP/1.1\r\nlong: {}\r\n", "x".repeat(600_000))).await;
    assert_eq!(connection.reply().await.status, 431);
}
