//! The server on GPUs, on the stand-in of their driver (`crates/cuda-stand-in`). In a program of its own: the driver, once it is loaded, is that of all tests.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use cuda_stand_in::StandIn;
use downbeat_core::tensor::DataType;
use downbeat_protocol::{InferInput, InferRequest, InferResponse};
use downbeat_server::error::ServiceError;
use downbeat_server::options::{DeviceGroup, DevicePolicy, DeviceSettings, EngineChoice, ModelControl, ServerOptions};
use downbeat_server::registry::Registry;
use downbeat_server::service::{LoadOverrides, Service};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

const MODELS: [&str; 3] = ["mlp", "digits", "encoder"];
/// CUDA's number of the error.
const ECC_UNCORRECTABLE: u32 = 214;

/// So many GPUs, if there is an onnxruntime library whose kernels can run on them.
fn gpus(count: u32) -> Option<StandIn> {
    let is_there = std::env::var_os("ORT_DYLIB_PATH").is_some();
    let required = std::env::var("DOWNBEAT_REQUIRE_ONNXRUNTIME").is_ok_and(|v| v == "1");
    assert!(is_there || !required, "DOWNBEAT_REQUIRE_ONNXRUNTIME is 1, and ORT_DYLIB_PATH is not set");
    if !is_there {
        println!("skipped: set ORT_DYLIB_PATH to test it too");
        return None;
    }
    let stand_in = StandIn::lock();
    stand_in.set_devices(count, 132, 80 << 30);
    stand_in.set_readable(true);
    Some(stand_in)
}

async fn serve(engine: EngineChoice, models: &[&str], policy: DevicePolicy, settings: DeviceSettings) -> Registry {
    let mut options = ServerOptions::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models"));
    options.engine = engine;
    options.profiling.enabled = false;
    options.model_control = ModelControl::Explicit { load: models.iter().map(|name| (*name).to_owned()).collect() };
    let group = DeviceGroup { models: vec!["*".to_owned()], policy: Some(policy), settings };
    options.device.groups = vec![group];
    let registry = Registry::open(Arc::new(options)).unwrap();
    for name in models {
        registry.load_model(name, LoadOverrides::default(), Arc::new(())).await.unwrap();
    }
    registry.set_started();
    registry
}

fn input(name: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> InferInput {
    let (name, shape) = (name.to_owned(), shape.to_vec());
    InferInput { name, datatype, shape, parameters: Default::default(), data: data.into() }
}

/// A random request of one of the examples; all of `encoder` have the same length.
fn request(rng: &mut Pcg64Mcg, model: &str) -> InferRequest {
    let rows = rng.random_range(1..4i64);
    let mut floats = |count: i64| (0..count).flat_map(|_| rng.random_range(0.0f32..1.0).to_le_bytes()).collect();
    let inputs = match model {
        "digits" => vec![input("image", DataType::Fp32, &[rows, 8, 8], floats(rows * 64))],
        "mlp" => vec![input("input", DataType::Fp32, &[rows, 784], floats(rows * 784))],
        _ => {
            let ids = (0..rows * 8).flat_map(|_| rng.random_range(1i64..1000).to_le_bytes()).collect();
            let ones = (0..rows * 8).flat_map(|_| 1i64.to_le_bytes()).collect();
            let shape = [rows, 8];
            vec![
                input("input_ids", DataType::Int64, &shape, ids),
                input("attention_mask", DataType::Int64, &shape, ones),
            ]
        }
    };
    InferRequest { model_name: model.to_owned(), inputs, ..InferRequest::default() }
}

fn copy(request: &InferRequest) -> InferRequest {
    let input = |i: &InferInput| input(&i.name, i.datatype, &i.shape, i.data.to_vec());
    InferRequest {
        model_name: request.model_name.clone(),
        inputs: request.inputs.iter().map(input).collect(),
        ..InferRequest::default()
    }
}

fn assert_same(what: &str, expected: &InferResponse, got: &InferResponse) {
    assert_eq!(expected.outputs.len(), got.outputs.len(), "{what}");
    for (expected, got) in expected.outputs.iter().zip(&got.outputs) {
        assert_eq!((&expected.name, &expected.shape), (&got.name, &got.shape), "{what}");
        if expected.datatype != DataType::Fp32 {
            assert_eq!(expected.data, got.data, "{what}: {}", got.name);
            continue;
        }
        let floats = |data: &[u8]| -> Vec<f32> {
            data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        for (expected, got) in floats(&expected.data).into_iter().zip(floats(&got.data)) {
            assert!((expected - got).abs() <= 1e-4 * expected.abs().max(1.0), "{what}: {expected} and {got}");
        }
    }
}

/// Sends many requests at once, and compares their answers with those of the CPU.
async fn answers_as_the_cpu(models: &[&'static str], policy: DevicePolicy, settings: DeviceSettings) {
    let Some(stand_in) = gpus(2) else { return };
    let expected = serve(EngineChoice::Rten, models, DevicePolicy::Exclusive, DeviceSettings::default()).await;
    let registry = Arc::new(serve(EngineChoice::Cuda, models, policy, settings).await);
    let seed = 11;
    println!("seed {seed}");
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut answers = Vec::new();
    for _ in 0..120 {
        let model = models[rng.random_range(0..models.len())];
        let request = request(&mut rng, model);
        let alone = expected.infer(copy(&request)).await.unwrap();
        let registry = registry.clone();
        answers.push((model, alone, tokio::spawn(async move { registry.infer(request).await })));
    }
    for (model, expected, answer) in answers {
        assert_same(&format!("{policy}, {model}"), &expected, &answer.await.unwrap().unwrap());
    }
    assert_eq!(stand_in.mistakes(), Vec::<String>::new());
    assert_eq!(stand_in.calls("pageable upload") + stand_in.calls("pageable download"), 0);
    drop(Arc::into_inner(registry).expect("all are answered"));
    has_ended(&stand_in).await;
    stand_in.assert_clean();
}

/// Waits until the threads of a server that was dropped have given back what they had on the GPUs.
async fn has_ended(stand_in: &StandIn) {
    for _ in 0..500 {
        if stand_in.leaks().is_empty() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("left over on the GPUs: {:?}", stand_in.leaks());
}

#[tokio::test(flavor = "multi_thread")]
async fn exclusive_answers_as_the_cpu() {
    answers_as_the_cpu(&MODELS, DevicePolicy::Exclusive, DeviceSettings::default()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn elastic_answers_as_the_cpu() {
    answers_as_the_cpu(&["mlp", "digits"], DevicePolicy::Elastic, DeviceSettings::default()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn staged_answers_as_the_cpu() {
    let settings = DeviceSettings { stages: Some(2), ..DeviceSettings::default() };
    answers_as_the_cpu(&["mlp", "digits"], DevicePolicy::Staged, settings).await;
    let settings = DeviceSettings { stages: Some(4), pad: true, ..DeviceSettings::default() };
    answers_as_the_cpu(&["encoder"], DevicePolicy::Staged, settings).await;
}

/// A GPU that fails answers what it runs with 503, the other one takes over; without any, clients and probes are told.
async fn a_lost_gpu(policy: DevicePolicy) {
    let Some(stand_in) = gpus(2) else { return };
    let registry = serve(EngineChoice::Cuda, &["digits"], policy, DeviceSettings::default()).await;
    let seed = 12;
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut ask = || request(&mut rng, "digits");
    registry.infer(ask()).await.unwrap();
    stand_in.lose_device(0, ECC_UNCORRECTABLE);
    let mut failures = 0;
    for _ in 0..20 {
        match registry.infer(ask()).await {
            Ok(_) => {}
            Err(ServiceError::Unavailable(message)) => {
                assert!(message.contains("GPU 0 is lost"), "{message}");
                failures += 1;
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!((1..=2).contains(&failures), "{failures} of 20 failed: the lost device is asked no more");
    assert!(registry.is_ready() && registry.is_model_ready("digits", ""), "there is another GPU");
    assert!(registry.is_live());
    stand_in.lose_device(1, ECC_UNCORRECTABLE);
    for _ in 0..3 {
        let error = registry.infer(ask()).await.unwrap_err();
        assert!(matches!(&error, ServiceError::Unavailable(message) if message.contains("is lost")), "{error:?}");
    }
    assert!(!registry.is_ready() && !registry.is_model_ready("digits", ""), "nothing runs any more");
    assert!(!registry.is_live(), "only a new process can use a GPU again");
    drop(registry);
    has_ended(&stand_in).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_gpu_is_taken_out_of_service() {
    a_lost_gpu(DevicePolicy::Exclusive).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_gpu_gets_no_more_of_routed_requests() {
    a_lost_gpu(DevicePolicy::Elastic).await;
}
