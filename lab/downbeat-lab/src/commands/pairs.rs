//! `downbeat-lab pairs`: measures how long the batches of two models take at the same time.

use anyhow::ensure;
use clap::Args;
use downbeat::device_units;
use downbeat::options::units::{self, BatchSizes, batch_sizes};
use downbeat::profile::profiled_model::{ModelWanted, ProfiledModel};
use downbeat::profile::watched::watched_quietly;
use downbeat_core::Duration;
use downbeat_engine::Cut;
use downbeat_host::request::batch_codec::PROFILED_LENGTH;
use downbeat_models::measure::pair_profiler;
use downbeat_models::measure::profiler::few_sizes;
use downbeat_report::{Html, Json};
use downbeat_service::clock::Clock;

use super::loading::Loading;
use crate::pair_report::PairReport;

/// Measure two models that run at the same time, and each alone (Abacus figure 3).
#[derive(Args, Debug)]
pub struct PairArgs {
    /// Model A.
    model: String,

    /// Model B.
    other: String,

    /// Batch sizes of A: 8, 1..32, 1,2,4,8 [default: 1, 4 and 16, up to the model's largest batch].
    #[arg(long, value_name = "SIZES", value_parser = batch_sizes)]
    batch: Option<BatchSizes>,

    /// Batch sizes of B [default: as for A].
    #[arg(long, value_name = "SIZES", value_parser = batch_sizes)]
    other_batch: Option<BatchSizes>,

    /// Give A this many compute units of the GPU, and B the rest [default: both share all].
    #[arg(long, value_name = "UNITS", value_parser = clap::value_parser!(u32).range(1..))]
    split: Option<u32>,

    /// Threads inside one run.
    #[arg(long, value_name = "N", env = "DOWNBEAT_THREADS", default_value_t = 1)]
    threads: usize,

    /// Length of dimensions that vary.
    #[arg(long, value_name = "N", default_value_t = PROFILED_LENGTH, value_parser = clap::value_parser!(i64).range(1..=65536))]
    length: i64,

    /// Time to spend, all pairs of sizes together.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = units::parse_seconds)]
    budget: Duration,

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
/// If a model cannot be loaded or run, the device cannot be split this way, or a file cannot be
/// written.
pub fn run(args: &PairArgs) -> anyhow::Result<()> {
    let model = load(args, &args.model, &args.batch, None)?;
    let other = load(args, &args.other, &args.other_batch, Some(&model))?;
    let report = measure(args, [&model, &other])?;
    args.html.write(|| report.page())?;
    args.json.print(&report)
}

/// Loads a model, on the engine of `beside` if that engine is for the model's format.
fn load(
    args: &PairArgs,
    name: &str,
    sizes: &Option<BatchSizes>,
    beside: Option<&ProfiledModel>,
) -> anyhow::Result<ProfiledModel> {
    let largest = sizes.as_ref().and_then(|sizes| sizes.0.last().copied());
    let wanted = ModelWanted {
        repository: args.loading.repository(name)?,
        name,
        version: None,
        largest_batch: largest.unwrap_or(32),
        cut: Cut::Whole,
        threads: units::threads_of(args.threads),
    };
    ProfiledModel::load(wanted, |format| match beside {
        Some(beside) if beside.format == format => Ok(beside.engine.clone()),
        _ => args.loading.engine(format, 0),
    })
}

/// Sizes for the pairs: at most three, up to 16.
fn sizes(max_batch: u32) -> Vec<u32> {
    few_sizes(max_batch.min(16))
}

/// Measures all pairs of batch sizes.
fn measure(args: &PairArgs, models: [&ProfiledModel; 2]) -> anyhow::Result<PairReport> {
    let [model, other] = models;
    let asked = |sizes: &'_ Option<BatchSizes>| sizes.as_ref().map(|sizes| sizes.0.clone());
    let firsts = model.sizes(asked(&args.batch).as_deref(), sizes)?;
    let seconds = other.sizes(asked(&args.other_batch).as_deref(), sizes)?;
    let device = device_units(&*model.engine);
    let split = match args.split {
        Some(asked) => {
            let device = device?;
            let units = asked.next_multiple_of(device.grain);
            ensure!(
                units <= device.largest_part,
                "--split {asked}: the GPU has {} compute units in steps of {}, of which some have to be left for '{}'",
                device.units,
                device.grain,
                other.name
            );
            Some([units, device.units - units])
        }
        None => None,
    };
    let pairs: Vec<[u32; 2]> = firsts.iter().flat_map(|a| seconds.iter().map(|b| [*a, *b])).collect();
    let clock = Clock::start();
    let subjects = [model.subject(args.length, clock), other.subject(args.length, clock)];
    let first = split.map(|units| units[0]);
    let measured =
        watched_quietly(|watch| pair_profiler::measure(subjects.each_ref(), 0, &pairs, first, args.budget, watch))?;
    Ok(PairReport {
        models: models.map(|model| model.name.clone()),
        on: model.on(),
        conditions: model.conditions(args.length),
        device: device_units(&*model.engine).ok(),
        split,
        pairs: measured,
    })
}
