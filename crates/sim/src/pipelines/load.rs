//! Loads: the same arrivals at another rate, and the highest load that loses little.

use downbeat_core::pipeline::PipelineArrival;
use downbeat_core::{Duration, Time};

/// The same arrivals at `load` times their rate. Deadlines stay as far away.
pub fn at_load(arrivals: &[PipelineArrival], load: f64) -> Vec<PipelineArrival> {
    let origin = arrivals.first().map_or(Time::ZERO, |first| first.at);
    let scaled = |arrival: &PipelineArrival| {
        let since = Duration::from_secs_f64(arrival.at.since(origin).as_secs_f64() / load);
        PipelineArrival { at: Time::ZERO + since, ..*arrival }
    };
    arrivals.iter().map(scaled).collect()
}

/// A search of the highest load at which at most `tolerated` of the requests are lost.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LoadSearch {
    /// The lowest load that is tried.
    pub least: f64,
    /// The highest load that is tried.
    pub most: f64,
    /// Halvings of the range, in the logarithm. 8 of them find a load between 0.02 and 4 within 2%.
    pub steps: u32,
    /// The tolerated share of lost requests: 0.01 in the papers.
    pub tolerated: f64,
}

impl LoadSearch {
    /// The highest load at which `is_good` says that at most `tolerated` are lost; `least` if none is.
    /// Loads above the first one that is not good are not tried.
    pub fn capacity(&self, mut is_good: impl FnMut(f64) -> bool) -> f64 {
        let (mut good, mut bad) = (self.least.ln(), self.most.ln());
        for _ in 0..self.steps {
            let middle = (good + bad) / 2.0;
            *(if is_good(middle.exp()) { &mut good } else { &mut bad }) = middle;
        }
        good.exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_finds_the_load_from_which_requests_are_lost() {
        let search = LoadSearch { least: 0.02, most: 4.0, steps: 12, tolerated: 0.01 };
        let found = search.capacity(|load| load <= 0.7);
        assert!((0.699..=0.7).contains(&found), "{found}");
        assert_eq!(search.capacity(|_| false), 0.02f64.ln().exp());
    }

    #[test]
    fn a_load_changes_the_gaps_and_no_budget() {
        let at = |ms| Time::ZERO + Duration::from_millis(ms);
        let arrival = |ms| PipelineArrival { at: at(ms), budget: Duration::from_millis(9), pipeline: 0 };
        assert_eq!(at_load(&[arrival(2), arrival(6)], 2.0), [arrival(0), arrival(2)]);
    }
}
