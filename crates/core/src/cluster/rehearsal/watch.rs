//! The watch. Example: clients wait for answers, and a new behaviour answers them later. Then fewer
//! requests come. The watch notices this, and for a while lets no batch wait longer than now.

use std::collections::VecDeque;

use super::setting::Setting;
use super::trial::Decision;
use crate::time::{Duration, Time};

/// Arrivals are counted in spans of this length.
const SPAN: Duration = Duration::from_millis(50);
/// Number of remembered spans: two seconds.
const MOST: usize = 40;
/// Fewest spans before and after a change for a comparison.
const FEWEST: usize = 6;
/// The rate has fallen if it is below this share of the former rate.
const FEWER: f64 = 0.75;
/// The rate must also fall by this many standard deviations, because the comparison is repeated
/// often.
const SURE: f64 = 4.0;
/// The hold-off after the first fall; it doubles with each further fall.
const HOLD_OFF: Duration = Duration::from_millis(8_000);
/// Most doublings of the hold-off: up to 9 hours.
const MOST_TIMES: u32 = 12;

/// The recent rate of a model's requests, and whether its batches may wait longer than now.
#[derive(Clone, Debug, Default)]
pub(super) struct Rate {
    /// Arrivals by span of time, the newest last, which is not over.
    spans: VecDeque<u32>,
    /// The number of the newest span.
    newest: u64,
    /// How often fewer requests came because answers came later.
    times: u32,
    held: Time,
}

impl Rate {
    /// Counts an arrival.
    pub fn arrived(&mut self, at: Time) {
        self.pass(at);
        if let Some(span) = self.spans.back_mut() {
            *span += 1;
        }
    }

    /// Moves on to the span of `now`.
    pub fn pass(&mut self, now: Time) {
        let number = number(now);
        if self.spans.is_empty() {
            self.newest = number;
            self.spans.push_back(0);
        }
        let passed = number.saturating_sub(self.newest).min(MOST as u64 + 1);
        self.spans.extend((0..passed).map(|_| 0));
        self.newest = self.newest.max(number);
        let old = self.spans.len().saturating_sub(MOST + 1);
        self.spans.drain(..old);
    }

    /// The spans that are over, from span `number` on.
    fn since(&self, number: u64) -> Spans {
        let first = self.newest + 1 - self.spans.len() as u64;
        let skipped = number.saturating_sub(first) as usize;
        let over = self.spans.len().saturating_sub(1);
        Spans::of(self.spans.iter().take(over).skip(skipped).map(|count| f64::from(*count)))
    }

    /// Fewer requests came because answers came later. For a while, no batch may wait longer than
    /// now.
    fn hold(&mut self, now: Time) {
        self.held = now + HOLD_OFF.saturating_mul(1 << self.times.min(MOST_TIMES));
        self.times += 1;
    }

    /// Whether batches may wait longer than now.
    pub fn may_wait(&self, now: Time) -> bool {
        now >= self.held
    }
}

fn number(at: Time) -> u64 {
    at.as_nanos() / SPAN.as_nanos()
}

/// Arrivals in some spans of time.
#[derive(Clone, Copy, Debug, Default)]
struct Spans {
    count: usize,
    mean: f64,
    /// Variance of the mean.
    variance: f64,
}

impl Spans {
    fn of(counts: impl Iterator<Item = f64> + Clone) -> Self {
        let count = counts.clone().count();
        let mean = counts.clone().sum::<f64>() / count.max(1) as f64;
        let squares = counts.map(|arrivals| (arrivals - mean).powi(2)).sum::<f64>();
        Spans { count, mean, variance: squares / (count.max(2) as f64 * (count.max(2) - 1) as f64) }
    }

    fn are_fewer(self, before: Spans) -> bool {
        let fell = before.mean - self.mean;
        self.mean < FEWER * before.mean && fell > SURE * (self.variance + before.variance).sqrt()
    }
}

/// A change after which the requests of some models are answered later.
///
/// A trial replays the arrivals at their recorded times. If some clients wait for answers among
/// others that do not, waiting looks free in the trial. Afterwards fewer requests come. Therefore a
/// change to later answers is on trial itself: it is reversed if fewer requests come at once.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    /// The setting before the change.
    before: Setting,
    /// The decision that made the change.
    decision: Decision,
    /// The span of the change.
    began: u64,
    /// Models whose requests are answered later, with their arrivals before the change.
    later: Vec<(usize, Spans)>,
}

impl Watch {
    /// Watches a change; `None` if no requests are answered later.
    pub fn new(now: Time, before: Setting, decision: Decision, later: Vec<usize>, rates: &mut [Rate]) -> Option<Self> {
        let mut known = Vec::new();
        for model in later {
            rates[model].pass(now);
            let spans = rates[model].since(0);
            known.extend((spans.count >= FEWEST).then_some((model, spans)));
        }
        Some(Watch { before, decision, began: number(now), later: known }).filter(|watch| !watch.later.is_empty())
    }

    /// Compares the rates. `Err`: fewer requests came; the setting to go back to. `Ok`: the watch
    /// if it goes on.
    pub fn judge(self, now: Time, rates: &mut [Rate]) -> Result<Option<Watch>, (Setting, Decision)> {
        let mut fewer = false;
        let mut most = 0;
        for (model, before) in &self.later {
            rates[*model].pass(now);
            let after = rates[*model].since(self.began + 2);
            most = most.max(after.count);
            if after.count >= FEWEST && after.are_fewer(*before) {
                rates[*model].hold(now);
                fewer = true;
            }
        }
        if !fewer {
            return Ok(Some(self).filter(|_| most < MOST - 2));
        }
        let (behaviours, order) = (self.before.behaviours.clone(), self.before.order);
        let why = Some(super::Ground::Throughput);
        Err((self.before, Decision { behaviours, order, changed: true, why, ..self.decision }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The judgement on two seconds, with so many arrivals in each span of the first second and of
    /// the second.
    fn judged(first: impl Fn(u64) -> u64, second: impl Fn(u64) -> u64) -> bool {
        let mut rates = [Rate::default()];
        let feed = |rates: &mut [Rate; 1], span: u64, count: u64| {
            (0..count).for_each(|i| rates[0].arrived(Time::from_nanos(span * SPAN.as_nanos() + 1 + i)));
        };
        (0..20).for_each(|span| feed(&mut rates, span, first(span)));
        let now = Time::from_nanos(20 * SPAN.as_nanos());
        let decision =
            Decision { behaviours: vec![None], order: Default::default(), changed: true, why: None, tried: Vec::new() };
        let mut watch = Watch::new(now, Setting::default(), decision, vec![0], &mut rates);
        for span in 20..40 {
            feed(&mut rates, span, second(span));
            let now = Time::from_nanos((span + 1) * SPAN.as_nanos());
            match watch.take().map(|watch| watch.judge(now, &mut rates)) {
                Some(Ok(goes_on)) => watch = goes_on,
                Some(Err(_)) => return true,
                None => break,
            }
        }
        false
    }

    #[test]
    fn fewer_that_come_at_once_and_for_some_time_are_seen() {
        assert!(judged(|_| 1_000, |span| if span % 3 == 0 { 32 } else { 0 }), "clients that all wait");
        assert!(judged(|span| 100 + span % 7, |span| 50 + span % 7), "half of them do");
        assert!(!judged(|_| 1_000, |_| 1_000));
        assert!(!judged(|span| 100 + 30 * (span % 2), |span| 95 + 30 * (span % 2)));
        let burst = |span: u64| if span.is_multiple_of(7) { 500 } else { 3 };
        assert!(!judged(burst, |_| 3), "a burst that does not come back yet");
    }

    #[test]
    fn who_was_wrong_again_waits_twice_as_long() {
        let mut rate = Rate::default();
        let second = |seconds: u64| Time::from_nanos(seconds * 1_000_000_000);
        rate.hold(second(10));
        assert_eq!([17, 18].map(|at| rate.may_wait(second(at))), [false, true]);
        rate.hold(second(20));
        assert_eq!([35, 36].map(|at| rate.may_wait(second(at))), [false, true]);
    }
}
