//! `downbeat what-if` and `downbeat advise`: replay a decision log's requests under other settings.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, ensure};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use downbeat_core::Duration;
use downbeat_sim::policy::{Policy, SERVED};
use downbeat_sim::what_if::pipelines::{PipelineComparison, PipelineSetting, RecordedPipelines};
use downbeat_sim::what_if::{Comparison, Goal, Recorded, Setting, Wanted, advise};

use crate::commands::device_advice_command::{self, DeviceAdviceArgs};
use crate::options::units::positive_millis;
use crate::run_output::{RunOutput, waiting};

/// The most requests that each run of an advice replays, since a run's rehearsal takes long.
const SEARCHED: usize = 50_000;

/// What a command does first.
const READING: &str = "reading the log";

/// The requests of a decision log, and the changes to them.
#[derive(Args, Debug)]
struct Requests {
    /// A folder that `downbeat serve --decision-log` has written, or files of the folder
    #[arg(value_name = "LOG", required = true)]
    logs: Vec<PathBuf>,

    /// The SLO of all requests of a model, in place of their own; name the model as
    /// `downbeat log show` does. In a log with pipelines: of an ensemble as a whole, or of a model
    /// with requests of its own, by name. Repeatable, or separated by commas
    #[arg(long = "slo-ms", value_name = "MODEL=MS", value_delimiter = ',')]
    slos: Vec<Slo>,

    /// The factor by which requests come faster: the times between them are divided by it
    #[arg(long, default_value_t = 1.0, value_name = "TIMES", allow_negative_numbers = true)]
    rate: f64,

    /// Do not rehearse adaptive models, as on a server with `rehearsal_cpu` 0
    #[arg(long)]
    no_rehearsal: bool,
}

/// `MODEL=MS`.
#[derive(Clone, Debug)]
struct Slo {
    model: String,
    slo: Duration,
}

impl FromStr for Slo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (model, ms) = text
            .split_once('=')
            .ok_or_else(|| format!("'{text}' is not an SLO; expected MODEL=MS, such as encoder=30"))?;
        Ok(Slo { model: model.trim().to_owned(), slo: positive_millis(ms)? })
    }
}

/// `MODEL=N`: devices more.
#[derive(Clone, Debug)]
struct More {
    model: String,
    devices: u32,
}

impl FromStr for More {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (model, devices) = text
            .split_once('=')
            .ok_or_else(|| format!("'{text}' is no number of devices; expected MODEL=N, such as detect=1"))?;
        let devices = devices.trim().parse().ok().filter(|devices| (1..=10_000).contains(devices));
        let devices = devices.ok_or_else(|| format!("the number in '{text}' has to be from 1 to 10000"))?;
        Ok(More { model: model.trim().to_owned(), devices })
    }
}

/// Replay a decision log's requests under other settings, and compare the outcome with the log's.
///
/// The production scheduler decides, on emulated devices that take as long as the log's batches
/// took, relative to its last profiles. Each policy runs with each number of devices at each rate; all
/// other settings are the log's. The first row shows what happened. The page of --html has charts by
/// rate and by devices.
///
/// If the log has requests of ensembles, they are replayed through all of their steps. A model with
/// requests of its own is then a pipeline of one step.
///
/// Examples:
///   downbeat what-if decisions --devices 2,3,4
///   downbeat what-if decisions --more detect=1,classify=1 --rate 1.2 --slo-ms photos=50
///   downbeat what-if decisions --rates 1,1.5,2 --policy adaptive,deferred,eager+head --slo-ms encoder=30 --html what-if.html
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct WhatIfArgs {
    #[command(flatten)]
    requests: Requests,

    /// Devices [default: as many as in the log]. Repeatable, or separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    devices: Vec<u32>,

    /// Rates in place of --rate, for a curve: each is a row of its own. Repeatable, or separated by
    /// commas
    #[arg(long, value_name = "TIMES", value_delimiter = ',', conflicts_with = "rate")]
    rates: Vec<f64>,

    /// So many devices more for a model, in a log with pipelines. Each is a row of its own.
    /// Repeatable, or separated by commas
    #[arg(long, value_name = "MODEL=N", value_delimiter = ',')]
    more: Vec<More>,

    /// Policies of all models [default: as recorded, each model its own]. Repeatable, or separated
    /// by commas
    #[arg(long = "policy", value_name = "NAME[+DROP][@ORDER]", value_delimiter = ',')]
    policies: Vec<Policy>,

    /// The largest batch; smaller limits of a model stay
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_batch: Option<u32>,

    #[command(flatten)]
    output: RunOutput,
}

/// Find the best setting that holds a target on the requests of a recorded decision log.
///
/// The search starts with as many devices as the work in the log keeps busy. It tries more
/// devices, and numbers between. The search ends at the fewest devices on which some setting answers the
/// wanted share of each model's requests in time. All settings are options of
/// `downbeat serve`. --by orders them. For the first one the command prints how sure its figures
/// are, the highest rate that it holds, and the lines of downbeat.toml to paste. All runs are
/// simulated: no device is needed.
///
/// If the log has requests of ensembles, the command names the step that is short of devices. It adds
/// devices one by one, each where it helps most, until each pipeline holds the target.
///
/// With --device-policies the command asks another question: which device policy, with which
/// parameters, answers most of each model's requests in time.
///
/// Examples:
///   downbeat advise decisions
///   downbeat advise decisions --device-policies --together resnet=1.4 --write downbeat.toml
///   downbeat advise decisions --target 0.999 --rate 2 --policy adaptive --max-devices 16
///   downbeat advise decisions --by latency --html advice.html
///   downbeat advise decisions --price 2.50
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct AdviseArgs {
    #[command(flatten)]
    requests: Requests,

    #[command(flatten)]
    device: DeviceAdviceArgs,

    /// The wish that orders settings. `devices`: the fewest. `latency`: the lowest p99 of the time to the
    /// answer. `headroom`: the highest rate that holds. `price`: the lowest of a million requests in time
    /// [default: devices, or price with --price]
    #[arg(long, value_name = "GOAL", value_parser = PossibleValuesParser::new(Goal::ALL.map(Goal::name)).try_map(|name| name.parse::<Goal>()))]
    by: Option<Goal>,

    /// The price of a device for an hour, in any currency. With ensembles: for the price of a million
    /// requests in time
    #[arg(long, value_name = "PER_HOUR", allow_negative_numbers = true)]
    price: Option<f64>,

    /// Share of each model's requests that must be answered in time
    #[arg(long, default_value_t = 0.99, value_name = "SHARE", allow_negative_numbers = true)]
    target: f64,

    /// Most devices to try [default: four times the log's. With --by latency or headroom: the log's, or
    /// as many more as the target needs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_devices: Option<u32>,

    /// Policies to try: --scheduler, --drop and --order of `downbeat serve` [default: as recorded, and
    /// all others but timeout, with window and head drop]. Repeatable, or separated by commas
    #[arg(long = "policy", value_name = "NAME[+DROP][@ORDER]", value_delimiter = ',')]
    policies: Vec<Policy>,

    #[command(flatten)]
    output: RunOutput,
}

impl Requests {
    /// The pipelines of the log, if they are in the folder that the flags name, and a setting with only
    /// the changes of these flags. `None`: the log has no request of an ensemble.
    fn pipelines(&self, output: &RunOutput) -> anyhow::Result<Option<(RecordedPipelines, PipelineSetting)>> {
        let [folder] = &self.logs[..] else { return Ok(None) };
        if !folder.is_dir() {
            return Ok(None);
        }
        let recorded = match waiting(output.quiet, READING, || RecordedPipelines::read(folder)) {
            Err(error) if error.is_without_ensembles() => return Ok(None),
            recorded => recorded?,
        };
        check_rate("--rate", self.rate)?;
        let mut setting =
            PipelineSetting { rate: self.rate, rehearse: !self.no_rehearsal, ..PipelineSetting::unchanged() };
        for Slo { model, slo } in &self.slos {
            let flow = recorded.flow(model).with_context(|| format!("--slo-ms {model}"))?;
            setting.slos.insert(flow, *slo);
        }
        Ok(Some((recorded, setting)))
    }

    /// The log, and a setting with only the changes of these flags.
    fn read(&self, output: &RunOutput) -> anyhow::Result<(Recorded, Setting)> {
        check_rate("--rate", self.rate)?;
        let recorded = waiting(output.quiet, READING, || Recorded::read(&self.logs))?;
        let mut setting = Setting { rate: self.rate, rehearse: !self.no_rehearsal, ..Setting::of(&recorded) };
        for Slo { model, slo } in &self.slos {
            let ids = recorded.models_called(model).with_context(|| format!("--slo-ms {model}"))?;
            setting.slos.extend(ids.into_iter().map(|id| (id, *slo)));
        }
        Ok((recorded, setting))
    }
}

fn check_rate(option: &str, rate: f64) -> anyhow::Result<()> {
    ensure!((1e-3..=1e3).contains(&rate), "{option} is {rate}; the rate must be from 0.001 to 1000");
    Ok(())
}

/// `downbeat what-if`.
///
/// # Errors
/// If the log cannot be replayed, a setting is wrong, or a result cannot be written.
pub fn what_if(args: &WhatIfArgs) -> anyhow::Result<()> {
    let rates = if args.rates.is_empty() { vec![args.requests.rate] } else { args.rates.clone() };
    args.rates.iter().try_for_each(|rate| check_rate("--rates", *rate))?;
    if let Some((recorded, setting)) = args.requests.pipelines(&args.output)? {
        return what_if_pipelines(args, &recorded, &setting, &rates);
    }
    ensure!(
        args.more.is_empty(),
        "--more is for a log with requests of ensembles: name the folder that the server wrote, or use --devices"
    );
    let (recorded, mut setting) = args.requests.read(&args.output)?;
    setting.max_batch = args.max_batch;
    let devices = if args.devices.is_empty() { vec![recorded.devices] } else { args.devices.clone() };
    let policies: Vec<Option<Policy>> =
        if args.policies.is_empty() { vec![None] } else { args.policies.iter().cloned().map(Some).collect() };
    let mut settings = Vec::new();
    for policy in &policies {
        for devices in &devices {
            let with =
                |rate: &f64| Setting { policy: policy.clone(), devices: *devices, rate: *rate, ..setting.clone() };
            settings.extend(rates.iter().map(with));
        }
    }
    let output = &args.output;
    let progress = output.progress()?;
    let done = |done| progress.goes_on(done, settings.len());
    let comparison = Comparison::of(&recorded, &settings, output.threads(), done);
    progress.end();
    let comparison = comparison?;
    output.html.write(|| comparison.page())?;
    output.json.print(&comparison)
}

/// `downbeat what-if` for a log with pipelines.
fn what_if_pipelines(
    args: &WhatIfArgs,
    recorded: &RecordedPipelines,
    setting: &PipelineSetting,
    rates: &[f64],
) -> anyhow::Result<()> {
    let setting = PipelineSetting { max_batch: args.max_batch, ..setting.clone() };
    let mut all = vec![PipelineSetting { rehearse: setting.rehearse, ..PipelineSetting::unchanged() }];
    for rate in rates {
        let setting = PipelineSetting { rate: *rate, ..setting.clone() };
        all.extend((!setting.is_unchanged()).then(|| setting.clone()));
        for More { model, devices } in &args.more {
            let index = recorded.model(model).with_context(|| format!("--more {model}"))?;
            all.push(PipelineSetting { more: [(index, *devices)].into(), ..setting.clone() });
        }
        let devices = args.devices.iter();
        all.extend(devices.map(|devices| PipelineSetting { devices: Some(*devices), ..setting.clone() }));
    }
    let with = |policy: Option<&Policy>| {
        let policy = policy.cloned();
        all.iter().map(move |setting| PipelineSetting { policy: policy.clone(), ..setting.clone() }).collect::<Vec<_>>()
    };
    let settings: Vec<PipelineSetting> = match &args.policies[..] {
        [] => with(None),
        policies => {
            with(None).into_iter().take(1).chain(policies.iter().flat_map(|policy| with(Some(policy)))).collect()
        }
    };
    let output = &args.output;
    let progress = output.progress()?;
    let goes_on = |done| progress.goes_on(done, settings.len());
    let comparison = PipelineComparison::of(recorded, &settings, output.threads(), goes_on);
    progress.end();
    let comparison = comparison?;
    output.html.write(|| comparison.page())?;
    output.json.print(&comparison)
}

/// `downbeat advise` for a log with pipelines.
fn advise_pipelines(args: &AdviseArgs, recorded: &RecordedPipelines, setting: &PipelineSetting) -> anyhow::Result<()> {
    let policy = match &args.policies[..] {
        [] => None,
        [policy] => Some(policy.clone()),
        _ => anyhow::bail!("in a log with requests of ensembles, advise takes one --policy at a time"),
    };
    let setting = PipelineSetting { policy, ..setting.clone() };
    let devices: u32 = recorded.pools.iter().map(|pool| pool.devices).sum();
    let most = args.max_devices.unwrap_or_else(|| devices.saturating_mul(4).min(1_000_000));
    let output = &args.output;
    let progress = output.progress()?;
    let goes_on = |done, total| progress.goes_on(done, total);
    let advice = recorded.advise(&setting, (args.target, most, args.price), output.threads(), &goes_on);
    progress.end();
    let advice = advice?;
    output.html.write(|| advice.page())?;
    output.json.print(&advice)
}

/// `downbeat advise`.
///
/// # Errors
/// If the log cannot be replayed, a number is wrong, or a result cannot be written.
pub fn advice(args: &AdviseArgs) -> anyhow::Result<()> {
    if args.device.device_policies {
        return device_advice_command::run(&args.device, &args.requests.logs, &args.output);
    }
    let target = args.target;
    ensure!(target > 0.0 && target <= 1.0, "--target is {target}; the target must be above 0 and at most 1");
    if let Some(price) = args.price {
        ensure!(price > 0.0 && price.is_finite(), "--price is {price}; the price of an hour must be above 0");
    }
    if let Some((recorded, setting)) = args.requests.pipelines(&args.output)? {
        ensure!(
            args.by.is_none(),
            "--by is for a log without ensembles: with ensembles, devices are added one by one where they help most"
        );
        return advise_pipelines(args, &recorded, &setting);
    }
    let (recorded, mut setting) = args.requests.read(&args.output)?;
    let goal = args.by.unwrap_or(if args.price.is_some() { Goal::Price } else { Goal::Devices });
    setting.devices = args.max_devices.unwrap_or_else(|| recorded.devices.saturating_mul(4).min(1_000_000));
    let policies = if args.policies.is_empty() {
        // A timeout is no option: the configuration of each model has its delay.
        let others = SERVED.all(&[]).into_iter().filter(|policy| !policy.is_timeout());
        std::iter::once(None).chain(others.map(Some)).collect()
    } else {
        args.policies.iter().cloned().map(Some).collect()
    };
    let output = &args.output;
    let wanted = Wanted {
        goal,
        target,
        price: args.price,
        policies,
        setting,
        devices: args.max_devices.unwrap_or(recorded.devices),
        charts: output.html.html.is_some() || output.json.json.is_some(),
        searched: SEARCHED,
    };
    let progress = output.progress()?;
    let goes_on = |done, total| progress.goes_on(done, total);
    let advice = advise(&recorded, &wanted, output.threads(), &goes_on);
    progress.end();
    let advice = advice?;
    output.html.write(|| advice.page())?;
    output.json.print(&advice)
}
