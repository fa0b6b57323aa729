//! Runs the cases of an experiment, and holds the results.

use std::collections::BTreeMap;

use downbeat_core::Time;
use serde::Serialize;

use super::{Experiment, Measure, Planned, Value};
use downbeat_sim::{BadQuestion, Outcome, Report, Sample, parallel};

/// The results of an experiment.
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

/// The result of a case.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// The workload's name.
    pub workload: String,
    /// The varied settings, with their values in this case.
    pub point: BTreeMap<String, Value>,
    /// The scheduler.
    pub policy: String,
    /// Devices.
    pub devices: u32,
    /// The number of models.
    pub models: usize,
    /// The measured quantity over the seeds; `None`: no load was held, or no number of devices was
    /// enough.
    pub value: Option<Outcome>,
    /// The published figure.
    pub paper: Option<f64>,
    /// The value as a share of [`Experiment::relative_to`]'s value.
    pub relative: Option<f64>,
    /// The rate that the staggered pattern serves of even arrivals (Symphony §3.3), in requests per
    /// second; for equal models.
    pub staggered_bound: Option<f64>,
    /// The rate that the devices have time for if requests come evenly, in requests per second.
    pub fluid_bound: Option<f64>,
    /// The sample of each seed.
    pub samples: Vec<Sample>,
}

impl Experiment {
    /// Runs all cases with all seeds on `threads` threads. `progress` gets the number of finished
    /// runs and of all runs. If it returns false, no other run begins, and the results hold the
    /// cases finished by then.
    ///
    /// # Errors
    /// If a case is impossible.
    pub fn run(&self, threads: usize, progress: impl Fn(usize, usize) -> bool + Sync) -> Result<Results, BadQuestion> {
        // A case that occurs twice is run once.
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
        let work = |(case, seed): &(&Planned, u64)| self.sample(case, *seed);
        let samples = parallel::map_while(&jobs, threads, work, |done| progress(done, jobs.len()));
        let samples = samples.into_iter().map(Option::transpose).collect::<Result<Vec<_>, _>>()?;
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

    fn sample(&self, case: &Planned, seed: u64) -> Result<Sample, BadQuestion> {
        let mut simulation = case.scenario.simulation(&case.policy, seed)?;
        let offered: f64 = simulation.loads.iter().map(|load| load.rate).sum();
        let (offered, value, report) = match self.measure {
            Measure::Capacity => match self.search.capacity(&simulation)? {
                Ok(found) => (found.rate, Some(found.rate), found.report),
                Err(why) => return Ok(Sample::without_capacity(&case.scenario, seed, why)),
            },
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
        Ok(Sample::new(&case.scenario, seed, offered, value, report))
    }

    /// Sets each case's share of the value of the case that differs only in its policy.
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

/// Describes the parts of the policy that a run depends on, by model.
fn models_of(case: &Planned) -> Vec<String> {
    let of = |model: &downbeat_sim::ModelProfile| {
        let policy = &case.policy;
        format!("{:?}{:?}{:?}", policy.dispatch(model.slo()), policy.drop(), policy.order())
    };
    case.scenario.models.iter().map(of).collect()
}

impl Case {
    fn new(planned: &Planned, samples: Vec<Sample>) -> Case {
        let Planned { workload, point, policy, scenario, paper } = planned;
        Case {
            workload: workload.clone(),
            point: point.iter().cloned().collect(),
            policy: policy.to_string(),
            devices: scenario.devices,
            models: scenario.models.len(),
            value: Outcome::of_samples(&samples),
            paper: *paper,
            relative: None,
            staggered_bound: scenario.staggered_bound(),
            fluid_bound: scenario.fluid_bound(),
            samples,
        }
    }

    /// Returns the run that plots show: the one whose value is nearest to the median; `None` if no
    /// run has a value.
    pub(super) fn typical(&self) -> Option<&Sample> {
        self.value?.typical(&self.samples)
    }
}
