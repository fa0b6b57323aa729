//! Streams, and functions that run in them.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUcontext, CUevent, CUhostFn, CUstream};

use super::put;
use crate::result::{CUresult::*, Outcome};
use crate::session::Session;
use crate::stream::{NON_BLOCKING, Stream, What};

fn create(session: &mut Session, to: *mut CUstream, flags: c_uint, priority: c_int) -> Outcome {
    if flags & !NON_BLOCKING != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let handle = session.handle();
    // As documented, a priority outside of the range is cut to it.
    let stream = Stream::new(session.device, session.context, flags, priority.clamp(-5, 0), false);
    session.streams.insert(handle, stream);
    put(to, handle as CUstream)
}

api! {
    cuStreamCreate(stream: *mut CUstream, flags: c_uint) Context |session| { create(session, stream, flags, 0) }

    cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int) Context |session| {
        create(session, stream, flags, priority)
    }

    cuStreamDestroy_v2(handle: CUstream) Init |session| {
        let handle = handle as u64;
        if let Some(capture) = session.capture_of(handle) {
            session.invalidate(capture);
            session.mistake(format!("stream {handle:#x} is destroyed while it captures"));
        }
        match session.streams.get_mut(&handle) {
            Some(stream) if !stream.destroyed && !stream.own => {
                // Enqueued operations still run when a thread waits for them.
                stream.destroyed = true;
                let device = stream.device;
                session.device(device)?.failed.map_or(Ok(()), |(code, _)| Err(code))
            }
            _ => {
                let what = format!("stream {handle:#x} is destroyed but not alive (destroyed twice?)");
                session.wrong(CUDA_ERROR_INVALID_HANDLE, what)
            }
        }
    }

    cuStreamSynchronize(stream: CUstream) Context |session| {
        let handle = session.stream(stream as u64)?;
        session.refuse_in_capture(handle, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
        session.refuse_null_stream(handle)?;
        let stream = session.streams.get(&handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let (last, order) = (stream.last, stream.order.clone());
        session.drive(handle, last, &order)
    }

    cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) Context |session| {
        let stream = session.stream(stream as u64)?;
        if session.capture_wait(stream, event as u64)? {
            return Ok(());
        }
        session.refuse_null_stream(stream)?;
        let state = session.event(event as u64)?;
        let order = state.order.clone();
        match state.record {
            Some((other, number)) => session.enqueue_wait(stream, other, number, &order),
            None => {
                // As documented, such a wait waits for nothing, which is seldom intended.
                session.mistake(format!("stream {stream:#x} is told to wait for event {event:?}, which was never recorded"));
                Ok(())
            }
        }
    }

    cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void) Context |session| {
        if function.is_none() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let stream = session.stream(stream as u64)?;
        session.enqueue(stream, What::Kernel { function, data }).map(drop)
    }

    cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) Context |session| {
        let handle = session.stream(stream as u64)?;
        let stream = session.streams.get(&handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        put(context, stream.context as CUcontext)
    }
}
