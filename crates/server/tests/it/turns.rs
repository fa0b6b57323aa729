//! Requests that one thread of connections reads in one turn of its event loop.

use std::future::Future;
use std::task::Poll;

use downbeat_core::Duration;
use downbeat_models::registry::Registry;
use downbeat_service::service::Service;
use downbeat_service::work::turn_end;
use tokio::runtime::{Builder, Runtime};

use crate::serving::{Models, metric, request, until};

/// An event loop of the calling thread, like that of a thread of connections. A turn may take any
/// time.
fn event_loop() -> Runtime {
    turn_end::follow(Duration::MAX);
    Builder::new_current_thread().on_thread_park(turn_end::end).enable_all().build().unwrap()
}

/// Sends so many requests in one turn, and waits for their answers.
async fn send_together(registry: &Registry, count: usize) {
    let send = |_| {
        let registry = registry.clone();
        tokio::spawn(async move { registry.infer(request("m", 1, 4)).await.unwrap() })
    };
    let answers: Vec<_> = (0..count).map(send).collect();
    for answer in answers {
        answer.await.unwrap();
    }
}

/// The numbers of items and of batches.
fn counts(registry: &Registry) -> (u64, u64) {
    let statistics = &registry.statistics("m", "").unwrap()[0];
    (statistics.inference_count, statistics.execution_count)
}

#[test]
fn requests_of_one_turn_share_a_batch() {
    event_loop().block_on(async {
        let models = Models::new();
        models.add("m", 1, (0.01, 0.01), 4, "");
        let registry = models.serve(|_| {}).await;
        // The first request cannot know that others come.
        send_together(&registry, 8).await;
        let before = counts(&registry);
        assert!(before.0 == 8 && before.1 <= 2, "{before:?}");
        send_together(&registry, 8).await;
        assert_eq!(counts(&registry), (16, before.1 + 1));
        // After a turn with one request the next one waits for no other.
        send_together(&registry, 1).await;
        send_together(&registry, 1).await;
        assert_eq!(counts(&registry), (18, before.1 + 3));
    });
}

#[test]
fn a_request_given_up_before_its_turn_ends_is_not_run() {
    event_loop().block_on(async {
        let models = Models::new();
        models.add("m", 1, (0.01, 0.01), 4, "");
        let registry = models.serve(|_| {}).await;
        send_together(&registry, 3).await;
        let before = counts(&registry);
        let mut given_up = Box::pin(registry.infer(request("m", 1, 4)));
        std::future::poll_fn(|context| {
            assert!(given_up.as_mut().poll(context).is_pending(), "it is held back for others");
            Poll::Ready(())
        })
        .await;
        drop(given_up);
        let cancelled = || metric(&registry, "downbeat_requests_not_answered_total", "cancelled");
        until(|| cancelled() == 1.0).await;
        send_together(&registry, 2).await;
        let after = counts(&registry);
        assert_eq!((after.0, cancelled()), (before.0 + 2, 1.0));
    });
}
