//! What came of a replay, and which of two is better.

use serde::{Deserialize, Serialize};

use crate::ids::ModelId;
use crate::time::Duration;

/// Rates that all is tried at, percent of what it was.
pub(crate) const RATES: [u64; 3] = [100, 110, 125];

/// What came of a replay.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Tally {
    /// By model.
    models: Vec<Count>,
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

/// A share that was counted, with the variance of that.
#[derive(Clone, Copy, Debug)]
struct Estimate {
    share: f64,
    variance: f64,
}

impl Count {
    fn estimate(self) -> Estimate {
        let offered = f64::from(self.offered.max(1));
        Estimate { share: f64::from(self.bad) / offered, variance: (f64::from(self.bad) + 1.0) / (offered * offered) }
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
    pub fn new(models: usize) -> Self {
        Tally { models: vec![Count::default(); models], ..Tally::default() }
    }

    pub fn offered(&mut self, model: ModelId) {
        self.models[model.0 as usize].offered += 1;
    }

    pub fn bad(&mut self, model: ModelId) {
        self.models[model.0 as usize].bad += 1;
    }

    /// A request was answered `took` after it had come.
    pub fn done(&mut self, model: ModelId, took: Duration, budget: Duration) {
        let count = &mut self.models[model.0 as usize];
        count.delay += took;
        count.served += 1;
        if took > budget {
            self.bad(model);
        }
    }

    /// Adds what came of another part of the past.
    pub fn add(&mut self, other: &Tally) {
        self.models.resize(self.models.len().max(other.models.len()), Count::default());
        for (own, other) in self.models.iter_mut().zip(&other.models) {
            *own = own.plus(*other);
        }
        self.busy += other.busy;
        self.span += other.span;
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
        self.worst_of().share
    }

    /// The share of all requests that were dropped or late.
    pub fn bad_share(&self) -> f64 {
        self.all().share
    }

    fn worst_of(&self) -> Estimate {
        let estimates = self.models.iter().map(|count| count.estimate());
        // Few requests say little: of two models that fare about as badly the one that is known better.
        let worst = estimates.max_by(|a, b| (a.share - a.variance.sqrt()).total_cmp(&(b.share - b.variance.sqrt())));
        worst.unwrap_or(Estimate { share: 0.0, variance: 0.0 })
    }

    /// The number of the model that fared worst; `None`: all went well.
    fn worst_model(&self) -> Option<usize> {
        let of = |count: &Count| {
            let of = count.estimate();
            of.share - of.variance.sqrt()
        };
        let lost = self.models.iter().enumerate().filter(|(_, count)| count.bad > 0);
        lost.max_by(|(_, a), (_, b)| of(a).total_cmp(&of(b))).map(|(model, _)| model)
    }

    fn all(&self) -> Estimate {
        self.sum().estimate()
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
        for (level, (own, others)) in self.0.iter().zip(&other.0).enumerate() {
            let rate = RATES[level] as u8;
            let (worst, all) = (Ground::WorstModel { rate }, Ground::AllModels { rate });
            for (ground, own, others) in [(worst, own.worst_of(), others.worst_of()), (all, own.all(), others.all())] {
                let gain = others.share - own.share;
                let noise = sure * (own.variance + others.variance).sqrt();
                if gain.abs() > noise.max(LEAST) {
                    return Some((ground, gain));
                }
            }
            if consolidate && level + 2 == self.0.len() && other.0[0].busy > Duration::ZERO {
                let gain = 1.0 - self.0[0].devices() / other.0[0].devices().max(1e-9);
                if gain.abs() > ALIKE {
                    return Some((Ground::Devices, gain));
                }
            }
        }
        let (own, others) = (self.0.first()?, other.0.first()?);
        // Where nothing was answered there is no time to the answer.
        if own.sum().served == 0 || others.sum().served == 0 {
            return None;
        }
        let gain = 1.0 - own.delay() / others.delay().max(1e-9);
        (gain.abs() > ALIKE).then_some((Ground::Delay, gain))
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

    /// `count` requests at each rate, of which so many were answered after 10 ms.
    fn score(count: u32, answered: u32) -> Score {
        let model = ModelId(0);
        let mut tally = Tally::new(1);
        for number in 0..count {
            tally.offered(model);
            match number < answered {
                true => tally.done(model, Duration::from_millis(10), Duration::from_millis(20)),
                false => tally.bad(model),
            }
        }
        tally.span = Duration::from_millis(1_000);
        Score(vec![tally; RATES.len()])
    }

    #[test]
    fn where_nothing_is_answered_nothing_is_better() {
        let difference = |a: &Score, b: &Score, consolidate| a.difference(b, consolidate, 1.0);
        let (none, some) = (score(100, 0), score(100, 50));
        assert_eq!([true, false].map(|consolidate| difference(&none, &none, consolidate)), [None, None]);
        let expected = Some((Ground::WorstModel { rate: 100 }, 0.5));
        assert_eq!(difference(&some, &none, false), expected);
    }
}
