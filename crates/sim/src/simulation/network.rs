//! The delays of messages between a scheduler and its devices.

use std::fmt;
use std::str::FromStr;

use downbeat_core::Duration;
use downbeat_core::cluster::NetworkBudget;
use rand_distr::{Distribution, LogNormal};
use rand_pcg::Pcg64;

/// The network between the scheduler and the devices: the planned delay, and the actual delay of a
/// batch.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Network {
    /// The delay that the scheduler plans with: the 99.99th percentile, as in Symphony §5.6.
    pub budget: NetworkBudget,
    /// The actual delay of a batch.
    pub delay: Delay,
}

/// The actual delay of a batch, as a share of [`NetworkBudget::delay`].
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum Delay {
    /// The whole budget, always.
    #[default]
    Budget,
    /// A lognormal share. Its 99.99th percentile is the whole budget, and is this many times its
    /// median. Symphony's appendix B: 12 for TCP, 1.4 for RDMA.
    Lognormal(f64),
}

/// The 99.99th percentile of the standard normal distribution.
const Z_9999: f64 = 3.719;

impl Network {
    /// The time from the decision until a batch of `items` is at its device.
    pub fn delay(&self, items: u32, rng: &mut Pcg64) -> Duration {
        let budget = self.budget.delay(items);
        match self.delay {
            _ if budget == Duration::ZERO => budget,
            Delay::Budget => budget,
            Delay::Lognormal(ratio) => {
                let share = LogNormal::new(-ratio.ln(), ratio.ln() / Z_9999).map_or(1.0, |share| share.sample(rng));
                Duration::from_secs_f64(budget.as_secs_f64() * share)
            }
        }
    }
}

/// The text of an unknown distribution of delays.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "'{0}' is not a distribution of delays; expected budget, or lognormal:RATIO of the 99.99th percentile to the \
     median, from 1 to 1000"
)]
pub struct UnknownDelay(String);

/// `budget`, or `lognormal:RATIO`.
impl FromStr for Delay {
    type Err = UnknownDelay;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "budget" => Some(Delay::Budget),
            Some(("lognormal", ratio)) => {
                ratio.parse().ok().filter(|ratio| (1.0..=1e3).contains(ratio)).map(Delay::Lognormal)
            }
            _ => None,
        }
        .ok_or_else(|| UnknownDelay(text.to_owned()))
    }
}

impl fmt::Display for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Delay::Budget => f.write_str("budget"),
            Delay::Lognormal(ratio) => write!(f, "lognormal:{ratio}"),
        }
    }
}
