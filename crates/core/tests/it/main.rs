//! Tests of the core from outside, in one binary.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod allocations;
mod auto;
mod device_groups;
mod device_journal;
mod device_models;
mod device_random;
mod device_rehearsal;
mod device_scenario;
mod device_scheduler;
mod device_windowed;
mod device_world;
mod elision;
mod imports;
mod journal;
mod journal_checks;
mod load;
mod model_budgets;
mod orphans;
mod outcomes;
mod overlap;
mod overlap_runs;
mod probes;
mod random_events;
mod rehearsal;
mod role_links;
mod role_nonsense;
mod role_planner;
mod role_random;
mod role_scenario;
mod role_texts;
mod scenario;
mod scenario_file;
mod scheduler_node;
mod section_3_5;
mod section_4_2;
mod shards;

mod spatial;
mod spatial_shares;
mod starvation;
mod sub_clusters;
mod turns;
