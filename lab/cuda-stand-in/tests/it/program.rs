//! A program that uses a GPU through `cudarc`, for all tests.

use cuda_stand_in::StandIn;
use cudarc::driver::sys::{CUcontext, CUevent, CUresult, CUstream};

/// Calls the driver and keeps the error's code.
macro_rules! cuda {
    ($call:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the stand-in checks handles and device addresses, and the host pointers point to
        // living values.
        let code = unsafe { cudarc::driver::sys::$call($($arg),*) };
        code.result().map_err(|error| error.0)
    }};
}
pub(crate) use cuda;

/// The stand-in with a context current to this thread, given back at the end.
pub struct Program {
    pub stand_in: StandIn,
    pub context: CUcontext,
}

impl Program {
    pub fn start() -> Self {
        Self::start_on(StandIn::lock())
    }

    pub fn start_on(stand_in: StandIn) -> Self {
        cuda!(cuInit(0)).unwrap();
        let mut context = std::ptr::null_mut();
        cuda!(cuDevicePrimaryCtxRetain(&mut context, 0)).unwrap();
        cuda!(cuCtxSetCurrent(context)).unwrap();
        Self { stand_in, context }
    }

    /// Gives the context back, and checks that the program leaked nothing and made no mistakes.
    pub fn finish(self) {
        cuda!(cuCtxSetCurrent(std::ptr::null_mut())).unwrap();
        cuda!(cuDevicePrimaryCtxRelease_v2(0)).unwrap();
        self.stand_in.assert_clean();
    }
}

pub fn allocate(len: usize) -> Result<u64, CUresult> {
    let mut address = 0;
    cuda!(cuMemAlloc_v2(&mut address, len))?;
    Ok(address)
}

pub fn stream() -> CUstream {
    let mut stream = std::ptr::null_mut();
    cuda!(cuStreamCreate(&mut stream, 1)).unwrap();
    stream
}

pub fn event() -> CUevent {
    let mut event = std::ptr::null_mut();
    cuda!(cuEventCreate(&mut event, 0)).unwrap();
    event
}

/// Pinned host memory with these bytes.
pub fn pinned(bytes: &[u8]) -> &'static mut [u8] {
    let mut start = std::ptr::null_mut();
    cuda!(cuMemHostAlloc(&mut start, bytes.len(), 0)).unwrap();
    // SAFETY: the stand-in has allocated that much; tests free the memory only after their last use
    // of it.
    let memory = unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>(), bytes.len()) };
    memory.copy_from_slice(bytes);
    memory
}

pub fn free_pinned(memory: &mut [u8]) {
    cuda!(cuMemFreeHost(memory.as_mut_ptr().cast())).unwrap();
}

pub fn upload(to: u64, from: &[u8], stream: CUstream) -> Result<(), CUresult> {
    cuda!(cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream))
}

pub fn download(to: &mut [u8], from: u64, stream: CUstream) -> Result<(), CUresult> {
    cuda!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream))
}

/// Enqueues a closure that plays a kernel.
pub fn kernel(stream: CUstream, body: impl FnOnce() + Send + 'static) {
    StandIn::kernel(stream as u64, body).unwrap();
}

/// The bytes of device memory, for a function that plays a kernel.
pub fn bytes<'a>(address: u64, len: usize) -> &'a mut [u8] {
    // SAFETY: the tests pass memory that they have allocated, and only from kernels without
    // concurrent kernels.
    unsafe { std::slice::from_raw_parts_mut(StandIn::view(address), len) }
}
