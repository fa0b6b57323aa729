//! GSLICE's figures of models alone and of several that share a device.

use downbeat_core::device::spatial::{KNEE_TOLERANCE, SpatialOptions, knee};
use downbeat_core::{Duration, Time};
use downbeat_report::{Axis, Line, Scale, bars as chart, lines};

use super::{DeviceFailure, Figure, FigureOptions, change, each, head};
use crate::device::{
    Architecture, BatchedBy, Client, EmulatedModel, Platform, SharedBy, SharingModel, SharingReport, SpatialRun,
    closed_loop,
};

pub(super) const PLATFORM: Platform = Platform::V100_TENSORRT;
/// §4.1.
const SLO: Duration = Duration::from_millis(25);
/// The grain of shares: MPS gives out units one by one.
const GRAIN: u32 = 1;

pub(super) fn emulated(architecture: Architecture) -> EmulatedModel {
    EmulatedModel::new(architecture, PLATFORM)
}

/// How long runs are: a hundredth of a second for each request that the options ask for.
pub(super) fn span(options: &FigureOptions) -> Duration {
    Duration::from_millis(options.requests.clamp(100, 6_000) * 10)
}

/// Throughput in items a second over what each tenth of a unit's share more brings.
pub(super) fn curve(architecture: Architecture, batch: u32) -> Vec<(u32, f64)> {
    let model = emulated(architecture);
    let throughput = |percent: u32| {
        let units = (PLATFORM.units * percent / 100).max(1);
        (units, f64::from(batch) / model.time_on(batch, 0, units).as_secs_f64())
    };
    (1..=20).map(|step| throughput(step * 5)).collect()
}

/// The knee of a model, compute units.
pub(super) fn knee_of(architecture: Architecture, batch: u32) -> u32 {
    knee(&curve(architecture, batch), KNEE_TOLERANCE).unwrap_or(PLATFORM.units)
}

fn percent(units: u32) -> f64 {
    f64::from(units) * 100.0 / f64::from(PLATFORM.units)
}

/// Throughput over latency (§2.1.4), in items a second and a millisecond.
fn efficacy((throughput, latency_ms): (f64, f64)) -> f64 {
    throughput / latency_ms
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

/// Throughput by share: of these models and batches, with what the paper has as knee.
fn shares(cases: &[(Architecture, u32, &str)], note: &str) -> Figure {
    let mut table = vec![head("model | batch | 10% | 20% | 30% | 40% | 60% | 80% | 100% | knee | paper")];
    let mut drawn = Vec::new();
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
    let line = |(name, points): &(String, Vec<(f64, f64)>)| (name.clone(), points.clone());
    let owned: Vec<_> = drawn.iter().map(line).collect();
    let drawn: Vec<Line<'_>> =
        owned.iter().map(|(name, points)| Line { name, points: points.clone(), stepped: false }).collect();
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

/// So many streams of a network alone on the device: items a second and latency.
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

/// Default MPS, MPS with SLAB, and GSLICE.
const MODES: [&str; 3] = ["default MPS", "MPS+SLAB", "GSLICE"];

/// Runs of models together under each of [`MODES`]: for each mode and model items a second and milliseconds, without the time in which they settle.
fn compared(models: &[Architecture], options: &FigureOptions) -> Result<Vec<Vec<(f64, f64)>>, DeviceFailure> {
    let end = Time::ZERO + span(options);
    let begin = Time::from_nanos(end.as_nanos() / 6);
    let spatial = SharedBy::Gslice(SpatialOptions::new(PLATFORM.units, GRAIN));
    let modes = [(SharedBy::All, BatchedBy::Fixed(1)), (SharedBy::All, BatchedBy::Slab), (spatial, BatchedBy::Slab)];
    let run = |(shared, batch): &(SharedBy, BatchedBy)| {
        let model = |architecture: &Architecture| SharingModel {
            knee: Some(knee_of(*architecture, 1)),
            prepares: Duration::from_millis(500),
            ..SharingModel::new(*architecture, SLO, *batch)
        };
        let models = models.iter().map(model).collect();
        let run =
            SpatialRun { platform: PLATFORM, shared: shared.clone(), models, span: span(options), seed: options.seed };
        Ok(run.play()?.iter().map(|report: &SharingReport| report.within(begin, end)).collect())
    };
    modes.iter().map(run).collect()
}

/// All models together: items a second, and the mean latency of the models.
fn together(found: &[(f64, f64)]) -> (f64, f64) {
    let latencies = found.iter().map(|(_, ms)| ms);
    (found.iter().map(|(rate, _)| rate).sum(), latencies.sum::<f64>() / found.len() as f64)
}

pub(super) fn figure_8(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    // Table 2: GUE of default MPS, MPS+SLAB, GSLICE.
    let cases = [
        (Architecture::AlexNet, [235.75, 382.4, 579.41]),
        (Architecture::MobileNet, [330.0, 341.2, 379.55]),
        (Architecture::ResNet50, [29.08, 42.4, 47.93]),
        (Architecture::Vgg19, [4.96, 5.11, 5.25]),
        (Architecture::Vgg16, [3.79, 11.13, 12.49]),
    ];
    let runs = each(&cases, options, |(architecture, _)| compared(&[*architecture], options))?;
    let mut table = vec![head("model | mode | images/s | ms | to default MPS | GUE | paper's GUE")];
    let mut bars = Vec::new();
    for ((architecture, published), found) in cases.iter().zip(&runs) {
        let rates: Vec<f64> = found.iter().map(|found| found[0].0).collect();
        for (mode, (found, paper)) in MODES.iter().zip(found.iter().zip(published)) {
            let (rate, ms) = found[0];
            let cells = [format!("{rate:.0}"), format!("{ms:.1}"), format!("{:.2}", rate / rates[0])];
            let names = vec![architecture.to_string(), (*mode).to_owned()];
            table.push(
                [names, cells.to_vec(), vec![format!("{:.1}", efficacy((rate, ms))), paper.to_string()]].concat(),
            );
        }
        bars.push((architecture.to_string(), rates));
    }
    let plot = chart("Throughput alone", "By model and mode.", "", "images/s", &MODES.map(str::to_owned), &bars);
    let note = "Each model alone on the V100, SLO 25 ms, always busy; figures 8 and 9 with table 2. The paper: GSLICE has about 10 times the throughput of default MPS for Alexnet, 9 times for Mobilenet, 2 times for \
                VGG-19. GUE is images/s a millisecond. GNMT is not emulated.";
    Ok(Figure { note: note.to_owned(), table, plots: vec![plot], ..Figure::default() })
}

pub(super) fn figure_10(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    use Architecture::{AlexNet, MobileNet, ResNet50, Vgg19};
    // Table 3: GUE of default MPS, MPS+SLAB, GSLICE.
    let cases: [(&str, &[Architecture], [f64; 3]); 4] = [
        ("C1", &[AlexNet, ResNet50], [38.82, 72.69, 94.04]),
        ("C2", &[AlexNet, Vgg19], [6.39, 15.76, 44.79]),
        ("C3", &[AlexNet, ResNet50, Vgg19], [3.38, 7.83, 24.59]),
        ("C4", &[AlexNet, ResNet50, Vgg19, MobileNet], [2.01, 7.29, 19.98]),
    ];
    let runs = each(&cases, options, |(_, models, _)| compared(models, options))?;
    let mut table = vec![head(
        "models | mode | alexnet /s (ms) | resnet50 | vgg19 | mobilenet | all /s | to default MPS | GUE | GUE to default | paper's",
    )];
    let mut bars = Vec::new();
    for ((name, models, published), runs) in cases.iter().zip(&runs) {
        let base = together(&runs[0]);
        for (index, (mode, found)) in MODES.iter().zip(runs).enumerate() {
            let cell = |architecture: Architecture| {
                let place = models.iter().position(|other| *other == architecture);
                place.map_or_else(String::new, |place| format!("{:.0} ({:.1})", found[place].0, found[place].1))
            };
            let all = together(found);
            let own = [AlexNet, ResNet50, Vgg19, MobileNet].map(cell);
            let cells = [
                format!("{:.0}", all.0),
                format!("{:.2}", all.0 / base.0),
                format!("{:.1}", efficacy(all)),
                format!("{:.2}", efficacy(all) / efficacy(base)),
                format!("{:.2}", published[index] / published[0]),
            ];
            table.push([vec![(*name).to_owned(), (*mode).to_owned()], own.to_vec(), cells.to_vec()].concat());
        }
        bars.push(((*name).to_owned(), runs.iter().map(|found| together(found).0).collect()));
    }
    let plot =
        chart("Throughput together", "By combination and mode.", "", "images/s", &MODES.map(str::to_owned), &bars);
    let note = "Models together on the V100, SLO 25 ms, always busy; figure 10 with table 3. The paper: GSLICE has 6 to 13 times the throughput of default MPS and 1.2 to 4 times that of MPS+SLAB. GUE: all \
                images/s over the mean of the models' latencies.";
    Ok(Figure { note: note.to_owned(), table, plots: vec![plot], ..Figure::default() })
}

pub(super) fn figure_11(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    // Table 4: throughput and latency improvement, percent.
    let published = [(1, 73.85, -7.52), (4, 31.43, 23.96), (8, 50.83, 34.12), (16, 92.34, 45.64)];
    let model = emulated(Architecture::ResNet50);
    let mut table =
        vec![head("batch | one at a time /s | ms | two streams /s | ms | throughput | paper's | latency | paper's")];
    for (batch, throughput, latency) in published {
        // One batch after another, with what the serving system and the copy of its inputs take.
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
