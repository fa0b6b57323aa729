//! Which batches run beside each other, and which wait for others: on emulated models, whose
//! batches take the configured time.

use std::time::Duration;

use downbeat_models::registry::Registry;
use downbeat_service::error::ServiceError;
use downbeat_service::service::Service;

use crate::serving::{Answer, Models, metric, ms, request, send};

/// Longer than any test runs.
const VERY_LONG: &str = "600000000";

fn running(registry: &Registry) -> f64 {
    metric(registry, "downbeat_device_running", "")
}

async fn answered(answer: Answer) {
    let answer = tokio::time::timeout(Duration::from_secs(30), answer).await;
    answer.expect("it waits for nobody").unwrap().unwrap();
}

#[tokio::test]
async fn a_slow_model_leaves_room_for_another() {
    let models = Models::new();
    models.add("slow", 1, (0.0, 3_000.0), 4, "");
    models.add("fast", 1, (0.0, 1.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let slow = send(&registry, request("slow", 1, 4)).await;
    registry.infer(request("fast", 1, 4)).await.unwrap();
    assert!(!slow.is_finished(), "the fast model waited for the slow one");
}

/// Eight clients ask for a model until so many batches run at once, and a while longer. Returns the
/// most batches that ran at once.
async fn most_running(registry: &Registry, model: &'static str, expected: f64) -> f64 {
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let registry = registry.clone();
            tokio::spawn(async move {
                loop {
                    registry.infer(request(model, 1, 4)).await.unwrap();
                }
            })
        })
        .collect();
    let (mut most, mut looks) = (0.0, 0);
    // Thirty seconds, for a machine that has other things to do.
    while looks < 6_000 && (most < expected || looks < 100) {
        most = f64::max(most, running(registry));
        looks += 1;
        tokio::time::sleep(ms(5)).await;
    }
    clients.iter().for_each(|client| client.abort());
    most
}

#[tokio::test]
async fn an_instance_group_runs_so_many_batches_at_once() {
    let models = Models::new();
    models.add("m", 1, (0.0, 50.0), 4, "max_batch_size: 1\ninstance_group { count: 4 }");
    let registry = models.serve(|_| {}).await;
    assert_eq!(most_running(&registry, "m", 4.0).await, 4.0);
}

#[tokio::test]
async fn a_model_without_options_runs_one_batch_at_a_time() {
    let models = Models::new();
    models.add("m", 1, (0.0, 200.0), -1, "");
    models.add("other", 1, (0.0, 1.0), 4, "");
    let registry = models.serve(|_| {}).await;
    let answers = [3, 5, 7, 3].map(|dim| {
        tokio::spawn({
            let registry = registry.clone();
            async move { registry.infer(request("m", 1, dim)).await }
        })
    });
    let mut most: f64 = 0.0;
    while answers.iter().any(|answer| !answer.is_finished()) {
        most = most.max(running(&registry));
        tokio::time::sleep(ms(5)).await;
    }
    assert_eq!(most, 1.0);
    for answer in answers {
        answer.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn chosen_devices_stay_as_many() {
    let models = Models::new();
    models.add("m", 1, (0.0, 1.0), 4, "max_batch_size: 1\ninstance_group { count: 4 }");
    models.add("n", 1, (0.0, 50.0), 4, "max_batch_size: 1");
    let registry = models.serve(|options| options.devices = 2).await;
    assert_eq!(most_running(&registry, "n", 2.0).await, 2.0, "a model that asks for nothing has as many as there are");
}

/// Triton's `L0_batcher`, `test_multi_batch_different_shape`: the first of two requests of
/// different shapes does not wait for others of its shape, the second does.
#[tokio::test]
async fn a_request_of_another_shape_sends_what_waits() {
    let models = Models::new();
    models.add("m", 1, (0.0, 1.0), -1, &format!("dynamic_batching {{ max_queue_delay_microseconds: {VERY_LONG} }}"));
    let registry = models.serve(|_| {}).await;
    let first = send(&registry, request("m", 1, 3)).await;
    assert!(!first.is_finished());
    let second = send(&registry, request("m", 1, 5)).await;
    answered(first).await;
    assert!(!second.is_finished());
    let third = send(&registry, request("m", 1, 3)).await;
    answered(second).await;
    assert!(!third.is_finished(), "it came after the last one of another shape");
}

/// `test_multi_batch_not_preferred_different_shape`: waiting requests go though their number is no
/// preferred size.
#[tokio::test]
async fn what_waits_goes_together_and_at_no_preferred_size() {
    let models = Models::new();
    let config =
        format!("dynamic_batching {{ preferred_batch_size: [ 6 ] max_queue_delay_microseconds: {VERY_LONG} }}");
    models.add("m", 1, (0.0, 1.0), -1, &config);
    let registry = models.serve(|_| {}).await;
    let first = send(&registry, request("m", 1, 3)).await;
    let second = send(&registry, request("m", 3, 3)).await;
    assert!(!first.is_finished() && !second.is_finished());
    let third = send(&registry, request("m", 1, 5)).await;
    answered(first).await;
    answered(second).await;
    assert!(!third.is_finished());
    let statistics = &registry.statistics("m", "").unwrap()[0];
    assert_eq!(statistics.batch_stats.iter().map(|b| b.batch_size).collect::<Vec<_>>(), [4], "in one batch");
}

/// `test_multi_batch_preferred_different_shape`: a batch that fills a preferred size goes at once,
/// and so does one of another shape.
#[tokio::test]
async fn preferred_sizes_go_at_once_in_every_shape() {
    let models = Models::new();
    let config =
        format!("dynamic_batching {{ preferred_batch_size: [ 4 ] max_queue_delay_microseconds: {VERY_LONG} }}");
    models.add("m", 1, (0.0, 1.0), -1, &config);
    let registry = models.serve(|_| {}).await;
    for dim in [3, 5] {
        let (first, second) =
            (send(&registry, request("m", 1, dim)).await, send(&registry, request("m", 3, dim)).await);
        answered(first).await;
        answered(second).await;
    }
}

#[tokio::test]
async fn a_request_larger_than_every_preferred_size_does_not_wait() {
    let models = Models::new();
    let config =
        format!("dynamic_batching {{ preferred_batch_size: [ 2, 6 ] max_queue_delay_microseconds: {VERY_LONG} }}");
    models.add("m", 1, (0.0, 1.0), 4, &config);
    let registry = models.serve(|_| {}).await;
    answered(send(&registry, request("m", 7, 4)).await).await;
}

#[tokio::test]
async fn a_request_without_a_deadline_is_told_that_the_queue_is_too_long() {
    let models = Models::new();
    models.add("m", 1, (0.0, 1_000.0), 4, "max_batch_size: 1");
    let registry = models.serve(|options| options.max_queue_wait = downbeat_core::Duration::from_millis(1)).await;
    let mut answers = Vec::new();
    // One batch runs, and ten may wait.
    for _ in 0..12 {
        answers.push(send(&registry, request("m", 1, 4)).await);
    }
    let refused = registry.infer(request("m", 1, 4)).await.unwrap_err();
    let ServiceError::QueueFull { message, .. } = &refused else { panic!("{refused:?}") };
    assert!(message.contains("would wait for 11 s or longer, but may wait for 10 s (max_queue_wait_s)"), "{message}");
    assert_eq!((refused.http_status().as_u16(), refused.retry_after_seconds()), (503, Some(1)));
    assert_eq!(refused.grpc_code(), tonic::Code::ResourceExhausted);
    assert!(answers.iter().all(|answer| !answer.is_finished()), "the others wait");
}
