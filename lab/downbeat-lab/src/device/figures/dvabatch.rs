//! DVABatch's figures.

use downbeat_core::Duration;
use downbeat_core::device::{Joining, Staging, TRIED_STAGES, Tuned};
use downbeat_report::{Axis, Line, Scale, bars as chart, lines};

use super::{DeviceFailure, Figure, FigureOptions, SERVERS, change, each, found_peak, head, mean, row, summary, tuned};
use crate::device::{
    Architecture, DeviceLoad, DevicePolicyName, DeviceReport, DeviceSimulation, Diversity, EmulatedModel, Glue, Peak,
    Platform, Tuning, tune_staging, with_staging,
};
use downbeat_sim::Arrivals;
use downbeat_sim::Pace;

/// The QoS target (§8.1).
pub(super) const QOS: Duration = Duration::from_millis(200);
/// The largest batch (§8.1).
pub(super) const MAX_BATCH: u32 = 64;
/// DVABatch's models (table 1).
pub(super) const MODELS: [Architecture; 6] = [
    Architecture::UNet,
    Architecture::LinkNet,
    Architecture::BertBase,
    Architecture::BertLarge,
    Architecture::Vgg19,
    Architecture::ResNet152,
];
/// Low, medium and high load, as shares of DelayBatch's peak (§8.1).
const LOADS: [(&str, f64); 3] = [("low", 0.25), ("medium", 0.6), ("high", 0.9)];
pub(super) const ZERO: DevicePolicyName = DevicePolicyName::NoWait;
const DELAY: DevicePolicyName = DevicePolicyName::OptWait;
pub(super) const DVA: DevicePolicyName = DevicePolicyName::DvaBatch;

/// Added to a figure's seed for the seed of the tuning, so that no figure shows the requests that
/// its settings were tuned on.
const TUNING_SEED: u64 = 1_000_003;

/// Returns the paper's settings: 2 stages for BERT, 4 for the others (§8.7), and two pairs of
/// buffers (§8.6).
pub(super) fn of_the_paper(architecture: Architecture) -> Staging {
    Staging { stages: if architecture.has_length() { 2 } else { 4 }, pairs: 2, joining: Joining::IfSooner }
}

/// Tunes DVABatch for a model as the paper tunes N_st (§7.1).
pub(super) fn tuned_staging(
    platform: Platform,
    architecture: Architecture,
    options: &FigureOptions,
) -> Result<Tuned<Staging>, DeviceFailure> {
    let options = FigureOptions { seed: options.seed.wrapping_add(TUNING_SEED), ..*options };
    let Bench { simulation, tuning } =
        Bench::on(platform, architecture, of_the_paper(architecture), Glue::Rte, &options)?;
    tune_staging(&simulation, &tuning)
}

/// Tunes DVABatch for each of these models.
fn stagings(models: &[Architecture], options: &FigureOptions) -> Result<Vec<Staging>, DeviceFailure> {
    each(models, options, |architecture| {
        let tuned = tuned_staging(Platform::TITAN_TENSORRT, *architecture, options)?;
        Ok(tuned.chosen.unwrap_or(of_the_paper(*architecture)))
    })
}

/// A model with its tuning and its simulation.
pub(super) struct Bench {
    simulation: DeviceSimulation,
    tuning: Tuning,
}

impl Bench {
    /// Makes a bench with the paper's settings.
    fn new(architecture: Architecture, options: &FigureOptions) -> Result<Self, DeviceFailure> {
        Bench::on(Platform::TITAN_TENSORRT, architecture, of_the_paper(architecture), Glue::Rte, options)
    }

    pub(super) fn on(
        platform: Platform,
        architecture: Architecture,
        staging: Staging,
        glue: Glue,
        options: &FigureOptions,
    ) -> Result<Self, DeviceFailure> {
        let model = EmulatedModel::new(architecture, platform);
        let tuning = Tuning::new(&model, MAX_BATCH)?;
        let load = DeviceLoad::steady(1.0, options.requests, architecture.has_length().then_some(glue));
        let simulation = DeviceSimulation::new(model, load, QOS, options.seed);
        let (simulation, tuning) = with_staging(staging, &simulation, &tuning)?;
        Ok(Bench { simulation, tuning })
    }

    /// Makes a bench for a server that makes `ahead` batches ahead, with DelayBatch's best window.
    /// Also returns DelayBatch's peak.
    pub(super) fn tuned(
        architecture: Architecture,
        staging: Staging,
        glue: Glue,
        ahead: u32,
        options: &FigureOptions,
    ) -> Result<(Self, f64), DeviceFailure> {
        let bench = Bench::on(Platform::TITAN_TENSORRT, architecture, staging, glue, options)?;
        let (tuning, peak) = tuned(&bench.simulation, &bench.tuning, ahead)?;
        Ok((Bench { tuning, ..bench }, peak))
    }

    pub(super) fn peak(&self, policy: DevicePolicyName) -> Result<Peak, DeviceFailure> {
        found_peak(&self.simulation, &self.tuning, policy)
    }

    pub(super) fn at(&self, rate: f64, policy: DevicePolicyName) -> Result<DeviceReport, DeviceFailure> {
        let mut simulation = self.simulation.clone();
        simulation.load.rate = rate;
        Ok(simulation.run(self.tuning.policy(policy)?)?)
    }
}

/// A number of a report.
type Of = fn(&DeviceReport) -> f64;

fn ms(value: f64) -> String {
    if value < 9.95 { format!("{value:.2}") } else { format!("{value:.1}") }
}

/// Pairs each server with each of these models and its settings.
fn on_servers(models: &[Architecture], stagings: &[Staging]) -> Vec<(u32, Architecture, Staging)> {
    let of = |ahead| models.iter().zip(stagings).map(move |(model, staging)| (ahead, *model, *staging));
    SERVERS.into_iter().flat_map(|(_, ahead)| of(ahead)).collect()
}

/// A load's reports with ZeroBatch, DelayBatch and DVABatch.
type Reports = [DeviceReport; 3];

pub(super) fn figure_14(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let stagings = stagings(&MODELS, options)?;
    let runs = each(&on_servers(&MODELS, &stagings), options, |(ahead, architecture, staging)| {
        let (bench, peak) = Bench::tuned(*architecture, *staging, Glue::Rte, *ahead, options)?;
        let at = |(_, share): (&str, f64)| -> Result<Reports, DeviceFailure> {
            let [zero, delay, dva] = [ZERO, DELAY, DVA].map(|policy| bench.at(peak * share, policy));
            Ok([zero?, delay?, dva?])
        };
        let reports = LOADS.into_iter().map(at).collect::<Result<Vec<_>, DeviceFailure>>()?;
        Ok((peak, bench.tuning.window, reports))
    })?;
    let mut table = vec![head(
        "server | model | load | rate/s | window ms | zero mean | delay mean | dva mean | to zero | to delay | zero p99 | delay p99 | dva p99 | to zero | to delay | stretches | splits | tuned",
    )];
    let names = MODELS.map(Architecture::name);
    let both: [Of; 2] = [|report| report.mean_ms, |report| report.p99_ms];
    let mut plots = Vec::new();
    for ((server, _), runs) in SERVERS.into_iter().zip(runs.chunks(MODELS.len())) {
        for (load, (name, share)) in LOADS.into_iter().enumerate() {
            let mut bars = Vec::new();
            for ((architecture, staging), (peak, window, reports)) in MODELS.iter().zip(&stagings).zip(runs) {
                let [zero, delay, dva] = &reports[load];
                let mut cells = vec![server.to_owned(), architecture.to_string(), name.to_owned()];
                cells.extend([format!("{:.0}", peak * share), ms(window.as_millis_f64())]);
                for of in both {
                    cells.extend([zero, delay, dva].map(|report| ms(of(report))));
                    cells.extend([zero, delay].map(|base| change(of(dva), of(base))));
                }
                cells.extend([dva.stretches.to_string(), dva.splits.to_string(), staging.to_string()]);
                table.push(cells);
                bars.push((architecture.to_string(), vec![zero.mean_ms, delay.mean_ms, dva.mean_ms]));
            }
            let over = |of: Of, base: usize| {
                runs.iter().map(|(.., reports)| of(&reports[load][2]) / of(&reports[load][base])).collect()
            };
            let columns = [over(both[0], 0), over(both[0], 1), over(both[1], 0), over(both[1], 1)];
            for (label, changes) in summary(&names, &columns) {
                let (mean, tail) = changes.split_at(2);
                let first = row(&[server, label, name, "", "", "", "", ""]);
                table.push([first, mean.to_vec(), row(&["", "", ""]), tail.to_vec()].concat());
            }
            let policies = ["ZeroBatch", "DelayBatch", "DVABatch"].map(str::to_owned);
            let title = format!("Mean latency at {name} load, {server}");
            plots.push(chart(&title, "By model and policy.", "", "ms", &policies, &bars));
        }
    }
    let note = "1/4, 3/5 and 9/10 of DelayBatch's peak on the server; milliseconds. The paper's means: -16.1%, -39.0%, -57.7% to ZeroBatch and -35.4%, -47.3%, -48.5% to DelayBatch; \
                99%: -16.9%, -27.4%, -53.7% and -45.2%, -45.1%, -29.2%.";
    Ok(Figure { note: note.to_owned(), table, plots, ..Figure::default() })
}

/// The peaks of the policies for a model, and the runs under a rising load: DelayBatch on each
/// server, then DVABatch.
struct Stepping {
    peaks: [f64; 3],
    /// The number of the first late request.
    late: Vec<usize>,
    latencies: Vec<Vec<f64>>,
}

fn stepping(architecture: Architecture, staging: Staging, options: &FigureOptions) -> Result<Stepping, DeviceFailure> {
    let (steps, each_step) = (16u32, 2_000u32);
    let [(paper, first), (today, second)] = [
        Bench::tuned(architecture, staging, Glue::Rte, SERVERS[0].1, options)?,
        Bench::tuned(architecture, staging, Glue::Rte, SERVERS[1].1, options)?,
    ];
    let pace = Pace::rising(66.0, 4_000.0, f64::from(each_step), steps).unwrap_or_default();
    let requests = (options.requests * 5).min(u64::from(steps * each_step));
    let load = DeviceLoad { pace, ..DeviceLoad::steady(1.0, requests, today.simulation.load.lengths) };
    let simulation = DeviceSimulation { load, warm_up: 0, ..today.simulation.clone() };
    let (mut late, mut latencies) = (Vec::new(), Vec::new());
    for (bench, policy) in [(&paper, DELAY), (&today, DELAY), (&today, DVA)] {
        let report = simulation.run(bench.tuning.policy(policy)?)?;
        let target = QOS.as_millis_f64();
        late.push(report.latencies_ms.iter().position(|latency| *latency > target).unwrap_or(requests as usize));
        latencies.push(report.latencies_ms);
    }
    Ok(Stepping { peaks: [first, second, today.peak(DVA)?.rate], late, latencies })
}

pub(super) fn figure_15(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let tuned: Vec<_> = MODELS.into_iter().zip(stagings(&MODELS, options)?).collect();
    let runs = each(&tuned, options, |(architecture, staging)| stepping(*architecture, *staging, options))?;
    let mut table = vec![head(
        "model | the paper's server/s | today's/s | dvabatch/s | to the paper's | to today's | stepping: first late, the paper's | today's | dvabatch",
    )];
    let mut plots = Vec::new();
    for (architecture, Stepping { peaks, late, latencies }) in MODELS.iter().zip(&runs) {
        let mut cells = vec![architecture.to_string()];
        cells.extend(peaks.map(|peak| format!("{peak:.0}")));
        cells.extend([0, 1].map(|server| change(peaks[2], peaks[server])));
        cells.extend(late.iter().map(ToString::to_string));
        table.push(cells);
        let points = |latencies: &Vec<f64>| {
            let points = latencies.iter().enumerate().take_while(|(_, ms)| **ms < 1_000.0);
            points.step_by(10).map(|(id, ms)| (id as f64, *ms)).collect()
        };
        let names = ["DelayBatch, the paper's server", "DelayBatch, today's", "DVABatch"];
        let line = |(name, latencies)| Line { name, points: points(latencies), stepped: false };
        let drawn: Vec<Line<'_>> = names.into_iter().zip(latencies).map(line).collect();
        let (x, y) =
            (Axis { label: "request", scale: Scale::Linear }, Axis { label: "latency (ms)", scale: Scale::Linear });
        plots.push(lines(architecture.name(), "Latency of every tenth request until a second.", &x, &y, &drawn));
    }
    let ratios = [0, 1].map(|server| runs.iter().map(|run| run.peaks[2] / run.peaks[server]).collect());
    for (label, changes) in summary(&MODELS.map(Architecture::name), &ratios) {
        table.push([row(&[label, "", "", ""]), changes].concat());
    }
    let note = "Peaks: the highest steady rate at which 99% are answered within 200 ms, DelayBatch with the window that holds most. Stepping: 66/s to 4,000/s, 2,000 requests a step. \
                The paper's peaks: BertBase +46.81%, BertLarge 1.37 times more (2.12 times at most); the others equal.";
    Ok(Figure { note: note.to_owned(), table, plots, ..Figure::default() })
}

pub(super) fn figure_17(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let models = [Architecture::BertBase, Architecture::BertLarge];
    let stagings = stagings(&models, options)?;
    let cases: Vec<_> = models.into_iter().zip(stagings).flat_map(|of| Glue::ALL.map(|glue| (of, glue))).collect();
    let runs = each(&cases, options, |((architecture, staging), glue)| {
        let on = |ahead: u32| -> Result<(Bench, Peak), DeviceFailure> {
            let (bench, rate) = Bench::tuned(*architecture, *staging, *glue, ahead, options)?;
            let report = bench.at(rate, DELAY)?;
            Ok((bench, Peak { rate, report }))
        };
        let [(_, paper), (bench, today)] = [on(SERVERS[0].1)?, on(SERVERS[1].1)?];
        Ok([paper, today, bench.peak(DVA)?])
    })?;
    let mut table = vec![head(
        "model | workload | the paper's server/s | today's/s | dvabatch/s | to the paper's | to today's | padding of the paper's | today's | dvabatch",
    )];
    let mut plots = Vec::new();
    for ((cases, runs), model) in cases.chunks(Glue::ALL.len()).zip(runs.chunks(Glue::ALL.len())).zip(models) {
        let mut bars = Vec::new();
        for ((_, glue), peaks) in cases.iter().zip(runs) {
            let rates: Vec<f64> = peaks.iter().map(|peak| peak.rate).collect();
            let mut cells = vec![model.to_string(), glue.to_string()];
            cells.extend(rates.iter().map(|rate| format!("{rate:.0}")));
            cells.extend([0, 1].map(|server| change(rates[2], rates[server])));
            cells.extend(peaks.iter().map(|peak| format!("{:.0}%", peak.report.padding * 100.0)));
            table.push(cells);
            bars.push((glue.to_string(), rates));
        }
        let ratios = [0, 1].map(|server| runs.iter().map(|peaks| peaks[2].rate / peaks[server].rate).collect());
        for (label, changes) in summary(&Glue::ALL.map(Glue::name), &ratios) {
            table.push([vec![model.to_string()], row(&[label, "", "", ""]), changes].concat());
        }
        let names = ["DelayBatch, the paper's server", "DelayBatch, today's", "DVABatch"].map(str::to_owned);
        plots.push(chart(&format!("Peak, {model}"), "By workload.", "", "requests/s", &names, &bars));
    }
    let note = "Peaks within 200 ms. The paper: +46.8% for BertBase and 1.37 times more for BertLarge on average over the workloads.";
    Ok(Figure { note: note.to_owned(), table, plots, ..Figure::default() })
}

pub(super) fn figure_18(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let models = [Architecture::LinkNet, Architecture::UNet];
    let models = on_servers(&models, &stagings(&models, options)?);
    let runs = each(&models, options, |(ahead, architecture, staging)| {
        let (bench, peak) = Bench::tuned(*architecture, *staging, Glue::Rte, *ahead, options)?;
        // One pair of buffers rules out stretching and a pipeline, so only splits are left.
        let diversity = Diversity { by_load: false, pairs: 1, ..bench.tuning.diversity };
        let alone =
            Bench { tuning: Tuning { diversity, ..bench.tuning.clone() }, simulation: bench.simulation.clone() };
        let at = |rate| Ok([bench.at(rate, DELAY)?, alone.at(rate, DVA)?, bench.at(rate, DVA)?]);
        LOADS.map(|(_, share)| at(peak * share)).into_iter().collect::<Result<Vec<_>, DeviceFailure>>()
    })?;
    let mut table = vec![head(
        "server | model | load | delaybatch ms | split only ms | dvabatch ms | split only | dvabatch | splits | batch",
    )];
    let server = |ahead: &u32| SERVERS.iter().find(|(_, other)| other == ahead).map_or("", |(name, _)| *name);
    let cases =
        models.iter().flat_map(|(ahead, architecture, _)| LOADS.map(|(load, _)| (server(ahead), architecture, load)));
    for ((server, architecture, load), [delay, split, dva]) in cases.zip(runs.iter().flatten()) {
        let mut cells = vec![server.to_owned(), architecture.to_string(), load.to_owned()];
        cells.extend([delay, split, dva].map(|report| ms(report.mean_ms)));
        cells.extend([split, dva].map(|report| change(report.mean_ms, delay.mean_ms)));
        cells.extend([split.splits.to_string(), format!("{:.1}", split.mean_batch)]);
        table.push(cells);
    }
    let note = "Split alone: one pair of buffers, nobody joins. The paper: -15.0% at high load.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

pub(super) fn figure_19(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let pairs = [1u16, 2, 3, 4];
    let means = each(&MODELS, options, |architecture| {
        let mut bench = Bench::new(*architecture, options)?;
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
    // ZeroBatch runs all stages at once, so their number does not matter for its peak.
    let models = each(&models, options, |architecture| {
        let bench = Bench::new(*architecture, options)?;
        Ok((*architecture, bench.peak(ZERO)?.rate))
    })?;
    let cases: Vec<_> = models.iter().flat_map(|model| TRIED_STAGES.map(|stages| (model, stages))).collect();
    let found = each(&cases, options, |((architecture, zero), stages)| {
        let staging = Staging { stages: *stages, ..of_the_paper(*architecture) };
        let bench = Bench::on(Platform::TITAN_TENSORRT, *architecture, staging, Glue::Rte, options)?;
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
        let mut bench = Bench::new(*architecture, options)?;
        bench.tuning.diversity.window = Duration::ZERO;
        bench.simulation.load.requests = 200;
        bench.simulation.warm_up = 0;
        bench.simulation.load.arrivals = Arrivals::Constant;
        // At this rate the device is idle when the next request comes, as for a client that waits
        // for its answer.
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

/// All trials of the tuning, for each model.
pub(super) fn tuning(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let found = each(&MODELS, options, |architecture| tuned_staging(Platform::TITAN_TENSORRT, *architecture, options))?;
    let mut table = vec![head("model | settings | peak/s | mean ms | chosen")];
    for (architecture, tuned) in MODELS.iter().zip(&found) {
        for tried in &tuned.tried {
            let mark = if tuned.chosen == Some(tried.choice) { "chosen" } else { "" };
            let mean_ms = tried.mean_ms.map_or(String::new(), ms);
            let (choice, peak) = (tried.choice.to_string(), format!("{:.0}", tried.peak));
            let cells = [architecture.to_string(), choice, peak, mean_ms, mark.to_owned()];
            table.push(cells.to_vec());
        }
    }
    let note = "The highest peak within 200 ms; of peaks within 1% the lowest mean latency at 9/10 of the best peak. RTE lengths, another seed than the figures'.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

pub(super) fn early_exits(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let chances = [0.0, 0.25, 0.5, 0.75];
    let bench = || Bench::new(Architecture::ResNet152, options);
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
