//! The requests for one device: their arrivals and their lengths.

use std::fmt;
use std::str::FromStr;

use downbeat_core::Time;
use rand_distr::{Distribution, LogNormal};
use rand_pcg::Pcg64;

use super::failure::{DeviceFailure, named};
use downbeat_sim::Pace;
use downbeat_sim::{ArrivalStream, Arrivals, BadArrivals, random};

/// Sentences of the GLUE benchmark. Their numbers of tokens have lognormal distributions (DVABatch
/// §3.1, figure 4).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Glue {
    /// Short sentences.
    Cola,
    /// Sentences of reviews.
    Sst2,
    /// Pairs of short sentences.
    StsB,
    /// Question and sentence.
    Qnli,
    /// Pairs of sentences from news.
    Mrpc,
    /// Premise and hypothesis: DVABatch's default.
    Rte,
}

/// Tokens of the shortest and of the longest sentence.
const CLIP: (f64, f64) = (4.0, 512.0);

impl Glue {
    /// All workloads, short sentences first.
    pub const ALL: [Glue; 6] = [Glue::Cola, Glue::Sst2, Glue::StsB, Glue::Qnli, Glue::Mrpc, Glue::Rte];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Glue::Cola => "cola",
            Glue::Sst2 => "sst-2",
            Glue::StsB => "sts-b",
            Glue::Qnli => "qnli",
            Glue::Mrpc => "mrpc",
            Glue::Rte => "rte",
        }
    }

    /// Returns mean and standard deviation of the logarithm of the number of tokens.
    fn parameters(self) -> (f64, f64) {
        match self {
            Glue::Cola => (2.37, 0.33),
            Glue::Sst2 => (3.13, 0.46),
            Glue::StsB => (3.35, 0.43),
            Glue::Qnli => (3.87, 0.35),
            Glue::Mrpc => (3.94, 0.26),
            Glue::Rte => (4.11, 0.52),
        }
    }
}

impl fmt::Display for Glue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Glue {
    type Err = DeviceFailure;

    fn from_str(text: &str) -> Result<Self, DeviceFailure> {
        named("workload of GLUE", Glue::ALL, Glue::name, text)
    }
}

/// The requests of a run, of one item each.
#[derive(Clone, Debug)]
pub struct DeviceLoad {
    /// The arrival process.
    pub arrivals: Arrivals,
    /// Requests a second, before [`DeviceLoad::pace`] changes it.
    pub rate: f64,
    /// The change of the rate over time.
    pub pace: Pace,
    /// The number of requests.
    pub requests: u64,
    /// The distribution of lengths; `None` if requests have no length.
    pub lengths: Option<Glue>,
}

impl DeviceLoad {
    /// Makes a load of Poisson arrivals at a steady rate.
    pub fn steady(rate: f64, requests: u64, lengths: Option<Glue>) -> Self {
        DeviceLoad { arrivals: Arrivals::Poisson, rate, pace: Pace::steady(), requests, lengths }
    }

    pub(super) fn feed(&self, seed: u64) -> Result<DeviceFeed, BadArrivals> {
        let lengths = self.lengths.and_then(|glue| {
            let (mean, deviation) = glue.parameters();
            LogNormal::new(mean, deviation).ok()
        });
        let arrivals = self.arrivals.stream(self.rate, seed, 0)?.paced(&self.pace);
        let mut feed = DeviceFeed { arrivals, lengths, left: self.requests, rng: random(seed, 1), next: None };
        feed.draw();
        Ok(feed)
    }
}

/// The requests of a run, one after another.
#[derive(Debug)]
pub(super) struct DeviceFeed {
    arrivals: ArrivalStream,
    lengths: Option<LogNormal<f64>>,
    left: u64,
    rng: Pcg64,
    next: Option<(Time, u32)>,
}

impl DeviceFeed {
    fn draw(&mut self) {
        self.next = (self.left > 0).then(|| {
            let length = self.lengths.map_or(0.0, |lengths| lengths.sample(&mut self.rng).clamp(CLIP.0, CLIP.1));
            (self.arrivals.next_arrival(), length.round() as u32)
        });
        self.left = self.left.saturating_sub(1);
    }

    /// Returns the arrival of the next request.
    pub(super) fn peek(&self) -> Option<Time> {
        self.next.map(|(at, _)| at)
    }

    /// Takes the next request: its arrival and its length.
    pub(super) fn pop(&mut self) -> Option<(Time, u32)> {
        let next = self.next;
        self.draw();
        next
    }
}
