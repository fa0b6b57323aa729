//! What has lost in reality, and how long it is not tried again.

use std::collections::BTreeMap;

use crate::time::{Duration, Time};

/// After the first loss of a model; after each further one twice as long.
const HOLD_OFF: Duration = Duration::from_millis(8_000);
/// The policy that has lost is left out so many times as long: what is predicted of it was wrong once.
const LOSER: u64 = 4;
/// Losses by which it grows, at most: to 9 hours.
const MOST: u32 = 12;

/// When what may be tried of a model whose policies have lost against `exclusive` in reality.
#[derive(Clone, Debug, Default)]
pub(super) struct HoldOff {
    losses: u32,
    until: Time,
    /// By candidate.
    losers: BTreeMap<usize, Time>,
}

impl HoldOff {
    /// A candidate has lost.
    pub fn lose(&mut self, now: Time, candidate: usize) {
        let held = HOLD_OFF.saturating_mul(1 << self.losses.min(MOST));
        self.losses += 1;
        self.until = now + held;
        self.losers.insert(candidate, now + held.saturating_mul(LOSER));
    }

    /// Whether something may be tried by now.
    pub fn is_over(&self, now: Time) -> bool {
        now >= self.until
    }

    /// Whether this candidate may be.
    pub fn allows(&self, now: Time, candidate: usize) -> bool {
        self.is_over(now) && self.losers.get(&candidate).is_none_or(|until| now >= *until)
    }
}
