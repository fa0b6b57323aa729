//! GSLICE's figures of models alone and of several that share a device.

use downbeat_core::device::spatial::{KNEE_TOLERANCE, knee, knee_up_to};
use downbeat_core::{Duration, Time};
use downbeat_report::{Axis, Line, Scale, bars as chart, lines};

use super::{DeviceFailure, Figure, FigureOptions, change, each, head};
use crate::device::{
    Architecture, BatchedBy, Client, EmulatedModel, Platform, SharedBy, SharingModel, SpatialRun, closed_loop,
};

pub(super) const PLATFORM: Platform = Platform::V100_TENSORRT;
/// The SLO (§4.1).
pub(super) const SLO: Duration = Duration::from_millis(25);
/// The grain of shares: MPS gives out units one by one.
pub(super) const GRAIN: u32 = 1;

pub(super) fn emulated(architecture: Architecture) -> EmulatedModel {
    EmulatedModel::new(architecture, PLATFORM)
}

/// The length of a run: a hundredth of a second for each request that the options ask for.
pub(super) fn span(options: &FigureOptions) -> Duration {
    Duration::from_millis(options.requests.clamp(100, 6_000) * 10)
}

/// Returns the throughput in items a second for each share of the units, in steps of 5%.
pub(super) fn curve(architecture: Architecture, batch: u32) -> Vec<(u32, f64)> {
    let model = emulated(architecture);
    let throughput = |percent: u32| {
        let units = (PLATFORM.units * percent / 100).max(1);
        (units, f64::from(batch) / model.time_on(batch, 0, units).as_secs_f64())
    };
    (1..=20).map(|step| throughput(step * 5)).collect()
}

/// Returns the knee of a model in compute units.
pub(super) fn knee_of(architecture: Architecture, batch: u32) -> u32 {
    knee(&curve(architecture, batch), KNEE_TOLERANCE).unwrap_or(PLATFORM.units)
}

/// The batch sizes whose knees are known.
const BATCHES: [u32; 6] = [1, 2, 4, 8, 16, 32];

/// Returns the knee that a model's share begins with, by the server's rule. The largest batch is
/// the largest of [`BATCHES`] that takes at most the SLO on the whole device.
pub(super) fn first_knee(architecture: Architecture) -> Option<u32> {
    let fits = |batch: &&u32| emulated(architecture).time(**batch, 0) <= SLO;
    let largest = BATCHES.iter().rfind(fits).copied().unwrap_or(1);
    knee_up_to(&BATCHES.map(|batch| (batch, knee_of(architecture, batch))), largest)
}

fn percent(units: u32) -> f64 {
    f64::from(units) * 100.0 / f64::from(PLATFORM.units)
}

pub(super) fn figure_1(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let third = span(options).as_nanos() / 3;
    let at = |thirds: u64| Time::from_nanos(third * thirds);
    let models: Vec<SharingModel> = [Architecture::ResNet50, Architecture::ResNet50, Architecture::Vgg19]
        .into_iter()
        .zip(0..)
        .map(|(architecture, phase)| {
            let model = SharingModel::new(architecture, SLO, BatchedBy::Fixed(1));
            SharingModel { from: at(phase), ..model }
        })
        .collect();
    let modes = [
        ("no MPS", SharedBy::Turns),
        ("default MPS", SharedBy::All),
        ("25/25/50%", SharedBy::Shares(vec![20, 20, 40])),
    ];
    let runs = each(&modes, options, |(_, shared)| {
        let (shared, models) = (shared.clone(), models.clone());
        SpatialRun { platform: PLATFORM, shared, models, span: span(options), seed: options.seed }.play()
    })?;
    let mut table = vec![head("mode | models | R1 /s | R1 ms | R2 /s | R2 ms | V /s | V ms | all /s")];
    let mut bars = Vec::new();
    for ((mode, _), reports) in modes.iter().zip(&runs) {
        for phase in 0..3 {
            let found = reports.iter().map(|report| report.within(at(phase), at(phase + 1)));
            let found: Vec<(f64, f64)> = found.take(phase as usize + 1).collect();
            let mut cells = vec![(*mode).to_owned(), (phase + 1).to_string()];
            for index in 0..3 {
                let [rate, ms] = found
                    .get(index)
                    .map_or_else(Default::default, |(rate, ms)| [format!("{rate:.0}"), format!("{ms:.1}")]);
                cells.extend([rate, ms]);
            }
            cells.push(format!("{:.0}", found.iter().map(|(rate, _)| rate).sum::<f64>()));
            table.push(cells);
            if phase == 2 {
                bars.push(((*mode).to_owned(), found.iter().map(|(rate, _)| *rate).collect()));
            }
        }
    }
    let names = ["ResNet-50", "ResNet-50", "VGG-19"].map(str::to_owned);
    let plot = chart("Throughput of all three", "By mode.", "", "images/s", &names, &bars);
    let note = "Two ResNet-50 and a VGG-19, one image at a time, one more model in each third of the run. The paper: with all three, default MPS triples the latency of ResNet-50 (10 to 30 ms), no MPS \
                triples that of VGG-19 (20 to 60 ms), and shares of 25/25/50% have about 50% more throughput than either.";
    Ok(Figure { note: note.to_owned(), table, plots: vec![plot], ..Figure::default() })
}

/// Makes the figure of throughput by share for these models and batches, with the paper's knees.
fn shares(cases: &[(Architecture, u32, &str)], note: &str) -> Figure {
    let mut table = vec![head("model | batch | 10% | 20% | 30% | 40% | 60% | 80% | 100% | knee | paper")];
    let mut drawn: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for (architecture, batch, paper) in cases {
        let curve = curve(*architecture, *batch);
        let at = |percent: usize| format!("{:.0}", curve[percent / 5 - 1].1);
        let knee = format!("{:.0}%", percent(knee_of(*architecture, *batch)));
        let ends = [knee, (*paper).to_owned()];
        let cells = [10, 20, 30, 40, 60, 80, 100].map(at);
        table.push([vec![architecture.to_string(), batch.to_string()], cells.to_vec(), ends.to_vec()].concat());
        let points = curve.iter().map(|(units, throughput)| (percent(*units), *throughput)).collect();
        drawn.push((format!("{architecture}, {batch}"), points));
    }
    let drawn: Vec<Line<'_>> =
        drawn.iter().map(|(name, points)| Line { name, points: points.clone(), stepped: false }).collect();
    let axis = |label| Axis { label, scale: Scale::Linear };
    let plot = lines("Throughput by share", "Images a second.", &axis("share (%)"), &axis("images/s"), &drawn);
    Figure { note: note.to_owned(), table, plots: vec![plot], ..Figure::default() }
}

pub(super) fn figure_2(_: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let cases = [
        (Architecture::ResNet50, 1, "60%"),
        (Architecture::Vgg19, 1, "70%"),
        (Architecture::Vgg16, 1, ""),
        (Architecture::MobileNet, 1, ""),
        (Architecture::AlexNet, 1, "30%"),
    ];
    Ok(shares(
        &cases,
        "Images a second alone on a share of the V100; the knee is the smallest share of steps of 5% with 95% of the most. Jasper and GNMT are not emulated.",
    ))
}

pub(super) fn figure_3(_: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let cases = [
        (Architecture::AlexNet, 1, "30%"),
        (Architecture::AlexNet, 4, "larger"),
        (Architecture::AlexNet, 8, "larger"),
        (Architecture::AlexNet, 16, "larger"),
        (Architecture::AlexNet, 32, "larger"),
    ];
    Ok(shares(
        &cases,
        "Images a second of Alexnet alone on a share of the V100, by batch. The paper: \"with larger batch sizes, the knee shifts towards larger GPU%\".",
    ))
}

/// Plays `count` streams of a network alone on the device. Returns items a second and the mean
/// latency.
fn streams(architecture: Architecture, batch: u32, count: usize, span: Duration) -> (f64, f64) {
    let client = Client::new(&emulated(architecture), batch, 0, PLATFORM.units);
    let (served, _) = closed_loop(PLATFORM.limits(), &[PLATFORM.units], &vec![client; count], span);
    let throughput = served.iter().map(|served| served.throughput).sum();
    (throughput, served.iter().map(|served| served.mean_ms()).sum::<f64>() / count as f64)
}

pub(super) fn figure_5a(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let mut table = vec![head("batch | streams | images/s | ms | to one stream")];
    for batch in [1, 8] {
        let mut first = 0.0;
        for count in [1, 2, 4, 8] {
            let (throughput, ms) = streams(Architecture::ResNet50, batch, count, span(options));
            if count == 1 {
                first = throughput;
            }
            let cells = [batch.to_string(), count.to_string(), format!("{throughput:.0}"), format!("{ms:.1}")];
            table.push([cells.to_vec(), vec![change(throughput, first)]].concat());
        }
    }
    let note =
        "ResNet-50 with several streams. The paper: hardly any gain beyond two streams, and latency goes on growing.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}

pub(super) fn figure_11(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    // Table 4: throughput and latency improvement, percent.
    let published = [(1, 73.85, -7.52), (4, 31.43, 23.96), (8, 50.83, 34.12), (16, 92.34, 45.64)];
    let model = emulated(Architecture::ResNet50);
    let mut table =
        vec![head("batch | one at a time /s | ms | two streams /s | ms | throughput | paper's | latency | paper's")];
    for (batch, throughput, latency) in published {
        // One batch after another, each with the cost of the serving system and of the copy of its
        // inputs.
        let bytes = model.item_bytes(0).0 * u64::from(batch);
        let copy = Duration::from_secs_f64(bytes as f64 / PLATFORM.copy_bandwidth);
        let one = (model.time(batch, 0) + copy + PLATFORM.batch_overhead).as_millis_f64();
        let rate = f64::from(batch) * 1e3 / one;
        let (two, ms) = streams(Architecture::ResNet50, batch, 2, span(options));
        let cells = [format!("{rate:.0}"), format!("{one:.1}"), format!("{two:.0}"), format!("{ms:.1}")];
        let changes = [change(two, rate), format!("{throughput:+}%"), change(one, ms), format!("{latency:+}%")];
        table.push([vec![batch.to_string()], cells.to_vec(), changes.to_vec()].concat());
    }
    let note = "ResNet-50 with batches of one size, always busy: one batch after another with its copy and 0.2 ms of the serving system, for Triton 19.02, and two streams that copy beside computing, for GSLICE. \
                'latency': how much longer one at a time takes.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}
