//! A trial: candidates for one model on the same parts of the past, of which the best stays.

use serde::{Deserialize, Serialize};

use super::candidate::Candidate;
use super::replay::{Part, Replay, Stage};
use crate::cluster::{Ground, PastArrival, RATES, Score, Tally};
use crate::device::auto::MARGIN;
use crate::ids::ModelId;
use crate::time::{Duration, Time};

/// The parts of the past that are tried, at most: 1/8, 1/8, 1/4, and 1/2 of it.
const SHARES: [usize; 4] = [8, 8, 4, 1];
/// The time before a part that is replayed without being counted.
const LEAD: Duration = Duration::from_millis(150);
/// This many budgets of a request are added to `LEAD`.
const LEAD_BUDGETS: u64 = 3;
/// The standard deviations by which a candidate must beat the current policy: a change of policy
/// loads the model anew.
const SURE: f64 = 3.0;
/// The standard deviations by which a candidate must beat another candidate.
const LIKELY: f64 = 0.7;

/// A replay does not match reality if its share of bad requests differs by more than this. The
/// difference must also exceed a quarter of the larger share.
const BAD_OFF: f64 = 0.03;
/// A replay also fails to match if its mean time to the answer differs by more than this share of
/// the larger time.
const OFF: f64 = 0.25;

/// The result of a trial.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DeviceDecision {
    /// The model.
    pub model: ModelId,
    /// The policy that suits the model best.
    pub best: Candidate,
    /// Whether the best policy differs from the current one.
    pub changed: bool,
    /// The requests' real outcome: the share of bad ones, and the mean time to the answer in
    /// seconds.
    pub real: (f64, f64),
    /// Whether the replay of the current policies matches the real outcome. If not, nothing
    /// changes.
    pub faithful: bool,
    /// The policies that were tried: the current one first, then the last candidates.
    pub tried: Vec<TriedPolicy>,
}

impl DeviceDecision {
    /// Keeps the current policy if the replay of the models' current policies does not match the
    /// real outcome.
    pub(super) fn check(&mut self, real: (f64, f64)) {
        let Some(TriedPolicy { candidate, bad, delay }) = self.tried.first() else { return };
        let replayed = bad.first().map_or(0.0, |(_, all)| *all);
        let differs = |a: f64, b: f64, least: f64| (a - b).abs() > least.max(OFF * a.max(b));
        self.real = real;
        self.faithful = !differs(replayed, real.0, BAD_OFF) && !differs(*delay, real.1, 0.0);
        if !self.faithful {
            self.best = candidate.clone();
            self.changed = false;
        }
    }
}

/// The outcome of a candidate.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TriedPolicy {
    /// The policy.
    pub candidate: Candidate,
    /// The share of bad requests of the model that fared worst, and the share of all. The pairs are
    /// for 1, 1.1 and 1.25 times the real rate.
    pub bad: Vec<(f64, f64)>,
    /// The mean time from arrival to answer in seconds, at the real rate.
    pub delay: f64,
}

/// Tries candidates for one model on parts of the past that double in length, the newest first.
/// After each part the worse half leaves.
#[derive(Debug)]
pub(super) struct Trial {
    past: Vec<PastArrival>,
    stage: Stage,
    model: ModelId,
    /// The candidates' numbers and scores. The first is the current policy, which stays to the end.
    candidates: Vec<(usize, Score)>,
    parts: usize,
    part: Part,
    /// The index of the candidate and of the rate.
    at: (usize, usize),
    replay: Option<Box<Replay>>,
    done: bool,
}

impl Trial {
    /// A trial of the candidates for a known model that may be tried by now.
    pub fn new(past: Vec<PastArrival>, stage: Stage, model: ModelId, now: Time) -> Self {
        let staged = stage.models.get(model.0 as usize).and_then(Option::as_ref);
        let (count, current) = staged.map_or((0, 0), |staged| (staged.candidates.len(), staged.current));
        let score = || Score(vec![Tally::default(); RATES.len()]);
        let may = |number: usize| staged.is_some_and(|staged| staged.hold_off.allows(now, number));
        let others = (0..count).filter(|number| *number != current && may(*number));
        let candidates = std::iter::once(current).chain(others).map(|number| (number, score())).collect();
        let part = Part { lead: 0, counted: 0, end: past.len() };
        let mut trial = Trial { past, stage, model, candidates, parts: 0, part, at: (0, 0), replay: None, done: false };
        trial.next_part(trial.past.len());
        trial
    }

    /// Replays at most `events` events, and returns their number.
    pub fn step(&mut self, events: u64) -> u64 {
        let mut used = 0;
        while used < events && !self.done {
            let (at, rate) = self.at;
            if self.replay.is_none() {
                let chosen = self.chosen(self.candidates[at].0);
                let replay = Replay::new(&self.stage, &chosen, &self.past, self.part, RATES[rate]);
                self.replay = Some(Box::new(replay));
            }
            let Some(replay) = &mut self.replay else { break };
            let (events, through) = replay.step(&self.past, events - used);
            used += events;
            if through && let Some(replay) = self.replay.take() {
                self.candidates[at].1.0[rate].add(&replay.into_tally());
                self.advance();
            }
        }
        used
    }

    /// Each model's candidate, with `candidate` for the model of the trial.
    fn chosen(&self, candidate: usize) -> Vec<usize> {
        let current = self.stage.models.iter().map(|staged| staged.as_ref().map_or(0, |staged| staged.current));
        let mut chosen: Vec<usize> = current.collect();
        chosen[self.model.0 as usize] = candidate;
        chosen
    }

    /// Takes the decision, once the trial is complete.
    pub fn poll_decision(&mut self) -> Option<DeviceDecision> {
        let staged = self.stage.models.get(self.model.0 as usize).and_then(Option::as_ref).filter(|_| self.done)?;
        let named = |number: usize| staged.candidates[number].candidate.clone();
        let best = self.best();
        let tried = |(number, score): &(usize, Score)| TriedPolicy {
            candidate: named(*number),
            bad: score.0.iter().map(|tally| (tally.worst(), tally.bad_share())).collect(),
            delay: score.0[0].delay(),
        };
        Some(DeviceDecision {
            model: self.model,
            best: named(self.candidates[best].0),
            changed: best != 0,
            real: (0.0, 0.0),
            faithful: true,
            tried: self.candidates.iter().map(tried).collect(),
        })
    }

    /// The best of the remaining candidates, or the current policy if none is much better.
    fn best(&self) -> usize {
        let (mut best, current) = (0, &self.candidates[0].1);
        for _ in 0..2 {
            for (index, (_, score)) in self.candidates.iter().enumerate() {
                let difference = score.difference(&self.candidates[best].1, false, LIKELY);
                if difference.is_some_and(|(_, gain)| gain > 0.0) {
                    best = index;
                }
            }
        }
        match self.candidates[best].1.difference(current, false, SURE) {
            Some((Ground::Delay, gain)) if gain > MARGIN => best,
            None | Some((Ground::Delay, _)) => 0,
            Some((_, gain)) if gain > 0.0 => best,
            Some(_) => 0,
        }
    }

    /// Goes on to the next rate, candidate, or part.
    fn advance(&mut self) {
        let (at, rate) = self.at;
        self.at = if rate + 1 < RATES.len() { (at, rate + 1) } else { (at + 1, 0) };
        if self.at.0 < self.candidates.len() {
            return;
        }
        self.at = (0, 0);
        self.parts += 1;
        if self.parts == SHARES.len() || self.part.counted == 0 {
            self.done = true;
            return;
        }
        let mut others = self.candidates.split_off(1);
        let rank = |score: &Score| (score.badness(&[]), score.0[0].delay());
        others.sort_by(|(_, a), (_, b)| {
            let ((a, a_delay), (b, b_delay)) = (rank(a), rank(b));
            a.total_cmp(&b).then(a_delay.total_cmp(&b_delay))
        });
        others.truncate(others.len().div_ceil(2));
        self.candidates.append(&mut others);
        self.next_part(self.part.counted);
    }

    /// Sets the part that ends before `end`.
    fn next_part(&mut self, end: usize) {
        let share = SHARES[self.parts];
        let counted = if share == 1 { 0 } else { end.saturating_sub(self.past.len() / share) };
        let budgets = self.past[counted..end].iter().map(|arrival| arrival.budget);
        let budget = budgets.filter(|budget| *budget != Duration::MAX).max().unwrap_or(Duration::ZERO);
        let lead = LEAD + budget.saturating_mul(LEAD_BUDGETS);
        let first = self.past.get(counted).map_or(Time::ZERO, |first| first.at);
        let lead = self.past.partition_point(|arrival| arrival.at + lead < first);
        self.part = Part { lead, counted, end };
    }
}
