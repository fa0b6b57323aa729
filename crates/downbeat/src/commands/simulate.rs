//! `downbeat simulate`: the production scheduler under virtual time.

use std::path::PathBuf;

use anyhow::{Error, bail, ensure};
use clap::{Args, Subcommand};
use downbeat_core::Duration;
use downbeat_core::cluster::{DropPolicy, NetworkBudget};
use downbeat_sim::policy::{Policies, Policy, SERVED};
use downbeat_sim::{
    Arrivals, CapacityQuestion, Delay, ModelProfile, Network, Popularity, Scenario, Search, Shape, check_seeds,
    profiles,
};

use crate::run_output::RunOutput;

/// Run the scheduler under virtual time.
///
/// The production scheduler decides, on devices that take their latency profile's time. Every
/// decision is checked. A run follows from its seed; equal seeds mean equal arrivals for all
/// policies.
///
/// Published schedulers, emulated GPUs and the papers' figures have a program of their own:
/// cargo run --release -p downbeat-lab -- --help
#[derive(Subcommand, Debug)]
pub enum SimulateCommand {
    /// Find the highest rate that a cluster holds, for each policy
    Capacity(Box<CapacityArgs>),
}

/// Find the highest rate at which at most 1% of each model's requests are dropped or late.
///
/// Models come from a csv file with the columns name, alpha_ms, beta_ms and slo_ms (a batch of b
/// takes alpha * b + beta), or from the command line. The result stands beside two bounds: that of
/// the staggered pattern with even arrivals (for equal models), and that of every model running in
/// the largest batches that its SLO allows.
///
/// Examples:
///   downbeat simulate capacity --model ResNet50,1.053,5.072,25 --devices 8
///   downbeat simulate capacity --profiles models.csv --devices 64 --policy all --seed 1 --seed 2 --json
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct CapacityArgs {
    /// Models: a csv file with the columns name, alpha_ms, beta_ms, slo_ms.
    #[arg(long, value_name = "FILE.csv")]
    profiles: Option<PathBuf>,

    /// A model. Repeatable.
    #[arg(long = "model", value_name = "NAME,ALPHA_MS,BETA_MS,SLO_MS")]
    models: Vec<ModelProfile>,

    /// Number of devices.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    devices: u32,

    /// Arrival process: poisson, constant, or gamma:K with shape K (coefficient of variation
    /// 1/sqrt(K); gamma:0.05 is very bursty).
    #[arg(long, default_value = "poisson", value_name = "KIND")]
    arrivals: Arrivals,

    /// Division of the requests among the models, in the order of the file: equal, zipf:S, or maf
    /// (Azure's functions).
    #[arg(long, default_value = "equal", value_name = "KIND")]
    popularity: Popularity,

    /// When a batch may start: deferred, eager, latest, adaptive, consolidating, timeout:MS,
    /// timeout:P%, or all. Repeatable, or separated by commas. `all` adds head drop to each policy
    /// with window drop.
    #[arg(long = "policy", default_value = "deferred", value_name = "NAME[+DROP][@ORDER]", value_delimiter = ',')]
    policies: Vec<String>,

    /// Which requests are dropped, for policies without +DROP: window, head, adaptive, or none.
    /// Repeatable, or separated by commas [default: window; adaptive for adaptive and
    /// consolidating]
    #[arg(long = "drop", value_name = "NAME", value_delimiter = ',')]
    drops: Vec<String>,

    /// Share of each model's requests, in percent, that may be dropped or late.
    #[arg(long, default_value_t = 1.0, value_name = "PERCENT", allow_negative_numbers = true)]
    tolerated_percent: f64,

    /// The search ends when its bounds are within this percentage.
    #[arg(long, default_value_t = 0.5, value_name = "PERCENT", allow_negative_numbers = true)]
    precision: f64,

    /// Simulated seconds before arrivals count.
    #[arg(long, default_value_t = 1.5, value_name = "SECONDS", allow_negative_numbers = true)]
    warm_up: f64,

    /// The largest batch; 0: as far as each model's SLO allows.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=65536))]
    max_batch: u32,

    /// Standard deviation of an execution time, as a share of the profile's.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", allow_negative_numbers = true)]
    noise: f64,

    /// d_ctrl: microseconds to plan for a message to a device.
    #[arg(long, default_value_t = 0.0, value_name = "US", allow_negative_numbers = true)]
    d_ctrl_us: f64,

    /// d_data: microseconds to plan for fetching the inputs of an item.
    #[arg(long, default_value_t = 0.0, value_name = "US", allow_negative_numbers = true)]
    d_data_us: f64,

    /// Microseconds from the end of a batch to the client's answer.
    #[arg(long, default_value_t = 0.0, value_name = "US", allow_negative_numbers = true)]
    d_reply_us: f64,

    /// Actual delay of messages to a device: budget (always the planned delay), or lognormal:RATIO,
    /// whose 99.99th percentile is the planned delay and RATIO times the median (12 for TCP in
    /// Symphony's cluster).
    #[arg(long, default_value = "budget", value_name = "KIND")]
    delay: Delay,

    /// Seed of all random numbers. Repeatable, or separated by commas: the result is the median,
    /// with the smallest and largest beside it.
    #[arg(long = "seed", value_name = "N", value_delimiter = ',', default_value = "1")]
    seeds: Vec<u64>,

    /// Simulated seconds in which arrivals count. 20 seconds are 100,000 requests at 5,000 a
    /// second.
    #[arg(long, default_value_t = 20.0, value_name = "SECONDS", allow_negative_numbers = true)]
    span: f64,

    /// Lengthen each run of a search until the least popular model gets about this many requests.
    /// With many models and short runs the unluckiest model decides: 10000 requests tell a bad
    /// share of 1% to within 0.1%.
    #[arg(long, default_value_t = 0.0, value_name = "N", allow_negative_numbers = true)]
    requests_per_model: f64,

    #[command(flatten)]
    output: RunOutput,
}

/// Runs the command.
///
/// # Errors
/// If the command line is wrong, or a result cannot be written.
pub fn run(command: &SimulateCommand) -> anyhow::Result<()> {
    let SimulateCommand::Capacity(args) = command;
    capacity(args, &SERVED)
}

/// Searches the capacities under policies of these tables, and prints them.
///
/// # Errors
/// If the command line is wrong, or a result cannot be written.
pub fn capacity(args: &CapacityArgs, known: &Policies) -> anyhow::Result<()> {
    let question = question(args, known)?;
    let RunOutput { html, json, .. } = &args.output;
    let progress = args.output.progress()?;
    let capacities = question.answer(args.output.threads(), |done, total| progress.goes_on(done, total))?;
    progress.end();
    html.write(|| capacities.page())?;
    json.print(&capacities)
}

fn question(args: &CapacityArgs, known: &Policies) -> anyhow::Result<CapacityQuestion> {
    let mut models = match &args.profiles {
        Some(file) => profiles::read(file)?,
        None => Vec::new(),
    };
    models.extend(args.models.iter().cloned());
    if models.is_empty() {
        bail!("no models are given: --profiles FILE.csv, or --model NAME,ALPHA_MS,BETA_MS,SLO_MS");
    }
    profiles::check_names(&models).map_err(Error::msg)?;
    check_seeds(&args.seeds).map_err(Error::msg)?;
    let within = |flag: &str, value: f64, [least, most]: [f64; 2], unit: &str| {
        ensure!((least..=most).contains(&value), "{flag} is {value}; the value must be from {least} to {most} {unit}");
        Ok(value)
    };
    let seconds = |flag: &str, value: f64, least: f64| {
        within(flag, value, [least, 604_800.0], "seconds (a week)").map(Duration::from_secs_f64)
    };
    let microseconds = |flag: &str, us: f64| {
        within(flag, us, [0.0, 3.6e9], "microseconds (an hour)").map(|us| Duration::from_secs_f64(us * 1e-6))
    };
    let share = |flag: &str, percent: f64| {
        ensure!(
            percent > 0.0 && percent < 100.0,
            "{flag} is {percent}; the value must be above 0 and below 100 percent"
        );
        Ok(percent / 100.0)
    };
    let mut scenario = Scenario {
        models,
        rate: 1.0,
        arrivals: args.arrivals,
        popularity: args.popularity,
        shape: Shape::Steady,
        devices: args.devices,
        max_batch: args.max_batch,
        noise: args.noise,
        network: Network {
            budget: NetworkBudget {
                control: microseconds("--d-ctrl-us", args.d_ctrl_us)?,
                data: microseconds("--d-data-us", args.d_data_us)?,
                reply: microseconds("--d-reply-us", args.d_reply_us)?,
            },
            delay: args.delay,
        },
        warm_up: seconds("--warm-up", args.warm_up, 0.0)?,
        span: seconds("--span", args.span, 1e-3)?,
    };
    scenario.rate = scenario.unreachable_rate();
    let search = Search {
        tolerated: share("--tolerated-percent", args.tolerated_percent)?,
        precision: share("--precision", args.precision)?,
        requests_per_model: args.requests_per_model,
        ..Search::default()
    };
    search.check().map_err(Error::msg)?;
    let policies = policies(&args.policies, &args.drops, known)?;
    Ok(CapacityQuestion { scenario, policies, seeds: args.seeds.clone(), search })
}

/// Combines every policy with every drop policy, unless it has its own.
fn policies(names: &[String], drops: &[String], known: &Policies) -> anyhow::Result<Vec<Policy>> {
    let drops = drops.iter().map(|drop| drop.parse()).collect::<Result<Vec<DropPolicy>, _>>()?;
    let mut policies: Vec<Policy> = Vec::new();
    for name in names {
        let named = match name.as_str() {
            "all" => known.all(&drops),
            name if drops.is_empty() => vec![known.parse(name)?],
            name => drops.iter().map(|drop| known.with_drop(name, *drop)).collect::<Result<_, _>>()?,
        };
        for policy in named {
            if !policies.contains(&policy) {
                policies.push(policy);
            }
        }
    }
    Ok(policies)
}
