//! Events.

use std::ffi::c_uint;

use cudarc::driver::sys::{CUevent, CUstream};

use super::put;
use crate::ordering::Clock;
use crate::result::{CUresult::*, Outcome};
use crate::session::Session;
use crate::stream::{Event, NO_TIMING, What};

fn record(session: &mut Session, event: CUevent, stream: CUstream) -> Outcome {
    let stream = session.stream(stream as u64)?;
    let device = session.streams.get(&stream).map(|stream| stream.device);
    let handle = event as u64;
    if device != Some(session.event(handle)?.device) {
        return session
            .wrong(CUDA_ERROR_INVALID_HANDLE, format!("event {handle:#x} is recorded on another device's stream"));
    }
    if let Some(capture) = session.capture_of(stream) {
        return session.capture_event(capture, stream, handle);
    }
    let number = session.enqueue(stream, What::Record { event: handle })?;
    let order = session.streams.get(&stream).map(|stream| stream.order.clone()).unwrap_or_default();
    let event = session.event(handle)?;
    event.order = order;
    (event.record, event.captured) = (Some((stream, number)), None);
    (event.time, event.asked) = (None, 0);
    Ok(())
}

fn elapsed(session: &mut Session, to: *mut f32, start: CUevent, end: CUevent) -> Outcome {
    let mut times = [0; 2];
    for (time, event) in times.iter_mut().zip([start, end]) {
        session.refuse_captured(event as u64)?;
        let event = session.event(event as u64)?;
        if event.flags & NO_TIMING != 0 || event.record.is_none() {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        *time = event.time.ok_or(CUDA_ERROR_NOT_READY)?;
    }
    put(to, (times[1] as f64 - times[0] as f64) as f32 / 1e6)
}

api! {
    cuEventCreate(event: *mut CUevent, flags: c_uint) Context |session| {
        if flags & !7 != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (handle, device) = (session.handle(), session.device);
        let order = Clock::default();
        session.events.insert(handle, Event { device, flags, record: None, captured: None, order, time: None, asked: 0 });
        put(event, handle as CUevent)
    }

    cuEventDestroy_v2(event: CUevent) Init |session| {
        let device = session.event(event as u64)?.device;
        session.events.remove(&(event as u64));
        session.device(device)?.failed.map_or(Ok(()), |(code, _)| Err(code))
    }

    cuEventRecord(event: CUevent, stream: CUstream) Context |session| { record(session, event, stream) }

    cuEventQuery(event: CUevent) Context |session| {
        session.refuse_captured(event as u64)?;
        let (lazy, patience) = (session.random.is_none(), session.patience);
        let state = session.event(event as u64)?;
        let (Some((stream, number)), order) = (state.record, state.order.clone()) else { return Ok(()) };
        if !session.is_done(stream, number) {
            let state = session.event(event as u64)?;
            state.asked += 1;
            if !lazy || state.asked < patience {
                return Err(CUDA_ERROR_NOT_READY);
            }
        }
        session.drive(stream, number, &order)
    }

    cuEventSynchronize(event: CUevent) Context |session| {
        session.refuse_captured(event as u64)?;
        let state = session.event(event as u64)?;
        match (state.record, state.order.clone()) {
            (Some((stream, number)), order) => session.drive(stream, number, &order),
            (None, _) => Ok(()),
        }
    }

    cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) Context |session| {
        elapsed(session, milliseconds, start, end)
    }

    cuEventElapsedTime_v2(milliseconds: *mut f32, start: CUevent, end: CUevent) Context |session| {
        elapsed(session, milliseconds, start, end)
    }
}
