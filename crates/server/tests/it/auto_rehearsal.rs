//! The rehearsal of device policies in the server: its changes under a load, the models that it
//! leaves alone, and that no change loses a request.

use std::time::Duration;

use downbeat_server::options::{DeviceGroup, DispatchPolicy, ServerOptions};
use downbeat_server::registry::Registry;
use downbeat_server::service::Service;
use serde_json::Value;

use crate::auto::where_lanes_do;
use crate::serving::{Models, metric, ms, request, send};

/// 200 requests a second.
const EVERY: Duration = Duration::from_millis(5);

/// Batches wait as long as they may, and there are no stages. The rehearsal gets most of a core,
/// because the code that it replays is not optimised in tests.
fn patient(options: &mut ServerOptions) {
    let settings = [("stages".to_owned(), 1.into())].into();
    options.device.groups = vec![DeviceGroup { models: vec!["*".to_owned()], policy: None, settings }];
    options.dispatch = DispatchPolicy::Deferred;
    options.rehearsal_cpu = 0.9;
    options.default_slo = Some(downbeat_core::Duration::from_millis(60));
}

fn status(registry: &Registry) -> Value {
    serde_json::to_value(registry.scheduler().unwrap()).unwrap()["device_policies"].clone()
}

/// Sends requests until `done`, for so long at most. Returns how many were sent.
async fn load(registry: &Registry, most: Duration, done: impl Fn() -> bool) -> usize {
    let (mut answers, mut ticks) = (Vec::new(), tokio::time::interval(EVERY));
    for _ in 0..most.as_millis() / EVERY.as_millis() {
        ticks.tick().await;
        answers.push(send(registry, request("m", 1, 4)).await);
        if done() {
            break;
        }
    }
    let count = answers.len();
    for answer in answers {
        if let Err(error) = answer.await.unwrap() {
            assert!(error.to_string().contains("deadline"), "{error}");
        }
    }
    count
}

#[tokio::test]
async fn a_better_policy_replaces_exclusive_without_losing_a_request() {
    let models = Models::new();
    models.add("m", 1, (1.0, 4.0), 4, "");
    let registry = where_lanes_do(&models, [200, 200], patient).await;
    let policy = || registry.policy("m", "").unwrap();
    assert_eq!(policy().policy, "exclusive", "{}", policy().reason);
    // The server itself looks once a second.
    let looks = registry.clone();
    let looks = tokio::spawn(async move {
        loop {
            tokio::time::sleep(ms(100)).await;
            looks.change_policies().await;
        }
    });
    // A busy machine makes replays differ from the requests' real ends, so the server does not
    // believe many of them.
    let before = load(&registry, ms(3_600_000), || policy().policy != "exclusive").await;
    let (report, said) = (policy(), status(&registry));
    assert_ne!(report.policy, "exclusive", "{said}");
    assert_eq!(report.asked, "auto");
    assert!(report.reason.starts_with("replays of the last seconds"), "{}", report.reason);
    let trial = report.rehearsal.unwrap();
    assert!(trial.changed && trial.faithful, "{trial:?}");
    assert_eq!(trial.candidates[0].candidate.policy.name(), "exclusive");
    let best = trial.candidates.iter().find(|tried| tried.taken).unwrap();
    // A busy machine makes the gain smaller.
    assert!(best.delay_ms < trial.candidates[0].delay_ms, "{trial:?}");
    assert_eq!((&said["changes"], &said["models"][0]["policy"]), (&1.into(), &Value::from(&*report.policy)), "{said}");
    assert_eq!(metric(&registry, "downbeat_rehearsal_device_changes_total", ""), 1.0);
    let after = load(&registry, ms(1_000), || false).await;
    looks.abort();
    let refused = metric(&registry, "downbeat_requests_not_answered_total", "m");
    let answered = metric(&registry, "nv_inference_request_success", "m");
    assert_eq!(answered + refused, (before + after) as f64, "each is answered once");
}
