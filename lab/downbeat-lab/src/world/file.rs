//! A world as a TOML file: the text form of a [`WorldScenario`].
//!
//! `experiments/worlds/` has examples. Times are milliseconds. Devices and models have names.
//! `[model.settings]` are the settings of the policy, as in `[[device.groups]]` of the server.

mod model;

use std::path::{Path, PathBuf};

use downbeat_core::cluster::NetworkBudget;
use downbeat_core::device::Layout;
use downbeat_core::{DeviceKind, Duration, Time};
use serde::Deserialize;
use toml::Spanned;

use crate::numbers::{Number, Share, millis, some_millis, spoken};
use model::ModelText;

use super::mailboxes::Order;
use super::run::{Fault, Serving};
use super::scenario::{Client, Pattern, WorldDevice, WorldModel, WorldScenario};
use crate::device::{Calibration, DeviceLimits};
use downbeat_sim::Arrivals;
use downbeat_sim::{Delay, Network};

/// A world that was read from a file, with the names of its parts.
#[derive(Clone, Debug)]
pub struct WorldFile {
    /// The title.
    pub title: String,
    /// A note for readers.
    pub note: String,
    /// The world.
    pub scenario: WorldScenario,
    /// The name of each device.
    pub devices: Vec<String>,
    /// The name of each model, and of its policy.
    pub models: Vec<(String, String)>,
}

/// The reason why a file is no world. Lines and columns count from 1.
#[derive(Debug, thiserror::Error)]
pub enum BadWorld {
    /// The file cannot be read.
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// A value in the file is wrong.
    #[error("{}:{line}:{column}: {message}", file.display())]
    At {
        /// The file.
        file: PathBuf,
        /// The line.
        line: usize,
        /// The column, in characters.
        column: usize,
        /// The wrong part, and the expected form.
        message: String,
    },
}

/// The position of an error in bytes, and its message.
type Misplaced = (usize, String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    title: String,
    #[serde(default)]
    note: String,
    seed: Option<u64>,
    /// The time when clients stop sending.
    #[serde(deserialize_with = "millis")]
    span_ms: Duration,
    #[serde(default)]
    noise: Share,
    /// The shards of the cluster's scheduler, the order in which they are worked off, and the delay
    /// of their messages.
    #[serde(default)]
    shards: Number<1, 64>,
    #[serde(default)]
    order: Order,
    #[serde(default, deserialize_with = "millis")]
    delay_ms: Duration,
    #[serde(default)]
    network: NetworkText,
    /// A calibration that `downbeat-lab calibrate` wrote, with a path from the folder of the file.
    /// All devices use it.
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
    /// Compute units; the default is the calibration's number, or 100.
    units: Option<Spanned<Number<1, 65536>>>,
    /// By partition: slots for the batches of the cluster's scheduler.
    slots: Option<Vec<Number<0, 64>>>,
    #[serde(default)]
    kind: Number<0, 15>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientText {
    model: Spanned<String>,
    /// The number of such clients.
    #[serde(default)]
    count: Number<1, 1000>,
    /// Requests a second, independent of answers. Without a rate, the next request follows the last
    /// answer after `think_ms`.
    rate: Option<Spanned<f64>>,
    #[serde(default, deserialize_with = "spoken")]
    arrivals: Option<Arrivals>,
    #[serde(default, deserialize_with = "millis")]
    think_ms: Duration,
    #[serde(default)]
    requests: Number<1, 10_000_000, 10_000_000>,
    /// A request has 1 to this many items.
    #[serde(default)]
    items: Number<1, 1024>,
    /// Each request has one of this many levels.
    priority_levels: Option<Spanned<Number<1, 16>>>,
    /// The share of requests whose clients go away.
    #[serde(default)]
    leaves: Share,
}

/// A fault. Exactly one of the names tells its kind.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultText {
    #[serde(deserialize_with = "millis")]
    at_ms: Duration,
    lost: Option<Spanned<String>>,
    back: Option<Spanned<String>>,
    /// The next launch that begins on this device takes longer.
    late: Option<Spanned<String>>,
    #[serde(default, deserialize_with = "some_millis")]
    by_ms: Option<Duration>,
    /// A device gets these partitions, with this many slots each.
    divide: Option<Spanned<String>>,
    slots: Option<Vec<Number<0, 64>>>,
    /// A model is loaded. A loaded one is reloaded.
    load: Option<Spanned<String>>,
    remove: Option<Spanned<String>>,
    /// All clients of a model go away.
    leave: Option<Spanned<String>>,
    /// Messages of the cluster's scheduler wait up to this long from now on.
    #[serde(default, deserialize_with = "some_millis")]
    delay_ms: Option<Duration>,
}

/// The default units of a device, and of a model.
const UNITS: u32 = 100;
/// The most partitions of a device.
const MOST_PARTITIONS: usize = 64;
/// The most stages of a model.
const MOST_STAGES: usize = 64;
/// The most clients of a world: their requests may all come at one instant.
const MOST_CLIENTS: usize = 10_000;
/// The highest rate of a client, requests a second.
const MOST_RATE: f64 = 1e6;

impl WorldFile {
    /// Reads a world.
    ///
    /// # Errors
    /// If the file cannot be read, is no world, or has an impossible value. The error has the line.
    pub fn read(file: &Path) -> Result<WorldFile, BadWorld> {
        let text = std::fs::read_to_string(file).map_err(|error| BadWorld::Read(file.to_owned(), error))?;
        WorldFile::parse(&text, file)
    }

    /// Parses `text`, the contents of `file`, as [`WorldFile::read`] does.
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

/// Returns the number of the item with this name.
fn find(names: &[&Spanned<String>], what: &str, name: &Spanned<String>) -> Result<usize, Misplaced> {
    names.iter().position(|known| known.get_ref() == name.get_ref()).ok_or_else(|| {
        let known: Vec<&str> = names.iter().map(|known| known.get_ref().as_str()).collect();
        (name.span().start, format!("there is no {what} '{}'; there are: {}", name.get_ref(), known.join(", ")))
    })
}

/// Returns the names, or an error if a name occurs twice.
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
