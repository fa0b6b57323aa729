//! Initialisation of the driver, its devices, and their contexts.

use std::ffi::{c_char, c_int, c_uint};

use cudarc::driver::sys::{CUcontext, CUdevice, CUuuid};

use super::put;
use crate::context;
use crate::nvml;
use crate::result::{self, CUresult::*, Outcome};
use crate::session::Session;

/// Writes text into the caller's buffer, cut to its size, with a zero at the end.
fn put_text(to: *mut c_char, room: c_int, text: &str) -> Outcome {
    let room = usize::try_from(room).ok().filter(|room| *room > 0 && !to.is_null()).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let bytes = text.bytes().take(room - 1).chain([0]);
    for (at, byte) in bytes.enumerate() {
        // SAFETY: `at` is below `room`, and the caller has promised that much.
        unsafe { to.add(at).write(byte as c_char) };
    }
    Ok(())
}

/// Returns the value of a device attribute, numbered as in `CUdevice_attribute`.
fn attribute(session: &mut Session, number: c_uint, device: CUdevice) -> Outcome<c_int> {
    let config = session.device(device)?.config.clone();
    Ok(match number {
        1 => 1024,
        10 => 32,
        13 => 1_980_000,
        16 => config.multiprocessors as c_int,
        33 => device + 1,
        36 => 2_619_000,
        37 => 5120,
        38 => 50 << 20,
        39 => 2048,
        40 => 3,
        75 => config.capability.0,
        76 => config.capability.1,
        81 => 228 << 10,
        82 => 65_536,
        97 => 227 << 10,
        106 => 32,
        111 => 1 << 10,
        // Concurrent kernels, ECC, unified addresses, priorities, managed memory, cooperative
        // launches, mapping of memory, its export, pools.
        31 | 32 | 41 | 78 | 79 | 83 | 95 | 102 | 103 | 115 => 1,
        0 => return Err(CUDA_ERROR_INVALID_VALUE),
        _ => 0,
    })
}

api! {
    cuInit(flags: c_uint) Nothing |session| {
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if let Some(code) = session.faults.init {
            return Err(code);
        }
        if session.devices.is_empty() {
            return Err(CUDA_ERROR_NO_DEVICE);
        }
        session.initialised = true;
        Ok(())
    }

    cuDriverGetVersion(version: *mut c_int) Nothing |session| { put(version, session.version) }

    cuGetErrorName(code: c_uint, name: *mut *const c_char) Nothing |_session| {
        let found = result::name(code);
        put(name, found.unwrap_or(std::ptr::null()))?;
        found.map(drop).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    cuGetErrorString(code: c_uint, text: *mut *const c_char) Nothing |_session| {
        let found = result::name(code);
        put(text, found.unwrap_or(std::ptr::null()))?;
        found.map(drop).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    cuDeviceGetCount(count: *mut c_int) Init |session| { put(count, session.devices.len() as c_int) }

    cuDeviceGet(device: *mut CUdevice, ordinal: c_int) Init |session| {
        session.device(ordinal)?;
        put(device, ordinal)
    }

    cuDeviceGetName(name: *mut c_char, room: c_int, device: CUdevice) Init |session| {
        let text = session.device(device)?.config.name.clone();
        put_text(name, room, &text)
    }

    cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) Init |session| {
        session.device(device)?;
        put(uuid, CUuuid { bytes: nvml::uuid(device).map(|byte| byte as c_char) })
    }

    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) Init |session| {
        put(bytes, session.device(device)?.config.memory as usize)
    }

    cuDeviceGetAttribute(value: *mut c_int, number: c_uint, device: CUdevice) Init |session| {
        put(value, attribute(session, number, device)?)
    }

    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) Init |session| {
        let handle = session.retain_primary(device)?;
        put(context, handle as CUcontext)
    }

    cuDevicePrimaryCtxRelease_v2(device: CUdevice) Init |session| { session.release_primary(device) }

    cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut c_uint, active: *mut c_int) Init |session| {
        put(active, session.device(device)?.primary.is_some() as c_int)?;
        put(flags, 0)
    }

    cuCtxSetCurrent(context: CUcontext) Init |session| {
        let handle = context as u64;
        if handle != 0 && !session.contexts.contains_key(&handle) {
            let what = format!("{} context {handle:#x} is made current", session.fate(handle));
            return session.wrong(CUDA_ERROR_INVALID_CONTEXT, what);
        }
        context::set_current(handle);
        Ok(())
    }

    cuCtxGetCurrent(context: *mut CUcontext) Init |_session| { put(context, context::current() as CUcontext) }

    cuCtxPushCurrent_v2(context: CUcontext) Init |session| {
        if !session.contexts.contains_key(&(context as u64)) {
            return session.wrong(CUDA_ERROR_INVALID_CONTEXT, format!("context {:#x}, not alive, is pushed", context as u64));
        }
        context::push_current(context as u64);
        Ok(())
    }

    cuCtxPopCurrent_v2(context: *mut CUcontext) Init |_session| {
        let popped = context::pop_current().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        if context.is_null() { Ok(()) } else { put(context, popped as CUcontext) }
    }

    cuCtxGetDevice(device: *mut CUdevice) Context |session| { put(device, session.device) }

    cuCtxSynchronize() Context |session| {
        let device = session.device;
        session.refuse_on_device(device)?;
        session.drive_device(device)
    }

    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) Context |_session| {
        if !least.is_null() {
            put(least, 0)?;
        }
        if greatest.is_null() { Ok(()) } else { put(greatest, -5) }
    }
}
