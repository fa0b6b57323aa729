//! Batches parted and joined.

use downbeat_core::tensor::DataType;
use downbeat_engine::{Buffer, State, Tensor, strings};

use crate::support::{Random, as_floats, floats};

fn state(tensors: Vec<Tensor>) -> State {
    State { tensors }
}

fn texts(texts: &[&str], shape: &[usize]) -> Tensor {
    let mut data = Buffer::new();
    texts.iter().for_each(|t| strings::push(&mut data, t.as_bytes()).expect("short"));
    Tensor { datatype: DataType::Bytes, shape: shape.to_vec(), data }
}

#[test]
fn parts_share_the_memory_and_join_to_the_same_batch() {
    let mut random = Random::new("parts_share_the_memory");
    for _ in 0..50 {
        let rows = 1 + random.below(9) as usize;
        let width = random.below(5) as usize;
        let numbers: Vec<f32> = (0..rows * width).map(|_| random.float()).collect();
        let words: Vec<String> = (0..rows * 2).map(|i| "ab".repeat(random.below(i as u64 + 1) as usize)).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let batch = state(vec![floats(&[rows, width], &numbers), texts(&words, &[rows, 2])]);
        let before = batch.tensors[0].data.as_slice().as_ptr_range();
        let bytes = batch.tensors[1].data.as_slice().to_vec();
        let mut parts = Vec::new();
        while parts.iter().sum::<usize>() < rows {
            let left = rows - parts.iter().sum::<usize>();
            parts.push(1 + random.below(left as u64) as usize);
        }
        let split = batch.split(&parts).expect("parts are the batch");
        assert_eq!(split.iter().map(State::rows).collect::<Vec<_>>(), parts);
        for part in &split {
            let start = part.tensors[0].data.as_slice().as_ptr();
            assert!(width == 0 || before.contains(&start), "a part is no copy");
        }
        let joined = State::join(split).expect("they were one");
        assert_eq!(joined.tensors[0].shape, [rows, width]);
        assert_eq!(as_floats(&joined.tensors[0]), numbers);
        assert_eq!(joined.tensors[1].shape, [rows, 2]);
        assert_eq!(joined.tensors[1].data.as_slice(), bytes);
    }
}

#[test]
fn what_does_not_add_up_is_refused() {
    let batch = || state(vec![floats(&[3, 2], &[0.; 6]), floats(&[3], &[0.; 3])]);
    let split = |state: State, rows: &[usize]| state.split(rows).expect_err("is refused").to_string();
    assert_eq!(split(batch(), &[1, 1]), "the parts have 2 rows in all, but tensor 0 has 3");
    assert_eq!(split(batch(), &[3, 0]), "a batch has at least one row");
    assert_eq!(split(batch(), &[]), "a batch has at least one row");
    assert!(split(batch(), &[usize::MAX, 4]).ends_with("rows in all, but tensor 0 has 3"));
    let scalar = state(vec![floats(&[], &[0.])]);
    assert_eq!(split(scalar, &[1]), "the parts have 1 rows in all, but tensor 0 has 0");
    let short = state(vec![floats(&[3, 2], &[0.; 5])]);
    assert_eq!(split(short, &[1, 2]), "tensor 0: its bytes do not divide into 3 rows");

    let join = |states: Vec<State>| State::join(states).expect_err("is refused").to_string();
    assert_eq!(join(Vec::new()), "a batch has at least one row");
    let other = state(vec![floats(&[1, 2], &[0.; 2])]);
    assert!(join(vec![batch(), other]).contains("2 and 1 tensors"));
    let longer = state(vec![floats(&[3, 4], &[0.; 12]), floats(&[3], &[0.; 3])]);
    assert_eq!(join(vec![batch(), longer]), "tensor 0: rows of [2] and of [4] cannot be in one batch");
}
