//! The backend of a cluster, and the batches that it runs.

mod backend_node;
mod early_inputs;
mod gathering;
mod late_fetches;
mod loading;
mod streams;
mod under_way;

pub use backend_node::{BackendNode, BackendOptions, BackendOutput};
pub use gathering::Member;
