//! What a group of operators takes, before it runs.

use super::group::GroupPart;
use crate::time::Duration;

/// Says what groups of operators take: learned from samples, or an emulated device.
///
/// The same groups have the same answers; a group with an operator more takes no less, or the search finds a smaller group than it could.
pub trait Predictor {
    /// What each of these groups takes from its begin to its barrier, in their order; `None` where it cannot say: a model that it does not know, more models at
    /// once than it was trained for. All in one pass: the search asks for several at a time.
    fn predict(&self, groups: &[&[GroupPart]]) -> Vec<Option<Duration>>;
}

/// No predictor: requests run one at a time, the most urgent first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unpredicted;

impl Predictor for Unpredicted {
    fn predict(&self, groups: &[&[GroupPart]]) -> Vec<Option<Duration>> {
        vec![None; groups.len()]
    }
}
