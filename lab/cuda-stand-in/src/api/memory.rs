//! Allocates memory on the device and on the host, and answers questions about addresses.

use std::ffi::{c_char, c_uint, c_void};

use cudarc::driver::sys::{CUdeviceptr, CUipcMemHandle, CUstream};

use super::put;
use crate::result::{CUresult::*, Outcome};
use crate::session::Session;
use crate::stream::What;

/// `CU_MEMORYTYPE_HOST`, `CU_MEMORYTYPE_DEVICE`.
const HOST: c_uint = 1;
const DEVICE: c_uint = 2;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
const MEMORY_TYPE: c_uint = 2;

/// The beginning of a memory handle; the address is written over its first bytes.
const IPC_HANDLE: [c_char; 64] = [0x5a; 64];

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
            // As documented, the allocation becomes a node of the graph, which owns the memory.
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

    // A driver refuses to open a handle in the owner's process, and maps the memory at a new
    // address. The stand-in opens it there too, at the same address.
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
        if number != MEMORY_TYPE {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let is_pinned = || session.host.is_pinned(address as usize, 1) == Ok(true);
        match session.memory.region(address) {
            Some(_) => put(data.cast(), DEVICE),
            None if is_pinned() => put(data.cast(), HOST),
            None => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}
