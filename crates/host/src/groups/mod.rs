//! The predictor of operator groups (Abacus), and its training in service.

pub mod group_predictor;
#[cfg_attr(not(feature = "retraining"), path = "retraining/absent.rs")]
pub(crate) mod retraining;
pub mod stored_predictor;
