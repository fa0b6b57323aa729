//! Tests of the core from outside, in one binary.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod allocations;
mod auto;
mod device_groups;
mod device_journal;
mod device_models;
mod device_random;
mod device_scenario;
mod device_scheduler;
mod device_windowed;
mod device_world;
mod elision;
mod imports;
mod journal;
mod journal_checks;
mod load;
mod outcomes;
mod overlap;
mod overlap_runs;
mod pipeline_graph;
mod pipeline_journal;
mod pipeline_scenario;
mod pipelines;
mod probes;
mod random_events;
mod rehearsal;
mod scenario;
mod scenario_file;
mod section_3_5;
mod section_4_2;
mod shards;
mod spatial;
mod spatial_shares;
mod starvation;
mod tenants;
mod turns;
