//! Cores of the CPU: the machine's cores, sets of cores, threads that run on a set only, and the
//! CPU divided into several.

mod division;
mod pinned;
mod set;
mod slice;
mod topology;

pub(crate) use division::{divide, divide_freely};
pub use pinned::Pinned;
pub use set::{CoreSet, NotACoreSet};
pub use slice::ask_for_short_slices;
pub use topology::Topology;
