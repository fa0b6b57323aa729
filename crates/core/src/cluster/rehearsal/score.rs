//! What came of a replay, and which of two is better.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::ids::ModelId;
use crate::time::{Duration, Time};

/// Rates that all is tried at, percent of what it was.
pub(crate) const RATES: [u64; 3] = [100, 110, 125];

/// Stretches that a replay's arrivals are counted in, each with as many: requests are lost together, where many come at once, so that how sure a
/// difference is follows from how it differs between stretches, not from how many requests it is of.
const STRETCHES: usize = 8;

/// What came of a replay.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Tally {
    /// By model.
    models: Vec<Count>,
    /// By stretch, and in it by model.
    stretches: Vec<Vec<Stretch>>,
    /// The arrivals of the replay that count.
    arrivals: Range<usize>,
    /// Device time that batches took.
    pub busy: Duration,
    /// From its begin to its end.
    pub span: Duration,
}

/// A model's requests in a stretch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Stretch {
    /// Dropped, rejected or late.
    bad: u32,
    /// From the last answer of the stretch before to the last of this, of a closed loop.
    took: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Count {
    /// Its clients wait for answers: what counts is how fast they come.
    closed: bool,
    /// When the last of its requests ended, of a closed loop.
    ended: Option<Time>,
    offered: u32,
    /// Dropped, rejected or late.
    bad: u32,
    served: u32,
    /// Sum over those that were served of the time from arrival to answer.
    delay: Duration,
}

impl Count {
    fn bad_share(self) -> f64 {
        f64::from(self.bad) / f64::from(self.offered.max(1))
    }

    /// That, less a standard deviation.
    fn surely_bad(self) -> f64 {
        (f64::from(self.bad) - (f64::from(self.bad) + 1.0).sqrt()) / f64::from(self.offered.max(1))
    }

    fn plus(self, other: Count) -> Count {
        Count {
            closed: self.closed || other.closed,
            ended: None,
            offered: self.offered.saturating_add(other.offered),
            bad: self.bad.saturating_add(other.bad),
            served: self.served.saturating_add(other.served),
            delay: self.delay + other.delay,
        }
    }

    fn good(self) -> u32 {
        self.offered.saturating_sub(self.bad)
    }

    fn mean_delay(self) -> f64 {
        self.delay.as_secs_f64() / f64::from(self.served.max(1))
    }
}

impl Tally {
    /// Of so many models and of these arrivals: others are not counted.
    pub fn new(models: usize, arrivals: Range<usize>) -> Self {
        let stretches = vec![vec![Stretch::default(); models]; STRETCHES];
        Tally { models: vec![Count::default(); models], stretches, arrivals, ..Tally::default() }
    }

    /// The clients of a model wait for answers: [`Tally::ended`] is told of each.
    pub fn close(&mut self, model: ModelId) {
        self.models[model.0 as usize].closed = true;
    }

    /// A request came, the `index`th of all.
    pub fn offered(&mut self, index: usize, model: ModelId) {
        if self.arrivals.contains(&index) {
            self.models[model.0 as usize].offered += 1;
        }
    }

    /// It was dropped or rejected.
    pub fn bad(&mut self, index: usize, model: ModelId) {
        if self.arrivals.contains(&index) {
            self.models[model.0 as usize].bad += 1;
            self.stretch(index, model).bad += 1;
        }
    }

    /// A request of a closed loop came to its end, whatever that was.
    pub fn ended(&mut self, index: usize, model: ModelId, came: Time, now: Time) {
        if self.arrivals.contains(&index) {
            let before = self.models[model.0 as usize].ended.replace(now).unwrap_or(came);
            self.stretch(index, model).took += now.since(before);
        }
    }

    /// What an arrival that counts is counted in.
    fn stretch(&mut self, index: usize, model: ModelId) -> &mut Stretch {
        let stretch = (index - self.arrivals.start) * STRETCHES / self.arrivals.len();
        &mut self.stretches[stretch][model.0 as usize]
    }

    /// It was answered `took` after it had come.
    pub fn done(&mut self, index: usize, model: ModelId, took: Duration, budget: Duration) {
        if self.arrivals.contains(&index) {
            let count = &mut self.models[model.0 as usize];
            count.delay += took;
            count.served += 1;
            if took > budget {
                self.bad(index, model);
            }
        }
    }

    /// Adds what came of another part of the past.
    pub fn add(&mut self, other: &Tally) {
        self.models.resize(self.models.len().max(other.models.len()), Count::default());
        for (own, other) in self.models.iter_mut().zip(&other.models) {
            *own = own.plus(*other);
        }
        self.stretches.extend_from_slice(&other.stretches);
        self.busy += other.busy;
        self.span += other.span;
    }

    /// By how much the share of bad requests of this is below `other`'s, and the standard deviation of that: of the model that fared worst in each, or of all.
    /// Only closed loops count (`closed`), or only the other models. Both tallies are of the same arrivals.
    fn gain(&self, other: &Tally, worst: bool, closed: bool) -> (f64, f64) {
        let [a, b] = [self, other].map(|tally| {
            let worst = if worst { tally.worst_index(closed) } else { None };
            let counts =
                move |model: usize| tally.models[model].closed == closed && worst.is_none_or(|worst| worst == model);
            let offered: u32 = tally.indices().filter(|model| counts(*model)).map(|m| tally.models[m].offered).sum();
            let share = 1.0 / f64::from(offered.max(1));
            tally.stretches.iter().map(move |stretch| {
                let bad: u32 = stretch.iter().enumerate().filter(|(model, _)| counts(*model)).map(|(_, s)| s.bad).sum();
                f64::from(bad) * share
            })
        });
        sum_and_deviation(&a.zip(b).map(|(own, other)| other - own).collect::<Vec<f64>>())
    }

    /// By how much sooner than `other` this comes to as many good answers where clients wait for them, as a share of the time that `other` takes, and the
    /// standard deviation of that: the mean over such models.
    fn quicker(&self, other: &Tally) -> (f64, f64) {
        let closed: Vec<usize> = self.indices().filter(|model| self.models[*model].closed).collect();
        let share = 1.0 / closed.len().max(1) as f64;
        let gain = |(own, others): (&Vec<Stretch>, &Vec<Stretch>)| {
            let gains = closed.iter().filter_map(|model| {
                let good = |tally: &Tally| Some(f64::from(tally.models.get(*model)?.good().max(1)));
                let whole = other.pace(*model).filter(|pace| *pace > 0.0)?;
                let took = |stretch: &Vec<Stretch>| Some(stretch.get(*model)?.took.as_secs_f64());
                Some(share * (took(others)? / good(other)? - took(own)? / good(self)?) / whole)
            });
            gains.sum()
        };
        sum_and_deviation(&self.stretches.iter().zip(&other.stretches).map(gain).collect::<Vec<f64>>())
    }

    /// Seconds that a model whose clients wait for answers takes for a good one.
    fn pace(&self, model: usize) -> Option<f64> {
        let count = self.models.get(model).filter(|count| count.closed)?;
        let took = self.stretches.iter().filter_map(|stretch| stretch.get(model)).map(|s| s.took.as_secs_f64());
        Some(took.sum::<f64>() / f64::from(count.good().max(1)))
    }

    fn indices(&self) -> std::ops::Range<usize> {
        0..self.models.len()
    }

    /// Devices that were busy, in the mean.
    pub fn devices(&self) -> f64 {
        self.busy.as_secs_f64() / self.span.as_secs_f64().max(1e-9)
    }

    /// Mean time from arrival to answer, seconds.
    pub fn delay(&self) -> f64 {
        self.sum().mean_delay()
    }

    /// By model: mean time from arrival to answer, seconds.
    pub fn delays(&self) -> impl Iterator<Item = f64> {
        self.models.iter().map(|count| count.mean_delay())
    }

    /// The share of the requests of the model that fared worst that were dropped or late.
    pub fn worst(&self) -> f64 {
        [false, true].into_iter().map(|closed| self.worst_of(closed)).fold(0.0, f64::max)
    }

    /// The share of all requests that were dropped or late.
    pub fn bad_share(&self) -> f64 {
        self.sum().bad_share()
    }

    /// The same of the closed loops alone, or of the other models.
    fn worst_of(&self, closed: bool) -> f64 {
        self.worst_index(closed).map_or(0.0, |model| self.models[model].bad_share())
    }

    /// The model that fared worst, of those whose clients wait for answers or of the others. Few requests say little: of two models that fare about as
    /// badly the one that is known better.
    fn worst_index(&self, closed: bool) -> Option<usize> {
        let models = self.models.iter().enumerate().filter(|(_, count)| count.closed == closed);
        let models = models.map(|(index, count)| (index, count.surely_bad()));
        models.max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(index, _)| index)
    }

    /// The model that fared worst; `None`: all went well.
    fn worst_model(&self) -> Option<usize> {
        self.worst_index(false).filter(|_| self.open().bad > 0)
    }

    fn sum(&self) -> Count {
        self.models.iter().fold(Count::default(), |all, count| all.plus(*count))
    }

    /// Of the models whose clients wait for nobody.
    fn open(&self) -> Count {
        self.models.iter().filter(|count| !count.closed).fold(Count::default(), |all, count| all.plus(*count))
    }
}

/// The sum of some differences, and its standard deviation as they follow from how these differ.
fn sum_and_deviation(gains: &[f64]) -> (f64, f64) {
    let (sum, count) = (gains.iter().sum::<f64>(), gains.len() as f64);
    let squares: f64 = gains.iter().map(|gain| (gain - sum / count.max(1.0)).powi(2)).sum();
    (sum, (squares * count / (count - 1.0).max(1.0)).sqrt())
}

/// What came of some behaviours, by the rate that they were tried at: as it was, and higher.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Score(pub Vec<Tally>);

/// What tells two behaviours apart, the first thing that does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ground {
    /// The share of bad requests of the model that fares worst.
    WorstModel {
        /// At this rate, percent of what it was.
        rate: u8,
    },
    /// The share of bad requests of all.
    AllModels {
        /// At this rate, percent of what it was.
        rate: u8,
    },
    /// Good answers a second to clients that wait for them.
    Throughput,
    /// Devices that are busy.
    Devices,
    /// The mean time from arrival to answer.
    Delay,
}

/// Differences below this share of the requests are none.
const LEAST: f64 = 0.000_5;
/// Devices, delays and throughputs that differ by less are the same.
const ALIKE: f64 = 0.03;
/// Standard deviations below which as much is lost: then answers that come sooner decide.
const EQUAL: f64 = 0.7;
/// Answers that take so many times as long are much later.
const MUCH: f64 = 1.5;

/// Differences at lower rates, and their standard deviations.
#[derive(Default)]
struct Lower(Vec<(f64, f64)>);

impl Lower {
    /// What looks better at one rate and worse at a lower one is neither.
    fn allow(&self, gain: f64) -> bool {
        self.0.iter().all(|(lower, _)| lower * gain >= 0.0 || lower.abs() <= LEAST)
    }

    /// What is better without regard to losses is not if more is lost, by more than chance.
    fn are_equal(&self, gain: f64) -> bool {
        self.0.iter().all(|(lower, deviation)| lower * gain >= 0.0 || lower.abs() <= LEAST.max(EQUAL * deviation))
    }
}

impl Score {
    /// The first thing that tells this from `other`, and by how much this is better in it: negative if it is worse. `sure`: standard deviations that a
    /// difference has to have to be one.
    ///
    /// The share of bad requests, of the worst model and then of all, at the rate as it was; good answers a second to clients that wait for answers, and the share of
    /// their bad requests; bad requests of the others at higher rates; the devices that were busy, before the highest
    /// rate if few should be (`consolidate`), or not at all; and the mean time to the answer.
    pub fn difference(&self, other: &Score, consolidate: bool, sure: f64) -> Option<(Ground, f64)> {
        let mut lower = Lower::default();
        for (level, (own, others)) in self.0.iter().zip(&other.0).enumerate() {
            let rate = RATES[level] as u8;
            // Of clients that wait for answers nobody knows what more of them would ask.
            for closed in if level == 0 { [false, true].iter() } else { [false].iter() } {
                let (gain, deviation) = own.quicker(others);
                if *closed && !consolidate && gain.abs() > (sure * deviation).max(ALIKE) {
                    return lower.are_equal(gain).then_some((Ground::Throughput, gain));
                }
                for (ground, worst) in [(Ground::WorstModel { rate }, true), (Ground::AllModels { rate }, false)] {
                    let (gain, deviation) = own.gain(others, worst, *closed);
                    if gain.abs() > (sure * deviation).max(LEAST) {
                        return lower.allow(gain).then_some((ground, gain));
                    }
                    if level + 1 < self.0.len() {
                        lower.0.push((gain, deviation));
                    }
                }
            }
            if consolidate && level + 2 == self.0.len() && other.0[0].busy > Duration::ZERO {
                let gain = 1.0 - self.0[0].devices() / other.0[0].devices().max(1e-9);
                if gain.abs() > ALIKE {
                    return lower.allow(gain).then_some((Ground::Devices, gain));
                }
            }
        }
        self.sooner(other).filter(|gain| lower.are_equal(*gain)).map(|gain| (Ground::Delay, gain))
    }

    /// By how much sooner than of `other` answers come, as a share of the time they take; `None`: they come as soon, or not at all.
    fn sooner(&self, other: &Score) -> Option<f64> {
        let (own, others) = (self.0.first()?, other.0.first()?);
        // Where nothing was answered there is no time to the answer.
        if own.sum().served == 0 || others.sum().served == 0 {
            return None;
        }
        Some(1.0 - own.delay() / others.delay().max(1e-9)).filter(|gain| gain.abs() > ALIKE)
    }

    /// Whether more is lost than of `other`, or fewer answers come to clients that wait for them.
    pub fn is_worse(&self, other: &Score) -> bool {
        let difference = self.difference(other, false, EQUAL);
        difference.is_some_and(|(why, gain)| gain < 0.0 && why != Ground::Delay)
    }

    /// By model: whether requests are answered much later than of `other`.
    pub fn delays_more(&self, other: &Score) -> Vec<bool> {
        let [Some(own), Some(others)] = [self, other].map(|score| score.0.first()) else { return Vec::new() };
        own.delays().zip(others.delays()).map(|(own, other)| own > MUCH * other).collect()
    }

    /// By model whose clients wait for answers: seconds for a good one.
    pub fn paces(&self) -> impl Iterator<Item = Option<f64>> {
        self.0.first().into_iter().flat_map(|tally| tally.indices().map(|model| tally.pace(model)))
    }

    /// With what came of the same on other arrivals.
    pub fn plus(mut self, other: &Score) -> Score {
        self.0.resize(self.0.len().max(other.0.len()), Tally::default());
        self.0.iter_mut().zip(&other.0).for_each(|(own, other)| own.add(other));
        self
    }

    /// The number of the model that fared worst at the lowest rate at which any was lost; `None`: all went well, or there is but one model.
    pub fn worst_model(&self) -> Option<usize> {
        let several = self.0.first().is_some_and(|tally| tally.models.len() > 1);
        self.0.iter().find_map(Tally::worst_model).filter(|_| several)
    }

    /// Ranks candidates for the next round: losses and slowness, each in steps of the least difference that counts. `quickest`: of each model whose clients
    /// wait for answers, the least seconds for a good one.
    pub fn badness(&self, quickest: &[Option<f64>]) -> f64 {
        let weights = [1.0, 0.3, 0.1];
        let level = |(tally, weight): (&Tally, f64)| weight * (tally.worst_of(false) + tally.open().bad_share());
        let lost: f64 = self.0.iter().zip(weights).map(level).sum();
        let slow = self.paces().zip(quickest).filter_map(|(pace, quickest)| Some(1.0 - (*quickest)? / pace?));
        let slow = slow.filter(|slow| slow.is_finite()).fold(0.0, f64::max);
        (lost / LEAST).floor() * LEAST + (slow / ALIKE).floor() * ALIKE
    }

    /// What it cost where it was no worse: devices if few should be busy, or else the time to the answer.
    pub fn cost(&self, consolidate: bool) -> f64 {
        self.0.iter().map(|tally| if consolidate { tally.devices() } else { tally.delay() }).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `count` requests, of which some were answered after 10 ms.
    fn tally(count: usize, answered: impl Fn(usize) -> bool) -> Tally {
        let model = ModelId(0);
        let mut tally = Tally::new(1, 0..count);
        for index in 0..count {
            tally.offered(index, model);
            match answered(index) {
                true => tally.done(index, model, Duration::from_millis(10), Duration::from_millis(20)),
                false => tally.bad(index, model),
            }
        }
        tally.span = Duration::from_millis(1_000);
        tally
    }

    /// At each rate every other request was answered, or none.
    fn score(every_other: bool) -> Score {
        Score(vec![tally(100, |index| every_other && index % 2 == 0); RATES.len()])
    }

    #[test]
    fn where_nothing_is_answered_nothing_is_better() {
        let difference = |a: &Score, b: &Score, consolidate| a.difference(b, consolidate, 1.0);
        let (none, some) = (score(false), score(true));
        assert_eq!([true, false].map(|consolidate| difference(&none, &none, consolidate)), [None, None]);
        let expected = Some((Ground::WorstModel { rate: 100 }, 0.5));
        assert_eq!(difference(&some, &none, false), expected);
    }

    /// 800 requests at each rate, of which so many of each hundred were dropped.
    fn stretched(bad: [[usize; STRETCHES]; RATES.len()]) -> Score {
        Score(bad.map(|bad| tally(800, |index| index % 100 >= bad[index / 100])).to_vec())
    }

    /// Requests are lost together: twenty in one rush say no more than one does.
    #[test]
    fn what_differs_in_one_stretch_is_not_sure_and_what_differs_in_most_is() {
        let none = stretched([[0; STRETCHES]; 3]);
        let once = stretched([[20, 0, 0, 0, 0, 0, 0, 0], [0; STRETCHES], [0; STRETCHES]]);
        let often = stretched([[2, 3, 2, 3, 0, 4, 3, 3], [0; STRETCHES], [0; STRETCHES]]);
        let lost = |score: &Score| none.difference(score, false, 2.0).map(|(why, _)| why);
        assert_eq!(none.difference(&once, false, 0.7).map(|(why, _)| why), Some(Ground::WorstModel { rate: 100 }));
        assert_eq!([lost(&once), lost(&often)], [None, Some(Ground::WorstModel { rate: 100 })]);
    }

    /// At 1.25 times the rate more is asked for than can be done: who loses less of that may be who loses more as it is.
    #[test]
    fn what_is_better_at_a_higher_rate_counts_only_if_it_is_not_worse_at_a_lower_one() {
        let (few, many) = ([0; STRETCHES], [9; STRETCHES]);
        let some = [5, 0, 0, 0, 0, 0, 0, 0];
        let why = |bad| stretched([few, few, few]).difference(&stretched(bad), false, 2.0).map(|(why, _)| why);
        assert_eq!(why([few, few, many]), Some(Ground::WorstModel { rate: 125 }));
        let worse = stretched([some, few, few]).difference(&stretched([few, few, many]), false, 2.0);
        assert_eq!(worse, None);
    }
}
