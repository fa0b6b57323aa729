//! A `libcuda.so.1` for tests: the part of the CUDA driver API that Downbeat calls, on host memory.
//!
//! It exists to find mistakes, so it is as unhelpful as a driver may be:
//!
//! - **Streams are lazy.** An operation runs only when a thread waits for it. To wait, the thread
//!   synchronises a stream or an event, or queries it a few times. Only the operations that the
//!   wait depends on run. A forgotten wait gives wrong data every time. With [`Order::Random`] a
//!   worker thread runs streams in an order drawn from a seed instead.
//! - **Pinned host memory is read when a copy runs**, as DMA does. Pageable memory is staged as the
//!   driver does it.
//! - **The host cannot follow device addresses** (unless [`StandIn::set_readable`] allows it).
//!   Addresses are never handed out twice, and memory holds [`FRESH`] bytes at first. A function
//!   that plays a kernel (`cuLaunchHostFunc`) sees the memory through [`StandIn::view`].
//! - **Errors of a device are sticky**: every later call on its contexts fails.
//! - **Unordered work on the same memory** is recorded as a mistake, even if it happened to go
//!   well. Kernels declare their accesses with [`StandIn::touch`].
//! - **A capturing stream runs nothing.** A call that disturbs a capture fails as documented and
//!   spoils it. A graph is launched with the addresses that it was recorded with, under the same
//!   checks each time.
//! - Uses of destroyed objects, double frees and leaks are recorded: [`StandIn::mistakes`],
//!   [`StandIn::leaks`].
//!
//! Every piece of work has a duration in virtual time (see [`Work`]), so that a test can show
//! overlaps without a clock.
//!
//! The library is NVML too, under NVML's name in [`folder`]. It measures and reports the values of
//! [`StandIn::set_measured`] and [`StandIn::report`].
//!
//! Another process finds it with `LD_LIBRARY_PATH` set to [`folder`]. Environment variables
//! configure that process: `CUDA_STAND_IN_DEVICES` (a count), `CUDA_STAND_IN_MULTIPROCESSORS`,
//! `CUDA_STAND_IN_MEMORY` (bytes), `CUDA_STAND_IN_READABLE`, `CUDA_STAND_IN_SEED` (for the random
//! order) and `CUDA_STAND_IN_LAUNCH_TIME` (see [`StandIn::set_launch_time`]).
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
