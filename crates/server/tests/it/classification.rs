//! The classification extension.

use downbeat_core::tensor::DataType;
use downbeat_frontend::extension::apply_outputs;
use downbeat_frontend::shared_memory::SharedMemory;
use downbeat_protocol::{InferResponse, InferTensor, Parameter, Parameters, RequestedOutput};
use downbeat_service::client::Client;
use downbeat_service::error::ServiceError;
use half::{bf16, f16};

use crate::support::strings;

/// The shape and classes of one output.
fn classify(
    datatype: DataType,
    shape: &[i64],
    data: Vec<u8>,
    batched: bool,
    labels: &[&str],
    count: Parameter,
) -> Result<(Vec<i64>, Vec<String>), ServiceError> {
    let output = InferTensor {
        name: "y".into(),
        datatype,
        shape: shape.to_vec(),
        parameters: Parameters::new(),
        data: data.into(),
    };
    let mut response = InferResponse { outputs: vec![output], ..Default::default() };
    let parameters = Parameters::from([("classification".into(), count)]);
    let requested = [RequestedOutput { name: "y".into(), parameters }];
    let labels = |name: &str| {
        assert_eq!(name, "y");
        labels.iter().map(|label| (*label).to_owned()).collect()
    };
    apply_outputs(&SharedMemory::new(), Client::HERE, labels, batched, &requested, &mut response.outputs)?;
    let output = response.outputs.remove(0);
    assert_eq!(output.datatype, DataType::Bytes);
    Ok((output.shape, strings(&output.data)))
}

fn floats(shape: &[i64], values: &[f32], batched: bool, labels: &[&str], count: i64) -> (Vec<i64>, Vec<String>) {
    let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    classify(DataType::Fp32, shape, data, batched, labels, Parameter::Int64(count)).unwrap()
}

#[test]
fn the_largest_come_first_with_their_labels() {
    let (shape, classes) = floats(&[4], &[0.1, 0.5, 0.25, 0.15], false, &["ant", "bee", "", "cat"], 3);
    assert_eq!(shape, [3]);
    assert_eq!(classes, ["0.500000:1:bee", "0.250000:2", "0.150000:3:cat"]);
}

#[test]
fn each_row_of_a_batch_has_its_own() {
    let values = [1.0, 2.0, 3.0, 9.0, 8.0, 7.0];
    let (shape, classes) = floats(&[2, 3], &values, true, &[], 2);
    assert_eq!(shape, [2, 2]);
    assert_eq!(classes, ["3.000000:2", "2.000000:1", "9.000000:0", "8.000000:1"]);
    let (shape, classes) = floats(&[2, 3], &values, false, &[], 2);
    assert_eq!(shape, [2]);
    assert_eq!(classes, ["9.000000:3", "8.000000:4"]);
    let (shape, classes) = floats(&[1, 2, 3], &values, true, &[], 1);
    assert_eq!(shape, [1, 1]);
    assert_eq!(classes, ["9.000000:3"]);
}

#[test]
fn more_than_there_are_gives_all() {
    let (shape, classes) = floats(&[1, 2], &[-1.0, 1.0], true, &["no"], 1_000_000);
    assert_eq!(shape, [1, 2]);
    assert_eq!(classes, ["1.000000:1", "-1.000000:0:no"]);
}

#[test]
fn equal_values_are_in_order_of_index_and_nan_is_last() {
    let values = [f32::NAN, 1.0, f32::INFINITY, 1.0, f32::NEG_INFINITY, -0.0, 0.0, f32::NAN];
    let (_, classes) = floats(&[8], &values, false, &[], 8);
    assert_eq!(classes, ["inf:2", "1.000000:1", "1.000000:3", "-0.000000:5", "0.000000:6", "-inf:4", "nan:0", "nan:7"]);
    let (_, classes) = floats(&[8], &values, false, &[], 2);
    assert_eq!(classes, ["inf:2", "1.000000:1"]);
}

#[test]
fn empty_outputs_have_no_classes() {
    assert_eq!(floats(&[0, 3], &[], true, &[], 2), (vec![0, 0], vec![]));
    assert_eq!(floats(&[2, 0], &[], true, &[], 2), (vec![2, 0], vec![]));
    assert_eq!(floats(&[0], &[], false, &[], 2), (vec![0], vec![]));
}

#[test]
fn every_number_has_an_order() {
    let cases: [(DataType, Vec<u8>, &str); 12] = [
        (DataType::Uint8, vec![1, 255], "255:1"),
        (DataType::Uint16, [1_u16, 65_535].map(u16::to_le_bytes).concat(), "65535:1"),
        (DataType::Uint32, [1, u32::MAX].map(u32::to_le_bytes).concat(), "4294967295:1"),
        (DataType::Uint64, [1, u64::MAX].map(u64::to_le_bytes).concat(), "18446744073709551615:1"),
        (DataType::Int8, vec![1, 255], "1:0"),
        (DataType::Int16, [1_i16, -2].map(i16::to_le_bytes).concat(), "1:0"),
        (DataType::Int32, [-1_i32, -2].map(i32::to_le_bytes).concat(), "-1:0"),
        (DataType::Int64, [i64::MIN, i64::MAX].map(i64::to_le_bytes).concat(), "9223372036854775807:1"),
        (DataType::Fp16, [1.5, -2.0].map(|v| f16::from_f32(v).to_le_bytes()).concat(), "1.500000:0"),
        (DataType::Bf16, [1.5, -2.0].map(|v| bf16::from_f32(v).to_le_bytes()).concat(), "1.500000:0"),
        (DataType::Fp32, [0.1_f32, -2.0].map(f32::to_le_bytes).concat(), "0.100000:0"),
        (DataType::Fp64, [0.1_f64, -2.0].map(f64::to_le_bytes).concat(), "0.100000:0"),
    ];
    for (datatype, data, expected) in cases {
        let (_, classes) = classify(datatype, &[2], data, false, &[], Parameter::Uint64(1)).unwrap();
        assert_eq!(classes, [expected], "{datatype}");
    }
}

#[test]
fn what_has_no_order_or_count_is_refused() {
    let refused = |datatype, data, count| match classify(datatype, &[1], data, false, &[], count) {
        Err(ServiceError::InvalidArgument(message)) => message,
        other => panic!("{other:?}"),
    };
    let bytes = refused(DataType::Bytes, vec![0; 4], Parameter::Int64(1));
    assert_eq!(bytes, "output 'y': 'classification' needs numbers, and its datatype is BYTES");
    assert!(refused(DataType::Bool, vec![0], Parameter::Int64(1)).contains("its datatype is BOOL"));
    assert!(refused(DataType::Uint8, vec![0], Parameter::Int64(0)).contains("is 0, expected at least 1"));
    assert!(refused(DataType::Uint8, vec![0], Parameter::Int64(-1)).contains("is -1, expected an integer"));
    let text = refused(DataType::Uint8, vec![0], Parameter::String("two".into()));
    assert!(text.contains("is 'two', expected an integer"));
}
