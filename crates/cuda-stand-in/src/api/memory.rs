//! Allocating memory, on the device and on the host, and asking what an address is.

use std::ffi::{c_char, c_int, c_uint, c_void};

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUipcMemHandle, CUstream};

use super::{get, put};
use crate::result::{CUresult::*, Outcome};
use crate::session::Session;
use crate::stream::What;

/// `CU_MEMORYTYPE_HOST`, `CU_MEMORYTYPE_DEVICE`.
const HOST: c_uint = 1;
const DEVICE: c_uint = 2;

/// What a handle of memory begins with; its address stands over the first of it.
const IPC_HANDLE: [c_char; 64] = [0x5a; 64];

/// What is asked about an address, numbered as in `CUpointer_attribute`.
fn attribute(session: &mut Session, data: *mut c_void, number: c_uint, address: CUdeviceptr) -> Outcome {
    let on_device = session.memory.region(address).map(|(start, region)| (start, region.len, region.device));
    let pinned = session.host.ranges.range(..=address as usize).next_back();
    let on_host = pinned.filter(|(start, pinned)| (address as usize) < *start + pinned.len);
    let on_host = on_host.map(|(start, pinned)| (*start as u64, pinned.len as u64));
    let (start, len) = on_device.map(|(start, len, _)| (start, len)).or(on_host).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    match number {
        1 => {
            let context = on_device.and_then(|(_, _, device)| session.device(device).ok()?.primary);
            put(data.cast(), context.unwrap_or(0) as CUcontext)
        }
        2 => put(data.cast(), if on_device.is_some() { DEVICE } else { HOST }),
        3 => put(data.cast(), address),
        4 if on_device.is_none() => put(data.cast(), address),
        8 => put(data.cast(), false),
        9 => put(data.cast(), on_device.map_or(0, |(_, _, device)| device)),
        11 => put(data.cast(), start),
        12 => put(data.cast(), len as usize),
        13 => put(data.cast(), true),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn allocate_host(session: &mut Session, to: *mut *mut c_void, len: usize) -> Outcome {
    session.faults.allocation(len as u64)?;
    let start = session.host.allocate(len)?;
    put(to, start as *mut c_void)
}

api! {
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) Context |session| {
        let device = session.device;
        let device = session.device(device)?;
        let (memory, used) = (device.config.memory, device.used);
        put(free, (memory - used) as usize)?;
        put(total, memory as usize)
    }

    cuMemAlloc_v2(address: *mut CUdeviceptr, len: usize) Context |session| {
        let device = session.device;
        let start = session.allocate(device, len as u64)?;
        put(address, start)
    }

    cuMemFree_v2(address: CUdeviceptr) Release |session| {
        if address != 0 {
            session.freeable(address, "cuMemFree")?;
            let len = session.memory.regions.get(&address).map_or(0, |region| region.len);
            session.check_gone(address, len, "cuMemFree");
            session.take_of_graph(address, false);
            session.free(address);
        }
        Ok(())
    }

    cuMemAllocAsync(address: *mut CUdeviceptr, len: usize, stream: CUstream) Context |session| {
        let stream = session.stream(stream as u64)?;
        let device = session.device;
        if let Some(capture) = session.capture_of(stream) {
            // As documented: a node of the graph, which owns the memory.
            let start = session.capture_allocation(capture, stream, device, len as u64)?;
            return put(address, start);
        }
        let start = session.allocate(device, len as u64)?;
        if let Some(region) = session.memory.regions.get_mut(&start) {
            region.coming = true;
        }
        session.enqueue(stream, What::Allocate { start })?;
        put(address, start)
    }

    cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) Context |session| {
        let stream = session.stream(stream as u64)?;
        if let Some(capture) = session.capture_of(stream) {
            return session.capture_free(capture, stream, address);
        }
        session.freeable(address, "cuMemFreeAsync")?;
        if session.memory.regions.get(&address).is_some_and(|region| region.of_graph.is_some()) {
            session.take_of_graph(address, false);
        } else if let Some(region) = session.memory.regions.get_mut(&address) {
            region.leaving = true;
        }
        session.enqueue(stream, What::Free { start: address }).map(drop)
    }

    cuMemHostAlloc(to: *mut *mut c_void, len: usize, _flags: c_uint) Context |session| { allocate_host(session, to, len) }

    cuMemAllocHost_v2(to: *mut *mut c_void, len: usize) Context |session| { allocate_host(session, to, len) }

    cuMemFreeHost(start: *mut c_void) Release |session| {
        session.check_host_gone(start, "cuMemFreeHost");
        if session.host.free(start as usize) {
            return Ok(());
        }
        let what = format!("cuMemFreeHost of {start:?}, which the driver did not allocate (freed twice?)");
        session.wrong(CUDA_ERROR_INVALID_VALUE, what)
    }

    cuMemHostRegister_v2(start: *mut c_void, len: usize, _flags: c_uint) Context |session| {
        session.host.register(start as usize, len)
    }

    cuMemHostUnregister(start: *mut c_void) Release |session| {
        session.check_host_gone(start, "cuMemHostUnregister");
        if session.host.unregister(start as usize) {
            return Ok(());
        }
        session.wrong(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, format!("{start:?} is unregistered but was not registered"))
    }

    cuMemHostGetDevicePointer_v2(address: *mut CUdeviceptr, start: *mut c_void, _flags: c_uint) Context |session| {
        match session.host.is_pinned(start as usize, 1) {
            Ok(true) => put(address, start as u64),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    cuMemHostGetFlags(flags: *mut c_uint, start: *mut c_void) Context |session| {
        match session.host.is_pinned(start as usize, 1) {
            Ok(true) => put(flags, 0),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    cuMemGetAddressRange_v2(base: *mut CUdeviceptr, len: *mut usize, address: CUdeviceptr) Context |session| {
        let found = session.memory.region(address).map(|(start, region)| (start, region.len));
        let (start, bytes) = found.ok_or(CUDA_ERROR_NOT_FOUND)?;
        if !base.is_null() {
            put(base, start)?;
        }
        if len.is_null() { Ok(()) } else { put(len, bytes as usize) }
    }

    cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: CUdeviceptr) Context |session| {
        if !session.memory.regions.contains_key(&address) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut reserved = IPC_HANDLE;
        for (to, byte) in reserved.iter_mut().zip(address.to_le_bytes()) {
            *to = byte as c_char;
        }
        put(handle, CUipcMemHandle { reserved })
    }

    // Also in the process whose memory it is, where a driver refuses; and at the same address, where a driver maps it anew.
    cuIpcOpenMemHandle_v2(address: *mut CUdeviceptr, handle: CUipcMemHandle, _flags: c_uint) Context |session| {
        let mut bytes = [0; 8];
        bytes.iter_mut().zip(handle.reserved).for_each(|(to, byte)| *to = byte as u8);
        let start = u64::from_le_bytes(bytes);
        if handle.reserved[8..] != IPC_HANDLE[8..] || !session.memory.regions.contains_key(&start) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        *session.memory.opened.entry(start).or_default() += 1;
        put(address, start)
    }

    cuIpcCloseMemHandle(address: CUdeviceptr) Release |session| {
        match session.memory.opened.get_mut(&address) {
            Some(1) => drop(session.memory.opened.remove(&address)),
            Some(times) => *times -= 1,
            None => {
                let what = format!("cuIpcCloseMemHandle of {address:#x}, which is not open (closed twice?)");
                return session.wrong(CUDA_ERROR_INVALID_VALUE, what);
            }
        }
        Ok(())
    }

    cuPointerGetAttribute(data: *mut c_void, number: c_uint, address: CUdeviceptr) Context |session| {
        attribute(session, data, number, address)
    }

    cuPointerGetAttributes(
        count: c_uint,
        numbers: *mut c_uint,
        data: *mut *mut c_void,
        address: CUdeviceptr,
    ) Context |session| {
        for index in 0..count as usize {
            let (number, to) = (get(numbers.wrapping_add(index))?, get(data.wrapping_add(index))?);
            if attribute(session, to, number, address).is_err() {
                // As documented for memory the driver does not know: the default of each attribute, all of which are zero here. The
                // device's ordinal would be -2.
                match number {
                    1 | 3 | 4 | 11 | 12 => put(to.cast(), 0_u64)?,
                    8 | 13 => put(to.cast(), false)?,
                    9 => put(to.cast::<c_int>(), -2)?,
                    _ => put(to.cast(), 0_u32)?,
                }
            }
        }
        Ok(())
    }
}
