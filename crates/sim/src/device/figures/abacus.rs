//! Abacus' figures: queries of several models on the emulated A100, with a predictor that cannot be better.

use downbeat_core::device::SegmentRange;
use downbeat_core::device::overlap::{GroupPart, Predictor};
use downbeat_core::{Duration, ModelId, RequestId};
use downbeat_report::bars as chart;

use super::{DeviceFailure, Figure, FigureOptions, change, each, head, mean};
use crate::device::{
    ABACUS_MODELS, Architecture, EmulatedModel, Oracle, OverlapInputs, OverlapReport, OverlapRun, OverlapServing,
    Platform,
};

const PLATFORM: Platform = Platform::A100_CUDNN;

const fn groups(at_once: usize, worth: f64) -> OverlapServing {
    OverlapServing::Abacus { at_once, worth, bias: 1.0 }
}

/// Who serves, and what the columns call it. One at a time by the same controller: what is left is what running side by side brings.
const SERVING: [(&str, OverlapServing); 7] = [
    ("FCFS", OverlapServing::Fcfs),
    ("SJF", OverlapServing::Sjf),
    ("EDF", OverlapServing::Edf),
    ("free", OverlapServing::Free),
    ("one", groups(1, 0.0)),
    ("Abacus", groups(4, 0.0)),
    ("worth", groups(4, 0.1)),
];
/// Where in it Abacus is as published.
const ABACUS: usize = 5;
const NOTE: &str = "FCFS, SJF and EDF drop what is late when its turn comes; free: one query of each model at once, as MPS has it; one: Abacus' controller with one query at a time; worth: Abacus, side by side only what saves 10%. \
                    The predictor of the last three is the emulated device itself.";

/// All pairs of Abacus' models, in the order of table 1.
fn pairs() -> Vec<Vec<Architecture>> {
    let after = |index: usize| ABACUS_MODELS[index + 1..].iter().map(move |other| vec![ABACUS_MODELS[index], *other]);
    (0..ABACUS_MODELS.len()).flat_map(after).collect()
}

fn name(models: &[Architecture]) -> String {
    models.iter().map(|model| model.name()).collect::<Vec<_>>().join(", ")
}

/// How often queries come.
#[derive(Clone, Copy)]
enum Load {
    /// Queries a second.
    Rate(f64),
    /// Times what the device does of one at a time.
    Times(f64),
}

/// What a query takes alone, on average.
fn mean_alone(models: &[Architecture], platform: Platform) -> Result<f64, DeviceFailure> {
    let mut takes = Vec::new();
    for model in models {
        let model = EmulatedModel::abacus(*model, platform)?;
        let all = SegmentRange::new(0, model.segment_count());
        for rows in [4, 8, 16, 32] {
            let alone = |length| model.work(all, rows, length, platform.units).alone(&model.limits()).as_secs_f64();
            takes.extend([8, 16, 32, 64].map(alone));
        }
    }
    Ok(mean(takes.into_iter()))
}

/// Runs of all of these under all that serve: by models, then as [`SERVING`].
fn runs(
    platform: Platform,
    all: &[Vec<Architecture>],
    options: &FigureOptions,
    load: Load,
) -> Result<Vec<Vec<OverlapReport>>, DeviceFailure> {
    let mut jobs = Vec::new();
    for models in all {
        let rate = match load {
            Load::Rate(rate) => rate,
            Load::Times(times) => times / mean_alone(models, platform)?,
        };
        jobs.extend(SERVING.map(|(_, serving)| OverlapRun {
            platform,
            models: models.clone(),
            serving,
            rate,
            queries: options.requests as u32,
            inputs: OverlapInputs::Any,
            seed: options.seed,
        }));
    }
    let reports = each(&jobs, options, OverlapRun::play)?;
    Ok(reports.chunks(SERVING.len()).map(<[_]>::to_vec).collect())
}

type Value = fn(&OverlapReport) -> f64;

/// The mean over all models of each that serves.
fn means(runs: &[Vec<OverlapReport>], value: Value) -> Vec<f64> {
    (0..SERVING.len()).map(|index| mean(runs.iter().map(|reports| value(&reports[index])))).collect()
}

fn cells(first: &str, values: &[f64], digits: usize) -> Vec<String> {
    [first.to_owned()].into_iter().chain(values.iter().map(|value| format!("{value:.digits$}"))).collect()
}

/// Rows of all models, their means, and what Abacus' mean is to those of the others.
fn rows(all: &[Vec<Architecture>], runs: &[Vec<OverlapReport>], value: Value, digits: usize) -> Vec<Vec<String>> {
    let row = |(models, reports): (&Vec<Architecture>, &Vec<OverlapReport>)| {
        cells(&name(models), &reports.iter().map(value).collect::<Vec<_>>(), digits)
    };
    let mut rows: Vec<_> = all.iter().zip(runs).map(row).collect();
    let means = means(runs, value);
    rows.push(cells("mean", &means, digits));
    rows.push(
        [vec!["Abacus to it".to_owned()], means.iter().map(|mean| change(means[ABACUS], *mean)).collect()].concat(),
    );
    rows
}

fn plot(title: &str, unit: &str, all: &[Vec<Architecture>], runs: &[Vec<OverlapReport>], value: Value) -> String {
    let names = SERVING.map(|(name, _)| name.to_owned());
    let bars = all.iter().zip(runs).map(|(models, reports)| (name(models), reports.iter().map(value).collect()));
    chart(title, "By models and who serves.", "", unit, &names, &bars.collect::<Vec<_>>())
}

fn heads(first: &str) -> Vec<String> {
    [first].into_iter().chain(SERVING.map(|(name, _)| name)).map(str::to_owned).collect()
}

fn violations(report: &OverlapReport) -> f64 {
    report.violations() * 100.0
}

fn answered(report: &OverlapReport) -> f64 {
    f64::from(report.in_time + report.late) / report.span.as_secs_f64()
}

/// 99% latencies and violations of some models at 50 queries a second.
fn quality(all: &[Vec<Architecture>], options: &FigureOptions, paper: &str) -> Result<Figure, DeviceFailure> {
    let runs = runs(PLATFORM, all, options, Load::Rate(50.0))?;
    let mut table = vec![heads("99% latency over target")];
    table.extend(rows(all, &runs, OverlapReport::tail, 2));
    table.push(heads("violations, %"));
    table.extend(rows(all, &runs, violations, 1));
    let plots = vec![plot("Violations", "% of queries", all, &runs, violations)];
    Ok(Figure {
        note: format!("50 queries/s of all models together. {NOTE} {paper}"),
        table,
        plots,
        ..Figure::default()
    })
}

/// Queries in time a second, at the paper's 100 queries a second and beyond what the device holds.
fn throughput(all: &[Vec<Architecture>], options: &FigureOptions, paper: &str) -> Result<Figure, DeviceFailure> {
    let (hundred, beyond) =
        (runs(PLATFORM, all, options, Load::Rate(100.0))?, runs(PLATFORM, all, options, Load::Times(1.5))?);
    let mut table = vec![heads("in time/s, of 100/s")];
    table.extend(rows(all, &hundred, OverlapReport::throughput, 1));
    table.push(heads("in time/s, of 1.5 times what fits"));
    table.extend(rows(all, &beyond, OverlapReport::throughput, 1));
    table.push(heads("answered/s, of 1.5 times what fits"));
    let all_answered = rows(all, &beyond, answered, 1);
    table.extend(all_answered.into_iter().skip(all.len()));
    let plots = vec![plot("Answered in time", "queries/s", all, &beyond, OverlapReport::throughput)];
    Ok(Figure { note: format!("{NOTE} {paper}"), table, plots, ..Figure::default() })
}

pub(super) fn figure_14(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    quality(
        &pairs(),
        options,
        "The paper: Abacus to FCFS, SJF and EDF -23.1%, -34.1% and -23.8% in 99% latency, -38.8%, -71.0% and -44.0% in violations.",
    )
}

pub(super) fn figure_17(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    throughput(
        &pairs(),
        options,
        "The paper, at 100 queries/s, which saturate its device: Abacus to FCFS, SJF and EDF +25.7%, +38.1% and +25.7%; largest for (ResNet50, ResNet152), slightly below for (VGG16, VGG19).",
    )
}

/// §7.4: of ResNet101, ResNet152, VGG19 and BERT all triples and all four.
fn several() -> Vec<Vec<Architecture>> {
    let all = [Architecture::ResNet101, Architecture::ResNet152, Architecture::Vgg19, Architecture::BertBase];
    let without = |left_out: usize| {
        all.iter().enumerate().filter(|(index, _)| *index != left_out).map(|(_, model)| *model).collect::<Vec<_>>()
    };
    [3, 2, 1, 0, 4].map(without).to_vec()
}

pub(super) fn figure_18(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    quality(
        &several(),
        options,
        "The paper: triples -21.3%, -35.3%, -20.8% in 99% latency and -87.7%, -93.4%, -85.3% in violations; four -16.1%, -34.3%, -21.1% and as many violations less.",
    )
}

pub(super) fn figure_19(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    throughput(&several(), options, "The paper: triples +51.0%, +72.3%, +57.0%; four +38.4%, +53.9%, +63.4%.")
}

/// What pairs take one after the other, over what they take side by side, on average; and of VGG16 with VGG19.
fn saved(platform: Platform, rows: u32) -> Result<(f64, f64), DeviceFailure> {
    let mut ratios = Vec::new();
    for models in pairs() {
        let models: Vec<EmulatedModel> =
            models.iter().map(|model| EmulatedModel::abacus(*model, platform)).collect::<Result<_, _>>()?;
        let part = |(model, emulated): (u32, &EmulatedModel)| {
            let operators = SegmentRange::new(0, emulated.segment_count());
            GroupPart { request: RequestId(0), model: ModelId(model), operators, rows, length: 64 }
        };
        let parts: Vec<GroupPart> = (0..).zip(&models).map(part).collect();
        let takes = Oracle::new(models, 1.0).predict(&[&parts[..1], &parts[1..], &parts]);
        let takes: Vec<f64> = takes.into_iter().flatten().map(|takes| takes.as_secs_f64()).collect();
        ratios.push((takes[0] + takes[1]) / takes[2]);
    }
    let vgg = pairs().iter().position(|pair| *pair == [Architecture::Vgg16, Architecture::Vgg19]);
    Ok((mean(ratios.iter().copied()), vgg.map_or(f64::NAN, |index| ratios[index])))
}

pub(super) fn terms(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let slow = Duration::from_micros(20);
    let changed = [
        ("as it is", PLATFORM),
        ("each process issues for itself", Platform { own_hosts: true, ..PLATFORM }),
        ("20 us to issue a kernel", Platform { issue: slow, ..PLATFORM }),
        ("both", Platform { issue: slow, own_hosts: true, ..PLATFORM }),
        ("both, no interference", Platform { issue: slow, own_hosts: true, interference_permille: 0, ..PLATFORM }),
        ("no interference", Platform { interference_permille: 0, ..PLATFORM }),
        ("no whole waves", Platform { whole_waves: false, ..PLATFORM }),
    ];
    let mut table = vec![[head("term | saved at 4 | at 32 | VGG at 4"), heads("load")].concat()];
    for (term, platform) in changed {
        let ((four, vgg), (most, _)) = (saved(platform, 4)?, saved(platform, 32)?);
        for (load, of) in [("100/s", Load::Rate(100.0)), ("1.5 times", Load::Times(1.5))] {
            let runs = runs(platform, &pairs(), options, of)?;
            let percent = |ratio: f64| change(ratio, 1.0);
            let found = cells(load, &means(&runs, violations), 1);
            table.push([vec![term.to_owned(), percent(four), percent(most), percent(vgg)], found].concat());
        }
    }
    let note = format!(
        "Violations in % of queries, means of the 21 pairs, with one term of the device changed at a time. saved: what two queries take one after the other, over what they take side by side, less 1, at 4 and 32 items. {NOTE}"
    );
    Ok(Figure { note, table, ..Figure::default() })
}
