//! The results of several runs, in tables and plots.

pub(crate) mod capacity_table;
pub(crate) mod recording;
pub(crate) mod report;
pub(crate) mod sample;
pub mod sample_table;
