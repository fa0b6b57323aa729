//! Loads models: engines, warm-up, trials of the first runs.

pub(crate) mod device_budget;
pub(crate) mod engines;
pub mod load_context;
pub(crate) mod load_turns;
pub(crate) mod loader;
pub(crate) mod loading;
pub mod model_source;
pub(crate) mod other_engines;
pub(crate) mod policy_choice;
pub(crate) mod python_options;
pub(crate) mod repairing;
pub(crate) mod row_check;
pub mod warm_up;
