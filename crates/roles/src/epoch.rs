//! The name of a lead: an epoch.

use std::cmp::{Ordering, Reverse};

use serde::{Deserialize, Serialize};

/// The number and rank of a lead; nodes obey the greater epoch. The higher number is greater. If
/// two schedulers that could not hear each other took the same number, the lower rank is greater.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Epoch {
    /// From 1; 0 before the first lead.
    pub number: u64,
    /// The leader's place in the list that all schedulers share.
    pub rank: u32,
}

/// The most by which one report raises a known epoch. A takeover raises the epoch by one, so this
/// is more than a hundred years of takeovers, one each second.
pub(super) const STEP: u64 = 1 << 32;
/// The greatest number of an epoch. A step in each 20 ms reaches this number after a year.
const MOST_NUMBER: u64 = 1 << 63;

impl Epoch {
    /// The epoch before the first lead: less than any epoch with a leader.
    pub const NONE: Epoch = Epoch { number: 0, rank: u32::MAX };

    /// Whether leads can have come so far.
    pub(super) fn is_possible(self) -> bool {
        self.number <= MOST_NUMBER
    }

    /// The greatest number that may follow this epoch after `steps` reports.
    pub(super) fn plausible(self, steps: u64) -> u64 {
        self.number.saturating_add(steps * STEP)
    }
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
