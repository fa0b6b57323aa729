//! What may be better than what is done.

use super::score::{Ground, Score};
use super::setting::Setting;

/// Trials that are remembered of it: loads change.
const MOST: usize = 4;

/// What looked better than what is done, but not surely: the best of many looks better than it is. It is tried again with all that comes, until what came of
/// these trials together tells.
#[derive(Clone, Debug)]
pub(super) struct Contender {
    pub setting: Setting,
    /// By trial, the last one last: what came of it, and of what is done.
    trials: Vec<(Score, Score)>,
    /// Arrivals that had come before the last of the trials.
    seen: u64,
}

impl Contender {
    /// Before anything came of it.
    pub fn new(setting: Setting) -> Self {
        Contender { setting, trials: Vec::new(), seen: 0 }
    }

    /// What came of it and of what is done on the last `count` of `came` arrivals. What was tried before on some of them counts no more.
    pub fn add(&mut self, own: &Score, done: &Score, came: u64, count: usize) {
        if came.saturating_sub(self.seen) < count as u64 {
            self.trials.pop();
        } else {
            self.seen = came;
        }
        if self.trials.len() == MOST {
            self.trials.remove(0);
        }
        self.trials.push((own.clone(), done.clone()));
    }

    /// As [`Score::difference`], of all that is remembered.
    pub fn difference(&self, consolidate: bool, sure: f64) -> Option<(Ground, f64)> {
        let sum = |of: fn(&(Score, Score)) -> &Score| {
            self.trials.iter().map(of).fold(Score::default(), |sum, score| sum.plus(score))
        };
        sum(|(own, _)| own).difference(&sum(|(_, done)| done), consolidate, sure)
    }

    /// It is what is done now; what was done until now may be better after all.
    pub fn taken(self, done: Setting) -> Self {
        let trials = self.trials.into_iter().map(|(own, done)| (done, own)).collect();
        Contender { setting: done, trials, ..self }
    }
}
