//! The frontend of a cluster: its clients, and the models that run elsewhere.

pub(crate) mod ensemble_walk;
pub(crate) mod frontend_figures;
pub(crate) mod frontend_role;
pub(crate) mod remote_ensemble;
pub(crate) mod remote_models;
mod remote_rollout;
pub(crate) mod remote_serving;
mod remote_streams;
pub(crate) mod tenant_counts;
