//! The pool that `cuMemAllocAsync` allocates from. Each device has one pool, which keeps no memory
//! under any setting.

use std::ffi::{c_uint, c_void};

use cudarc::driver::sys::{CUdevice, CUmemoryPool};

use super::{get, put};
use crate::result::CUresult::*;

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
const RELEASE_THRESHOLD: c_uint = 4;

api! {
    // Handles of other things begin higher.
    cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice) Init |session| {
        session.device(device)?;
        put(pool, (device as usize + 1) as CUmemoryPool)
    }

    cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void) Init |session| {
        if session.device((pool as usize).wrapping_sub(1) as CUdevice).is_err() {
            return session.wrong(CUDA_ERROR_INVALID_VALUE, format!("{pool:?} is no pool of memory"));
        }
        match attribute {
            RELEASE_THRESHOLD => get(value.cast::<u64>()).map(drop),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}
