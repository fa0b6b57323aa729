//! The stand-in through `cudarc`, as Downbeat's engine calls it.

#![allow(clippy::unwrap_used, reason = "tests")]

mod device;
mod faults;
mod graph_nodes;
mod graphs;
mod memory;
mod ordering;
mod program;
mod streams;
