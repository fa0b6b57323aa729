//! When requests arrive: the arrival processes.

use downbeat_core::{Duration, Time};
use rand_distr::{Distribution, Gamma};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::SeedableRng;

/// An arrival process of some rate.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Arrivals {
    /// Gaps of `1 / rate`.
    Constant,
    /// Exponential gaps.
    Poisson,
    /// Gaps from a Gamma distribution of this shape and mean `1 / rate`: the smaller the shape, the burstier
    /// (coefficient of variation `1 / sqrt(shape)`). Shape 1 is Poisson.
    Gamma(f64),
}

/// An endless stream of arrival times.
#[derive(Clone, Debug)]
pub struct ArrivalStream {
    gaps: Gaps,
    rng: Pcg64,
    now: Time,
}

#[derive(Clone, Debug)]
enum Gaps {
    Constant(f64),
    Random(Gamma<f64>),
}

/// Why an arrival process cannot be generated.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[error("arrivals need a positive, finite rate and shape (got a rate of {rate}/s and a shape of {shape})")]
pub struct BadArrivals {
    rate: f64,
    shape: f64,
}

impl Arrivals {
    /// Arrivals at `rate` a second; `seed` and `stream` (the model's number) choose the random numbers.
    ///
    /// # Errors
    /// If the rate or the shape is not positive and finite.
    pub fn stream(self, rate: f64, seed: u64, stream: u64) -> Result<ArrivalStream, BadArrivals> {
        let shape = match self {
            Arrivals::Gamma(shape) => shape,
            Arrivals::Constant | Arrivals::Poisson => 1.0,
        };
        let bad = BadArrivals { rate, shape };
        if !(rate > 0.0 && rate.is_finite() && shape > 0.0 && shape.is_finite()) {
            return Err(bad);
        }
        let gaps = match self {
            Arrivals::Constant => Gaps::Constant(1.0 / rate),
            _ => Gaps::Random(Gamma::new(shape, 1.0 / (shape * rate)).map_err(|_| bad)?),
        };
        Ok(ArrivalStream { gaps, rng: random(seed, stream), now: Time::ZERO })
    }
}

impl ArrivalStream {
    /// The next arrival. The first is one gap after the epoch.
    pub fn next_arrival(&mut self) -> Time {
        let gap = match &self.gaps {
            Gaps::Constant(gap) => *gap,
            Gaps::Random(gamma) => gamma.sample(&mut self.rng),
        };
        self.now += Duration::from_secs_f64(gap);
        self.now
    }
}

/// The random numbers of one `stream` of a run: independent of those of other streams and seeds.
pub(crate) fn random(seed: u64, stream: u64) -> Pcg64 {
    // SplitMix64's increment keeps (seed, stream) pairs apart; seed_from_u64 mixes the rest.
    Pcg64::seed_from_u64(seed.wrapping_add(stream.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}
