//! The candidates that have lost in reality, and how long they are not tried again.

use std::collections::BTreeMap;

use crate::time::{Duration, Time};

/// The hold-off after a model's first loss. It doubles with each further loss.
const HOLD_OFF: Duration = Duration::from_millis(8_000);
/// The losing candidate is held off this many times as long, as its prediction was wrong once.
const LOSER: u64 = 4;
/// The most losses that double the hold-off, which then is 9 hours.
const MOST: u32 = 12;

/// When candidates may be tried for a model whose policies have lost against `exclusive` in
/// reality.
#[derive(Clone, Debug, Default)]
pub(super) struct HoldOff {
    losses: u32,
    until: Time,
    /// When each losing candidate may be tried again.
    losers: BTreeMap<usize, Time>,
}

impl HoldOff {
    /// Handles the loss of a candidate.
    pub fn lose(&mut self, now: Time, candidate: usize) {
        let held = HOLD_OFF.saturating_mul(1 << self.losses.min(MOST));
        self.losses += 1;
        self.until = now + held;
        self.losers.insert(candidate, now + held.saturating_mul(LOSER));
    }

    /// Whether any candidate may be tried by now.
    pub fn is_over(&self, now: Time) -> bool {
        now >= self.until
    }

    /// Whether this candidate may be tried by now.
    pub fn allows(&self, now: Time, candidate: usize) -> bool {
        self.is_over(now) && self.losers.get(&candidate).is_none_or(|until| now >= *until)
    }
}
