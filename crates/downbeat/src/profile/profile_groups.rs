//! `downbeat profile --co-run`: measures groups of operators of several models, and trains a
//! predictor of their time (Abacus §5).

use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use downbeat_core::Duration;
use downbeat_core::device::overlap::LearnedPredictor;
use downbeat_host::groups::stored_predictor::{PredictedModel, StoredPredictor, Training};
use downbeat_models::measure::group_profiler::GroupLanes;
use downbeat_models::measure::profile_store::ProfileStore;
use downbeat_models::measure::profiler::{Threads, few_sizes};
use downbeat_report::note;
use downbeat_service::clock::Clock;
use downbeat_service::options::Isolation;
use downbeat_training::{GroupSample, GroupSampler, SampledModel, error_below, mean_error, says, sets_of, train_mlp};

use crate::profile::group_report::{GroupReport, SetReport};
use crate::profile::group_samples::{GroupSamples, MeasuredGroup, SampledOn, Split, samples_of};
use crate::profile::profiled_model::ProfiledModel;
use crate::profile::watched::watched_quietly;

/// Flags for measuring groups.
#[derive(Args, Debug)]
pub struct GroupFlags {
    /// Run groups of operators of the model and of these models side by side, and train a predictor
    /// of their time (Abacus). The models are cut into --segments each (default 8); one thread in
    /// each run, unless --threads is given
    #[arg(long, value_name = "MODELS", value_delimiter = ',', conflicts_with_all = ["lane_mix", "emulated", "shares"])]
    pub co_run: Vec<String>,
    /// Keep the measured times of groups in this file; an existing file is continued
    #[arg(long, value_name = "FILE", requires = "co_run")]
    pub samples: Option<PathBuf>,
    /// Write the predictor to this file
    #[arg(long, value_name = "FILE", requires = "co_run")]
    pub predictor: Option<PathBuf>,
    /// Isolation of the models, as in a server: none, or process (each runs in a process of its
    /// own)
    #[arg(long, value_name = "ISOLATION", requires = "co_run", default_value = "none", value_parser = isolation)]
    pub isolation: Isolation,
    /// Most models that run at once [default: one a core, at least 2]
    #[arg(long, value_name = "N", requires = "co_run", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub at_once: Option<u8>,
}

fn isolation(text: &str) -> Result<Isolation, String> {
    match text.parse::<Isolation>() {
        Ok(Isolation::Auto) => Err("only a server can decide this for each model; write none or process".to_owned()),
        parsed => parsed.map_err(|error| error.to_string()),
    }
}

/// Default number of segments that models are cut into.
pub const SEGMENTS: u16 = 8;
/// Most models of a predictor, which has a bit for each.
const MOST_MODELS: usize = 16;
/// Runs of a group.
const RUNS: usize = 5;
/// The fewest groups of a set for training a predictor.
const FEWEST: usize = 20;
/// Seed of the groups and of the training.
const SEED: u64 = 17;
/// The stream of random numbers of a training.
const TRAINING: u64 = 77;

impl GroupFlags {
    /// The names of all models, and their earlier samples.
    ///
    /// # Errors
    /// If a model is named twice, there are too many models, or the file is no file of samples.
    pub fn begin(&self, model: &str) -> anyhow::Result<(Vec<String>, Option<GroupSamples>)> {
        let names: Vec<String> = [model.to_owned()].into_iter().chain(self.co_run.iter().cloned()).collect();
        let twice = names.iter().enumerate().find(|(index, name)| names[..*index].contains(name));
        ensure!(
            twice.is_none(),
            "--co-run: model '{}' is named twice; name each model once",
            twice.map_or("", |(_, name)| name)
        );
        ensure!(
            names.len() <= MOST_MODELS,
            "--co-run: {} models are too many; a predictor takes at most {MOST_MODELS}",
            names.len()
        );
        let before = self.samples.as_deref().map(GroupSamples::read).transpose()?.flatten();
        Ok((names, before))
    }

    fn at_once(&self, models: usize) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        self.at_once.map_or(cores.max(2), usize::from).min(models)
    }
}

/// The model in the form of a predictor.
fn predicted(model: &ProfiledModel) -> anyhow::Result<PredictedModel> {
    let info = model.model.segment_info();
    let last = |segment: &downbeat_engine::SegmentInfo| segment.last.clone();
    let has_operators = model.format == downbeat_repository::ModelFormat::Onnx;
    let before_last = &info[..info.len().saturating_sub(1)];
    Ok(PredictedModel {
        name: model.name.clone(),
        version: model.version,
        file: ProfileStore::file_key(&model.file).with_context(|| model.file.display().to_string())?,
        segments: u16::try_from(model.model.segments())?,
        cuts: if has_operators { before_last.iter().map(last).collect() } else { Vec::new() },
        most_rows: 0,
        longest: 0,
    })
}

/// The sizes of requests to draw from.
fn sampled(model: &ProfiledModel, batch: Option<&[u32]>, length: i64) -> anyhow::Result<SampledModel> {
    let rows = model.sizes(batch, |most| few_sizes(most.min(16)))?;
    let length = model.length(length).and_then(|length| u32::try_from(length).ok());
    let mut lengths: Vec<u32> = length.into_iter().flat_map(|most| [most / 4, most / 2, most]).collect();
    lengths.iter_mut().for_each(|length| *length = (*length).max(1));
    lengths.dedup();
    Ok(SampledModel { operators: u16::try_from(model.model.segments())?, rows, lengths })
}

/// Samples groups for about `budget`, and at least as many as a predictor needs, in addition to
/// earlier samples. Then trains a predictor.
///
/// # Errors
/// If an engine cannot run its model, a file cannot be written or has samples of other models or
/// another device, or Ctrl-C came with too few samples.
pub fn measure(
    flags: &GroupFlags,
    models: &[ProfiledModel],
    before: Option<GroupSamples>,
    (batch, length, budget): (Option<&[u32]>, i64, Duration),
) -> anyhow::Result<GroupReport> {
    let engine = &models[0].engine.info();
    let device = ProfileStore::place_key(engine, Threads::Chosen(models[0].threads), None);
    let known = models.iter().map(predicted).collect::<anyhow::Result<Vec<_>>>()?;
    let on = SampledOn::new(device, models[0].threads, known);
    let mut writer = match &flags.samples {
        Some(path) => Some(GroupSamples::open(path, before.as_ref(), &on)?),
        None => None,
    };
    let mut groups = before.map_or_else(Vec::new, |before| before.groups);
    let sampled = models.iter().map(|model| sampled(model, batch, length)).collect::<anyhow::Result<Vec<_>>>()?;
    let all: Vec<usize> = (0..models.len()).collect();
    let sets: Vec<_> = (1..=flags.at_once(models.len())).flat_map(|count| sets_of(&all, count)).collect();
    let least = (FEWEST * sets.len()) as u64;
    let sampler = GroupSampler { models: sampled, sets };
    let clock = Clock::start();
    let subjects: Vec<_> = models.iter().map(|model| model.subject(length, clock)).collect();
    let mut lanes = GroupLanes::open(&subjects)?;
    let first = groups.len() as u64;
    let new = watched_quietly(|watch| {
        let (begin, mut new) = (clock.now(), Vec::new());
        for index in first.. {
            let share = clock.now().since(begin).as_secs_f64() / budget.as_secs_f64().max(f64::MIN_POSITIVE);
            let share = if index < least { share.min(index as f64 / least as f64) } else { share };
            let Some((_, group)) =
                sampler.group(index, downbeat_sim::random(SEED, index)).filter(|_| share < 1.0 && watch.goes_on(share))
            else {
                break;
            };
            let takes_ns = lanes.measure(&group, RUNS)?.as_nanos();
            let measured = MeasuredGroup { group, takes_ns };
            if let Some(writer) = &mut writer {
                writer.add(&measured)?;
            }
            new.push(measured);
        }
        anyhow::Ok(new)
    })?;
    groups.extend(new);
    let (stored, mut report) = train(on, &groups)?;
    report.conditions = models[0].conditions(length);
    if let Some(path) = &flags.predictor {
        stored.save(path)?;
        note(format_args!("the predictor is in {}", path.display()));
    }
    Ok(report)
}

/// The number of passes of a training: few samples are passed more often.
fn epochs(samples: usize) -> u32 {
    (200_000 / samples.max(1)).clamp(60, 400) as u32
}

/// Trains a predictor on four fifths of the groups, and tests it with the rest.
fn train(on: SampledOn, groups: &[MeasuredGroup]) -> anyhow::Result<(StoredPredictor, GroupReport)> {
    let at_once = groups.iter().map(|measured| measured.group.len()).max().unwrap_or(1);
    let layout = StoredPredictor::layout(&on.models, at_once);
    let (sets, samples) = samples_of(&layout, groups)?;
    ensure!(
        samples.len() >= FEWEST * sets.len().max(1),
        "{} groups were sampled, but a predictor of {} sets of models needs at least {}; let the command run to its \
         end, with --samples FILE to continue from earlier groups",
        samples.len(),
        sets.len().max(1),
        FEWEST * sets.len().max(1)
    );
    let Split { training, test } = Split::new(&samples, sets.len());
    let mlp = &train_mlp(&training, epochs(training.len()), downbeat_sim::random(SEED, TRAINING))?;
    let off = |tested: &[&GroupSample]| mean_error(tested.iter().copied(), |features| says(mlp, features));
    let report = |models: Vec<String>, tested: &[&GroupSample]| {
        let mean_ms = tested.iter().map(|sample| sample.takes_ms).sum::<f64>() / tested.len().max(1) as f64;
        SetReport { models, tested: tested.len(), mean_ms, error: off(tested) }
    };
    let of_set = |(number, set): (usize, &Vec<usize>)| {
        let tested: Vec<&GroupSample> = test.iter().copied().filter(|sample| sample.set == number).collect();
        report(set.iter().map(|model| on.models[*model].name.clone()).collect(), &tested)
    };
    let mut of_sets: Vec<SetReport> = sets.iter().enumerate().map(of_set).collect();
    of_sets.push(report(vec!["all".to_owned()], &test));
    let (error, mean_error) = (error_below(mlp, &test), off(&test));
    let mut points = vec![Vec::new(); at_once];
    for sample in &test {
        points[sets[sample.set].len() - 1].push((sample.takes_ms, says(mlp, &sample.features)));
    }
    let report = GroupReport {
        models: on.models.iter().map(|model| (model.name.clone(), model.segments)).collect(),
        conditions: String::new(),
        samples: training.len(),
        tested: test.len(),
        error,
        mean_error,
        sets: of_sets,
        points,
    };
    let SampledOn { device, threads, mut models, .. } = on;
    for part in groups.iter().flat_map(|measured| &measured.group) {
        let model = &mut models[part.model.0 as usize];
        model.most_rows = model.most_rows.max(part.rows);
        model.longest = model.longest.max(part.length);
    }
    let (samples, tested) = (training.len(), test.len());
    let training = Training { device, threads, models, error, mean_error, samples, tested };
    let predictor = LearnedPredictor::new(layout, mlp.clone())?;
    Ok((StoredPredictor::new(training, predictor).map_err(anyhow::Error::msg)?, report))
}
