//! Runs of models: engines may fail or hang, and the watchdog ends what takes too long.

pub mod activity;
pub mod difference;
pub(crate) mod engine_run;
pub mod model_health;
pub mod row_judgement;
pub mod watchdog;
