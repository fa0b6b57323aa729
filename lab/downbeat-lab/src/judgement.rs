//! A judgement compares a policy with all others on random workloads.

use std::collections::BTreeMap;
use std::fmt;

use downbeat_core::quantiles;
use downbeat_report::{Axis, Line, Page, Scale, Table, lines};
use serde::Serialize;

use crate::random_workloads::RandomWorkload;
use downbeat_sim::ModelProfile;
use downbeat_sim::Search;
use downbeat_sim::policy::Policy;
use downbeat_sim::{Capacities, CapacityCase, CapacityQuestion};

/// The way a policy is judged: by its capacity on random workloads, as a share of the best capacity
/// of the other policies.
#[derive(Clone, PartialEq, Debug)]
pub struct Judge {
    /// The judged policy.
    pub policy: Policy,
    /// The policies that it is compared with. The judged one is skipped.
    pub others: Vec<Policy>,
    /// The seeds of the arrivals. Capacities are searched once with each seed, and their means
    /// compared. The differences between seeds give the noise of a ratio.
    pub seeds: Vec<u64>,
    /// The precision of a capacity, as a share of the capacity.
    pub precision: f64,
    /// The approximate number of requests of a run. The least popular model gets at least a tenth
    /// of this number. Example: requests are lost independently. Then 20,000 requests tell a bad
    /// share of 1% to within 0.07%.
    pub requests: f64,
}

/// The comparison of a policy with all others on one workload.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Judged {
    /// [`RandomWorkload::number`].
    pub number: u32,
    /// The number of models.
    pub models: usize,
    /// The number of devices.
    pub devices: u32,
    /// The arrivals, in words.
    pub arrivals: String,
    /// The popularity of the models, in words.
    pub popularity: String,
    /// Standard deviation of an execution time, as a share of it.
    pub noise: f64,
    /// The least and the largest `beta / alpha`.
    pub batching_effects: [f64; 2],
    /// The tightest and the loosest SLO, as multiples of `l(1)`.
    pub slo_factors: [f64; 2],
    /// The models, the most popular first.
    pub profiles: Vec<ModelProfile>,
    /// By policy, by seed of the arrivals: requests per second; 0 where no load is held.
    pub capacities: BTreeMap<String, Vec<f64>>,
    /// The mean capacity of the judged policy.
    pub capacity: f64,
    /// The other policy with the highest mean capacity; the first of several.
    pub best: String,
    /// The mean capacity of that policy.
    pub best_capacity: f64,
    /// The rate that the devices have time for if requests come evenly. If the best capacity is far
    /// below, the devices can hardly hold any load of the workload.
    pub fluid_bound: Option<f64>,
    /// `capacity / best_capacity`; `None` where no policy holds any load.
    pub ratio: Option<f64>,
    /// The ratio for each seed of the arrivals alone.
    pub ratios: Vec<Option<f64>>,
}

/// The comparison of a policy with others on several workloads.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Judgement {
    /// The judged policy.
    pub policy: String,
    /// The seed of the workloads.
    pub seed: u64,
    /// The seeds of the arrivals.
    pub arrival_seeds: Vec<u64>,
    /// The comparison on each workload.
    pub workloads: Vec<Judged>,
    /// Workloads that were not measured because the run was interrupted.
    pub unfinished: u32,
    /// The spread of the ratios; `None` without any.
    pub spread: Option<Spread>,
}

/// The spread of ratios.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Spread {
    /// The number of ratios.
    pub count: usize,
    /// The smallest.
    pub least: f64,
    /// A tenth of them is at most this.
    pub tenth_percentile: f64,
    /// Half of the ratios are at most this.
    pub median: f64,
    /// The share of ratios of at least 1.
    pub at_one: f64,
    /// The standard deviation of a ratio that is due to the arrivals. It is the deviation of the
    /// mean over the seeds, estimated from single seeds. `None` with one seed.
    pub noise: Option<f64>,
}

impl Judge {
    /// Returns the search of the capacities of all policies on this workload.
    pub fn question(&self, workload: &RandomWorkload) -> CapacityQuestion {
        let scenario = workload.scenario.clone();
        let shares = scenario.popularity.shares(scenario.models.len());
        let least = shares.into_iter().fold(1.0, f64::min);
        let search = Search {
            precision: self.precision,
            requests_per_model: self.requests * least.max(0.1),
            ..Search::default()
        };
        let others = self.others.iter().filter(|other| **other != self.policy);
        let policies = std::iter::once(&self.policy).chain(others).cloned().collect();
        CapacityQuestion { scenario, policies, seeds: self.seeds.clone(), search }
    }

    /// Compares the answers to a workload's [`Judge::question`]; `None` if the search was
    /// interrupted.
    pub fn judged(&self, workload: &RandomWorkload, results: &Capacities) -> Option<Judged> {
        if results.unfinished > 0 {
            return None;
        }
        let name = self.policy.to_string();
        let rates = |case: &CapacityCase| -> Vec<f64> {
            case.samples.iter().map(|sample| sample.value.unwrap_or(0.0)).collect()
        };
        let ours = rates(results.cases.iter().find(|case| case.policy == name)?);
        let others: Vec<(&String, Vec<f64>)> =
            results.cases.iter().filter(|case| case.policy != name).map(|case| (&case.policy, rates(case))).collect();
        let mut best: (&str, f64) = ("none", 0.0);
        for (other, rates) in &others {
            if mean(rates) > best.1 {
                best = (other.as_str(), mean(rates));
            }
        }
        let ratio = |ours: f64, best: f64| (best > 0.0 || ours > 0.0).then(|| ours / best);
        let alone = |at: usize| others.iter().filter_map(|(_, rates)| rates.get(at)).copied().fold(0.0, f64::max);
        let scenario = &workload.scenario;
        Some(Judged {
            number: workload.number,
            models: scenario.models.len(),
            devices: scenario.devices,
            arrivals: workload.arrivals.clone(),
            popularity: scenario.popularity.to_string(),
            noise: scenario.noise,
            batching_effects: workload.batching_effects(),
            slo_factors: workload.slo_factors(),
            profiles: scenario.models.clone(),
            capacities: results.cases.iter().map(|case| (case.policy.clone(), rates(case))).collect(),
            capacity: mean(&ours),
            best: best.0.to_owned(),
            best_capacity: best.1,
            fluid_bound: scenario.fluid_bound(),
            ratio: ratio(mean(&ours), best.1),
            ratios: ours.iter().enumerate().map(|(at, ours)| ratio(*ours, alone(at))).collect(),
        })
    }

    /// Summarises all workloads of `seed`.
    pub fn judgement(&self, seed: u64, workloads: Vec<Judged>, unfinished: u32) -> Judgement {
        Judgement {
            policy: self.policy.to_string(),
            seed,
            arrival_seeds: self.seeds.clone(),
            spread: Spread::of(&workloads),
            workloads,
            unfinished,
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

impl Spread {
    /// Returns the spread of the ratios of these workloads; `None` if there are none.
    fn of(workloads: &[Judged]) -> Option<Spread> {
        let ratios: Vec<f64> = workloads.iter().filter_map(|judged| judged.ratio).collect();
        let [least, tenth_percentile, median] = quantiles(ratios.iter().copied(), [0.0, 0.1, 0.5])?;
        let single = workloads.iter().filter_map(|judged| judged.ratios.iter().copied().collect::<Option<Vec<f64>>>());
        let single = single.filter(|ratios| ratios.iter().all(|ratio| ratio.is_finite()));
        // The variance within workloads, pooled over all of them.
        let (mut squares, mut freedom, mut seeds) = (0.0, 0, 0);
        for ratios in single {
            let centre = mean(&ratios);
            squares += ratios.iter().map(|ratio| (ratio - centre).powi(2)).sum::<f64>();
            freedom += ratios.len() - 1;
            seeds = ratios.len();
        }
        let noise = (freedom > 0).then(|| (squares / freedom as f64 / seeds as f64).sqrt());
        let at_one = ratios.iter().filter(|ratio| **ratio >= 1.0).count() as f64 / ratios.len() as f64;
        Some(Spread { count: ratios.len(), least, tenth_percentile, median, at_one, noise })
    }
}

impl Judgement {
    fn table(&self) -> Table<&Judged> {
        let range = |[least, most]: [f64; 2], digits: usize| {
            let (least, most) = (format!("{least:.digits$}"), format!("{most:.digits$}"));
            if least == most { least } else { format!("{least} to {most}") }
        };
        Table::of(&self.workloads)
            .number("workload", |judged| judged.number)
            .number("models", |judged| judged.models)
            .number("devices", |judged| judged.devices)
            .text("arrivals", |judged| &judged.arrivals)
            .text("popularity", |judged| &judged.popularity)
            .number("noise", |judged| format!("{:.1}%", 100.0 * judged.noise))
            .number("beta/alpha", |judged| range(judged.batching_effects, 2))
            .number("SLO of l(1)", |judged| range(judged.slo_factors, 1))
            .number(&format!("{} r/s", self.policy), |judged| format!("{:.0}", judged.capacity))
            .text("best other", |judged| &judged.best)
            .number("r/s", |judged| format!("{:.0}", judged.best_capacity))
            .some("of fluid", |judged| Some(format!("{:.0}%", 100.0 * judged.best_capacity / judged.fluid_bound?)))
            .some("ratio", |judged| Some(format!("{:.3}", judged.ratio?)))
            .some("by arrivals", |judged| {
                let several = judged.ratios.len() > 1;
                let ratios: Option<Vec<String>> =
                    judged.ratios.iter().map(|ratio| Some(format!("{:.3}", (*ratio)?))).collect();
                ratios.filter(|_| several).map(|ratios| ratios.join(", "))
            })
    }

    fn sentence(&self) -> String {
        let seeds: Vec<String> = self.arrival_seeds.iter().map(ToString::to_string).collect();
        let seeds = format!("Workloads of seed {}, arrivals of {}.", self.seed, seeds.join(", "));
        let unfinished = match self.unfinished {
            0 => String::new(),
            count => format!(" Interrupted: {count} workloads were not measured."),
        };
        let Some(spread) = &self.spread else { return format!("{seeds}{unfinished} No ratio is known.") };
        let idle = self.workloads.len() - spread.count;
        let idle = if idle > 0 { format!(" On {idle} more nobody holds any load.") } else { String::new() };
        let noise = spread.noise.map_or(String::new(), |noise| {
            format!(" Other arrivals move a ratio by {noise:.3} (one standard deviation).")
        });
        format!(
            "{seeds} {} of the best other policy on {} workloads: least {:.3}, tenth percentile {:.3}, median {:.3}; at 1.00 or above {:.0}%.{noise}{idle}{unfinished}",
            self.policy,
            spread.count,
            spread.least,
            spread.tenth_percentile,
            spread.median,
            100.0 * spread.at_one
        )
    }

    /// Renders the judgement as one HTML page without external resources.
    pub fn page(&self) -> String {
        let mut ratios: Vec<f64> = self.workloads.iter().filter_map(|judged| judged.ratio).collect();
        ratios.sort_by(f64::total_cmp);
        let count = ratios.len() as f64;
        let points = ratios.iter().zip(1..).map(|(ratio, at)| (100.0 * f64::from(at) / count, *ratio)).collect();
        let line = Line { name: &self.policy, points, stepped: true };
        let axis = |label| Axis { label, scale: Scale::Linear };
        let plot = lines(
            "All workloads, sorted",
            "capacity as a share of the best other policy's",
            &axis("% of the workloads"),
            &axis("share of the best other policy's capacity"),
            &[line],
        );
        Page::new(&format!("{} on random workloads", self.policy))
            .note(&self.sentence())
            .plots(&[plot])
            .table("Table", &self.table())
            .html()
    }
}

impl fmt::Display for Judgement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.table().fmt(f)?;
        writeln!(f, "\n{}", self.sentence())
    }
}
