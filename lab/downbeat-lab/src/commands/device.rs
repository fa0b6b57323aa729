//! `downbeat-lab device` and `downbeat-lab figure`: policies of one device under virtual time.

use std::path::PathBuf;

use crate::device::{
    CalibratedDevice, Calibration, DeviceLoad, DevicePolicyName, DeviceReport, DeviceSimulation, EmulatedModel, Figure,
    FigureOptions, Glue, Platform, Tuning, best_mixes, peak, tune_staging, tune_window, with_staging,
};
use anyhow::{Context, bail};
use clap::Args;
use downbeat_core::Duration;
use downbeat_core::device::{MOST_AHEAD, Tried};
use downbeat_report::{Html, Json, note, out, show};
use downbeat_sim::Arrivals;

use super::read_text;
use downbeat::run_output::RunOutput;

/// Run a device policy on an emulated device: one model, Poisson arrivals, every decision checked.
///
/// The device is a paper's, with its library. A model is the list of its operators. Batches that
/// run at once slow each other down, and copies take time. A run follows from its seed.
///
/// Examples:
///   downbeat-lab device --model resnet152 --policy n-ebird --rate 200
///   downbeat-lab device --model bertlarge --policy dvabatch --stages 2 --rate 100 --html timeline.html
///   downbeat-lab device --model resnet50 --policy opt-wait --tune-window --peak
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct DeviceArgs {
    /// resnet50, resnet101, resnet152, vgg16, vgg19, alexnet, mobilenet, inceptionv3, inceptionv4,
    /// unet, linknet, bertbase or bertlarge; with --calibration a model of that file.
    #[arg(long, value_name = "NAME")]
    model: String,

    /// File of a device and its models, as `downbeat-lab calibrate` writes it, in place of a
    /// platform.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["platform", "batch_overhead_ms"])]
    calibration: Option<PathBuf>,

    /// Compute units of that device that the model gets [default: all].
    #[arg(long, value_name = "N", requires = "calibration", value_parser = clap::value_parser!(u32).range(1..))]
    units: Option<u32>,

    #[arg(long, value_name = "NAME", help = policy_help())]
    policy: String,

    /// Requests a second.
    #[arg(long, value_name = "N", required_unless_present = "peak", allow_negative_numbers = true)]
    rate: Option<f64>,

    /// Find the highest rate at which 99% are answered within the target, and show the run at that
    /// rate.
    #[arg(long, conflicts_with = "rate")]
    peak: bool,

    /// The target: milliseconds from a request's arrival to its answer.
    #[arg(long, default_value_t = 200.0, value_name = "MS", allow_negative_numbers = true)]
    qos_ms: f64,

    /// Requests of the run; the first tenth does not count.
    #[arg(long, default_value_t = 6_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    requests: u64,

    /// Seed of all random numbers.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// How requests arrive: poisson, constant, or gamma:K.
    #[arg(long, default_value = "poisson", value_name = "KIND")]
    arrivals: Arrivals,

    /// Lengths of requests of a model that has them: cola, sst-2, sts-b, qnli, mrpc or rte.
    #[arg(long, default_value = "rte", value_name = "NAME")]
    lengths: Glue,

    /// titan-cudnn, titan-tensorrt, v100-tensorrt or a100-cudnn [default: the platform of the
    /// policy's paper]
    #[arg(long, value_name = "NAME")]
    platform: Option<Platform>,

    /// The serving system's time for a batch that it brings from the host [default: the platform's,
    /// 1 or 0.2 ms]
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    batch_overhead_ms: Option<f64>,

    /// The largest batch, and the most items that run at once [default: as in the policy's paper,
    /// 32 or 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    max_batch: Option<u32>,

    /// Stages of equal time that the model is cut into [default: 2 for BERT and 4 for others with
    /// dvabatch, else the policy's number]
    #[arg(long, value_name = "N")]
    stages: Option<usize>,

    /// Search the number of stages (8 tries), the pairs of buffers and the rule of joining with the
    /// highest peak of dvabatch first.
    #[arg(long, conflicts_with_all = ["stages", "pairs"])]
    tune_stages: bool,

    /// How long a request may wait for a batch with opt-wait and static [default: 32% of the
    /// largest batch's time]
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    window_ms: Option<f64>,

    /// Search the window with the highest peak first.
    #[arg(long, conflicts_with = "window_ms")]
    tune_window: bool,

    /// How many batches no-wait, opt-wait and static make while one runs. No later request joins
    /// these. Today's Triton has 0, Triton until 22.01 has 1.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=i64::from(MOST_AHEAD)))]
    ahead: u32,

    /// Pairs of buffers of dvabatch.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pairs: u16,

    #[command(flatten)]
    json: Json,

    /// Write a timeline of lanes and copies to this file.
    #[command(flatten)]
    html: Html,

    /// The part of the run that the timeline shows: milliseconds from the start.
    #[arg(long, default_value = "0,500", value_name = "FROM,TO", value_delimiter = ',')]
    shown_ms: Vec<f64>,
}

/// Repeat a table or figure of a paper on the emulated device.
///
/// Without a name it lists the figures.
#[derive(Args, Debug)]
pub struct FigureArgs {
    /// Name of the figure, such as e2bird-14.
    name: Option<String>,

    /// Seed of all random numbers.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// Requests of each run, where the paper does not say how many.
    #[arg(long, default_value_t = 6_000, value_name = "N", value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    requests: u64,

    #[command(flatten)]
    output: RunOutput,
}

/// The longest duration that a flag may name: a day.
const MOST_MS: f64 = 86_400_000.0;

fn milliseconds(flag: &str, value: f64, least: f64) -> anyhow::Result<Duration> {
    if !(least..=MOST_MS).contains(&value) {
        bail!("{flag} is {value}; it has to be from {least} to {MOST_MS} milliseconds (a day)");
    }
    Ok(Duration::from_millis_f64(value))
}

/// Returns the model in one piece on its device, and the device's name.
fn emulated(args: &DeviceArgs, of_dvabatch: bool) -> anyhow::Result<(EmulatedModel, String)> {
    if let Some(file) = &args.calibration {
        let named = || format!("--calibration {}", file.display());
        let text = read_text(file)?;
        let calibration = Calibration::read(&text).with_context(named)?;
        let model = calibration.model(&args.model, args.units).with_context(named)?;
        let CalibratedDevice { name, units, .. } = calibration.device;
        let device = match args.units {
            Some(part) if part < units => format!("{part} of {units} units of {name}"),
            _ => name,
        };
        return Ok((model, device));
    }
    let mut platform =
        args.platform.unwrap_or(if of_dvabatch { Platform::TITAN_TENSORRT } else { Platform::TITAN_CUDNN });
    if let Some(overhead) = args.batch_overhead_ms {
        platform.batch_overhead = milliseconds("--batch-overhead-ms", overhead, 0.0)?;
    }
    Ok((EmulatedModel::new(args.model.parse()?, platform), platform.name.to_owned()))
}

fn policy_help() -> String {
    let names = DevicePolicyName::all().map(DevicePolicyName::name).collect::<Vec<_>>().join(", ");
    format!("{names}; zerobatch and delaybatch are no-wait and opt-wait on DVABatch's platform")
}

/// Runs the simulation and prints its report.
///
/// # Errors
/// If the command line is wrong, or a result cannot be written.
pub fn run(args: &DeviceArgs) -> anyhow::Result<()> {
    let policy: DevicePolicyName = args.policy.parse()?;
    let of_dvabatch =
        policy == DevicePolicyName::DvaBatch || ["zerobatch", "delaybatch"].contains(&args.policy.as_str());
    let (model, device) = emulated(args, of_dvabatch)?;
    let model = model.cut(args.stages.unwrap_or_else(|| policy.stages(&model)))?;
    let qos = milliseconds("--qos-ms", args.qos_ms, 0.001)?;
    let [from, to] = args.shown_ms[..] else { bail!("--shown-ms takes two numbers, such as 0,500") };
    let (from, to) = (milliseconds("--shown-ms", from, 0.0)?, milliseconds("--shown-ms", to, 0.0)?);
    let rate = args.rate.unwrap_or(1.0);
    let lengths = model.has_length().then_some(args.lengths);
    let load = DeviceLoad { arrivals: args.arrivals, ..DeviceLoad::steady(rate, args.requests, lengths) };
    let mut simulation = DeviceSimulation::new(model, load, qos, args.seed);
    let mut tuning = Tuning::new(&simulation.model, args.max_batch.unwrap_or(if of_dvabatch { 64 } else { 32 }))?;
    tuning.diversity.pairs = args.pairs;
    tuning.ahead = args.ahead;
    if let Some(window) = args.window_ms {
        tuning.window = milliseconds("--window-ms", window, 0.0)?;
    }
    if args.tune_window {
        tuning.window = tune_window(&simulation, &tuning)?.chosen.unwrap_or(tuning.window);
        note(format_args!("window: {}", tuning.window));
    }
    if args.tune_stages {
        let tuned = tune_staging(&simulation, &tuning)?;
        for Tried { choice, peak, mean_ms } in tuned.tried {
            let high = mean_ms.map_or(String::new(), |ms| format!(", {ms:.2} ms at 9/10 of the best"));
            note(format_args!("{choice}: {peak:.1}/s{high}"));
        }
        let Some(staging) = tuned.chosen else {
            bail!("{} holds no load within {qos}, in any number of stages", args.model)
        };
        note(format_args!("chosen: {staging}"));
        (simulation, tuning) = with_staging(staging, &simulation, &tuning)?;
    }
    if policy == DevicePolicyName::EEbird {
        tuning.mixes = best_mixes(&simulation.model, tuning.max_batch);
    }
    if args.peak {
        let found = peak(&simulation, &|| tuning.policy(policy))?;
        let Some(found) = found else {
            bail!("{} with {policy} answers 99% within {qos} at no rate at all", args.model)
        };
        simulation.load.rate = found.rate;
    }
    simulation.record = args.html.html.is_some();
    let report = simulation.run(tuning.policy(policy)?)?;
    let title = format!("{} with {policy} at {:.1}/s on {}", args.model, simulation.load.rate, device);
    args.html.write(|| report.timeline(&title, from, to, qos))?;
    show(&mut args.json.text(), &text(&title, &report, qos))?;
    args.json.write(&report)
}

fn text(title: &str, report: &DeviceReport, qos: Duration) -> String {
    format!(
        "{title}\n\
         requests    {} answered of {}, {} refused, {} given up, {} later than {qos}\n\
         latency     mean {:.2} ms, p50 {:.2}, p99 {:.2}, max {:.2}\n\
         throughput  {:.1}/s\n\
         units       {:.1}% used\n\
         launches    {}, of {} batches with {:.1} items; {:.0}% of what was computed is padding\n\
         changes     {} stretches, {} splits, {} exits, {} switches\n\
         ring        at most {} slots, {} requests found no room\n",
        report.answered,
        report.requests,
        report.rejected,
        report.dropped,
        report.late,
        report.mean_ms,
        report.p50_ms,
        report.p99_ms,
        report.max_ms,
        report.throughput,
        report.utilisation * 100.0,
        report.launches,
        report.batches,
        report.mean_batch,
        report.padding * 100.0,
        report.stretches,
        report.splits,
        report.exits,
        report.switches,
        report.most_slots,
        report.ring_full,
    )
}

/// Makes the figure and prints its table.
///
/// # Errors
/// If there is no such figure, or it cannot be written.
pub fn figure(args: &FigureArgs) -> anyhow::Result<()> {
    let Some(name) = &args.name else {
        let names = Figure::names().map(|(name, shows)| format!("{name:<16}{shows}\n"));
        return show(&mut out(), &names.collect::<String>());
    };
    let FigureArgs { seed, requests, output, .. } = args;
    let figure = Figure::make(name, &FigureOptions { seed: *seed, requests: *requests, threads: output.threads() })?;
    output.html.write(|| figure.page())?;
    output.json.print(&figure)
}
