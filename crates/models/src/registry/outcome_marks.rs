//! The outcomes of requests until some moments of the last minutes.

use std::collections::VecDeque;

use downbeat_core::{Duration, Time};

/// A mark is kept for as long as the requests that a what-if replays.
const SPAN: Duration = Duration::from_millis(300_000);
/// Marks are at least so far apart, but for the last two marks.
const APART: Duration = Duration::from_millis(250);

/// The number of requests, and of requests in time, until a moment.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct OutcomeMark {
    pub at: Time,
    pub requests: u64,
    pub in_time: u64,
}

/// The outcomes of requests until some moments of the last five minutes, to compare with replays.
///
/// **Bound.** At most 1,202 marks: 28 KiB.
#[derive(Debug, Default)]
pub(super) struct OutcomeMarks(VecDeque<OutcomeMark>);

impl OutcomeMarks {
    /// Adds a mark. Counts that fall are of other models: the marks begin anew.
    pub fn note(&mut self, mark: OutcomeMark) {
        if self.0.back().is_some_and(|last| mark.requests < last.requests || mark.in_time < last.in_time) {
            self.0.clear();
        }
        if let [.., before, last] = *self.0.make_contiguous()
            && last.at.since(before.at) < APART
        {
            self.0.pop_back();
        }
        self.0.push_back(mark);
        while self.0.front().is_some_and(|first| mark.at.since(first.at) > SPAN) {
            self.0.pop_front();
        }
    }

    /// All marks, in the order of their times.
    pub fn all(&self) -> Vec<OutcomeMark> {
        self.0.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(ms: u64, requests: u64) -> OutcomeMark {
        OutcomeMark { at: Time::ZERO + Duration::from_millis(ms), requests, in_time: requests / 2 }
    }

    #[test]
    fn marks_are_bounded_and_the_last_one_is_kept() {
        let mut marks = OutcomeMarks::default();
        (0..1_000_000).for_each(|ms| marks.note(mark(ms, ms)));
        let all = marks.all();
        assert!(all.len() <= 1_202 && all.last() == Some(&mark(999_999, 999_999)), "{}", all.len());
        assert!(all[0].at >= Time::ZERO + Duration::from_millis(699_999), "{:?}", all[0]);
    }

    #[test]
    fn marks_begin_anew_when_a_model_goes() {
        let mut marks = OutcomeMarks::default();
        for mark in [mark(0, 10), mark(1_000, 20), mark(2_000, 5)] {
            marks.note(mark);
        }
        assert_eq!(marks.all(), [mark(2_000, 5)]);
    }
}
