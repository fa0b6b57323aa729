//! Copies and fills.

use std::ffi::{c_uchar, c_void};

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use crate::address;
use crate::result::{CUresult::*, Outcome};
use crate::session::Session;
use crate::stream::{Source, What};

/// The moment when a call returns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Returns {
    WhenDone,
    AtOnce,
}

/// Checks the device memory of a copy; an unusable range fails the call.
fn device_range(session: &mut Session, at: u64, len: usize, what: &str) -> Outcome {
    match session.memory.is_usable(at, len as u64, true) {
        true => Ok(()),
        false => session.wrong(CUDA_ERROR_INVALID_VALUE, format!("{what} {len} bytes at {at:#x}, not device memory")),
    }
}

/// Returns true if host memory is pinned; a device address or null is an error.
fn host_range(session: &mut Session, at: usize, len: usize, what: &str) -> Outcome<bool> {
    if at == 0 || !address::view(at as u64).is_null() {
        return session.wrong(CUDA_ERROR_INVALID_VALUE, format!("{what} {len} bytes at {at:#x}, not host memory"));
    }
    let pinned = session.host.is_pinned(at, len);
    if pinned.is_err() {
        session.mistake(format!("{what} {len} bytes at {at:#x}, of which only a part is pinned"));
    }
    pinned
}

/// Refuses copies of pageable memory in a capture: its contents at the launch would be unknown.
fn refuse_pageable(session: &mut Session, stream: CUstream) -> Outcome {
    let stream = session.stream(stream as u64)?;
    session.refuse_in_capture(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

fn submit(session: &mut Session, stream: CUstream, what: What, returns: Returns) -> Outcome {
    let stream = session.stream(stream as u64)?;
    let number = session.enqueue(stream, what)?;
    if returns == Returns::AtOnce {
        return Ok(());
    }
    let order = session.streams.get(&stream).map(|stream| stream.order.clone()).unwrap_or_default();
    session.drive(stream, number, &order)
}

fn upload(session: &mut Session, to: u64, from: usize, len: usize, stream: CUstream, returns: Returns) -> Outcome {
    if len == 0 {
        return Ok(());
    }
    device_range(session, to, len, "an upload writes")?;
    let from = if host_range(session, from, len, "an upload reads")? {
        Source::Pinned(from)
    } else {
        refuse_pageable(session, stream)?;
        *session.calls.entry("pageable upload").or_default() += 1;
        // SAFETY: the caller has promised `len` readable bytes here; they are read inside the call,
        // as the driver stages pageable memory.
        Source::Staged(unsafe { std::slice::from_raw_parts(from as *const u8, len) }.to_vec())
    };
    submit(session, stream, What::Upload { to, from, len: len as u64 }, returns)
}

fn download(session: &mut Session, to: usize, from: u64, len: usize, stream: CUstream, returns: Returns) -> Outcome {
    if len == 0 {
        return Ok(());
    }
    device_range(session, from, len, "a download reads")?;
    let pinned = host_range(session, to, len, "a download writes")?;
    // The driver copies to pageable memory through a buffer of its own, and returns after the copy.
    let returns = if pinned { returns } else { Returns::WhenDone };
    if !pinned {
        refuse_pageable(session, stream)?;
        *session.calls.entry("pageable download").or_default() += 1;
    }
    submit(session, stream, What::Download { to, pinned, from, len: len as u64 }, returns)
}

fn within(session: &mut Session, to: u64, from: u64, len: usize, stream: CUstream, returns: Returns) -> Outcome {
    if len == 0 {
        return Ok(());
    }
    device_range(session, to, len, "a copy writes")?;
    device_range(session, from, len, "a copy reads")?;
    submit(session, stream, What::Copy { to, from, len: len as u64 }, returns)
}

/// Enqueues a copy whose direction follows from its addresses.
fn unified(session: &mut Session, to: u64, from: u64, len: usize, stream: CUstream, returns: Returns) -> Outcome {
    match (address::view(to).is_null(), address::view(from).is_null()) {
        (false, false) => within(session, to, from, len, stream, returns),
        (false, true) => upload(session, to, from as usize, len, stream, returns),
        (true, false) => download(session, to as usize, from, len, stream, returns),
        (true, true) => session.wrong(CUDA_ERROR_NOT_SUPPORTED, "the stand-in does not copy from host to host"),
    }
}

fn set(session: &mut Session, to: u64, value: u8, len: usize, stream: CUstream) -> Outcome {
    if len == 0 {
        return Ok(());
    }
    device_range(session, to, len, "a fill writes")?;
    submit(session, stream, What::Set { to, value, len: len as u64 }, Returns::AtOnce)
}

const NULL: CUstream = std::ptr::null_mut();

api! {
    cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, len: usize) Context |session| {
        upload(session, to, from as usize, len, NULL, Returns::WhenDone)
    }

    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, len: usize, stream: CUstream) Context |session| {
        upload(session, to, from as usize, len, stream, Returns::AtOnce)
    }

    cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, len: usize) Context |session| {
        download(session, to as usize, from, len, NULL, Returns::WhenDone)
    }

    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, len: usize, stream: CUstream) Context |session| {
        download(session, to as usize, from, len, stream, Returns::AtOnce)
    }

    cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, len: usize) Context |session| {
        // Asynchronous to the host, as documented: it is only ordered in the null stream.
        within(session, to, from, len, NULL, Returns::AtOnce)
    }

    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream) Context |session| {
        within(session, to, from, len, stream, Returns::AtOnce)
    }

    cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, len: usize) Context |session| {
        unified(session, to, from, len, NULL, Returns::WhenDone)
    }

    cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream) Context |session| {
        unified(session, to, from, len, stream, Returns::AtOnce)
    }

    cuMemsetD8_v2(to: CUdeviceptr, value: c_uchar, count: usize) Context |session| {
        // Asynchronous to the host, as documented for device memory.
        set(session, to, value, count, NULL)
    }

    cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream) Context |session| {
        set(session, to, value, count, stream)
    }
}
