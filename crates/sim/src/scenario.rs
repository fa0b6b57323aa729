//! A workload and a cluster, without the scheduler.

use std::fmt;
use std::str::FromStr;

use downbeat_core::Duration;
use downbeat_core::cluster::{DropPolicy, ModelOptions};
use rand_distr::{Distribution, LogNormal};

use crate::arrivals::pace::{BadPace, Pace};
use crate::arrivals::{Arrivals, random};
use crate::bounds;
use crate::policy::{Policy, SERVED};
use crate::profiles::ModelProfile;
use crate::simulation::network::Network;
use crate::simulation::{Load, Simulation};

/// Most devices of a scenario.
pub const MOST_DEVICES: u32 = 1 << 20;
/// Most items of a batch.
const MOST_ITEMS: u32 = 1 << 16;

/// The division of the requests among the models.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum Popularity {
    /// Evenly.
    #[default]
    Equal,
    /// The model of rank r, from 1, gets a share in proportion to `r^-s`.
    Zipf(f64),
    /// As Azure's functions are called. Each model has a hundred functions, of `n` models function
    /// i calls model `i mod n`. The functions' popularity is lognormal, so a few functions make
    /// nearly all calls.
    Maf,
}

/// The change of the rate of all models over time.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum Shape {
    /// The rate does not change.
    #[default]
    Steady,
    /// [`Pace::twitter`], the same for all models.
    Twitter,
    /// [`Pace::wandering`], each model on its own, in stretches of this length.
    Wandering(Duration),
    /// Each model's calls in stretches of this length (Azure's traces: a minute) vary around its
    /// mean.
    Maf(Duration),
    /// Given stretches, the same for all models.
    Given(Pace),
}

/// A workload and a cluster, without the scheduler.
#[derive(Clone, PartialEq, Debug)]
pub struct Scenario {
    /// The models, the most popular first.
    pub models: Vec<ModelProfile>,
    /// Requests per second of all models together.
    pub rate: f64,
    /// The arrival process.
    pub arrivals: Arrivals,
    /// The division of the requests among the models.
    pub popularity: Popularity,
    /// The change of the rate over time.
    pub shape: Shape,
    /// The number of devices.
    pub devices: u32,
    /// The largest batch; 0: as far as the SLO allows.
    pub max_batch: u32,
    /// Standard deviation of an execution time, as a share of it.
    pub noise: f64,
    /// The delays of messages.
    pub network: Network,
    /// Arrivals before this are served but not counted.
    pub warm_up: Duration,
    /// Time in which arrivals count, after the warm-up.
    pub span: Duration,
}

/// The reason why a scenario cannot be run.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum BadScenario {
    /// No model.
    #[error("there is no model to serve")]
    NoModels,
    /// No device.
    #[error("there is no device; a cluster needs at least one")]
    NoDevices,
    /// A number that is invalid or out of its range.
    #[error("{what} is {value}; the value must be {expected}")]
    Number {
        /// The name of the number.
        what: &'static str,
        /// The given value.
        value: f64,
        /// The allowed values.
        expected: &'static str,
    },
    /// The change of the rate is invalid.
    #[error(transparent)]
    Pace(#[from] BadPace),
}

impl Scenario {
    /// This scenario under a scheduler.
    ///
    /// # Errors
    /// If there is nothing to serve, nothing to serve it with, or a number is out of its range.
    pub fn simulation(&self, policy: &Policy, seed: u64) -> Result<Simulation, BadScenario> {
        self.check()?;
        let shares = self.popularity.shares(self.models.len());
        let seconds = (self.warm_up + self.span).as_secs_f64();
        let loads = self.models.iter().zip(&shares).zip(0..).map(|((model, share), stream)| {
            let options = ModelOptions::new(model.latency(self.max_batch), policy.dispatch(model.slo()), policy.drop());
            let pace = self.shape.pace(seed, stream, seconds)?;
            Ok(Load { options, slo: model.slo(), arrivals: self.arrivals, rate: self.rate * share, pace })
        });
        Ok(Simulation {
            system: policy.system(),
            loads: loads.collect::<Result<_, BadPace>>()?,
            devices: self.devices,
            warm_up: self.warm_up,
            span: self.span,
            noise: self.noise,
            network: self.network,
            order: policy.order(),
            seed,
            ..Simulation::default()
        })
    }

    /// A rate that the devices cannot hold, where a search begins. Each model's share runs at the
    /// throughput of the largest batch that its SLO allows, if the whole SLO is left for the
    /// execution.
    pub fn unreachable_rate(&self) -> f64 {
        let shares = self.popularity.shares(self.models.len());
        let cost: f64 = self.models.iter().zip(&shares).map(|(model, share)| share * model.cheapest_item()).sum();
        1_000.0 * f64::from(self.devices) / cost
    }

    /// Requests per second that the staggered pattern serves of even arrivals (Symphony §3.3, see
    /// [`bounds::staggered`]). `None` unless all models are equal, which the pattern requires.
    pub fn staggered_bound(&self) -> Option<f64> {
        let first = self.models.first()?;
        let equal = |model: &ModelProfile| ModelProfile { name: first.name.clone(), ..model.clone() } == *first;
        let profile = first.latency(self.max_batch);
        let bound = bounds::staggered(&profile, profile.max_batch(), first.slo(), self.devices)?;
        self.models.iter().all(equal).then_some(bound.rate)
    }

    /// The highest rate for which the devices have the time if requests come evenly; see
    /// [`bounds::fluid`].
    pub fn fluid_bound(&self) -> Option<f64> {
        let any = SERVED.with_drop("eager", DropPolicy::HeadDrop).ok()?;
        bounds::fluid(&self.simulation(&any, 0).ok()?.loads, self.devices)
    }

    fn check(&self) -> Result<(), BadScenario> {
        let number = |what, value: f64, fine: bool, expected| {
            if fine { Ok(()) } else { Err(BadScenario::Number { what, value, expected }) }
        };
        if self.models.is_empty() {
            return Err(BadScenario::NoModels);
        }
        if self.devices == 0 {
            return Err(BadScenario::NoDevices);
        }
        number("the number of devices", self.devices.into(), self.devices <= MOST_DEVICES, "at most 1,048,576")?;
        number("max_batch", self.max_batch.into(), self.max_batch <= MOST_ITEMS, "at most 65,536")?;
        let positive = |value: f64| value > 0.0 && value.is_finite();
        number("the rate", self.rate, positive(self.rate), "above 0 and finite")?;
        number("the noise", self.noise, (0.0..=10.0).contains(&self.noise), "from 0 to 10")?;
        if let Popularity::Zipf(s) = self.popularity {
            number("the shape of zipf", s, (0.0..=10.0).contains(&s), "from 0 to 10")?;
        }
        let span = self.span.as_secs_f64();
        number("the span in seconds", span, span > 0.0, "above 0")
    }
}

impl ModelProfile {
    /// Milliseconds of a device for an item, in the largest batch that the SLO allows.
    fn cheapest_item(&self) -> f64 {
        let profile = self.latency(0);
        let largest = profile.largest_within(self.slo()).max(1);
        profile.latency(largest).as_millis_f64() / f64::from(largest)
    }
}

impl Popularity {
    /// The share of each of `models` models; the shares add up to 1.
    pub fn shares(self, models: usize) -> Vec<f64> {
        let weights: Vec<f64> = match self {
            Popularity::Equal => vec![1.0; models],
            Popularity::Zipf(s) => (1..=models).map(|rank| (rank as f64).powf(-s)).collect(),
            Popularity::Maf => maf_weights(models),
        };
        let total: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / total).collect()
    }
}

/// The calls of each model's functions. With this sigma, the busiest 18.6% of functions make 99.6%
/// of the calls.
fn maf_weights(models: usize) -> Vec<f64> {
    let mut weights = vec![0.0; models];
    let mut rng = random(0xa2ce, 0);
    if let Ok(calls) = LogNormal::new(0.0, 3.54) {
        for function in 0..models * 100 {
            weights[function % models] += calls.sample(&mut rng);
        }
    }
    weights
}

impl Shape {
    /// The pace of a model for `seconds`; `stream` chooses the model's random numbers.
    ///
    /// # Errors
    /// If the shape gives no valid pace.
    pub fn pace(&self, seed: u64, stream: u64, seconds: f64) -> Result<Pace, BadPace> {
        let stretches = |step: Duration| (seconds / step.as_secs_f64().max(1e-3)).ceil().clamp(1.0, 1e6) as u32;
        Ok(match self {
            Shape::Steady => Pace::steady(),
            Shape::Twitter => Pace::twitter(seed, u64::MAX / 2, stretches(Duration::from_millis(1_000))),
            Shape::Wandering(step) => Pace::wandering(seed, stream, *step, stretches(*step)),
            Shape::Maf(step) => {
                let mut rng = random(seed, stream ^ 0x3af);
                let calls = LogNormal::new(0.0, 0.6).map(|calls| {
                    let factors: Vec<f64> = (0..stretches(*step)).map(|_| calls.sample(&mut rng)).collect();
                    Pace::normalised(*step, &factors)
                });
                calls.unwrap_or_else(|_| Ok(Pace::steady()))?
            }
            Shape::Given(pace) => pace.clone(),
        })
    }
}

/// The text of an unknown popularity.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{0}' is not a popularity; expected equal, maf, or zipf:S with a shape S from 0 to 10")]
pub struct UnknownPopularity(String);

/// `equal`, `maf`, or `zipf:S`.
impl FromStr for Popularity {
    type Err = UnknownPopularity;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "equal" => Some(Popularity::Equal),
            None if text == "maf" => Some(Popularity::Maf),
            Some(("zipf", s)) => s.parse().ok().filter(|s| (0.0..=10.0).contains(s)).map(Popularity::Zipf),
            _ => None,
        }
        .ok_or_else(|| UnknownPopularity(text.to_owned()))
    }
}

impl fmt::Display for Popularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Popularity::Equal => f.write_str("equal"),
            Popularity::Zipf(s) => write!(f, "zipf:{s}"),
            Popularity::Maf => f.write_str("maf"),
        }
    }
}
