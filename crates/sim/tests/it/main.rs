//! Tests of the simulator, and of the scheduler under random load, in one binary.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod adaptive;
mod arrivals;
mod baselines;
mod bounds;
mod checker;
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
mod measuring;
mod network;
mod network_judge;
mod pace;
mod random;
mod runs;
mod section_3_5;
mod slots;
mod table_2;
mod turns;
mod what_if;
mod world;
mod world_checker;
mod world_files;
