//! Device policies in the server: under every policy a request gets the same answer as alone.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use downbeat_core::tensor::DataType;
use downbeat_models::registry::Registry;
use downbeat_protocol::{InferRequest, InferResponse, InferTensor};
use downbeat_service::error::ServiceError;
use downbeat_service::options::{DeviceGroup, DispatchPolicy, EngineChoice, ModelControl, ServerOptions};
use downbeat_service::report::policy_report::AskedFor;
use downbeat_service::service::{LoadOverrides, Service};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde_json::{Value, json};

use crate::serving::metric;

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models")
}

/// Options that give models this device policy and its settings.
pub fn group(models: &[&str], policy: &str, settings: Value) -> DeviceGroup {
    let models = models.iter().map(|name| (*name).to_owned()).collect();
    DeviceGroup { models, policy: Some(policy.parse().unwrap()), settings: serde_json::from_value(settings).unwrap() }
}

fn options(models: &[&str], policy: &str, settings: Value) -> ServerOptions {
    let mut options = ServerOptions::new(examples());
    options.engine = EngineChoice::Rten;
    options.threads = 1;
    options.profiling.enabled = false;
    options.model_control = ModelControl::Explicit { load: models.iter().map(|name| (*name).to_owned()).collect() };
    // Some examples have an SLO, which a busy machine may not keep. This test needs all answers.
    for name in models {
        options.models.entry((*name).to_owned()).or_default().slo = Some(downbeat_core::Duration::from_millis(600_000));
    }
    options.device.groups = vec![group(models, policy, settings)];
    options
}

async fn load(options: ServerOptions) -> Result<Registry, ServiceError> {
    let registry = Registry::open(Arc::new(options)).unwrap();
    for name in registry.wanted_at_start().to_vec() {
        registry.load_model(&name, LoadOverrides::default(), Arc::new(())).await?;
    }
    registry.set_started();
    Ok(registry)
}

pub async fn serve(models: &[&str], policy: &str, settings: Value) -> Registry {
    load(options(models, policy, settings)).await.unwrap()
}

/// Not every model can have the policy that the server names for all models.
#[tokio::test]
async fn what_a_policy_for_all_models_cannot_have_is_served_by_exclusive() {
    for (policy, settings, digits) in [("windowed", json!({}), 1.0), ("staged", json!({ "stages": 1000 }), 0.0)] {
        let mut options = options(&["encoder", "digits"], policy, settings);
        options.device.groups[0].models = vec!["*".to_owned()];
        let registry = load(options).await.unwrap();
        let mut rng = Pcg64Mcg::seed_from_u64(1);
        for model in ["encoder", "digits"] {
            registry.infer(request(&mut rng, model)).await.unwrap();
        }
        assert_eq!(metric(&registry, "downbeat_lanes", "encoder"), 0.0, "{policy}");
        assert_eq!(metric(&registry, "downbeat_lanes", "digits"), digits, "{policy}");
        let report = registry.policy("encoder", "").unwrap();
        assert_eq!((&*report.policy, &*report.asked, report.asked_for), ("exclusive", policy, AskedFor::All));
        assert!(
            report.reason.starts_with(&format!("the device policy '{policy}' cannot have this model")),
            "{report:?}"
        );
    }
    let mut options = options(&["encoder"], "elastic", json!({}));
    options.device.groups.clear();
    options.device.policy = "elastic".parse().unwrap();
    load(options).await.unwrap().infer(encoder_request(&[1, 2, 3])).await.unwrap();
}

async fn refused(model: &str, policy: &str, settings: Value) -> String {
    load(options(&[model], policy, settings)).await.err().expect("it loads").to_string()
}

pub fn input(name: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> InferTensor {
    InferTensor {
        name: name.to_owned(),
        datatype,
        shape: shape.to_vec(),
        parameters: Default::default(),
        data: data.into(),
    }
}

fn floats(rng: &mut Pcg64Mcg, count: i64, most: f32) -> Vec<u8> {
    (0..count).flat_map(|_| rng.random_range(0.0..most).to_le_bytes()).collect()
}

fn ids(rng: &mut Pcg64Mcg, count: i64) -> Vec<u8> {
    (0..count).flat_map(|_| rng.random_range(1i64..1000).to_le_bytes()).collect()
}

/// A random request of one of the examples.
fn request(rng: &mut Pcg64Mcg, model: &str) -> InferRequest {
    let rows = rng.random_range(1..4i64);
    let inputs = match model {
        "digits" => vec![input("image", DataType::Fp32, &[rows, 8, 8], floats(rng, rows * 64, 255.0))],
        "mlp" => vec![input("input", DataType::Fp32, &[rows, 784], floats(rng, rows * 784, 1.0))],
        _ => {
            let length = rng.random_range(1..24i64);
            let ones = (0..rows * length).flat_map(|_| 1i64.to_le_bytes()).collect();
            vec![
                input("input_ids", DataType::Int64, &[rows, length], ids(rng, rows * length)),
                input("attention_mask", DataType::Int64, &[rows, length], ones),
            ]
        }
    };
    InferRequest { model_name: model.to_owned(), inputs, ..Default::default() }
}

/// A request of one sequence of ids.
pub fn encoder_request(ids: &[i64]) -> InferRequest {
    let shape = [1, ids.len() as i64];
    let bytes = |values: &mut dyn Iterator<Item = i64>| values.flat_map(i64::to_le_bytes).collect::<Vec<u8>>();
    let inputs = vec![
        input("input_ids", DataType::Int64, &shape, bytes(&mut ids.iter().copied())),
        input("attention_mask", DataType::Int64, &shape, bytes(&mut ids.iter().map(|_| 1))),
    ];
    InferRequest { model_name: "encoder".to_owned(), inputs, ..Default::default() }
}

/// The FP32 elements of a tensor.
pub fn numbers(data: &[u8]) -> Vec<f32> {
    data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Whether two answers are equal, apart from the order of additions.
fn assert_same(model: &str, expected: &InferResponse, got: &InferResponse) {
    assert_eq!(expected.outputs.len(), got.outputs.len());
    for (expected, got) in expected.outputs.iter().zip(&got.outputs) {
        assert_eq!((&expected.name, &expected.shape), (&got.name, &got.shape), "{model}");
        for (a, b) in numbers(&expected.data).into_iter().zip(numbers(&got.data)) {
            assert!((a - b).abs() <= 1e-4 * (1.0 + a.abs()), "{model} {}: {a} and {b}", expected.name);
        }
    }
}

/// Serves random requests that come at random times, and cancels some. Compares the answers with
/// those of the exclusive path.
async fn answers_as_exclusive(models: &[&str], policy: &str, settings: Value) {
    compare(models, &serve(models, policy, settings).await).await;
}

async fn compare(models: &[&str], registry: &Registry) {
    let alone = serve(models, "exclusive", json!({})).await;
    let seed = 7;
    println!("seed {seed}");
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut answers = Vec::new();
    for _ in 0..300 {
        let model = models[rng.random_range(0..models.len())];
        let request = request(&mut rng, model);
        let expected = alone.infer(request.clone()).await.unwrap();
        let cancelled = rng.random_bool(0.1);
        let pause = Duration::from_micros(rng.random_range(0..400));
        let its = registry.clone();
        let answer = tokio::spawn(async move { its.infer(request).await });
        if rng.random_bool(0.5) {
            tokio::time::sleep(pause).await;
        }
        if cancelled {
            answer.abort();
        }
        answers.push((model, cancelled, expected, answer));
    }
    let (mut answered, mut lost) = (0, 0);
    for (model, cancelled, expected, answer) in answers {
        match answer.await {
            Ok(answer) => {
                assert_same(model, &expected, &answer.unwrap());
                answered += 1;
            }
            Err(error) => {
                assert!(cancelled && error.is_cancelled(), "{error}");
                lost += 1;
            }
        }
    }
    assert!(answered > 250 && lost <= 50, "{answered} answered, {lost} cancelled");
    let counted = metric(registry, "nv_inference_request_success", "");
    let cancelled = metric(registry, "downbeat_requests_not_answered_total", "");
    // Some cancelled requests had been answered before, or had not begun.
    assert!(counted >= f64::from(answered) && counted + cancelled <= 300.0, "{counted} {cancelled}");
    drained(registry).await;
    no_lane_ran_two_launches_at_once(registry);
}

/// Waits until no request waits and no slot is in use.
pub async fn drained(registry: &Registry) {
    for _ in 0..500 {
        let busy = ["downbeat_lanes_busy", "downbeat_ring_occupied_slots", "nv_inference_pending_request_count"];
        if busy.iter().all(|name| metric(registry, name, "") == 0.0) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("something still waits:\n{}", registry.metrics().unwrap());
}

pub fn no_lane_ran_two_launches_at_once(registry: &Registry) {
    let timeline = registry.timeline(Duration::from_secs(60)).unwrap();
    assert!(!timeline.devices.is_empty());
    for device in timeline.devices {
        assert!(device.complete && !device.launches.is_empty(), "{device:?}");
        let mut ends = vec![0; device.lanes.len()];
        let mut launches = device.launches;
        launches.sort_by_key(|launch| launch.begin_ns);
        for launch in launches {
            let end = &mut ends[launch.lane as usize];
            assert!(*end <= launch.begin_ns && launch.begin_ns <= launch.end_ns, "{launch:?} before {end}");
            *end = launch.end_ns;
            assert!(launch.rows <= launch.computed_rows && launch.computed_rows <= 128);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn windowed_answers_as_exclusive() {
    let settings = json!({ "window_ms": 0.5 });
    answers_as_exclusive(&["mlp", "digits"], "windowed", settings).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn windowed_fills_batches_without_changing_answers() {
    let settings = json!({ "fill": true });
    answers_as_exclusive(&["digits"], "windowed", settings).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn windowed_pads_and_cuts_back() {
    let settings = json!({ "pad": true });
    answers_as_exclusive(&["encoder"], "windowed", settings.clone()).await;
    answers_as_exclusive(&["encoder"], "windowed", json!({ "pad": true, "fill": true })).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn elastic_answers_as_exclusive() {
    answers_as_exclusive(&["mlp", "digits"], "elastic", json!({})).await;
    // The ring is as small as allowed: requests wait for room.
    let settings = json!({ "mixes": { "4": "4", "8": "4,4" }, "ring_slots": 11 });
    answers_as_exclusive(&["digits"], "elastic", settings).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn elastic_pads_to_the_longest_of_all() {
    let settings = json!({ "pad": true, "max_length": 24 });
    answers_as_exclusive(&["encoder"], "elastic", settings).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn staged_answers_as_exclusive() {
    let settings = json!({ "stages": 3 });
    answers_as_exclusive(&["mlp", "digits"], "staged", settings.clone()).await;
    // With no ring that could hold all requests, and one pair of buffers: stages work one after
    // another.
    let settings = json!({ "stages": 3, "buffer_pairs": 1, "ring_slots": 128 });
    answers_as_exclusive(&["digits", "mlp"], "staged", settings).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn staged_pads_and_cuts_back_whatever_happens_to_batches() {
    for (lengths, operators, load) in
        [(true, true, false), (false, true, true), (true, false, true), (false, false, true)]
    {
        let settings = json!({ "pad": true, "stages": 4, "lengths": lengths, "operators": operators, "load": load });
        answers_as_exclusive(&["encoder"], "staged", settings).await;
    }
}

/// Serves `encoder` in four stages. Stored measurements say that each takes `ns(rows)`.
async fn staged_with_times(mut settings: Value, ns: impl Fn(u64) -> u64) -> Registry {
    let cache = tempfile::tempdir().unwrap();
    // The stages are named, because stages of equal times are cut anew at each load.
    let cut_at = json!(["layernormalization_5", "layernormalization_43", "matmul_60"]);
    for (key, value) in [("pad", json!(true)), ("cut_at", cut_at), ("max_length", json!(24))] {
        settings[key] = value;
    }
    let mut options = options(&["encoder"], "staged", settings);
    options.profiling.enabled = true;
    options.profiling.budget = downbeat_core::Duration::from_millis(10);
    options.profiling.cache_dir = Some(cache.path().to_owned());
    let registry = load(options.clone()).await.unwrap();
    // The first measuring may have had no time for the segments.
    registry.measure_again("encoder").await;
    drop(registry);
    let files: Vec<PathBuf> = std::fs::read_dir(cache.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let file = files.iter().find(|file| file.to_string_lossy().ends_with("-l24.json")).expect("times of the segments");
    let mut stored: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    // Each batch size is named: how many of them were measured depends on the machine.
    for points in stored["segments"].as_array_mut().unwrap().iter_mut().flat_map(|s| s.as_array_mut().unwrap()) {
        *points = [1, 2, 4, 8, 16, 32].map(|rows| json!({ "rows": rows, "ns": ns(rows), "runs": 1 })).to_vec().into();
    }
    // The file says that the machine did nothing else meanwhile. Otherwise the server would measure
    // the segments again.
    stored["settled"] = true.into();
    std::fs::write(file, serde_json::to_vec(&stored).unwrap()).unwrap();
    load(options).await.unwrap()
}

/// Compares answers with the exclusive path's until a batch has seen `event`. In each round one
/// long sequence goes ahead, and fifteen shorter ones follow while its batch runs. A stretch needs
/// more rows than the batch has (DVABatch §7.2).
async fn answers_as_exclusive_until(event: &str, registry: &Registry) {
    let model = "encoder";
    let alone = serve(&[model], "exclusive", json!({})).await;
    let mut rng = Pcg64Mcg::seed_from_u64(11);
    let mut expected = Vec::new();
    for length in std::iter::once(23).chain((0..15).map(|n| n + 1)) {
        let request = encoder_request(&(1..=length).collect::<Vec<_>>());
        expected.push((request.clone(), alone.infer(request).await.unwrap()));
    }
    let label = format!("event=\"{event}\"");
    let mut longest_took = Duration::ZERO;
    for _ in 0..1_000 {
        let send = |(request, expected): &(InferRequest, InferResponse)| {
            let (registry, request, expected) = (registry.clone(), request.clone(), expected.clone());
            tokio::spawn(async move { (registry.infer(request).await.unwrap(), expected) })
        };
        let start = tokio::time::Instant::now();
        let ahead = send(&expected[0]);
        // At any moment of the time that the machine needs for it: some are while a stage after the
        // first runs.
        let pause = longest_took.mul_f64(rng.random());
        while start.elapsed() < pause {
            tokio::task::yield_now().await;
        }
        let behind = expected[1..].iter().map(send).collect::<Vec<_>>();
        for (n, answer) in std::iter::once(ahead).chain(behind).enumerate() {
            let (answer, expected) = answer.await.unwrap();
            if n == 0 {
                longest_took = start.elapsed();
            }
            assert_same(model, &expected, &answer);
        }
        if metric(registry, "downbeat_batch_events_total", &label) > 0.0 {
            drained(registry).await;
            return no_lane_ran_two_launches_at_once(registry);
        }
    }
    panic!("no batch has seen {event}:\n{}", registry.metrics().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_that_are_split_answer_as_exclusive() {
    let settings = json!({ "operators": true, "lengths": false, "load": false });
    let registry = staged_with_times(settings, |rows| 1_000 * rows).await;
    compare(&["encoder"], &registry).await;
    answers_as_exclusive_until("split", &registry).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_that_are_stretched_answer_as_exclusive() {
    let settings = json!({ "operators": false, "lengths": false, "load": true, "comp_wait_ms": 30_000 });
    let registry = staged_with_times(settings, |_| 1_000_000).await;
    compare(&["encoder"], &registry).await;
    answers_as_exclusive_until("stretch", &registry).await;
}

#[tokio::test]
async fn what_a_policy_cannot_do_is_said_at_load() {
    let error = refused("encoder", "windowed", json!({})).await;
    assert!(error.contains("the device policy 'windowed' cannot have this model: requests vary"), "{error}");
    assert!(error.contains("requests vary in shape") && error.contains("give `pad = true`"), "{error}");
    let error = refused("encoder", "elastic", json!({ "pad": true })).await;
    assert!(error.contains("what varies has no slots in an input ring; give `pad = true` and `max_length`"), "{error}");
    let error = refused("digits", "elastic", json!({ "pad": true })).await;
    assert!(error.contains("nothing to pad; leave `pad` out"), "{error}");
    let error = refused("digits", "elastic", json!({ "ring_slots": 8 })).await;
    assert!(
        error.contains("an input ring of 8 slots is too small: the largest request has 64 items and 128 run"),
        "{error}"
    );
    let error = refused("digits", "elastic", json!({ "mixes": { "4": "128" } })).await;
    assert!(error.contains("a lane of 128 items is larger than the model's largest batch of 64"), "{error}");
    let error = refused("digits", "elastic", json!({ "mixes": { "8": "8" }, "max_running": 5 })).await;
    assert!(error.contains("max_running of 5 is less than the largest lane of 8 items"), "{error}");
    let error = refused("digits", "elastic", json!({ "stages": 2 })).await;
    assert!(error.contains("'stages': the policy elastic does not know it, only staged"), "{error}");
    let error = refused("digits", "staged", json!({ "stages": 1000 })).await;
    assert!(error.contains("cannot be cut into 1000 segments") && error.contains("Ask for at most"), "{error}");
    assert!(error.contains("the device policy 'staged' cannot have this model"), "{error}");
    assert!(!error.contains("cannot run this model"), "{error}");
    let error = refused("digits", "staged", json!({ "cut_at": ["nowhere"] })).await;
    assert!(error.contains("nowhere"), "{error}");
    let error = refused("digits", "staged", json!({ "ring_slots": 8 })).await;
    assert!(error.contains("an input ring of 8 slots is too small: the largest request has 64 items"), "{error}");
    let mut wrong = options(&["digits"], "windowed", json!({}));
    wrong.models.entry("digits".to_owned()).or_default().dispatch = Some(DispatchPolicy::Eager);
    let error = load(wrong).await.err().unwrap().to_string();
    assert!(error.contains("'windowed' and the scheduler 'eager' would both make the model's batches"), "{error}");
    let mut wrong = options(&["digits"], "exclusive", json!({}));
    wrong.dispatch = DispatchPolicy::Route;
    let error = load(wrong).await.err().unwrap().to_string();
    assert!(error.contains("the scheduler 'route' leaves them to the device"), "{error}");
}
