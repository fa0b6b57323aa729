//! Models with several exits: a request is answered where its answer is final (DVABatch §9.2).

use std::path::Path;
use std::sync::Arc;

use downbeat_core::tensor::DataType;
use downbeat_models::registry::Registry;
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_service::error::ServiceError;
use downbeat_service::options::{EngineChoice, ServerOptions};
use downbeat_service::service::{LoadOverrides, Service};
use serde_json::{Value, json};

use crate::lanes::{group, input, numbers};
use crate::serving::metric;

fn rule(output: &str, confidence: f32, answers: &[&str]) -> Value {
    json!({ "output": output, "confidence": confidence, "answers": answers })
}

async fn serve(policy: &str, exits: Vec<Value>) -> Result<Registry, ServiceError> {
    let mut options = ServerOptions::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/exits/models"));
    options.engine = EngineChoice::Rten;
    options.threads = 1;
    options.profiling.enabled = false;
    let settings = match policy {
        "staged" => json!({ "exits": exits, "cut_at": ["early"] }),
        _ if exits.is_empty() => json!({}),
        _ => json!({ "exits": exits }),
    };
    options.device.groups = vec![group(&["exits"], policy, settings)];
    let registry = Registry::open(Arc::new(options)).unwrap();
    registry.load_model("exits", LoadOverrides::default(), Arc::new(())).await?;
    registry.set_started();
    Ok(registry)
}

/// A picture in which the ink at a place depends on `seed`.
fn picture(seed: u32) -> InferRequest {
    let ink = |place: u32| f32::from(((place * 37 + seed * 101) % 256) as u8);
    let data: Vec<u8> = (0..64).flat_map(|place| ink(place).to_le_bytes()).collect();
    let input = input("image", DataType::Fp32, &[1, 8, 8], data);
    InferRequest { model_name: "exits".to_owned(), inputs: vec![input], ..Default::default() }
}

fn output(response: &InferResponse, name: &str) -> Vec<f32> {
    let output = response.outputs.iter().find(|output| output.name == name).unwrap();
    numbers(&output.data)
}

fn near(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4)
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_sure_is_answered_early_and_who_is_not_goes_on() {
    const SURE: f32 = 0.6;
    let whole = serve("exclusive", Vec::new()).await.unwrap();
    let staged = serve("staged", vec![rule("early", SURE, &["late"])]).await.unwrap();
    let sent: Vec<_> = (0..60)
        .map(|seed| {
            let staged = staged.clone();
            (seed, tokio::spawn(async move { staged.infer(picture(seed)).await.unwrap() }))
        })
        .collect();
    let mut left = 0;
    for (seed, answer) in sent {
        let (expected, got) = (whole.infer(picture(seed)).await.unwrap(), answer.await.unwrap());
        let early = output(&expected, "early");
        assert!(near(&early, &output(&got, "early")), "{seed}");
        let sure = early.iter().any(|p| *p >= SURE);
        let late = if sure { early } else { output(&expected, "late") };
        assert!(near(&late, &output(&got, "late")), "{seed}: sure: {sure}");
        left += u32::from(sure);
    }
    assert!((5..55).contains(&left), "some are sure and some are not: {left}");
    let exits = metric(&staged, "downbeat_batch_events_total", "event=\"exit\"");
    assert!(exits >= 1.0, "members have left batches: {exits}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_that_do_not_suit_the_model_are_refused_at_load() {
    let cases = [
        (rule("earlier", 0.9, &["late"]), "exits: the model has no output 'earlier'; its outputs are 'early', 'late'"),
        (rule("late", 0.9, &["early"]), "exits: output 'late' is computed in the last segment; cut the model after it"),
        (
            rule("early", 0.9, &[]),
            "exits: a request that leaves after 'early' has no output 'late'; name 'early' for it in `answers`",
        ),
        (rule("early", 0.9, &["later"]), "exits: answers names 'later'; the model's outputs are 'early', 'late'"),
    ];
    for (rule, expected) in cases {
        let error = serve("staged", vec![rule.clone()]).await.err().expect("it loads").to_string();
        assert!(error.contains(expected), "{rule:?}: {error}");
    }
    let error = serve("windowed", vec![rule("early", 0.9, &["late"])]).await.err().unwrap().to_string();
    assert!(error.contains("'exits': the policy windowed does not know it, only staged"), "{error}");
}
