//! A group of operators of several models that begin together and end in one barrier.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::device::launch::SegmentRange;
use crate::ids::{ModelId, RequestId};
use crate::time::{Duration, Time};

/// The id of a group: given out in order from zero, never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GroupId(pub u64);

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "g{}", self.0)
    }
}

/// The operators of one request in a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GroupPart {
    /// The request.
    pub request: RequestId,
    /// The request's model, of which a group has no other request.
    pub model: ModelId,
    /// The operators.
    pub operators: SegmentRange,
    /// The request's items.
    pub rows: u32,
    /// The size of the request's varying dimension, such as tokens; 0 if none varies.
    pub length: u32,
}

/// Operators of several models that begin together. The group is done when all operators are.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct OperatorGroup {
    /// The group's id, which [`super::Overlap::handle_completion`] takes.
    pub id: GroupId,
    /// The group's operators, the most urgent request first.
    pub parts: Vec<GroupPart>,
    /// The predicted latency; `None`: the predictor could not tell, and the group has one request.
    pub predicted: Option<Duration>,
    /// The predicted latency, corrected by the latencies of earlier groups.
    pub expected: Option<Duration>,
    /// The deadline of the most urgent request.
    pub deadline: Time,
    /// The calls of the predictor while the device had nothing to run; 0: the group was decided
    /// while another ran (Abacus §6.3).
    pub waited_for: u32,
    /// Whether the group runs only to learn whether predictions have become right. By the measured
    /// margin it would not run.
    pub is_trial: bool,
}
