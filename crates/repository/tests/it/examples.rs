//! The example models that come with the project.

use std::path::Path;

use downbeat_core::Duration;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_repository::{ModelFormat, ModelRepository};

fn spec(name: &str, datatype: DataType, dims: &[i64]) -> TensorSpec {
    TensorSpec { name: name.into(), datatype, dims: dims.to_vec() }
}

#[test]
fn the_examples_are_read_without_a_warning() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models");
    let repository = ModelRepository::open(examples).unwrap();
    let scan = repository.scan().unwrap();
    assert_eq!(scan.names, ["digits", "encoder", "mlp"]);
    assert_eq!(scan.warnings, []);

    let mut digits = repository.definition("digits", None).unwrap();
    let signature = Signature {
        inputs: vec![spec("image", DataType::Fp32, &[-1, 8, 8])],
        outputs: vec![spec("probabilities", DataType::Fp32, &[-1, 10])],
    };
    digits.complete(&signature).unwrap();
    assert_eq!(digits.warnings, []);
    assert_eq!(digits.format, ModelFormat::Onnx);
    assert_eq!(digits.slo, Some(Duration::from_millis(250)));
    assert_eq!(digits.batching.max_batch_size, 64);
    assert!(digits.batching.dynamic);
    assert_eq!(digits.outputs[0].labels.len(), 10);

    let mut encoder = repository.definition("encoder", None).unwrap();
    assert_eq!(encoder.warnings, []);
    assert_eq!(encoder.versions.len(), 1);
    let signature = Signature {
        inputs: vec![spec("tokens", DataType::Int64, &[-1, -1])],
        outputs: vec![spec("out", DataType::Fp32, &[-1, -1, 64])],
    };
    encoder.complete(&signature).unwrap();
    assert_eq!(encoder.batching.max_batch_size, 32);
    assert!(encoder.batching.dynamic);
    assert_eq!(encoder.config.input[0].dims, [-1]);
    assert_eq!(encoder.config.output[0].dims, [-1, 64]);
}
