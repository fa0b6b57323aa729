//! The arrivals of the last seconds.

use std::collections::VecDeque;

use crate::ids::ModelId;
use crate::time::{Duration, Time};

/// Most arrivals that are remembered: 640 KiB.
const MOST: usize = 20 << 10;
/// How long an arrival is remembered.
const SPAN: Duration = Duration::from_millis(10_000);
/// So many arrivals are remembered however old they are: fewer arrivals tell little.
const LEAST: usize = 4 << 10;
/// Arrivals of a rush, and how many rushes are remembered, one of each [`SPAN`]: 480 KiB.
const RUSH: usize = MOST / 8;
const RUSHES: usize = 6;
/// After so many arrivals the last ones are checked for a rush.
const STEP: u64 = RUSH as u64 / 8;
/// A rush counts if it is this many times denser than the last arrivals.
const DENSER: f64 = 1.2;

/// An arrival, with the fields that a replay needs. 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PastArrival {
    /// When the request came.
    pub at: Time,
    /// The time from the arrival to the request's deadline; [`Duration::MAX`]: no deadline.
    pub budget: Duration,
    /// The request's model.
    pub model: ModelId,
    /// Items.
    pub size: u32,
    /// The request's priority level.
    pub level: u32,
}

/// The arrivals of the last seconds, in order of time, and the densest arrivals of the last minute.
/// Loads come and go: from the quiet seconds alone, a rehearsal would forget how to behave in a
/// rush.
#[derive(Debug, Default)]
pub(crate) struct Past {
    arrivals: VecDeque<PastArrival>,
    /// The densest arrivals of each [`SPAN`], the newest last.
    rushes: VecDeque<Vec<PastArrival>>,
    /// When the span of the newest rush began.
    rushing: Time,
    /// Arrivals since the last [`Past::seen`].
    unseen: usize,
    /// Arrivals in all.
    came: u64,
}

/// The arrivals that a trial replays.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The rush, if there was one before the last arrivals; then the last arrivals.
    pub arrivals: Vec<PastArrival>,
    /// Number of arrivals in the rush.
    pub rush: usize,
    /// Arrivals in all, also the forgotten ones.
    pub came: u64,
}

impl Past {
    /// Adds an arrival. If it is earlier than the last arrival, it gets the last arrival's time.
    pub fn push(&mut self, arrival: PastArrival) {
        let last = self.arrivals.back().map_or(Time::ZERO, |last| last.at);
        let arrival = PastArrival { at: arrival.at.max(last), ..arrival };
        while let Some(first) = self.arrivals.front()
            && (self.arrivals.len() >= MOST || self.arrivals.len() >= LEAST && arrival.at.since(first.at) > SPAN)
        {
            self.arrivals.pop_front();
        }
        self.arrivals.push_back(arrival);
        self.unseen += 1;
        self.came += 1;
        if self.came.is_multiple_of(STEP) {
            self.rush(arrival.at);
        }
    }

    /// Remembers the last arrivals as a rush, unless this span has denser ones.
    fn rush(&mut self, now: Time) {
        let Some(begin) = self.arrivals.len().checked_sub(RUSH) else { return };
        let took = now.since(self.arrivals[begin].at);
        let last = self.arrivals.range(begin..).copied();
        if self.rushes.is_empty() || now.since(self.rushing) > SPAN {
            self.rushing = now;
            self.rushes.push_back(last.collect());
            if self.rushes.len() > RUSHES {
                self.rushes.pop_front();
            }
        } else if let Some(rush) = self.rushes.back_mut().filter(|rush| took < length(rush)) {
            *rush = last.collect();
        }
    }

    /// Forgets the arrivals of a model that is gone.
    pub fn forget(&mut self, model: ModelId) {
        self.arrivals.retain(|arrival| arrival.model != model);
        self.rushes.clear();
    }

    /// All remembered arrivals. From now on [`Past::unseen`] counts from zero.
    pub fn seen(&mut self) -> Seen {
        self.unseen = 0;
        let first = self.arrivals.front().map_or(Time::ZERO, |first| first.at);
        let lately = self.span().as_secs_f64() / self.arrivals.len().max(1) as f64;
        let denser = |rush: &&Vec<PastArrival>| length(rush).as_secs_f64() * DENSER < lately * rush.len() as f64;
        let before = self.rushes.iter().filter(|rush| rush.last().is_some_and(|last| last.at <= first));
        let mut arrivals = before.filter(denser).min_by_key(|rush| length(rush)).cloned().unwrap_or_default();
        let rush = arrivals.len();
        arrivals.extend(&self.arrivals);
        Seen { arrivals, rush, came: self.came }
    }

    /// The longest time from an arrival to its deadline; zero if no arrival has a deadline.
    pub fn longest_budget(&self) -> Duration {
        let budgets = self.arrivals.iter().map(|arrival| arrival.budget).filter(|budget| *budget != Duration::MAX);
        budgets.max().unwrap_or(Duration::ZERO)
    }

    pub fn len(&self) -> usize {
        self.arrivals.len()
    }

    /// Arrivals since the last [`Past::seen`].
    pub fn unseen(&self) -> usize {
        self.unseen
    }

    /// Time from the last arrival before the last [`Past::seen`] to the last arrival.
    pub fn span_unseen(&self) -> Duration {
        let before = self.arrivals.len().saturating_sub(self.unseen + 1);
        match (self.arrivals.get(before), self.arrivals.back()) {
            (Some(before), Some(last)) => last.at.since(before.at),
            _ => Duration::ZERO,
        }
    }

    /// Time from the first to the last arrival.
    pub fn span(&self) -> Duration {
        match (self.arrivals.front(), self.arrivals.back()) {
            (Some(first), Some(last)) => last.at.since(first.at),
            _ => Duration::ZERO,
        }
    }
}

/// Time from the first to the last of these arrivals.
fn length(arrivals: &[PastArrival]) -> Duration {
    match arrivals {
        [first, .., last] => last.at.since(first.at),
        _ => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds `count` arrivals after the last, `gap` apart.
    fn push(past: &mut Past, at: &mut Time, count: usize, gap: Duration) {
        for _ in 0..count {
            *at += gap;
            let arrival = PastArrival { at: *at, budget: gap, model: ModelId(0), size: 1, level: 0 };
            past.push(arrival);
        }
    }

    #[test]
    fn a_rush_is_remembered_for_a_minute_once_it_is_not_among_the_last() {
        let (mut past, mut at) = (Past::default(), Time::ZERO);
        let (slow, quick) = (Duration::from_millis(2), Duration::from_micros(200));
        push(&mut past, &mut at, 5_000, slow);
        push(&mut past, &mut at, 4_000, quick);
        let seen = past.seen();
        assert_eq!((seen.rush, seen.arrivals.len(), past.unseen()), (0, past.len(), 0), "it is among the last");
        push(&mut past, &mut at, 10_000, slow);
        let seen = past.seen();
        assert_eq!(seen.rush, RUSH);
        assert_eq!(length(&seen.arrivals[..RUSH]), Duration::from_micros(200 * (RUSH as u64 - 1)));
        assert!(seen.arrivals.is_sorted_by_key(|arrival| arrival.at));
        push(&mut past, &mut at, 40_000, slow);
        assert_eq!(past.seen().rush, 0, "it was long ago");
    }
}
