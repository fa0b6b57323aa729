use std::cell::Cell;

use downbeat_core::tensor::TensorSpec;
use downbeat_engine::{Buffer, Tensor};
use downbeat_repository::TensorBinding;

use super::*;

const WIDTH: usize = 4;

fn codec(datatype: DataType, max_batch: u32) -> BatchCodec {
    let binding = |name: &str, datatype| {
        let dims = vec![-1, WIDTH as i64];
        let client = TensorSpec { name: name.into(), datatype, dims: dims.clone() };
        TensorBinding { client, model_index: 0, model_dims: dims, labels: [].into(), batched: true, optional: false }
    };
    BatchCodec::new(vec![binding("x", datatype)], vec![binding("y", DataType::Fp32)], max_batch)
}

/// The numbers of the first tensor, a row each.
fn rows(state: &State) -> Vec<Vec<f64>> {
    let tensor = &state.tensors[0];
    let numbers = downbeat_service::classification::numbers(tensor.datatype, tensor.data.as_slice()).unwrap();
    numbers.chunks(WIDTH).map(|row| row.iter().map(|n| n.real()).collect()).collect()
}

fn output(rows: &[Vec<f64>]) -> State {
    let mut data = Buffer::new();
    rows.iter().flatten().for_each(|n| data.extend_from_slice(&(*n as f32).to_le_bytes()));
    State { tensors: vec![Tensor { datatype: DataType::Fp32, shape: vec![rows.len(), WIDTH], data }] }
}

/// The verdict on a model that answers as `model` does.
fn verdict_by(codec: &BatchCodec, mut model: impl FnMut(Vec<Vec<f64>>) -> Result<Vec<Vec<f64>>, String>) -> RowVerdict {
    let mut run = |state: State| Ok(output(&model(rows(&state))?));
    let (fill, samples) = (Fill::default(), Vec::new());
    RowCheck { codec, fill, samples, run: &mut run, is_time: &|| true, is_over: &|| false, compared: 0 }.verdict()
}

fn verdict(model: impl FnMut(Vec<Vec<f64>>) -> Result<Vec<Vec<f64>>, String>) -> RowVerdict {
    verdict_by(&codec(DataType::Fp32, 32), model)
}

/// Every number through a function of it and its row.
fn by_row(rows: Vec<Vec<f64>>, f: impl Fn(f64, &[f64]) -> f64) -> Vec<Vec<f64>> {
    rows.iter().map(|row| row.iter().map(|n| f(*n, row)).collect()).collect()
}

#[test]
fn rows_that_keep_to_themselves_are_independent() {
    let verdict = verdict(|rows| Ok(by_row(rows, |n, row| n / row.iter().map(|n| n.abs()).sum::<f64>())));
    assert_eq!(verdict.rows, RowDependence::Independent, "{verdict}");
    assert_eq!(verdict.reason, "the model answered 4 draws of requests alike, alone and together");
}

#[test]
fn a_softmax_across_rows_is_mixed() {
    let verdict = verdict(|rows| {
        let sum = |column: usize| rows.iter().map(|row| row[column].exp()).sum::<f64>();
        let sums: Vec<f64> = (0..WIDTH).map(sum).collect();
        let row = |row: &Vec<f64>| row.iter().zip(&sums).map(|(n, sum)| n.exp() / sum).collect();
        Ok(rows.iter().map(row).collect())
    });
    assert_eq!(verdict.rows, RowDependence::Mixed, "{verdict}");
    assert!(verdict.reason.starts_with("output 'y' has 1 for a request alone, but "), "{verdict}");
}

/// The model does as `DynamicQuantizeLinear`: a neighbour with large values coarsens the steps for
/// all.
#[test]
fn a_scale_over_the_whole_batch_is_mixed() {
    let verdict = verdict(|rows| {
        let most = rows.iter().flatten().fold(0f64, |most, n| most.max(n.abs()));
        Ok(by_row(rows, |n, _| (n / most * 127.0).round() * most / 127.0))
    });
    assert_eq!(verdict.rows, RowDependence::Mixed, "{verdict}");
}

#[test]
fn a_model_that_refuses_batches_is_mixed() {
    let verdict = verdict(|rows| match rows.len() {
        1 => Ok(rows),
        count => Err(format!("Reshape: {} elements do not fit [1,4]", count * WIDTH)),
    });
    assert_eq!(verdict.rows, RowDependence::Mixed);
    let said = "the model runs 2 requests alone, but not as a batch: Reshape: 8 elements do not fit [1,4]";
    assert_eq!(verdict.reason, said);
}

#[test]
fn zeros_that_fill_a_batch_count_as_neighbours() {
    let verdict = verdict(|rows| {
        let has_zeros = rows.len() > 1 && rows.iter().any(|row| row.iter().all(|n| *n == 0.0));
        Ok(by_row(rows, |n, _| if has_zeros { n + 1.0 } else { n }))
    });
    assert_eq!(verdict.rows, RowDependence::Mixed, "{verdict}");
}

#[test]
fn a_difference_that_is_not_repeated_does_not_count() {
    let batches = Cell::new(0);
    let verdict = verdict(|rows| {
        if rows.len() > 1 {
            batches.set(batches.get() + 1);
        }
        let is_off = rows.len() > 1 && batches.get() == 1;
        Ok(by_row(rows, |n, _| if is_off { n + 1.0 } else { n }))
    });
    assert_eq!(verdict.rows, RowDependence::Independent, "{verdict}");
}

#[test]
fn answers_that_differ_from_run_to_run_tell_nothing() {
    let runs = Cell::new(0.0);
    let verdict = verdict(|rows| {
        runs.set(runs.get() + 1.0);
        Ok(by_row(rows, |n, _| n + runs.get()))
    });
    assert_eq!(verdict.rows, RowDependence::Unknown);
    assert_eq!(verdict.reason, "output 'y' differs from run to run for the same request");
}

#[test]
fn a_model_that_answers_nothing_stays_unknown() {
    let verdict = verdict(|_| Err("no such index".to_owned()));
    assert_eq!(verdict.rows, RowDependence::Unknown);
    assert_eq!(verdict.reason, "the model answers no made-up request (no such index)");
}

/// The only index is one, so all requests are equal. A mean over equal requests is the same for
/// each.
#[test]
fn requests_that_are_all_alike_tell_nothing() {
    let only_ones = |rows: Vec<Vec<f64>>| match rows.iter().flatten().all(|n| *n == 1.0) {
        true => Ok(rows),
        false => Err("out of range".to_owned()),
    };
    let codec = codec(DataType::Int64, 32);
    let mut run = |state: State| Ok(output(&only_ones(rows(&state))?));
    let check = RowCheck {
        codec: &codec,
        fill: Fill::Ones,
        samples: Vec::new(),
        run: &mut run,
        is_time: &|| true,
        is_over: &|| false,
        compared: 0,
    };
    let verdict = check.verdict();
    assert_eq!(verdict.rows, RowDependence::Unknown, "{verdict}");
}

#[test]
fn no_batch_is_tried_that_the_model_may_not_have() {
    let largest = Cell::new(0);
    let verdict = verdict_by(&codec(DataType::Fp32, 2), |rows| {
        largest.set(largest.get().max(rows.len()));
        Ok(rows)
    });
    assert_eq!((verdict.rows, largest.get()), (RowDependence::Independent, 2));
}

/// Samples of `model_warmup` may be larger than the batches that are tried.
#[test]
fn nothing_that_was_never_compared_is_independent() {
    let codec = codec(DataType::Fp32, 32);
    let mut sample = codec.sample(Fill::default(), 1).unwrap();
    sample.rows = 8;
    let mut run = |state: State| Ok(output(&rows(&state)));
    let samples = vec![sample.clone(), sample];
    let check = RowCheck {
        codec: &codec,
        fill: Fill::default(),
        samples,
        run: &mut run,
        is_time: &|| true,
        is_over: &|| false,
        compared: 0,
    };
    let verdict = check.verdict();
    assert_eq!(verdict.rows, RowDependence::Unknown, "{verdict}");
}
