//! How programs find entry points that they do not link to.

#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::api;
use crate::result::CUresult;

/// `CU_GET_PROC_ADDRESS_SUCCESS` and `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`.
const FOUND: u32 = 0;
const NOT_FOUND: u32 = 1;

/// `cuGetProcAddress`: a name without its version means the newest one.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    _version: c_int,
    _flags: u64,
    status: *mut u32,
) -> CUresult {
    if symbol.is_null() || function.is_null() {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, and the caller has promised C text.
    let name = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
    let found = ["_v3", "_v2", ""].into_iter().find_map(|version| api::symbol(&format!("{name}{version}")));
    let found = match name.as_ref() {
        "cuGetProcAddress" | "cuGetProcAddress_v2" => Some(cuGetProcAddress_v2 as *mut c_void),
        _ => found,
    };
    // SAFETY: not null, and the caller has promised room for the results.
    unsafe {
        function.write(found.unwrap_or(std::ptr::null_mut()));
        if !status.is_null() {
            status.write(if found.is_some() { FOUND } else { NOT_FOUND });
        }
    }
    match found {
        Some(_) => CUresult::CUDA_SUCCESS,
        None => CUresult::CUDA_ERROR_NOT_FOUND,
    }
}
