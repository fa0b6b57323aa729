//! The settings and counters of a device's operator groups.

use serde::{Deserialize, Serialize};

use super::controller::OverlapOptions;
use super::learned::LearnedPredictor;
use super::order::GroupOrder;

/// The settings of a device's operator groups, as plain data.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct GroupSettings {
    /// The predictor of group latencies; `None`: there is no prediction, and requests run one at a
    /// time.
    pub predictor: Option<LearnedPredictor>,
    /// The predictor's relative error was below this for 95% of its test samples.
    pub error: f64,
    /// Which request is next, and whether others run beside it.
    #[serde(default)]
    pub order: GroupOrder,
}

impl Default for GroupSettings {
    fn default() -> Self {
        GroupSettings { predictor: None, error: OverlapOptions::default().error, order: GroupOrder::Headroom }
    }
}

/// The counters and margins of a device's groups.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct GroupStats {
    /// The groups of operators that have begun.
    pub groups: u64,
    /// The groups of several requests.
    pub together: u64,
    /// The groups that were decided in time, but no longer suited when the device was free.
    pub overtaken: u64,
    /// The probable latency of a group of several requests, as a multiple of the predicted one.
    pub expected: f64,
    /// The safe upper bound of the latency, as a multiple of the predicted one.
    pub bound: f64,
}
