//! DVABatch's figures.

use downbeat_core::Duration;
use downbeat_report::{Axis, Line, Scale, bars as chart, lines};

use super::{DeviceFailure, Figure, FigureOptions, change, each, found_peak, head, mean, row};
use crate::arrivals::Arrivals;
use crate::device::{
    Architecture, DeviceLoad, DevicePolicyName, DeviceReport, DeviceSimulation, Diversity, EmulatedModel, Glue, Peak,
    Platform, TRIED_STAGES, Tuning, tune_window,
};
use crate::pace::Pace;

/// §8.1.
const QOS: Duration = Duration::from_millis(200);
/// §8.1.
const MAX_BATCH: u32 = 64;
/// Table 1.
const MODELS: [Architecture; 6] = [
    Architecture::UNet,
    Architecture::LinkNet,
    Architecture::BertBase,
    Architecture::BertLarge,
    Architecture::Vgg19,
    Architecture::ResNet152,
];
/// §8.1: low, medium and high load, as shares of DelayBatch's peak.
const LOADS: [(&str, f64); 3] = [("low", 0.25), ("medium", 0.6), ("high", 0.9)];
const ZERO: DevicePolicyName = DevicePolicyName::NoWait;
const DELAY: DevicePolicyName = DevicePolicyName::OptWait;
const DVA: DevicePolicyName = DevicePolicyName::DvaBatch;

/// §8.7: 2 stages for BERT, 4 for the others.
fn stages(architecture: Architecture) -> usize {
    if architecture.has_length() { 2 } else { 4 }
}

/// A model with what it is tuned with, and its runs.
struct Bench {
    simulation: DeviceSimulation,
    tuning: Tuning,
}

impl Bench {
    fn new(
        architecture: Architecture,
        stages: usize,
        glue: Glue,
        options: &FigureOptions,
    ) -> Result<Self, DeviceFailure> {
        let model = EmulatedModel::staged(architecture, Platform::TITAN_TENSORRT, stages)?;
        let tuning = Tuning::new(&model, MAX_BATCH)?;
        let load = DeviceLoad::steady(1.0, options.requests, architecture.has_length().then_some(glue));
        Ok(Bench { simulation: DeviceSimulation::new(model, load, QOS, options.seed), tuning })
    }

    /// With DelayBatch's window searched, and DelayBatch's peak.
    fn tuned(architecture: Architecture, glue: Glue, options: &FigureOptions) -> Result<(Self, f64), DeviceFailure> {
        let mut bench = Bench::new(architecture, stages(architecture), glue, options)?;
        let (window, tried) = tune_window(&bench.simulation, &bench.tuning)?;
        bench.tuning.window = window;
        // Where nothing is held with any window, the one that was not tried is left.
        let peak = match tried.iter().find(|(tried, peak, _)| *tried == window && *peak > 0.0) {
            Some((_, peak, _)) => *peak,
            None => bench.peak(DELAY)?.rate,
        };
        Ok((bench, peak))
    }

    fn peak(&self, policy: DevicePolicyName) -> Result<Peak, DeviceFailure> {
        found_peak(&self.simulation, &self.tuning, policy)
    }

    fn at(&self, rate: f64, policy: DevicePolicyName) -> Result<DeviceReport, DeviceFailure> {
        let mut simulation = self.simulation.clone();
        simulation.load.rate = rate;
        Ok(simulation.run(self.tuning.policy(policy)?)?)
    }
}

/// What is taken from a run.
type Of = fn(&DeviceReport) -> f64;

fn ms(value: f64) -> String {
    if value < 9.95 { format!("{value:.2}") } else { format!("{value:.1}") }
}

pub(super) fn figure_14(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let runs = each(&MODELS, options, |architecture| {
        let (bench, peak) = Bench::tuned(*architecture, Glue::Rte, options)?;
        let mut reports = Vec::new();
        for (_, share) in LOADS {
            reports.push([bench.at(peak * share, ZERO)?, bench.at(peak * share, DELAY)?, bench.at(peak * share, DVA)?]);
        }
        Ok((peak, bench.tuning.window, reports))
    })?;
    let mut table = vec![head(
        "model | load | rate/s | window ms | zero mean | delay mean | dva mean | to zero | to delay | zero p99 | delay p99 | dva p99 | to zero | to delay | stretches | splits",
    )];
    let mut plots = Vec::new();
    for (load, (name, share)) in LOADS.into_iter().enumerate() {
        let mut bars = Vec::new();
        for (architecture, (peak, window, reports)) in MODELS.iter().zip(&runs) {
            let [zero, delay, dva] = &reports[load];
            let mut cells = vec![architecture.to_string(), name.to_owned(), format!("{:.0}", peak * share)];
            cells.push(ms(window.as_millis_f64()));
            let both: [Of; 2] = [|report| report.mean_ms, |report| report.p99_ms];
            for of in both {
                cells.extend([zero, delay, dva].map(|report| ms(of(report))));
                cells.extend([zero, delay].map(|base| change(of(dva), of(base))));
            }
            cells.extend([dva.stretches.to_string(), dva.splits.to_string()]);
            table.push(cells);
            bars.push((architecture.to_string(), vec![zero.mean_ms, delay.mean_ms, dva.mean_ms]));
        }
        let over = |of: Of, base: usize| {
            change(mean(runs.iter().map(|(_, _, reports)| of(&reports[load][2]) / of(&reports[load][base]))), 1.0)
        };
        let average: Of = |report| report.mean_ms;
        let tail: Of = |report| report.p99_ms;
        let mut cells = row(&["mean", name, "", "", "", "", ""]);
        cells.extend([over(average, 0), over(average, 1), String::new(), String::new(), String::new()]);
        cells.extend([over(tail, 0), over(tail, 1)]);
        table.push(cells);
        let names = ["ZeroBatch", "DelayBatch", "DVABatch"].map(str::to_owned);
        plots.push(chart(&format!("Mean latency at {name} load"), "By model and policy.", "", "ms", &names, &bars));
    }
    let note = "1/4, 3/5 and 9/10 of DelayBatch's peak; milliseconds. The paper's means: -16.1%, -39.0%, -57.7% to ZeroBatch and -35.4%, -47.3%, -48.5% to DelayBatch; \
                99%: -16.9%, -27.4%, -53.7% and -45.2%, -45.1%, -29.2%.";
    Ok(Figure { note: note.to_owned(), table, plots, ..Figure::default() })
}

pub(super) fn figure_15(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (steps, each_step) = (16u32, 2_000u32);
    let runs = each(&MODELS, options, |architecture| {
        let (bench, peak) = Bench::tuned(*architecture, Glue::Rte, options)?;
        let pace = Pace::rising(66.0, 4_000.0, f64::from(each_step), steps).unwrap_or_default();
        let requests = (options.requests * 5).min(u64::from(steps * each_step));
        let lengths = bench.simulation.load.lengths;
        let load = DeviceLoad { pace, ..DeviceLoad::steady(1.0, requests, lengths) };
        let stepping = DeviceSimulation { load, warm_up: 0, ..bench.simulation.clone() };
        let mut held = Vec::new();
        let mut reports = Vec::new();
        for policy in [DELAY, DVA] {
            let report = stepping.run(bench.tuning.policy(policy)?)?;
            let target = QOS.as_millis_f64();
            held.push(report.latencies_ms.iter().position(|latency| *latency > target).unwrap_or(requests as usize));
            reports.push(report.latencies_ms);
        }
        Ok((peak, bench.peak(DVA)?.rate, held, reports))
    })?;
    let mut table =
        vec![head("model | delaybatch peak/s | dvabatch peak/s | change | stepping: first late request | of dvabatch")];
    let mut plots = Vec::new();
    for (architecture, (delay, dva, held, latencies)) in MODELS.iter().zip(&runs) {
        let mut cells =
            vec![architecture.to_string(), format!("{delay:.0}"), format!("{dva:.0}"), change(*dva, *delay)];
        cells.extend(held.iter().map(ToString::to_string));
        table.push(cells);
        let points = |latencies: &Vec<f64>| {
            let points = latencies.iter().enumerate().take_while(|(_, ms)| **ms < 1_000.0);
            points.step_by(10).map(|(id, ms)| (id as f64, *ms)).collect()
        };
        let line = |name, latencies| Line { name, points: points(latencies), stepped: false };
        let drawn = [line("DelayBatch", &latencies[0]), line("DVABatch", &latencies[1])];
        let (x, y) =
            (Axis { label: "request", scale: Scale::Linear }, Axis { label: "latency (ms)", scale: Scale::Linear });
        plots.push(lines(architecture.name(), "Latency of every tenth request until a second.", &x, &y, &drawn));
    }
    let note = "Peaks: the highest steady rate at which 99% are answered within 200 ms. Stepping: 66/s to 4,000/s, 2,000 requests a step. \
                The paper's peaks: BertBase +46.81%, BertLarge 1.37 times more (2.12 times at most); the others equal.";
    Ok(Figure { note: note.to_owned(), table, plots, ..Figure::default() })
}

pub(super) fn figure_17(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let cases: Vec<_> =
        [Architecture::BertBase, Architecture::BertLarge].into_iter().flat_map(|a| Glue::ALL.map(|g| (a, g))).collect();
    let peaks = each(&cases, options, |(architecture, glue)| {
        let (bench, rate) = Bench::tuned(*architecture, *glue, options)?;
        Ok([Peak { rate, report: bench.at(rate, DELAY)? }, bench.peak(DVA)?])
    })?;
    let mut table =
        vec![head("model | workload | delaybatch/s | dvabatch/s | change | padding of delaybatch | of dvabatch")];
    let mut bars = Vec::new();
    for ((architecture, glue), peaks) in cases.iter().zip(&peaks) {
        let [delay, dva] = [peaks[0].rate, peaks[1].rate];
        let mut cells = vec![architecture.to_string(), glue.to_string(), format!("{delay:.0}"), format!("{dva:.0}")];
        cells.push(change(dva, delay));
        cells.extend(peaks.iter().map(|peak| format!("{:.0}%", peak.report.padding * 100.0)));
        table.push(cells);
        bars.push((glue.to_string(), vec![delay, dva]));
    }
    let names = ["DelayBatch", "DVABatch"].map(str::to_owned);
    let plots = bars.chunks(Glue::ALL.len()).zip(["bertbase", "bertlarge"]);
    let plots =
        plots.map(|(bars, name)| chart(&format!("Peak, {name}"), "By workload.", "", "requests/s", &names, bars));
    let note = "Peaks within 200 ms. The paper: +46.8% for BertBase and 1.37 times more for BertLarge on average over the workloads.";
    Ok(Figure { note: note.to_owned(), table, plots: plots.collect(), ..Figure::default() })
}

pub(super) fn figure_18(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let models = [Architecture::LinkNet, Architecture::UNet];
    let runs = each(&models, options, |architecture| {
        let (bench, peak) = Bench::tuned(*architecture, Glue::Rte, options)?;
        // One pair of buffers: without stretch and without a pipeline, split alone.
        let diversity = Diversity { by_load: false, pairs: 1, ..bench.tuning.diversity };
        let alone =
            Bench { tuning: Tuning { diversity, ..bench.tuning.clone() }, simulation: bench.simulation.clone() };
        let at = |rate| Ok([bench.at(rate, DELAY)?, alone.at(rate, DVA)?, bench.at(rate, DVA)?]);
        LOADS.map(|(_, share)| at(peak * share)).into_iter().collect::<Result<Vec<_>, DeviceFailure>>()
    })?;
    let mut table =
        vec![head("model | load | delaybatch ms | split only ms | dvabatch ms | split only | splits | batch")];
    let cases = models.iter().flat_map(|architecture| LOADS.map(|(load, _)| (architecture, load)));
    for ((architecture, load), [delay, split, dva]) in cases.zip(runs.iter().flatten()) {
        let mut cells = vec![architecture.to_string(), load.to_owned()];
        cells.extend([delay, split, dva].map(|report| ms(report.mean_ms)));
        cells.extend([
            change(split.mean_ms, delay.mean_ms),
            split.splits.to_string(),
            format!("{:.1}", split.mean_batch),
        ]);
        table.push(cells);
    }
    let note = "Split alone: one pair of buffers, nobody joins. The paper: -15.0% at high load.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

pub(super) fn figure_19(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let pairs = [1u16, 2, 3, 4];
    let means = each(&MODELS, options, |architecture| {
        let mut bench = Bench::new(*architecture, stages(*architecture), Glue::Rte, options)?;
        let rate = bench.peak(ZERO)?.rate * 0.9;
        let mut means = Vec::new();
        for pairs in pairs {
            bench.tuning.diversity.pairs = pairs;
            means.push(bench.at(rate, DVA)?.mean_ms);
        }
        Ok(means)
    })?;
    let mut table = vec![head("model | 1 pair ms | 2 | 3 | 4")];
    for (architecture, means) in MODELS.iter().zip(&means) {
        table.push([vec![architecture.to_string()], means.iter().map(|mean| ms(*mean)).collect()].concat());
    }
    let note = "Mean latency at 9/10 of ZeroBatch's peak. The paper: always lowest with two pairs; more cost synchronisation, which is free here.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

pub(super) fn figure_20(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let models = [Architecture::BertBase, Architecture::LinkNet, Architecture::ResNet152];
    // ZeroBatch runs all stages at once: their number is nothing to it.
    let models = each(&models, options, |architecture| {
        let bench = Bench::new(*architecture, stages(*architecture), Glue::Rte, options)?;
        Ok((*architecture, bench.peak(ZERO)?.rate))
    })?;
    let cases: Vec<_> = models.iter().flat_map(|model| TRIED_STAGES.map(|stages| (model, stages))).collect();
    let found = each(&cases, options, |((architecture, zero), stages)| {
        let bench = Bench::new(*architecture, *stages, Glue::Rte, options)?;
        let peak = bench.peak(DVA)?.rate;
        Ok((peak, bench.at(zero * 0.9, DVA)?))
    })?;
    let mut table = vec![head("model | stages | peak/s | mean ms | launches a batch")];
    for (((architecture, _), stages), (peak, report)) in cases.iter().zip(&found) {
        let cells = [stages.to_string(), format!("{peak:.0}"), ms(report.mean_ms)];
        let launches = format!("{:.1}", report.launches as f64 / report.batches.max(1) as f64);
        table.push([vec![architecture.to_string()], cells.to_vec(), vec![launches]].concat());
    }
    let note = "Peak within 200 ms, and mean latency at 9/10 of ZeroBatch's. The paper: best with 2 stages for BertBase, 4 for LinkNet and ResNet152; 20 are bad for all.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

pub(super) fn figure_21(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let found = each(&MODELS, options, |architecture| {
        let mut bench = Bench::new(*architecture, stages(*architecture), Glue::Rte, options)?;
        bench.tuning.diversity.window = Duration::ZERO;
        bench.simulation.load.requests = 200;
        bench.simulation.warm_up = 0;
        bench.simulation.load.arrivals = Arrivals::Constant;
        // So seldom that the device is idle when the next comes, as for a client that waits for its answer.
        Ok([bench.at(2.0, ZERO)?.mean_ms, bench.at(2.0, DVA)?.mean_ms])
    })?;
    let mut table = vec![head("model | zerobatch ms | dvabatch ms | more ms")];
    for (architecture, [zero, dva]) in MODELS.iter().zip(&found) {
        table.push(vec![architecture.to_string(), ms(*zero), ms(*dva), format!("{:+.3}", dva - zero)]);
    }
    let more = mean(found.iter().map(|[zero, dva]| dva - zero));
    table.push(vec!["mean".to_owned(), String::new(), String::new(), format!("{more:+.3}")]);
    let note = "One request at a time. The paper: 0.29 ms more on average. Here a stage more costs a launch, and decisions are free.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

pub(super) fn early_exits(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let chances = [0.0, 0.25, 0.5, 0.75];
    let bench = || Bench::new(Architecture::ResNet152, 4, Glue::Rte, options);
    let rate = bench()?.peak(ZERO)?.rate * 0.9;
    let found = each(&chances, options, |chance| {
        let mut bench = bench()?;
        bench.simulation.exits = vec![(0, *chance), (1, *chance)];
        Ok((bench.at(rate, DVA)?, bench.peak(DVA)?.rate))
    })?;
    let mut table = vec![head("leaves after each of two stages | mean ms | exits | peak/s")];
    for (chance, (report, peak)) in chances.iter().zip(&found) {
        let chance = format!("{:.0}%", chance * 100.0);
        table.push(vec![chance, ms(report.mean_ms), report.exits.to_string(), format!("{peak:.0}")]);
    }
    let note = "ResNet152 in four stages; a request's answer may be final after the first and the second. Rate: 9/10 of ZeroBatch's peak, which runs every stage.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}
