//! Runs of a session on memory of a device.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ort::session::{RunOptions, Session, SharedSessionInner};
use ort::{AsPointer, api, sys};

use super::super::session::Names;
use super::super::value::{MemoryInfo, Value, check};
use crate::stop;

/// A session with what its next run takes and gives. Used by one thread at a time.
pub(super) struct Binding {
    raw: NonNull<sys::OrtIoBinding>,
    session: Arc<SharedSessionInner>,
    names: Arc<Names>,
    /// Where each output is to be: on the device, or on the host.
    on_host: Vec<bool>,
    options: Arc<RunOptions>,
}

// SAFETY: a binding and its session may be moved to another thread; sessions on a device are run by one thread at a time, as here.
unsafe impl Send for Binding {}

impl Drop for Binding {
    fn drop(&mut self) {
        // SAFETY: made by `CreateIoBinding`, released once, before the session.
        unsafe { (api().ReleaseIoBinding)(self.raw.as_ptr()) };
    }
}

impl Binding {
    /// `on_host`: which outputs are left in plain memory.
    pub(super) fn new(session: &Session, names: &Arc<Names>, on_host: Vec<bool>) -> Result<Binding, String> {
        let session = session.inner();
        let mut raw = ptr::null_mut();
        // SAFETY: the session is alive; `raw` is written if the call succeeds.
        check(unsafe { (api().CreateIoBinding)(session.ptr().cast_mut(), &raw mut raw) })?;
        let raw = NonNull::new(raw).ok_or("no binding made")?;
        let mut options = RunOptions::new().map_err(|e| e.message().to_owned())?;
        // Whoever runs it waits by an event, and before that enqueues more.
        options.disable_device_sync().map_err(|e| e.message().to_owned())?;
        Ok(Binding { raw, session, names: names.clone(), on_host, options: Arc::new(options) })
    }

    /// Enqueues a run on these inputs, in the order of the names, in the stream that the session was made with. The outputs are written when that is done.
    pub(super) fn run(
        &mut self,
        inputs: &[Value],
        device: &MemoryInfo,
        host: &MemoryInfo,
    ) -> Result<Vec<Value>, String> {
        let _call = stop::run(Some(self.options.clone()))?;
        let binding = self.raw.as_ptr();
        // SAFETY: names and values are alive, and as many as the session has; what is bound is the library's own until it is cleared.
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
            let ran = check((api().RunWithBinding)(self.session.ptr().cast_mut(), self.options.ptr(), binding));
            let outputs = ran.and_then(|()| self.outputs());
            // What the library keeps of them would otherwise be written by the next run.
            (api().ClearBoundInputs)(binding);
            (api().ClearBoundOutputs)(binding);
            outputs
        }
    }

    /// The values of the run that was just enqueued, in the order of the names.
    fn outputs(&self) -> Result<Vec<Value>, String> {
        let (mut allocator, mut array, mut count) = (ptr::null_mut(), ptr::null_mut(), 0);
        // SAFETY: the default allocator is the library's and lives as long; the array is written if the call succeeds, has `count` values, each owned by
        // whoever asked, and is given back to its allocator.
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
