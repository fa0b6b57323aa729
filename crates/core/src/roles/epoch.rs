//! Under whose lead something was decided.

use std::cmp::{Ordering, Reverse};

use serde::{Deserialize, Serialize};

/// Under whose lead something was decided. The greater one is obeyed: the higher number and, should two schedulers have taken the same number while they could not hear
/// each other, the one of lower rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Epoch {
    /// From 1; 0: nobody has led yet.
    pub number: u64,
    /// Place of the scheduler in the list that all have.
    pub rank: u32,
}

impl Epoch {
    /// Before anybody has led: less than any epoch in which somebody does.
    pub const NONE: Epoch = Epoch { number: 0, rank: u32::MAX };
}

impl Ord for Epoch {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.number, Reverse(self.rank)).cmp(&(other.number, Reverse(other.rank)))
    }
}

impl PartialOrd for Epoch {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
