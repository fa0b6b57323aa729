//! A group of operators of several models that begin together and end in one barrier.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::device::launch::SegmentRange;
use crate::ids::{ModelId, RequestId};
use crate::time::{Duration, Time};

/// A group: given out in order from zero, never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GroupId(pub u64);

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "g{}", self.0)
    }
}

/// Operators of one request in a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GroupPart {
    /// Whose they are.
    pub request: RequestId,
    /// Its model, of which a group has no other request.
    pub model: ModelId,
    /// The operators.
    pub operators: SegmentRange,
    /// Its items.
    pub rows: u32,
    /// The size of its dimension that varies, such as tokens; 0 where there is none.
    pub length: u32,
}

/// Operators of several models that begin together; the group is done when all are.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct OperatorGroup {
    /// Its name, which [`super::Overlap::handle_completion`] takes.
    pub id: GroupId,
    /// The most urgent request first.
    pub parts: Vec<GroupPart>,
    /// What the predictor says that it takes; `None`: it could not say, and the group is of one request.
    pub predicted: Option<Duration>,
    /// What that is taken for, by what groups before it took.
    pub expected: Option<Duration>,
    /// The deadline of the most urgent request.
    pub deadline: Time,
    /// How often the predictor was asked while the device had nothing to run; 0: the group was decided while another ran (Abacus §6.3).
    pub waited_for: u32,
    /// Whether it is run to learn whether predictions have become right, where by what is known it would not be.
    pub is_trial: bool,
}
