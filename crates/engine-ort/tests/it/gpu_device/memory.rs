//! Memory: weights once, input rings, copies beside kernels.

use std::sync::Arc;

use downbeat_core::device::RingRun;
use downbeat_core::tensor::DataType;
use downbeat_engine::ring_memory::{self, RingMemory};
use downbeat_engine::{Cut, Tensor};
use downbeat_engine_ort::cuda::Device;

use super::{Gpu, products, run, span, stands_in};
use crate::model;
use crate::support::{Random, as_floats, assert_close, copy, example, floats, lane};

fn write(ring: &Arc<RingMemory>, slot: u32, bytes: &[u8]) {
    let mut writer = ring.write(RingRun { first: slot, count: 1 }).expect("it is free");
    writer.copy_from_slice(bytes);
    writer.finish().expect("the device is there");
}

fn batch(ring: &Arc<RingMemory>, first: u32, count: u32) -> Tensor {
    let data = ring.read(RingRun { first, count }).expect("nobody writes");
    let elements = ring.slot_bytes() / 4;
    Tensor { datatype: DataType::Fp32, shape: vec![count as usize, elements], data }
}

/// A second lane or a lane of segments does not copy the weights again.
#[test]
#[ignore = "needs a GPU"]
fn gpu_weights_are_there_once() {
    let gpu = Gpu::new();
    let folder = model::folder();
    let (width, layers) = if stands_in() { (256, 4) } else { (8192, 2) };
    let weights = (width * width * 4 * layers) as u64;
    let path = products(folder.path(), width, layers, false);
    let device = Device::open(0).expect("it is there");
    let free = || device.free_memory().expect("it is there");
    for cut in [Cut::Whole, Cut::At(vec!["r0".into()])] {
        let model = gpu.load(&path, cut);
        let segments = model.segments();
        let inputs = Random::new("weights_once").inputs(model.signature(), |_, _| 2);
        let before = free();
        let mut first = lane(&*model);
        run(&mut *first, segments, copy(&inputs));
        let one = before.saturating_sub(free());
        let mut second = lane(&*model);
        run(&mut *second, segments, copy(&inputs));
        let two = before.saturating_sub(free());
        println!(
            "{segments} segments: weights {} MiB, one lane {} MiB, two lanes {} MiB",
            weights >> 20,
            one >> 20,
            two >> 20
        );
        if !stands_in() {
            assert!(one >= weights, "they are on the device");
            assert!(two - one.min(two) < weights / 2, "and are not copied there again");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_ring_runs_across_its_end() {
    let gpu = Gpu::new();
    let model = gpu.load(&example("mlp"), Cut::Whole);
    let host = gpu.on_host(&example("mlp"));
    let item: usize = model.signature().inputs[0].dims.iter().skip(1).map(|d| *d as usize).product();
    let count = ring_memory::slots(4, &[item * 4]).expect("it fits");
    let ring = model.ring_memory(0, count, item * 4, 3).expect("there is memory");
    let mut random = Random::new("gpu_ring");
    let row = |random: &mut Random| floats(&[1, item], &(0..item).map(|_| random.float()).collect::<Vec<_>>());
    let rows: Vec<Tensor> = (0..count).map(|_| row(&mut random)).collect();
    for (slot, row) in (0..).zip(&rows) {
        write(&ring, slot, row.data.as_slice());
    }
    let (mut on_gpu, mut on_host) = (lane(&*model), lane(&*host));
    for (first, len) in [(0, 3), (count - 1, 1), (count - 1, 2), (count - 2, 3), (count - 1, 3)] {
        let expected: Vec<f32> = (0..len).flat_map(|at| as_floats(&rows[((first + at) % count) as usize])).collect();
        let expected = run(&mut *on_host, 1, vec![floats(&[len as usize, item], &expected)]);
        let got = run(&mut *on_gpu, 1, vec![batch(&ring, first, len)]);
        assert_close(&format!("slots {first} to {}", first + len), &expected, &got, 1e-2);
    }
}

/// Another lane writes and reads a slot, all while a long launch runs.
#[test]
#[ignore = "needs a GPU"]
fn gpu_copies_overlap_kernels() {
    let gpu = Gpu::new();
    let folder = model::folder();
    let (width, layers) = if stands_in() { (64, 8) } else { (1024, 400) };
    let long = gpu.load(&products(folder.path(), width, layers, true), Cut::Whole);
    let mlp = gpu.load(&example("mlp"), Cut::Whole);
    let item: usize = mlp.signature().inputs[0].dims.iter().skip(1).map(|d| *d as usize).product();
    let count = ring_memory::slots(4, &[item * 4]).expect("it fits");
    let ring = mlp.ring_memory(0, count, item * 4, 2).expect("there is memory");
    let inputs = Random::new("gpu_copies").inputs(long.signature(), |_, _| 8);
    let (mut slow, mut quick) = (lane(&*long), lane(&*mlp));
    write(&ring, 0, &vec![0; item * 4]);
    run(&mut *quick, 1, vec![batch(&ring, 0, 1)]);
    run(&mut *slow, 1, copy(&inputs));
    let inside = (0..50).any(|turn| {
        let start = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let (slow, inputs, start) = (&mut slow, copy(&inputs), &start);
            scope.spawn(move || {
                start.wait();
                run(&mut **slow, 1, inputs);
            });
            start.wait();
            // The test asks a little later each time, until the launch has begun and is not over.
            (0..turn * 2000).for_each(|_| std::hint::spin_loop());
            write(&ring, turn % count, &vec![1; item * 4]);
            run(&mut *quick, 1, vec![batch(&ring, turn % count, 1)]);
        });
        let (begin, end) = span(&*quick).from_begin_of(&span(&*slow)).expect("the device is there");
        begin > 0 && (end as u64) < span(&*slow).took().expect("the device is there").as_nanos()
    });
    assert!(inside || stands_in(), "no copy and launch of 50 was done while another launch ran");
}
