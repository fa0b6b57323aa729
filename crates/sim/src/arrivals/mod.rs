//! The arrival processes of requests.

pub(crate) mod arrival;
pub(crate) mod feed;
pub(crate) mod pace;

use std::fmt;
use std::str::FromStr;

use downbeat_core::{Duration, Time};
use rand_distr::{Distribution, Exp1, Gamma};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::SeedableRng;

use crate::arrivals::pace::{Pace, Progress};

/// An arrival process; its rate is given apart.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Arrivals {
    /// Gaps of `1 / rate`.
    Constant,
    /// Exponential gaps.
    Poisson,
    /// Gaps from a Gamma distribution of this shape and mean `1 / rate`: the smaller the shape, the
    /// burstier (coefficient of variation `1 / sqrt(shape)`). Shape 1 is Poisson.
    Gamma(f64),
}

/// An endless stream of arrival times.
///
/// Gaps are drawn with a mean of 1 and then stretched by the rate. At another rate, the same seed
/// gives the same pattern, only faster. So two rates, like two schedulers, are compared on the same
/// luck.
#[derive(Clone, Debug)]
pub struct ArrivalStream {
    gaps: Gaps,
    /// Seconds of a gap of 1.
    stretch: f64,
    pace: Option<Progress>,
    rng: Pcg64,
    now: Time,
}

/// Gaps between arrivals, with a mean of 1.
#[derive(Clone, Copy, Debug)]
pub enum Gaps {
    /// All equal.
    Constant,
    /// Exponential.
    Exponential,
    /// From a Gamma distribution.
    Gamma(Gamma<f64>),
}

impl Gaps {
    /// The next gap.
    pub fn draw(&self, random: &mut Pcg64) -> f64 {
        match self {
            Gaps::Constant => 1.0,
            Gaps::Exponential => Exp1.sample(random),
            Gaps::Gamma(gamma) => gamma.sample(random),
        }
    }
}

/// Why an arrival process cannot be generated.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[error("arrivals need a positive, finite rate and shape (got a rate of {rate}/s and a shape of {shape})")]
pub struct BadArrivals {
    rate: f64,
    shape: f64,
}

/// The text of an unknown arrival process.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{0}' is not an arrival process; expected poisson, constant, or gamma:K with a shape K of at least 0.001")]
pub struct UnknownArrivals(String);

impl Arrivals {
    /// The arrivals at `rate` a second. `seed` and `stream` (the model's number) choose the random
    /// numbers.
    ///
    /// # Errors
    /// If the rate or the shape is not positive and finite.
    pub fn stream(self, rate: f64, seed: u64, stream: u64) -> Result<ArrivalStream, BadArrivals> {
        let bad = BadArrivals { rate, shape: self.shape() };
        if !(rate > 0.0 && rate.is_finite()) {
            return Err(bad);
        }
        let gaps = self.gaps().ok_or(bad)?;
        Ok(ArrivalStream { gaps, stretch: 1.0 / rate, pace: None, rng: random(seed, stream), now: Time::ZERO })
    }

    /// The gaps, before they are stretched by the rate; `None` if the shape is not positive and
    /// finite.
    pub fn gaps(self) -> Option<Gaps> {
        match self {
            Arrivals::Constant => Some(Gaps::Constant),
            Arrivals::Poisson => Some(Gaps::Exponential),
            Arrivals::Gamma(shape) if shape.is_finite() => Gamma::new(shape, 1.0 / shape).ok().map(Gaps::Gamma),
            Arrivals::Gamma(_) => None,
        }
    }

    /// Coefficient of variation of the gaps.
    pub fn coefficient_of_variation(self) -> f64 {
        self.dispersion().sqrt()
    }

    /// Variance of the number of arrivals over its mean, in the long run.
    pub(crate) fn dispersion(self) -> f64 {
        if self == Arrivals::Constant { 0.0 } else { 1.0 / self.shape() }
    }

    fn shape(self) -> f64 {
        match self {
            Arrivals::Gamma(shape) => shape,
            Arrivals::Constant | Arrivals::Poisson => 1.0,
        }
    }
}

/// `poisson`, `constant`, or `gamma:K`.
impl FromStr for Arrivals {
    type Err = UnknownArrivals;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let shape = |text: &str| text.parse().ok().filter(|shape: &f64| *shape >= 0.001 && shape.is_finite());
        match text.split_once(':') {
            None if text == "poisson" => Some(Arrivals::Poisson),
            None if text == "constant" => Some(Arrivals::Constant),
            Some(("gamma", text)) => shape(text).map(Arrivals::Gamma),
            _ => None,
        }
        .ok_or_else(|| UnknownArrivals(text.to_owned()))
    }
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arrivals::Constant => f.write_str("constant"),
            Arrivals::Poisson => f.write_str("poisson"),
            Arrivals::Gamma(shape) => write!(f, "gamma:{shape}"),
        }
    }
}

impl ArrivalStream {
    /// The same arrivals at a rate that changes over time.
    #[must_use]
    pub fn paced(self, pace: &Pace) -> Self {
        ArrivalStream { pace: Progress::new(pace), ..self }
    }

    /// The next arrival. The first is one gap after the epoch.
    pub fn next_arrival(&mut self) -> Time {
        let gap = self.gaps.draw(&mut self.rng);
        let seconds = match &mut self.pace {
            None => gap * self.stretch,
            Some(pace) => pace.pass(gap * self.stretch),
        };
        self.now += Duration::from_secs_f64(seconds);
        self.now
    }
}

/// The random numbers of one `stream` of a run: independent of those of other streams and seeds.
pub fn random(seed: u64, stream: u64) -> Pcg64 {
    // SplitMix64's increment keeps (seed, stream) pairs apart; seed_from_u64 mixes the rest.
    Pcg64::seed_from_u64(seed.wrapping_add(stream.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}
