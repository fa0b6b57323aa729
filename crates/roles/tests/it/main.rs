//! Tests of the roles from outside, in one binary.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod announced;
mod model_budgets;
mod orders;
mod orphans;
mod questions;
mod rehearsal;
mod role_links;
mod role_nonsense;
mod role_planner;
mod role_random;
mod role_scenario;
mod role_texts;
mod rollouts;
#[path = "../../../core/tests/it/scenario_file.rs"]
mod scenario_file;
mod scheduler_node;
mod seats;
mod sub_clusters;
