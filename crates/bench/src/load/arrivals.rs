//! The arrival times of requests in an open loop.

use downbeat_core::{Duration, Time};
use downbeat_sim::{Arrivals as Process, Gaps};
use rand_pcg::Pcg64;

use crate::load::seed::Stream;

/// The length of a step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Until {
    /// The step lasts for this many requests.
    Requests(u64),
    /// The step lasts for this time.
    Elapsed(Duration),
    /// The step lasts to the end of the run.
    End,
}

/// A stretch of constant mean rate.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Step {
    /// Mean requests per second; positive and finite.
    pub rate: f64,
    /// The end of the step.
    pub until: Until,
}

/// A sequence of rates, and the variation of the gaps. The arrivals end with the last step.
#[derive(Clone, PartialEq, Debug)]
pub struct Schedule {
    /// Variation of the gaps.
    pub gaps: Process,
    /// The steps, one after another.
    pub steps: Vec<Step>,
}

impl Schedule {
    /// One rate throughout.
    pub fn steady(gaps: Process, rate: f64) -> Self {
        Schedule { gaps, steps: vec![Step { rate, until: Until::End }] }
    }

    /// The arrival times since the start of the run. Equal seeds give equal arrivals.
    pub fn arrivals(&self, seed: u64) -> Arrivals {
        Arrivals {
            // The command line admits positive finite shapes only; anything else falls back to
            // shape 1.
            gaps: self.gaps.gaps().unwrap_or(Gaps::Exponential),
            steps: self.steps.clone().into_iter(),
            step: None,
            seconds: 0.0,
            random: Stream::Arrivals.random(seed),
        }
    }

    /// The mean length of all steps; `None` if the last one has no end.
    pub fn mean_length(&self) -> Option<Duration> {
        let mut seconds = 0.0;
        for step in &self.steps {
            seconds += match step.until {
                Until::Requests(n) => n as f64 / step.rate,
                Until::Elapsed(d) => d.as_secs_f64(),
                Until::End => return None,
            };
        }
        Some(Duration::from_secs_f64(seconds))
    }
}

/// The step that arrivals are drawn from now.
struct Current {
    rate: f64,
    requests_left: u64,
    /// Seconds since the start of the run.
    end: f64,
}

/// Iterator over the arrival times of a [`Schedule`]; never decreasing.
pub struct Arrivals {
    gaps: Gaps,
    steps: std::vec::IntoIter<Step>,
    step: Option<Current>,
    /// The latest arrival, or the beginning of the step if that is later.
    seconds: f64,
    random: Pcg64,
}

impl Iterator for Arrivals {
    type Item = Time;

    fn next(&mut self) -> Option<Time> {
        // A gap is drawn in expected arrivals and spent at each step's rate in turn. The part that
        // is left at the end of a step continues at the next rate.
        let mut gap = self.gaps.draw(&mut self.random);
        loop {
            let step = match &mut self.step {
                Some(step) => step,
                None => {
                    let next = self.steps.next()?;
                    let (requests_left, end) = match next.until {
                        Until::Requests(n) => (n, f64::INFINITY),
                        Until::Elapsed(d) => (u64::MAX, self.seconds + d.as_secs_f64()),
                        Until::End => (u64::MAX, f64::INFINITY),
                    };
                    self.step.insert(Current { rate: next.rate, requests_left, end })
                }
            };
            if step.requests_left == 0 {
                self.step = None;
                continue;
            }
            let at = self.seconds + gap / step.rate;
            if at >= step.end {
                gap -= (step.end - self.seconds) * step.rate;
                self.seconds = step.end;
                self.step = None;
                continue;
            }
            step.requests_left -= 1;
            self.seconds = at;
            return Some(Time::ZERO + Duration::from_secs_f64(at));
        }
    }
}
