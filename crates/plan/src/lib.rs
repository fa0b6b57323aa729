//! Which models share a sub-cluster: Symphony's partitioner (§4.4, appendix A).
//!
//! Every device of a sub-cluster has loaded all of the sub-cluster's models, so that any device can
//! run any of them. Every few minutes the models are divided anew, evenly by request rate and by
//! memory. Three things are limited: a sub-cluster's request rate, the memory of its models, and
//! the number of moves. [`plan()`] does that for a [`Problem`]; [`Workload`] is the file that
//! `downbeat plan` reads.
//!
//! [`divide`] does the same for a scheduler that leads a running cluster.
//!
//! # How
//!
//! Small problems have at most half a million partitions (13 models on 3 sub-clusters, 11 on 4).
//! There every partition is tried, and the best is proved to be the optimum.
//!
//! For other problems, a local search (largest first, then annealed moves and swaps) finds a good
//! partition within a second. From there the MILP solver HiGHS solves the program of the paper's
//! appendix A, until the time limit. It proves that there is no better partition, or says how far
//! off the best can be. Large problems have more than 4,000 pairs of a model and a sub-cluster. In
//! seconds the solver does not improve them, so it runs only if the search finds nothing.
//!
//! [`Evaluation::of`] judges every partition, whichever method found it. Where there is no
//! partition, [`PlanError`] says why in words. Example: all models together need more memory than
//! all devices have. A sum shows this without a search. Otherwise trying all partitions, or the
//! solver, is the proof.
//!
//! # The feature `highs`
//!
//! HiGHS is C++: its crate builds it with cmake and reads its header with libclang (on Debian:
//! `apt-get install cmake libclang-dev`). Measured on two cores: 6 minutes of CPU time and 4
//! minutes of wall time for `cargo build --release`, more than everything else here together. So
//! the feature is off by default, everywhere: a build needs Rust alone. Without it, the local
//! search alone answers larger problems. Its partitions are nearly as even (lab/docs/symphony.md,
//! figure 16), but it proves nothing. It cannot tell whether a better partition exists. That none
//! exists is known only where a sum shows it.
//!
//! `highs-installed` links a HiGHS that pkg-config finds, and builds none. CI takes HiGHS from a
//! wheel, which saves those 4 minutes.

mod divide;
mod enumeration;
mod evaluation;
mod fluid;
mod infeasible;
mod local_search;
#[cfg(feature = "highs")]
mod milp;
mod problem;
mod solve;
pub mod words;
pub mod workload;

pub use divide::divide;
pub use evaluation::{Evaluation, Load, Violation};
pub use fluid::{FluidNeed, fluid_need};
pub use problem::{BadProblem, Model, Problem};
pub use solve::{FoundBy, HAS_SOLVER, Method, Options, Plan, PlanError, plan};
pub use workload::{BadWorkload, Workload};
