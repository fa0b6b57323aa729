//! Runs of a session on a device's memory.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use downbeat_engine::stop;
use ort::session::{RunOptions, Session, SharedSessionInner};
use ort::{AsPointer, api, sys};

use super::super::runtime::EndableRun;
use super::super::session::Names;
use super::super::value::{MemoryInfo, Value, check};

/// A session with the inputs and outputs of its next run. Used by one thread at a time.
pub(super) struct Binding {
    raw: NonNull<sys::OrtIoBinding>,
    session: Arc<SharedSessionInner>,
    names: Arc<Names>,
    /// Whether each output goes to the host instead of the device.
    on_host: Vec<bool>,
    options: Arc<EndableRun>,
}

// SAFETY: a binding and its session may move to another thread. Only one thread at a time runs a
// session on a device.
unsafe impl Send for Binding {}

impl Drop for Binding {
    fn drop(&mut self) {
        // SAFETY: made by `CreateIoBinding`, released once, before the session.
        unsafe { (api().ReleaseIoBinding)(self.raw.as_ptr()) };
    }
}

impl Binding {
    /// `on_host`: whether each output is left in plain memory.
    pub(super) fn new(session: &Session, names: &Arc<Names>, on_host: Vec<bool>) -> Result<Binding, String> {
        let session = session.inner();
        let mut raw = ptr::null_mut();
        // SAFETY: the session is alive; `raw` is written if the call succeeds.
        check(unsafe { (api().CreateIoBinding)(session.ptr().cast_mut(), &raw mut raw) })?;
        let raw = NonNull::new(raw).ok_or("no binding made")?;
        let mut options = RunOptions::new().map_err(|e| e.message().to_owned())?;
        // The caller waits for an event, and enqueues more work before that.
        options.disable_device_sync().map_err(|e| e.message().to_owned())?;
        Ok(Binding { raw, session, names: names.clone(), on_host, options: Arc::new(EndableRun(options)) })
    }

    /// Enqueues a run on these inputs, in the order of the names, in the session's stream. The
    /// outputs are written when that work is done.
    pub(super) fn run(
        &mut self,
        inputs: &[Value],
        device: &MemoryInfo,
        host: &MemoryInfo,
    ) -> Result<Vec<Value>, String> {
        let _call = stop::run(Some(self.options.clone()))?;
        let binding = self.raw.as_ptr();
        // SAFETY: names and values are alive, and as many as the session has. The library keeps
        // bound values until they are cleared.
        unsafe {
            (api().ClearBoundInputs)(binding);
            (api().ClearBoundOutputs)(binding);
            for (name, value) in self.names.inputs().iter().zip(inputs) {
                check((api().BindInput)(binding, *name, value.as_raw()))?;
            }
            for (name, on_host) in self.names.outputs().iter().zip(&self.on_host) {
                let place = if *on_host { host } else { device };
                check((api().BindOutputToDevice)(binding, *name, place.as_raw()))?;
            }
            let ran = check((api().RunWithBinding)(self.session.ptr().cast_mut(), self.options.0.ptr(), binding));
            let outputs = ran.and_then(|()| self.outputs());
            // The binding keeps references to the outputs, and the next run would write to them.
            (api().ClearBoundInputs)(binding);
            (api().ClearBoundOutputs)(binding);
            outputs
        }
    }

    /// The outputs of the run that was just enqueued, in the order of the names.
    fn outputs(&self) -> Result<Vec<Value>, String> {
        let (mut allocator, mut array, mut count) = (ptr::null_mut(), ptr::null_mut(), 0);
        // SAFETY: the default allocator is the library's and lives as long. The array is written if
        // the call succeeds, and has `count` values. The caller owns each value, and gives the
        // array back to its allocator.
        let values = unsafe {
            check((api().GetAllocatorWithDefaultOptions)(&raw mut allocator))?;
            check((api().GetBoundOutputValues)(self.raw.as_ptr(), allocator, &raw mut array, &raw mut count))?;
            if array.is_null() {
                return Err("the run gave no outputs".into());
            }
            let values: Vec<Option<Value>> =
                std::slice::from_raw_parts(array, count).iter().map(|value| Value::from_raw(*value)).collect();
            check((api().AllocatorFree)(allocator, array.cast::<c_void>()))?;
            values
        };
        values.into_iter().map(|value| value.ok_or_else(|| "the run gave no value for an output".into())).collect()
    }
}
