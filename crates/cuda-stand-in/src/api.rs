//! The driver's entry points, by what they are about.

#![allow(non_snake_case)]

use crate::result::{CUresult::*, Outcome};

/// Defines entry points: `name(arguments) Needs |session| { body }`, and the function `symbol` that finds them by name.
macro_rules! api {
    ($($name:ident($($arg:ident: $type:ty),* $(,)?) $needs:ident |$session:ident| $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $type),*) -> crate::result::CUresult {
                crate::session::enter(stringify!($name), crate::session::Needs::$needs, |$session| $body)
            }
        )*

        /// The address of an entry point defined here.
        pub fn symbol(name: &str) -> Option<*mut std::ffi::c_void> {
            $(
                if name == stringify!($name) {
                    return Some($name as *mut std::ffi::c_void);
                }
            )*
            None
        }
    };
}

mod copy;
mod device;
mod event;
mod graph;
mod green;
mod mapping;
mod memory;
mod pool;
mod stream;
mod unsupported;

pub use green::Resource;

/// The address of an entry point.
pub fn symbol(name: &str) -> Option<*mut std::ffi::c_void> {
    let found = [
        copy::symbol,
        device::symbol,
        event::symbol,
        graph::symbol,
        green::symbol,
        memory::symbol,
        mapping::symbol,
        pool::symbol,
        stream::symbol,
        unsupported::symbol,
    ];
    found.into_iter().find_map(|symbol| symbol(name))
}

/// Writes a result where the caller asked for it; a null pointer is an error, as in the driver.
fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, and the caller of the entry point has promised room for a result of this type.
    unsafe { to.write(value) };
    Ok(())
}

/// Reads what the caller points to; a null pointer is an error, as in the driver.
fn get<T: Copy>(from: *const T) -> Outcome<T> {
    if from.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, and the caller of the entry point has promised a value of this type.
    Ok(unsafe { from.read() })
}
