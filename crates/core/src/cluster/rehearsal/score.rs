//! The result of replays, and the comparison of two results.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::ids::ModelId;
use crate::time::{Duration, Time};

/// Rates of a trial, percent of the recorded rate.
pub(crate) const RATES: [u64; 3] = [100, 110, 125];

/// Stretches of a replay, each with as many arrivals. Requests are lost together, where many come
/// at once. The certainty of a difference thus follows from how it varies between stretches, not
/// from the number of requests.
const STRETCHES: usize = 8;

/// The result of a replay.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Tally {
    /// By model.
    models: Vec<Count>,
    /// By stretch, then by model.
    stretches: Vec<Vec<Stretch>>,
    /// The arrivals of the replay that count.
    arrivals: Range<usize>,
    /// Device time of all batches.
    pub busy: Duration,
    /// Time from the begin of the replay to its end.
    pub span: Duration,
}

/// A model's requests in a stretch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Stretch {
    /// Requests that were dropped, rejected or late.
    bad: u32,
    /// In a closed loop: time from the last answer of the stretch before to the last answer of this
    /// stretch.
    took: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Count {
    /// The model's clients wait for answers, so that the speed of its answers counts.
    closed: bool,
    /// In a closed loop: when the model's last request ended.
    ended: Option<Time>,
    offered: u32,
    /// Requests that were dropped, rejected or late.
    bad: u32,
    served: u32,
    /// Sum over the served requests of the time from arrival to answer.
    delay: Duration,
}

impl Count {
    fn bad_share(self) -> f64 {
        f64::from(self.bad) / f64::from(self.offered.max(1))
    }

    /// The share of bad requests, less a standard deviation.
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
    /// An empty tally of this many models, which counts only these arrivals.
    pub fn new(models: usize, arrivals: Range<usize>) -> Self {
        let stretches = vec![vec![Stretch::default(); models]; STRETCHES];
        Tally { models: vec![Count::default(); models], stretches, arrivals, ..Tally::default() }
    }

    /// Marks a model whose clients wait for answers. [`Tally::ended`] must be called for each of
    /// its requests.
    pub fn close(&mut self, model: ModelId) {
        self.models[model.0 as usize].closed = true;
    }

    /// Counts the arrival of a request, the `index`th of all.
    pub fn offered(&mut self, index: usize, model: ModelId) {
        if self.arrivals.contains(&index) {
            self.models[model.0 as usize].offered += 1;
        }
    }

    /// Counts a request that was dropped or rejected.
    pub fn bad(&mut self, index: usize, model: ModelId) {
        if self.arrivals.contains(&index) {
            self.models[model.0 as usize].bad += 1;
            self.stretch(index, model).bad += 1;
        }
    }

    /// Counts the end of a closed loop's request, good or bad.
    pub fn ended(&mut self, index: usize, model: ModelId, came: Time, now: Time) {
        if self.arrivals.contains(&index) {
            let before = self.models[model.0 as usize].ended.replace(now).unwrap_or(came);
            self.stretch(index, model).took += now.since(before);
        }
    }

    /// The stretch of an arrival that counts.
    fn stretch(&mut self, index: usize, model: ModelId) -> &mut Stretch {
        let stretch = (index - self.arrivals.start) * STRETCHES / self.arrivals.len();
        &mut self.stretches[stretch][model.0 as usize]
    }

    /// Counts a request that was answered `took` after its arrival.
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

    /// Adds the result of another part of the past.
    pub fn add(&mut self, other: &Tally) {
        self.models.resize(self.models.len().max(other.models.len()), Count::default());
        for (own, other) in self.models.iter_mut().zip(&other.models) {
            *own = own.plus(*other);
        }
        self.stretches.extend_from_slice(&other.stretches);
        self.busy += other.busy;
        self.span += other.span;
    }

    /// By how much the share of bad requests is below `other`'s, and the standard deviation of this
    /// difference. With `worst` the share is that of each tally's worst model, otherwise that of
    /// all models. With `closed` only closed loops count, otherwise only the other models. Both
    /// tallies must be of the same arrivals.
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

    /// How much sooner than `other` this tally comes to as many good answers, as a share of the
    /// time that `other` takes. Also returns the standard deviation of this difference. The mean
    /// over all models whose clients wait for answers.
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

    /// Seconds for each good answer of a model whose clients wait for answers.
    fn pace(&self, model: usize) -> Option<f64> {
        let count = self.models.get(model).filter(|count| count.closed)?;
        let took = self.stretches.iter().filter_map(|stretch| stretch.get(model)).map(|s| s.took.as_secs_f64());
        Some(took.sum::<f64>() / f64::from(count.good().max(1)))
    }

    fn indices(&self) -> std::ops::Range<usize> {
        0..self.models.len()
    }

    /// Mean number of busy devices.
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

    /// The share of dropped or late requests of the model that fared worst.
    pub fn worst(&self) -> f64 {
        [false, true].into_iter().map(|closed| self.worst_of(closed)).fold(0.0, f64::max)
    }

    /// The share of dropped or late requests, over all models.
    pub fn bad_share(&self) -> f64 {
        self.sum().bad_share()
    }

    /// [`Tally::worst`] among the closed loops only, or among the other models.
    fn worst_of(&self, closed: bool) -> f64 {
        self.worst_index(closed).map_or(0.0, |model| self.models[model].bad_share())
    }

    /// The model that fared worst, among the closed loops or among the other models. Few requests
    /// tell little: of two models that fare about as badly, the one with more requests is chosen.
    fn worst_index(&self, closed: bool) -> Option<usize> {
        let models = self.models.iter().enumerate().filter(|(_, count)| count.closed == closed);
        let models = models.map(|(index, count)| (index, count.surely_bad()));
        models.max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(index, _)| index)
    }

    /// The open model that fared worst; `None` if no request of an open model was bad.
    fn worst_model(&self) -> Option<usize> {
        self.worst_index(false).filter(|_| self.open().bad > 0)
    }

    fn sum(&self) -> Count {
        self.models.iter().fold(Count::default(), |all, count| all.plus(*count))
    }

    /// The sum over the models whose clients do not wait for answers.
    fn open(&self) -> Count {
        self.models.iter().filter(|count| !count.closed).fold(Count::default(), |all, count| all.plus(*count))
    }
}

/// The sum of some differences, and its standard deviation, which follows from how the differences
/// vary.
fn sum_and_deviation(gains: &[f64]) -> (f64, f64) {
    let (sum, count) = (gains.iter().sum::<f64>(), gains.len() as f64);
    let squares: f64 = gains.iter().map(|gain| (gain - sum / count.max(1.0)).powi(2)).sum();
    (sum, (squares * count / (count - 1.0).max(1.0)).sqrt())
}

/// The results of a setting, one for each rate of [`RATES`].
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Score(pub Vec<Tally>);

/// The first criterion in which two settings differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ground {
    /// The share of bad requests of the model that fares worst.
    WorstModel {
        /// The rate, percent of the recorded rate.
        rate: u8,
    },
    /// The share of bad requests of all models.
    AllModels {
        /// The rate, percent of the recorded rate.
        rate: u8,
    },
    /// Good answers a second to clients that wait for them.
    Throughput,
    /// The number of busy devices.
    Devices,
    /// The mean time from arrival to answer.
    Delay,
}

/// Smaller differences than this share of the requests do not count.
const LEAST: f64 = 0.000_5;
/// Devices, delays and throughputs that differ by less than this share count as the same.
const ALIKE: f64 = 0.03;
/// Losses that differ by fewer standard deviations count as equal. Then answers that come sooner
/// decide.
const EQUAL: f64 = 0.7;
/// Answers that take this many times as long count as much later.
const MUCH: f64 = 1.5;

/// Differences at lower rates, and their standard deviations.
#[derive(Default)]
struct Lower(Vec<(f64, f64)>);

impl Lower {
    /// A gain at one rate does not count if a lower rate shows the opposite.
    fn allow(&self, gain: f64) -> bool {
        self.0.iter().all(|(lower, _)| lower * gain >= 0.0 || lower.abs() <= LEAST)
    }

    /// A gain in another criterion does not count if more requests are lost than by chance.
    fn are_equal(&self, gain: f64) -> bool {
        self.0.iter().all(|(lower, deviation)| lower * gain >= 0.0 || lower.abs() <= LEAST.max(EQUAL * deviation))
    }
}

impl Score {
    /// The first criterion in which this score differs from `other`, and the gain: negative if this
    /// score is worse. `sure`: a difference counts from this many standard deviations on.
    ///
    /// The criteria in order: at the recorded rate, the share of bad requests, of the worst model
    /// and then of all. Then good answers a second to clients that wait for answers (not with
    /// `consolidate`), and the share of their bad requests. Then the other models' bad requests at
    /// higher rates. With `consolidate` the number of busy devices comes before the highest rate;
    /// otherwise it does not count. Last the mean time to the answer.
    pub fn difference(&self, other: &Score, consolidate: bool, sure: f64) -> Option<(Ground, f64)> {
        let mut lower = Lower::default();
        for (level, (own, others)) in self.0.iter().zip(&other.0).enumerate() {
            let rate = RATES[level] as u8;
            // At a higher rate, it is unknown how much more often clients that wait for answers
            // would ask.
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

    /// How much sooner answers come than with `other`, as a share of their time. `None`: the times
    /// are alike, or there are no answers.
    fn sooner(&self, other: &Score) -> Option<f64> {
        let (own, others) = (self.0.first()?, other.0.first()?);
        // Without answers there is no time to the answer.
        if own.sum().served == 0 || others.sum().served == 0 {
            return None;
        }
        Some(1.0 - own.delay() / others.delay().max(1e-9)).filter(|gain| gain.abs() > ALIKE)
    }

    /// Whether more requests are lost than with `other`, or fewer answers come to clients that wait
    /// for answers.
    pub fn is_worse(&self, other: &Score) -> bool {
        let difference = self.difference(other, false, EQUAL);
        difference.is_some_and(|(why, gain)| gain < 0.0 && why != Ground::Delay)
    }

    /// By model: whether its answers come much later than with `other`.
    pub fn delays_more(&self, other: &Score) -> Vec<bool> {
        let [Some(own), Some(others)] = [self, other].map(|score| score.0.first()) else { return Vec::new() };
        own.delays().zip(others.delays()).map(|(own, other)| own > MUCH * other).collect()
    }

    /// By model whose clients wait for answers: seconds for each good answer.
    pub fn paces(&self) -> impl Iterator<Item = Option<f64>> {
        self.0.first().into_iter().flat_map(|tally| tally.indices().map(|model| tally.pace(model)))
    }

    /// The sum of this score and that of the same setting on other arrivals.
    pub fn plus(mut self, other: &Score) -> Score {
        self.0.resize(self.0.len().max(other.0.len()), Tally::default());
        self.0.iter_mut().zip(&other.0).for_each(|(own, other)| own.add(other));
        self
    }

    /// The open model that fared worst, at the lowest rate with a bad request of an open model.
    /// `None`: there is no such rate, or only one model.
    pub fn worst_model(&self) -> Option<usize> {
        let several = self.0.first().is_some_and(|tally| tally.models.len() > 1);
        self.0.iter().find_map(Tally::worst_model).filter(|_| several)
    }

    /// Ranks candidates for the next round by losses and slowness, each in steps of the least
    /// difference that counts. `quickest`: by model whose clients wait for answers, the least
    /// seconds for each good answer.
    pub fn badness(&self, quickest: &[Option<f64>]) -> f64 {
        let weights = [1.0, 0.3, 0.1];
        let level = |(tally, weight): (&Tally, f64)| weight * (tally.worst_of(false) + tally.open().bad_share());
        let lost: f64 = self.0.iter().zip(weights).map(level).sum();
        let slow = self.paces().zip(quickest).filter_map(|(pace, quickest)| Some(1.0 - (*quickest)? / pace?));
        let slow = slow.filter(|slow| slow.is_finite()).fold(0.0, f64::max);
        (lost / LEAST).floor() * LEAST + (slow / ALIKE).floor() * ALIKE
    }

    /// The cost that decides between equally bad candidates: the busy devices with `consolidate`,
    /// otherwise the time to the answer.
    pub fn cost(&self, consolidate: bool) -> f64 {
        self.0.iter().map(|tally| if consolidate { tally.devices() } else { tally.delay() }).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tally of `count` requests, in which `answered` says which requests were answered, after 10
    /// ms.
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

    /// 800 requests at each rate. `bad` of each hundred were dropped.
    fn stretched(bad: [[usize; STRETCHES]; RATES.len()]) -> Score {
        Score(bad.map(|bad| tally(800, |index| index % 100 >= bad[index / 100])).to_vec())
    }

    /// Requests are lost together: twenty losses in one rush tell no more than one loss.
    #[test]
    fn what_differs_in_one_stretch_is_not_sure_and_what_differs_in_most_is() {
        let none = stretched([[0; STRETCHES]; 3]);
        let once = stretched([[20, 0, 0, 0, 0, 0, 0, 0], [0; STRETCHES], [0; STRETCHES]]);
        let often = stretched([[2, 3, 2, 3, 0, 4, 3, 3], [0; STRETCHES], [0; STRETCHES]]);
        let lost = |score: &Score| none.difference(score, false, 2.0).map(|(why, _)| why);
        assert_eq!(none.difference(&once, false, 0.7).map(|(why, _)| why), Some(Ground::WorstModel { rate: 100 }));
        assert_eq!([lost(&once), lost(&often)], [None, Some(Ground::WorstModel { rate: 100 })]);
    }

    /// At 1.25 times the rate the load exceeds the capacity. The setting that then loses less may
    /// lose more at the recorded rate.
    #[test]
    fn a_gain_at_a_higher_rate_counts_without_loss_at_a_lower_one() {
        let (few, many) = ([0; STRETCHES], [9; STRETCHES]);
        let some = [5, 0, 0, 0, 0, 0, 0, 0];
        let why = |bad| stretched([few, few, few]).difference(&stretched(bad), false, 2.0).map(|(why, _)| why);
        assert_eq!(why([few, few, many]), Some(Ground::WorstModel { rate: 125 }));
        let worse = stretched([some, few, few]).difference(&stretched([few, few, many]), false, 2.0);
        assert_eq!(worse, None);
    }
}
