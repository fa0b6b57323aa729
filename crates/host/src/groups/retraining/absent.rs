//! A build without the feature `retraining`: the predictor of operator groups stays as its file has
//! it.

use std::convert::Infallible;
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::device::overlap::GroupPart;
use downbeat_service::report::device_report::RetrainingReport;

use crate::groups::group_predictor::GroupPredictor;
use crate::groups::stored_predictor::StoredPredictor;

/// Has no value in this build.
#[derive(Debug)]
pub struct Learning(Infallible);

impl Learning {
    /// Logs that this build trains no predictor.
    pub fn start() -> Option<Learning> {
        tracing::info!(
            "the predictor of operator groups stays as its file has it: this build trains none with served groups; \
             `cargo build --release --features retraining` adds that"
        );
        None
    }

    /// Never called.
    pub fn hear(&self, _group: Vec<GroupPart>, _took: Duration) {
        match self.0 {}
    }

    /// Never called.
    pub fn adopted(&self) -> Option<Arc<StoredPredictor>> {
        match self.0 {}
    }

    /// Never called.
    pub fn report(&self) -> RetrainingReport {
        match self.0 {}
    }
}

/// Trains nothing.
pub struct GroupRetrainer;

impl GroupRetrainer {
    /// Needs no predictor.
    pub fn new(_predictor: Arc<GroupPredictor>) -> Self {
        GroupRetrainer
    }

    /// Always returns false: there is never work.
    pub fn step(&mut self, _ended: impl FnOnce(bool)) -> bool {
        false
    }
}
