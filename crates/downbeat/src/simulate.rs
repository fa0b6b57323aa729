//! `downbeat simulate`: schedulers under virtual time.

use std::path::PathBuf;

use anyhow::{Error, bail, ensure};
use clap::{Args, Subcommand};
use downbeat_core::Duration;
use downbeat_core::cluster::NetworkBudget;
use downbeat_report::Json;
use downbeat_sim::experiment::{Experiment, Overrides, check_seeds};
use downbeat_sim::policy::{self, Policy};
use downbeat_sim::world::WorldFile;
use downbeat_sim::{Arrivals, Delay, ModelProfile, Network, Popularity, Scenario, Search, Shape, profiles};

use crate::run_output::RunOutput;
use crate::simulate_auto::{self, AutoArgs};
use crate::simulate_device::{self, DeviceArgs, FigureArgs};
use crate::simulate_network::{self, NetworkArgs};
use crate::simulate_random::{self, RandomArgs};

/// Run schedulers under virtual time: an experiment from a file, or a search of the highest load that a cluster holds.
///
/// The production scheduler decides, on emulated devices that take their latency profile's time. Every decision is checked. A
/// run follows from its seed; equal seeds mean equal arrivals for all policies.
///
/// Examples:
///   downbeat simulate experiments/table_2.toml
///   downbeat simulate experiments/figure_11.toml --html figure_11.html
///   downbeat simulate device --model resnet152 --policy e-ebird --rate 150 --html timeline.html
///   downbeat simulate figure dvabatch-14
///   downbeat simulate world experiments/worlds/device_lost.toml
///   downbeat simulate network --seeds 0..1000
///   downbeat simulate random --seed 1 --workloads 20
///   downbeat simulate capacity --model ResNet50,1.053,5.072,25 --devices 8
///   downbeat simulate capacity --profiles experiments/profiles/profiles_a100.csv --devices 64 --policy all --seed 1 --seed 2 --json
#[derive(Args, Debug)]
#[command(
    verbatim_doc_comment,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    arg_required_else_help = true
)]
pub struct SimulateArgs {
    #[command(subcommand)]
    command: Option<SimulateCommand>,

    /// Experiment: a TOML file such as those in experiments/.
    #[arg(value_name = "EXPERIMENT.toml", required = true)]
    file: Option<PathBuf>,

    #[command(flatten)]
    run: RunArgs,

    /// Policies instead of the file's. Repeatable, or separated by commas.
    #[arg(long = "policy", value_name = "NAME[+DROP][@ORDER]", value_delimiter = ',')]
    policies: Vec<String>,

    /// Run all cases, though the file asks for a sample.
    #[arg(long)]
    all: bool,
}

#[derive(Subcommand, Debug)]
enum SimulateCommand {
    Capacity(Box<CapacityArgs>),
    Device(Box<DeviceArgs>),
    Figure(FigureArgs),
    World(WorldArgs),
    Network(NetworkArgs),
    Random(RandomArgs),
    Auto(AutoArgs),
}

/// Run a world from a file: devices with partitions, models with any policy, clients, and what goes wrong.
///
/// The production scheduler and device policies decide, on emulated devices. Every decision is checked: a run that ends is a run by the rules. It
/// follows from its seed.
///
/// Examples:
///   downbeat simulate world experiments/worlds/three_models_two_devices.toml
///   downbeat simulate world experiments/worlds/device_lost.toml --seed 1,2,3 --json
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
struct WorldArgs {
    /// World: a TOML file such as those in experiments/worlds/.
    #[arg(value_name = "WORLD.toml")]
    file: PathBuf,

    /// Seed of all random numbers instead of the file's. Repeatable, or separated by commas.
    #[arg(long = "seed", value_name = "N", value_delimiter = ',')]
    seeds: Vec<u64>,

    #[command(flatten)]
    json: Json,
}

/// How runs are made and shown.
#[derive(Args, Debug)]
struct RunArgs {
    /// Seed of all random numbers. Repeatable, or separated by commas: the result is the median, with the smallest and
    /// largest beside it.
    #[arg(long = "seed", value_name = "N", value_delimiter = ',')]
    seeds: Vec<u64>,

    /// Simulated seconds in which arrivals count.
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    span: Option<f64>,

    /// Lengthen each run of a search until the least popular model gets about this many requests. With many models and short
    /// runs the unluckiest model decides: 10000 tell a bad share of 1% to within 0.1%.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    requests_per_model: Option<f64>,

    #[command(flatten)]
    output: RunOutput,
}

/// Find the highest rate at which at most 1% of each model's requests are dropped or late.
///
/// Models come from a csv file with the columns name, alpha_ms, beta_ms and slo_ms (a batch of b takes alpha * b + beta), or from
/// the command line. The result stands beside two bounds: of the staggered pattern with even arrivals (for equal models), and of every
/// model running in the largest batches that its SLO allows.
#[derive(Args, Debug)]
struct CapacityArgs {
    /// Models: a csv file with the columns name, alpha_ms, beta_ms, slo_ms.
    #[arg(long, value_name = "FILE.csv")]
    profiles: Option<PathBuf>,

    /// A model. Repeatable.
    #[arg(long = "model", value_name = "NAME,ALPHA_MS,BETA_MS,SLO_MS")]
    models: Vec<ModelProfile>,

    /// Devices.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    devices: u32,

    /// How requests arrive: poisson, constant, or gamma:K with shape K (coefficient of variation 1/sqrt(K); gamma:0.05 is
    /// very bursty).
    #[arg(long, default_value = "poisson", value_name = "KIND")]
    arrivals: Arrivals,

    /// How requests are shared among the models, in the order of the file: equal, zipf:S, or maf (Azure's functions).
    #[arg(long, default_value = "equal", value_name = "KIND")]
    popularity: Popularity,

    /// When a batch may start. Repeatable, or separated by commas; `all`: every one, those that drop by their window with head drop too. One of
    /// deferred, eager, latest, adaptive, consolidating, timeout:MS, timeout:P%, and the systems clockwork, nexus,
    /// nexus:FRONTENDS, shepherd.
    #[arg(long = "policy", default_value = "deferred", value_name = "NAME[+DROP][@ORDER]", value_delimiter = ',')]
    policies: Vec<String>,

    /// Which requests are given up, for policies that do not say it with +DROP: window, head, adaptive, or none. Repeatable, or
    /// separated by commas [default: window; adaptive for adaptive and consolidating]
    #[arg(long = "drop", value_name = "NAME", value_delimiter = ',')]
    drops: Vec<String>,

    /// Share of each model's requests, in percent, that may be dropped or late.
    #[arg(long, default_value_t = 1.0, value_name = "PERCENT", allow_negative_numbers = true)]
    tolerated_percent: f64,

    /// The search ends when the capacity is known to this percentage.
    #[arg(long, default_value_t = 0.5, value_name = "PERCENT", allow_negative_numbers = true)]
    precision: f64,

    /// Simulated seconds before those that count.
    #[arg(long, default_value_t = 1.5, value_name = "SECONDS", allow_negative_numbers = true)]
    warm_up: f64,

    /// The largest batch; 0: as far as each model's SLO allows.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=65536))]
    max_batch: u32,

    /// Standard deviation of an execution time, as a share of the profile's.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", allow_negative_numbers = true)]
    noise: f64,

    /// d_ctrl: microseconds that a message to a device may take, to be planned with.
    #[arg(long, default_value_t = 0.0, value_name = "US", allow_negative_numbers = true)]
    d_ctrl_us: f64,

    /// d_data: microseconds that fetching the inputs of an item may take.
    #[arg(long, default_value_t = 0.0, value_name = "US", allow_negative_numbers = true)]
    d_data_us: f64,

    /// Microseconds from the end of a batch to the client's answer.
    #[arg(long, default_value_t = 0.0, value_name = "US", allow_negative_numbers = true)]
    d_reply_us: f64,

    /// What messages to a device take: budget (always what is planned with), or lognormal:RATIO, whose 99.99th percentile is
    /// what is planned with and RATIO times the median (12 for TCP in Symphony's cluster).
    #[arg(long, default_value = "budget", value_name = "KIND")]
    delay: Delay,

    #[command(flatten)]
    run: RunArgs,
}

/// Seconds that count in a capacity search if nothing else is said: 100,000 requests at 5,000 a second.
const SPAN_S: f64 = 20.0;

/// Runs the experiment or the search and prints what came of it.
///
/// # Errors
/// If the file or the command line is wrong, or a result cannot be written.
pub fn run(args: SimulateArgs) -> anyhow::Result<()> {
    let SimulateArgs { command, file, run, policies, all } = args;
    match (command, file) {
        (Some(SimulateCommand::Capacity(args)), _) => {
            let experiment = capacity(&args)?;
            show(&experiment, &args.run)
        }
        (Some(SimulateCommand::Device(args)), _) => simulate_device::run(&args),
        (Some(SimulateCommand::Figure(args)), _) => simulate_device::figure(&args),
        (Some(SimulateCommand::World(args)), _) => world(&args),
        (Some(SimulateCommand::Network(args)), _) => simulate_network::run(&args),
        (Some(SimulateCommand::Random(args)), _) => simulate_random::run(&args),
        (Some(SimulateCommand::Auto(args)), _) => simulate_auto::run(&args),
        (None, Some(file)) => {
            let overrides = Overrides {
                seeds: Some(run.seeds.clone()).filter(|seeds| !seeds.is_empty()),
                span_s: run.span,
                requests_per_model: run.requests_per_model,
                all,
                policies: Some(policies).filter(|policies| !policies.is_empty()),
                tiny: false,
            };
            show(&Experiment::read(&file, &overrides)?, &run)
        }
        (None, None) => {
            bail!("give an experiment file, or one of the subcommands capacity, device, figure, world, random and auto")
        }
    }
}

fn world(args: &WorldArgs) -> anyhow::Result<()> {
    check_seeds(&args.seeds).map_err(Error::msg)?;
    let results = WorldFile::read(&args.file)?.run(&args.seeds)?;
    args.json.print(&results)
}

fn capacity(args: &CapacityArgs) -> anyhow::Result<Experiment> {
    let mut models = match &args.profiles {
        Some(file) => profiles::read(file)?,
        None => Vec::new(),
    };
    models.extend(args.models.iter().cloned());
    if models.is_empty() {
        bail!("no models are given: --profiles FILE.csv, or --model NAME,ALPHA_MS,BETA_MS,SLO_MS");
    }
    profiles::check_names(&models).map_err(Error::msg)?;
    check_seeds(&args.run.seeds).map_err(Error::msg)?;
    let within = |flag: &str, value: f64, [least, most]: [f64; 2], unit: &str| {
        ensure!((least..=most).contains(&value), "{flag} is {value}; it has to be from {least} to {most} {unit}");
        Ok(value)
    };
    let seconds = |flag: &str, value: f64, least: f64| {
        within(flag, value, [least, 604_800.0], "seconds (a week)").map(Duration::from_secs_f64)
    };
    let microseconds = |flag: &str, us: f64| {
        within(flag, us, [0.0, 3.6e9], "microseconds (an hour)").map(|us| Duration::from_secs_f64(us * 1e-6))
    };
    let share = |flag: &str, percent: f64| {
        ensure!(percent > 0.0 && percent < 100.0, "{flag} is {percent}; it has to be above 0 and below 100 percent");
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
        span: seconds("--span", args.run.span.unwrap_or(SPAN_S), 1e-3)?,
    };
    scenario.rate = scenario.unreachable_rate();
    let search = Search {
        tolerated: share("--tolerated-percent", args.tolerated_percent)?,
        precision: share("--precision", args.precision)?,
        requests_per_model: args.run.requests_per_model.unwrap_or(0.0),
        ..Search::default()
    };
    search.check().map_err(Error::msg)?;
    let seeds = if args.run.seeds.is_empty() { vec![1] } else { args.run.seeds.clone() };
    Ok(Experiment::capacity(scenario, policies(&args.policies, &args.drops)?, seeds, search))
}

/// Every policy with every drop policy, where it has none of its own.
fn policies(names: &[String], drops: &[String]) -> anyhow::Result<Vec<Policy>> {
    let drops = drops.iter().map(|drop| policy::parse_drop(drop)).collect::<Result<Vec<_>, _>>()?;
    let mut policies: Vec<Policy> = Vec::new();
    for name in names {
        let named = match name.as_str() {
            "all" => Policy::all(&drops),
            name if drops.is_empty() => vec![name.parse()?],
            name => drops.iter().map(|drop| Policy::with_drop(name, *drop)).collect::<Result<_, _>>()?,
        };
        for policy in named {
            if !policies.contains(&policy) {
                policies.push(policy);
            }
        }
    }
    Ok(policies)
}

fn show(experiment: &Experiment, args: &RunArgs) -> anyhow::Result<()> {
    let RunOutput { html, json, .. } = &args.output;
    let progress = args.output.progress()?;
    let results = experiment.run(args.output.threads(), |done, total| progress.goes_on(done, total))?;
    progress.end();
    html.write(|| experiment.page(&results))?;
    json.print(&results)
}
