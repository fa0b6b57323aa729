//! Ensembles: their steps as the configuration has them, and against the models of the steps.

use std::fs;

use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_repository::{ModelDefinition, ModelFormat, ModelRepository, StepModel, TensorBinding};

const HEAD: &str = "platform: \"ensemble\" max_batch_size: 4\n\
                    input [ { name: \"in\" data_type: TYPE_FP32 dims: [ 4 ] } ]\n\
                    output [ { name: \"out\" data_type: TYPE_FP32 dims: [ 4 ] } ]\n";

fn step(model: &str, inputs: &[(&str, &str)], outputs: &[(&str, &str)]) -> String {
    let map = |which: &str, map: &[(&str, &str)]| {
        map.iter()
            .map(|(name, tensor)| format!("{which} {{ key: \"{name}\" value: \"{tensor}\" }} "))
            .collect::<String>()
    };
    format!("{{ model_name: \"{model}\" model_version: -1 {}{}}}", map("input_map", inputs), map("output_map", outputs))
}

fn scheduling(steps: &[String]) -> String {
    format!("{HEAD}ensemble_scheduling {{\nstep [\n{}\n]\n}}", steps.join(",\n"))
}

fn read(config: &str) -> Result<ModelDefinition, String> {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("e")).unwrap();
    fs::write(folder.path().join("e/config.pbtxt"), config).unwrap();
    let repository = ModelRepository::open(folder.path()).unwrap();
    assert_eq!(repository.scan().unwrap().names, ["e"]);
    repository.definition("e", None).map_err(|error| error.to_string())
}

fn chain() -> Vec<String> {
    vec![step("a", &[("x", "in")], &[("y", "t")]), step("b", &[("x", "t")], &[("y", "out")])]
}

fn tensor(name: &str, datatype: DataType, dims: &[i64], batched: bool) -> TensorBinding {
    TensorBinding {
        client: TensorSpec { name: name.to_owned(), datatype, dims: dims.to_vec() },
        model_index: 0,
        model_dims: dims.to_vec(),
        labels: [].into(),
        batched,
        optional: false,
    }
}

/// Checks the chain against a model `a` with these tensors and a batched model `b`.
fn check(input: TensorBinding, output: TensorBinding, max_batch_size: u32) -> Result<(), String> {
    let definition = read(&scheduling(&chain())).unwrap();
    let (inputs, outputs) = ([input], [output]);
    let b = [tensor("x", DataType::Fp32, &[-1, 4], true), tensor("y", DataType::Fp32, &[-1, 4], true)];
    let models = [
        Ok(StepModel { inputs: &inputs, outputs: &outputs, max_batch_size }),
        Ok(StepModel { inputs: &b[..1], outputs: &b[1..], max_batch_size: 8 }),
    ];
    definition.check_steps(&models).map_err(|error| error.to_string())
}

#[test]
fn an_ensemble_needs_no_file_and_no_version_folder() {
    let definition = read(&scheduling(&chain())).unwrap();
    assert_eq!((definition.format, definition.config.platform.as_str()), (ModelFormat::Ensemble, "ensemble"));
    assert_eq!(definition.versions.iter().map(|(version, _)| *version).collect::<Vec<_>>(), [1]);
    assert_eq!(definition.inputs[0].client.dims, [-1, 4]);
    let ensemble = definition.ensemble.unwrap();
    assert_eq!(ensemble.models().into_iter().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(ensemble.steps[0].version, None);
    assert_eq!(ensemble.graph.after(1), [0]);
}

#[test]
fn each_fault_of_the_graph_is_named_with_its_step_and_tensor() {
    let circle = [step("a", &[("x", "u")], &[("y", "t")]), step("b", &[("x", "t")], &[("y", "u")])];
    let ends = step("c", &[("x", "in")], &[("y", "out")]);
    for (steps, expected) in [
        (
            [&circle[..], std::slice::from_ref(&ends)].concat(),
            "e/config.pbtxt:6:37: ensemble_scheduling.step[0].input_map[\"x\"]: the steps form a circle: step 0 ('a') -> \
             step 1 ('b') -> step 0 ('a'); step 0 ('a') needs the tensor 'u'",
        ),
        (
            vec![ends.clone(), step("a", &[("x", "inn")], &[("y", "t")])],
            "step 1 ('a') needs the tensor 'inn', which is no input",
        ),
        (vec![ends.clone(), step("a", &[("x", "inn")], &[("y", "t")])], "did you mean 'in'?"),
        (vec![ends.clone(), ends.clone()], "step 1 ('c') makes the tensor 'out', which step 0 ('c') makes too"),
        (
            vec![ends.clone(), step("a", &[("x", "in")], &[("y", "in")])],
            "step 1 ('a') makes the tensor 'in', which is an input",
        ),
        (vec![step("a", &[("x", "in")], &[("y", "t")])], "output[0].name: no step makes the tensor 'out'"),
        (vec![step("", &[("x", "in")], &[("y", "out")])], "model_name: step 0 (''): is missing"),
        (vec![step("a", &[], &[("y", "out")])], "input_map: step 0 ('a'): is missing"),
        (vec![], "ensemble_scheduling: has no step"),
    ] {
        let error = read(&scheduling(&steps)).unwrap_err();
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
    }
}

#[test]
fn fields_that_an_ensemble_cannot_have_are_refused() {
    for (more, expected) in [
        ("backend: \"onnxruntime\"", "backend: an ensemble has no backend"),
        ("instance_group [ { count: 2 } ]", "instance_group: an ensemble runs nothing by itself"),
        ("output [ { name: \"more\" } ]", "output[1].data_type: is missing"),
    ] {
        let error = read(&format!("{}\n{more}", scheduling(&chain()))).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let other = scheduling(&chain()).replace("\"ensemble\"", "\"onnxruntime_onnx\"");
    assert!(read(&other).unwrap_err().contains("needs platform: \"ensemble\""));
    let error = read("platform: \"ensemble\"").unwrap_err();
    assert!(error.contains("there is no ensemble_scheduling"), "{error}");
    let unused = format!("{}\ninput [ {{ name: \"more\" data_type: TYPE_FP32 dims: [ 1 ] }} ]", scheduling(&chain()));
    assert!(read(&unused).unwrap_err().contains("no step needs the input 'more'"));
}

#[test]
fn an_output_that_nothing_needs_is_a_warning() {
    let steps = [step("a", &[("x", "in")], &[("y", "out"), ("z", "ou")])];
    let definition = read(&scheduling(&steps)).unwrap();
    let warnings: Vec<String> = definition.warnings.iter().map(ToString::to_string).collect();
    assert!(warnings[0].contains("nothing needs the tensor 'ou' of step 0 ('a'); did you mean 'out'?"), "{warnings:?}");
}

#[test]
fn tensors_fit_as_items_or_with_their_batch_dimension() {
    let of = |dims: &[i64], batched: bool| tensor("x", DataType::Fp32, dims, batched);
    let out = |dims: &[i64], batched: bool| tensor("y", DataType::Fp32, dims, batched);
    check(of(&[-1, 4], true), out(&[-1, 4], true), 4).unwrap();
    check(of(&[-1, -1], true), out(&[-1, 4], true), 4).unwrap();
    // A model without a batch dimension takes the batch as one tensor, or an item.
    check(of(&[-1, 4], false), out(&[4], false), 0).unwrap();
    let error = check(of(&[-1, 5], true), out(&[-1, 4], true), 4).unwrap_err();
    assert!(
        error.contains(
            "step 0 ('a'): the tensor 'in' does not fit: input 'in' of the ensemble 'e' has the shape [-1,4], but"
        ),
        "{error}"
    );
    let error = check(of(&[-1, 4], true), out(&[2, 4], false), 4).err();
    assert_eq!(error, None, "a size that varies fits any size");
    let error = check(of(&[-1, 4], true), tensor("y", DataType::Int32, &[-1, 4], true), 4).unwrap_err();
    assert!(
        error.contains("step 1 ('b'): the tensor 't' does not fit: output 'y' of step 0 ('a') is TYPE_INT32, but"),
        "{error}"
    );
    let error = check(of(&[-1, 4], true), out(&[-1, 4], true), 2).unwrap_err();
    assert!(error.contains("max_batch_size: is 4, but step 0 ('a') takes batches of at most 2"), "{error}");
}

#[test]
fn a_step_fits_its_model_and_the_model_is_there() {
    let error = check(tensor("z", DataType::Fp32, &[-1, 4], true), tensor("y", DataType::Fp32, &[-1, 4], true), 4);
    let error = error.unwrap_err();
    assert!(error.contains("step 0 ('a'): the model has no input 'x'"), "{error}");
    assert!(error.contains("step 0 ('a') gets no tensor for the model's input 'z'"), "{error}");
    let definition = read(&scheduling(&chain())).unwrap();
    let absent = || Err("it is not ready".to_owned());
    let error = definition.check_steps(&[absent(), absent()]).unwrap_err().to_string();
    assert!(error.contains("ensemble_scheduling.step[1].model_name: step 1 ('b'): it is not ready"), "{error}");
}
