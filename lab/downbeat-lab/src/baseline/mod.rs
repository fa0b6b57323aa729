//! The systems that Downbeat is compared with, each a [`ClusterScheduler`](downbeat_sim::ClusterScheduler) in one file.
//!
//! Each type's documentation names the paper of each rule, and lists the choices that the paper
//! leaves open. These are made in favour of the baseline. Baselines run in the same ideal world as
//! Downbeat's scheduler: exact latency profiles, no network, no cost of a decision. A request
//! counts as one item, as in the papers.
//!
//! | baseline | a free device takes | gives up | type |
//! |---|---|---|---|
//! | Clockwork | the candidate that has to start first | requests that cannot meet their deadline, at arrival if that is known then | [`Clockwork`] |
//! | Nexus | the next model of its plan | requests at the head whose deadlines would keep the batch below the planned size | [`Nexus`] |
//! | pinned models | requests of the models that were put on it, which wait in its own queue | by either drop policy | [`Pinned`] |
//! | Shepherd Flex | the largest batch; it may take a device from a batch a third its size | requests that cannot meet their deadline | [`Shepherd`] |
//! | eager | the candidate that has to start first | by either drop policy | [`Scheduler`] with [`DispatchPolicy::Eager`] |
//! | timeout | the same, among those that have waited for long enough | by either drop policy | [`Scheduler`] with [`DispatchPolicy::Timeout`] |
//!
//! [`Scheduler`]: downbeat_core::cluster::Scheduler
//! [`DispatchPolicy::Eager`]: downbeat_core::cluster::DispatchPolicy::Eager
//! [`DispatchPolicy::Timeout`]: downbeat_core::cluster::DispatchPolicy::Timeout

mod backlog;
mod backlogs;
mod clockwork;
mod fleet;
mod nexus;
mod pinned;
mod shepherd;

pub use clockwork::Clockwork;
pub use nexus::{Nexus, NexusOptions};
pub use pinned::Pinned;
pub use shepherd::{Gather, Shepherd};
