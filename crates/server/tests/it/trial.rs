//! The trial at load, whose result is advice; answers and requests of sizes that a file does not
//! declare.

use downbeat_core::tensor::DataType;
use downbeat_models::measure::profile_store::{ProfileStore, StoredProfile};
use downbeat_models::registry::Registry;
use downbeat_protocol::{InferRequest, InferResponse, InferTensor};
use downbeat_service::options::EngineChoice;
use downbeat_service::service::Service;
use serde_json::json;

use crate::lanes::{group, numbers};
use crate::loading::{add, engines, load, open, options, request, varying};
use crate::model::{FLOAT, ModelProto, cast, folder, identity, model, node, value};

const INT64: i32 = 7;

/// `y = Reshape(x, shape)` with `x` of `[2, 3, 4]` and two sizes in `shape`: no made-up numbers are
/// a shape of 24 elements. The file says that `y` is a single element.
fn reshape() -> ModelProto {
    let inputs = vec![value("x", FLOAT, &[2, 3, 4]), value("shape", INT64, &[2])];
    model(vec![node("Reshape", &["x", "shape"], &["y"])], vec![], inputs, vec![value("y", FLOAT, &[])])
}

fn input(name: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> InferTensor {
    let (name, shape) = (name.to_owned(), shape.to_vec());
    InferTensor { name, datatype, shape, parameters: Default::default(), data: data.into() }
}

fn floats(elements: &[f32]) -> Vec<u8> {
    elements.iter().flat_map(|n| n.to_le_bytes()).collect()
}

fn integers(elements: &[i64]) -> Vec<u8> {
    elements.iter().flat_map(|n| n.to_le_bytes()).collect()
}

async fn ask(registry: &Registry, name: &str, inputs: Vec<InferTensor>) -> Result<InferResponse, String> {
    let request = InferRequest { model_name: name.to_owned(), inputs, ..Default::default() };
    registry.infer(request).await.map_err(|error| error.to_string())
}

/// Sends 24 numbers to a [`reshape`] with these sizes, and checks the answer.
async fn reshapes(registry: &Registry, name: &str, sizes: [i64; 2]) {
    let x: Vec<f32> = (0..24).map(|n| n as f32).collect();
    let x_and_shape = vec![
        input("x", DataType::Fp32, &[2, 3, 4], floats(&x)),
        input("shape", DataType::Int64, &[2], integers(&sizes)),
    ];
    let answer = ask(registry, name, x_and_shape).await.unwrap();
    assert_eq!((&answer.outputs[0].shape[..], numbers(&answer.outputs[0].data)), (&sizes[..], x));
}

#[tokio::test]
async fn a_model_that_answers_no_made_up_request_is_served() {
    for engine in engines() {
        let folder = folder();
        add(folder.path(), "reshape", &reshape());
        let registry = open(options(folder.path(), engine));
        load(&registry, "reshape").await.unwrap();
        // The sizes make another rank than the file declares.
        for sizes in [[4, 6], [24, 1], [1, 24]] {
            reshapes(&registry, "reshape", sizes).await;
        }
        let metadata = registry.model_metadata("reshape", "").unwrap();
        assert_eq!(metadata.signature.outputs[0].dims, [1], "what the file declares");
    }
}

#[tokio::test]
async fn a_sample_of_the_configuration_has_the_model_measured_at_load() {
    for engine in engines() {
        let folder = folder();
        add(folder.path(), "reshape", &reshape());
        let options = options(folder.path(), engine);
        let store = ProfileStore::new(options.profiling.cache_dir.clone());
        let registry = open(options);
        load(&registry, "reshape").await.unwrap();
        assert_eq!(store.list::<StoredProfile>().unwrap().len(), 0, "nothing could be measured");
        let own = folder.path().join("reshape");
        std::fs::create_dir(own.join("warmup")).unwrap();
        std::fs::write(own.join("warmup/shape"), integers(&[4, 6])).unwrap();
        let config = r#"model_warmup [ { name: "four by six" batch_size: 1
            inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 2, 3, 4 ] random_data: true } }
            inputs { key: "shape" value { data_type: TYPE_INT64 dims: [ 2 ] input_data_file: "shape" } } } ]"#;
        std::fs::write(own.join("config.pbtxt"), config).unwrap();
        load(&registry, "reshape").await.unwrap();
        assert_eq!(store.list::<StoredProfile>().unwrap().len(), 1);
        reshapes(&registry, "reshape", [8, 3]).await;
    }
}

#[tokio::test]
async fn a_reload_replaces_no_version_that_answers_with_one_that_does_not() {
    for engine in engines() {
        let folder = folder();
        add(folder.path(), "m", &identity(FLOAT, &[-1, 4]));
        let registry = open(options(folder.path(), engine));
        load(&registry, "m").await.unwrap();
        let answers = async || {
            let answer = registry.infer(request("m", DataType::Fp32, &[1, 4], floats(&[1.0; 4]))).await.unwrap();
            assert_eq!(numbers(&answer.outputs[0].data), [1.0; 4]);
        };
        add(folder.path(), "m", &reshape());
        let error = load(&registry, "m").await.unwrap_err();
        assert!(error.contains("The version in service answered such requests, so that version stays"), "{error}");
        assert!(error.contains("model_warmup"), "{error}");
        answers().await;
        // The same holds for a newer version.
        add(folder.path(), "m", &identity(FLOAT, &[-1, 4]));
        std::fs::create_dir(folder.path().join("m/2")).unwrap();
        crate::model::write(&folder.path().join("m/2"), "model.onnx", &reshape());
        let error = load(&registry, "m").await.unwrap_err();
        assert!(error.contains("version 2") && error.contains("so that version stays"), "{error}");
        answers().await;
        registry.unload_model("m").await.unwrap();
        load(&registry, "m").await.unwrap();
        reshapes(&registry, "m", [4, 6]).await;
        // Neither version answers its trial.
        load(&registry, "m").await.unwrap();
        reshapes(&registry, "m", [3, 8]).await;
    }
}

#[tokio::test]
async fn a_scalar_is_sent_without_sizes_or_as_one_element() {
    for engine in engines() {
        let folder = folder();
        let nodes = vec![cast("n", "times", FLOAT), node("Mul", &["x", "times"], &["y"])];
        let inputs = vec![value("x", FLOAT, &[]), value("n", INT64, &[])];
        add(folder.path(), "times", &model(nodes, vec![], inputs, vec![value("y", FLOAT, &[])]));
        add(folder.path(), "column", &identity(FLOAT, &[-1, 1]));
        let registry = open(options(folder.path(), engine));
        load(&registry, "times").await.unwrap();
        load(&registry, "column").await.unwrap();
        for shape in [&[][..], &[1]] {
            let x = input("x", DataType::Fp32, shape, floats(&[2.5]));
            let answer = ask(&registry, "times", vec![x, input("n", DataType::Int64, &[], integers(&[3]))]).await;
            assert_eq!(numbers(&answer.unwrap().outputs[0].data), [7.5], "{shape:?}");
        }
        for shape in [&[2][..], &[1, 1], &[0]] {
            let data = floats(&vec![0.0; shape.iter().product::<i64>() as usize]);
            let x = input("x", DataType::Fp32, shape, data);
            let error = ask(&registry, "times", vec![x, input("n", DataType::Int64, &[], integers(&[3]))]).await;
            assert!(error.unwrap_err().contains("unexpected shape for input 'x'"), "{shape:?}");
        }
        for shape in [&[2][..], &[2, 1]] {
            let answer = ask(&registry, "column", vec![input("x", DataType::Fp32, shape, floats(&[1.0, 2.0]))]).await;
            let answer = answer.unwrap().outputs.remove(0);
            assert_eq!((&answer.shape[..], numbers(&answer.data)), (&[2, 1][..], vec![1.0, 2.0]), "{shape:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_no_rows_is_answered_whatever_makes_batches() {
    for policy in ["exclusive", "windowed", "elastic", "staged"] {
        let folder = folder();
        add(folder.path(), "fixed", &identity(FLOAT, &[-1, 4]));
        add(
            folder.path(),
            "any",
            &model(vec![node("Relu", &["x"], &["y"])], vec![], vec![varying("x")], vec![varying("y")]),
        );
        let mut options = options(folder.path(), EngineChoice::Rten);
        options.profiling.enabled = false;
        let padded = if policy == "exclusive" { json!({}) } else { json!({ "pad": true, "max_length": 16 }) };
        options.device.groups = vec![group(&["fixed"], policy, json!({})), group(&["any"], policy, padded)];
        let registry = open(options);
        for (name, length) in [("fixed", 4), ("any", 7)] {
            load(&registry, name).await.unwrap();
            let sent = |rows: i64| {
                let data = floats(&vec![1.0; (rows * length) as usize]);
                ask(&registry, name, vec![input("x", DataType::Fp32, &[rows, length], data)])
            };
            let (none, two, no_more) = tokio::join!(sent(0), sent(2), sent(0));
            for none in [none, no_more] {
                let none = none.unwrap_or_else(|error| panic!("{policy}, {name}: {error}")).outputs.remove(0);
                assert_eq!((&none.shape[..], none.data.len()), (&[0, length][..], 0), "{policy}, {name}");
            }
            assert_eq!(two.unwrap().outputs[0].shape, [2, length], "{policy}, {name}");
        }
        // A row that no client sent takes no memory.
        let x = input("x", DataType::Fp32, &[0, 1 << 40], vec![]);
        let error = ask(&registry, "any", vec![x]).await.unwrap_err();
        assert!(error.contains("does not answer a request without rows") || error.contains("at most 16"), "{error}");
    }
}

#[tokio::test]
async fn an_output_without_a_shape_in_the_file_is_served() {
    for engine in engines() {
        let folder = folder();
        let mut network = identity(FLOAT, &[2, 3]);
        let output = network.graph.as_mut().unwrap().output[0].r#type.as_mut().unwrap();
        output.tensor_type.as_mut().unwrap().shape = None;
        add(folder.path(), "open", &network);
        add(folder.path(), "told", &network);
        let config = r#"output [ { name: "y" data_type: TYPE_FP32 dims: [ 2, 3 ] } ]"#;
        std::fs::write(folder.path().join("told/config.pbtxt"), config).unwrap();
        let registry = open(options(folder.path(), engine));
        for name in ["open", "told"] {
            load(&registry, name).await.unwrap();
            let answer = registry.infer(request(name, DataType::Fp32, &[2, 3], floats(&[1.0; 6]))).await.unwrap();
            assert_eq!((&answer.outputs[0].shape[..], answer.outputs[0].data.len()), (&[2, 3][..], 24), "{name}");
        }
        assert_eq!(registry.model_metadata("told", "").unwrap().signature.outputs[0].dims, [2, 3]);
    }
}

/// On a CPU a padded element takes as long as any other.
#[tokio::test]
async fn a_policy_for_all_that_would_pad_on_a_cpu_is_left_as_auto_would() {
    for policy in ["elastic", "staged", "windowed"] {
        let folder = folder();
        add(
            folder.path(),
            "any",
            &model(vec![node("Relu", &["x"], &["y"])], vec![], vec![varying("x")], vec![varying("y")]),
        );
        let runs_by = async |models: &str| {
            let mut options = options(folder.path(), EngineChoice::Rten);
            options.profiling.enabled = false;
            options.device.groups = vec![group(&[models], policy, json!({ "pad": true, "max_length": 16 }))];
            let registry = open(options);
            load(&registry, "any").await.unwrap();
            registry.policy("any", "").unwrap()
        };
        let for_all = runs_by("*").await;
        if policy == "windowed" {
            assert_eq!(for_all.policy, "windowed");
        } else {
            assert_eq!(for_all.policy, "exclusive", "{policy}");
            assert!(for_all.reason.contains("on a CPU a padded element takes"), "{}", for_all.reason);
        }
        assert_eq!(runs_by("any").await.policy, policy, "it is named for just this model");
    }
}

/// The check of padding finds no request that the model answers. So the server does not pad the
/// model's requests.
#[tokio::test]
async fn a_model_that_cannot_be_tried_padded_is_served_without() {
    let folder = folder();
    // An index of 7 or more into a table of three.
    let nodes = vec![
        node("Mul", &["x", "zero"], &["nothing"]),
        node("Add", &["nothing", "seven"], &["seventh"]),
        node("Gather", &["table", "seventh"], &["y"]),
    ];
    let number = |name: &str, n: i64| crate::loading::integers(name, &[], &[n]);
    let weights = vec![number("zero", 0), number("seven", 7), crate::loading::integers("table", &[3], &[0, 0, 0])];
    let mut ends = [varying("x"), varying("y")];
    for end in &mut ends {
        end.r#type.as_mut().unwrap().tensor_type.as_mut().unwrap().elem_type = INT64;
    }
    let [x, y] = ends;
    add(folder.path(), "mute", &model(nodes, weights, vec![x], vec![y]));
    let mut options = options(folder.path(), EngineChoice::Rten);
    options.device.groups = vec![group(&["mute"], "windowed", json!({ "pad": true, "max_length": 16 }))];
    let registry = open(options);
    load(&registry, "mute").await.unwrap();
    assert_eq!(registry.policy("mute", "").unwrap().policy, "exclusive");
}
