//! The tables and figures of the papers on the emulated device.

mod abacus;
mod abacus_groups;
mod abacus_instances;
mod abacus_predictors;
mod device_model;
mod dvabatch;
mod dvabatch_load;
mod dvabatch_operators;
mod e2bird;
mod e2bird_parts;
mod gslice;
mod gslice_control;
mod gslice_modes;
mod gslice_streams;
mod slots;
mod terms;

use std::fmt;

use downbeat_report::{Page, Table};
use serde::Serialize;

use super::architecture::Architecture;
use super::failure::{DeviceFailure, named};
use super::policy::{DevicePolicyName, Tuning};
use super::search::{Peak, peak, tune_window};
use super::simulation::DeviceSimulation;
use downbeat_sim::parallel;

/// A table or figure of a paper, on the emulated device.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figure {
    /// The table or figure of the paper that it repeats.
    pub title: String,
    /// The explanation that a reader needs.
    pub note: String,
    /// The rows; the first one is the head.
    pub table: Vec<Vec<String>>,
    /// Plots as SVG.
    #[serde(skip)]
    pub plots: Vec<String>,
}

/// The options with which figures are made.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FigureOptions {
    /// Chooses all random numbers.
    pub seed: u64,
    /// Requests of a run, where the paper does not say how many.
    pub requests: u64,
    /// Threads, each with a run of its own.
    pub threads: usize,
}

impl Default for FigureOptions {
    fn default() -> Self {
        FigureOptions { seed: 1, requests: 6_000, threads: 1 }
    }
}

type Maker = fn(&FigureOptions) -> Result<Figure, DeviceFailure>;

/// The figures: name, title, maker.
const NAMES: [(&str, &str, Maker); 57] = [
    (
        "device-model",
        "The emulated devices beside the papers: what was fitted, what was not",
        device_model::device_model,
    ),
    ("e2bird-table-1", "E²bird table 1: latency and throughput by batch size", e2bird::table_1),
    ("e2bird-2", "E²bird figure 2: latencies as the load rises, one batch at a time", e2bird::figure_2),
    ("e2bird-table-4", "E²bird table 4 and figure 12: the best mixes of lanes", e2bird::table_4),
    ("e2bird-13", "E²bird figure 13: latencies at a low and then at a high load", e2bird::figure_13),
    ("e2bird-14", "E²bird figure 14: throughput while 99% are answered in 200 ms", e2bird::figure_14),
    ("e2bird-equation-1", "E²bird equation 1: what copies beside computing can gain", e2bird_parts::equation_1),
    ("e2bird-7", "E²bird figure 7: copies and computing in fragments", e2bird_parts::figure_7),
    ("e2bird-11", "E²bird figure 11: the best mixes of lanes of all models", e2bird_parts::figure_11),
    ("e2bird-17", "E²bird figure 17: memory of weights and activations", e2bird_parts::figure_17),
    ("e2bird-host", "E²bird's peaks, if the host's work for an input is slower", e2bird_parts::host),
    ("e2bird-terms", "E²bird figure 14 with one term of the device changed at a time", terms::e2bird),
    ("dvabatch-6", "DVABatch figure 6: U-Net's operators by batch size", dvabatch_operators::figure_6),
    ("dvabatch-tuned", "DVABatch §7.1: stages, pairs of buffers and the rule of joining, by model", dvabatch::tuning),
    ("dvabatch-load", "DVABatch §7.1: stages and pairs as a server finds them at load", dvabatch_load::at_load),
    ("dvabatch-14", "DVABatch figures 14 and 16: mean and 99% latency at three loads", dvabatch::figure_14),
    ("dvabatch-15", "DVABatch figure 15: latencies under a stepping load, and peaks", dvabatch::figure_15),
    ("dvabatch-17", "DVABatch figure 17: peaks by workload of GLUE", dvabatch::figure_17),
    ("dvabatch-18", "DVABatch figure 18: split alone", dvabatch::figure_18),
    ("dvabatch-splits", "DVABatch §7.2: the models whose batches policy II splits", dvabatch_operators::splits),
    ("dvabatch-19", "DVABatch figure 19: pairs of buffers", dvabatch::figure_19),
    ("dvabatch-20", "DVABatch figure 20: stages", dvabatch::figure_20),
    ("dvabatch-21", "DVABatch figure 21: one client that waits for its answer", dvabatch::figure_21),
    ("dvabatch-9.2", "DVABatch §9.2: early exits", dvabatch::early_exits),
    (
        "dvabatch-terms",
        "DVABatch figure 14 at high load with one term of the device changed at a time",
        terms::dvabatch,
    ),
    ("gslice-1", "GSLICE figure 1: three models without MPS, under default MPS, and on shares", gslice::figure_1),
    ("gslice-2", "GSLICE figure 2: throughput by share, and knees", gslice::figure_2),
    ("gslice-3", "GSLICE figure 3: Alexnet by share and batch", gslice::figure_3),
    ("gslice-5a", "GSLICE figure 5a: streams", gslice::figure_5a),
    ("gslice-5b", "GSLICE figures 5b and 5c: AlexNet in one and in two streams", gslice_streams::figure_5b),
    (
        "gslice-6",
        "GSLICE figures 6 and 7: two models in streams of one process, and on shares",
        gslice_streams::figure_6,
    ),
    ("gslice-8", "GSLICE figures 8 and 9, table 2: models alone", gslice_modes::figure_8),
    ("gslice-10", "GSLICE figure 10, table 3: models together", gslice_modes::figure_10),
    ("gslice-11", "GSLICE figure 11, table 4: beside one batch at a time", gslice::figure_11),
    ("gslice-12", "GSLICE figure 12: what each part brings", gslice_control::figure_12),
    ("gslice-14", "GSLICE figures 12c and 14: SLAB beside Clipper by SLO", gslice_control::figure_14),
    ("gslice-15", "GSLICE figure 15: models come and go", gslice_control::figure_15),
    ("gslice-slo", "GSLICE: who answers in time, by mix, load and mode", gslice_modes::attainment),
    ("gslice-16", "GSLICE figure 16: shares that tune themselves", gslice_control::figure_16),
    ("abacus-3", "Abacus figure 3: ResNet152 beside other models under MPS", abacus_groups::figure_3),
    ("abacus-7", "Abacus figure 7: how far groups differ from run to run", abacus_groups::figure_7),
    ("abacus-10", "Abacus figure 10: how far predictors are off", abacus_predictors::figure_10),
    ("abacus-14", "Abacus figures 14 and 15: 99% latencies and violations of pairs", abacus::figure_14),
    ("abacus-16", "Abacus figure 16: 99% latencies of pairs with the smallest inputs", abacus::figure_16),
    ("abacus-17", "Abacus figure 17: peak throughput of pairs", abacus::figure_17),
    ("abacus-18", "Abacus figure 18: 99% latencies and violations of three and four models", abacus::figure_18),
    ("abacus-19", "Abacus figure 19: peak throughput of three and four models", abacus::figure_19),
    ("abacus-20", "Abacus figure 20: 99% latencies on instances of a device (MIG)", abacus_instances::figure_20),
    ("abacus-21", "Abacus figure 21: peak throughput on instances of a device (MIG)", abacus_instances::figure_21),
    ("abacus-22", "Abacus figure 22: beside Clockwork on 16 devices", abacus_instances::figure_22),
    ("abacus-23", "Abacus figure 23: passes of the predictor by ways of the search", abacus_groups::figure_23),
    ("abacus-sjf", "Abacus' violations beside SJF's, by the time of a decision of SJF", abacus::sjf),
    ("abacus-terms", "Abacus' violations with one term of the device changed at a time", abacus::terms),
    ("slots", "Symphony on slots of devices beside whole devices, GSLICE and gpu-lets", slots::mixes),
    ("slots-random", "The same on random mixes", slots::random),
    ("together", "Batches of Symphony side by side, planned with what they take beside another", slots::together),
    ("together-random", "The same on random mixes", slots::together_random),
];

/// Figures and tables of the papers that another figure shows too: the name, and the name of that
/// figure.
const SHOWN_BY: [(&str, &str); 12] = [
    ("e2bird-12", "e2bird-table-4"),
    ("dvabatch-16", "dvabatch-14"),
    ("gslice-5c", "gslice-5b"),
    ("gslice-7", "gslice-6"),
    ("gslice-9", "gslice-8"),
    ("gslice-12c", "gslice-14"),
    ("gslice-table-1", "device-model"),
    ("gslice-table-2", "gslice-8"),
    ("gslice-table-3", "gslice-10"),
    ("gslice-table-4", "gslice-11"),
    ("gslice-table-5", "device-model"),
    ("abacus-15", "abacus-14"),
];

impl Figure {
    /// Returns the names of all figures, with their titles.
    pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
        NAMES.into_iter().map(|(name, shows, _)| (name, shows))
    }

    /// Makes the figure of that name, or the one that shows the paper's figure of that name.
    ///
    /// # Errors
    /// If there is none, or a model of it holds no load.
    pub fn make(name: &str, options: &FigureOptions) -> Result<Figure, DeviceFailure> {
        let name = SHOWN_BY.into_iter().find(|(other, _)| *other == name).map_or(name, |(_, shown_by)| shown_by);
        let (_, title, make) = named("figure", NAMES, |(name, _, _)| name, name)?;
        Ok(Figure { title: title.to_owned(), ..make(options)? })
    }

    fn rows(&self) -> Table<&Vec<String>> {
        let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
        let heads = self.table.first().into_iter().flatten().enumerate();
        heads.fold(Table::of(self.table.iter().skip(1)), |table, (column, head)| match column {
            0 => table.text(head, |row| cell(row, 0)),
            _ => table.number(head, |row| cell(row, column)),
        })
    }

    /// Returns an HTML page without external parts.
    pub fn page(&self) -> String {
        Page::new(&self.title).note(&self.note).plots(&self.plots).table("Figures", &self.rows()).html()
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n{}\n", self.title, self.note)?;
        self.rows().fmt(f)
    }
}

/// Does `work` for each job on all threads. Returns the first failure if there is one.
fn each<J: Sync, R: Send>(
    jobs: &[J],
    options: &FigureOptions,
    work: impl Fn(&J) -> Result<R, DeviceFailure> + Sync,
) -> Result<Vec<R>, DeviceFailure> {
    parallel::map(jobs, options.threads, work, |_| ()).into_iter().collect()
}

/// Returns the highest rate that a policy holds.
fn found_peak(simulation: &DeviceSimulation, tuning: &Tuning, policy: DevicePolicyName) -> Result<Peak, DeviceFailure> {
    let model = simulation.model.architecture().map_or("measured", Architecture::name);
    let none = || DeviceFailure(format!("{model} with {policy} holds no rate at all within the target"));
    peak(simulation, &|| tuning.policy(policy))?.ok_or_else(none)
}

/// The servers that the baselines run on: the name, and the number of batches that the server makes
/// ahead. DVABatch ran Triton 21.10, which made batches ahead that no later request joined (its
/// issue 3624). In today's Triton (since its PR 3789) a batch grows until it begins.
const SERVERS: [(&str, u32); 2] = [("the paper's server", 1), ("today's Triton", 0)];

/// Finds the window with which a server that makes `ahead` batches ahead holds the highest rate,
/// and that rate.
fn tuned(simulation: &DeviceSimulation, tuning: &Tuning, ahead: u32) -> Result<(Tuning, f64), DeviceFailure> {
    let mut tuning = Tuning { ahead, ..tuning.clone() };
    let tuned = tune_window(simulation, &tuning)?;
    let Some(window) = tuned.chosen else {
        // No window holds any rate.
        let peak = found_peak(simulation, &tuning, DevicePolicyName::OptWait)?.rate;
        return Ok((tuning, peak));
    };
    tuning.window = window;
    let peak = tuned.tried.iter().find(|tried| tried.choice == window).map_or(0.0, |tried| tried.peak);
    Ok((tuning, peak))
}

/// Summarises ratios of several models as changes, by column: the mean, the median, and the mean
/// without the model farthest from the median. That model is named. A reader sees whether one model
/// makes the figure.
fn summary(models: &[&str], columns: &[Vec<f64>]) -> [(&'static str, Vec<String>); 3] {
    let without = |ratios: &Vec<f64>| {
        let middle = median(ratios);
        let distance = |index: &usize| (ratios[*index] - middle).abs();
        let far = (0..ratios.len()).max_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
        let others = ratios.iter().enumerate().filter(|(index, _)| *index != far).map(|(_, ratio)| *ratio);
        format!("{} ({})", change(mean(others), 1.0), models.get(far).unwrap_or(&""))
    };
    [
        ("mean", columns.iter().map(|ratios| change(mean(ratios.iter().copied()), 1.0)).collect()),
        ("median", columns.iter().map(|ratios| change(median(ratios), 1.0)).collect()),
        ("mean without", columns.iter().map(without).collect()),
    ]
}

/// Returns the middle value, or the mean of the two middle values; NaN for none.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        0 => mean(sorted.iter().skip(middle.saturating_sub(1)).take(2).copied()),
        _ => sorted[middle],
    }
}

fn row(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|cell| (*cell).to_owned()).collect()
}

/// Splits the heads of a table's columns at `|`.
fn head(names: &str) -> Vec<String> {
    names.split('|').map(|name| name.trim().to_owned()).collect()
}

/// Returns the change from `base` to `value`, in percent.
fn change(value: f64, base: f64) -> String {
    format!("{:+.1}%", (value / base - 1.0) * 100.0)
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    values.iter().sum::<f64>() / values.len() as f64
}
