//! Candidates on the same part of the past, of which the best stays.

use super::closed_loop::ClosedLoop;
use super::past::Arrival;
use super::replay::{Part, Replay, Stage};
use super::score::{Ground, RATES, Score, Tally};
use crate::cluster::behaviour::Behaviour;
use crate::cluster::model_options::ModelOptions;
use crate::time::Duration;

/// How far a candidate waits, and what its drops aim at, in throughput and size (percent): what a pool of models may do. Of what fares alike the first
/// stays: head drop, which tips over just above its capacity, is the last.
const WAITS: [u8; 3] = [0, 50, 100];
const AIMS: [(u8, u8); 5] = [(94, 100), (94, 75), (100, 100), (80, 100), (0, 100)];
/// Parts that the past is tried in, at most: 1/8, 1/8, 1/4, and 1/2 of it.
const PARTS: u32 = 4;
/// What comes before a part and is replayed without being counted: the rates of the arrivals have to be known.
const LEAD: Duration = Duration::from_millis(150);
/// And so many budgets of a request.
const LEAD_BUDGETS: u64 = 3;
/// Standard deviations by which a candidate has to be better than what is done now.
const SURE: f64 = 1.5;
/// And than another candidate.
const LIKELY: f64 = 0.7;

/// What came of a trial.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// By model: what it is to do; `None`: as follows from the load of the moment.
    pub behaviours: Vec<Option<Behaviour>>,
    /// Whether that is other than before.
    pub changed: bool,
    /// What told it from what was done before; nothing, if that goes on.
    pub why: Option<Ground>,
    /// What was tried: what was done before, then the others, those that left first last.
    pub tried: Vec<Tried>,
}

/// What a candidate came to.
#[derive(Clone, PartialEq, Debug)]
pub struct Tried {
    /// By model.
    pub behaviours: Vec<Option<Behaviour>>,
    /// Parts of the past that it was tried on, before it left or to the end.
    pub parts: u32,
    /// By rate (as it was, 1.1 and 1.25 times that): the share of bad requests of the model that fared worst, and of all.
    pub bad: Vec<(f64, f64)>,
    /// Devices busy in the mean, at the rate as it was.
    pub devices: f64,
    /// Mean time from arrival to answer, seconds, at the rate as it was.
    pub delay: f64,
}

/// Where clients wait for answers: a batch waits until all of them are in it.
fn together(stage: &Stage, current: &[Option<Behaviour>]) -> Vec<Option<Behaviour>> {
    let behaviour = |((options, closed), current): ((&Option<ModelOptions>, &ClosedLoop), &Option<Behaviour>)| {
        let (Some(options), Some(clients)) = (options, closed.clients()) else { return *current };
        let (profile, most) = (options.profiles.first(), options.max_batch);
        let shares = (1..=100).map(|share| Behaviour {
            wait: 100,
            throughput: share,
            size: 100,
            limit: share,
            ..Behaviour::default()
        });
        let mut fitting = shares.filter(|all| all.limit(profile, most, most) == clients.min(most));
        fitting.next().or(*current)
    };
    stage.models.iter().zip(&stage.loops).zip(current).map(behaviour).collect()
}

#[derive(Debug)]
struct Candidate {
    behaviours: Vec<Option<Behaviour>>,
    /// Parts that it was tried on.
    parts: u32,
    score: Score,
}

/// Candidates on the same part of the past, of which the best stays.
#[derive(Debug)]
pub(super) struct Trial {
    past: Vec<Arrival>,
    stage: Stage,
    /// The first is what is done now, and stays to the end.
    candidates: Vec<Candidate>,
    /// The others, those that left first last.
    left: Vec<Candidate>,
    /// Parts that were tried.
    parts: u32,
    part: Part,
    /// Which candidate, at which rate.
    at: (usize, usize),
    replay: Option<Box<Replay>>,
    done: bool,
}

impl Trial {
    pub fn new(past: Vec<Arrival>, stage: Stage, current: &[Option<Behaviour>]) -> Self {
        let mut candidates = vec![current.to_vec()];
        for wait in WAITS {
            for (throughput, size) in AIMS {
                let all = Behaviour { wait, throughput, size, ..Behaviour::default() };
                let alike: Vec<_> = stage.models.iter().map(|model| model.as_ref().map(|_| all)).collect();
                if !candidates.contains(&alike) {
                    candidates.push(alike);
                }
            }
        }
        if stage.loops.iter().any(|closed| closed.clients().is_some()) {
            // Of what fares alike the first stays.
            candidates.insert(1, together(&stage, current));
        }
        let candidate =
            |behaviours| Candidate { behaviours, parts: 0, score: Score(vec![Tally::default(); RATES.len()]) };
        let mut trial = Trial {
            candidates: candidates.into_iter().map(candidate).collect(),
            left: Vec::new(),
            parts: 0,
            part: Part { lead: 0, counted: 0, end: past.len() },
            past,
            stage,
            at: (0, 0),
            replay: None,
            done: false,
        };
        trial.next_part(trial.past.len());
        trial
    }

    /// Goes on for at most so many events; how many there were.
    pub fn step(&mut self, events: u64) -> u64 {
        let mut used = 0;
        while used < events && !self.done {
            let (candidate, rate) = self.at;
            let replay = self.replay.get_or_insert_with(|| {
                let behaviours = &self.candidates[candidate].behaviours;
                Box::new(Replay::new(&self.stage, behaviours, &self.past, self.part, RATES[rate]))
            });
            let (events, through) = replay.step(&self.stage, &self.past, events - used);
            used += events;
            if through && let Some(replay) = self.replay.take() {
                self.candidates[candidate].score.0[rate].add(&replay.into_tally());
                self.advance();
            }
        }
        used
    }

    /// What it came to, once it is through.
    pub fn poll_decision(&mut self, consolidate: bool) -> Option<Decision> {
        if !self.done {
            return None;
        }
        let (best, why) = self.best(consolidate);
        let tried = |candidate: &Candidate| Tried {
            behaviours: candidate.behaviours.clone(),
            parts: candidate.parts,
            bad: candidate.score.0.iter().map(|tally| (tally.worst(), tally.bad_share())).collect(),
            devices: candidate.score.0[0].devices(),
            delay: candidate.score.0[0].delay(),
        };
        Some(Decision {
            behaviours: self.candidates[best].behaviours.clone(),
            changed: why.is_some(),
            why,
            tried: self.candidates.iter().chain(&self.left).map(tried).collect(),
        })
    }

    /// The best of the candidates that are left, and why; if it is not much better than what is done now, that.
    fn best(&self, consolidate: bool) -> (usize, Option<Ground>) {
        let mut best = 0;
        for _ in 0..2 {
            for (index, candidate) in self.candidates.iter().enumerate() {
                let difference = candidate.score.difference(&self.candidates[best].score, consolidate, LIKELY);
                if difference.is_some_and(|(_, gain)| gain > 0.0) {
                    best = index;
                }
            }
        }
        match self.candidates[best].score.difference(&self.candidates[0].score, consolidate, SURE) {
            Some((why, gain)) if gain > 0.0 => (best, Some(why)),
            _ => (0, None),
        }
    }

    /// The next rate, candidate, or part.
    fn advance(&mut self) {
        let (candidate, rate) = self.at;
        self.at = if rate + 1 < RATES.len() { (candidate, rate + 1) } else { (candidate + 1, 0) };
        if self.at.0 < self.candidates.len() {
            return;
        }
        self.at = (0, 0);
        self.parts += 1;
        self.candidates.iter_mut().for_each(|candidate| candidate.parts += 1);
        if self.parts == PARTS || self.part.counted == 0 {
            self.done = true;
            return;
        }
        // The worse half leaves, and before it those that came to the same as another.
        let mut others = self.candidates.split_off(1);
        others.sort_by(|a, b| a.score.badness().total_cmp(&b.score.badness()));
        let left = others.len().div_ceil(2);
        let (mut unlike, mut alike): (Vec<Candidate>, Vec<Candidate>) = Default::default();
        for other in others {
            let known = self.candidates.iter().chain(&unlike).any(|known| known.score == other.score);
            if known { alike.push(other) } else { unlike.push(other) }
        }
        let mut others = unlike.into_iter().chain(alike);
        self.candidates.extend(others.by_ref().take(left));
        self.left.splice(0..0, others);
        self.next_part(self.part.counted);
    }

    /// The part that ends before `end`.
    fn next_part(&mut self, end: usize) {
        let all = self.past.len();
        let share = match self.parts {
            0 | 1 => 8,
            2 => 4,
            _ => 1,
        };
        let counted = if share == 1 { 0 } else { end.saturating_sub(all / share) };
        let budgets =
            self.past[counted..end].iter().map(|arrival| arrival.budget).filter(|budget| *budget != Duration::MAX);
        let lead = LEAD + budgets.max().unwrap_or(Duration::ZERO).saturating_mul(LEAD_BUDGETS);
        let first = self.past[counted].at;
        let lead = self.past.partition_point(|arrival| arrival.at + lead < first);
        self.part = Part { lead, counted, end };
    }
}
