//! The capacities of a cluster under several policies.

use std::fmt;

use downbeat_report::{Page, Table, bars};
use serde::Serialize;

use crate::arrivals::BadArrivals;
use crate::capacity::Search;
use crate::parallel;
use crate::policy::Policy;
use crate::scenario::{BadScenario, Scenario};
use crate::tables::sample::{Outcome, Sample};
use crate::tables::sample_table::{
    NamedSample, percent, plot_batch_sizes, plot_delays, why_no_capacity, with_outcome, with_sample,
};

/// A question for the capacity of one cluster under several policies, each with several seeds.
#[derive(Clone, Debug)]
pub struct CapacityQuestion {
    /// The workload and the cluster.
    pub scenario: Scenario,
    /// The policies.
    pub policies: Vec<Policy>,
    /// Seeds of all random numbers.
    pub seeds: Vec<u64>,
    /// The parameters of each search.
    pub search: Search,
}

/// The results of the searches.
#[derive(Clone, Debug, Serialize)]
pub struct Capacities {
    /// Share of each model's requests that may be dropped or late.
    pub tolerated: f64,
    /// The seeds.
    pub seeds: Vec<u64>,
    /// The number of devices.
    pub devices: u32,
    /// The number of models.
    pub models: usize,
    /// Requests per second that the staggered pattern serves of even arrivals (Symphony §3.3); for
    /// equal models only.
    pub staggered_bound: Option<f64>,
    /// Requests per second for which the devices have the time if requests come evenly.
    pub fluid_bound: Option<f64>,
    /// The capacity under each policy.
    pub cases: Vec<CapacityCase>,
    /// Policies that were not measured because the run was interrupted.
    pub unfinished: usize,
}

/// The capacity under a policy.
#[derive(Clone, Debug, Serialize)]
pub struct CapacityCase {
    /// The policy.
    pub policy: String,
    /// Requests per second over the seeds; `None`: with one of the seeds no load was held.
    pub value: Option<Outcome>,
    /// The sample of each seed.
    pub samples: Vec<Sample>,
}

/// The reason why capacities cannot be searched.
#[derive(Debug, thiserror::Error)]
pub enum BadQuestion {
    /// An arrival process is invalid.
    #[error(transparent)]
    Arrivals(#[from] BadArrivals),
    /// The scenario is invalid.
    #[error(transparent)]
    Scenario(#[from] BadScenario),
}

impl CapacityQuestion {
    /// Runs all searches on `threads` threads. `goes_on` gets the number of searches that are done
    /// and the number of all searches. It returns whether another one may begin.
    ///
    /// # Errors
    /// If the scenario cannot be run.
    pub fn answer(
        &self,
        threads: usize,
        goes_on: impl Fn(usize, usize) -> bool + Sync,
    ) -> Result<Capacities, BadQuestion> {
        let CapacityQuestion { scenario, policies, seeds, search } = self;
        let jobs: Vec<(&Policy, u64)> =
            policies.iter().flat_map(|policy| seeds.iter().map(move |seed| (policy, *seed))).collect();
        let work = |(policy, seed): &(&Policy, u64)| self.sample(policy, *seed);
        let samples = parallel::map_while(&jobs, threads, work, |done| goes_on(done, jobs.len()));
        let samples = samples.into_iter().map(Option::transpose).collect::<Result<Vec<_>, _>>()?;
        let finished = policies.iter().zip(samples.chunks(seeds.len().max(1))).filter_map(|(policy, samples)| {
            let samples: Vec<Sample> = samples.iter().cloned().collect::<Option<_>>()?;
            Some(CapacityCase { policy: policy.to_string(), value: Outcome::of_samples(&samples), samples })
        });
        let cases: Vec<CapacityCase> = finished.collect();
        Ok(Capacities {
            tolerated: search.tolerated,
            seeds: seeds.clone(),
            devices: scenario.devices,
            models: scenario.models.len(),
            staggered_bound: scenario.staggered_bound(),
            fluid_bound: scenario.fluid_bound(),
            unfinished: policies.len() - cases.len(),
            cases,
        })
    }

    fn sample(&self, policy: &Policy, seed: u64) -> Result<Sample, BadQuestion> {
        let simulation = self.scenario.simulation(policy, seed)?;
        Ok(match self.search.capacity(&simulation)? {
            Ok(found) => Sample::new(&self.scenario, seed, found.rate, Some(found.rate), found.report),
            Err(why) => Sample::without_capacity(&self.scenario, seed, why),
        })
    }
}

impl CapacityCase {
    /// The sample that tables and plots show.
    pub fn typical(&self) -> Option<&Sample> {
        self.value?.typical(&self.samples)
    }
}

impl Capacities {
    fn table(&self) -> Table<&CapacityCase> {
        let table = Table::of(&self.cases).text("policy", |case| &case.policy);
        let table = with_outcome(table, "capacity r/s", self.seeds.len(), |case| case.value);
        let share = |bound: Option<f64>, case: &CapacityCase| Some(percent(case.value?.median / bound?));
        let table = table
            .some("of staggered", |case| share(self.staggered_bound, case))
            .some("of fluid", |case| share(self.fluid_bound, case));
        with_sample(table, |case| case.typical())
    }

    fn conditions(&self) -> String {
        let seeds: Vec<String> = self.seeds.iter().map(ToString::to_string).collect();
        let percent = self.tolerated * 100.0;
        let mut lines =
            vec![format!("seeds {}; at most {percent}% of each model's requests dropped or late", seeds.join(", "))];
        if self.unfinished > 0 {
            lines.push(format!("interrupted; policies that were not measured: {}", self.unfinished));
        }
        lines.extend(self.cases.iter().filter_map(|case| self.why_none(case)));
        lines.join("\n")
    }

    fn why_none(&self, case: &CapacityCase) -> Option<String> {
        let sample = case.samples.iter().find(|sample| sample.value.is_none())?;
        let seed = if self.seeds.len() > 1 { format!(", seed {}", sample.seed) } else { String::new() };
        Some(format!("{}{seed}: {}", case.policy, why_no_capacity(sample.no_capacity.as_ref()?, self.tolerated)))
    }

    /// The table and plots as one HTML page without external files.
    pub fn page(&self) -> String {
        let rate = |case: &CapacityCase| vec![case.value.as_ref().map_or(f64::NAN, |value| value.median)];
        let rates: Vec<_> = self.cases.iter().map(|case| (case.policy.clone(), rate(case))).collect();
        let samples: Vec<NamedSample<'_>> =
            self.cases.iter().map(|case| (case.policy.clone(), case.typical())).collect();
        let about = "The highest rate that the devices hold, by policy.";
        let plots = [
            bars("Capacity", about, "policy", "capacity, requests/s", &["capacity".to_owned()], &rates),
            plot_batch_sizes("", &samples),
            plot_delays("", &samples),
        ];
        Page::new("Capacity").plots(&plots).table("Table", &self.table()).note(&self.conditions()).html()
    }
}

impl fmt::Display for Capacities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |count: usize, word: &str| format!("{count} {word}{}", if count == 1 { "" } else { "s" });
        let (models, devices) = (plural(self.models, "model"), plural(self.devices as usize, "device"));
        writeln!(f, "Capacity of {devices} for {models}\n")?;
        self.table().fmt(f)?;
        writeln!(f, "\n{}", self.conditions())
    }
}
