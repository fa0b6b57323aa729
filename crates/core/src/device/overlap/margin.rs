//! By how much predictions are off, from what groups took.

use std::collections::VecDeque;

use crate::quantile::quantiles;
use crate::time::Duration;

/// How many groups are remembered.
const REMEMBERED: usize = 64;
/// Before so many, what the predictor's test said counts.
const FEWEST: usize = 8;

/// What predictions are multiplied by: the quantiles of actual to predicted time over the last groups. Abacus has none and trusts its predictor.
#[derive(Clone, Debug)]
pub struct ErrorMargin {
    /// Actual to predicted, the last at the end.
    ratios: VecDeque<f64>,
    expected: f64,
    bound: f64,
}

impl ErrorMargin {
    /// Of a predictor whose relative error was below `error` for 95% of the samples that it was tested with.
    pub fn new(error: f64) -> Self {
        let error = if error.is_finite() { error.max(0.0) } else { 1.0 };
        ErrorMargin { ratios: VecDeque::new(), expected: 1.0, bound: 1.0 + error }
    }

    /// A group took so long. What was predicted to take no time says nothing.
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

    /// Whether enough groups have run to say so.
    pub fn is_measured(&self) -> bool {
        self.ratios.len() >= FEWEST
    }

    /// What a group probably takes that is predicted to take so long: half of those before it took less.
    pub fn expected(&self, predicted: Duration) -> Duration {
        Duration::from_secs_f64(predicted.as_secs_f64() * self.expected)
    }

    /// What it surely takes: 95% of those before it took less.
    pub fn bound(&self, predicted: Duration) -> Duration {
        Duration::from_secs_f64(predicted.as_secs_f64() * self.bound)
    }
}

/// Margins of groups of one request and of several: a predictor may be right about one and wrong about what requests do to each other.
#[derive(Clone, Debug)]
pub struct Margins {
    alone: ErrorMargin,
    together: ErrorMargin,
}

impl Margins {
    /// As [`ErrorMargin::new`].
    pub fn new(error: f64) -> Self {
        Margins { alone: ErrorMargin::new(error), together: ErrorMargin::new(error) }
    }

    /// Of groups of so many requests.
    pub fn of(&self, requests: usize) -> &ErrorMargin {
        if requests > 1 { &self.together } else { &self.alone }
    }

    /// As [`ErrorMargin::handle_group`].
    pub fn handle_group(&mut self, requests: usize, predicted: Duration, took: Duration) {
        let margin = if requests > 1 { &mut self.together } else { &mut self.alone };
        margin.handle_group(predicted, took);
    }

    /// What a group has to fit into the headroom with: several as they surely take, one as it probably takes, as otherwise it would be given up.
    pub fn needed(&self, requests: usize, predicted: Duration) -> Duration {
        let margin = self.of(requests);
        if requests > 1 { margin.bound(predicted) } else { margin.expected(predicted) }
    }
}
