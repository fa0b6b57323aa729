//! The outcome of one run, and of a case over several seeds.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::{median, quantiles};
use serde::Serialize;

use crate::capacity::NoCapacity;
use crate::scenario::Scenario;
use crate::tables::report::{DELAY_BINS, Report, mean, quantile};

/// A value over the seeds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Outcome {
    /// The median; of an even number of values, the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

/// The outcome of a case with one seed.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// The seed.
    pub seed: u64,
    /// The measured value, such as a capacity in requests a second.
    pub value: Option<f64>,
    /// The reason why a search found no capacity.
    pub no_capacity: Option<NoCapacity>,
    /// Requests per second that were offered.
    pub offered: f64,
    /// Requests per second that were served in time.
    pub goodput: f64,
    /// Share of all requests that was dropped or late.
    pub bad_share: f64,
    /// The same share for each model.
    pub bad_share_by_model: BTreeMap<String, f64>,
    /// Mean of the devices' busy shares.
    pub busy_share: f64,
    /// Devices that ran at all.
    pub devices_used: usize,
    /// Batch sizes.
    pub batch: Sizes,
    /// Time in the queue as a share of the SLO.
    pub delay: Delays,
    /// Batches that were stopped to make room for another.
    pub preempted: u64,
    /// The run itself, for plots.
    #[serde(skip)]
    pub report: Report,
}

/// A distribution of batch sizes, by batches.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Sizes {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: Option<usize>,
    /// The 99th percentile.
    pub p99: Option<usize>,
}

/// A distribution of queueing delays as shares of the SLO, to within half a percent.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Delays {
    /// The median.
    pub p50: Option<f64>,
    /// The 99th percentile.
    pub p99: Option<f64>,
}

/// Refuses a list with a repeated seed: its run would count twice.
///
/// # Errors
/// If a seed is repeated.
pub fn check_seeds(seeds: &[u64]) -> Result<(), String> {
    let mut known = BTreeSet::new();
    let twice = seeds.iter().find(|seed| !known.insert(**seed));
    twice.map_or(Ok(()), |seed| Err(format!("the seed {seed} is given twice")))
}

impl Outcome {
    /// The outcome of these values; `None` if there are none.
    pub fn of(values: &[f64]) -> Option<Outcome> {
        let [min, upper, max] = quantiles(values.iter().copied(), [0.0, 0.5, 1.0])?;
        let lower = -median(values.iter().map(|value| -value))?;
        Some(Outcome { median: (lower + upper) / 2.0, min, max })
    }

    /// The outcome of the values of all samples; `None` if a sample has no value.
    pub fn of_samples(samples: &[Sample]) -> Option<Outcome> {
        Outcome::of(&samples.iter().map(|sample| sample.value).collect::<Option<Vec<f64>>>()?)
    }

    /// The sample whose value is nearest to the median: the run that tables and plots show.
    pub fn typical<'a>(&self, samples: &'a [Sample]) -> Option<&'a Sample> {
        let distance = |sample: &Sample| (sample.value.unwrap_or(0.0) - self.median).abs();
        samples.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)))
    }
}

impl Sample {
    /// The sample of a run of `scenario` with `seed` at `offered` requests a second.
    pub fn new(scenario: &Scenario, seed: u64, offered: f64, value: Option<f64>, report: Report) -> Sample {
        let sizes = report.batch_sizes();
        let delays = report.delays();
        let delay = |q| quantile(&delays, q).map(|bin| (bin as f64 + 0.5) / DELAY_BINS as f64);
        let names = scenario.models.iter().map(|model| model.name.clone());
        Sample {
            seed,
            value,
            no_capacity: None,
            offered,
            goodput: if report.models.is_empty() { 0.0 } else { report.goodput() },
            bad_share: report.bad_share(),
            bad_share_by_model: names.zip(report.models.iter().map(|model| model.bad_share())).collect(),
            busy_share: report.mean_busy(),
            devices_used: report.busy.iter().filter(|busy| **busy > 0.0).count(),
            batch: Sizes { mean: mean(&sizes), p50: quantile(&sizes, 0.5), p99: quantile(&sizes, 0.99) },
            delay: Delays { p50: delay(0.5), p99: delay(0.99) },
            preempted: report.models.iter().map(|model| model.preempted).sum(),
            report,
        }
    }

    /// The sample of a search that found no capacity and so has no run.
    pub fn without_capacity(scenario: &Scenario, seed: u64, why: NoCapacity) -> Sample {
        Sample { no_capacity: Some(why), ..Sample::new(scenario, seed, 0.0, None, Report::default()) }
    }

    /// The model with the largest share of bad requests.
    pub fn worst_model(&self) -> Option<(&str, f64)> {
        let worst = self.bad_share_by_model.iter().max_by(|a, b| a.1.total_cmp(b.1))?;
        Some((worst.0.as_str(), *worst.1))
    }
}
