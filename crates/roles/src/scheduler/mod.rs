//! The scheduler of a cluster: its election, the models of backends, and the waiting requests.

mod assigner;
mod budgets;
mod cluster_map;
mod election;
mod known_backend;
mod lead;
mod load_count;
mod model_rates;
mod orders;
mod orphans;
mod questions;
mod rehearsed;
mod scheduler_node;
mod seat_loads;
mod served_models;
mod waiting;

pub use assigner::{SubClusterCount, SubClusterOptions};
pub use budgets::ModelBudget;
pub use lead::SubCluster;
pub use rehearsed::RehearsalEvent;
pub use scheduler_node::{SchedulerNode, SchedulerOptions, SchedulerOutput};
