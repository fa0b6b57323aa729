//! Input rings with slots on the device (E²bird §5).

use std::sync::Arc;

use cuda_stand_in::{Kind, Order, StandIn};
use downbeat_core::device::RingRun;
use downbeat_core::tensor::DataType;
use downbeat_engine::ring_memory::{self, RingMemory};
use downbeat_engine::{Cut, Place, Tensor};

use super::{gpus, load, run};
use crate::engines::onnxruntime;
use crate::support::{Random, as_floats, assert_close, copy, example, floats, lane, load as load_on};

fn slots(first: u32, count: u32) -> RingRun {
    RingRun { first, count }
}

fn write(ring: &Arc<RingMemory>, slot: u32, bytes: &[u8]) {
    let mut writer = ring.write(slots(slot, 1)).expect("it is free");
    writer.copy_from_slice(bytes);
    writer.finish().expect("the device is there");
}

/// The batch of a run of slots has each request's row, also across the end of the ring, and for
/// copies that run late.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn any_run_of_slots_is_a_batch() {
    for order in [Order::Lazy, Order::Random(3)] {
        let Some((stand_in, engine)) = gpus(1) else { return };
        stand_in.set_order(order);
        let model = load(&engine, &example("mlp"), Cut::Whole);
        let host = load_on(&onnxruntime().expect("found before"), &example("mlp"));
        let item: usize = model.signature().inputs[0].dims.iter().skip(1).map(|d| *d as usize).product();
        let count = ring_memory::slots(4, &[item * 4]).expect("it fits");
        let ring = model.ring_memory(0, count, item * 4, 3).expect("there is memory");
        let mut random = Random::new("any_run_of_slots");
        let rows: Vec<Tensor> =
            (0..count).map(|_| floats(&[1, item], &(0..item).map(|_| random.float()).collect::<Vec<_>>())).collect();
        for (slot, row) in (0..).zip(&rows) {
            write(&ring, slot, row.data.as_slice());
        }
        let (mut on_gpu, mut on_host) = (lane(&*model), lane(&*host));
        for first in [0, 1, count - 2, count - 1] {
            for len in 1..=3 {
                let batch: Vec<f32> =
                    (0..len).flat_map(|at| as_floats(&rows[((first + at) % count) as usize])).collect();
                let data = ring.read(slots(first, len)).expect("nobody writes");
                let tensor = Tensor { datatype: DataType::Fp32, shape: vec![len as usize, item], data };
                stand_in.forget();
                let got = run(&mut *on_gpu, 1, vec![tensor]);
                let expected = run(&mut *on_host, 1, vec![floats(&[len as usize, item], &batch)]);
                assert_close(&format!("{order:?}, slots {first} to {}", first + len), &expected, &got, 1e-5);
                assert_eq!(stand_in.calls("cuMemcpyHtoDAsync_v2"), 0, "the slots are there already");
            }
        }
        assert!(ring.read(slots(count - 1, 4)).is_none(), "longer than what the ring was made for, across its end");
        assert_eq!(stand_in.calls("pageable upload"), 0);
        drop((ring, on_gpu, model, engine));
        stand_in.assert_clean();
    }
}

/// A request is copied while the batch before it computes.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn copies_overlap_kernels() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let model = load(&engine, &example("mlp"), Cut::Whole);
    let item: usize = model.signature().inputs[0].dims.iter().skip(1).map(|d| *d as usize).product();
    let count = ring_memory::slots(4, &[item * 4]).expect("it fits");
    let ring = model.ring_memory(0, count, item * 4, 2).expect("there is memory");
    let mut lane = lane(&*model);
    let row = vec![0; item * 4];
    let batch = |ring: &Arc<RingMemory>, slot| Tensor {
        datatype: DataType::Fp32,
        shape: vec![1, item],
        data: ring.read(slots(slot, 1)).expect("nobody writes"),
    };
    write(&ring, 2, &row);
    // The second one is tried as a graph.
    (0..2).for_each(|_| drop(run(&mut *lane, 1, vec![batch(&ring, 2)])));
    stand_in.forget();
    write(&ring, 2, &row);
    write(&ring, 3, &row);
    run(&mut *lane, 1, vec![batch(&ring, 2)]);
    let was_late = |stand_in: &StandIn| stand_in.trace().iter().filter(|work| work.kind == Kind::Upload).count();
    assert_eq!(was_late(&stand_in), 1, "the launch waits for its own slot alone");
    run(&mut *lane, 1, vec![batch(&ring, 3)]);
    let trace = stand_in.trace();
    let uploads: Vec<_> = trace.iter().filter(|work| work.kind == Kind::Upload).collect();
    let kernel = trace.iter().find(|work| work.kind == Kind::Kernel).expect("one has run");
    let [first, second] = uploads.as_slice() else { panic!("{uploads:?}") };
    assert!(!first.overlaps(kernel) && first.end <= kernel.start, "what a launch reads is there before it");
    assert!(second.overlaps(kernel), "{second:?} and {kernel:?}");
    drop((ring, lane, model, engine));
    stand_in.assert_clean();
}

#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn a_slot_is_in_use_until_the_launch_that_reads_it_is_over() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let model = load(&engine, &example("digits"), Cut::Whole);
    let spec = &model.signature().inputs[0];
    let shape: Vec<usize> = std::iter::once(1).chain(spec.dims.iter().skip(1).map(|d| *d as usize)).collect();
    let bytes = shape.iter().product::<usize>() * 4;
    let count = ring_memory::slots(2, &[bytes]).expect("it fits");
    let ring = model.ring_memory(0, count, bytes, 1).expect("there is memory");
    let mut lane = model.lane_at(Place::default()).expect("there is memory");
    write(&ring, 0, &vec![0; bytes]);
    let data = ring.read(slots(0, 1)).expect("nobody writes");
    let tensor = Tensor { datatype: DataType::Fp32, shape, data };
    assert!(ring.write(slots(0, 1)).is_none(), "it waits for its launch");
    run(&mut *lane, 1, vec![tensor]);
    assert!(ring.write(slots(0, 1)).is_some(), "its launch is over");
    // Dropped while a copy is under way.
    write(&ring, 1, &vec![1; bytes]);
    drop(ring);
    drop((lane, model, engine));
    stand_in.assert_clean();
}

/// Rows on the host and in slots make one batch.
#[test]
#[cfg_attr(not(has_onnxruntime), ignore = "needs an onnxruntime library: set ORT_DYLIB_PATH")]
fn slots_and_other_rows_are_joined() {
    let Some((stand_in, engine)) = gpus(1) else { return };
    let model = load(&engine, &example("mlp"), Cut::Whole);
    let host = load_on(&onnxruntime().expect("found before"), &example("mlp"));
    let item: usize = model.signature().inputs[0].dims.iter().skip(1).map(|d| *d as usize).product();
    let mut random = Random::new("slots_and_other_rows");
    let row = |random: &mut Random| floats(&[1, item], &(0..item).map(|_| random.float()).collect::<Vec<_>>());
    let (first, second) = (row(&mut random), row(&mut random));
    let count = ring_memory::slots(2, &[item * 4]).expect("it fits");
    let ring = model.ring_memory(0, count, item * 4, 1).expect("there is memory");
    write(&ring, 0, first.data.as_slice());
    let data = ring.read(slots(0, 1)).expect("nobody writes");
    let in_slot = Tensor { datatype: DataType::Fp32, shape: vec![1, item], data };
    let all: Vec<f32> = as_floats(&first).into_iter().chain(as_floats(&second)).collect();
    let mut on_gpu = lane(&*model);
    let state = |tensor| downbeat_engine::State { tensors: vec![tensor] };
    let joined =
        on_gpu.join(vec![state(in_slot), state(copy(std::slice::from_ref(&second)).remove(0))]).expect("they fit");
    assert_eq!(joined.tensors[0].shape, [2, item]);
    let expected = run(&mut *lane(&*host), 1, vec![floats(&[2, item], &all)]);
    assert_close("joined", &expected, &run(&mut *on_gpu, 1, joined.tensors), 1e-5);
    drop((ring, on_gpu, model, engine));
    stand_in.assert_clean();
}
