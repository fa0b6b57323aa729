//! The engine on GPUs, on the stand-in of the driver (`lab/cuda-stand-in`). Everything is tested
//! but the kernels, which are onnxruntime's own for the host. Streams of the stand-in run only when
//! a thread waits for them, so that a missing wait gives wrong answers.
//!
//! If the library has its CUDA provider beside it, the tests use the provider, on stand-ins of
//! NVIDIA's other libraries: `just gpu-stand-ins`. These stand-ins compute perceptrons only.

mod ahead;
mod faults;
mod graphs;
mod lanes;
mod partitions;
mod provider;
mod rings;
mod tensorrt;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cuda_stand_in::StandIn;
use downbeat_engine::{Cut, Engine, Lane, LoadOptions, Model, State, Tensor};
use downbeat_engine_ort::{CudaOptions, OnnxruntimeCuda};

use crate::engines::onnxruntime;
use crate::support::example;

/// The engine on so many GPUs of the stand-in, which this test has to itself; `None` without an
/// onnxruntime library.
pub(crate) fn gpus(count: u32) -> Option<(StandIn, OnnxruntimeCuda)> {
    gpus_with(count, &CudaOptions::default())
}

/// As [`gpus`], with options.
fn gpus_with(count: u32, options: &CudaOptions) -> Option<(StandIn, OnnxruntimeCuda)> {
    let library = onnxruntime()?;
    let stand_in = StandIn::lock();
    stand_in.set_devices(count, 132, 80 << 30);
    // For kernels of the library that need a device, and for stand-ins of NVIDIA's other libraries,
    // if they are loaded (lab/nvidia-stand-ins).
    stand_in.set_readable(true);
    init();
    let devices: Vec<u32> = (0..count).collect();
    let engine = library.on_gpus(&devices, options).unwrap_or_else(|e| panic!("{e}"));
    Some((stand_in, engine))
}

/// Whether onnxruntime's own kernels for GPUs run, rather than its kernels for the host.
pub(crate) fn has_provider(engine: &OnnxruntimeCuda) -> bool {
    let library = engine.info().library.expect("it is one");
    library.with_file_name("libonnxruntime_providers_cuda.so").exists()
}

/// A model whose kernels are computed, and how many segments it can be cut into.
fn to_cut(engine: &OnnxruntimeCuda) -> (PathBuf, usize) {
    if has_provider(engine) { (example("digits"), 3) } else { (example("encoder"), 4) }
}

/// Initialises the driver, as the preflight does.
fn init() {
    cudarc::driver::result::init().unwrap_or_else(|e| panic!("{e}"));
}

pub(crate) fn load(engine: &OnnxruntimeCuda, path: &Path, cut: Cut) -> Arc<dyn Model> {
    engine.load(&LoadOptions::new(path, 1).with_cut(cut)).unwrap_or_else(|e| panic!("{e}"))
}

/// Runs all segments.
pub(crate) fn run(lane: &mut dyn Lane, segments: usize, tensors: Vec<Tensor>) -> Vec<Tensor> {
    let mut state = State { tensors };
    lane.run(0..segments, &mut state).unwrap_or_else(|e| panic!("{e}"));
    state.tensors
}
