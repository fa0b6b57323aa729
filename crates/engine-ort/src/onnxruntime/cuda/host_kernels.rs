//! Kernels on the stand-in of the tests (`lab/cuda-stand-in`): the library's own host kernels, as
//! functions in a stream.
//!
//! The host can read and write the stand-in's device memory while its streams run. All but the
//! kernels is therefore the same as on a GPU: the order of enqueued work, its streams, and the
//! waits.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::result;
use downbeat_core::tensor::DataType;
use downbeat_engine::tensor::{Buffer, OutOfMemory, Tensor};
use ort::session::SharedSessionInner;
use ort::{AsPointer, api, sys};

use super::super::session::Names;
use super::super::value::{MemoryInfo, Value, check, element_type};
use crate::cuda::{self, DeviceAllocation, DeviceSlice, Stream};

/// A tensor in memory of the stand-in.
#[derive(Clone)]
pub(super) struct At {
    pub address: u64,
    pub len: usize,
    pub shape: Vec<usize>,
    pub datatype: DataType,
}

/// An output, and the owner of its memory.
pub(super) type Output = (At, DeviceSlice);

/// The run of a session that a function in a stream makes.
pub(super) struct Call {
    session: Arc<SharedSessionInner>,
    names: Arc<Names>,
    inputs: Vec<At>,
    outputs: Vec<At>,
}

/// Prepares a run. Its outputs get memory of their own; a run on zeros finds their sizes.
pub(super) fn prepare(
    session: &Arc<SharedSessionInner>,
    names: &Arc<Names>,
    stream: &Arc<Stream>,
    inputs: Vec<At>,
) -> Result<(Vec<Output>, Arc<Call>), String> {
    let memory = MemoryInfo::cpu()?;
    let mut zeros: Vec<Tensor> = inputs
        .iter()
        .map(|at| Ok(Tensor { datatype: at.datatype, shape: at.shape.clone(), data: Buffer::zeroed(at.len)? }))
        .collect::<Result<_, OutOfMemory>>()
        .map_err(|e| e.to_string())?;
    let values = zeros.iter_mut().map(|tensor| Value::of_memory(&memory, tensor));
    let values = values.collect::<Result<Vec<_>, _>>()?;
    let mut made = vec![ptr::null_mut(); names.outputs().len()];
    run(session, names, &values, &mut made)?;
    let mut outputs = Vec::with_capacity(made.len());
    for value in made {
        let value = Value::from_raw(value).ok_or("the run gave no value for an output")?;
        let (datatype, shape) = value.describe()?;
        let size = datatype.size().ok_or("strings have no place on a device")?;
        let len = downbeat_engine::tensor::elements(&shape)
            .and_then(|n| n.checked_mul(size))
            .ok_or("more bytes than memory")?;
        let slice = DeviceAllocation::in_stream(stream, len, "an output")?.into_slice();
        outputs.push((At { address: slice.address(), len, shape, datatype }, slice));
    }
    let ats = outputs.iter().map(|(at, _)| at.clone()).collect();
    Ok((outputs, Arc::new(Call { session: session.clone(), names: names.clone(), inputs, outputs: ats })))
}

/// The function that the stream calls.
unsafe extern "C" fn function(argument: *mut c_void) {
    // SAFETY: passed by `enqueue`, and kept until the stream is past this.
    let call = unsafe { &*argument.cast::<Call>().cast_const() };
    let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call.run()));
    if let Err(reason) = ran.unwrap_or_else(|_| Err("it panicked".into())) {
        // A failing kernel has no words for its caller either.
        tracing::error!("a kernel on the stand-in failed: {reason}");
    }
}

impl Call {
    /// Enqueues the run, or records it. The call must be kept until the run, or each launch of the
    /// recording, is over.
    pub(super) fn enqueue(self: &Arc<Self>, stream: &Stream) -> Result<(), String> {
        stream.device().bind()?;
        for (ats, writes) in [(&self.inputs, false), (&self.outputs, true)] {
            ats.iter().try_for_each(|at| cuda::touch(stream, at.address, at.len, writes))?;
        }
        let argument = Arc::as_ptr(self).cast_mut().cast::<c_void>();
        // SAFETY: the stream is alive; the caller keeps the call until the function has run.
        let enqueued = unsafe { result::stream::launch_host_function(stream.raw(), function, argument) };
        Ok(stream.device().check("running a kernel", enqueued)?)
    }

    fn run(&self) -> Result<(), String> {
        let memory = MemoryInfo::cpu()?;
        let values = |ats: &[At]| -> Result<Vec<Value>, String> {
            let value = |at: &At| {
                let (address, element) = (cuda::view(at.address)?, element_type(at.datatype));
                Value::of_device(&memory, address, at.len, &at.shape, element)
            };
            ats.iter().map(value).collect()
        };
        let (inputs, outputs) = (values(&self.inputs)?, values(&self.outputs)?);
        let mut places: Vec<*mut sys::OrtValue> = outputs.iter().map(Value::as_raw).collect();
        run(&self.session, &self.names, &inputs, &mut places)
    }
}

fn run(
    session: &SharedSessionInner,
    names: &Names,
    inputs: &[Value],
    outputs: &mut [*mut sys::OrtValue],
) -> Result<(), String> {
    // SAFETY: `Value` is a transparent pointer. There are as many names and values as stated, and
    // they are alive. Several threads at once may run a session on the host.
    check(unsafe {
        (api().Run)(
            session.ptr().cast_mut(),
            ptr::null(),
            names.inputs().as_ptr(),
            inputs.as_ptr().cast(),
            inputs.len(),
            names.outputs().as_ptr(),
            outputs.len(),
            outputs.as_mut_ptr(),
        )
    })
}
