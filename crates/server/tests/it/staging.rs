//! The stages and buffer pairs that the server finds for the policy `staged` when it loads a model.

use downbeat_core::Duration;
use downbeat_models::registry::Registry;
use downbeat_service::options::{DeviceGroup, PolicyName, ServerOptions};
use downbeat_service::report::policy_report::{PolicyReport, StagingReport};
use downbeat_service::service::Service;
use serde_json::json;

use crate::serving::{Models, request};

fn policy(registry: &Registry) -> PolicyReport {
    registry.policy("m", "").unwrap()
}

fn staging(registry: &Registry) -> StagingReport {
    policy(registry).staging.unwrap()
}

/// The policy `staged` for the model `m`, with these settings.
fn staged(options: &mut ServerOptions, settings: serde_json::Value) {
    let settings = serde_json::from_value(settings).unwrap();
    options.device.groups =
        vec![DeviceGroup { models: vec!["m".to_owned()], policy: Some(PolicyName::STAGED), settings }];
}

#[tokio::test]
async fn stages_are_found_by_trials_and_each_request_is_answered() {
    let models = Models::new();
    models.add("m", 1, (1.0, 4.0), 4, "");
    let registry = models.serve(|options| options.device.policy = PolicyName::STAGED).await;
    let report = policy(&registry);
    assert_eq!((&*report.policy, &*report.asked), ("staged", "staged"));
    let found = report.staging.unwrap();
    let chosen = found.tried.iter().find(|t| (t.stages, t.buffer_pairs) == (found.stages, found.buffer_pairs)).unwrap();
    let most = found.tried.iter().map(|tried| tried.requests_per_second.unwrap_or(0.0)).fold(0.0, f64::max);
    assert_eq!(found.tried.len(), 13, "one stage, and 2, 3, 4, 6, 8 and 12 stages with 1 and 2 pairs: {found:?}");
    assert!(chosen.mean_ms.is_some() && chosen.requests_per_second.unwrap() >= 0.98 * most, "{found:?}");
    assert!(found.reason.contains("answer 99%"), "{}", found.reason);
    for rows in 1..=8 {
        assert_eq!(registry.infer(request("m", rows, 4)).await.unwrap().outputs[0].shape, [rows, 1]);
    }
}

#[tokio::test]
async fn the_owners_numbers_stay() {
    let models = Models::new();
    models.add("m", 1, (1.0, 4.0), 4, "");
    let registry = models.serve(|options| staged(options, json!({ "stages": 3, "buffer_pairs": 1 }))).await;
    assert_eq!(policy(&registry).staging, None, "nothing is left to find");
    let registry = models.serve(|options| staged(options, json!({ "stages": 3 }))).await;
    let found = staging(&registry);
    assert!(found.stages == 3 && found.tried.iter().all(|tried| tried.stages == 3), "{found:?}");
    assert_eq!(found.tried.len(), 2, "one pair and two: {found:?}");
    let registry = models.serve(|options| staged(options, json!({ "buffer_pairs": 1 }))).await;
    let found = staging(&registry);
    assert!(found.tried.iter().all(|tried| tried.buffer_pairs == 1) && found.tried.len() == 7, "{found:?}");
}

/// The start of a server waits for no search. A new start finds the stored result.
#[tokio::test]
async fn a_start_without_time_has_the_defaults_or_the_stored_result() {
    let models = Models::new();
    models.add("m", 1, (1.0, 4.0), 4, "");
    let quick = |options: &mut ServerOptions| {
        staged(options, json!({}));
        options.profiling.budget = Duration::from_millis(20);
    };
    let found = staging(&models.serve(quick).await);
    assert_eq!((found.stages, found.buffer_pairs, found.tried.len()), (4, 2, 0));
    assert!(found.reason.contains("budget_s is 1 or more"), "{}", found.reason);
    // A result of an earlier server, as it is stored.
    let found = staging(&models.serve(|options| staged(options, json!({}))).await);
    let files = std::fs::read_dir(models.path().join(".profiles")).unwrap().map(|file| file.unwrap().path());
    let file = files.filter(|file| file.to_string_lossy().contains("-stages-")).last().unwrap();
    let mut stored: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(stored["staging"]["stages"], found.stages);
    (stored["staging"]["stages"], stored["staging"]["pairs"]) = (json!(6), json!(1));
    std::fs::write(file, stored.to_string()).unwrap();
    assert_eq!(staging(&models.serve(quick).await).stages, 6, "one load, by the stored result");
}

#[tokio::test]
async fn where_nothing_can_be_searched_the_reason_is_reported() {
    let padded = (json!({ "pad": true }), -1, true, "lengths");
    for (settings, dim, enabled, word) in [(json!({}), 4, false, "[profiling]"), padded] {
        let models = Models::new();
        models.add("m", 1, (1.0, 4.0), dim, "");
        let change = |options: &mut ServerOptions| {
            staged(options, settings);
            options.profiling.enabled = enabled;
        };
        let found = staging(&models.serve(change).await);
        assert_eq!((found.stages, found.buffer_pairs, found.tried.len()), (4, 2, 0), "{word}");
        assert!(found.reason.contains(word), "{}", found.reason);
    }
}
