//! What came of a replay, and which of two is better.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::ids::ModelId;
use crate::time::Duration;

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
    /// By stretch, and in it by model: requests that were dropped, rejected or late.
    stretches: Vec<Vec<u32>>,
    /// The arrivals of the replay that count.
    arrivals: Range<usize>,
    /// Device time that batches took.
    pub busy: Duration,
    /// From its begin to its end.
    pub span: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Count {
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
            offered: self.offered.saturating_add(other.offered),
            bad: self.bad.saturating_add(other.bad),
            served: self.served.saturating_add(other.served),
            delay: self.delay + other.delay,
        }
    }

    fn mean_delay(self) -> f64 {
        self.delay.as_secs_f64() / f64::from(self.served.max(1))
    }
}

impl Tally {
    /// Of so many models and of these arrivals: others are not counted.
    pub fn new(models: usize, arrivals: Range<usize>) -> Self {
        let stretches = vec![vec![0; models]; STRETCHES];
        Tally { models: vec![Count::default(); models], stretches, arrivals, ..Tally::default() }
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
            let (stretch, model) = ((index - self.arrivals.start) * STRETCHES / self.arrivals.len(), model.0 as usize);
            self.models[model].bad += 1;
            self.stretches[stretch][model] += 1;
        }
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
    /// Both are of the same arrivals.
    fn gain(&self, other: &Tally, worst: bool) -> (f64, f64) {
        let [own, others] = [self, other].map(|tally| if worst { tally.worst_index() } else { None });
        let [a, b] = [(self, own), (other, others)].map(|(tally, model)| {
            let count = model.map_or_else(|| tally.sum(), |model| tally.models[model]);
            let share = 1.0 / f64::from(count.offered.max(1));
            tally.stretches.iter().map(move |stretch| {
                let bad = model.map_or_else(|| stretch.iter().sum(), |model| stretch.get(model).copied().unwrap_or(0));
                f64::from(bad) * share
            })
        });
        let gains: Vec<f64> = a.zip(b).map(|(own, other)| other - own).collect();
        let (sum, count) = (gains.iter().sum::<f64>(), gains.len() as f64);
        let squares: f64 = gains.iter().map(|gain| (gain - sum / count.max(1.0)).powi(2)).sum();
        (sum, (squares * count / (count - 1.0).max(1.0)).sqrt())
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
        self.worst_index().map_or(0.0, |model| self.models[model].bad_share())
    }

    /// The share of all requests that were dropped or late.
    pub fn bad_share(&self) -> f64 {
        self.sum().bad_share()
    }

    /// The model that fared worst. Few requests say little: of two models that fare about as badly the one that is known better.
    fn worst_index(&self) -> Option<usize> {
        let models = self.models.iter().enumerate().map(|(index, count)| (index, count.surely_bad()));
        models.max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(index, _)| index)
    }

    /// The model that fared worst; `None`: all went well.
    fn worst_model(&self) -> Option<usize> {
        self.worst_index().filter(|_| self.sum().bad > 0)
    }

    fn sum(&self) -> Count {
        self.models.iter().fold(Count::default(), |all, count| all.plus(*count))
    }
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
    /// Devices that are busy.
    Devices,
    /// The mean time from arrival to answer.
    Delay,
}

/// Differences below this share of the requests are none.
const LEAST: f64 = 0.000_5;
/// Devices and delays that differ by less are the same.
const ALIKE: f64 = 0.03;

impl Score {
    /// The first thing that tells this from `other`, and by how much this is better in it: negative if it is worse. `sure`: standard deviations that a
    /// difference has to have to be one.
    ///
    /// The share of bad requests, of the worst model and then of all, at the rate as it was and then at higher ones; the devices that were busy, before the highest
    /// rate if few should be (`consolidate`), or not at all; and the mean time to the answer.
    pub fn difference(&self, other: &Score, consolidate: bool, sure: f64) -> Option<(Ground, f64)> {
        let mut seen: Vec<f64> = Vec::new();
        // What looks better at one rate and worse at a lower one is neither.
        let decided = |ground: Ground, gain: f64, seen: &[f64]| {
            seen.iter().all(|lower| lower * gain >= 0.0 || lower.abs() <= LEAST).then_some((ground, gain))
        };
        for (level, (own, others)) in self.0.iter().zip(&other.0).enumerate() {
            let rate = RATES[level] as u8;
            for (ground, worst) in [(Ground::WorstModel { rate }, true), (Ground::AllModels { rate }, false)] {
                let (gain, deviation) = own.gain(others, worst);
                if gain.abs() > (sure * deviation).max(LEAST) {
                    return decided(ground, gain, &seen);
                }
                if level + 1 < self.0.len() {
                    seen.push(gain);
                }
            }
            if consolidate && level + 2 == self.0.len() && other.0[0].busy > Duration::ZERO {
                let gain = 1.0 - self.0[0].devices() / other.0[0].devices().max(1e-9);
                if gain.abs() > ALIKE {
                    return decided(Ground::Devices, gain, &seen);
                }
            }
        }
        let (own, others) = (self.0.first()?, other.0.first()?);
        // Where nothing was answered there is no time to the answer.
        if own.sum().served == 0 || others.sum().served == 0 {
            return None;
        }
        let gain = 1.0 - own.delay() / others.delay().max(1e-9);
        if gain.abs() > ALIKE { decided(Ground::Delay, gain, &seen) } else { None }
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

    /// One number that says roughly how bad it was, for who goes on to the next round.
    pub fn badness(&self) -> f64 {
        let weights = [1.0, 0.3, 0.1];
        let level = |(tally, weight): (&Tally, f64)| weight * (tally.worst() + tally.bad_share());
        self.0.iter().zip(weights).map(level).sum()
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
