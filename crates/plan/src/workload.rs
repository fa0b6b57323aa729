//! The workload file: models with what they need, devices, limits.
//!
//! TOML. `?` marks what may be left out, with its default:
//!
//! | key | unit | meaning |
//! |---|---|---|
//! | `sub_clusters` | | `l`: how many there are |
//! | `devices` ? | | how many there are in all, to be compared with what is needed |
//! | `device_memory_mib` ? unbounded | MiB | `Smax`: memory of one device |
//! | `max_rate` ? unbounded | 1/s | `Rmax`: most requests that a sub-cluster's dispatcher takes |
//! | `memory_weight` ? 1 | | what memory imbalance counts beside rate imbalance ([`Problem::memory_weight`]) |
//! | `max_disruption` ? unbounded | as `load_cost` | `Cmax`: most that leaving the running assignment may cost |
//! | `[[models]]` | | one for each model: |
//! | `name` | | |
//! | `rate` | 1/s | `r`: requests |
//! | `memory_mib` | MiB | `s`: memory that it takes as long as it is loaded |
//! | `dynamic_memory_mib` ? 0 | MiB | `d`: memory that it takes while it runs |
//! | `load_cost` ? 1 | any | `c`: of loading it, and of unloading it |
//! | `slo_ms` | ms | from arrival to answer |
//! | `profile` | ms | `{ alpha_ms, beta_ms, max_batch ? 1024 }`, or `{ points_ms = [[batch, latency], ...] }` |
//! | `running_on` ? nowhere | | the sub-cluster where it runs now, from 0 |
//!
//! A key that is not listed is an error.

use std::fmt::Write as _;

use downbeat_core::{Duration, LatencyProfile};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use toml::Spanned;

use crate::fluid::{FluidNeed, fluid_need};
use crate::problem::{Model, Problem};

/// Largest file that is read, bytes.
pub const MAX_BYTES: u64 = 64 << 20;
const MIB: f64 = 1024.0 * 1024.0;
/// Largest batch of a linear profile that does not name one.
const DEFAULT_MAX_BATCH: u32 = 1024;

/// A workload as its file says it, checked.
#[derive(Clone, PartialEq, Debug)]
pub struct Workload {
    /// Sub-clusters.
    pub sub_clusters: usize,
    /// Devices in all.
    pub devices: Option<u32>,
    /// Bytes of one device's memory.
    pub device_memory: Option<u64>,
    /// Most requests per second of a sub-cluster.
    pub max_rate: Option<f64>,
    /// See [`Problem::memory_weight`].
    pub memory_weight: f64,
    /// See [`Problem::max_disruption`].
    pub max_disruption: Option<f64>,
    /// The models.
    pub models: Vec<Entry>,
}

/// A model of a workload.
#[derive(Clone, PartialEq, Debug)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Requests per second.
    pub rate: f64,
    /// Bytes of static memory.
    pub memory: u64,
    /// Bytes of dynamic memory.
    pub dynamic_memory: u64,
    /// See [`Model::load_cost`].
    pub load_cost: f64,
    /// Milliseconds from arrival to answer.
    pub slo_ms: f64,
    /// How long batches take.
    pub profile: Profile,
    /// The sub-cluster where it runs now.
    pub running_on: Option<usize>,
}

/// How long batches of a model take.
#[derive(Clone, PartialEq, Debug)]
pub enum Profile {
    /// `alpha * b + beta`.
    Linear {
        /// Milliseconds for each request of a batch.
        alpha_ms: f64,
        /// Milliseconds for each batch.
        beta_ms: f64,
        /// The largest batch.
        max_batch: Option<u32>,
    },
    /// Measured: batch size and milliseconds.
    Points(Vec<(u32, f64)>),
}

/// What is wrong with a file, and where.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{line}:{column}: {message}")]
pub struct BadWorkload {
    /// From 1.
    pub line: usize,
    /// From 1.
    pub column: usize,
    /// What was wrong and what was expected.
    pub message: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenFile {
    #[serde(deserialize_with = "some_sub_clusters")]
    sub_clusters: usize,
    devices: Option<u32>,
    #[serde(default, deserialize_with = "optional_mib")]
    device_memory_mib: Option<u64>,
    #[serde(default, deserialize_with = "optional_number")]
    max_rate: Option<f64>,
    #[serde(default = "one", deserialize_with = "number")]
    memory_weight: f64,
    #[serde(default, deserialize_with = "optional_number")]
    max_disruption: Option<f64>,
    models: Vec<Spanned<WrittenModel>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenModel {
    name: String,
    #[serde(deserialize_with = "number")]
    rate: f64,
    #[serde(deserialize_with = "mib")]
    memory_mib: u64,
    #[serde(default, deserialize_with = "mib")]
    dynamic_memory_mib: u64,
    #[serde(default = "one", deserialize_with = "number")]
    load_cost: f64,
    #[serde(deserialize_with = "number")]
    slo_ms: f64,
    profile: Spanned<WrittenProfile>,
    running_on: Option<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenProfile {
    alpha_ms: Option<f64>,
    beta_ms: Option<f64>,
    max_batch: Option<u32>,
    points_ms: Option<Vec<(u32, f64)>>,
}

fn one() -> f64 {
    1.0
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let value = f64::deserialize(deserializer)?;
    if value >= 0.0 && value.is_finite() {
        Ok(value)
    } else {
        Err(D::Error::custom(format!("{value} must be a finite number and at least 0")))
    }
}

fn optional_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    number(deserializer).map(Some)
}

fn mib<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let value = number(deserializer)?;
    // Below what sums of many models in u64 could pass.
    if value <= 1e9 {
        Ok((value * MIB).round() as u64)
    } else {
        Err(D::Error::custom(format!("{value} MiB is too much")))
    }
}

fn optional_mib<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    mib(deserializer).map(Some)
}

fn some_sub_clusters<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    match usize::deserialize(deserializer)? {
        0 => Err(D::Error::custom("at least 1 sub-cluster is needed")),
        some => Ok(some),
    }
}

impl Profile {
    fn read(written: &WrittenProfile) -> Result<Self, String> {
        match written {
            WrittenProfile { alpha_ms: Some(alpha_ms), beta_ms: Some(beta_ms), max_batch, points_ms: None } => {
                Ok(Profile::Linear { alpha_ms: *alpha_ms, beta_ms: *beta_ms, max_batch: *max_batch })
            }
            WrittenProfile { alpha_ms: None, beta_ms: None, max_batch: None, points_ms: Some(points) } => {
                Ok(Profile::Points(points.clone()))
            }
            _ => Err("a profile is either alpha_ms and beta_ms (and max_batch), or points_ms".to_owned()),
        }
    }

    /// The profile as the scheduler has it.
    ///
    /// # Errors
    /// If the numbers are no latency profile.
    pub fn latency(&self) -> Result<LatencyProfile, String> {
        let ms = |ms: f64| {
            if (0.0..=86_400_000.0).contains(&ms) {
                Ok(Duration::from_millis_f64(ms))
            } else {
                Err(format!("{ms} ms must be at least 0 and at most a day"))
            }
        };
        let profile = match self {
            Profile::Linear { alpha_ms, beta_ms, max_batch } => {
                LatencyProfile::linear(ms(*alpha_ms)?, ms(*beta_ms)?, max_batch.unwrap_or(DEFAULT_MAX_BATCH))
            }
            Profile::Points(points) => {
                let points: Result<Vec<_>, String> = points.iter().map(|(b, l)| Ok((*b, ms(*l)?))).collect();
                LatencyProfile::from_points(&points?)
            }
        };
        profile.map_err(|e| e.to_string())
    }
}

impl Entry {
    /// What it needs at least; see [`fluid_need`].
    ///
    /// # Errors
    /// If its profile is none, or one request alone misses its SLO.
    pub fn need(&self) -> Result<FluidNeed, String> {
        let profile = self.profile.latency()?;
        fluid_need(self.rate, &profile, Duration::from_millis_f64(self.slo_ms)).ok_or_else(|| {
            format!(
                "model '{}' cannot make its SLO of {} ms: one request alone takes {} ms",
                self.name,
                self.slo_ms,
                profile.latency(1).as_millis_f64()
            )
        })
    }
}

impl Workload {
    /// Reads the text of a workload file.
    ///
    /// # Errors
    /// The first thing that is not as it should be, with its line and column.
    pub fn parse(text: &str) -> Result<Self, BadWorkload> {
        let written: WrittenFile = toml::from_str(text)
            .map_err(|e| at(text, e.span().map_or(0, |span| span.start), e.message().trim().replace('\n', " ")))?;
        let mut models: Vec<Entry> = Vec::with_capacity(written.models.len());
        let mut names = std::collections::BTreeSet::new();
        for spanned in written.models {
            let start = spanned.span().start;
            let model = spanned.into_inner();
            let profile_start = model.profile.span().start;
            let wrong = |message: String| at(text, profile_start, format!("model '{}': {message}", model.name));
            let profile = Profile::read(model.profile.as_ref()).map_err(wrong)?;
            profile.latency().map_err(wrong)?;
            let entry = Entry {
                profile,
                name: model.name,
                rate: model.rate,
                memory: model.memory_mib,
                dynamic_memory: model.dynamic_memory_mib,
                load_cost: model.load_cost,
                slo_ms: model.slo_ms,
                running_on: model.running_on,
            };
            entry.need().map_err(|message| at(text, start, message))?;
            if !names.insert(entry.name.clone()) {
                return Err(at(text, start, format!("there is a model named '{}' already", entry.name)));
            }
            models.push(entry);
        }
        if models.is_empty() {
            return Err(at(text, 0, "there are no models: add [[models]]".to_owned()));
        }
        Ok(Workload {
            sub_clusters: written.sub_clusters,
            devices: written.devices,
            device_memory: written.device_memory_mib,
            max_rate: written.max_rate,
            memory_weight: written.memory_weight,
            max_disruption: written.max_disruption,
            models,
        })
    }

    /// The workload as a file that [`Workload::parse`] reads.
    pub fn to_toml(&self) -> String {
        // Numbers as floats with a point or an exponent, also where they are whole: a whole one may be beyond TOML's integers.
        let mut text = String::new();
        let mib = |bytes: u64| bytes as f64 / MIB;
        // Writing to a string cannot fail.
        let _ = writeln!(text, "sub_clusters = {}", self.sub_clusters);
        if let Some(devices) = self.devices {
            let _ = writeln!(text, "devices = {devices}");
        }
        if let Some(memory) = self.device_memory {
            let _ = writeln!(text, "device_memory_mib = {:?}", mib(memory));
        }
        if let Some(rate) = self.max_rate {
            let _ = writeln!(text, "max_rate = {rate:?}");
        }
        let _ = writeln!(text, "memory_weight = {:?}", self.memory_weight);
        if let Some(cost) = self.max_disruption {
            let _ = writeln!(text, "max_disruption = {cost:?}");
        }
        for model in &self.models {
            let name = toml::Value::from(model.name.clone());
            let _ = writeln!(text, "\n[[models]]\nname = {name}\nrate = {:?}", model.rate);
            let _ = writeln!(text, "memory_mib = {:?}", mib(model.memory));
            let _ = writeln!(text, "dynamic_memory_mib = {:?}", mib(model.dynamic_memory));
            let _ = writeln!(text, "load_cost = {:?}\nslo_ms = {:?}", model.load_cost, model.slo_ms);
            let _ = match &model.profile {
                Profile::Linear { alpha_ms, beta_ms, max_batch: None } => {
                    writeln!(text, "profile = {{ alpha_ms = {alpha_ms:?}, beta_ms = {beta_ms:?} }}")
                }
                Profile::Linear { alpha_ms, beta_ms, max_batch: Some(most) } => {
                    writeln!(text, "profile = {{ alpha_ms = {alpha_ms:?}, beta_ms = {beta_ms:?}, max_batch = {most} }}")
                }
                Profile::Points(points) => {
                    let points: Vec<String> = points.iter().map(|(b, l)| format!("[{b}, {l:?}]")).collect();
                    writeln!(text, "profile = {{ points_ms = [{}] }}", points.join(", "))
                }
            };
            if let Some(cluster) = model.running_on {
                let _ = writeln!(text, "running_on = {cluster}");
            }
        }
        text
    }

    /// What the partitioner is to solve.
    pub fn problem(&self) -> Problem {
        Problem {
            models: self
                .models
                .iter()
                .map(|m| Model {
                    name: m.name.clone(),
                    rate: m.rate,
                    static_memory: m.memory,
                    dynamic_memory: m.dynamic_memory,
                    load_cost: m.load_cost,
                    running: m.running_on,
                })
                .collect(),
            sub_clusters: self.sub_clusters,
            max_rate: self.max_rate,
            max_memory: self.device_memory,
            memory_weight: self.memory_weight,
            max_disruption: self.max_disruption,
        }
    }
}

/// `message` at a byte of `text`.
fn at(text: &str, offset: usize, message: String) -> BadWorkload {
    let before = text.get(..offset).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    BadWorkload { line, column, message }
}
