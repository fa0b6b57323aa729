//! A setting that may be better than the current one.

use super::score::{Ground, Score};
use super::setting::Setting;

/// Number of remembered trials of a contender. Older trials do not count, as loads change.
const MOST: usize = 4;

/// A setting that looked better than the current one, but not surely: the best of many looks better
/// than it is. Each further trial includes it, until these trials together decide.
#[derive(Clone, Debug)]
pub(super) struct Contender {
    pub setting: Setting,
    /// By trial, the last one last: the score of the contender, and the score of the current
    /// setting.
    trials: Vec<(Score, Score)>,
    /// Arrivals that had come before the last of the trials.
    seen: u64,
}

impl Contender {
    /// A contender without trials.
    pub fn new(setting: Setting) -> Self {
        Contender { setting, trials: Vec::new(), seen: 0 }
    }

    /// Adds the scores of the contender and of the current setting, on the last `count` of `came`
    /// arrivals. If the last trial was on some of these arrivals, it no longer counts.
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

    /// [`Score::difference`] over all remembered trials.
    pub fn difference(&self, consolidate: bool, sure: f64) -> Option<(Ground, f64)> {
        let sum = |of: fn(&(Score, Score)) -> &Score| {
            self.trials.iter().map(of).fold(Score::default(), |sum, score| sum.plus(score))
        };
        sum(|(own, _)| own).difference(&sum(|(_, done)| done), consolidate, sure)
    }

    /// The contender becomes the current setting. The former setting, `done`, becomes the
    /// contender: it may be better after all.
    pub fn taken(self, done: Setting) -> Self {
        let trials = self.trials.into_iter().map(|(own, done)| (done, own)).collect();
        Contender { setting: done, trials, ..self }
    }
}
