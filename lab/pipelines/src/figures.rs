//! The figures: all rules on many workloads.

use downbeat_core::quantiles;
use downbeat_sim::pipelines::{LoadSearch, Verdict};

use crate::oracle::Oracle;
use crate::rule::{Batches, Rule, alone, nexus};
use crate::run::Run;
use crate::workload::PipelineWorkload;

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Arrivals of a workload; the first quarter does not count.
    pub requests: usize,
    /// Fixed shares that the oracle tries for each goodput.
    pub tries: u32,
    /// The search of capacities.
    pub search: LoadSearch,
    /// Whether capacities are searched, which takes most of the time.
    pub capacity: bool,
}

/// The figures of one workload with one kind of batches. The oracle's are the last of each list,
/// and come after those of [`Rule::ALL`].
#[derive(Clone, Debug)]
pub struct Row {
    /// Requests in time as a share of all, below and above load 1.
    pub goodput: [Vec<f64>; 2],
    /// The load at which 1% is lost.
    pub capacity: Vec<f64>,
}

/// All rows of one kind of batches.
#[derive(Clone, Debug)]
pub struct Figures(
    /// By workload.
    pub Vec<Row>,
);

/// A distribution of ratios.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    /// The median.
    pub median: f64,
    /// The mean.
    pub mean: f64,
    /// The 10th percentile.
    pub low: f64,
}

impl Summary {
    /// The summary of some ratios.
    pub fn of(ratios: Vec<f64>) -> Summary {
        let mean = ratios.iter().sum::<f64>() / ratios.len().max(1) as f64;
        let [low, median] = quantiles(ratios, [0.1, 0.5]).unwrap_or([f64::NAN; 2]);
        Summary { median, mean, low }
    }
}

impl Row {
    /// Plays all rules on a workload.
    pub fn of(workload: &PipelineWorkload, batches: Batches, settings: &Settings) -> Row {
        let goodput = workload.loads.map(|load| {
            let run = Run::new(workload, batches, load);
            let rules = Rule::ALL.iter().map(|rule| rule.judge(&run).map_or(0.0, |verdict| verdict.goodput()));
            let mut goodput: Vec<f64> = rules.collect();
            goodput.push(best_fixed(&run, settings, 0).goodput());
            goodput
        });
        let capacity = if settings.capacity { capacities(workload, batches, settings) } else { Vec::new() };
        Row { goodput, capacity }
    }
}

fn capacities(workload: &PipelineWorkload, batches: Batches, settings: &Settings) -> Vec<f64> {
    let run = |load| Run::new(workload, batches, load);
    let tolerated = settings.search.tolerated;
    let rules = Rule::ALL.iter();
    let rules =
        rules.map(|rule| settings.search.capacity(|load| rule.judge(&run(load).tolerating(tolerated)).is_some()));
    let mut capacities: Vec<f64> = rules.collect();
    capacities.push(settings.search.capacity(|load| {
        let most_lost = run(load).tolerating(tolerated).most_lost;
        let best = best_fixed(&run(load), settings, most_lost);
        best.asked - best.good <= most_lost
    }));
    capacities
}

fn best_fixed(run: &Run<'_>, settings: &Settings, tolerated: u64) -> Verdict {
    let Run { workload, batches, load, .. } = *run;
    let stage = Rule::Equal.stage(workload, batches);
    let oracle = Oracle { stage: &stage, tries: settings.tries, seed: 7 };
    let each = |weight: &dyn Fn(usize, usize) -> f64| -> Vec<Vec<f64>> {
        let pipelines = workload.pipelines.iter().enumerate();
        pipelines
            .map(|(number, pipeline)| (0..pipeline.shape.len()).map(|step| weight(number, step)).collect())
            .collect()
    };
    let nexus = nexus(workload, load);
    let starts = [
        each(&|_, _| 1.0),
        each(&|pipeline, step| alone(workload, pipeline, step)),
        each(&|pipeline, step| nexus[pipeline][step].as_secs_f64().max(1e-6)),
    ];
    oracle.search(run, &starts, tolerated).verdict
}

impl Figures {
    /// Goodput of a rule relative to equal shares, below (0) or above (1) load 1. The oracle's
    /// number is that after the last rule.
    pub fn goodput(&self, rule: usize, above: usize) -> Summary {
        Summary::of(self.0.iter().map(|row| ratio(&row.goodput[above], rule, 0)).collect())
    }

    /// Goodput of a rule above load 1, relative to the best fixed shares.
    pub fn of_best(&self, rule: usize, above: usize) -> Summary {
        Summary::of(self.0.iter().map(|row| ratio(&row.goodput[above], rule, Rule::ALL.len())).collect())
    }

    /// Capacity of a rule relative to equal shares.
    pub fn capacity(&self, rule: usize) -> Summary {
        Summary::of(self.0.iter().map(|row| ratio(&row.capacity, rule, 0)).collect())
    }

    /// The table of all rules.
    pub fn table(&self, title: &str) -> String {
        let mut text = format!(
            "| {title} | capacity: median (p10), mean | goodput below | above | above, of the best fixed |\n|---|---|---|---|---|\n"
        );
        for rule in 0..=Rule::ALL.len() {
            let name = Rule::ALL.get(rule).map_or("best fixed shares, by search", |rule| rule.name());
            let show = |s: Summary| format!("{:.2} ({:.2}), {:.2}", s.median, s.low, s.mean);
            let capacity = if self.0.iter().all(|row| row.capacity.is_empty()) {
                String::new()
            } else {
                show(self.capacity(rule))
            };
            text += &format!(
                "| {name} | {capacity} | {} | {} | {} |\n",
                show(self.goodput(rule, 0)),
                show(self.goodput(rule, 1)),
                show(self.of_best(rule, 1))
            );
        }
        text
    }
}

/// A share of nothing is a share of one request in ten thousand.
fn ratio(values: &[f64], of: usize, to: usize) -> f64 {
    values[of].max(1e-4) / values[to].max(1e-4)
}
