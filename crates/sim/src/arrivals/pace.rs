//! The change of a rate over time.

use downbeat_core::{Duration, Time};
use rand_distr::{Distribution, StandardNormal};

use crate::arrivals::random;

/// The change of a rate over time: a list of stretches, each with a length and a factor for the
/// rate. After the last stretch the first one comes again. Without stretches the factor is always
/// 1.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Pace {
    stretches: Vec<(Duration, f64)>,
}

/// The reason why stretches are not a pace.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
pub enum BadPace {
    /// A factor below zero, infinite or not a number.
    #[error("stretch {at} has the factor {factor}; factors are finite and at least 0")]
    Factor {
        /// The stretch, from 1.
        at: usize,
        /// The given factor.
        factor: f64,
    },
    /// A stretch without length.
    #[error("stretch {at} has no length")]
    Length {
        /// The stretch, from 1.
        at: usize,
    },
    /// All factors are zero: no request would ever arrive.
    #[error("all stretches have the factor 0: no request would ever arrive")]
    Silent,
}

impl Pace {
    /// A pace that never changes the rate.
    pub fn steady() -> Self {
        Pace::default()
    }

    /// A pace of stretches: lengths with their factors.
    ///
    /// # Errors
    /// If a length is zero, a factor is negative or not finite, or all of them are zero.
    pub fn new(stretches: Vec<(Duration, f64)>) -> Result<Self, BadPace> {
        for (at, (length, factor)) in (1..).zip(&stretches) {
            if !(factor.is_finite() && *factor >= 0.0) {
                return Err(BadPace::Factor { at, factor: *factor });
            }
            if *length == Duration::ZERO {
                return Err(BadPace::Length { at });
            }
        }
        if !stretches.is_empty() && stretches.iter().all(|(_, factor)| *factor == 0.0) {
            return Err(BadPace::Silent);
        }
        Ok(Pace { stretches })
    }

    /// A pace of equally long stretches, with factors scaled to a mean of 1.
    ///
    /// # Errors
    /// As [`Pace::new`].
    pub fn normalised(length: Duration, factors: &[f64]) -> Result<Self, BadPace> {
        let mean = factors.iter().sum::<f64>() / factors.len() as f64;
        let scale = if mean > 0.0 { 1.0 / mean } else { 1.0 };
        Pace::new(factors.iter().map(|factor| (length, factor * scale)).collect())
    }

    /// A rate that rises in even steps from `from` to `to` requests a second, each of `requests`
    /// arrivals. DVABatch's stepping load: 66/s to 4,000/s, 2,000 requests a step. The factors are
    /// rates: use this pace with a rate of 1.
    ///
    /// # Errors
    /// If a rate is not positive and finite.
    pub fn rising(from: f64, to: f64, requests: f64, steps: u32) -> Result<Self, BadPace> {
        let last = f64::from(steps.saturating_sub(1).max(1));
        let rates = (0..steps).map(|step| from + (to - from) * f64::from(step) / last);
        Pace::new(rates.map(|rate| (Duration::from_secs_f64(requests / rate), rate)).collect())
    }

    /// The shape of a Twitter trace: a new rate each second, of mean 1, with a coefficient of
    /// variation of about 0.77 and an autocorrelation of about 0.91 at one second and 0.82 at ten;
    /// never above 4.
    pub fn twitter(seed: u64, stream: u64, seconds: u32) -> Self {
        // The logarithm is the sum of a slow and a fast autoregressive process. The slow one
        // carries the correlation over tens of seconds. The fast one loses its correlation in the
        // first second.
        let mut rng = random(seed, stream ^ 0x7717);
        let mut normal = || -> f64 { StandardNormal.sample(&mut rng) };
        let variance = (1.0 + 0.77f64 * 0.77).ln();
        let (slow_share, slow, fast) = (0.92, 0.99f64, 0.1f64);
        let (mut a, mut b) = (normal(), normal());
        let factors: Vec<f64> = (0..seconds.max(1))
            .map(|_| {
                a = slow * a + (1.0 - slow * slow).sqrt() * normal();
                b = fast * b + (1.0 - fast * fast).sqrt() * normal();
                let log = variance.sqrt() * (f64::sqrt(slow_share) * a + f64::sqrt(1.0 - slow_share) * b);
                (log - variance / 2.0).exp().min(4.0)
            })
            .collect();
        Pace::normalised(Duration::from_millis(1_000), &factors).unwrap_or_default()
    }

    /// A rate that wanders slowly, as the load of a camera over a day does: a new factor every
    /// `every`, of mean 1, between about a third and three times the mean (Symphony §5.7
    /// synthesises its rates from videos).
    pub fn wandering(seed: u64, stream: u64, every: Duration, stretches: u32) -> Self {
        let mut rng = random(seed, stream ^ 0x71de0);
        let mut level = 0.0;
        let factors: Vec<f64> = (0..stretches.max(1))
            .map(|_| {
                let step: f64 = StandardNormal.sample(&mut rng);
                level = 0.9 * level + 0.25 * step;
                f64::exp(level).clamp(0.3, 3.0)
            })
            .collect();
        Pace::normalised(every, &factors).unwrap_or_default()
    }

    /// The mean factor of the time from the epoch to `end`.
    pub fn mean_until(&self, end: Time) -> f64 {
        let total = end.since(Time::ZERO).as_secs_f64();
        if self.stretches.is_empty() || total == 0.0 {
            return 1.0;
        }
        let cycle: f64 = self.stretches.iter().map(|(length, _)| length.as_secs_f64()).sum();
        let area: f64 = self.stretches.iter().map(|(length, factor)| length.as_secs_f64() * factor).sum();
        let mut sum = (total / cycle).floor() * area;
        let mut left = total % cycle;
        for (length, factor) in &self.stretches {
            sum += length.as_secs_f64().min(left) * factor;
            left = (left - length.as_secs_f64()).max(0.0);
        }
        sum / total
    }
}

/// A moving position in a [`Pace`].
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    pace: Pace,
    at: usize,
    /// Remaining seconds of the stretch.
    left: f64,
}

impl Progress {
    /// Begins at the first stretch; `None` if the pace is steady.
    pub fn new(pace: &Pace) -> Option<Self> {
        let (length, _) = pace.stretches.first()?;
        Some(Progress { left: length.as_secs_f64(), pace: pace.clone(), at: 0 })
    }

    /// Seconds until the factor has added up to `units` (of a second at factor 1).
    pub fn pass(&mut self, mut units: f64) -> f64 {
        let mut passed = 0.0;
        loop {
            let factor = self.pace.stretches[self.at].1;
            if units <= factor * self.left && factor > 0.0 {
                let seconds = units / factor;
                self.left -= seconds;
                return passed + seconds;
            }
            units -= factor * self.left;
            passed += self.left;
            self.at = (self.at + 1) % self.pace.stretches.len();
            self.left = self.pace.stretches[self.at].0.as_secs_f64();
        }
    }
}
