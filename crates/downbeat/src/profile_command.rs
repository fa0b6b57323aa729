//! `downbeat profile`: how long a model's batches take on this machine.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use downbeat_core::Duration;
use downbeat_engine::{LoadOptions, Search};
use downbeat_repository::ModelRepository;
use downbeat_server::clock::Clock;
use downbeat_server::loader::PROFILED_LENGTH;
use downbeat_server::mix_profiler;
use downbeat_server::options::EngineChoice;
use downbeat_server::plan::BatchPlan;
use downbeat_server::profiler::{self, Measurement};
use indicatif::{ProgressBar, ProgressStyle};

use crate::engine_command::engine_for;
use crate::mix_report::MixReport;
use crate::profile_report::ProfileReport;
use crate::units;

/// Measure how long batches of a model take, and print and plot it.
#[derive(Args, Debug)]
pub struct ProfileArgs {
    /// The model
    model: String,
    /// Batch sizes: 8, 1..32, 1,2,4,8 [default: powers of two up to the model's largest batch]
    #[arg(long, value_name = "SIZES", value_parser = batch_sizes)]
    batch: Option<BatchSizes>,
    /// The model repository
    #[arg(long, value_name = "REPOSITORY", env = "DOWNBEAT_MODEL_REPOSITORY", default_value = "examples/models")]
    repository: PathBuf,
    /// The model's version [default: the latest that is served]
    #[arg(long, value_name = "VERSION")]
    model_version: Option<u64>,
    /// Engine for ONNX models: auto, cuda, tensorrt, onnxruntime, rten or emulated
    #[arg(long, value_name = "ENGINE", env = "DOWNBEAT_ENGINE", default_value = "auto")]
    engine: EngineChoice,
    /// Threads inside one run; 0: one a core
    #[arg(long, value_name = "N", env = "DOWNBEAT_THREADS", default_value_t = 0)]
    threads: usize,
    /// Length of dimensions that vary
    #[arg(long, value_name = "N", default_value_t = PROFILED_LENGTH, value_parser = clap::value_parser!(i64).range(1..=65536))]
    length: i64,
    /// Time to spend, all batch sizes together
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = units::parse_seconds)]
    budget: Duration,
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with the table and plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Measure which mix of lanes, running at once, answers soonest for each of these numbers of items [default: 4,8,16,32], for
    /// the device policy "elastic". One thread in each run, unless --threads says otherwise
    #[arg(long, value_name = "ITEMS", num_args = 0..=1, default_missing_value = "4,8,16,32", value_parser = batch_sizes, conflicts_with_all = ["batch", "emulated"])]
    worker_mix: Option<BatchSizes>,
    /// Write the best mixes, as downbeat.toml takes them
    #[arg(long, value_name = "FILE", requires = "worker_mix")]
    mixes: Option<PathBuf>,
    /// Write a model for the emulated engine that takes as long (call it model.emulated.toml)
    #[arg(long, value_name = "FILE")]
    emulated: Option<PathBuf>,
}

/// Most items of all lanes that run at once while mixes are measured: there are as many threads.
const MOST_LANES: u32 = 64;

/// A list that clap takes for one value.
#[derive(Clone, Debug)]
struct BatchSizes(Vec<u32>);

fn batch_sizes(text: &str) -> Result<BatchSizes, String> {
    units::batch_sizes(text).map(BatchSizes)
}

/// Runs the command.
///
/// # Errors
/// If the model cannot be loaded or run, or a file cannot be written.
pub fn run(args: &ProfileArgs) -> anyhow::Result<()> {
    let largest_wanted = args.batch.as_ref().and_then(|b| b.0.last().copied()).unwrap_or(32);
    // A model that does not say how far it batches is batched as far as is asked for.
    let repository = ModelRepository::open(&args.repository)?.with_default_max_batch_size(largest_wanted);
    let mut definition = repository.definition(&args.model, None)?;
    for warning in &definition.warnings {
        eprintln!("warning: {warning}");
    }
    let version = match args.model_version {
        Some(version) => version,
        None => definition.versions.last().map_or(1, |(version, _)| *version),
    };
    let Some(file) = definition.version_file(version).map(Path::to_owned) else {
        let served: Vec<String> = definition.versions.iter().map(|(v, _)| v.to_string()).collect();
        bail!("'{}' has no version {version} that is served (there is: {})", args.model, served.join(", "));
    };
    let engine = engine_for(definition.format, args.engine, &Search::from_env())?;
    let threads = match args.threads {
        // Lanes side by side are what uses the cores then.
        0 if args.worker_mix.is_some() => 1,
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let model = engine.load(&LoadOptions::new(file, threads))?;
    definition.complete(model.signature())?;
    let max_batch = definition.batching.max_batch_size;
    let sizes = match &args.batch {
        Some(BatchSizes(sizes)) if largest_wanted <= max_batch.max(1) => sizes.clone(),
        Some(_) if max_batch == 0 => bail!("'{}' has no batch dimension: only --batch 1 can be measured", args.model),
        Some(_) => {
            bail!("'{}' takes batches of up to {max_batch} (max_batch_size), {largest_wanted} is asked for", args.model)
        }
        None => profiler::default_sizes(max_batch),
    };
    let plan = BatchPlan::new(definition.inputs.clone(), definition.outputs.clone(), max_batch);
    let varying = plan.has_varying_shapes().then_some(args.length);
    let subject = profiler::Subject { model: &*model, plan: &plan, varying: args.length, clock: Clock::start() };
    let info = engine.info();
    if let Some(BatchSizes(totals)) = &args.worker_mix {
        let subject_text = format!(
            "{} {} on {}, threads a run: {threads}{}",
            info.name,
            info.version,
            info.device,
            varying.map_or_else(String::new, |n| format!(", varying dimensions {n}"))
        );
        return measure_mixes(args, &subject, totals, max_batch, subject_text);
    }
    let mut report = ProfileReport {
        model: args.model.clone(),
        version,
        engine: info.name.to_owned(),
        engine_version: info.version,
        device: info.device,
        threads,
        length: varying,
        measurements: Vec::new(),
    };
    let mut out = std::io::stdout().lock();
    write!(out, "{}", report.header())?;
    let mut lane = model.lane()?;
    let mut broken = None;
    report.measurements = subject.measure(&mut *lane, &sizes, args.budget, |measurement: Measurement| {
        // A line as soon as it is known: large batches of large models take their time.
        if let Err(e) = write!(out, "{}", ProfileReport::row(&measurement)).and_then(|()| out.flush()) {
            broken = Some(e);
        }
    })?;
    match broken {
        Some(e) if e.kind() != std::io::ErrorKind::BrokenPipe => return Err(e.into()),
        Some(_) => {}
        None => write!(out, "{}", report.summary())?,
    }
    write(&args.json, &|| Ok(serde_json::to_string_pretty(&report)? + "\n"))?;
    write(&args.html, &|| Ok(report.page()))?;
    write(&args.emulated, &|| report.emulated_model(model.signature()))
}

/// Writes a file that was asked for.
fn write(file: &Option<PathBuf>, text: &dyn Fn() -> anyhow::Result<String>) -> anyhow::Result<()> {
    let Some(file) = file else { return Ok(()) };
    std::fs::write(file, text()?).with_context(|| format!("cannot write {}", file.display()))
}

/// The offline phase of E-Ebird (E²bird §7.3.2).
fn measure_mixes(
    args: &ProfileArgs,
    subject: &profiler::Subject<'_>,
    totals: &[u32],
    max_batch: u32,
    subject_text: String,
) -> anyhow::Result<()> {
    if max_batch == 0 {
        bail!("'{}' has no batch dimension: there is no mix of batch sizes to choose", args.model);
    }
    if let Some(total) = totals.iter().find(|total| **total > MOST_LANES) {
        bail!("{total} items are too many: up to {MOST_LANES} lanes can be measured at once");
    }
    let count = mix_profiler::count(totals, max_batch);
    let bar = ProgressBar::new(count as u64);
    let style = ProgressStyle::with_template("{pos:>4}/{len} mixes {bar:30} {msg}").map_err(anyhow::Error::msg)?;
    bar.set_style(style);
    let loads = mix_profiler::measure(subject, totals, max_batch, args.budget, |total, mix| {
        bar.set_message(format!("{total} items: {mix}"));
        bar.inc(1);
    });
    bar.finish_and_clear();
    let report = MixReport { model: args.model.clone(), subject: subject_text, loads: loads? };
    write!(std::io::stdout().lock(), "{}", report.table())?;
    write(&args.mixes, &|| Ok(report.mixes()))?;
    write(&args.json, &|| Ok(serde_json::to_string_pretty(&report)? + "\n"))?;
    write(&args.html, &|| Ok(report.page()))
}
