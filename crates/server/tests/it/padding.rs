//! Models whose answers change when their requests are padded: found at load, or in service.

use std::time::Duration;

use downbeat_core::tensor::DataType;
use downbeat_models::registry::Registry;
use downbeat_service::options::{DeviceGroup, EngineChoice};
use downbeat_service::service::Service;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::lanes::{group, numbers};
use crate::loading::{add, int, integers, load, open, options, request, varying};
use crate::model::{AttributeProto, GraphProto, ModelProto, floats, folder, ints, model, node};
use crate::serving::metric;

/// `y = x`, and `x + 1` where requests are longer than `limit`.
fn from_some_length_on(limit: i64) -> ModelProto {
    const GRAPH: i32 = 5;
    let branch = |name: &str, operator| {
        let graph = GraphProto {
            name: name.to_owned(),
            node: vec![operator],
            output: vec![varying(&format!("{name}_y"))],
            ..GraphProto::default()
        };
        AttributeProto { name: name.to_owned(), g: Some(graph), r#type: GRAPH, ..AttributeProto::default() }
    };
    let mut choice = node("If", &["is_long"], &["y"]);
    choice.attribute = vec![
        branch("then_branch", node("Add", &["x", "one"], &["then_branch_y"])),
        branch("else_branch", node("Identity", &["x"], &["else_branch_y"])),
    ];
    let nodes = vec![
        node("Shape", &["x"], &["shape"]),
        node("Gather", &["shape", "second"], &["length"]),
        node("Greater", &["length", "limit"], &["is_long"]),
        choice,
    ];
    let weights = vec![integers("second", &[], &[1]), integers("limit", &[], &[limit]), floats("one", &[], &[1.0])];
    model(nodes, weights, vec![varying("x")], vec![varying("y")])
}

/// `y = x + max(min(x, -50))` over a request. Zeros behind a request change the answer only if all
/// of the request is below -50.
fn for_rare_inputs() -> ModelProto {
    let mut most = node("ReduceMax", &["low"], &["most"]);
    most.attribute = vec![ints("axes", &[1]), int("keepdims", 1)];
    let nodes = vec![node("Min", &["x", "limit"], &["low"]), most, node("Add", &["x", "most"], &["y"])];
    model(nodes, vec![floats("limit", &[], &[-50.0])], vec![varying("x")], vec![varying("y")])
}

fn padded(model: &ModelProto, policy: &str, settings: Value) -> (TempDir, Registry) {
    let folder = folder();
    add(folder.path(), "m", model);
    let mut options = options(folder.path(), EngineChoice::Rten);
    options.profiling.enabled = false;
    options.device.groups = vec![DeviceGroup { policy: None, ..group(&["m"], policy, settings) }];
    options.device.policy = policy.parse().unwrap();
    let registry = open(options);
    (folder, registry)
}

#[tokio::test]
async fn what_changes_from_some_length_on_is_found_at_load() {
    for limit in [1, 15, 16, 100, 1500] {
        let settings = json!({ "pad": true, "max_length": 2000 });
        let (_folder, registry) = padded(&from_some_length_on(limit), "windowed", settings);
        let error = load(&registry, "m").await.unwrap_err();
        assert!(error.contains("its answers change when its inputs are padded"), "{limit}: {error}");
    }
    // No request is that long.
    let settings = json!({ "pad": true, "max_length": 2000 });
    let (_folder, registry) = padded(&from_some_length_on(2000), "windowed", settings);
    load(&registry, "m").await.unwrap();
}

/// Sends requests of these lengths, with all values -100, at once. Returns how many answers are
/// wrong.
async fn wrong(registry: &Registry, lengths: [i64; 3]) -> usize {
    let ask = |length: i64| {
        let registry = registry.clone();
        let data = (0..length).flat_map(|_| (-100.0f32).to_le_bytes()).collect();
        tokio::spawn(async move { registry.infer(request("m", DataType::Fp32, &[1, length], data)).await.unwrap() })
    };
    let mut wrong = 0;
    for (answer, length) in lengths.map(|length| (ask(length), length)) {
        let answer = numbers(&answer.await.unwrap().outputs[0].data);
        assert_eq!(answer.len() as i64, length);
        wrong += usize::from(answer.iter().any(|n| *n != -200.0));
    }
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn padding_ends_once_service_finds_an_input_that_it_changes() {
    for policy in ["windowed", "elastic", "staged"] {
        let settings = json!({ "pad": true, "max_length": 32, "pad_check_every": 1, "window_ms": 20, "stages": 1 });
        let (_folder, registry) = padded(&for_rare_inputs(), policy, settings);
        load(&registry, "m").await.unwrap();
        let found = || metric(&registry, "downbeat_padding_checks_total", "result=\"different\"") > 0.0;
        let mut were_wrong = 0;
        for _ in 0..500 {
            were_wrong += wrong(&registry, [3, 9, 5]).await;
            if found() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(found() && were_wrong > 0, "{policy}: {were_wrong} answers were wrong");
        // The requests that were in the input ring have been answered by now.
        for _ in 0..10 {
            assert_eq!(wrong(&registry, [3, 9, 5]).await, 0, "{policy}");
        }
    }
}
