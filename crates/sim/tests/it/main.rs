//! Tests of the simulator, and of the scheduler under random load, in one binary.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod adaptive;
mod arrivals;
mod checker;
mod device_advice;
mod device_replay;
mod measuring;
mod pace;
mod pipeline_log;
mod pipelines_of_logs;
mod runs;
mod section_3_5;
mod served;
mod staging;
mod table_2;
mod turns;
mod what_if;
mod why;
mod why_in_cluster;
