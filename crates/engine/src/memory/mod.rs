//! Memory beyond a tensor's own: input rings, memory that processes share, the budget of runs.

pub mod region;
pub mod ring_memory;
pub mod run_memory;
