//! Tests of the engines that need no library, through their trait.

mod buffers;
mod emulation;
#[allow(dead_code, reason = "the tests of engine-ort use the rest")]
mod model;
mod plans;
mod states;
#[allow(dead_code, reason = "the tests of engine-ort use the rest")]
mod support;
