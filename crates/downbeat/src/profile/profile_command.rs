//! `downbeat profile`: measures how long a model's batches take on this machine.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use downbeat_core::Duration;
use downbeat_engine::{Cut, ExecutorProgram, Isolated, LoadError};
use downbeat_engine_ort::Search;
use downbeat_host::request::batch_codec::PROFILED_LENGTH;
use downbeat_models::measure::mix_profiler;
use downbeat_models::measure::profile_store::{ProfileStore, StoredOperators, StoredProfile, StoredShares};
use downbeat_models::measure::profiler::{self, Measurement};
use downbeat_report::{Html, Json, note, out};
use downbeat_service::clock::Clock;
use downbeat_service::options::{EngineChoice, Isolation};

use crate::commands::engine_command::{engine_choice, engine_for};
use crate::options::resolve;
use crate::options::units::{self, BatchSizes, batch_sizes};
use crate::profile::mix_report::MixReport;
use crate::profile::profile_groups::{self, GroupFlags, SEGMENTS};
use crate::profile::profile_report::ProfileReport;
use crate::profile::profile_shares::{self, ShareFlags};
use crate::profile::profiled_model::{ModelWanted, ProfiledModel};
use crate::profile::share_report::ShareReport;
use crate::profile::watched::{watched, watched_quietly};

/// Measure how long batches of a model take, and print and plot the result.
#[derive(Args, Debug)]
pub struct ProfileArgs {
    /// The model
    #[arg(required_unless_present_any = ["list", "clear"])]
    model: Option<String>,
    /// List the profiles that the server has measured and kept, with the threads that it runs each
    /// model on
    #[arg(long, conflicts_with = "model")]
    list: bool,
    /// Delete the profiles that the server has kept: models are measured again when they are next
    /// loaded
    #[arg(long, conflicts_with_all = ["model", "list"])]
    clear: bool,
    /// Folder of the kept profiles [default: downbeat/profiles in the user's cache folder]
    #[arg(long, value_name = "FOLDER", env = "DOWNBEAT_PROFILE_CACHE")]
    profile_cache: Option<PathBuf>,
    /// Batch sizes: 8, 1..32, 1,2,4,8 [default: powers of two up to the model's largest batch]
    #[arg(long, value_name = "SIZES", value_parser = batch_sizes)]
    batch: Option<BatchSizes>,
    /// The model repository [default: `repository` of ./downbeat.toml, or else examples/models]
    #[arg(long, value_name = "REPOSITORY", env = "DOWNBEAT_MODEL_REPOSITORY")]
    repository: Option<PathBuf>,
    /// The model's version [default: the latest that is served]
    #[arg(long, value_name = "VERSION")]
    model_version: Option<u64>,
    /// Engine for ONNX models: auto, cuda, tensorrt, onnxruntime, rten or emulated
    #[arg(long, value_name = "ENGINE", env = "DOWNBEAT_ENGINE", default_value = "auto", value_parser = engine_choice(), hide_possible_values = true)]
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
    #[command(flatten)]
    json: Json,
    #[command(flatten)]
    html: Html,
    /// Measure which mix of lanes, running at once, answers soonest for each of these numbers of
    /// items [default: 4,8,16,32], for the device policy "elastic". One thread in each run, unless
    /// --threads is given
    #[arg(long, value_name = "ITEMS", num_args = 0..=1, default_missing_value = "4,8,16,32", value_parser = batch_sizes, conflicts_with_all = ["batch", "emulated"])]
    lane_mix: Option<BatchSizes>,
    /// Write the best mixes, in the form of downbeat.toml
    #[arg(long, value_name = "FILE", requires = "lane_mix")]
    mixes: Option<PathBuf>,
    /// Write a model for the emulated engine that takes as long (name it model.emulated.toml)
    #[arg(long, value_name = "FILE")]
    emulated: Option<PathBuf>,
    #[command(flatten)]
    shares: ShareFlags,
    #[command(flatten)]
    groups: GroupFlags,
}

/// Most items of all lanes that run at once while mixes are measured. Lanes of one item need as
/// many threads.
const MOST_LANES: u32 = 64;

/// Lists or deletes the profiles that the server has kept.
fn kept(store: &ProfileStore, clear: bool) -> anyhow::Result<()> {
    let Some(folder) = &store.folder else {
        bail!("no folder for profiles is known; give --profile-cache FOLDER, or set HOME");
    };
    let mut out = out();
    let cannot = |what| format!("cannot {what} the profiles in {}", folder.display());
    if clear {
        let files = store.clear().with_context(|| cannot("remove"))?;
        writeln!(out, "{files} files removed from {}", folder.display())?;
        return Ok(());
    }
    let profiles: Vec<StoredProfile> = store.list().with_context(|| cannot("read"))?;
    let cut: Vec<StoredOperators> = store.list().with_context(|| cannot("read"))?;
    if profiles.is_empty() && cut.is_empty() {
        writeln!(out, "no profiles in {}", folder.display())?;
    }
    for profile in profiles {
        let batch = |m: &Measurement| format!("batch {}: {}", m.batch, m.median());
        let ends = [profile.measurements.first(), profile.measurements.last()].map(|m| m.map_or(String::new(), batch));
        writeln!(
            out,
            "{}  {}  {}  {}  {}{}",
            profile.model.display(),
            profile.engine,
            units::threads(profile.threads),
            ends[0],
            ends[1],
            if profile.settled { "" } else { "  measured beside other work; the server will measure again" }
        )?;
    }
    for StoredOperators { model, engine, threads, operators } in cut {
        let (model, threads) = (model.display(), units::threads(threads));
        let (count, total) = (operators.operators(), operators.total());
        writeln!(out, "{model}  {engine}  {threads}  {count} operators, measured for cuts into stages: {total}")?;
    }
    Ok(())
}

/// Runs the command.
///
/// # Errors
/// If the model cannot be loaded or run, or a file cannot be written.
pub fn run(args: &ProfileArgs) -> anyhow::Result<()> {
    let Some(model) = &args.model else {
        return kept(&ProfileStore::new(args.profile_cache.clone()), args.clear);
    };
    let batch = args.batch.as_ref().map(|sizes| &*sizes.0);
    if !args.groups.co_run.is_empty() {
        return measure_groups(args, model, batch);
    }
    let cut = args.shares.segments.map_or(Cut::Whole, |segments| Cut::Stages(segments.into()));
    let profiled = load(args, model, args.model_version, batch, cut, None)?;
    if args.shares.shares.is_some() || args.shares.segments.is_some() {
        let mut out = args.json.text();
        let report = profile_shares::measure(&args.shares, &profiled, batch, args.length, args.budget, &mut out)?;
        keep_shares(&ProfileStore::new(args.profile_cache.clone()), &profiled, &report);
        args.json.write(&report)?;
        return args.html.write(|| report.page());
    }
    match &args.lane_mix {
        Some(BatchSizes(totals)) => measure_mixes(args, &profiled, totals),
        None => measure_batches(args, &profiled, batch),
    }
}

/// Keeps measurements on shares for the server, which divides devices by the knees, and for users
/// who plan a division.
fn keep_shares(store: &ProfileStore, profiled: &ProfiledModel, report: &ShareReport) {
    let info = profiled.engine.info();
    let key = ProfileStore::file_key(&profiled.file).map(|file| ProfileStore::shares_key(&file, &info));
    let (model, engine) = (profiled.file.clone(), info.name.to_owned());
    let ShareReport { knees, measurements, .. } = report.clone();
    if report.has_shares() {
        let shares = StoredShares { model, engine, knees, measurements };
        store.keep(key.map_err(|error| error.to_string()), "the latency by share", &shares);
    }
}

/// Loads a model for measuring with batches up to the last of `sizes`. It runs on the engine of
/// `beside` if that engine is for the model's format.
fn load(
    args: &ProfileArgs,
    name: &str,
    version: Option<u64>,
    sizes: Option<&[u32]>,
    cut: Cut,
    beside: Option<&ProfiledModel>,
) -> anyhow::Result<ProfiledModel> {
    // If lanes run side by side, they use the cores, and each run has one thread.
    let has_company = args.lane_mix.is_some() || !args.groups.co_run.is_empty();
    let threads = if has_company && args.threads == 0 { 1 } else { units::threads_of(args.threads) };
    let repository = resolve::open_repository(name, args.repository.as_deref(), &std::env::current_dir()?)?;
    let largest_batch = sizes.and_then(|sizes| sizes.last().copied()).unwrap_or(32);
    let wanted = ModelWanted { repository, name, version, largest_batch, cut, threads };
    ProfiledModel::load(wanted, |format| match beside {
        Some(beside) if beside.format == format => Ok(beside.engine.clone()),
        _ => {
            let engine = engine_for(format, args.engine, &Search::from_env())?;
            Ok(match args.groups.isolation {
                Isolation::None | Isolation::Auto => engine,
                Isolation::Process => Arc::new(Isolated::new(engine, threads, ExecutorProgram::default())?),
            })
        }
    })
}

/// Measures the latency of the model's batches.
fn measure_batches(args: &ProfileArgs, profiled: &ProfiledModel, batch: Option<&[u32]>) -> anyhow::Result<()> {
    let sizes = profiled.sizes(batch, profiler::default_sizes)?;
    let info = profiled.engine.info();
    let mut report = ProfileReport {
        model: profiled.name.clone(),
        version: profiled.version,
        engine: info.name.to_owned(),
        engine_version: info.version,
        device: info.device,
        threads: profiled.threads,
        length: profiled.length(args.length),
        measurements: Vec::new(),
    };
    let mut out = args.json.text();
    write!(out, "{}", report.header())?;
    let (subject, mut lane) = (profiled.subject(args.length, Clock::start()), profiled.model.lane()?);
    report.measurements =
        watched(&mut out, ProfileReport::row, |watch| subject.measure(&mut *lane, &sizes, args.budget, watch))?;
    write!(out, "{}", report.summary())?;
    args.json.write(&report)?;
    args.html.write(|| report.page())?;
    let Some(file) = &args.emulated else { return Ok(()) };
    downbeat_report::write(file, &report.emulated_model(profiled.model.signature())?)
}

/// Measures groups of operators of several models, and trains a predictor of their time.
fn measure_groups(args: &ProfileArgs, model: &str, batch: Option<&[u32]>) -> anyhow::Result<()> {
    let (names, before) = args.groups.begin(model)?;
    let mut models: Vec<ProfiledModel> = Vec::new();
    for name in &names {
        let known = before.iter().flat_map(|before| &before.on.models).find(|known| known.name == *name);
        let load = |cut| {
            let version = args.model_version.filter(|_| name == model);
            load(args, name, version, batch, cut, models.first())
        };
        let loaded = match known {
            Some(known) => load(known.cut()),
            None => load_cut(name, args.shares.segments.unwrap_or(SEGMENTS), load),
        };
        models.push(loaded?);
    }
    let report = profile_groups::measure(&args.groups, &models, before, (batch, args.length, args.budget))?;
    args.json.print(&report)?;
    args.html.write(|| report.page())
}

/// Loads a model cut into this number of segments, or into fewer if it cannot be cut at so many
/// places.
fn load_cut(
    name: &str,
    mut segments: u16,
    load: impl Fn(Cut) -> anyhow::Result<ProfiledModel>,
) -> anyhow::Result<ProfiledModel> {
    loop {
        let cut = if segments > 1 { Cut::Stages(segments.into()) } else { Cut::Whole };
        match load(cut) {
            Err(error) if segments > 1 && matches!(error.downcast_ref(), Some(LoadError::Model { .. })) => {
                segments /= 2;
                note(format_args!(
                    "'{name}' is now cut into at most {segments} segments, because the load with more failed: {error}"
                ));
            }
            loaded => return loaded,
        }
    }
}

/// The offline phase of E-Ebird (E²bird §7.3.2).
fn measure_mixes(args: &ProfileArgs, profiled: &ProfiledModel, totals: &[u32]) -> anyhow::Result<()> {
    let ProfiledModel { name, max_batch, .. } = profiled;
    if *max_batch == 0 {
        bail!("'{name}' has no batch dimension: there is no mix of batch sizes to choose");
    }
    if let Some(total) = totals.iter().find(|total| **total > MOST_LANES) {
        bail!("{total} items are too many: at most {MOST_LANES} lanes can be measured at once");
    }
    let subject = profiled.subject(args.length, Clock::start());
    let loads = watched_quietly(|watch| mix_profiler::measure(&subject, totals, *max_batch, args.budget, watch))?;
    let report = MixReport { model: name.clone(), subject: profiled.conditions(args.length), loads };
    if let Some(file) = &args.mixes {
        downbeat_report::write(file, &report.mixes())?;
    }
    args.json.print(&report)?;
    args.html.write(|| report.page())
}
