//! Models that cannot be served, and those that nearly cannot: said at load, in words, and nothing else is harmed.

use std::path::Path;
use std::sync::Arc;

use downbeat_core::tensor::DataType;
use downbeat_protocol::{InferInput, InferRequest};
use downbeat_server::options::{EngineChoice, ModelControl, ServerOptions};
use downbeat_server::registry::Registry;
use downbeat_server::service::{LoadOverrides, Service};

use crate::model::{FLOAT, ModelProto, floats, folder, identity, ints, model, node, value, write};

const INT64: i32 = 7;

/// rten, and onnxruntime where the tests know of its library.
fn engines() -> Vec<EngineChoice> {
    let library = std::env::var_os("ORT_DYLIB_PATH").map(|_| EngineChoice::OnnxRuntime);
    [EngineChoice::Rten].into_iter().chain(library).collect()
}

fn options(repository: &Path, engine: EngineChoice) -> ServerOptions {
    let mut options = ServerOptions::new(repository.to_owned());
    options.engine = engine;
    options.threads = 1;
    options.profiling.cache_dir = Some(repository.join(".profiles"));
    options.profiling.budget = downbeat_core::Duration::ZERO;
    options.model_control = ModelControl::Explicit { load: Vec::new() };
    options
}

fn add(repository: &Path, name: &str, model: &ModelProto) {
    let folder = repository.join(name).join("1");
    std::fs::create_dir_all(&folder).unwrap();
    write(&folder, "model.onnx", model);
}

fn open(options: ServerOptions) -> Registry {
    let registry = Registry::open(Arc::new(options)).unwrap();
    registry.set_started();
    registry
}

async fn load(registry: &Registry, name: &str) -> Result<(), String> {
    registry.load_model(name, LoadOverrides::default(), Arc::new(())).await.map_err(|error| error.to_string())
}

fn request(model: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> InferRequest {
    let inputs = vec![InferInput {
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
        assert!(error.contains("one item of its inputs takes 4398046511104 bytes ('x' [1099511627776])"), "{error}");
        let error = load(&registry, "wider").await.unwrap_err();
        assert!(error.contains("more than a machine has"), "{error}");
        load(&registry, "small").await.unwrap();
        registry.infer(request("small", DataType::Fp32, &[1, 4], vec![0; 16])).await.unwrap();
    }
}

#[tokio::test]
async fn a_model_that_answers_nothing_is_not_ready() {
    for engine in engines() {
        let folder = folder();
        // `x` has four elements, and the size that it is given depends on what it holds: 7 or more.
        let size = vec![node("ReduceMax", &["x"], &["most"]), node("Mul", &["most", "zero"], &["nothing"])];
        let size = size.into_iter().chain([
            node("Add", &["nothing", "seven"], &["seventh"]),
            node("Gather", &["table", "seventh"], &["z"]),
            node("Add", &["x", "z"], &["y"]),
        ]);
        let number = |name: &str, n: i64| {
            let mut tensor = floats(name, &[], &[]);
            tensor.data_type = INT64;
            tensor.raw_data = n.to_le_bytes().to_vec();
            tensor
        };
        let mut table = floats("table", &[3], &[]);
        table.data_type = INT64;
        table.raw_data = vec![0; 24];
        let weights = vec![number("zero", 0), number("seven", 7), table];
        let (input, output) = (value("x", INT64, &[-1, 4]), value("y", INT64, &[-1, 4]));
        add(folder.path(), "mute", &model(size.collect(), weights, vec![input], vec![output]));
        let registry = open(options(folder.path(), engine));
        let error = load(&registry, "mute").await.unwrap_err();
        assert!(error.contains("answers none of the requests that it was tried with"), "{error}");
        assert!(error.contains("model_warmup"), "{error}");
    }
}

#[tokio::test]
async fn a_model_that_refuses_zeros_is_ready() {
    for engine in engines() {
        let folder = folder();
        let number = |name: &str, n: i64| {
            let mut tensor = floats(name, &[], &[]);
            tensor.data_type = INT64;
            tensor.raw_data = n.to_le_bytes().to_vec();
            tensor
        };
        // The index of a 0 is 10, that of a 1 is 0.
        let nodes = vec![
            node("Mul", &["x", "minus_ten"], &["a"]),
            node("Add", &["a", "ten"], &["b"]),
            node("Gather", &["table", "b"], &["y"]),
        ];
        let weights = vec![number("minus_ten", -10), number("ten", 10), floats("table", &[3], &[5.0, 6.0, 7.0])];
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
