//! Tests of the lab: figures of the papers, outside checkers, worlds and networks with faults.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod autoscaling;
mod baselines;
mod bounds;
mod commands;
mod device_abacus;
mod device_auto;
mod device_calibration;
mod device_checker;
mod device_contention;
mod device_figures;
mod device_gslice;
mod device_measured;
mod device_runs;
mod experiments;
mod network;
mod network_judge;
mod network_refusals;
mod partitions;
mod random;
mod slice;
mod slot_layouts;
mod slot_plans;
mod slots;
mod world;
mod world_checker;
mod world_files;
