//! The error of predictions, measured on the actual latencies of groups.

use std::collections::VecDeque;

use crate::quantile::quantiles;
use crate::time::Duration;

/// The number of groups that are remembered.
const REMEMBERED: usize = 64;
/// Below this number of groups, the error of the predictor's test counts.
const FEWEST: usize = 8;

/// The factors for predictions: quantiles of actual over predicted latency of the last groups.
/// Abacus has no margin and trusts its predictor.
#[derive(Clone, Debug)]
pub struct ErrorMargin {
    /// Actual over predicted latency, the latest group last.
    ratios: VecDeque<f64>,
    expected: f64,
    bound: f64,
}

impl ErrorMargin {
    /// The margin of a predictor whose relative error was below `error` for 95% of its test
    /// samples.
    pub fn new(error: f64) -> Self {
        let error = if error.is_finite() { error.max(0.0) } else { 1.0 };
        ErrorMargin { ratios: VecDeque::new(), expected: 1.0, bound: 1.0 + error }
    }

    /// Adds a group's actual latency. A prediction of zero is ignored.
    pub fn handle_group(&mut self, predicted: Duration, took: Duration) {
        if predicted == Duration::ZERO {
            return;
        }
        if self.ratios.len() == REMEMBERED {
            self.ratios.pop_front();
        }
        self.ratios.push_back(took.as_secs_f64() / predicted.as_secs_f64());
        if self.is_measured()
            && let Some([middle, high]) = quantiles(self.ratios.iter().copied(), [0.5, 0.95])
        {
            (self.expected, self.bound) = (middle, high);
        }
    }

    /// Whether enough groups have run to replace the test error.
    pub fn is_measured(&self) -> bool {
        self.ratios.len() >= FEWEST
    }

    /// The probable latency of a group with this prediction: half of the earlier groups took less.
    pub fn expected(&self, predicted: Duration) -> Duration {
        Duration::from_secs_f64(predicted.as_secs_f64() * self.expected)
    }

    /// The safe bound of the latency: 95% of the earlier groups took less.
    pub fn bound(&self, predicted: Duration) -> Duration {
        Duration::from_secs_f64(predicted.as_secs_f64() * self.bound)
    }
}

/// The margins of groups of one request and of groups of several. A predictor may be right about
/// one request and wrong about how requests slow each other down.
#[derive(Clone, Debug)]
pub struct Margins {
    alone: ErrorMargin,
    together: ErrorMargin,
}

impl Margins {
    /// The margins of a predictor, as for [`ErrorMargin::new`].
    pub fn new(error: f64) -> Self {
        Margins { alone: ErrorMargin::new(error), together: ErrorMargin::new(error) }
    }

    /// The margin of groups with this number of requests.
    pub fn of(&self, requests: usize) -> &ErrorMargin {
        if requests > 1 { &self.together } else { &self.alone }
    }

    /// Adds a group, as [`ErrorMargin::handle_group`] does.
    pub fn handle_group(&mut self, requests: usize, predicted: Duration, took: Duration) {
        let margin = if requests > 1 { &mut self.together } else { &mut self.alone };
        margin.handle_group(predicted, took);
    }

    /// The latency that must fit into the headroom. Several requests need their safe bound. One
    /// request needs only its probable latency, as it would otherwise be given up.
    pub fn needed(&self, requests: usize, predicted: Duration) -> Duration {
        let margin = self.of(requests);
        if requests > 1 { margin.bound(predicted) } else { margin.expected(predicted) }
    }
}
