//! Addresses and memory apart from each other: the same memory can be seen at two addresses.

use std::ffi::{c_int, c_uint, c_ulonglong};

use cudarc::driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationProp, CUmemAllocationType,
    CUmemGenericAllocationHandle, CUmemLocationType,
};

use super::{get, put};
use crate::address::{self, GRAIN};
use crate::memory::{Block, Region};
use crate::result::{CUresult::*, Outcome};
use crate::session::Session;

/// A size that is a positive multiple of the grain.
fn grained(session: &mut Session, len: usize, what: &str) -> Outcome {
    if len == 0 || !len.is_multiple_of(GRAIN) {
        return session.wrong(CUDA_ERROR_INVALID_VALUE, format!("{what} of {len} bytes, not a multiple of {GRAIN}"));
    }
    Ok(())
}

/// The device of a property, which must ask for pinned device memory.
fn device_of(session: &mut Session, property: *const CUmemAllocationProp) -> Outcome<c_int> {
    let property = get(property)?;
    if property.type_ != CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED
        || property.location.type_ != CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE
    {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    session.device(property.location.id)?;
    Ok(property.location.id)
}

/// The starts of the mappings that cover a range exactly.
fn mappings(session: &mut Session, start: u64, len: u64, what: &str) -> Outcome<Vec<u64>> {
    let mut found = Vec::new();
    let mut at = start;
    while at < start + len {
        match session.memory.regions.get(&at) {
            Some(region) if region.block.is_some() && at + region.len <= start + len => {
                found.push(at);
                at += region.len;
            }
            _ => {
                let what = format!("{what} of {len} bytes at {start:#x}, which are not whole mappings");
                return session.wrong(CUDA_ERROR_INVALID_VALUE, what);
            }
        }
    }
    Ok(found)
}

api! {
    cuMemGetAllocationGranularity(grain: *mut usize, property: *const CUmemAllocationProp, _option: c_uint) Init |session| {
        device_of(session, property)?;
        put(grain, GRAIN)
    }

    cuMemAddressReserve(
        address: *mut CUdeviceptr,
        len: usize,
        alignment: usize,
        _wanted: CUdeviceptr,
        flags: c_ulonglong,
    ) Context |session| {
        grained(session, len, "addresses")?;
        if flags != 0 || !(alignment == 0 || alignment.is_power_of_two()) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let start = address::take(len, alignment.max(GRAIN)).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        session.memory.reserved.insert(start, len as u64);
        put(address, start)
    }

    cuMemAddressFree(address: CUdeviceptr, len: usize) Release |session| {
        if session.memory.reserved.get(&address) != Some(&(len as u64)) {
            let what = format!("{len} bytes of addresses at {address:#x} are freed but were not reserved so");
            return session.wrong(CUDA_ERROR_INVALID_VALUE, what);
        }
        if session.memory.regions.range(address..address + len as u64).next().is_some() {
            let what = format!("addresses at {address:#x} are freed while memory is mapped there");
            return session.wrong(CUDA_ERROR_INVALID_VALUE, what);
        }
        session.memory.reserved.remove(&address);
        Ok(())
    }

    cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        len: usize,
        property: *const CUmemAllocationProp,
        flags: c_ulonglong,
    ) Context |session| {
        grained(session, len, "a block")?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let device = device_of(session, property)?;
        session.charge(device, len as u64)?;
        let Ok(file) = address::block(len) else {
            session.refund(device, len as u64);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        };
        let block = session.handle();
        session.memory.blocks.insert(block, Block { file, len: len as u64, device, released: false, mappings: 0 });
        put(handle, block)
    }

    cuMemMap(
        address: CUdeviceptr,
        len: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: c_ulonglong,
    ) Context |session| {
        grained(session, len, "a mapping")?;
        let end = address.checked_add(len as u64).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let reserved = session.memory.reserved.range(..=address).next_back();
        if offset != 0 || flags != 0 || reserved.is_none_or(|(start, room)| end > start + room) {
            let what = format!("{len} bytes are mapped at {address:#x} from {offset}, not (wholly) in reserved addresses");
            return session.wrong(CUDA_ERROR_INVALID_VALUE, what);
        }
        let readable = session.readable;
        let memory = &mut session.memory;
        if memory.regions.range(..end).next_back().is_some_and(|(start, region)| start + region.len > address) {
            return session.wrong(CUDA_ERROR_ALREADY_MAPPED, format!("memory is mapped at {address:#x} already"));
        }
        let block = memory.blocks.get_mut(&handle).filter(|block| !block.released && len as u64 <= block.len);
        let Some(block) = block else {
            return session.wrong(CUDA_ERROR_INVALID_VALUE, format!("block {handle:#x} is mapped but not held or too small"));
        };
        address::map(address, len, &block.file, readable).map_err(|_| CUDA_ERROR_MAP_FAILED)?;
        block.mappings += 1;
        let device = block.device;
        let region = Region {
            len: len as u64,
            device,
            block: Some(handle),
            accessible: false,
            coming: false,
            leaving: false,
            of_graph: None,
        };
        memory.regions.insert(address, region);
        Ok(())
    }

    cuMemSetAccess(address: CUdeviceptr, len: usize, wanted: *const CUmemAccessDesc, count: usize) Context |session| {
        let starts = mappings(session, address, len as u64, "access")?;
        for index in 0..count {
            let wanted = get(wanted.wrapping_add(index))?;
            session.device(wanted.location.id)?;
            let write = wanted.flags == CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            for start in &starts {
                if let Some(region) = session.memory.regions.get_mut(start)
                    && region.device == wanted.location.id
                {
                    region.accessible = write;
                }
            }
        }
        Ok(())
    }

    cuMemUnmap(address: CUdeviceptr, len: usize) Release |session| {
        let starts = mappings(session, address, len as u64, "unmapping")?;
        session.check_gone(address, len as u64, "cuMemUnmap");
        for start in starts {
            if let Some(region) = session.memory.regions.remove(&start) {
                address::unmap(start, region.len as usize);
                let Some(handle) = region.block else { continue };
                if let Some(block) = session.memory.blocks.get_mut(&handle) {
                    block.mappings -= 1;
                }
                session.settle_block(handle);
            }
        }
        Ok(())
    }

    cuMemRelease(handle: CUmemGenericAllocationHandle) Release |session| {
        match session.memory.blocks.get_mut(&handle) {
            Some(block) if !block.released => block.released = true,
            _ => {
                let what = format!("block {handle:#x} is released but not held (released twice?)");
                return session.wrong(CUDA_ERROR_INVALID_VALUE, what);
            }
        }
        session.settle_block(handle);
        Ok(())
    }
}
