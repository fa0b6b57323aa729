//! The scheduler of a cluster, and the plans that it asks for.

pub(crate) mod cluster_load;
pub(crate) mod planner;
pub(crate) mod rehearsing;
pub(crate) mod scheduler_role;
pub(crate) mod scheduler_service;
