//! The requests that warm a model up.

use std::fs;

use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_repository::{ModelDefinition, ModelRepository};

fn definition(data: &[u8]) -> ModelDefinition {
    let folder = tempfile::tempdir().unwrap().keep();
    fs::create_dir_all(folder.join("m/1")).unwrap();
    fs::create_dir_all(folder.join("m/warmup")).unwrap();
    fs::write(folder.join("m/1/model.onnx"), b"").unwrap();
    fs::write(folder.join("m/warmup/x.bin"), data).unwrap();
    let config = r#"
        max_batch_size: 4
        model_warmup {
          name: "w" batch_size: 2
          inputs { key: "f" value { data_type: TYPE_FP32 dims: 3 random_data: true } }
          inputs { key: "h" value { data_type: TYPE_BF16 dims: 3 random_data: true } }
          inputs { key: "s" value { data_type: TYPE_STRING dims: 1 random_data: true } }
          inputs { key: "x" value { data_type: TYPE_INT16 dims: 2 input_data_file: "x.bin" } }
        }"#;
    let mut definition = ModelRepository::open(&folder).unwrap().definition("m", Some(config)).unwrap();
    let spec = |name: &str, datatype, dims: &[i64]| TensorSpec { name: name.into(), datatype, dims: dims.to_vec() };
    let inputs = vec![
        spec("f", DataType::Fp32, &[-1, 3]),
        spec("h", DataType::Bf16, &[-1, 3]),
        spec("s", DataType::Bytes, &[-1, 1]),
        spec("x", DataType::Int16, &[-1, 2]),
    ];
    let outputs = vec![spec("y", DataType::Fp32, &[-1, 1])];
    definition.complete(&Signature { inputs, outputs }).unwrap();
    definition
}

#[test]
fn a_request_has_the_batch_and_the_bytes_of_each_input() {
    let definition = definition(&[1, 2, 3, 4]);
    let request = definition.warmups[0].request("m").unwrap();
    let input = |name: &str| request.inputs.iter().find(|i| i.name == name).unwrap();
    assert_eq!(input("f").shape, [2, 3]);
    let floats = input("f").data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    assert!(floats.clone().all(|f| (0.0..1.0).contains(&f)) && floats.clone().any(|f| f > 0.0));
    assert_eq!(floats.count(), 6);
    let halves = input("h").data.chunks_exact(2).map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f32());
    assert!(halves.clone().all(|f| (0.0..1.0).contains(&f)) && halves.count() == 6);
    assert_eq!(input("s").data.as_ref(), [0; 8], "two empty strings");
    assert_eq!(input("x").data.as_ref(), [1, 2, 3, 4, 1, 2, 3, 4], "one batch entry is repeated");
    assert_eq!(request, definition.warmups[0].request("m").unwrap(), "random is the same each time");
}

#[test]
fn a_data_file_of_the_wrong_size_is_refused() {
    let error = definition(&[0; 5]).warmups[0].request("m").unwrap_err();
    assert!(error.ends_with("x.bin has 5 bytes; expected 4 (one batch entry) or 8 (the batch)"), "{error}");
}
