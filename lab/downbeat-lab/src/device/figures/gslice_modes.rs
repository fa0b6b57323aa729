//! GSLICE's figures of models alone and together, under GSLICE and under the modes that the paper
//! compares.

use std::fmt::Write as _;

use downbeat_core::device::spatial::SpatialOptions;
use downbeat_core::{Duration, Time};
use downbeat_report::bars as chart;

use super::gslice::{GRAIN, PLATFORM, SLO, first_knee, span};
use super::{DeviceFailure, Figure, FigureOptions, each, head};
use crate::device::{Architecture, BatchedBy, SharedBy, SharingLoad, SharingModel, SharingReport, SpatialRun};
use Architecture::{AlexNet, MobileNet, ResNet50, Vgg16, Vgg19};

/// The way that models are served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    /// One image at a time, all on the whole device.
    DefaultMps,
    /// Batches by SLAB, one process at a time.
    NoMps,
    /// Batches by the rule of Clipper's paper, all on the whole device.
    Aimd,
    /// Batches by SLAB, all on the whole device.
    MpsSlab,
    /// Batches by SLAB, each model on an equal share.
    Even,
    /// Batches by SLAB on shares that tune themselves, inputs copied beside computing, two streams
    /// where that helps.
    Gslice,
}

impl Mode {
    const ALL: [Mode; 6] = [Mode::DefaultMps, Mode::NoMps, Mode::Aimd, Mode::MpsSlab, Mode::Even, Mode::Gslice];
    /// The modes that differ where a model is alone.
    const ALONE: [Mode; 4] = [Mode::DefaultMps, Mode::Aimd, Mode::MpsSlab, Mode::Gslice];

    fn name(self) -> &'static str {
        match self {
            Mode::DefaultMps => "default MPS",
            Mode::NoMps => "no MPS+SLAB",
            Mode::Aimd => "MPS+AIMD",
            Mode::MpsSlab => "MPS+SLAB",
            Mode::Even => "even shares+SLAB",
            Mode::Gslice => "GSLICE",
        }
    }

    /// Whether all models have the whole device at once.
    fn is_free(self) -> bool {
        matches!(self, Mode::DefaultMps | Mode::Aimd | Mode::MpsSlab)
    }

    /// Returns the paper's number for this mode, out of its numbers for default MPS, MPS+SLAB and
    /// GSLICE.
    fn published(self, numbers: &[f64; 3]) -> Option<f64> {
        match self {
            Mode::DefaultMps => Some(numbers[0]),
            Mode::MpsSlab => Some(numbers[1]),
            Mode::Gslice => Some(numbers[2]),
            _ => None,
        }
    }

    /// Plays models with their loads under this mode, and returns a report for each.
    fn play(self, models: &[Served], options: &FigureOptions) -> Result<Vec<SharingReport>, DeviceFailure> {
        let shared = match self {
            Mode::NoMps => SharedBy::Turns,
            Mode::Even => SharedBy::Shares(vec![PLATFORM.units / models.len() as u32; models.len()]),
            Mode::Gslice => SharedBy::Gslice(SpatialOptions::new(PLATFORM.units, GRAIN)),
            _ => SharedBy::All,
        };
        let batch = match self {
            Mode::DefaultMps => BatchedBy::Fixed(1),
            Mode::Aimd => BatchedBy::Aimd,
            _ => BatchedBy::Slab,
        };
        let model = |served: &Served| SharingModel {
            knee: first_knee(served.architecture),
            prepares: Duration::from_millis(500),
            streams: if self == Mode::Gslice { served.streams } else { 1 },
            copied: self != Mode::Gslice,
            load: served.load,
            ..SharingModel::new(served.architecture, SLO, batch)
        };
        let models = models.iter().map(model).collect();
        SpatialRun { platform: PLATFORM, shared, models, span: span(options), seed: options.seed }.play()
    }
}

/// A model with its streams and its load.
#[derive(Clone, Copy, Debug)]
struct Served {
    architecture: Architecture,
    streams: u32,
    load: SharingLoad,
}

/// The part of a run that counts: it leaves out the first third, in which the run settles.
fn counted(options: &FigureOptions) -> (Time, Time) {
    let end = Time::ZERO + span(options);
    (Time::from_nanos(end.as_nanos() / 3), end)
}
/// Throughput over latency (§2.1.4), in items a second and a millisecond.
fn efficacy((throughput, latency_ms): (f64, f64)) -> f64 {
    throughput / latency_ms
}

/// Returns the throughput of all models in items a second, and the mean latency of the models'
/// batches.
fn together(found: &[(f64, f64)]) -> (f64, f64) {
    let latencies = found.iter().map(|(_, ms)| ms);
    (found.iter().map(|(rate, _)| rate).sum(), latencies.sum::<f64>() / found.len() as f64)
}

/// Finds the number of streams, one or two, with which the busy model answers most alone (§3.3).
/// Also returns that throughput.
fn busiest(architecture: Architecture, options: &FigureOptions) -> Result<(Served, f64), DeviceFailure> {
    let (begin, end) = counted(options);
    let of = |streams| {
        let served = Served { architecture, streams, load: SharingLoad::Busy };
        Ok::<_, DeviceFailure>((served, Mode::Gslice.play(&[served], options)?[0].within(begin, end).0))
    };
    let (one, two) = (of(1)?, of(2)?);
    Ok(if two.1 > one.1 { two } else { one })
}

pub(super) fn figure_8(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    // Table 2: GUE of default MPS, MPS+SLAB, GSLICE.
    let cases = [
        (AlexNet, [235.75, 382.4, 579.41]),
        (MobileNet, [330.0, 341.2, 379.55]),
        (ResNet50, [29.08, 42.4, 47.93]),
        (Vgg19, [4.96, 5.11, 5.25]),
        (Vgg16, [3.79, 11.13, 12.49]),
    ];
    let (begin, end) = counted(options);
    let runs = each(&cases, options, |(architecture, _)| {
        let (served, _) = busiest(*architecture, options)?;
        let found = Mode::ALONE.map(|mode| Ok(mode.play(&[served], options)?.remove(0)));
        Ok((served.streams, found.into_iter().collect::<Result<Vec<_>, DeviceFailure>>()?))
    })?;
    let mut table = vec![head(
        "model | mode | streams | images/s | ms | late | to default MPS | GUE | to default MPS | paper's GUE | to default MPS",
    )];
    let mut bars = Vec::new();
    for ((architecture, published), (streams, reports)) in cases.iter().zip(&runs) {
        let found: Vec<(f64, f64)> = reports.iter().map(|report| report.within(begin, end)).collect();
        for ((mode, report), (rate, ms)) in Mode::ALONE.into_iter().zip(reports).zip(&found) {
            let paper = mode.published(published);
            let streams = if mode == Mode::Gslice { *streams } else { 1 };
            table.push(vec![
                architecture.to_string(),
                mode.name().to_owned(),
                streams.to_string(),
                format!("{rate:.0}"),
                format!("{ms:.1}"),
                format!("{:.1}%", report.late(begin, end, SLO) * 100.0),
                format!("{:.2}", rate / found[0].0),
                format!("{:.1}", efficacy((*rate, *ms))),
                format!("{:.2}", efficacy((*rate, *ms)) / efficacy(found[0])),
                paper.map_or_else(String::new, |paper| paper.to_string()),
                paper.map_or_else(String::new, |paper| format!("{:.2}", paper / published[0])),
            ]);
        }
        bars.push((architecture.to_string(), found.iter().map(|(rate, _)| *rate).collect()));
    }
    let names = Mode::ALONE.map(|mode| mode.name().to_owned());
    let plot = chart("Throughput alone", "By model and mode.", "", "images/s", &names, &bars);
    let note = "Each model alone on the V100, SLO 25 ms, always busy; figures 8 and 9 with table 2. The last two thirds of the run count. 'late': of batches. GSLICE copies inputs beside computing and runs two batches at once where that answers more, the others do neither; \
                no MPS and shares are the same as MPS where a model is alone. GUE is images/s a millisecond. The paper: GSLICE has about 10 times the throughput of default MPS for Alexnet, 9 times for Mobilenet, 2 times for VGG-19. GNMT is not emulated.";
    Ok(Figure { note: note.to_owned(), table, plots: vec![plot], ..Figure::default() })
}

/// The combinations of figure 10, and table 3: GUE of default MPS, MPS+SLAB, GSLICE.
const MIXES: [(&str, &[Architecture], [f64; 3]); 4] = [
    ("C1", &[AlexNet, ResNet50], [38.82, 72.69, 94.04]),
    ("C2", &[AlexNet, Vgg19], [6.39, 15.76, 44.79]),
    ("C3", &[AlexNet, ResNet50, Vgg19], [3.38, 7.83, 24.59]),
    ("C4", &[AlexNet, ResNet50, Vgg19, MobileNet], [2.01, 7.29, 19.98]),
];
/// The models of [`MIXES`].
const MIXED: [Architecture; 4] = [AlexNet, ResNet50, Vgg19, MobileNet];

/// Returns the models of [`MIXES`], always busy, with their throughput alone.
fn mixed(options: &FigureOptions) -> Result<Vec<(Served, f64)>, DeviceFailure> {
    each(&MIXED, options, |architecture| busiest(*architecture, options))
}

/// Returns cells in the order of [`MIXED`], empty ones for absent models.
fn by_model(models: &[Architecture], cell: impl Fn(usize) -> String) -> Vec<String> {
    let place = |architecture| models.iter().position(|other| *other == architecture);
    MIXED.map(|architecture| place(architecture).map_or_else(String::new, &cell)).to_vec()
}

pub(super) fn figure_10(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let alone = mixed(options)?;
    let (begin, end) = counted(options);
    let jobs: Vec<_> = MIXES.iter().flat_map(|mix| Mode::ALL.map(|mode| (mix, mode))).collect();
    let runs = each(&jobs, options, |((_, models, _), mode)| {
        let served = alone.iter().map(|(served, _)| *served).filter(|served| models.contains(&served.architecture));
        mode.play(&served.collect::<Vec<_>>(), options)
    })?;
    let mut table = vec![head(
        "models | mode | alexnet /s (ms, late) | resnet50 | vgg19 | mobilenet | all /s | to default MPS | GUE | to default MPS | GUE by the sum | to default MPS | paper's GUE | to default MPS",
    )];
    let mut bars = Vec::new();
    let mut base = (0.0, 0.0);
    for (((name, models, published), mode), reports) in jobs.iter().zip(&runs) {
        let found: Vec<(f64, f64)> = reports.iter().map(|report| report.within(begin, end)).collect();
        let own = by_model(models, |place| {
            let ((rate, ms), late) = (found[place], reports[place].late(begin, end, SLO) * 100.0);
            format!("{rate:.0} ({ms:.1}, {late:.0}%)")
        });
        let all = together(&found);
        if *mode == Mode::DefaultMps {
            base = all;
            bars.push(((*name).to_owned(), Vec::new()));
        }
        let paper = mode.published(published);
        // The sum of the latencies is their mean times the number of models.
        let by_sum = |all: (f64, f64)| efficacy(all) / models.len() as f64;
        let cells = [
            format!("{:.0}", all.0),
            format!("{:.2}", all.0 / base.0),
            format!("{:.1}", efficacy(all)),
            format!("{:.2}", efficacy(all) / efficacy(base)),
            format!("{:.1}", by_sum(all)),
            format!("{:.2}", by_sum(all) / by_sum(base)),
            paper.map_or_else(String::new, |paper| paper.to_string()),
            paper.map_or_else(String::new, |paper| format!("{:.2}", paper / published[0])),
        ];
        table.push([vec![(*name).to_owned(), mode.name().to_owned()], own, cells.to_vec()].concat());
        bars.iter_mut().last().into_iter().for_each(|(_, rates)| rates.push(all.0));
    }
    let names = Mode::ALL.map(|mode| mode.name().to_owned());
    let plot = chart("Throughput together", "By combination and mode.", "", "images/s", &names, &bars);
    let note = "Models together on the V100, SLO 25 ms, always busy; figure 10 with table 3. The last two thirds of the run count. 'late': of batches. GSLICE copies inputs beside computing and runs two batches of a model at once where that answers more alone, the others do neither. \
                The paper: GSLICE has 6 to 13 times the throughput of default MPS and 1.2 to 4 times that of MPS+SLAB. GUE: all images/s over the mean of the models' latencies, or over their sum; the paper does not say which. \
                A share begins with the knee of the largest batch within the SLO.";
    Ok(Figure { note: note.to_owned(), table, plots: vec![plot], ..Figure::default() })
}

/// The load of each model, as a part of its throughput alone divided by the number of models.
const LOADS: [f64; 3] = [0.25, 0.5, 0.75];

/// Returns a model's last share in percent, with its largest batch.
fn share_at_the_end(report: &SharingReport) -> String {
    let last = |changes: &[(Time, u32)]| changes.last().map_or(0, |(_, value)| *value);
    let share = f64::from(last(&report.shares)) * 100.0 / f64::from(PLATFORM.units);
    format!("{share:.0}% x {}", last(&report.limits))
}

pub(super) fn attainment(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let alone = mixed(options)?;
    let (begin, end) = counted(options);
    let mut jobs = Vec::new();
    for (name, models, _) in MIXES {
        jobs.extend(LOADS.into_iter().flat_map(|load| Mode::ALL.map(|mode| (name, models, load, mode))));
    }
    let runs = each(&jobs, options, |(_, models, load, mode)| {
        let served = alone.iter().filter(|(served, _)| models.contains(&served.architecture));
        let part = load / models.len() as f64;
        let served = served.map(|(served, most)| Served { load: SharingLoad::Poisson(most * part), ..*served });
        mode.play(&served.collect::<Vec<_>>(), options)
    })?;
    // Requests of the last moments do not count: their answers may come after the end.
    let twice = SLO + SLO;
    let until = Time::from_nanos(end.since(Time::ZERO).as_nanos().saturating_sub(twice.as_nanos()));
    let kept = |reports: &[SharingReport], place: usize| {
        [SLO, twice].map(|limit| reports[place].attained(begin, until, limit) * 100.0)
    };
    let mut table = vec![head(
        "models | load | mode | alexnet | resnet50 | vgg19 | mobilenet | shares and largest batches at the end | worse than free sharing",
    )];
    for (jobs, runs) in jobs.chunks(Mode::ALL.len()).zip(runs.chunks(Mode::ALL.len())) {
        for ((name, models, load, mode), reports) in jobs.iter().zip(runs) {
            let own = by_model(models, |place| {
                let [once, twice] = kept(reports, place);
                format!("{once:.1} / {twice:.1}")
            });
            let (mut at_the_end, mut worse) = (String::new(), String::new());
            if *mode == Mode::Gslice {
                let shares: Vec<String> = reports.iter().map(share_at_the_end).collect();
                at_the_end = shares.join(", ");
                let free = jobs.iter().zip(runs).filter(|((.., mode), _)| mode.is_free());
                for ((.., other), others) in free {
                    for (place, model) in models.iter().enumerate() {
                        let less = kept(others, place)[1] - kept(reports, place)[1];
                        if less > 1.0 {
                            let _ = write!(worse, "{model} by {less:.1} than {}; ", other.name());
                        }
                    }
                }
            }
            let first = [(*name).to_owned(), format!("{:.0}%", load * 100.0), mode.name().to_owned()];
            table.push([first.to_vec(), own, vec![at_the_end, worse.trim_end_matches("; ").to_owned()]].concat());
        }
    }
    let note = "Requests that were answered within the SLO of 25 ms / within twice that, in percent, from their arrival on. Poisson arrivals, the same in all modes; each model's load is that part of what it answers alone, over the number of models. \
                The last two thirds of the run count. SLAB keeps batches within the SLO; a request that comes while one runs waits for it first, hence twice. 'worse': more than one point within twice the SLO.";
    Ok(Figure { note: note.to_owned(), table, ..Figure::default() })
}
