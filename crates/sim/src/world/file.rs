//! A world as a file: what a [`WorldScenario`] is made of, in TOML.
//!
//! `experiments/worlds/` has examples. Times are milliseconds; devices and models are named, and `[model.settings]` are those of the policy, as in
//! `[[device.groups]]` of the server.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use downbeat_core::cluster::{ModelOptions, NetworkBudget, PriorityLevel, TimeoutAction};
use downbeat_core::device::{
    BadSettings, Cut, Layout, PartitionId, PolicyModel, PolicyName, SegmentProfile, WrittenSettings,
};
use downbeat_core::{DeviceKind, Duration, LatencyProfile, Time};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use toml::Spanned;

use super::mailboxes::Order;
use super::run::{Fault, Serving};
use super::scenario::{Client, Pattern, WorldDevice, WorldModel, WorldScenario};
use crate::arrivals::Arrivals;
use crate::device::{Calibration, DeviceLimits, EmulatedModel};
use crate::network::{Delay, Network};
use crate::policy::Policy;
use crate::system::System;

/// A world that was read, with what its parts are called.
#[derive(Clone, Debug)]
pub struct WorldFile {
    /// What it shows.
    pub title: String,
    /// What a reader should know.
    pub note: String,
    /// The world.
    pub scenario: WorldScenario,
    /// By device.
    pub devices: Vec<String>,
    /// By model: its name, and its policy's.
    pub models: Vec<(String, String)>,
}

/// Why a file is no world. Lines and columns count from 1.
#[derive(Debug, thiserror::Error)]
pub enum BadWorld {
    /// It cannot be read.
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// Something is wrong at a place of the file.
    #[error("{}:{line}:{column}: {message}", file.display())]
    At {
        /// The file.
        file: PathBuf,
        /// The line.
        line: usize,
        /// The character of the line.
        column: usize,
        /// What is wrong, and what was expected.
        message: String,
    },
}

/// What is wrong, at which byte.
type Misplaced = (usize, String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    title: String,
    #[serde(default)]
    note: String,
    seed: Option<u64>,
    /// Clients send until then.
    #[serde(deserialize_with = "millis")]
    span_ms: Duration,
    #[serde(default)]
    noise: Share,
    /// Shards of the cluster's scheduler, which is worked off next, and how late.
    #[serde(default)]
    shards: Number<1, 64>,
    #[serde(default)]
    order: Order,
    #[serde(default, deserialize_with = "millis")]
    delay_ms: Duration,
    #[serde(default)]
    network: NetworkText,
    /// A calibration that `downbeat profile --save` wrote, from the folder of the file: all devices are such.
    calibration: Option<Spanned<PathBuf>>,
    device: Vec<DeviceText>,
    model: Vec<ModelText>,
    client: Vec<ClientText>,
    #[serde(default)]
    fault: Vec<Spanned<FaultText>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct NetworkText {
    #[serde(deserialize_with = "millis")]
    control_ms: Duration,
    #[serde(deserialize_with = "millis")]
    data_ms: Duration,
    #[serde(deserialize_with = "spoken")]
    delay: Option<Delay>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceText {
    name: Spanned<String>,
    /// Compute units; 100 unless the calibration says it.
    units: Option<Spanned<Number<1, 65536>>>,
    /// By partition: slots for the batches of the cluster's scheduler.
    slots: Option<Vec<Number<0, 64>>>,
    #[serde(default)]
    kind: Number<0, 15>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelText {
    name: Spanned<String>,
    /// A batch of `b` takes `alpha * b + beta` on `units` units of a device.
    #[serde(default, deserialize_with = "some_millis")]
    alpha_ms: Option<Duration>,
    #[serde(default, deserialize_with = "some_millis")]
    beta_ms: Option<Duration>,
    units: Option<Number<1, 65536>>,
    /// In place of these: a model of the calibration.
    calibrated: Option<Spanned<String>>,
    #[serde(default)]
    max_batch: Number<1, 1024, 8>,
    /// From arrival to deadline of its requests.
    #[serde(default, deserialize_with = "some_millis")]
    slo_ms: Option<Duration>,
    policy: Option<Spanned<PolicyName>>,
    #[serde(default)]
    settings: BTreeMap<Spanned<String>, Spanned<toml::Value>>,
    /// Where its policy makes batches: all devices, if none is named.
    #[serde(default)]
    devices: Vec<Spanned<String>>,
    partition: Option<Spanned<Number<0, 63>>>,
    /// With the policy `exclusive`: the scheduler's policy, as with `downbeat simulate --policy`.
    dispatch: Option<Spanned<String>>,
    /// Items that may wait, of each priority level.
    #[serde(default)]
    queue_bound: Number<0, 1_000_000, 1000>,
    #[serde(default)]
    priority_levels: Number<1, 16>,
    /// Give up requests that are hopeless.
    #[serde(default = "yes")]
    drop: bool,
    /// It is there from the start.
    #[serde(default = "yes")]
    loaded: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientText {
    model: Spanned<String>,
    /// So many alike.
    #[serde(default)]
    count: Number<1, 1000>,
    /// Requests a second, whatever becomes of them; without: the next once the last is answered, after `think_ms`.
    rate: Option<Spanned<f64>>,
    #[serde(default, deserialize_with = "spoken")]
    arrivals: Option<Arrivals>,
    #[serde(default, deserialize_with = "millis")]
    think_ms: Duration,
    #[serde(default)]
    requests: Number<1, 10_000_000, 10_000_000>,
    /// 1 to so many items a request.
    #[serde(default)]
    items: Number<1, 1024>,
    /// Requests are of one of so many levels.
    priority_levels: Option<Spanned<Number<1, 16>>>,
    /// The share of requests whose clients go away.
    #[serde(default)]
    leaves: Share,
}

/// Exactly one of the names says what happens.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultText {
    #[serde(deserialize_with = "millis")]
    at_ms: Duration,
    lost: Option<Spanned<String>>,
    back: Option<Spanned<String>>,
    /// The next launch that begins there takes so much longer.
    late: Option<Spanned<String>>,
    #[serde(default, deserialize_with = "some_millis")]
    by_ms: Option<Duration>,
    /// A device gets these partitions, with so many slots each.
    divide: Option<Spanned<String>>,
    slots: Option<Vec<Number<0, 64>>>,
    /// A model comes, afresh if it is there.
    load: Option<Spanned<String>>,
    remove: Option<Spanned<String>>,
    /// All clients of a model go.
    leave: Option<Spanned<String>>,
    /// Messages of the cluster's scheduler wait up to so long from now on.
    #[serde(default, deserialize_with = "some_millis")]
    delay_ms: Option<Duration>,
}

/// A number from `LEAST` to `MOST`.
#[derive(Clone, Copy, Debug)]
struct Number<const LEAST: u32, const MOST: u32, const DEFAULT: u32 = LEAST>(u32);

impl<const LEAST: u32, const MOST: u32, const DEFAULT: u32> Default for Number<LEAST, MOST, DEFAULT> {
    fn default() -> Self {
        Number(DEFAULT)
    }
}

impl<'de, const LEAST: u32, const MOST: u32, const DEFAULT: u32> Deserialize<'de> for Number<LEAST, MOST, DEFAULT> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let found = i64::deserialize(deserializer)?;
        let number = u32::try_from(found).ok().filter(|number| (LEAST..=MOST).contains(number));
        number.map(Number).ok_or_else(|| D::Error::custom(format!("{found} is not a number from {LEAST} to {MOST}")))
    }
}

/// From 0 to 1.
#[derive(Clone, Copy, Debug, Default)]
struct Share(f64);

impl<'de> Deserialize<'de> for Share {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let share = f64::deserialize(deserializer)?;
        match (0.0..=1.0).contains(&share) {
            true => Ok(Share(share)),
            false => Err(D::Error::custom(format!("{share} is no share: it must be from 0 to 1"))),
        }
    }
}

/// The longest time: a day.
const MOST_MS: f64 = 86_400_000.0;

fn millis<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let ms = f64::deserialize(deserializer)?;
    match (0.0..=MOST_MS).contains(&ms) {
        true => Ok(Duration::from_millis_f64(ms)),
        false => Err(D::Error::custom(format!("{ms} ms: it must be from 0 to {MOST_MS} (a day)"))),
    }
}

fn some_millis<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    millis(deserializer).map(Some)
}

fn spoken<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    String::deserialize(deserializer)?.parse().map(Some).map_err(D::Error::custom)
}

fn yes() -> bool {
    true
}

/// Units of a device of which nothing is said, and of a model.
const UNITS: u32 = 100;
/// Partitions that a device may have.
const MOST_PARTITIONS: usize = 64;
/// Stages that a model is cut into.
const MOST_STAGES: usize = 64;
/// Clients of a world: they may all come at one instant.
const MOST_CLIENTS: usize = 10_000;
/// The highest rate of a client, requests a second.
const MOST_RATE: f64 = 1e6;

impl WorldFile {
    /// Reads a world.
    ///
    /// # Errors
    /// If it cannot be read, is no world, or says something that cannot be: with the line.
    pub fn read(file: &Path) -> Result<WorldFile, BadWorld> {
        let text = std::fs::read_to_string(file).map_err(|error| BadWorld::Read(file.to_owned(), error))?;
        WorldFile::parse(&text, file)
    }

    /// As [`WorldFile::read`], of what is in `file`.
    ///
    /// # Errors
    /// As [`WorldFile::read`].
    pub fn parse(text: &str, file: &Path) -> Result<WorldFile, BadWorld> {
        let of_toml = |error: toml::de::Error| {
            (error.span().map_or(0, |span| span.start), error.message().trim().replace('\n', "; "))
        };
        let parsed = toml::from_str(text).map_err(of_toml);
        let folder = file.parent().unwrap_or(Path::new(""));
        parsed.and_then(|text: Text| text.resolve(folder)).map_err(|(at, message)| {
            let before = text.get(..at).unwrap_or(text);
            let start = before.rfind('\n').map_or(0, |newline| newline + 1);
            let (line, column) = (before.matches('\n').count() + 1, before[start..].chars().count() + 1);
            BadWorld::At { file: file.to_owned(), line, column, message }
        })
    }
}

/// The number of what has this name.
fn find(names: &[&Spanned<String>], what: &str, name: &Spanned<String>) -> Result<usize, Misplaced> {
    names.iter().position(|known| known.get_ref() == name.get_ref()).ok_or_else(|| {
        let known: Vec<&str> = names.iter().map(|known| known.get_ref().as_str()).collect();
        (name.span().start, format!("there is no {what} '{}'; there are: {}", name.get_ref(), known.join(", ")))
    })
}

/// Names, of which none is there twice.
fn distinct<'a>(
    what: &str,
    names: impl Iterator<Item = &'a Spanned<String>>,
) -> Result<Vec<&'a Spanned<String>>, Misplaced> {
    let mut known: Vec<&Spanned<String>> = Vec::new();
    for name in names {
        if known.iter().any(|other| other.get_ref() == name.get_ref()) {
            return Err((name.span().start, format!("there is another {what} '{}'", name.get_ref())));
        }
        known.push(name);
    }
    match known.is_empty() {
        true => Err((0, format!("there is no {what}; give a [[{what}]]"))),
        false => Ok(known),
    }
}

fn layout(slots: &[Number<0, 64>], at: usize) -> Result<Layout, Misplaced> {
    if !(1..=MOST_PARTITIONS).contains(&slots.len()) {
        return Err((at, format!("slots has {} partitions; there are 1 to {MOST_PARTITIONS}", slots.len())));
    }
    Ok(Layout { shared_lanes: slots.iter().map(|Number(slots)| *slots).collect() })
}

impl Text {
    fn resolve(self, folder: &Path) -> Result<WorldFile, Misplaced> {
        let devices = distinct("device", self.device.iter().map(|device| &device.name))?;
        let models = distinct("model", self.model.iter().map(|model| &model.name))?;
        let calibration = self.calibration.as_ref().map(|file| {
            let path = folder.join(file.get_ref());
            let at = |error: &dyn std::fmt::Display| (file.span().start, format!("{}: {error}", path.display()));
            let text = std::fs::read_to_string(&path).map_err(|error| at(&error))?;
            Calibration::read(&text).map_err(|error| at(&error))
        });
        let calibration = calibration.transpose()?;
        let mut scenario = WorldScenario {
            network: Network {
                budget: NetworkBudget {
                    control: self.network.control_ms,
                    data: self.network.data_ms,
                    reply: Duration::ZERO,
                },
                delay: self.network.delay.unwrap_or_default(),
            },
            shards: self.shards.0,
            order: self.order,
            noise: self.noise.0,
            seed: self.seed.unwrap_or(1),
            ..WorldScenario::default()
        };
        for device in &self.device {
            let at = device.name.span().start;
            let limits = match (&calibration, &device.units) {
                (Some(_), Some(units)) => {
                    return Err((units.span().start, "units: the calibration says them; leave them out".to_owned()));
                }
                (Some(calibration), None) => calibration.limits(),
                (None, units) => DeviceLimits::plain(units.as_ref().map_or(UNITS, |units| units.get_ref().0)),
            };
            let layout = layout(device.slots.as_deref().unwrap_or(&[Number(1)]), at)?;
            scenario.devices.push(WorldDevice { limits, layout, kind: DeviceKind(device.kind.0) });
        }
        let mut shown = Vec::new();
        let mut servings = Vec::new();
        for model in &self.model {
            let (emulated, serving, policy) = model.resolve(calibration.as_ref(), &devices)?;
            if let Serving::Devices(spec, on) = &serving {
                let partition = model.partition.as_ref().map_or(0, |partition| partition.get_ref().0);
                let missing =
                    on.iter().find(|device| scenario.devices[**device].layout.shared_lanes.len() <= partition as usize);
                if let (Some(device), Some(at)) = (missing, &model.partition) {
                    let message = format!("the device '{}' has no partition {partition}", devices[*device].get_ref());
                    return Err((at.span().start, message));
                }
                spec.build().map_err(|error| (model.name.span().start, error.to_string()))?;
            }
            shown.push((model.name.get_ref().clone(), policy));
            servings.push(serving.clone());
            scenario.models.push(WorldModel { emulated, serving: Some(serving).filter(|_| model.loaded) });
        }
        for client in &self.client {
            let model = find(&models, "model", &client.model)?;
            let of_model = client.resolve(model, &self.model[model], Time::ZERO + self.span_ms)?;
            scenario.clients.extend(vec![of_model; client.count.0 as usize]);
            if scenario.clients.len() > MOST_CLIENTS {
                return Err((client.model.span().start, format!("there are more than {MOST_CLIENTS} clients")));
            }
        }
        if self.delay_ms > Duration::ZERO {
            scenario.faults.push((Time::ZERO, Fault::Delay(self.delay_ms)));
        }
        for fault in &self.fault {
            scenario.faults.push(fault.get_ref().resolve(fault.span().start, &devices, &models, &servings)?);
        }
        let names = devices.iter().map(|name| name.get_ref().clone()).collect();
        Ok(WorldFile { title: self.title, note: self.note, scenario, devices: names, models: shown })
    }
}

impl ModelText {
    /// What it is, who makes its batches, and what that is called.
    fn resolve(
        &self,
        calibration: Option<&Calibration>,
        devices: &[&Spanned<String>],
    ) -> Result<(EmulatedModel, Serving, String), Misplaced> {
        let at = self.name.span().start;
        let Number(max_batch) = self.max_batch;
        let (name, policy_at) = match &self.policy {
            Some(policy) => (*policy.get_ref(), policy.span().start),
            None => (PolicyName::EXCLUSIVE, at),
        };
        let settings = self.settings(name)?;
        let chosen = name.read(&settings).map_err(|error| (policy_at, error.to_string()))?;
        let segments = match chosen.settings.cut().0 {
            Cut::Whole => 1,
            Cut::Stages(stages) if stages <= MOST_STAGES => stages,
            Cut::Stages(stages) => return Err((policy_at, format!("{stages} stages are more than {MOST_STAGES}"))),
            Cut::At(_) => {
                return Err((policy_at, "an emulated model has no values to be cut at; give stages".to_owned()));
            }
        };
        let emulated = self.emulated(calibration, segments)?;
        let profile = emulated.profile(&[0], max_batch).map_err(|error| (at, error.to_string()))?;
        if name.makes_batches() {
            if let Some(dispatch) = &self.dispatch {
                return Err((dispatch.span().start, format!("dispatch is for the policy exclusive, not for {name}")));
            }
            let spec = self.spec(profile, &*chosen.settings).map_err(|error| (policy_at, error))?;
            let on: Result<Vec<usize>, Misplaced> =
                self.devices.iter().map(|device| find(devices, "device", device)).collect();
            let on = Some(on?).filter(|on| !on.is_empty()).unwrap_or_else(|| (0..devices.len()).collect());
            return Ok((emulated, Serving::Devices(spec, on), name.to_string()));
        }
        let kept = self.devices.first().map(|device| device.span().start);
        if let Some(at) = kept.or_else(|| self.partition.as_ref().map(|partition| partition.span().start)) {
            let message = format!("a model of the policy {name} runs on all slots; leave devices and partition out");
            return Err((at, message));
        }
        let options = self.options(&profile)?;
        let dispatch = self.dispatch.as_ref().map_or(String::new(), |dispatch| format!(" ({})", dispatch.get_ref()));
        Ok((emulated, Serving::Cluster(options), format!("{name}{dispatch}")))
    }

    fn settings(&self, policy: PolicyName) -> Result<WrittenSettings, Misplaced> {
        let mut settings = WrittenSettings::new();
        for (key, spanned) in &self.settings {
            // What is no number there is none here either.
            let value = serde_json::to_value(spanned.get_ref()).unwrap_or_default();
            policy.read_one(key.get_ref(), &value).map_err(|error| match error {
                BadSettings::Unknown { .. } => (key.span().start, error.to_string()),
                BadSettings::Value { .. } | BadSettings::Check(_) => (spanned.span().start, error.to_string()),
            })?;
            settings.insert(key.get_ref().clone(), value);
        }
        Ok(settings)
    }

    fn emulated(&self, calibration: Option<&Calibration>, segments: usize) -> Result<EmulatedModel, Misplaced> {
        let at = self.name.span().start;
        let name = self.name.get_ref();
        let emulated = match (&self.calibrated, self.alpha_ms, self.beta_ms) {
            (Some(calibrated), None, None) => {
                let at = calibrated.span().start;
                let missing = || (at, "there is no calibration; name one above all tables".to_owned());
                let model =
                    calibration.ok_or_else(missing)?.model(calibrated.get_ref(), self.units.map(|units| units.0));
                model.map_err(|error| (at, error.to_string()))?.cut(segments)
            }
            (None, Some(alpha), Some(beta)) => {
                let profile = LatencyProfile::linear(alpha, beta, self.max_batch.0);
                let profile = profile.map_err(|error| (at, format!("'{name}': {error}")))?;
                let units = self.units.map_or(UNITS, |Number(units)| units);
                return Ok(EmulatedModel::plain(SegmentProfile::even(&profile, segments), units));
            }
            _ => return Err((at, format!("'{name}' needs alpha_ms and beta_ms, or calibrated in place of both"))),
        };
        emulated.map_err(|error| (at, error.to_string()))
    }

    fn spec(
        &self,
        profile: SegmentProfile,
        settings: &dyn downbeat_core::device::PolicySettings,
    ) -> Result<downbeat_core::device::ModelSpec, String> {
        let Number(max_batch) = self.max_batch;
        let ring = settings.ring(max_batch, false)?;
        let model = PolicyModel {
            partition: PartitionId(self.partition.as_ref().map_or(0, |partition| partition.get_ref().0)),
            profile,
            max_batch,
            padded: false,
            queue_delay: Duration::ZERO,
            drop: self.drop,
            queue_bound: self.queue_bound.0,
            ring_slots: ring.filter(|ring| ring.must).map_or(0, |ring| ring.least),
            cores: None,
        };
        settings.spec(model)
    }

    /// For the cluster's scheduler.
    fn options(&self, profile: &SegmentProfile) -> Result<ModelOptions, Misplaced> {
        let at = self.dispatch.as_ref().map_or(self.name.span().start, |dispatch| dispatch.span().start);
        let text = self.dispatch.as_ref().map_or("adaptive", |dispatch| dispatch.get_ref());
        let policy: Policy = text.parse().map_err(|error: crate::policy::UnknownPolicy| (at, error.to_string()))?;
        if policy.system() != System::Downbeat {
            return Err((at, format!("'{policy}' is another system, which serves no world")));
        }
        if self.slo_ms.is_none() && text.contains('%') {
            return Err((at, format!("'{policy}' is a share of the model's slo_ms, which is missing")));
        }
        let points: Vec<(u32, Duration)> =
            (1..=self.max_batch.0).map(|items| (items, profile.total(items, 0))).collect();
        let profile = LatencyProfile::from_points(&points).map_err(|error| (at, error.to_string()))?;
        let level = PriorityLevel { max_queue: self.queue_bound.0, timeout_action: TimeoutAction::Reject };
        let drop = if self.drop { policy.drop() } else { downbeat_core::cluster::DropPolicy::None };
        Ok(ModelOptions {
            levels: vec![level; self.priority_levels.0 as usize],
            ..ModelOptions::new(profile, policy.dispatch(self.slo_ms.unwrap_or(Duration::MAX)), drop)
        })
    }
}

impl ClientText {
    fn resolve(&self, model: usize, of: &ModelText, until: Time) -> Result<Client, Misplaced> {
        let pattern = match &self.rate {
            Some(rate) if (1e-6..=MOST_RATE).contains(rate.get_ref()) => {
                Pattern::Open(self.arrivals.unwrap_or(Arrivals::Poisson), *rate.get_ref())
            }
            Some(rate) => {
                let message =
                    format!("a rate of {}; it must be above 0 and up to {MOST_RATE} a second", rate.get_ref());
                return Err((rate.span().start, message));
            }
            None if self.arrivals.is_some() => {
                let message = "arrivals without a rate: a client without one sends when it has its answer";
                return Err((self.model.span().start, message.to_owned()));
            }
            None => Pattern::Closed(self.think_ms),
        };
        let levels = self.priority_levels.as_ref();
        if let Some(levels) = levels.filter(|levels| levels.get_ref().0 > of.priority_levels.0) {
            let message = format!("the model has {} priority levels", of.priority_levels.0);
            return Err((levels.span().start, message));
        }
        Ok(Client {
            pattern,
            until,
            most_items: self.items.0,
            lowest_level: levels.map_or(0, |levels| levels.get_ref().0 - 1),
            slo: of.slo_ms,
            leaves: self.leaves.0,
            ..Client::closed(model, u64::from(self.requests.0))
        })
    }
}

impl FaultText {
    fn resolve(
        &self,
        at: usize,
        devices: &[&Spanned<String>],
        models: &[&Spanned<String>],
        servings: &[Serving],
    ) -> Result<(Time, Fault), Misplaced> {
        let mut faults = Vec::new();
        let device =
            |name: &Option<Spanned<String>>| name.as_ref().map(|name| find(devices, "device", name)).transpose();
        let model = |name: &Option<Spanned<String>>| name.as_ref().map(|name| find(models, "model", name)).transpose();
        faults.extend(device(&self.lost)?.map(Fault::Lost));
        faults.extend(device(&self.back)?.map(Fault::Back));
        if let Some(device) = device(&self.late)? {
            let by =
                self.by_ms.ok_or_else(|| (at, "late needs by_ms: how much longer the next launch takes".to_owned()))?;
            faults.push(Fault::Late(device, by));
        }
        if let Some(device) = device(&self.divide)? {
            let slots = self.slots.as_ref().ok_or_else(|| (at, "divide needs slots, by partition".to_owned()))?;
            faults.push(Fault::Layout(device, layout(slots, at)?));
        }
        faults.extend(model(&self.load)?.map(|model| Fault::Load(model, servings[model].clone())));
        faults.extend(model(&self.remove)?.map(Fault::Remove));
        faults.extend(model(&self.leave)?.map(Fault::Leave));
        faults.extend(self.delay_ms.map(Fault::Delay));
        match <[Fault; 1]>::try_from(faults) {
            Ok([fault]) => Ok((Time::ZERO + self.at_ms, fault)),
            Err(faults) => {
                let expected = "exactly one of lost, back, late, divide, load, remove, leave and delay_ms";
                Err((at, format!("a fault is {expected}; here are {}", faults.len())))
            }
        }
    }
}
