//! `downbeat-lab slice`: shows the cuts of a model into segments, and their cost.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use downbeat::options::units;
use downbeat::profile::watched::watched_quietly;
use downbeat_core::tensor::Signature;
use downbeat_core::{Duration, median};
use downbeat_engine::{Buffer, Cut, Fill, Lane, LoadOptions, State, Tensor};
use downbeat_models::measure::sampler;
use downbeat_report::{Html, Json};
use downbeat_repository::ModelFormat;
use downbeat_service::clock::Clock;

use super::loading::Loading;
use super::slice_report::{Memory, SliceReport};

/// Longest time for comparing whole and cut.
const BUDGET: Duration = Duration::from_millis(20_000);
/// Least and most pairs of runs, one whole and one cut in turns.
const PAIRS: [usize; 2] = [5, 200];

/// Cut a model into segments, and show the cuts and their cost.
#[derive(Args, Debug)]
pub struct SliceArgs {
    /// The model: its name in the repository, or an ONNX file
    model: String,
    /// Number of segments, of about equal time
    #[arg(long, value_name = "N", required_unless_present = "at", conflicts_with = "at")]
    stages: Option<usize>,
    /// Cut behind these values or operators
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    at: Vec<String>,
    /// Batch size for comparing whole and cut
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Length of dimensions that vary, for that comparison
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    length: u16,
    /// Threads inside one run; 0: one a core
    #[arg(long, value_name = "N", env = "DOWNBEAT_THREADS", default_value_t = 0)]
    threads: usize,
    #[command(flatten)]
    loading: Loading,
    #[command(flatten)]
    json: Json,
    #[command(flatten)]
    html: Html,
}

/// Runs the command.
///
/// # Errors
/// If the model cannot be loaded, cut or run, or a file cannot be written.
pub fn run(args: &SliceArgs) -> anyhow::Result<()> {
    let (file, format) = file(args)?;
    let threads = units::threads_of(args.threads);
    let engine = args.loading.engine(format, threads)?;
    let cut = match args.stages {
        Some(stages) => Cut::Stages(stages),
        None => Cut::At(args.at.clone()),
    };
    let start = resident();
    let whole = engine.load(&LoadOptions::new(&file, threads))?;
    let batch = inputs(whole.signature(), args)?;
    let mut whole_lane = whole.lane()?;
    let mut run_whole = || once(&mut *whole_lane, 1, &batch);
    run_whole()?;
    let after_whole = resident();
    let model = engine.load(&LoadOptions::new(&file, threads).with_cut(cut))?;
    let mut lane = model.lane()?;
    let segments = model.segments();
    let mut run_cut = || once(&mut *lane, segments, &batch);
    run_cut()?;
    let after_cut = resident();
    let (whole_ms, cut_ms) = compare(run_whole, run_cut)?;

    let info = engine.info();
    let report = SliceReport {
        model: args.model.clone(),
        engine: info.name.to_owned(),
        engine_version: info.version,
        threads,
        batch: args.batch,
        segments: model.segment_info().iter().map(Into::into).collect(),
        whole_ms,
        cut_ms,
        ratio: cut_ms / whole_ms,
        activations: model.activations().cloned(),
        memory: match (start, after_whole, after_cut) {
            (Some(start), Some(whole), Some(cut)) => {
                Some(Memory { whole: whole.saturating_sub(start), cut: cut.saturating_sub(whole) })
            }
            _ => None,
        },
    };
    args.html.write(|| report.page())?;
    args.json.print(&report)
}

/// The model's file: the named file, or the file of the latest version in the repository.
fn file(args: &SliceArgs) -> anyhow::Result<(PathBuf, ModelFormat)> {
    let path = Path::new(&args.model);
    if path.extension().is_some_and(|e| e == "onnx") {
        return Ok((path.to_owned(), ModelFormat::Onnx));
    }
    let definition = args.loading.repository(&args.model)?.definition(&args.model, None)?;
    let Some((version, _)) = definition.versions.last() else {
        bail!("model '{}' has no version that is served", args.model)
    };
    let file =
        definition.version_file(*version).with_context(|| format!("model '{}' has no model file", args.model))?;
    Ok((file.to_owned(), definition.format))
}

/// A batch of ones.
fn inputs(signature: &Signature, args: &SliceArgs) -> anyhow::Result<Vec<Tensor>> {
    let tensor = |spec: &downbeat_core::tensor::TensorSpec| {
        let shape = downbeat_engine::tensor::shape(spec, args.batch.into(), args.length.into());
        let count = downbeat_engine::tensor::elements(&shape).filter(|n| *n < 1 << 30);
        let count = count.with_context(|| format!("input '{}': shape {shape:?} is too large", spec.name))?;
        let mut data = Buffer::new();
        Fill::Ones.write(&spec.name, spec.datatype, count, &mut data);
        Ok(Tensor { datatype: spec.datatype, shape, data })
    };
    signature.inputs.iter().map(tensor).collect()
}

/// Runs all segments, one after the other.
fn once(lane: &mut dyn Lane, segments: usize, batch: &[Tensor]) -> anyhow::Result<()> {
    let copy =
        |t: &Tensor| Tensor { datatype: t.datatype, shape: t.shape.clone(), data: Buffer::from(t.data.as_slice()) };
    let mut state = State { tensors: batch.iter().map(copy).collect() };
    for segment in 0..segments {
        lane.run(segment..segment + 1, &mut state)?;
    }
    Ok(())
}

/// The medians of both, milliseconds. They run in turns, so that other work of the machine disturbs
/// both alike.
fn compare(
    mut whole: impl FnMut() -> anyhow::Result<()>,
    mut cut: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<(f64, f64)> {
    let clock = Clock::start();
    let timed = |run: &mut dyn FnMut() -> anyhow::Result<()>| {
        let start = clock.now();
        run()?;
        anyhow::Ok(clock.now().since(start))
    };
    let [least, most] = PAIRS;
    let compared = watched_quietly(|watch| {
        sampler::each(clock, BUDGET, [()], watch, |(), turn| {
            turn.in_turns([least, least, most], || timed(&mut whole), || timed(&mut cut))
        })
    })?;
    let medians = compared.into_iter().next().map(|runs| runs.map(median));
    let Some([Some(whole), Some(cut)]) = medians else {
        bail!("the command was interrupted before whole and cut were measured")
    };
    Ok((whole.as_millis_f64(), cut.as_millis_f64()))
}

/// Resident memory of this process in bytes, if the system reports it.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}
