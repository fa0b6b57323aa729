//! The pool that `cuMemAllocAsync` allocates from: each device has one, and it keeps nothing.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUdevice, CUmemoryPool};

use super::{get, put};
use crate::result::{CUresult::*, Outcome};
use crate::session::Session;

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`; 1 to 3 before it are `..._REUSE_...`.
const RELEASE_THRESHOLD: c_uint = 4;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` to `..._USED_MEM_HIGH`.
const SIZES: std::ops::RangeInclusive<c_uint> = 5..=8;

/// The handle of a device's pool; handles of other things begin higher.
fn pool_of(session: &mut Session, device: CUdevice) -> Outcome<CUmemoryPool> {
    session.device(device)?;
    Ok((device as usize + 1) as CUmemoryPool)
}

/// The device of a pool.
fn device_of(session: &mut Session, pool: CUmemoryPool) -> Outcome<CUdevice> {
    let device = (pool as usize).wrapping_sub(1) as c_int;
    if session.device(device).is_err() {
        return session.wrong(CUDA_ERROR_INVALID_VALUE, format!("{pool:?} is no pool of memory"));
    }
    Ok(device)
}

api! {
    cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice) Init |session| {
        let found = pool_of(session, device)?;
        put(pool, found)
    }

    cuDeviceGetMemPool(pool: *mut CUmemoryPool, device: CUdevice) Init |session| {
        let found = pool_of(session, device)?;
        put(pool, found)
    }

    cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void) Init |session| {
        let device = device_of(session, pool)?;
        match attribute {
            1..=3 => get(value.cast::<c_int>()).map(drop),
            RELEASE_THRESHOLD => {
                session.device(device)?.pool_keeps = get(value.cast())?;
                Ok(())
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void) Init |session| {
        let device = device_of(session, pool)?;
        let state = session.device(device)?;
        match attribute {
            1..=3 => put(value.cast::<c_int>(), 1),
            RELEASE_THRESHOLD => put(value.cast(), state.pool_keeps),
            _ if SIZES.contains(&attribute) => put(value.cast(), state.used),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    cuMemPoolTrimTo(pool: CUmemoryPool, _keep: usize) Init |session| { device_of(session, pool).map(drop) }
}
