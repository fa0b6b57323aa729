//! A kernel of our own, for questions to the device itself rather than to a library, and a
//! recording of it as a graph.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{DriverError, result};
use downbeat_engine_ort::cuda::{Device, Stream};

use crate::Outcome;

/// `stay(to, ticks)`: each block writes at its place of `to` which unit it runs on, and stays there
/// for so many ticks of the unit's clock.
const PTX: &CStr = c"
.version 7.0
.target sm_75
.address_size 64
.visible .entry stay(.param .u64 stay_to, .param .u64 stay_ticks) {
    .reg .b32 %unit, %block;
    .reg .b64 %to, %at, %ticks, %begin, %now;
    .reg .pred %early;
    ld.param.u64 %to, [stay_to];
    ld.param.u64 %ticks, [stay_ticks];
    cvta.to.global.u64 %to, %to;
    mov.u32 %unit, %smid;
    mov.u32 %block, %ctaid.x;
    mul.wide.u32 %at, %block, 4;
    add.u64 %at, %to, %at;
    st.global.u32 [%at], %unit;
    mov.u64 %begin, %clock64;
again:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %early, %now, %ticks;
    @%early bra again;
    ret;
}";

/// Threads of a block: two fill a unit.
const THREADS: u32 = 1024;

pub struct Kernel {
    module: sys::CUmodule,
    stay: sys::CUfunction,
    device: Arc<Device>,
}

impl Kernel {
    /// Loads the kernel, which the driver compiles for the device.
    pub fn load(device: &Arc<Device>) -> Outcome<Kernel> {
        // The call makes `device` this thread's device.
        device.free_memory()?;
        // SAFETY: the text ends with a zero.
        let module = unsafe { result::module::load_data(PTX.as_ptr().cast()) };
        let module = module.map_err(|error| format!("the driver runs no kernel of our own: {error}"))?;
        // SAFETY: the module is loaded.
        let stay = unsafe { result::module::get_function(module, c"stay".to_owned()) };
        match stay {
            Ok(stay) => Ok(Kernel { module, stay, device: device.clone() }),
            Err(error) => Err(error.into()),
        }
    }

    /// Enqueues the kernel, with a block for each of `places`. The places must outlive the kernel.
    pub fn stay(&self, stream: &Stream, places: &Places, ticks: u64) -> Result<(), DriverError> {
        let (mut to, mut ticks) = (places.address, ticks);
        let mut parameters = [(&raw mut to).cast::<c_void>(), (&raw mut ticks).cast()];
        // SAFETY: two parameters of 64 bits, as the kernel has; they are read before the call
        // returns; the caller keeps the memory.
        unsafe {
            result::launch_kernel(self.stay, (places.blocks, 1, 1), (THREADS, 1, 1), 0, stream.raw(), &mut parameters)
        }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let _ = self.device.free_memory();
        // SAFETY: loaded by `load`, unloaded once.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// Memory of the device. Each block writes the unit on which it ran.
pub struct Places {
    address: sys::CUdeviceptr,
    blocks: u32,
}

impl Places {
    pub fn new(blocks: u32) -> Result<Places, DriverError> {
        // SAFETY: freed when dropped.
        Ok(Places { address: unsafe { result::malloc_sync(blocks as usize * 4) }?, blocks })
    }

    /// The numbers that the finished blocks wrote.
    pub fn read(&self) -> Result<Vec<u32>, DriverError> {
        let mut units = vec![u32::MAX; self.blocks as usize];
        // SAFETY: both have room for so many.
        unsafe { result::memcpy_dtoh_sync(&mut units, self.address) }?;
        Ok(units)
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        // SAFETY: taken by `new`, freed once.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// A recording of a stream's work.
pub struct Replay(sys::CUgraphExec);

impl Replay {
    pub fn record(stream: &Stream, enqueue: impl FnOnce() -> Result<(), DriverError>) -> Result<Replay, DriverError> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, the graph used before it is destroyed.
        unsafe {
            result::stream::begin_capture(stream.raw(), mode)?;
            let enqueued = enqueue();
            let graph = result::stream::end_capture(stream.raw())?;
            let replay = enqueued.and_then(|()| result::graph::instantiate(graph, CUgraphInstantiate_flags(0)));
            result::graph::destroy(graph)?;
            Ok(Replay(replay?))
        }
    }

    pub fn launch(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: both are alive.
        unsafe { result::graph::launch(self.0, stream.raw()) }
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        // SAFETY: made by `record`, destroyed once.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
