//! Random workloads for `downbeat plan`, and partitions by chance: the baseline of Symphony's
//! appendix A.2 and its figure 16.

mod chance;
mod generator;

pub use chance::random_partition;
pub use generator::generate;
