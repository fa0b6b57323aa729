//! Abacus' figures 20 and 21, models on instances of a device, and figure 22, on 16 devices.

use downbeat_core::Duration;

use super::abacus::{FOUR, PLATFORM, Value, columns, groups, mean_alone, trained, violations};
use super::{DeviceFailure, Figure, FigureOptions, each, head};
use crate::device::{
    Architecture, OverlapCluster, OverlapInputs, OverlapReport, OverlapRun, OverlapServing, Platform, PredictedBy,
    SpreadBy,
};
use downbeat_sim::Popularity;

/// An assignment of models to instances.
struct Isolation {
    name: String,
    platform: Platform,
    instances: Vec<Vec<Architecture>>,
}

/// Returns three kinds of isolation: each of the four models by itself, the three divisions into
/// pairs, and all together (§7.5, table 3).
fn isolations() -> Vec<Isolation> {
    let [first, rest @ ..] = FOUR;
    let alone = FOUR.map(|model| vec![model]).to_vec();
    let mut all =
        vec![Isolation { name: "fully".to_owned(), platform: Platform::a100_instance(1, 1), instances: alone }];
    for with in rest {
        let others = rest.into_iter().filter(|model| *model != with).collect::<Vec<_>>();
        let name = format!("({first}, {with}) + ({}, {})", others[0], others[1]);
        let instances = vec![vec![first, with], others];
        all.push(Isolation { name, platform: Platform::a100_instance(2, 2), instances });
    }
    let instances = vec![FOUR.to_vec()];
    all.push(Isolation { name: "none".to_owned(), platform: Platform::a100_instance(4, 4), instances });
    all
}

/// Plays all isolations under each way of serving, at `rate` queries a second of all four models.
fn on_instances(rate: f64, options: &FigureOptions) -> Result<(Figure, String), DeviceFailure> {
    let (isolations, mut by, mut said) = (isolations(), Vec::new(), Vec::new());
    for (at_once, size) in [(1, 1), (2, 2), (4, 4)] {
        let (predictor, note) = trained(Platform::a100_instance(size, size), (&FOUR, at_once), options)?;
        by.push((at_once, predictor));
        said.push(note);
    }
    let mut jobs = Vec::new();
    for isolation in &isolations {
        let at_once = isolation.instances[0].len();
        let predictor = by.iter().find(|(count, _)| *count == at_once).map(|(_, by)| by);
        for (_, serving) in columns(predictor).into_iter().filter(|(name, _)| *name != "free") {
            let run = |(instance, models): (u64, &Vec<Architecture>)| OverlapRun {
                platform: isolation.platform,
                models: models.clone(),
                serving: serving.clone(),
                rate: rate * models.len() as f64 / FOUR.len() as f64,
                queries: options.requests as u32 * models.len() as u32 / FOUR.len() as u32,
                inputs: OverlapInputs::Any,
                target_on: Platform::a100_instance(4, 4),
                seed: options.seed.wrapping_add(instance),
            };
            jobs.push((0..).zip(&isolation.instances).map(run).collect::<Vec<OverlapRun>>());
        }
    }
    let joined = |runs: &Vec<OverlapRun>| -> Result<OverlapReport, DeviceFailure> {
        let reports: Vec<OverlapReport> = runs.iter().map(OverlapRun::play).collect::<Result<_, _>>()?;
        Ok(OverlapReport::joined(reports))
    };
    let reports = each(&jobs, options, joined)?;
    let names: Vec<&str> = columns(by.first().map(|(_, by)| by))
        .into_iter()
        .map(|(name, _)| name)
        .filter(|name| *name != "free")
        .collect();
    let mut table = vec![head(&format!("isolation | | {}", names.join(" | ")))];
    for (isolation, reports) in isolations.iter().zip(reports.chunks(names.len())) {
        let values: [(&str, Value, usize); 3] = [
            ("99% over target", OverlapReport::tail, 2),
            ("violations, %", violations, 1),
            ("in time/s", OverlapReport::throughput, 1),
        ];
        for (what, value, digits) in values {
            let cells = reports.iter().map(|report| format!("{:.digits$}", value(report)));
            table.push([isolation.name.clone(), what.to_owned()].into_iter().chain(cells).collect());
        }
    }
    let note = format!(
        "{rate} queries/s of all four models together. fully: each on an instance of 14 units and an eighth of the memory; pairs: two instances of 28 units and a quarter; none: one of 56 units and half. Targets are twice what the largest queries take alone on the last. \
         The perceptrons, by instance: {}",
        said.join(" ")
    );
    Ok((Figure { table, ..Figure::default() }, note))
}

pub(super) fn figure_20(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (figure, note) = on_instances(50.0, options)?;
    let paper =
        "The paper: fully isolated far beyond the target; pairs and all four together alike, Abacus within the target.";
    Ok(Figure { note: format!("{note} {paper}"), ..figure })
}

pub(super) fn figure_21(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (figure, note) = on_instances(100.0, options)?;
    let paper = "The paper: pairs and all four together alike, and better than fully isolated.";
    Ok(Figure { note: format!("{note} {paper}"), ..figure })
}

/// The number of devices and the QoS target (§7.6).
const DEVICES: usize = 16;
const TARGET: Duration = Duration::from_millis(100);

pub(super) fn figure_22(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (by, said) = trained(PLATFORM, (&FOUR, 4), options)?;
    let oracle = PredictedBy::Oracle { bias: 1.0 };
    let who = [
        ("Clockwork", SpreadBy::Clockwork, OverlapServing::Fcfs),
        ("FCFS", SpreadBy::Turn, OverlapServing::Fcfs),
        ("one", SpreadBy::Turn, groups(1, 0.0, &oracle)),
        ("oracle", SpreadBy::Turn, groups(4, 0.0, &oracle)),
        ("trained", SpreadBy::Turn, groups(4, 0.0, &by)),
        ("worth, trained", SpreadBy::Turn, groups(4, 0.1, &by)),
    ];
    let (mut jobs, mut heads) = (Vec::new(), Vec::new());
    for (shares, popularity) in [("equal", Popularity::Equal), ("as functions", Popularity::Maf)] {
        let alone: Vec<f64> = FOUR.iter().map(|model| mean_alone(&[*model], PLATFORM)).collect::<Result<_, _>>()?;
        let alone: f64 = alone.iter().zip(popularity.shares(FOUR.len())).map(|(alone, share)| alone * share).sum();
        for load in [0.9, 1.2] {
            for (name, by, serving) in &who {
                let run = OverlapRun {
                    platform: PLATFORM,
                    models: FOUR.to_vec(),
                    serving: serving.clone(),
                    rate: load * DEVICES as f64 / alone,
                    queries: options.requests as u32 * 16,
                    inputs: OverlapInputs::Any,
                    target_on: PLATFORM,
                    seed: options.seed,
                };
                heads.push([shares.to_owned(), format!("{load}"), (*name).to_owned(), format!("{:.0}", run.rate)]);
                jobs.push(OverlapCluster { run, devices: DEVICES, target: TARGET, popularity, by: *by });
            }
        }
    }
    let reports = each(&jobs, options, OverlapCluster::play)?;
    let mut table =
        vec![head("shares of models | load | who | offered/s | in time/s | violations, % | mean ms | 99% ms")];
    for (cells, report) in heads.into_iter().zip(&reports) {
        let latency = report.latencies.iter().sum::<f64>() / report.latencies.len() as f64;
        let [latency, tail] = [latency, report.tail()].map(|share| format!("{:.1}", share * TARGET.as_millis_f64()));
        let [in_time, late] = [report.throughput(), violations(report)].map(|value| format!("{value:.1}"));
        table.push(cells.into_iter().chain([in_time, late, latency, tail]).collect());
    }
    let note = format!(
        "{DEVICES} emulated A100s, a target of {} ms for all, {} queries a run as Azure's functions are called: two hours, each minute as short as so few queries make it, each model's rate by itself. load: of what the devices do of one query at a time. \
         Clockwork: one queue for all devices, one query at a time on each, those that cannot make it dropped; all others: each model's queries to the devices in turn. {said} The paper: Abacus +17.8% to Clockwork, its 99% latency below the target, its mean slightly above Clockwork's; on V100s.",
        TARGET.as_millis_f64(),
        options.requests * 16
    );
    Ok(Figure { note, table, ..Figure::default() })
}
