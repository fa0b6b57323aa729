//! Which models share a sub-cluster: Symphony's partitioner (§4.4, appendix A).
//!
//! Every device of a sub-cluster has all of the sub-cluster's models loaded, so that any of them can run anything. Every few minutes the
//! models are divided anew: evenly by request rate and by memory, within what a dispatcher takes and what a device holds,
//! and without moving more than is allowed. [`plan()`] does that for a [`Problem`]; [`Workload`] is the file that
//! `downbeat plan` reads.
//!
//! [`divide`] is the same for a scheduler that leads a running cluster.
//!
//! # How
//!
//! Where there are at most half a million partitions (13 models on 3 sub-clusters, 11 on 4) every one is looked at, and the best is proved to be it. Else
//! a local search (largest first, then annealed moves and swaps) finds a good partition within a second. The MILP solver HiGHS
//! goes on from there until the time limit, with the appendix's program, and proves that there is no better one, or says
//! how far off the best can be. Large problems (more than 4,000 pairs of a model and a sub-cluster) it does not better in
//! seconds, and there it is asked only where the search finds nothing. What either finds is judged by
//! [`Evaluation::of`], which knows neither. Where there is no partition, [`PlanError`] says why in words: sums that cannot
//! fit are found without a search, the rest is proved by looking at all, or by the solver.
//!
//! # The feature `highs`
//!
//! HiGHS is C++: its crate builds it with cmake and reads its header with libclang (on Debian: `apt-get install cmake
//! libclang-dev`). Measured on two cores: 6 minutes of CPU time and 4 minutes of wall time for `cargo build --release`, more
//! than everything else here together. So it is off by default, everywhere: a build needs Rust alone. Without it the
//! local search answers by itself where there are more. That costs little in balance (lab/docs/symphony.md, figure 16), but nothing is
//! proved: not that a partition is the best, and not, beyond sums, that there is none.
//!
//! `highs-installed` takes a HiGHS that pkg-config finds, and builds none. CI has it from a wheel, which saves those 4 minutes.

mod divide;
mod enumeration;
mod evaluation;
mod fluid;
mod generator;
mod infeasible;
mod local_search;
#[cfg(feature = "highs")]
mod milp;
mod problem;
mod random;
mod solve;
pub mod words;
pub mod workload;

pub use divide::divide;
pub use evaluation::{Evaluation, Load, Violation};
pub use fluid::{FluidNeed, fluid_need};
pub use generator::generate;
pub use problem::{BadProblem, Model, Problem};
pub use random::random_partition;
pub use solve::{FoundBy, HAS_SOLVER, Method, Options, Plan, PlanError, plan};
pub use workload::{BadWorkload, Workload};
