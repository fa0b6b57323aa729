//! The server on GPUs, on the stand-in of their driver (`lab/cuda-stand-in`). In a program of its
//! own: the driver, once it is loaded, is that of all tests.

#![allow(clippy::unwrap_used)]

mod http;
mod nvml;
mod shared_memory;

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use cuda_stand_in::{Kind, StandIn};
use downbeat_core::Duration;
use downbeat_core::tensor::DataType;
use downbeat_models::registry::Registry;
use downbeat_protocol::{InferRequest, InferResponse, InferTensor};
use downbeat_service::error::ServiceError;
use downbeat_service::options::{DeviceGroup, EngineChoice, ModelControl, ModelOptions, ServerOptions};
use downbeat_service::service::{LoadOverrides, Service};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde_json::{Value, json};

const MODELS: [&str; 3] = ["mlp", "digits", "encoder"];
/// CUDA's number of the error.
const ECC_UNCORRECTABLE: u32 = 214;

/// A stand-in driver with `count` GPUs, which run the kernels of an onnxruntime library.
fn gpus(count: u32) -> StandIn {
    assert!(std::env::var_os("ORT_DYLIB_PATH").is_some(), "ORT_DYLIB_PATH is not set");
    let stand_in = StandIn::lock();
    stand_in.set_devices(count, 132, 80 << 30);
    stand_in.set_readable(true);
    stand_in
}

/// Options for these of the example models.
fn options(engine: EngineChoice, models: &[&str]) -> ServerOptions {
    let mut options = ServerOptions::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models"));
    options.engine = engine;
    options.profiling.enabled = false;
    options.gpu_metrics_every = Duration::from_millis(10);
    // However busy the machine is, no request is dropped.
    let model = ModelOptions { slo: Some(Duration::from_millis(60_000)), ..ModelOptions::default() };
    options.models = models.iter().map(|name| ((*name).to_owned(), model.clone())).collect();
    options.model_control = ModelControl::Explicit { load: models.iter().map(|name| (*name).to_owned()).collect() };
    options
}

/// Options that give all models this device policy and its settings.
fn group(policy: &str, settings: Value) -> DeviceGroup {
    let (policy, settings) = (policy.parse().unwrap(), serde_json::from_value(settings).unwrap());
    DeviceGroup { models: vec!["*".to_owned()], policy: Some(policy), settings }
}

async fn serve(engine: EngineChoice, models: &[&str], policy: &str, settings: Value) -> Registry {
    let mut options = options(engine, models);
    let group = group(policy, settings);
    options.device.groups = vec![group];
    let registry = Registry::open(Arc::new(options)).unwrap();
    for name in models {
        registry.load_model(name, LoadOverrides::default(), Arc::new(())).await.unwrap();
    }
    registry.set_started();
    registry
}

fn input(name: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> InferTensor {
    let (name, shape) = (name.to_owned(), shape.to_vec());
    InferTensor { name, datatype, shape, parameters: Default::default(), data: data.into() }
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
    let input = |i: &InferTensor| input(&i.name, i.datatype, &i.shape, i.data.to_vec());
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

/// Sends many requests at once, and compares their answers with the CPU's answers.
async fn answers_as_the_cpu(models: &[&'static str], policy: &str, settings: Value) {
    let stand_in = gpus(2);
    let expected = serve(EngineChoice::Rten, models, "exclusive", json!({})).await;
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

/// Waits until the threads of a dropped server have given back their memory on the GPUs. Each test ends
/// with it: the driver of the next test would hear of the rest.
async fn has_ended(stand_in: &StandIn) {
    for _ in 0..6_000 {
        if stand_in.leaks().is_empty() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("left over on the GPUs: {:?}", stand_in.leaks());
}

#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn exclusive_answers_as_the_cpu() {
    answers_as_the_cpu(&MODELS, "exclusive", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn elastic_answers_as_the_cpu() {
    answers_as_the_cpu(&["mlp", "digits"], "elastic", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn staged_answers_as_the_cpu() {
    let settings = json!({ "stages": 2 });
    answers_as_the_cpu(&["mlp", "digits"], "staged", settings).await;
    let settings = json!({ "stages": 4, "pad": true });
    answers_as_the_cpu(&["encoder"], "staged", settings).await;
}

/// A model whose requests may be padded by a known length has them padded to a few lengths. Then
/// its batches run as graphs.
#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn requests_of_like_lengths_run_as_one_graph() {
    let stand_in = gpus(1);
    // With this launch time a graph is faster than its kernels one by one, although its inputs are
    // copied.
    stand_in.set_launch_time(50_000);
    let settings = json!({ "pad": true, "max_length": 60, "pad_check_every": 0 });
    let expected = serve(EngineChoice::Rten, &["encoder"], "exclusive", json!({})).await;
    let registry = serve(EngineChoice::Cuda, &["encoder"], "windowed", settings).await;
    let computed = || {
        let text = registry.metrics().unwrap();
        let is_it = |line: &&str| line.starts_with("downbeat_launch_length_total") && line.contains("computed");
        text.lines().filter(is_it).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum::<f64>()
    };
    let mut rng = Pcg64Mcg::seed_from_u64(13);
    let counts = || (stand_in.calls("cuGraphLaunch"), stand_in.calls("cuStreamBeginCapture_v2"));
    let mut before = computed();
    for (length, filled) in [(9, 16), (12, 16), (16, 16), (10, 16), (3, 8), (59, 60), (60, 60)] {
        let ids = (0..length).flat_map(|_| rng.random_range(1i64..1000).to_le_bytes()).collect();
        let ones = (0..length).flat_map(|_| 1i64.to_le_bytes()).collect();
        let inputs = vec![
            input("input_ids", DataType::Int64, &[1, length], ids),
            input("attention_mask", DataType::Int64, &[1, length], ones),
        ];
        let request = InferRequest { model_name: "encoder".to_owned(), inputs, ..InferRequest::default() };
        let alone = expected.infer(copy(&request)).await.unwrap();
        let (launches, captures) = counts();
        assert_same(&format!("length {length}"), &alone, &registry.infer(request).await.unwrap());
        if length == 10 {
            assert_eq!(counts(), (launches + 1, captures), "the fourth of its shape is a graph");
        }
        assert_eq!(computed() - before, f64::from(filled), "length {length}");
        before = computed();
    }
    drop((registry, expected));
    has_ended(&stand_in).await;
    stand_in.assert_clean();
}

/// GSLICE §4: each model runs on its partition of each GPU, under every policy.
#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn models_of_different_partitions_have_no_compute_unit_in_common() {
    let stand_in = gpus(2);
    for policy in ["exclusive", "windowed"] {
        let mut options = options(EngineChoice::Cuda, &MODELS);
        options.device.partitions = ["40", "25%", "24"].map(str::to_owned).to_vec();
        // The third model goes to the partition without a model.
        for (name, partition) in [("mlp", 2), ("digits", 0)] {
            options.models.get_mut(name).unwrap().partitions = Some(vec![partition]);
        }
        let settings = match policy {
            "exclusive" => json!({}),
            _ => json!({ "pad": true, "max_length": 8, "pad_check_every": 0 }),
        };
        options.device.groups = vec![group(policy, settings)];
        let registry = Registry::open(Arc::new(options)).unwrap();
        let mut rng = Pcg64Mcg::seed_from_u64(14);
        let mut sizes = Vec::new();
        let mut all = std::collections::BTreeSet::new();
        for name in MODELS {
            registry.load_model(name, LoadOverrides::default(), Arc::new(())).await.unwrap();
            stand_in.forget();
            registry.infer(request(&mut rng, name)).await.unwrap();
            let kernel = stand_in.trace().into_iter().find(|work| work.kind == Kind::Kernel).expect("one has run");
            let partitions = stand_in.partitions();
            let (_, units) = partitions.iter().find(|(context, _)| *context == kernel.context).expect("in a partition");
            sizes.push(units.len());
            assert!(units.iter().all(|unit| all.insert(*unit)), "{name} has a unit of another");
        }
        assert_eq!(sizes, [24, 40, 32], "{policy}");
        drop(registry);
        has_ended(&stand_in).await;
    }
    stand_in.assert_clean();
}

/// GSLICE §4: the scheduler grants each partition of a GPU by itself.
#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn partitions_of_a_gpu_run_batches_of_the_scheduler_at_the_same_time() {
    let stand_in = gpus(1);
    let folder = tempfile::TempDir::new().unwrap();
    let version = folder.path().join("slow/1");
    std::fs::create_dir_all(&version).unwrap();
    let tensor = |which: &str| format!("[[{which}]]\nname = \"x\"\ndatatype = \"FP32\"\ndims = [-1, 1]\n");
    let latency = "alpha_ms = 0.0\nbeta_ms = 4_000.0\nmax_batch = 4\n";
    std::fs::write(version.join("model.emulated.toml"), [latency, &tensor("inputs"), &tensor("outputs")].concat())
        .unwrap();
    std::fs::write(folder.path().join("slow/config.pbtxt"), "name: \"slow\"\nbackend: \"downbeat_emulated\"").unwrap();
    let mut options = options(EngineChoice::Cuda, &["mlp", "digits", "slow"]);
    options.repositories.push(folder.path().into());
    options.device.policy = "exclusive".parse().unwrap();
    options.device.partitions = ["40", "24"].map(str::to_owned).to_vec();
    for (name, partition) in [("mlp", 0), ("slow", 1), ("digits", 1)] {
        options.models.get_mut(name).unwrap().partitions = Some(vec![partition]);
    }
    let registry = Registry::open(Arc::new(options)).unwrap();
    for name in ["mlp", "digits", "slow"] {
        registry.load_model(name, LoadOverrides::default(), Arc::new(())).await.unwrap();
    }
    let infer = |request: InferRequest| {
        let registry = registry.clone();
        tokio::spawn(async move { registry.infer(request).await })
    };
    let mut rng = Pcg64Mcg::seed_from_u64(15);
    let inputs = vec![input("x", DataType::Fp32, &[1, 1], vec![0; 4])];
    let slow = infer(InferRequest { model_name: "slow".to_owned(), inputs, ..InferRequest::default() });
    let is_running =
        || registry.metrics().unwrap().lines().any(|line| line == "downbeat_device_running{device=\"0\"} 1");
    while !is_running() {
        tokio::task::yield_now().await;
    }
    let behind = infer(request(&mut rng, "digits"));
    for _ in 0..3 {
        registry.infer(request(&mut rng, "mlp")).await.unwrap();
    }
    assert!(!slow.is_finished(), "it takes long");
    assert!(!behind.is_finished(), "its partition has something else to do");
    slow.await.unwrap().unwrap();
    behind.await.unwrap().unwrap();
    drop(registry);
    has_ended(&stand_in).await;
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn partitions_that_the_gpu_has_not_keep_the_server_from_starting() {
    let stand_in = gpus(1);
    let refused = |partitions: &[&str]| {
        let mut options = options(EngineChoice::Cuda, &[]);
        options.device.partitions = partitions.iter().map(|text| (*text).to_owned()).collect();
        format!("{:#}", Registry::open(Arc::new(options)).err().expect("it is refused"))
    };
    let error = refused(&["100", "40"]);
    assert!(
        error.starts_with("[device] partitions: partitions of [100, 40] compute units do not fit GPU 0"),
        "{error}"
    );
    let error = refused(&["40", "0-3"]);
    assert!(error.starts_with("[device] partitions: partition 1, \"0-3\": on a GPU it is a number of"), "{error}");
    stand_in.assert_clean();
}

/// A model that takes more of a GPU than it may is refused with the numbers, and leaves nothing on
/// the GPU.
#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn a_model_keeps_within_what_it_may_take() {
    let stand_in = gpus(1);
    for (bytes, fits) in [(4096, false), (1 << 30, true)] {
        let mut options = ServerOptions::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models"));
        options.engine = EngineChoice::Cuda;
        options.profiling.enabled = false;
        options.model_control = ModelControl::Explicit { load: Vec::new() };
        let model = ModelOptions { gpu_memory: Some(bytes), ..ModelOptions::default() };
        options.models.insert("mlp".to_owned(), model);
        let registry = Registry::open(Arc::new(options)).unwrap();
        let loaded = registry.load_model("mlp", LoadOverrides::default(), Arc::new(())).await;
        assert_eq!(loaded.is_ok(), fits, "{loaded:?}");
        if let Err(error) = loaded {
            let error = error.to_string();
            assert!(error.contains("of GPU 0 (weights") && error.contains("may take 0 MiB (gpu_memory_mb)"), "{error}");
        }
        drop(registry);
        has_ended(&stand_in).await;
    }
    stand_in.assert_clean();
}

/// A model that is placed on one GPU is on no other. It is out of service once that GPU is lost.
#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn a_model_is_on_the_gpus_that_it_is_kept_to() {
    let stand_in = gpus(2);
    let mut options = options(EngineChoice::Cuda, &["mlp", "digits"]);
    options.placement.insert("digits".to_owned(), vec![1]);
    let registry = Registry::open(Arc::new(options)).unwrap();
    for name in ["mlp", "digits"] {
        registry.load_model(name, LoadOverrides::default(), Arc::new(())).await.unwrap();
    }
    registry.set_started();
    let group = &registry.model_config("digits", "").unwrap().instance_group[0];
    assert_eq!(
        (group.kind(), &group.gpus[..]),
        (downbeat_protocol::inference::model_instance_group::Kind::Gpu, &[1][..])
    );
    let mut rng = Pcg64Mcg::seed_from_u64(14);
    for _ in 0..20 {
        registry.infer(request(&mut rng, "digits")).await.unwrap();
    }
    let busy = registry.metrics().unwrap();
    let on_0 = |line: &&str| line.starts_with("downbeat_device_busy_seconds_total") && line.contains("device=\"0\"");
    let on_0 = busy.lines().find(on_0).and_then(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
    assert!(on_0.is_none_or(|seconds| seconds == 0.0), "{busy}");
    // The stand-ins do not count what sessions take.
    let has_memory = |device: u32| {
        busy.contains(&format!("downbeat_device_memory_bytes{{device=\"{device}\",part=\"weights\"}} "))
            && busy.contains(&format!("downbeat_device_memory_bytes{{device=\"{device}\",part=\"sessions\"}} "))
    };
    assert!(has_memory(0) && has_memory(1), "{busy}");
    stand_in.lose_device(1, ECC_UNCORRECTABLE);
    while registry.infer(request(&mut rng, "digits")).await.is_ok() {}
    assert!(!registry.is_model_ready("digits", ""));
    registry.infer(request(&mut rng, "mlp")).await.ok();
    registry.infer(request(&mut rng, "mlp")).await.unwrap();
    assert!(registry.is_model_ready("mlp", ""), "the other GPU works");
    drop(registry);
    has_ended(&stand_in).await;
}

/// A load request asks for a single GPU, whose kind the server has not told apart at its start.
#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn gpus_of_unknown_kinds_are_refused_for_cluster_batches() {
    let stand_in = gpus(2);
    for (policy, is_loaded) in [("exclusive", false), ("windowed", true)] {
        let mut options = options(EngineChoice::Cuda, &["digits"]);
        options.device.policy = policy.parse().unwrap();
        let registry = Registry::open(Arc::new(options)).unwrap();
        let config = Some("instance_group { kind: KIND_GPU gpus: [1] }".to_owned());
        let overrides = LoadOverrides { config, ..LoadOverrides::default() };
        let loaded = registry.load_model("digits", overrides, Arc::new(())).await;
        assert_eq!(loaded.is_ok(), is_loaded, "{loaded:?}");
        if let Err(error) = loaded {
            assert!(error.to_string().contains("it is to be on device 1, and not on device 0"), "{error}");
        }
        drop(registry);
        has_ended(&stand_in).await;
    }
    stand_in.assert_clean();
}

/// After a GPU fails, its requests get 503 and the other GPU takes over. Without any GPU, clients
/// and probes get errors.
async fn a_lost_gpu(policy: &str) {
    let stand_in = gpus(2);
    let registry = serve(EngineChoice::Cuda, &["digits"], policy, json!({})).await;
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
    a_lost_gpu("exclusive").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_gpu_gets_no_more_of_routed_requests() {
    a_lost_gpu("elastic").await;
}

/// TensorRT itself is missing in this test. A model is loaded for it, and has a private folder
/// beside the profiles for compiled files.
#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn what_tensorrt_compiles_is_kept_beside_the_profiles() {
    use std::os::unix::fs::PermissionsExt;
    let stand_in = gpus(1);
    let cache = tempfile::tempdir().unwrap();
    let mut options = ServerOptions::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models"));
    options.engine = EngineChoice::Tensorrt;
    options.profiling.enabled = false;
    options.profiling.cache_dir = Some(cache.path().to_owned());
    options.model_control = ModelControl::Explicit { load: vec!["digits".to_owned()] };
    let registry = Registry::open(Arc::new(options)).unwrap();
    registry.load_model("digits", LoadOverrides::default(), Arc::new(())).await.unwrap();
    registry.infer(request(&mut Pcg64Mcg::seed_from_u64(1), "digits")).await.unwrap();
    let folder = cache.path().join("tensorrt");
    assert_eq!(std::fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1);
    drop(registry);
    has_ended(&stand_in).await;
}

#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn a_gpu_that_is_lost_before_a_model_is_served_is_the_end_too() {
    let stand_in = gpus(1);
    let registry = serve(EngineChoice::Cuda, &[], "exclusive", json!({})).await;
    assert!(registry.is_live());
    stand_in.lose_device(0, ECC_UNCORRECTABLE);
    let error = registry.load_model("digits", LoadOverrides::default(), Arc::new(())).await.unwrap_err();
    assert!(error.to_string().contains("GPU 0 is lost"), "{error}");
    assert!(!registry.is_live());
    drop(registry);
    has_ended(&stand_in).await;
}

/// Sends a request to the server at this port. Returns the answer, empty if there is none.
fn ask(port: u16, head: &str, body: &str) -> String {
    let mut answer = String::new();
    let _ = std::net::TcpStream::connect(("127.0.0.1", port)).and_then(|mut stream| {
        write!(
            stream,
            "{head} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )?;
        stream.read_to_string(&mut answer)
    });
    answer
}

/// Not a test by itself: the test below starts it. A server that loses one of two GPUs, and then
/// the other.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by the test below"]
async fn server_that_loses_its_gpus() {
    let Ok(port) = std::env::var("DOWNBEAT_TEST_PORT") else { return };
    let port: u16 = port.parse().unwrap();
    let stand_in = gpus(2);
    let mut options = options(EngineChoice::Cuda, &["digits"]);
    (options.host, options.http_port) = ("127.0.0.1".parse().unwrap(), Some(port));
    (options.grpc_port, options.metrics_port) = (None, None);
    options.exit_when_not_live = true;
    std::thread::spawn(|| println!("ended: {:?}", downbeat_server::serve(options)));
    while !ask(port, "GET /v2/health/ready", "").starts_with("HTTP/1.1 200") {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let values = vec!["0.5"; 64].join(",");
    let request = format!(r#"{{"inputs":[{{"name":"image","datatype":"FP32","shape":[1,8,8],"data":[{values}]}}]}}"#);
    for device in 0..2 {
        stand_in.lose_device(device, ECC_UNCORRECTABLE);
        // At most two requests meet the lost GPU, the others the next one.
        for _ in 0..5 {
            ask(port, "POST /v2/models/digits/infer", &request);
        }
        println!("without GPU {device}: {}", ask(port, "GET /v2/health/live", ""));
    }
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    println!("it did not end");
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_server_ends_when_its_last_gpu_is_lost_if_asked_to() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "server_that_loses_its_gpus", "--ignored", "--nocapture"]);
    let output = command.env("DOWNBEAT_TEST_PORT", port.to_string()).output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("without GPU 0: HTTP/1.1 200"), "there is another GPU: {said}");
    assert!(said.contains("is lost") && said.contains("the server ends, as --exit-when-not-live asks"), "{said}");
}

/// Triton's `optimization.priority`.
#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn a_models_priority_is_that_of_its_streams() {
    let stand_in = gpus(1);
    let mut rng = Pcg64Mcg::seed_from_u64(13);
    for policy in ["exclusive", "elastic"] {
        for (configured, expected) in [("PRIORITY_MAX", -5), ("PRIORITY_MIN", 0), ("PRIORITY_DEFAULT", 0)] {
            let registry = serve(EngineChoice::Cuda, &[], policy, json!({})).await;
            let config = Some(format!(r#"{{"optimization": {{"priority": "{configured}"}}}}"#));
            let overrides = LoadOverrides { config, ..LoadOverrides::default() };
            registry.load_model("digits", overrides, Arc::new(())).await.unwrap();
            registry.set_started();
            stand_in.forget();
            registry.infer(request(&mut rng, "digits")).await.unwrap();
            let kernels = stand_in.trace().into_iter().filter(|work| work.kind == Kind::Kernel);
            let priorities: Vec<i32> = kernels.map(|work| work.priority).collect();
            assert!(
                !priorities.is_empty() && priorities.iter().all(|p| *p == expected),
                "{configured}: {priorities:?}"
            );
            drop(registry);
            has_ended(&stand_in).await;
        }
    }
}
