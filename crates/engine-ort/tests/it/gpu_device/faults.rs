//! Faults: the error has clear words, and everything else goes on.

use std::process::Command;

use cudarc::driver::{result, sys};
use downbeat_engine::{Cut, State};
use downbeat_engine_ort::cuda::Device;
use downbeat_engine_ort::{CudaOptions, Preference, Search, choose};

use super::{Gpu, products, run, stands_in};
use crate::model;
use crate::support::{Random, copy, example, lane};

#[test]
#[ignore = "needs a GPU"]
fn gpu_that_is_not_there_is_named() {
    let options = CudaOptions { devices: vec![99], ..CudaOptions::default() };
    let error =
        choose(Preference::Cuda, &Search::from_env(), &options).err().expect("nobody has that many").to_string();
    assert!(error.contains("GPU 99 was asked for"), "{error}");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_launch_beyond_the_limit_fails_alone() {
    let gpu = Gpu::with(&CudaOptions { memory_limit: Some(4 << 20), ..CudaOptions::default() });
    if stands_in() {
        return;
    }
    let folder = model::folder();
    let model = gpu.load(&products(folder.path(), 1024, 4, true), Cut::Whole);
    let inputs = |rows| Random::new("gpu_limit").inputs(model.signature(), |_, _| rows);
    let mut lane = lane(&*model);
    let expected = run(&mut *lane, 1, inputs(8));
    let error = lane.run(0..1, &mut State { tensors: inputs(65_536) }).expect_err("256 MiB are more").to_string();
    println!("{error}");
    assert!(error.contains("is out of memory") && error.contains("memory_limit"), "{error}");
    assert_eq!(run(&mut *lane, 1, inputs(8))[0].data.as_slice(), expected[0].data.as_slice(), "the lane goes on");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_without_room_for_a_model_says_so() {
    let gpu = Gpu::new();
    if stands_in() {
        return;
    }
    let folder = model::folder();
    let other = gpu.load(&example("mlp"), Cut::Whole);
    let mut other = (lane(&*other), other);
    let inputs = Random::new("gpu_room").inputs(other.1.signature(), |_, _| 2);
    run(&mut *other.0, 1, copy(&inputs));
    let path = products(folder.path(), 8192, 2, false);
    let device = Device::open(0).expect("it is there");
    let taken = device.free_memory().expect("it is there") - (300 << 20);
    // SAFETY: freed below, and never used.
    let memory = unsafe { result::malloc_sync(taken as usize) }.unwrap_or_else(|e| panic!("{e:?}"));
    let left = device.free_memory().expect("it is there") >> 20;
    let refused = gpu.try_load(&path, Cut::Whole).and_then(|model| model.lane().map(drop));
    let left_after = device.free_memory().expect("it is there") >> 20;
    run(&mut *other.0, 1, inputs);
    // SAFETY: allocated above.
    unsafe { result::free_sync(memory) }.unwrap_or_else(|e| panic!("{e:?}"));
    let Err(error) = refused.map_err(|error| error.to_string()) else {
        panic!("512 MiB of weights were loaded with {left} MiB free before, and {left_after} MiB after");
    };
    println!("{error}");
    assert!(error.contains("MiB") && (error.contains("free") || error.contains("out of memory")), "{error}");
    drop(gpu.load(&path, Cut::Whole).lane().unwrap_or_else(|e| panic!("{e}")));
}

/// A kernel that writes outside its memory ends all work on the GPU in its process. The test runs
/// it in another process.
#[test]
#[ignore = "needs a GPU"]
fn gpu_that_failed_is_said_to_be_lost() {
    let gpu = Gpu::new();
    if stands_in() {
        return;
    }
    let program = std::env::current_exe().expect("it runs");
    let child = Command::new(program)
        .args(["--ignored", "--exact", "--nocapture", "gpu_device::faults::gpu_child_loses_its_device"])
        .env("DOWNBEAT_GPU_CHILD", "1")
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&child.stdout) + String::from_utf8_lossy(&child.stderr);
    println!("{said}");
    assert!(child.status.success(), "{said}");
    let model = gpu.load(&example("mlp"), Cut::Whole);
    let inputs = Random::new("gpu_after_a_loss").inputs(model.signature(), |_, _| 2);
    run(&mut *lane(&*model), 1, inputs);
}

/// Runs only when [`gpu_that_failed_is_said_to_be_lost`] starts it.
#[test]
#[ignore = "needs a GPU, and is started by another test"]
fn gpu_child_loses_its_device() {
    const PTX: &std::ffi::CStr = c"
.version 7.0
.target sm_75
.address_size 64
.visible .entry nowhere() {
    .reg .b64 %a;
    .reg .b32 %v;
    mov.u64 %a, 16;
    mov.u32 %v, 1;
    st.global.u32 [%a], %v;
    ret;
}";
    if std::env::var_os("DOWNBEAT_GPU_CHILD").is_none() {
        return;
    }
    let gpu = Gpu::new();
    let model = gpu.load(&example("mlp"), Cut::Whole);
    let mut lane = lane(&*model);
    let inputs = Random::new("gpu_child").inputs(model.signature(), |_, _| 2);
    run(&mut *lane, 1, copy(&inputs));
    let device = Device::open(0).expect("it is there");
    device.free_memory().expect("which makes it this thread's");
    // SAFETY: the text ends with a zero, and the kernel has no arguments. The test wants its fault.
    unsafe {
        let module = result::module::load_data(PTX.as_ptr().cast()).expect("the driver compiles it");
        let function = result::module::get_function(module, c"nowhere".to_owned()).expect("it is there");
        let stream = std::ptr::null_mut::<sys::CUstream_st>();
        result::launch_kernel(function, (1, 1, 1), (1, 1, 1), 0, stream, &mut []).expect("it is enqueued");
        let _ = result::ctx::synchronize();
    }
    let error = lane.run(0..1, &mut State { tensors: inputs }).expect_err("the device is lost").to_string();
    println!("{error}");
    assert!(error.contains("GPU 0 is lost") && error.contains("until the server is started again"), "{error}");
    assert!(model.lane().is_err_and(|e| e.to_string().contains("GPU 0 is lost")));
}
