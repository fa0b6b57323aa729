//! Models that cannot be served, or only just: the server reports them at load, in words, and no
//! other model is harmed.

use std::path::Path;
use std::sync::Arc;

use downbeat_core::tensor::DataType;
use downbeat_models::measure::profile_store::{ProfileStore, StoredOperators, StoredProfile};
use downbeat_models::registry::Registry;
use downbeat_protocol::{InferRequest, InferTensor, Parameter};
use downbeat_service::error::ServiceError;
use downbeat_service::options::{EngineChoice, ModelControl, ModelOptions, ServerOptions};
use downbeat_service::service::{LoadOverrides, Service};
use serde_json::json;

use crate::model::{
    AttributeProto, FLOAT, ModelProto, TensorProto, ValueInfoProto, floats, folder, identity, ints, model, node, value,
    write,
};
use crate::serving::{Models, metric};

const INT64: i32 = 7;

/// rten, and onnxruntime if the tests know its library.
pub fn engines() -> Vec<EngineChoice> {
    let library = std::env::var_os("ORT_DYLIB_PATH").map(|_| EngineChoice::OnnxRuntime);
    [EngineChoice::Rten].into_iter().chain(library).collect()
}

pub fn options(repository: &Path, engine: EngineChoice) -> ServerOptions {
    let mut options = ServerOptions::new(repository.to_owned());
    options.engine = engine;
    options.threads = 1;
    options.profiling.cache_dir = Some(repository.join(".profiles"));
    options.profiling.budget = downbeat_core::Duration::ZERO;
    options.model_control = ModelControl::Explicit { load: Vec::new() };
    options
}

/// A weight of integers.
pub fn integers(name: &str, dims: &[i64], elements: &[i64]) -> TensorProto {
    let raw_data = elements.iter().flat_map(|n| n.to_le_bytes()).collect();
    TensorProto { data_type: INT64, raw_data, ..floats(name, dims, &[]) }
}

pub fn add(repository: &Path, name: &str, model: &ModelProto) {
    let folder = repository.join(name).join("1");
    std::fs::create_dir_all(&folder).unwrap();
    write(&folder, "model.onnx", model);
}

pub fn open(options: ServerOptions) -> Registry {
    let registry = Registry::open(Arc::new(options)).unwrap();
    registry.set_started();
    registry
}

pub async fn load(registry: &Registry, name: &str) -> Result<(), String> {
    registry.load_model(name, LoadOverrides::default(), Arc::new(())).await.map_err(|error| error.to_string())
}

pub fn request(model: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> InferRequest {
    let inputs = vec![InferTensor {
        name: "x".into(),
        datatype,
        shape: shape.to_vec(),
        parameters: Default::default(),
        data: data.into(),
    }];
    InferRequest { model_name: model.to_owned(), inputs, ..Default::default() }
}

#[tokio::test]
async fn sizes_that_a_file_declares_are_looked_at_before_memory_is_taken() {
    for engine in engines() {
        let folder = folder();
        add(folder.path(), "wide", &identity(FLOAT, &[-1, 1 << 40]));
        add(folder.path(), "wider", &identity(FLOAT, &[-1, 1 << 40, 1 << 40]));
        add(folder.path(), "small", &identity(FLOAT, &[-1, 4]));
        let registry = open(options(folder.path(), engine));
        let error = load(&registry, "wide").await.unwrap_err();
        assert!(
            error.contains("one item of the model's inputs takes 4398046511104 bytes ('x' [1099511627776])"),
            "{error}"
        );
        let error = load(&registry, "wider").await.unwrap_err();
        assert!(error.contains("more than a machine has"), "{error}");
        load(&registry, "small").await.unwrap();
        registry.infer(request("small", DataType::Fp32, &[1, 4], vec![0; 16])).await.unwrap();
    }
}

#[tokio::test]
async fn a_model_that_answers_nothing_is_served_and_says_why() {
    for engine in engines() {
        let folder = folder();
        // `x` has four elements. The shape that the model computes for it depends on the values of
        // `x`: 7 or more.
        let size = vec![node("ReduceMax", &["x"], &["most"]), node("Mul", &["most", "zero"], &["nothing"])];
        let size = size.into_iter().chain([
            node("Add", &["nothing", "seven"], &["seventh"]),
            node("Gather", &["table", "seventh"], &["z"]),
            node("Add", &["x", "z"], &["y"]),
        ]);
        let weights =
            vec![integers("zero", &[], &[0]), integers("seven", &[], &[7]), integers("table", &[3], &[0, 0, 0])];
        let (input, output) = (value("x", INT64, &[-1, 4]), value("y", INT64, &[-1, 4]));
        add(folder.path(), "mute", &model(size.collect(), weights, vec![input], vec![output]));
        let registry = open(options(folder.path(), engine));
        load(&registry, "mute").await.unwrap();
        let error = registry.infer(request("mute", DataType::Int64, &[1, 4], vec![0; 32])).await.unwrap_err();
        assert!(error.to_string().contains("model 'mute' failed on this request"), "{error}");
    }
}

#[tokio::test]
async fn a_model_that_refuses_zeros_is_ready() {
    for engine in engines() {
        let folder = folder();
        // The index of a 0 is 10, that of a 1 is 0.
        let nodes = vec![
            node("Mul", &["x", "minus_ten"], &["a"]),
            node("Add", &["a", "ten"], &["b"]),
            node("Gather", &["table", "b"], &["y"]),
        ];
        let weights = vec![
            integers("minus_ten", &[], &[-10]),
            integers("ten", &[], &[10]),
            floats("table", &[3], &[5.0, 6.0, 7.0]),
        ];
        let (input, output) = (value("x", INT64, &[-1, 1]), value("y", FLOAT, &[-1, 1]));
        add(folder.path(), "choosy", &model(nodes, weights, vec![input], vec![output]));
        let registry = open(options(folder.path(), engine));
        load(&registry, "choosy").await.unwrap();
        let one = request("choosy", DataType::Int64, &[1, 1], 1i64.to_le_bytes().to_vec());
        let answer = registry.infer(one).await.unwrap();
        assert_eq!(answer.outputs[0].data[..], 5.0f32.to_le_bytes());
    }
}

#[tokio::test]
async fn a_convolution_without_the_size_of_its_kernel_is_served() {
    for engine in engines() {
        let folder = folder();
        let mut convolution = node("Conv", &["x", "w"], &["y"]);
        convolution.attribute.push(ints("pads", &[0; 4]));
        let weights = vec![floats("w", &[1, 1, 2, 2], &[1.0; 4])];
        let (input, output) = (value("x", FLOAT, &[-1, 1, 2, 2]), value("y", FLOAT, &[-1, 1, 1, 1]));
        add(folder.path(), "conv", &model(vec![convolution], weights, vec![input], vec![output]));
        let registry = open(options(folder.path(), engine));
        load(&registry, "conv").await.unwrap();
        let ones = [1.0f32; 4].iter().flat_map(|n| n.to_le_bytes()).collect();
        let answer = registry.infer(request("conv", DataType::Fp32, &[1, 1, 2, 2], ones)).await.unwrap();
        assert_eq!(answer.outputs[0].data[..], 4.0f32.to_le_bytes());
    }
}

/// A value of two dimensions that vary independently.
pub fn varying(name: &str) -> ValueInfoProto {
    let mut value = value(name, FLOAT, &[-1, -1]);
    let tensor = value.r#type.as_mut().unwrap().tensor_type.as_mut().unwrap();
    tensor.shape.as_mut().unwrap().dim[1].dim_param = Some("m".to_owned());
    value
}

/// Every number of a request times every other: a few kilobytes take gigabytes.
fn outer_product() -> ModelProto {
    let nodes = vec![
        node("Unsqueeze", &["x", "two"], &["column"]),
        node("Unsqueeze", &["x", "one"], &["row"]),
        node("Mul", &["column", "row"], &["all"]),
        node("ReduceMax", &["all"], &["most"]),
        node("Mul", &["most", "x"], &["y"]),
    ];
    let nodes = nodes.into_iter().map(|mut node| {
        if node.op_type == "ReduceMax" {
            node.attribute = vec![ints("axes", &[2]), int("keepdims", 0)];
        }
        node
    });
    let weights = vec![integers("one", &[1], &[1]), integers("two", &[1], &[2])];
    model(nodes.collect(), weights, vec![varying("x")], vec![varying("y")])
}

pub fn int(name: &str, i: i64) -> AttributeProto {
    const INT: i32 = 2;
    AttributeProto { name: name.into(), i, r#type: INT, ..AttributeProto::default() }
}

#[tokio::test]
async fn a_request_that_needs_too_much_memory_is_refused_before_its_run() {
    for engine in engines() {
        let folder = folder();
        add(folder.path(), "outer", &outer_product());
        let mut options = options(folder.path(), engine);
        options.run_memory_bytes = Some(64 << 20);
        let registry = open(options);
        load(&registry, "outer").await.unwrap();
        let ask = async |rows: i64, length: i64| {
            let data = vec![0; (rows * length * 4) as usize];
            registry.infer(request("outer", DataType::Fp32, &[rows, length], data)).await
        };
        ask(1, 64).await.unwrap();
        ask(4, 1024).await.unwrap();
        // 360 gigabytes for 1.2 megabytes.
        for (rows, length) in [(1, 300_000), (1, 8192), (8, 2048)] {
            let error = ask(rows, length).await.unwrap_err();
            assert!(matches!(error, ServiceError::InvalidArgument(_)), "{error:?}");
            let error = error.to_string();
            assert!(error.contains(&format!("'all' alone is [{rows}, {length}, {length}]")), "{error}");
            assert!(error.contains("runs may take 67108864"), "{error}");
        }
        ask(1, 64).await.unwrap();
    }
}

#[tokio::test]
async fn a_request_that_names_a_size_gets_no_more_memory_than_there_is() {
    for engine in engines() {
        let folder = folder();
        // `x` is a shape, to which a number is expanded.
        let nodes = vec![node("Expand", &["number", "x"], &["wide"]), node("ReduceMax", &["wide"], &["y"])];
        let (input, output) = (value("x", INT64, &[2]), value("y", FLOAT, &[1, 1]));
        add(folder.path(), "expand", &model(nodes, vec![floats("number", &[], &[3.0])], vec![input], vec![output]));
        let registry = open(options(folder.path(), engine));
        load(&registry, "expand").await.unwrap();
        let ask = async |sizes: [i64; 2]| {
            let data = sizes.iter().flat_map(|n| n.to_le_bytes()).collect();
            registry.infer(request("expand", DataType::Int64, &[2], data)).await
        };
        assert_eq!(ask([2, 3]).await.unwrap().outputs[0].data[..], 3.0f32.to_le_bytes());
        let error = ask([1_000_000, 1_000_000]).await.unwrap_err();
        assert!(matches!(error, ServiceError::InvalidArgument(_)), "{error:?}");
        assert!(error.to_string().contains("[1000000, 1000000]"), "{error}");
        assert_eq!(ask([5, 1]).await.unwrap().outputs[0].data[..], 3.0f32.to_le_bytes());
    }
}

#[tokio::test]
async fn constant_subgraphs_are_bounded_before_they_are_computed() {
    for engine in engines() {
        let folder = folder();
        let nodes = vec![
            node("ConstantOfShape", &["sizes"], &["wide"]),
            node("ReduceMax", &["wide"], &["most"]),
            node("Add", &["x", "most"], &["y"]),
        ];
        let (input, output) = (value("x", FLOAT, &[-1, 1]), value("y", FLOAT, &[-1, 1]));
        let weights = vec![integers("sizes", &[2], &[1 << 20, 1 << 20])];
        add(folder.path(), "wide", &model(nodes, weights, vec![input], vec![output]));
        let registry = open(options(folder.path(), engine));
        let error = load(&registry, "wide").await.unwrap_err();
        assert!(error.contains("'wide' alone is [1048576, 1048576]"), "{error}");
    }
}

/// The quotient of the smallest integer and -1 does not fit into the integer's size.
#[tokio::test]
async fn a_division_that_overflows_is_answered_by_rten() {
    let folder = folder();
    let (input, output) = (value("x", 6, &[-1, 1]), value("y", 6, &[-1, 1]));
    let by = TensorProto { data_type: 6, raw_data: (-1i32).to_le_bytes().to_vec(), ..floats("by", &[], &[]) };
    add(folder.path(), "div", &model(vec![node("Div", &["x", "by"], &["y"])], vec![by], vec![input], vec![output]));
    let registry = open(options(folder.path(), EngineChoice::Rten));
    load(&registry, "div").await.unwrap();
    let least = request("div", DataType::Int32, &[1, 1], i32::MIN.to_le_bytes().to_vec());
    // An answer or an error; not the end of the process.
    let _ = registry.infer(least).await;
    let six = request("div", DataType::Int32, &[1, 1], 6i32.to_le_bytes().to_vec());
    assert_eq!(registry.infer(six).await.unwrap().outputs[0].data[..], (-6i32).to_le_bytes());
}

/// The fastest number of threads that the server kept for a model does not hold if the user sets
/// the number.
#[tokio::test]
async fn threads_that_were_asked_for_are_had_whatever_is_kept() {
    let folder = folder();
    add(folder.path(), "small", &identity(FLOAT, &[-1, 4]));
    let kept = |change: &dyn Fn(&mut ServerOptions)| {
        let mut options = options(folder.path(), EngineChoice::Rten);
        options.threads = 0;
        change(&mut options);
        let store = ProfileStore::new(options.profiling.cache_dir.clone());
        async move {
            load(&open(options), "small").await.unwrap();
            let profiles: Vec<StoredProfile> = store.list().unwrap();
            let mut threads: Vec<usize> = profiles.into_iter().map(|profile| profile.threads).collect();
            threads.sort_unstable();
            threads
        }
    };
    // The server measures one number of threads, unless the machine had other things to do.
    let measured = kept(&|_| {}).await;
    assert_eq!(measured.len(), 1);
    let with = |chosen: &[usize]| {
        let mut all = [&measured, chosen].concat();
        all.sort_unstable();
        all
    };
    assert_eq!(kept(&|options| options.threads = 2).await, with(&[2]));
    let own = |options: &mut ServerOptions| {
        let own = ModelOptions { threads: Some(3), ..ModelOptions::default() };
        options.models.insert("small".to_owned(), own);
    };
    assert_eq!(kept(&own).await, with(&[2, 3]));
}

/// 2 elements, then 200,000 with a timeout of 5 s, on a server that measures nothing.
#[tokio::test]
async fn a_shape_is_tried_of_which_nothing_was_measured() {
    for engine in engines() {
        let folder = folder();
        add(
            folder.path(),
            "m",
            &model(vec![node("Neg", &["x"], &["y"])], vec![], vec![varying("x")], vec![varying("y")]),
        );
        let mut options = options(folder.path(), engine);
        options.profiling.enabled = false;
        let registry = open(options);
        load(&registry, "m").await.unwrap();
        for elements in [2, 200_000, 200_000] {
            let data = 1f32.to_le_bytes().repeat(elements);
            let mut request = request("m", DataType::Fp32, &[1, elements as i64], data);
            request.parameters.insert("timeout".to_owned(), Parameter::Uint64(5_000_000));
            let answer = registry.infer(request).await.unwrap();
            assert!(answer.outputs[0].data[..] == (-1f32).to_le_bytes().repeat(elements));
        }
    }
}

/// The operators of a model that is cut are measured once, and their times are kept with the
/// profiles.
#[tokio::test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
async fn a_cut_is_kept_and_found_again() {
    let folder = folder();
    let weights = || vec![floats("w", &[4, 4], &[0.5; 16])];
    let layers = ["x", "a", "b", "c", "y"];
    let nodes = layers.windows(2).map(|pair| node("MatMul", &[pair[0], "w"], &[pair[1]])).collect();
    let (inputs, outputs) = (vec![value("x", FLOAT, &[-1, 4])], vec![value("y", FLOAT, &[-1, 4])]);
    add(folder.path(), "layers", &model(nodes, weights(), inputs, outputs));
    let mut options = options(folder.path(), EngineChoice::OnnxRuntime);
    let settings = json!({ "stages": 2 });
    let group = crate::lanes::group(&["*"], "staged", settings);
    options.device.groups = vec![group];
    let cache = options.profiling.cache_dir.clone().unwrap();
    let store = ProfileStore::new(Some(cache.clone()));
    load(&open(options.clone()), "layers").await.unwrap();
    let kept: Vec<StoredOperators> = store.list().unwrap();
    assert_eq!(kept.iter().map(|kept| kept.operators.operators()).collect::<Vec<_>>(), [4]);
    let is_it = |path: &std::path::PathBuf| path.to_string_lossy().ends_with("-operators.json");
    let file = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path()).find(is_it).unwrap();
    // A mark in the file shows whether the server measured and wrote it again.
    let mut marked: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    marked["operators"]["times"] = serde_json::json!([1, 2, 3, 4]);
    let marked = serde_json::to_vec(&marked).unwrap();
    std::fs::write(&file, &marked).unwrap();
    load(&open(options), "layers").await.unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), marked, "it was measured again");
    assert!(store.clear().unwrap() >= 1);
    assert_eq!(store.list::<StoredOperators>().unwrap(), []);
}

#[tokio::test]
async fn a_model_without_room_is_refused_with_numbers_until_there_is_room() {
    for engine in engines() {
        let folder = folder();
        ["a", "b"].iter().for_each(|name| add(folder.path(), name, &identity(FLOAT, &[-1, 4])));
        let weights = vec![floats("w", &[4096], &[1.0; 4096])];
        let nodes = vec![node("ReduceSum", &["w"], &["s"]), node("Add", &["x", "s"], &["y"])];
        let (input, output) = (value("x", FLOAT, &[-1, 1]), value("y", FLOAT, &[-1, 1]));
        add(folder.path(), "large", &model(nodes, weights, vec![input], vec![output]));
        let mut options = options(folder.path(), engine);
        // Two small models have room together, the large one does not in any case.
        options.model_memory_bytes = Some(8192);
        let registry = open(options);
        let held = |model: &str| metric(&registry, "downbeat_model_memory_bytes{", &format!("model=\"{model}\""));
        load(&registry, "a").await.unwrap();
        assert!(held("a") > 0.0 && held("a") < 8192.0);
        let error = load(&registry, "large").await.unwrap_err();
        let others = held("a");
        assert!(
            error.contains(&format!("others hold {others} of the 8192 that models may (model_memory_bytes)")),
            "{error}"
        );
        assert!(error.contains("(weights 1") || error.contains("(weights 3"), "{error}");
        assert_eq!(held("large"), 0.0);
        let on_cpu: f64 = ["weights", "rings", "runs"]
            .map(|part| metric(&registry, "downbeat_device_memory_bytes{", &format!("device=\"cpu\",part=\"{part}\"")))
            .iter()
            .sum();
        assert_eq!(on_cpu, metric(&registry, "downbeat_models_memory_bytes ", ""));
        registry.infer(request("a", DataType::Fp32, &[1, 4], vec![0; 16])).await.unwrap();
        load(&registry, "b").await.unwrap();
    }
}

#[tokio::test]
async fn what_an_unloaded_model_held_is_there_for_others() {
    let folder = folder();
    ["a", "b"].iter().for_each(|name| add(folder.path(), name, &identity(FLOAT, &[-1, 4])));
    let serve = |bytes: Option<usize>| {
        let mut options = options(folder.path(), EngineChoice::Rten);
        options.model_memory_bytes = bytes;
        open(options)
    };
    let registry = serve(Some(0));
    load(&registry, "a").await.unwrap();
    let one = metric(&registry, "downbeat_models_memory_bytes ", "");
    let registry = serve(Some(one as usize));
    load(&registry, "a").await.unwrap();
    let error = load(&registry, "b").await.unwrap_err();
    assert!(error.contains(&format!("others hold {one} of the {one}")), "{error}");
    registry.unload_model("a").await.unwrap();
    load(&registry, "b").await.unwrap();
}

/// The measurements that are kept of the one model of a store: items of a batch and runs.
fn kept_sizes(store: &ProfileStore) -> Vec<(u32, u32)> {
    let profiles: Vec<StoredProfile> = store.list().unwrap();
    assert_eq!(profiles.len(), 1, "{profiles:?}");
    profiles[0].measurements.iter().map(|measured| (measured.batch, measured.runs)).collect()
}

#[tokio::test]
async fn what_there_was_no_time_to_measure_is_measured_behind_the_service() {
    for engine in engines() {
        let folder = folder();
        add(folder.path(), "small", &identity(FLOAT, &[-1, 4]));
        let mut options = options(folder.path(), engine);
        let store = ProfileStore::new(options.profiling.cache_dir.clone());
        let registry = open(options.clone());
        load(&registry, "small").await.unwrap();
        assert_eq!(kept_sizes(&store), [(1, 1)], "a budget of nothing leaves the run of the trial");
        assert_eq!(registry.to_measure_again(), ["small"]);
        // The next start serves with the stored part, and leaves the rest for later too.
        drop(registry);
        options.profiling.budget = downbeat_core::Duration::from_millis(1_000);
        let registry = open(options);
        load(&registry, "small").await.unwrap();
        assert_eq!((kept_sizes(&store), registry.to_measure_again()), (vec![(1, 1)], vec!["small".to_owned()]));
        // Times of larger batches are guesses, and such batches run.
        for rows in [1, 5, 32] {
            let data = vec![0; 16 * rows];
            registry.infer(request("small", DataType::Fp32, &[rows as i64, 4], data)).await.unwrap();
        }
        registry.measure_again("small").await;
        let sizes: Vec<u32> = kept_sizes(&store).into_iter().map(|(batch, _)| batch).collect();
        assert_eq!(sizes, [1, 2, 4, 8, 16, 32]);
        assert_eq!(registry.statistics("small", "").unwrap()[0].execution_count, 3, "the counts go on");
        registry.infer(request("small", DataType::Fp32, &[32, 4], vec![0; 512])).await.unwrap();
    }
}

#[tokio::test]
async fn measuring_gives_way_to_requests_and_changes_nothing_until_it_is_done() {
    let folder = folder();
    add(folder.path(), "small", &identity(FLOAT, &[-1, 4]));
    let options = options(folder.path(), EngineChoice::Rten);
    let store = ProfileStore::new(options.profiling.cache_dir.clone());
    let registry = open(options);
    load(&registry, "small").await.unwrap();
    let to_measure = |registry: &Registry| metric(registry, "downbeat_models_to_measure ", "");
    assert_eq!((registry.served_by_guesses(), to_measure(&registry)), (vec!["small".to_owned()], 1.0));
    // A request is under way for as long as the test wants.
    let under_way = registry.serving().enter("small").unwrap();
    registry.measure_again("small").await;
    assert_eq!((kept_sizes(&store), registry.served_by_guesses()), (vec![(1, 1)], vec!["small".to_owned()]));
    registry.infer(request("small", DataType::Fp32, &[1, 4], vec![0; 16])).await.unwrap();
    drop(under_way);
    registry.measure_again("small").await;
    let sizes: Vec<u32> = kept_sizes(&store).into_iter().map(|(batch, _)| batch).collect();
    assert_eq!((sizes, registry.served_by_guesses()), (vec![1, 2, 4, 8, 16, 32], vec![]));
    registry.infer(request("small", DataType::Fp32, &[32, 4], vec![0; 512])).await.unwrap();
}

/// A file that is broken by the time when the server measures the model behind the service: as a
/// crash would, this ends the measurement.
#[tokio::test]
async fn a_measurement_that_fails_leaves_the_model_in_service() {
    let folder = folder();
    for name in ["small", "other"] {
        add(folder.path(), name, &identity(FLOAT, &[-1, 4]));
    }
    let registry = open(options(folder.path(), EngineChoice::Rten));
    load(&registry, "small").await.unwrap();
    load(&registry, "other").await.unwrap();
    std::fs::write(folder.path().join("small/1/model.onnx"), "no model").unwrap();
    registry.measure_again("small").await;
    for (name, rows) in [("small", 1), ("small", 32), ("other", 1)] {
        let data = vec![0; 16 * rows];
        registry.infer(request(name, DataType::Fp32, &[rows as i64, 4], data)).await.unwrap();
        assert!(registry.is_model_ready(name, "") && registry.is_ready());
    }
}

/// A warm-up of `m` with three samples, each sent so often.
fn warm_ups(models: &Models, beta_ms: f64, count: u32) {
    let sample = |name: &str| {
        format!(
            "{{ name: \"{name}\", count: {count}, inputs: {{ key: \"x\", value: {{ data_type: TYPE_FP32, dims: [4], zero_data: true }} }} }}"
        )
    };
    let config = format!("max_batch_size: 8\nmodel_warmup [{}, {}, {}]", sample("a"), sample("b"), sample("c"));
    models.add("m", 1, (0.0, beta_ms), 4, &config);
}

#[tokio::test]
async fn a_warm_up_without_end_has_an_end() {
    let models = Models::new();
    warm_ups(&models, 0.001, u32::MAX);
    let registry = models.serve(|_| {}).await;
    registry.infer(crate::serving::request("m", 1, 4)).await.unwrap();
    let warnings = registry.definition("m").unwrap().warnings;
    assert_eq!(warnings.len(), 3, "{warnings:?}");
    assert!(warnings[0].message.contains("is 4294967295; the server sends the request 100 times"), "{warnings:?}");
}

#[tokio::test]
async fn a_load_that_takes_too_long_ends_and_lets_others_be_loaded() {
    let models = Models::new();
    // 100 s of warm-ups. Even on a busy machine the other model needs less than the limit.
    warm_ups(&models, 1_000.0, 100);
    models.add("other", 1, (0.0, 1.0), 4, "");
    let mut options = models.options();
    options.model_control = ModelControl::Explicit { load: Vec::new() };
    options.load_threads = 1;
    options.run_limits.whole_load = downbeat_core::Duration::from_millis(5_000);
    let registry = open(options);
    let error = load(&registry, "m").await.unwrap_err();
    assert!(error.contains("the load had not ended after 5 s") && error.contains("load_timeout_s"), "{error}");
    load(&registry, "other").await.unwrap();
}
