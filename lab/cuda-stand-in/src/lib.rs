//! A `libcuda.so.1` for tests: the part of the CUDA driver API that Downbeat calls, on host memory.
//!
//! It is there to find mistakes, so it is as unhelpful as a driver may be:
//!
//! - **Streams are lazy.** What is enqueued runs only when somebody waits for it (a stream or an event is synchronised, or asked
//!   a few times), and then only what the thing waited for depends on. A forgotten wait gives wrong data every time. With
//!   [`Order::Random`] a worker thread runs streams in an order drawn from a seed instead.
//! - **Host memory is read when a copy runs**, as DMA does, if it is pinned; pageable memory is staged as the driver does it.
//! - **Device addresses cannot be followed by the host** (unless [`StandIn::set_readable`] says so), are never given out twice,
//!   and hold [`FRESH`] bytes at first. A function that plays a kernel (`cuLaunchHostFunc`) sees them through [`StandIn::view`].
//! - **Errors of a device are sticky**: everything of its contexts fails afterwards.
//! - **Work that touches the same memory and that nothing orders** is written down, also where it happened to go well; kernels say
//!   with [`StandIn::touch`] what they touch.
//! - **A stream that captures runs nothing.** What disturbs a capture fails as documented and spoils it; a graph is launched with the
//!   addresses that it was recorded with, under the same checks each time.
//! - Use of what was destroyed, double frees, leaks are written down: [`StandIn::mistakes`], [`StandIn::leaks`].
//!
//! Every piece of work has a duration in virtual time (see [`Work`]), so that a test can show what overlaps without a clock.
//!
//! It is NVML too, by the name that has in [`folder`]: what it measures and reports is as [`StandIn::set_measured`] and [`StandIn::report`] say.
//!
//! Another process finds it with `LD_LIBRARY_PATH` set to [`folder`]; there, `CUDA_STAND_IN_DEVICES` (a count),
//! `CUDA_STAND_IN_MULTIPROCESSORS`, `CUDA_STAND_IN_MEMORY` (bytes), `CUDA_STAND_IN_READABLE`, `CUDA_STAND_IN_SEED` (for the
//! random order) and `CUDA_STAND_IN_LAUNCH_TIME` (see [`StandIn::set_launch_time`]) say what it finds.
//!
//! A test depends on this crate, calls [`StandIn::lock`] and then uses `cudarc` as always.

mod address;
mod api;
mod capture;
mod context;
mod control;
mod execution;
mod fault;
mod graph;
mod host_memory;
mod library;
mod machine;
mod memory;
mod nvml;
mod ordering;
mod result;
mod session;
mod stand_in;
mod stream;
mod trace;
mod worker;

pub use address::FRESH;
pub use library::{folder, library};
pub use nvml::Measured;
pub use stand_in::{Count, Order, StandIn};
pub use trace::{Kind, Work};
