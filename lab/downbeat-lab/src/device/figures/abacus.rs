//! Abacus' figures: requests of several models on the emulated A100, with a perfect and with a
//! trained predictor.

use std::sync::Arc;

use downbeat_core::device::SegmentRange;
use downbeat_core::device::overlap::{GroupPart, Predictor};
use downbeat_core::{Duration, ModelId, RequestId};
use downbeat_report::bars as chart;

use super::{DeviceFailure, Figure, FigureOptions, change, each, head, mean};
use crate::device::{
    ABACUS_MODELS, Architecture, EmulatedModel, Oracle, OverlapInputs, OverlapReport, OverlapRun, OverlapServing,
    Platform, PredictedBy, TrainedPredictor,
};

pub(super) const PLATFORM: Platform = Platform::A100_CUDNN;

/// A column of the tables: its head, and the way queries are served.
type Column = (&'static str, OverlapServing);

/// Abacus with this many models at once. Models run side by side only where that saves the share
/// `worth`.
pub(super) fn groups(at_once: usize, worth: f64, by: &PredictedBy) -> OverlapServing {
    OverlapServing::Abacus { at_once, worth, by: by.clone() }
}

/// The ways of serving. "one" uses the same controller for one request at a time. The difference to
/// Abacus is the gain of running side by side.
pub(super) fn columns(trained: Option<&PredictedBy>) -> Vec<Column> {
    let oracle = PredictedBy::Oracle { bias: 1.0 };
    let mut columns = vec![
        ("FCFS", OverlapServing::Fcfs),
        ("SJF", OverlapServing::SJF),
        ("EDF", OverlapServing::Edf),
        ("free", OverlapServing::Free),
        (ONE, groups(1, 0.0, &oracle)),
        (ORACLE, groups(4, 0.0, &oracle)),
    ];
    columns.extend(trained.map(|trained| (TRAINED, groups(4, 0.0, trained))));
    columns.push(("worth", groups(4, 0.1, &oracle)));
    columns.extend(trained.map(|trained| ("worth, trained", groups(4, 0.1, trained))));
    columns
}

/// Abacus' controller with one query at a time.
const ONE: &str = "one";
/// Abacus as published, but for the margin, with either predictor.
const ORACLE: &str = "oracle";
const TRAINED: &str = "trained";
const NOTE: &str = "FCFS, SJF and EDF drop what is late when its turn comes; free: one query of each model at once, as MPS has it; one: Abacus' controller with one query at a time; oracle: Abacus, its predictor the emulated device itself; \
                    trained: Abacus, its predictor a perceptron; worth: side by side only what saves 10%.";

/// Trains the perceptron for all groups of up to `at_once` of some models. Also returns a sentence
/// on its error.
pub(super) fn trained(
    platform: Platform,
    (models, at_once): (&[Architecture], usize),
    options: &FigureOptions,
) -> Result<(PredictedBy, String), DeviceFailure> {
    let number = |model: &Architecture| ABACUS_MODELS.iter().position(|other| other == model);
    let numbers: Vec<usize> = models.iter().filter_map(number).collect();
    let each = samples_each(options);
    let trained = TrainedPredictor::train(platform, (&numbers, at_once), each, (options.seed, options.threads))?;
    let [off, most] = [trained.mean_error, trained.error].map(|share| share * 100.0);
    let note = format!(
        "The perceptron was trained on {} groups; of others it is {off:.1}% off, of 95% at most {most:.1}%.",
        trained.samples
    );
    Ok((PredictedBy::Trained(Arc::new(trained)), note))
}

/// The groups of each set of models that a predictor is trained with: the paper's 2,000, or fewer
/// in a figure of fewer requests.
pub(super) fn samples_each(options: &FigureOptions) -> usize {
    options.requests.clamp(10, 2_000) as usize
}

/// Returns all pairs of Abacus' models, in the order of table 1.
fn pairs() -> Vec<Vec<Architecture>> {
    let after = |index: usize| ABACUS_MODELS[index + 1..].iter().map(move |other| vec![ABACUS_MODELS[index], *other]);
    (0..ABACUS_MODELS.len()).flat_map(after).collect()
}

fn name(models: &[Architecture]) -> String {
    models.iter().map(|model| model.name()).collect::<Vec<_>>().join(", ")
}

/// The rate of queries.
#[derive(Clone, Copy)]
enum Load {
    /// Queries a second.
    Rate(f64),
    /// A multiple of the rate that the device holds with one query at a time.
    Times(f64),
}

/// Returns the mean time of a query alone, in seconds.
pub(super) fn mean_alone(models: &[Architecture], platform: Platform) -> Result<f64, DeviceFailure> {
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

/// Runs of some sets of models, each under all ways of serving.
struct Runs<'a> {
    platform: Platform,
    all: &'a [Vec<Architecture>],
    columns: Vec<Column>,
    inputs: OverlapInputs,
    /// By models, then by column.
    reports: Vec<Vec<OverlapReport>>,
}

/// A number of a report.
pub(super) type Value = fn(&OverlapReport) -> f64;

impl<'a> Runs<'a> {
    fn new(platform: Platform, all: &'a [Vec<Architecture>], columns: Vec<Column>, inputs: OverlapInputs) -> Self {
        Runs { platform, all, columns, inputs, reports: Vec::new() }
    }

    /// Plays all runs.
    fn play(mut self, options: &FigureOptions, load: Load) -> Result<Self, DeviceFailure> {
        let Runs { platform, inputs, .. } = self;
        let mut jobs = Vec::new();
        for models in self.all {
            let rate = match load {
                Load::Rate(rate) => rate,
                Load::Times(times) => times / mean_alone(models, platform)?,
            };
            let job = |(_, serving): &Column| {
                let (models, serving) = (models.clone(), serving.clone());
                let queries = options.requests as u32;
                OverlapRun { platform, models, serving, rate, queries, inputs, target_on: platform, seed: options.seed }
            };
            jobs.extend(self.columns.iter().map(job));
        }
        let reports = each(&jobs, options, OverlapRun::play)?;
        self.reports = reports.chunks(self.columns.len()).map(<[_]>::to_vec).collect();
        Ok(self)
    }

    /// Returns the mean over all models, for each column.
    fn means(&self, value: Value) -> Vec<f64> {
        let of = |index: usize| mean(self.reports.iter().map(|reports| value(&reports[index])));
        (0..self.columns.len()).map(of).collect()
    }

    /// Returns the rows of all models, their means, and the changes of Abacus' means against the
    /// other columns.
    fn rows(&self, value: Value, digits: usize) -> Vec<Vec<String>> {
        let row = |(models, reports): (&Vec<Architecture>, &Vec<OverlapReport>)| {
            cells(&name(models), &reports.iter().map(value).collect::<Vec<_>>(), digits)
        };
        let mut rows: Vec<_> = self.all.iter().zip(&self.reports).map(row).collect();
        rows.extend(self.summary(value, digits));
        rows
    }

    /// Returns the last of [`Self::rows`].
    fn summary(&self, value: Value, digits: usize) -> Vec<Vec<String>> {
        let means = self.means(value);
        let mut rows = vec![cells("mean", &means, digits)];
        // The change from a baseline to "one" is by the order and the drops. The change from "one" to
        // "oracle" is by running side by side.
        for abacus in [ONE, ORACLE, TRAINED] {
            if let Some(of) = self.columns.iter().position(|(name, _)| *name == abacus) {
                let changes = means.iter().map(|mean| change(means[of], *mean));
                rows.push([format!("{abacus} to it")].into_iter().chain(changes).collect());
            }
        }
        rows
    }

    fn plot(&self, title: &str, unit: &str, value: Value) -> String {
        let names: Vec<String> = self.columns.iter().map(|(name, _)| (*name).to_owned()).collect();
        let bars = self.all.iter().zip(&self.reports);
        let bars = bars.map(|(models, reports)| (name(models), reports.iter().map(value).collect()));
        chart(title, "By models and who serves.", "", unit, &names, &bars.collect::<Vec<_>>())
    }

    fn heads(&self, first: &str) -> Vec<String> {
        [first].into_iter().chain(self.columns.iter().map(|(name, _)| *name)).map(str::to_owned).collect()
    }
}

fn cells(first: &str, values: &[f64], digits: usize) -> Vec<String> {
    [first.to_owned()].into_iter().chain(values.iter().map(|value| format!("{value:.digits$}"))).collect()
}

pub(super) fn violations(report: &OverlapReport) -> f64 {
    report.violations() * 100.0
}

fn answered(report: &OverlapReport) -> f64 {
    f64::from(report.in_time + report.late) / report.span.as_secs_f64()
}

/// Returns the columns for these models with a perceptron for up to `at_once` of them at a time,
/// and the note of the figure.
fn with_trained(
    models: &[Architecture],
    at_once: usize,
    options: &FigureOptions,
) -> Result<(Vec<Column>, String), DeviceFailure> {
    let (by, said) = trained(PLATFORM, (models, at_once), options)?;
    Ok((columns(Some(&by)), format!("{NOTE} {said}")))
}

/// Makes the figure of 99% latencies and violations at 50 queries a second.
fn quality(runs: Runs<'_>, options: &FigureOptions, note: &str) -> Result<Figure, DeviceFailure> {
    let runs = runs.play(options, Load::Rate(50.0))?;
    let mut table = vec![runs.heads("99% latency over target")];
    table.extend(runs.rows(OverlapReport::tail, 2));
    table.push(runs.heads("violations, %"));
    table.extend(runs.rows(violations, 1));
    let plots = vec![runs.plot("Violations", "% of queries", violations)];
    Ok(Figure { note: format!("50 queries/s of all models together. {note}"), table, plots, ..Figure::default() })
}

/// Makes the figure of queries in time per second, at the paper's 100 queries a second and beyond
/// the device's throughput.
fn throughput(
    all: &[Vec<Architecture>],
    columns: &[Column],
    options: &FigureOptions,
    note: String,
) -> Result<Figure, DeviceFailure> {
    let runs = |load| Runs::new(PLATFORM, all, columns.to_vec(), OverlapInputs::Any).play(options, load);
    let (hundred, beyond) = (runs(Load::Rate(100.0))?, runs(Load::Times(1.5))?);
    let mut table = vec![hundred.heads("in time/s, of 100/s")];
    table.extend(hundred.rows(OverlapReport::throughput, 1));
    table.push(hundred.heads("in time/s, of 1.5 times what fits"));
    table.extend(beyond.rows(OverlapReport::throughput, 1));
    table.push(hundred.heads("answered/s, of 1.5 times what fits"));
    table.extend(beyond.summary(answered, 1));
    let plots = vec![beyond.plot("Answered in time", "queries/s", OverlapReport::throughput)];
    Ok(Figure { note, table, plots, ..Figure::default() })
}

pub(super) fn figure_14(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (pairs, (columns, said)) = (pairs(), with_trained(&ABACUS_MODELS, 2, options)?);
    quality(
        Runs::new(PLATFORM, &pairs, columns, OverlapInputs::Any),
        options,
        &format!(
            "{said} The paper: Abacus to FCFS, SJF and EDF -23.1%, -34.1% and -23.8% in 99% latency, -38.8%, -71.0% and -44.0% in violations."
        ),
    )
}

pub(super) fn figure_16(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (pairs, (columns, said)) = (pairs(), with_trained(&ABACUS_MODELS, 2, options)?);
    quality(
        Runs::new(PLATFORM, &pairs, columns, OverlapInputs::Smallest),
        options,
        &format!(
            "All queries are the smallest, and targets twice what those take alone. {said} The paper: 99% latencies of Abacus closer to the targets than in figure 14, and within them."
        ),
    )
}

pub(super) fn figure_17(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (columns, said) = with_trained(&ABACUS_MODELS, 2, options)?;
    let paper = "The paper, at 100 queries/s, which saturate its device: Abacus to FCFS, SJF and EDF +25.7%, +38.1% and +25.7%; largest for (ResNet50, ResNet152), slightly below for (VGG16, VGG19).";
    throughput(&pairs(), &columns, options, format!("{said} {paper}"))
}

/// The models of which all triples and all four are played (§7.4).
pub(super) const FOUR: [Architecture; 4] =
    [Architecture::ResNet101, Architecture::ResNet152, Architecture::Vgg19, Architecture::BertBase];

fn several() -> Vec<Vec<Architecture>> {
    let without = |left_out: usize| {
        FOUR.iter().enumerate().filter(|(index, _)| *index != left_out).map(|(_, model)| *model).collect::<Vec<_>>()
    };
    [3, 2, 1, 0, 4].map(without).to_vec()
}

pub(super) fn figure_18(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (several, (columns, said)) = (several(), with_trained(&FOUR, 4, options)?);
    quality(
        Runs::new(PLATFORM, &several, columns, OverlapInputs::Any),
        options,
        &format!(
            "{said} The paper: triples -21.3%, -35.3%, -20.8% in 99% latency and -87.7%, -93.4%, -85.3% in violations; four -16.1%, -34.3%, -21.1% and as many violations less."
        ),
    )
}

pub(super) fn figure_19(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let (columns, said) = with_trained(&FOUR, 4, options)?;
    let paper = "The paper: triples +51.0%, +72.3%, +57.0%; four +38.4%, +53.9%, +63.4%.";
    throughput(&several(), &columns, options, format!("{said} {paper}"))
}

/// Returns the ratio of the time of pairs one after the other to their time side by side, on
/// average and for VGG16 with VGG19.
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
    // The other devices that were fitted to the same latencies (`lab/docs/device_model.md`).
    let ahead = Platform { efficiency: 0.1128, product_efficiency: 0.2935, ahead: 1_024, ..PLATFORM };
    let ahead = Platform { issue: Duration::from_nanos(34_520), ..ahead };
    let winograd = Platform { efficiency: 0.1149, product_efficiency: 0.4067, winograd_gain: 2.25, ..PLATFORM };
    let changed = [
        ("as it is", PLATFORM),
        ("one host issues for all", Platform { own_hosts: false, ..PLATFORM }),
        ("issued ahead, fitted again", ahead),
        ("Winograd's algorithm, fitted again", Platform { issue: Duration::from_nanos(19_020), ..winograd }),
        ("5 us to issue a kernel", Platform { issue: Duration::from_micros(5), ..PLATFORM }),
        ("no interference", Platform { interference_permille: 0, ..PLATFORM }),
        ("no whole waves", Platform { whole_waves: false, ..PLATFORM }),
    ];
    let pairs = pairs();
    let none = Runs::new(PLATFORM, &pairs, columns(None), OverlapInputs::Any);
    let mut table = vec![[head("term | saved at 4 | at 32 | VGG at 4"), none.heads("load")].concat()];
    for (term, platform) in changed {
        let ((four, vgg), (most, _)) = (saved(platform, 4)?, saved(platform, 32)?);
        for (load, of) in [("100/s", Load::Rate(100.0)), ("1.5 times", Load::Times(1.5))] {
            let runs = Runs::new(platform, &pairs, columns(None), OverlapInputs::Any).play(options, of)?;
            let percent = |ratio: f64| change(ratio, 1.0);
            let found = cells(load, &runs.means(violations), 1);
            table.push([vec![term.to_owned(), percent(four), percent(most), percent(vgg)], found].concat());
        }
    }
    let note = format!(
        "Violations in % of queries, means of the 21 pairs, with one term of the device changed at a time. saved: what two queries take one after the other, over what they take side by side, less 1, at 4 and 32 items. {NOTE}"
    );
    Ok(Figure { note, table, ..Figure::default() })
}

/// The times of a decision of SJF that are tried, in microseconds. A pass of the predictor takes 66,
/// and a whole decision of Abacus 260 (§7.7).
const DECISIONS: [u64; 8] = [0, 66, 260, 1_000, 2_000, 4_000, 8_000, 16_000];

pub(super) fn sjf(options: &FigureOptions) -> Result<Figure, DeviceFailure> {
    let oracle = PredictedBy::Oracle { bias: 1.0 };
    let sjf = |micros| OverlapServing::Sjf { decision: Duration::from_micros(micros) };
    let columns = DECISIONS.map(|micros| ("SJF", sjf(micros)));
    let columns = [vec![(ORACLE, groups(4, 0.0, &oracle))], columns.to_vec()].concat();
    let pairs = pairs();
    let runs = |load| Runs::new(PLATFORM, &pairs, columns.clone(), OverlapInputs::Any).play(options, load);
    let (fifty, hundred) = (runs(Load::Rate(50.0))?, runs(Load::Rate(100.0))?);
    let late = fifty.means(violations);
    let tail = fifty.means(OverlapReport::tail);
    let in_time = hundred.means(OverlapReport::throughput);
    let mut table = vec![head(
        "decision, us | violations, % | Abacus to it | 99% over target | Abacus to it | in time/s, of 100/s | Abacus to it",
    )];
    for (index, micros) in (1..).zip(DECISIONS) {
        let beside =
            |values: &[f64], digits: usize| [format!("{:.digits$}", values[index]), change(values[0], values[index])];
        let cells = [beside(&late, 1), beside(&tail, 2), beside(&in_time, 1)].concat();
        table.push([vec![micros.to_string()], cells].concat());
    }
    let note = format!(
        "SJF by the time that the device waits for each of its decisions, means of the 21 pairs; violations and 99% latencies at 50 queries/s. Abacus (oracle) has {:.1}%, {:.2} and {:.1}/s. The paper: -71.0%, -34.1% and +38.1%.",
        late[0], tail[0], in_time[0]
    );
    Ok(Figure { note, table, ..Figure::default() })
}
