//! `downbeat-lab slots`: the choice of a server's partitions, and of the models on each partition.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, anyhow, bail, ensure};
use clap::Args;
use downbeat::profile::share_report::ShareReport;
use downbeat_core::Duration;
use downbeat_report::Json;
use downbeat_sim::policy::SERVED;
use downbeat_sim::what_if::Recorded;

use super::read_text;
use super::share_profile::ShareProfile;
use super::slot_report::{Asked, Device, SlotReport};
use crate::slots::{Contender, Found, MOST_SLOTS, MeasuredMix, SlotModel, SlotProblem};

/// Choose the partitions of a server's devices with which it holds the most of its models' requests, as downbeat.toml takes them.
///
/// Every model runs on any partition where it meets its SLO. Measure every model on shares first,
/// with `downbeat profile MODEL --shares 10 --json FILE`. The simulator tries layouts, whole
/// devices among them, with Poisson arrivals. If no layout holds clearly more than whole devices,
/// the command says so and divides nothing.
///
/// Examples:
///   downbeat-lab slots resnet.json bert.json --slo-ms resnet=20,bert=40 --rate resnet=300,bert=60 --devices 2
///   downbeat-lab slots resnet.json bert.json --log decisions --as resnet=m0,bert=m1 --toml partitions.toml
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct SlotArgs {
    /// Reports of the models that are served together, from
    /// `downbeat profile MODEL --shares 10 --json FILE`
    #[arg(value_name = "REPORT.json", required = true)]
    reports: Vec<PathBuf>,
    /// Devices, all alike; the server divides each in the same way
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    devices: u32,
    /// The SLO of a model in milliseconds, or without MODEL= of all models without an SLO of their
    /// own. Repeatable, or separated by commas
    #[arg(long = "slo-ms", value_name = "[MODEL=]MS", value_delimiter = ',')]
    slos: Vec<Given>,
    /// Requests a second of a model, or without MODEL= of each model without a rate of its own.
    /// Repeatable, or separated by commas
    #[arg(long = "rate", value_name = "[MODEL=]RATE", value_delimiter = ',')]
    rates: Vec<Given>,
    /// Take the missing SLOs and rates from a log that `downbeat serve --decision-log` has written;
    /// needs --as
    #[arg(long, value_name = "LOG")]
    log: Vec<PathBuf>,
    /// The id of a model in the log (see `downbeat log show`). Repeatable, or separated by commas
    #[arg(long = "as", value_name = "MODEL=ID", value_delimiter = ',', requires = "log")]
    recorded_as: Vec<RecordedAs>,
    /// The scheduler that will serve the models
    #[arg(long, default_value = "adaptive", value_name = "NAME[+DROP][@ORDER]")]
    policy: String,
    /// The most partitions of a device: a model has lanes and memory on each of its partitions
    #[arg(long, value_name = "N", default_value_t = MOST_SLOTS, value_parser = clap::value_parser!(u32).range(1..=16))]
    most_slots: u32,
    /// Requests of the least popular model in a run
    #[arg(long, value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(200..=1_000_000))]
    requests: u32,
    /// Chooses random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Write the tables for downbeat.toml to this file; nothing is written if devices stay whole
    #[arg(long, value_name = "FILE")]
    toml: Option<PathBuf>,
    #[command(flatten)]
    json: Json,
}

/// `MODEL=NUMBER`, or `NUMBER` for all.
#[derive(Clone, Debug)]
struct Given {
    model: Option<String>,
    number: f64,
}

impl FromStr for Given {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (model, number) = match text.rsplit_once('=') {
            Some((model, number)) => (Some(model.trim().to_owned()), number),
            None => (None, text),
        };
        let number = number.trim().parse::<f64>().ok().filter(|number| *number > 0.0 && *number <= 86_400_000.0);
        let number = number.ok_or_else(|| {
            format!("'{text}' is neither NUMBER nor MODEL=NUMBER with a number above 0 and up to 86400000")
        })?;
        Ok(Given { model, number })
    }
}

/// `MODEL=ID`.
#[derive(Clone, Debug)]
struct RecordedAs {
    model: String,
    id: String,
}

impl FromStr for RecordedAs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (model, id) = text.rsplit_once('=').ok_or_else(|| format!("'{text}' is no MODEL=ID, such as resnet=m0"))?;
        Ok(RecordedAs { model: model.trim().to_owned(), id: id.trim().to_owned() })
    }
}

/// Returns the number given for a model, or else the number given for all.
fn given(all: &[Given], model: &str) -> Option<f64> {
    let own = all.iter().rfind(|given| given.model.as_deref() == Some(model));
    own.or_else(|| all.iter().rfind(|given| given.model.is_none())).map(|given| given.number)
}

/// Runs the command.
///
/// # Errors
/// If a model was not measured, its SLO or rate is not known, or no device can serve it.
pub fn run(args: &SlotArgs) -> anyhow::Result<()> {
    let policy = SERVED.parse(&args.policy).context("--policy")?;
    let reports = args.reports.iter().map(|file| read_report(file)).collect::<anyhow::Result<Vec<_>>>()?;
    let models: Vec<String> = reports.iter().map(|report| report.model.clone()).collect();
    let asked = args.asked(&models)?;
    let profile = |report| ShareProfile::new(report).with_context(|| format!("'{}'", report.model));
    let profiles = reports.iter().map(profile).collect::<anyhow::Result<Vec<_>>>()?;
    let device = Device::of(&profiles, &models)?;
    for (profile, Asked { name, slo, .. }) in profiles.iter().zip(&asked) {
        let alone = profile.whole().latency(1);
        ensure!(alone <= *slo, "'{name}' takes {alone} for one request on a whole device, and its SLO is {slo}");
    }
    let model = |(profile, asked): (&ShareProfile, &Asked)| SlotModel {
        rate: asked.rate,
        slo: asked.slo,
        profiles: profile.by_steps(),
    };
    let problem = SlotProblem {
        models: profiles.iter().zip(&asked).map(model).collect(),
        devices: args.devices,
        steps: device.steps(),
        most_slots: args.most_slots,
        alike: true,
    };
    let measured = MeasuredMix { problem, networks: None };
    let [whole, slots] = [Contender::Whole(policy.clone()), Contender::Slots(policy.clone())]
        .map(|contender| found(&contender, &measured, args));
    let report = SlotReport::new(&device, &measured.problem, asked, (whole?, slots?), &policy);
    args.json.print(&report)?;
    match (&args.toml, report.tables()) {
        (Some(file), Some(tables)) => downbeat_report::write(file, &tables),
        _ => Ok(()),
    }
}

/// Reads a report of `downbeat profile --shares` of a model.
fn read_report(file: &Path) -> anyhow::Result<ShareReport> {
    let expected = || format!("{}: no report of `downbeat profile MODEL --shares 10 --json FILE`", file.display());
    serde_json::from_str(&read_text(file)?).with_context(expected)
}

fn found(contender: &Contender, measured: &MeasuredMix, args: &SlotArgs) -> anyhow::Result<Found> {
    let found = contender.find(measured, f64::from(args.requests), args.seed)?;
    found.ok_or_else(|| anyhow!("there is no way to place the models"))
}

/// The rate and the SLO of a model in a decision log: requests a second, and a duration.
type Known = (Option<f64>, Option<Duration>);

impl SlotArgs {
    /// Returns the demand on each model.
    fn asked(&self, models: &[String]) -> anyhow::Result<Vec<Asked>> {
        let known = |model: &str| models.iter().any(|other| other == model);
        let named = self.slos.iter().chain(&self.rates).filter_map(|given| given.model.as_deref());
        if let Some(unknown) = named.chain(self.recorded_as.iter().map(|of| &*of.model)).find(|model| !known(model)) {
            bail!("'{unknown}' is none of the models that are to be planned for: {}", models.join(", "));
        }
        let mut ordered: Vec<&String> = models.iter().collect();
        ordered.sort_unstable();
        if let Some(twice) = ordered.windows(2).find(|two| two[0] == two[1]) {
            bail!("'{}' is named twice", twice[0]);
        }
        let recorded = self.recorded()?;
        let asked = |name: &String| {
            let (rate, slo) = recorded.get(&**name).copied().unwrap_or_default();
            let slo = given(&self.slos, name).map(Duration::from_millis_f64).or(slo);
            let rate = given(&self.rates, name).or(rate);
            let missing = |flag: &str, value: &str| {
                format!("of '{name}' {flag} is missing: give {flag} {name}={value}, or --log and --as {name}=ID")
            };
            Ok(Asked {
                name: name.clone(),
                slo: slo.with_context(|| missing("--slo-ms", "MS"))?,
                rate: rate.with_context(|| missing("--rate", "RATE"))?,
            })
        };
        models.iter().map(asked).collect()
    }

    /// Returns the requests a second and the SLO of each model in the decision log.
    fn recorded(&self) -> anyhow::Result<BTreeMap<&str, Known>> {
        if self.log.is_empty() {
            return Ok(BTreeMap::new());
        }
        let recorded = Recorded::read(&self.log)?;
        let of = |RecordedAs { model, id }: &RecordedAs| -> anyhow::Result<_> {
            let ids = recorded.models_called(id).with_context(|| format!("--as {model}={id}"))?;
            let is_its = |place: usize| recorded.models.get(place).is_some_and(|model| ids.contains(&model.id));
            let count = recorded.arrivals.iter().filter(|arrival| is_its(arrival.model.0 as usize)).count();
            let slo = recorded.models.iter().filter(|model| ids.contains(&model.id)).find_map(|model| model.slo);
            Ok((Some(count as f64 / recorded.span.as_secs_f64()), slo))
        };
        self.recorded_as.iter().map(|named| Ok((&*named.model, of(named)?))).collect()
    }
}
