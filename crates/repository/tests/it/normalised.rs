//! A completed configuration as clients see it, in the form that Triton gives it.

use std::fs;

use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_protocol::inference::model_instance_group::Kind;
use downbeat_repository::{ModelDefinition, ModelRepository, WarmupData};

fn completed(config: &str) -> ModelDefinition {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("m/1")).unwrap();
    fs::write(folder.path().join("m/1/model.onnx"), b"").unwrap();
    let mut definition = ModelRepository::open(folder.path()).unwrap().definition("m", Some(config)).unwrap();
    let spec =
        |name: &str, dims: &[i64]| TensorSpec { name: name.into(), datatype: DataType::Fp32, dims: dims.to_vec() };
    let signature = Signature { inputs: vec![spec("x", &[-1, 4])], outputs: vec![spec("y", &[-1, 2])] };
    definition.complete(&signature).unwrap();
    definition
}

#[test]
fn instances_and_optimization_are_filled_in() {
    let config = completed("instance_group [ { }, { kind: KIND_CPU count: 3 name: \"mine\" } ]").config;
    let groups: Vec<_> = config.instance_group.iter().map(|g| (g.name.as_str(), g.kind(), g.count)).collect();
    assert_eq!(groups, [("m_0", Kind::Cpu, 1), ("mine", Kind::Cpu, 3)]);
    let without = completed("max_batch_size: 4").config;
    let groups: Vec<_> = without.instance_group.iter().map(|g| (g.name.as_str(), g.kind(), g.count)).collect();
    assert_eq!(groups, [("m", Kind::Cpu, 1)]);
    let pinned = |config: &str| {
        let optimization = completed(config).config.optimization.unwrap();
        (optimization.input_pinned_memory.unwrap().enable, optimization.output_pinned_memory.unwrap().enable)
    };
    assert_eq!(pinned(""), (true, true));
    assert_eq!(pinned("optimization { input_pinned_memory { enable: false } }"), (false, true));
}

#[test]
fn any_number_of_priorities_is_taken() {
    let config = "max_batch_size: 4 dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: 18446744073709551614 }";
    let batching = completed(config).batching;
    let levels = [1, 2, u64::MAX - 2, 0, u64::MAX].map(|priority| batching.level_of(priority));
    assert!(levels.is_sorted_by(|a, b| a < b), "{levels:?}");
}

#[test]
fn what_a_warm_up_names_is_what_it_sends() {
    let warmup = |data: &str| {
        let config =
            format!("model_warmup {{ inputs {{ key: \"x\" value {{ data_type: TYPE_FP32 dims: 4 {data} }} }} }}");
        completed(&config).warmups[0].inputs["x"].data.clone()
    };
    for value in ["true", "false"] {
        assert_eq!(warmup(&format!("zero_data: {value}")), WarmupData::Zero);
        assert_eq!(warmup(&format!("random_data: {value}")), WarmupData::Random);
    }
}
