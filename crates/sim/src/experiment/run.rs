//! Running an experiment's cases, and what came of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_core::{Time, median, quantiles};
use serde::Serialize;

use super::{Experiment, Measure, Planned, Value};
use crate::arrivals::BadArrivals;
use crate::capacity::NoCapacity;
use crate::parallel;
use crate::report::{DELAY_BINS, Report, mean, quantile};
use crate::scenario::BadScenario;

/// What came of an experiment.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// [`Experiment::title`].
    pub title: String,
    /// [`Experiment::source`].
    pub source: String,
    /// [`Experiment::measure`].
    pub measure: Measure,
    /// Share of each model's requests that may be dropped or late.
    pub tolerated: f64,
    /// Seeds.
    pub seeds: Vec<u64>,
    /// The cases, in order.
    pub cases: Vec<Case>,
    /// Cases left out because a sample was asked for.
    pub left_out: usize,
    /// Cases that were not measured because the run was interrupted.
    pub unfinished: usize,
}

/// What came of a case.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// The workload's name.
    pub workload: String,
    /// What was varied, with its values here.
    pub point: BTreeMap<String, Value>,
    /// The scheduler.
    pub policy: String,
    /// Devices.
    pub devices: u32,
    /// How many models.
    pub models: usize,
    /// What is measured, over the seeds; `None`: no load was held, or no number of devices was enough.
    pub value: Option<Outcome>,
    /// The published figure.
    pub paper: Option<f64>,
    /// As a share of what [`Experiment::relative_to`] reaches.
    pub relative: Option<f64>,
    /// What the staggered pattern serves of even arrivals (Symphony §3.3), in requests per second; for equal models.
    pub staggered_bound: Option<f64>,
    /// What the devices have the time for if requests come evenly, in requests per second.
    pub fluid_bound: Option<f64>,
    /// By seed.
    pub samples: Vec<Sample>,
}

/// A value over the seeds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Outcome {
    /// The median; of an even number the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

/// What came of a case with one seed.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// The seed.
    pub seed: u64,
    /// What is measured.
    pub value: Option<f64>,
    /// Why there is no capacity, where one was searched and there is none.
    pub no_capacity: Option<NoCapacity>,
    /// Requests per second that were offered.
    pub offered: f64,
    /// Requests per second that were served in time.
    pub goodput: f64,
    /// Share of all requests that was dropped or late.
    pub bad_share: f64,
    /// By model.
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

/// Why a case could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RunFailure {
    /// Its arrivals.
    #[error(transparent)]
    Arrivals(#[from] BadArrivals),
    /// Its scenario.
    #[error(transparent)]
    Scenario(#[from] BadScenario),
}

/// Says which seed is there twice: its run would count twice.
///
/// # Errors
/// If one is.
pub fn check_seeds(seeds: &[u64]) -> Result<(), String> {
    let mut known = BTreeSet::new();
    let twice = seeds.iter().find(|seed| !known.insert(**seed));
    twice.map_or(Ok(()), |seed| Err(format!("the seed {seed} is there twice")))
}

impl Experiment {
    /// Runs all cases with all seeds on `threads` threads. `progress` is told how many of how many runs are done, and says whether to go on: if
    /// not, no other run is begun, and the results have the cases that are finished by then.
    ///
    /// # Errors
    /// If a case is impossible.
    pub fn run(&self, threads: usize, progress: impl Fn(usize, usize) -> bool + Sync) -> Result<Results, RunFailure> {
        // A case that is there twice is run once.
        let mut distinct: Vec<&Planned> = Vec::new();
        let mut place = BTreeMap::new();
        let index: Vec<usize> = self
            .cases
            .iter()
            .map(|case| {
                let key = format!("{:?}{:?}{:?}", case.scenario, case.policy.system(), models_of(case));
                *place.entry(key).or_insert_with(|| {
                    distinct.push(case);
                    distinct.len() - 1
                })
            })
            .collect();
        let jobs: Vec<(&Planned, u64)> =
            distinct.iter().flat_map(|case| self.seeds.iter().map(move |seed| (*case, *seed))).collect();
        let stopped = AtomicBool::new(!progress(0, jobs.len()));
        let work = |(case, seed): &(&Planned, u64)| {
            (!stopped.load(Ordering::Relaxed)).then(|| self.sample(case, *seed)).transpose()
        };
        let samples = parallel::map(&jobs, threads, work, |done| {
            if !progress(done, jobs.len()) {
                stopped.store(true, Ordering::Relaxed);
            }
        });
        let samples = samples.into_iter().collect::<Result<Vec<_>, _>>()?;
        let by_case: Vec<Option<Vec<Sample>>> =
            samples.chunks(self.seeds.len().max(1)).map(|samples| samples.iter().cloned().collect()).collect();
        let finished = self.cases.iter().zip(&index);
        let finished = finished.filter_map(|(planned, index)| Some(Case::new(planned, by_case[*index].clone()?)));
        let mut cases: Vec<Case> = finished.collect();
        let unfinished = self.cases.len() - cases.len();
        self.relate(&mut cases);
        Ok(Results {
            title: self.title.clone(),
            source: self.source.clone(),
            measure: self.measure,
            tolerated: self.search.tolerated,
            seeds: self.seeds.clone(),
            cases,
            left_out: self.left_out,
            unfinished,
        })
    }

    fn sample(&self, case: &Planned, seed: u64) -> Result<Sample, RunFailure> {
        let mut simulation = case.scenario.simulation(&case.policy, seed)?;
        let offered: f64 = simulation.loads.iter().map(|load| load.rate).sum();
        let (offered, value, report) = match self.measure {
            Measure::Capacity => {
                // Where nothing is held there is no run to tell of.
                match self.search.capacity(&simulation)? {
                    Ok(found) => (found.rate, Some(found.rate), found.report),
                    Err(no_capacity) => {
                        let sample = Sample::new(case, seed, 0.0, None, Report::default());
                        return Ok(Sample { no_capacity: Some(no_capacity), ..sample });
                    }
                }
            }
            Measure::Devices => match self.search.fewest_devices(&simulation, self.most_devices)? {
                Some((devices, report)) => (offered, Some(f64::from(devices)), report),
                None => (offered, None, Report::default()),
            },
            Measure::Goodput | Measure::Timeline | Measure::Windows => {
                simulation.record = self.measure == Measure::Timeline;
                if self.measure == Measure::Windows {
                    simulation.window = self.window;
                }
                if let Some((at, policy)) = &self.switch {
                    let dispatch = simulation.loads.iter().map(|load| policy.dispatch(load.slo)).collect();
                    simulation.switch = Some((Time::ZERO + *at, dispatch));
                }
                let report = simulation.run()?;
                (offered, Some(report.goodput()), report)
            }
        };
        Ok(Sample::new(case, seed, offered, value, report))
    }

    /// Sets what each case reaches of the case that differs in the policy only.
    fn relate(&self, cases: &mut [Case]) {
        let Some(reference) = &self.relative_to else { return };
        let key = |case: &Case| format!("{} {:?}", case.workload, case.point);
        let references: BTreeMap<String, f64> = cases
            .iter()
            .filter(|case| case.policy == *reference)
            .filter_map(|case| Some((key(case), case.value?.median)))
            .collect();
        for case in cases {
            let whole = references.get(&key(case)).copied().filter(|whole| *whole > 0.0);
            case.relative = whole.zip(case.value).map(|(whole, value)| value.median / whole);
        }
    }
}

/// What of a policy a run depends on.
fn models_of(case: &Planned) -> Vec<String> {
    let of = |model: &crate::profiles::ModelProfile| {
        let policy = &case.policy;
        format!("{:?}{:?}{:?}", policy.dispatch(model.slo()), policy.drop(), policy.order())
    };
    case.scenario.models.iter().map(of).collect()
}

impl Case {
    fn new(planned: &Planned, samples: Vec<Sample>) -> Case {
        let Planned { workload, point, policy, scenario, paper } = planned;
        let values: Option<Vec<f64>> = samples.iter().map(|sample| sample.value).collect();
        Case {
            workload: workload.clone(),
            point: point.iter().cloned().collect(),
            policy: policy.to_string(),
            devices: scenario.devices,
            models: scenario.models.len(),
            value: values.and_then(|values| Outcome::of(&values)),
            paper: *paper,
            relative: None,
            staggered_bound: scenario.staggered_bound(),
            fluid_bound: scenario.fluid_bound(),
            samples,
        }
    }

    /// The run that plots show: the one whose value is next to the median; `None` where there is no value.
    pub(super) fn typical(&self) -> Option<&Sample> {
        let median = self.value?.median;
        let distance = |sample: &Sample| (sample.value.unwrap_or(0.0) - median).abs();
        self.samples.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)))
    }
}

impl Outcome {
    /// Of some values; `None` of none.
    pub fn of(values: &[f64]) -> Option<Outcome> {
        let [min, upper, max] = quantiles(values.iter().copied(), [0.0, 0.5, 1.0])?;
        let lower = -median(values.iter().map(|value| -value))?;
        Some(Outcome { median: (lower + upper) / 2.0, min, max })
    }
}

impl Sample {
    fn new(case: &Planned, seed: u64, offered: f64, value: Option<f64>, report: Report) -> Sample {
        let sizes = report.batch_sizes();
        let delays = report.delays();
        let delay = |q| quantile(&delays, q).map(|bin| (bin as f64 + 0.5) / DELAY_BINS as f64);
        let names = case.scenario.models.iter().map(|model| model.name.clone());
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

    /// The model with the largest share of bad requests.
    pub(super) fn worst_model(&self) -> Option<(&str, f64)> {
        let worst = self.bad_share_by_model.iter().max_by(|a, b| a.1.total_cmp(b.1))?;
        Some((worst.0.as_str(), *worst.1))
    }
}
