//! Cores of the CPU: which there are, sets of them, threads that run on such a set only, and the CPU divided into several.

mod division;
mod pinned;
mod set;
mod topology;

pub(crate) use division::{divide, divide_freely};
pub use pinned::Pinned;
pub use set::{CoreSet, NotACoreSet};
pub use topology::Topology;
