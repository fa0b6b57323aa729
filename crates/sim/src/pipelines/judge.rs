//! The judge of pipelines: goodput from the log of ends alone.

use downbeat_core::Time;
use downbeat_core::pipeline::{End, Outcome, PipelineArrival};

/// A judge that knows the arrivals and the log of ends, and nothing else.
#[derive(Clone, Copy, Debug)]
pub struct PipelineJudge<'a> {
    arrivals: &'a [PipelineArrival],
    /// Arrivals before this place are the warm-up: they must end, but do not count.
    counted: usize,
}

/// The counts of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Verdict {
    /// Requests that came after the warm-up.
    pub asked: u64,
    /// Requests that were done by their deadlines.
    pub good: u64,
    /// Requests that were done too late.
    pub late: u64,
    /// Requests that were given up.
    pub lost: u64,
}

/// A rule that this run broke, and every run must keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BrokenRule {
    /// An end names no request.
    #[error("request {0} has ended, but never came")]
    Unknown(u64),
    /// A request has two ends.
    #[error("request {0} has ended twice")]
    Twice(u64),
    /// A request has no end.
    #[error("request {0} has not ended")]
    Never(u64),
    /// A request ended before it came.
    #[error("request {0} has ended before it came")]
    Early(u64),
}

impl Verdict {
    /// Requests in time, as a share of all.
    pub fn goodput(&self) -> f64 {
        self.good as f64 / (self.asked as f64).max(1.0)
    }
}

impl<'a> PipelineJudge<'a> {
    /// A judge of these arrivals, of which the first `warm_up` do not count.
    pub fn new(arrivals: &'a [PipelineArrival], warm_up: usize) -> Self {
        PipelineJudge { arrivals, counted: warm_up }
    }

    /// Whether this end is of a request that counts, and is not in time.
    pub fn is_loss(&self, end: &End) -> bool {
        let index = usize::try_from(end.request).unwrap_or(usize::MAX);
        let Some(arrival) = self.arrivals.get(index).filter(|_| index >= self.counted) else { return false };
        end.outcome != Outcome::Done || end.at > self.came(arrival) + arrival.budget
    }

    /// When a request came. Times of ends count from the first arrival.
    fn came(&self, arrival: &PipelineArrival) -> Time {
        Time::ZERO + arrival.at.since(self.arrivals[0].at)
    }

    /// Counts the ends.
    ///
    /// # Errors
    /// If a request has not ended exactly once, at or after its arrival.
    pub fn judge(&self, ends: &[End]) -> Result<Verdict, BrokenRule> {
        let mut seen: Vec<Option<(Time, Outcome)>> = vec![None; self.arrivals.len()];
        for end in ends {
            let index = usize::try_from(end.request).unwrap_or(usize::MAX);
            let slot = seen.get_mut(index).ok_or(BrokenRule::Unknown(end.request))?;
            if slot.replace((end.at, end.outcome)).is_some() {
                return Err(BrokenRule::Twice(end.request));
            }
        }
        let mut verdict = Verdict::default();
        for (index, (arrival, end)) in self.arrivals.iter().zip(seen).enumerate() {
            let (at, outcome) = end.ok_or(BrokenRule::Never(index as u64))?;
            let came = self.came(arrival);
            if at < came {
                return Err(BrokenRule::Early(index as u64));
            }
            if index < self.counted {
                continue;
            }
            verdict.asked += 1;
            match outcome {
                Outcome::Done if at <= came + arrival.budget => verdict.good += 1,
                Outcome::Done => verdict.late += 1,
                Outcome::Hopeless | Outcome::Lost => verdict.lost += 1,
            }
        }
        Ok(verdict)
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::Duration;

    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    fn arrivals() -> Vec<PipelineArrival> {
        let arrival = |ms| PipelineArrival { at: at(ms), budget: Duration::from_millis(10), pipeline: 0 };
        [5, 6, 7, 8].map(arrival).to_vec()
    }

    fn end(request: u64, ms: u64, outcome: Outcome) -> End {
        End { request, at: at(ms), step: 0, outcome }
    }

    /// Times of ends count from the first arrival.
    #[test]
    fn goodput_is_counted_from_ends_and_arrivals() {
        let ends =
            [end(0, 1, Outcome::Lost), end(3, 14, Outcome::Done), end(1, 11, Outcome::Done), end(2, 3, Outcome::Lost)];
        let arrivals = arrivals();
        let verdict = PipelineJudge::new(&arrivals, 1).judge(&ends).unwrap();
        assert_eq!(verdict, Verdict { asked: 3, good: 1, late: 1, lost: 1 });
        assert!((verdict.goodput() - 1.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn each_broken_rule_is_found() {
        let arrivals = arrivals();
        let judge = PipelineJudge::new(&arrivals, 0);
        let all: Vec<End> = (0..4).map(|request| end(request, 9, Outcome::Done)).collect();
        let with = |last: End| [&all[..3], &[last]].concat();
        assert_eq!(judge.judge(&with(end(7, 9, Outcome::Done))), Err(BrokenRule::Unknown(7)));
        assert_eq!(judge.judge(&with(end(0, 9, Outcome::Done))), Err(BrokenRule::Twice(0)));
        assert_eq!(judge.judge(&all[..3]), Err(BrokenRule::Never(3)));
        assert_eq!(judge.judge(&with(end(3, 2, Outcome::Done))), Err(BrokenRule::Early(3)));
        assert!(judge.judge(&all).is_ok());
    }
}
