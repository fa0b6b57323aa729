//! Served groups on their way to the retrainer, and its results on their way back.

use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use downbeat_core::Duration;
use downbeat_core::device::overlap::GroupPart;
use downbeat_service::report::device_report::RetrainingReport;
use parking_lot::Mutex;

use crate::groups::stored_predictor::StoredPredictor;

/// Most groups that wait for the retrainer. A full queue loses its oldest group.
const WAITING: usize = 4_096;

/// Served groups on their way from the devices to the retrainer, and its results on their way back.
#[derive(Debug)]
pub struct Learning {
    /// Each group, with the predictor's numbers for its models, and the time that it took.
    pub(super) served: ArrayQueue<(Vec<GroupPart>, Duration)>,
    results: Mutex<Results>,
}

#[derive(Debug, Default)]
struct Results {
    /// Replaces the predictor of the file.
    adopted: Option<Arc<StoredPredictor>>,
    report: RetrainingReport,
}

/// The result of one training.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Judged {
    /// Groups that were served until then.
    pub served: u64,
    /// Groups that judged the training. The training did not see them.
    pub held_out: usize,
    /// Mean absolute relative error of the predictor in use on these groups.
    pub before: f64,
    /// The same error of the trained predictor.
    pub after: f64,
    /// Whether the trained predictor is in use from then on.
    pub adopted: bool,
}

impl Learning {
    /// Starts to collect served groups.
    pub fn start() -> Option<Learning> {
        Some(Learning { served: ArrayQueue::new(WAITING), results: Mutex::default() })
    }

    /// Takes a served group, with the predictor's numbers for its models.
    pub fn hear(&self, group: Vec<GroupPart>, took: Duration) {
        self.served.force_push((group, took));
    }

    /// The predictor that a training found to be better than the file's predictor.
    pub fn adopted(&self) -> Option<Arc<StoredPredictor>> {
        self.results.lock().adopted.clone()
    }

    /// Counts of the trainings, and the errors of the last.
    pub fn report(&self) -> RetrainingReport {
        self.results.lock().report
    }

    /// Records a training. The adopted predictor is in use from now on.
    pub(super) fn judged(&self, judged: Judged, adopted: Option<StoredPredictor>) {
        let mut results = self.results.lock();
        let RetrainingReport { trainings, adopted: adoptions, .. } = results.report;
        results.report = RetrainingReport {
            trainings: trainings + 1,
            adopted: adoptions + u64::from(judged.adopted),
            held_out: judged.held_out as u64,
            before: Some(judged.before),
            after: Some(judged.after),
        };
        results.adopted = adopted.map(Arc::new).or(results.adopted.take());
    }
}
