//! The prediction of a group's latency, before it runs.

use super::group::GroupPart;
use crate::time::Duration;

/// Predicts the latency of groups of operators: learned from samples, or by an emulated device.
///
/// The same group always has the same answer. One more operator must not make a group faster, or
/// the search finds a smaller group than it could.
pub trait Predictor {
    /// The latency of each group from its begin to its barrier, in order. `None`: the predictor
    /// cannot tell, as for an unknown model, or for more models at once than in its training. The
    /// search passes several groups, which are computed in one pass.
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
