//! The driver's entry points, sorted by subject.

#![allow(non_snake_case)]

use crate::result::{CUresult::*, Outcome};

/// Defines entry points: `name(arguments) Needs |session| { body }`, and the list of their names.
macro_rules! api {
    ($($name:ident($($arg:ident: $type:ty),* $(,)?) $needs:ident |$session:ident| $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $type),*) -> crate::result::CUresult {
                crate::session::enter(stringify!($name), crate::session::Needs::$needs, |$session| $body)
            }
        )*

        /// The names of the entry points defined here.
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

mod copy;
mod device;
mod event;
mod graph;
mod green;
mod memory;
mod module;
mod pool;
mod stream;

pub use green::Resource;

/// Returns true if an entry point has this name.
pub fn has(name: &str) -> bool {
    let all = [
        copy::NAMES,
        device::NAMES,
        event::NAMES,
        graph::NAMES,
        green::NAMES,
        memory::NAMES,
        module::NAMES,
        pool::NAMES,
        stream::NAMES,
    ];
    all.concat().contains(&name)
}

/// Writes a result to the caller's address; a null pointer is an error, as in the driver.
fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, and the caller of the entry point has promised room for a result of this
    // type.
    unsafe { to.write(value) };
    Ok(())
}

/// Reads the value that the caller points to; a null pointer is an error, as in the driver.
fn get<T: Copy>(from: *const T) -> Outcome<T> {
    if from.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, and the caller of the entry point has promised a value of this type.
    Ok(unsafe { from.read() })
}
