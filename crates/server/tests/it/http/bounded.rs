//! Work on large bodies, in turns.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use downbeat_service::client::Client;
use downbeat_service::work::offload;
use serde_json::json;

use super::client::post_bytes;
use super::{Server, json_request};

/// Takes all turns for large bodies, and the turns for overdue work, until the senders are dropped.
async fn take_all_turns() -> Vec<mpsc::Sender<()>> {
    let (begun, mut senders) = (Arc::new(AtomicUsize::new(0)), Vec::new());
    // Work of one connection cannot take all turns, so each work has its own address. Work beyond
    // the number of turns waits.
    for address in 0..200_u8 {
        let (release, released) = mpsc::channel::<()>();
        let (count, client) = (begun.clone(), Client::at([10, 0, 0, address].into()));
        senders.push(release);
        let bytes = 1_usize << (17 + address % 12);
        let held = move || {
            count.fetch_add(1, SeqCst);
            let _ = released.recv();
        };
        tokio::spawn(async move { offload::run(client, bytes, held).await });
    }
    while begun.load(SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    senders
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_and_small_requests_are_answered_while_all_turns_are_taken() {
    let server = Server::start().await;
    let taken = take_all_turns().await;
    let mut large = server.connect().await;
    let numbers = vec![1.5; 300_000];
    let body = json!({"inputs": [{"name": "x", "shape": [1, 300_000], "datatype": "FP32", "data": numbers}]});
    large.send(post_bytes("/v2/models/simple/infer", &[], body.to_string().as_bytes())).await;
    for _ in 0..20 {
        assert_eq!(server.get("/v2/health/live").await.status, 200);
        assert_eq!(server.get("/v2/health/ready").await.status, 200);
        assert_eq!(server.post("/v2/models/simple/infer", json_request().to_string()).await.status, 200);
    }
    drop(taken);
    // The model may refuse the body. The request has an answer either way.
    assert!(matches!(large.reply().await.status, 200 | 400));
}
