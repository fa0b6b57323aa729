//! A trial: candidates replay the same parts of the past, and the best stays.

use std::cmp::Reverse;

use super::candidates;
use super::contender::Contender;
use super::past::{PastArrival, Seen};
use super::replay::{Part, Replay, Stage};
use super::score::{Ground, RATES, Score, Tally};
use super::setting::Setting;
use crate::cluster::behaviour::Behaviour;
use crate::cluster::order::Order;
use crate::time::Duration;

/// The parts of the past, the newest first: 1/4, 1/4 and 1/2 of the last arrivals, and then the
/// earlier rush if there is a rush. Each part has the indices of its rates in [`RATES`]. Parts are
/// long, since at high rates queues take as long to fill as they did.
const PARTS: [(usize, &[usize]); 4] = [(4, &[0, 1]), (4, &[0, 1]), (2, &[0, 1, 2]), (1, &[0, 1, 2])];
/// How many candidates go on after each part. The current setting and the contender go on besides.
const KEPT: [usize; 4] = [8, 3, 3, 3];
/// After this many parts the neighbours of the best candidate are tried, too.
const REFINED: usize = 2;
/// Time before a part that is replayed without being counted: the rates of the arrivals must be
/// known first.
const LEAD: Duration = Duration::from_millis(150);
/// The lead also takes this many budgets of a request.
const LEAD_BUDGETS: u64 = 3;
/// Standard deviations by which the best candidate must be better than the current setting. One of
/// forty candidates is better by chance.
const SURE: f64 = 2.0;
/// The same while the rule of the load decides for all models, and the remembered arrivals span
/// [`RARE`]. Under rare bursts the rule would otherwise stay for minutes: rare bursts make
/// deviations large. No trial has chosen the rule, so less certainty is enough to leave it. Where
/// requests are frequent, the first trials know too little for that.
const SURE_AT_FIRST: f64 = 1.0;
/// The least time over which rare arrivals come.
const RARE: Duration = Duration::from_millis(10_000);
/// Standard deviations for a contender, and for the comparison of two candidates.
const LIKELY: f64 = 0.7;
/// If losses are equal, a change for sooner answers or fewer devices takes at least this many
/// arrivals.
const ENOUGH: usize = 1024;

/// The result of a trial.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// By model: its behaviour from now on; `None`: the load of the moment decides.
    pub behaviours: Vec<Option<Behaviour>>,
    /// The order in which the candidates of all models get devices from now on.
    pub order: Order,
    /// Whether the decision differs from the former setting.
    pub changed: bool,
    /// The criterion in which the new setting is better; `None` if the setting stays.
    pub why: Option<Ground>,
    /// The settings of the trial: the former setting first, then the others, the most tried ones
    /// first.
    pub tried: Vec<Tried>,
}

/// The result of one setting in a trial.
#[derive(Clone, PartialEq, Debug)]
pub struct Tried {
    /// By model.
    pub behaviours: Vec<Option<Behaviour>>,
    /// The order in which candidates get devices.
    pub order: Order,
    /// Number of parts on which the setting was tried.
    pub parts: u32,
    /// By rate (the recorded one, 1.1 and 1.25 times that): the share of bad requests of the model
    /// that fared worst, and of all models.
    pub bad: Vec<(f64, f64)>,
    /// Mean number of busy devices, at the recorded rate.
    pub devices: f64,
    /// Mean time from arrival to answer, seconds, at the recorded rate.
    pub delay: f64,
}

impl Decision {
    /// Whether the decision takes this setting.
    pub fn takes(&self, tried: &Tried) -> bool {
        self.behaviours == tried.behaviours && self.order == tried.order
    }
}

#[derive(Debug)]
struct Candidate {
    setting: Setting,
    score: Score,
    /// Number of parts on which the candidate was tried.
    parts: usize,
}

impl Candidate {
    fn new(setting: Setting) -> Self {
        Candidate { setting, score: Score(vec![Tally::default(); RATES.len()]), parts: 0 }
    }
}

/// A running trial: candidates replay the same parts of the past, and the best stays.
#[derive(Debug)]
pub(super) struct Trial {
    past: Vec<PastArrival>,
    /// Number of arrivals in the rush at the beginning of `past`.
    rush: usize,
    stage: Stage,
    consolidate: bool,
    /// The first is the current setting, the next the contender, if there is one: they stay to the
    /// end.
    candidates: Vec<Candidate>,
    contender: Option<Contender>,
    /// Number of all arrivals until this trial.
    came: u64,
    /// Candidates that left the trial.
    left: Vec<Candidate>,
    /// The parts that candidates are tried on so far.
    parts: Vec<Part>,
    /// The index of the current rate, among the rates of the candidate's next part.
    rate: usize,
    replay: Option<Box<Replay>>,
    refined: bool,
    /// Whether a lone change goes to the model that waits longest. In every other trial it goes to
    /// the model that fares worst.
    quickens: bool,
    done: bool,
    /// Whether all requests come from clients that wait for answers.
    closed: bool,
}

impl Trial {
    /// The `number`th trial, on the arrivals of [`Seen`].
    pub fn new(
        Seen { arrivals: past, rush, came }: Seen,
        mut stage: Stage,
        current: &Setting,
        contender: Option<Contender>,
        consolidate: bool,
        number: u64,
    ) -> Self {
        let first = [Some(current.clone()), contender.as_ref().map(|contender| contender.setting.clone())];
        let closed = past.iter().all(|arrival| stage.is_closed(arrival.model));
        stage.saves_little = candidates::saves_little(&stage, &past);
        let mut trial = Trial {
            past,
            rush,
            came,
            consolidate,
            candidates: first.into_iter().flatten().map(Candidate::new).collect(),
            contender,
            left: Vec::new(),
            parts: Vec::new(),
            rate: 0,
            replay: None,
            refined: false,
            quickens: number % 2 == 1 && !consolidate,
            done: false,
            closed,
            stage,
        };
        trial.add(candidates::together(&trial.stage, current).into_iter().collect());
        trial.add(candidates::of_pool(&trial.stage, current.order));
        trial.next_part(trial.past.len());
        trial
    }

    /// Number of candidates that stay to the end.
    fn staying(&self) -> usize {
        1 + usize::from(self.contender.is_some())
    }

    /// Goes on for at most `events` events. Returns the number of events.
    pub fn step(&mut self, events: u64) -> u64 {
        let mut used = 0;
        while used < events && !self.done {
            let next = self.candidates.iter().position(|candidate| candidate.parts < self.parts.len());
            let Some(next) = next else {
                self.next_round();
                continue;
            };
            let candidate = &mut self.candidates[next];
            // Clients that wait for answers ask no more often at a higher rate.
            let rates = if self.closed { &[0] } else { PARTS[candidate.parts].1 };
            let rate = rates[self.rate];
            let replay = self.replay.get_or_insert_with(|| {
                let part = self.parts[candidate.parts];
                Box::new(Replay::new(&self.stage, &candidate.setting, &self.past, part, RATES[rate]))
            });
            let (events, through) = replay.step(&self.stage, &self.past, events - used);
            used += events;
            if through && let Some(replay) = self.replay.take() {
                candidate.score.0[rate].add(&replay.into_tally());
                self.rate += 1;
                if self.rate == rates.len() {
                    (self.rate, candidate.parts) = (0, candidate.parts + 1);
                } else if self.is_out(next) {
                    self.rate = 0;
                    let out = self.candidates.remove(next);
                    self.left.push(out);
                }
            }
        }
        used
    }

    /// The decision of a finished trial, the contender, and the models whose requests are answered
    /// later than before.
    pub fn poll_decision(&mut self) -> Option<(Decision, Option<Contender>, Vec<usize>)> {
        if !self.done {
            return None;
        }
        let (best, why, contender) = self.decided();
        self.left.sort_by_key(|left| Reverse(left.parts));
        let tried = |candidate: &Candidate| Tried {
            behaviours: candidate.setting.behaviours.clone(),
            order: candidate.setting.order,
            parts: candidate.parts as u32,
            bad: candidate
                .score
                .0
                .iter()
                .take_while(|tally| tally.span > Duration::ZERO)
                .map(|tally| (tally.worst(), tally.bad_share()))
                .collect(),
            devices: candidate.score.0[0].devices(),
            delay: candidate.score.0[0].delay(),
        };
        let decision = Decision {
            behaviours: self.candidates[best].setting.behaviours.clone(),
            order: self.candidates[best].setting.order,
            changed: why.is_some(),
            why,
            tried: self.candidates.iter().chain(&self.left).map(tried).collect(),
        };
        let later = self.candidates[best].score.delays_more(&self.candidates[0].score);
        let later = later.into_iter().enumerate().filter(|(_, later)| *later).map(|(model, _)| model);
        Some((decision, contender, later.collect()))
    }

    /// Adds the settings that are allowed and new.
    fn add(&mut self, settings: Vec<Setting>) {
        for setting in settings {
            if self.stage.allows(&setting) && self.candidates.iter().all(|known| known.setting != setting) {
                self.candidates.push(Candidate::new(setting));
            }
        }
    }

    /// The best of the remaining candidates.
    fn best(&self) -> usize {
        let mut best = 0;
        for _ in 0..2 {
            for (index, candidate) in self.candidates.iter().enumerate() {
                let difference = candidate.score.difference(&self.candidates[best].score, self.consolidate, LIKELY);
                if difference.is_some_and(|(_, gain)| gain > 0.0) {
                    best = index;
                }
            }
        }
        best
    }

    /// The candidate to take, why, if it is not the current setting, and the contender for the next
    /// trials.
    fn decided(&mut self) -> (usize, Option<Ground>, Option<Contender>) {
        let (best, consolidate) = (self.best(), self.consolidate);
        let enough = self.closed || self.past.len() - self.rush >= ENOUGH;
        let better = |difference: Option<(Ground, f64)>| {
            let (why, gain) = difference?;
            (gain > 0.0 && (enough || !matches!(why, Ground::Delay | Ground::Devices))).then_some(why)
        };
        let now = &self.candidates[0];
        let is_first = now.setting.behaviours.iter().all(Option::is_none);
        let sure = if is_first && self.span() >= RARE { SURE_AT_FIRST } else { SURE };
        let known = |index: usize| {
            let tried = &self.candidates[index];
            let mut contender = Contender::new(tried.setting.clone());
            contender.add(&tried.score, &now.score, self.came, self.past.len() - self.rush);
            contender
        };
        let mut contender = self.contender.take();
        if let Some(contender) = &mut contender {
            contender.add(&self.candidates[1].score, &now.score, self.came, self.past.len() - self.rush);
        }
        if let Some(why) = better(self.candidates[best].score.difference(&now.score, consolidate, sure)) {
            return (best, Some(why), Some(known(best).taken(now.setting.clone())));
        }
        match contender {
            Some(contender) if let Some(why) = better(contender.difference(consolidate, LIKELY)) => {
                (1, Some(why), Some(contender.taken(now.setting.clone())))
            }
            _ => (0, None, (best != 0).then(|| known(best))),
        }
    }

    /// The time from the first of the last arrivals to the last one. The rush before does not count.
    fn span(&self) -> Duration {
        let last = &self.past[self.rush..];
        last.first().zip(last.last()).map_or(Duration::ZERO, |(first, last)| last.at.since(first.at))
    }

    /// Whether a candidate fares so badly at the first rates of this part that the other rates
    /// cannot save it.
    fn is_out(&self, candidate: usize) -> bool {
        let kept = KEPT[self.parts.len() - 1];
        let quickest = self.quickest();
        let badness = self.candidates[candidate].score.badness(&quickest);
        let level = |other: &&Candidate| other.parts == self.parts.len() && other.score.badness(&quickest) < badness;
        let staying = self.staying();
        candidate >= staying && self.candidates[staying..].iter().filter(level).count() >= kept
    }

    /// By model whose clients wait for answers: the least seconds for each good answer.
    fn quickest(&self) -> Vec<Option<f64>> {
        let mut quickest = vec![None; self.stage.models.len()];
        for candidate in self.candidates.iter().filter(|candidate| candidate.parts == self.parts.len()) {
            for (least, pace) in quickest.iter_mut().zip(candidate.score.paces()) {
                *least = [*least, pace].into_iter().flatten().reduce(f64::min);
            }
        }
        quickest
    }

    /// Called when all candidates have been tried on all parts: the best of them go on.
    fn next_round(&mut self) {
        let Some(part) = self.parts.last().copied() else { return };
        // The worse candidates leave, and before them those with the same score as another.
        let (quickest, soonest) = (self.quickest(), self.soonest());
        let mut others = self.candidates.split_off(self.staying());
        others.sort_by(|a, b| {
            let [a, b] = [a, b].map(|other| (other.score.badness(&quickest), other.score.cost(self.consolidate)));
            a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        let (mut unlike, mut alike): (Vec<Candidate>, Vec<Candidate>) = Default::default();
        for other in others {
            let known = self.candidates.iter().chain(&unlike).any(|known| known.score == other.score);
            if known { alike.push(other) } else { unlike.push(other) }
        }
        let last = self.parts.len() == PARTS.len() || part.counted == self.rush && self.rush == 0;
        let mut others = unlike.into_iter().chain(alike);
        self.candidates.extend(others.by_ref().take(KEPT[self.parts.len() - 1]));
        for other in others {
            // The candidate with the soonest answers stays, even if many others lose a little less
            // by chance.
            if soonest.as_ref() == Some(&other.setting) { self.candidates.push(other) } else { self.left.push(other) }
        }
        if !self.refined && (last || self.parts.len() == REFINED) {
            self.refined = true;
            let best = &self.candidates[self.best()];
            // Once no candidate is better for all models, one model changes alone, and all try
            // another order.
            let settled = best.setting == self.candidates[0].setting;
            let one = || if self.quickens { self.longest(&best.score) } else { best.score.worst_model() };
            let (model, setting) = (settled.then(one).flatten(), best.setting.clone());
            self.add(candidates::near(&self.stage, &setting, model));
            if settled {
                self.add(candidates::in_other_orders(&self.stage, &setting));
            }
        } else if last {
            self.done = true;
        } else {
            self.next_part(part.counted);
        }
    }

    /// The setting with the soonest answers among the candidates that lose no more than the best;
    /// `None` with `consolidate`.
    fn soonest(&self) -> Option<Setting> {
        let best = &self.candidates[self.best()];
        let equal = self.candidates.iter().filter(|candidate| !candidate.score.is_worse(&best.score));
        let delay = |candidate: &&Candidate| candidate.score.0[0].delay();
        let soonest = equal.min_by(|a, b| delay(a).total_cmp(&delay(b)));
        soonest.filter(|_| !self.consolidate).map(|candidate| candidate.setting.clone())
    }

    /// The model whose requests take longest, as a multiple of its batch of one. If all models wait
    /// alike, the model with the quickest batches waits in vain.
    fn longest(&self, score: &Score) -> Option<usize> {
        let delays = score.0[0].delays().enumerate();
        let shares = delays.filter_map(|(index, delay)| {
            let options = self.stage.models.get(index)?.as_ref().filter(|options| options.is_adaptive())?;
            Some((index, delay / options.profiles.first().latency(1).as_secs_f64().max(1e-9)))
        });
        shares.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(index, _)| index)
    }

    /// Begins the part that ends at `end`.
    fn next_part(&mut self, end: usize) {
        if end == self.rush {
            self.parts.push(Part { lead: 0, counted: end / 4, end });
            return;
        }
        let (share, _) = PARTS[self.parts.len()];
        let part = end.saturating_sub((self.past.len() - self.rush) / share);
        let counted = if self.parts.len() + 2 == PARTS.len() { self.rush } else { part.max(self.rush) };
        let budgets =
            self.past[counted..end].iter().map(|arrival| arrival.budget).filter(|budget| *budget != Duration::MAX);
        let first = self.past[counted].at;
        let since = |lead: Duration| self.past.partition_point(|arrival| arrival.at + lead < first);
        let budgets = LEAD + budgets.max().unwrap_or(Duration::ZERO).saturating_mul(LEAD_BUDGETS);
        // Queues mostly fill sooner.
        let most = (end - counted) / 2;
        let lead = since(LEAD).min(since(budgets).max(counted.saturating_sub(most))).max(self.rush);
        self.parts.push(Part { lead, counted, end });
    }
}
