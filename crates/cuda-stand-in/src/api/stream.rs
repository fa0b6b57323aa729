//! Streams, and functions that run in them.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{CUcontext, CUevent, CUgreenCtx, CUhostFn, CUstream};

use super::event::EXTERNAL;
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

/// A stream that the host may wait for.
fn waitable(session: &mut Session, stream: CUstream) -> Outcome<u64> {
    let handle = session.stream(stream as u64)?;
    session.refuse_in_capture(handle, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
    session.refuse_null_stream(handle)?;
    Ok(handle)
}

/// What a stream that is alive says of itself.
fn tell<T>(session: &mut Session, stream: CUstream, what: impl FnOnce(&Stream) -> T) -> Outcome<T> {
    let handle = session.stream(stream as u64)?;
    session.streams.get(&handle).map(what).ok_or(CUDA_ERROR_INVALID_HANDLE)
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
                // What was enqueued still runs when somebody waits for it.
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
        let handle = waitable(session, stream)?;
        let (last, order) = tell(session, stream, |stream| (stream.last, stream.order.clone()))?;
        session.drive(handle, last, &order)
    }

    cuStreamQuery(stream: CUstream) Context |session| {
        let handle = waitable(session, stream)?;
        let (lazy, patience) = (session.random.is_none(), session.patience);
        let Some(state) = session.streams.get_mut(&handle) else { return Err(CUDA_ERROR_INVALID_HANDLE) };
        if state.done < state.last {
            state.asked += 1;
            if !lazy || state.asked < patience {
                return Err(CUDA_ERROR_NOT_READY);
            }
        }
        state.asked = 0;
        let (last, order) = (state.last, state.order.clone());
        session.drive(handle, last, &order)
    }

    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) Context |session| {
        let stream = session.stream(stream as u64)?;
        if flags & EXTERNAL != 0 {
            session.refuse_in_capture(stream, CUDA_ERROR_NOT_SUPPORTED)?;
        }
        if session.capture_wait(stream, event as u64)? {
            return Ok(());
        }
        session.refuse_null_stream(stream)?;
        let state = session.event(event as u64)?;
        let order = state.order.clone();
        match state.record {
            Some((other, number)) => session.enqueue_wait(stream, other, number, &order),
            None => {
                // As documented: it waits for nothing, which is seldom meant.
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
        put(context, tell(session, stream, |stream| stream.context)? as CUcontext)
    }

    cuStreamGetCtx_v2(stream: CUstream, context: *mut CUcontext, green: *mut CUgreenCtx) Context |session| {
        let handle = tell(session, stream, |stream| stream.context)?;
        let is_green = session.contexts.get(&handle).is_some_and(|context| context.partition.is_some());
        put(green, if is_green { handle as CUgreenCtx } else { std::ptr::null_mut() })?;
        put(context, handle as CUcontext)
    }

    cuStreamGetGreenCtx(stream: CUstream, green: *mut CUgreenCtx) Context |session| {
        let handle = tell(session, stream, |stream| stream.context)?;
        let is_green = session.contexts.get(&handle).is_some_and(|context| context.partition.is_some());
        put(green, if is_green { handle as CUgreenCtx } else { std::ptr::null_mut() })
    }

    cuStreamGetFlags(stream: CUstream, flags: *mut c_uint) Context |session| {
        put(flags, tell(session, stream, |stream| stream.flags)?)
    }

    cuStreamGetPriority(stream: CUstream, priority: *mut c_int) Context |session| {
        put(priority, tell(session, stream, |stream| stream.priority)?)
    }

    cuStreamGetId(stream: CUstream, number: *mut c_ulonglong) Context |session| {
        let handle = session.stream(stream as u64)?;
        put(number, handle)
    }
}
