//! The workload file: models with their needs, devices, limits.
//!
//! The file is TOML. `?` marks keys that may be left out, with their defaults:
//!
//! | key | unit | meaning |
//! |---|---|---|
//! | `sub_clusters` | | `l`: the number of sub-clusters |
//! | `devices` ? | | the number of devices in all, to compare with the number needed |
//! | `device_memory_mib` ? unbounded | MiB | `Smax`: memory of one device |
//! | `max_rate` ? unbounded | 1/s | `Rmax`: most requests that a sub-cluster's dispatcher takes |
//! | `memory_weight` ? 1 | | weight of memory imbalance relative to rate imbalance ([`Problem::memory_weight`]) |
//! | `max_disruption` ? unbounded | as `load_cost` | `Cmax`: highest allowed cost of leaving the running assignment |
//! | `[[models]]` | | one for each model: |
//! | `name` | | |
//! | `rate` | 1/s | `r`: requests |
//! | `memory_mib` | MiB | `s`: memory of the loaded model |
//! | `dynamic_memory_mib` ? 0 | MiB | `d`: additional memory of the running model |
//! | `load_cost` ? 1 | any | `c`: cost of loading the model, and of unloading it |
//! | `slo_ms` | ms | from arrival to answer |
//! | `profile` | ms | `{ alpha_ms, beta_ms, max_batch ? 1024 }`, or `{ points_ms = [[batch, latency], ...] }` |
//! | `running_on` ? nowhere | | the sub-cluster where the model runs now, from 0 |
//!
//! A key that is not listed is an error.

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

/// The content of a workload file, checked.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// The number of sub-clusters.
    #[serde(deserialize_with = "some_sub_clusters")]
    pub sub_clusters: usize,
    /// The number of devices in all.
    pub devices: Option<u32>,
    /// Bytes of one device's memory.
    #[serde(rename = "device_memory_mib", default, deserialize_with = "some_mib")]
    pub device_memory: Option<u64>,
    /// Most requests per second of a sub-cluster.
    #[serde(default, deserialize_with = "some_number")]
    pub max_rate: Option<f64>,
    /// See [`Problem::memory_weight`].
    #[serde(default = "one", deserialize_with = "number")]
    pub memory_weight: f64,
    /// See [`Problem::max_disruption`].
    #[serde(default, deserialize_with = "some_number")]
    pub max_disruption: Option<f64>,
    /// The models.
    pub models: Vec<Entry>,
}

/// A model of a workload.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The model's name.
    pub name: String,
    /// Requests per second.
    #[serde(deserialize_with = "number")]
    pub rate: f64,
    /// Bytes of static memory.
    #[serde(rename = "memory_mib", deserialize_with = "mib")]
    pub memory: u64,
    /// Bytes of dynamic memory.
    #[serde(rename = "dynamic_memory_mib", default, deserialize_with = "mib")]
    pub dynamic_memory: u64,
    /// See [`Model::load_cost`].
    #[serde(default = "one", deserialize_with = "number")]
    pub load_cost: f64,
    /// Milliseconds from arrival to answer.
    #[serde(deserialize_with = "number")]
    pub slo_ms: f64,
    /// The sub-cluster where the model runs now.
    pub running_on: Option<usize>,
    /// The latency of the model's batches.
    pub profile: Profile,
}

/// The latency of a model's batches.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = "a profile is either alpha_ms and beta_ms (and max_batch), or points_ms"
)]
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
    /// A measured profile.
    Points {
        /// Pairs of a batch size and its latency in milliseconds.
        points_ms: Vec<(u32, f64)>,
    },
}

/// The place and message of an error in a file.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{line}:{column}: {message}")]
pub struct BadWorkload {
    /// The line, from 1.
    pub line: usize,
    /// The column, from 1.
    pub column: usize,
    /// The error, and the expected content.
    pub message: String,
}

/// The positions of a file's models in its text.
#[derive(Deserialize)]
struct Places {
    models: Vec<Spanned<serde::de::IgnoredAny>>,
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

fn some_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    number(deserializer).map(Some)
}

fn mib<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let value = number(deserializer)?;
    // The bound keeps sums over many models within u64.
    if value <= 1e9 {
        Ok((value * MIB).round() as u64)
    } else {
        Err(D::Error::custom(format!("{value} MiB is too much")))
    }
}

fn some_mib<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    mib(deserializer).map(Some)
}

fn some_sub_clusters<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    match usize::deserialize(deserializer)? {
        0 => Err(D::Error::custom("at least 1 sub-cluster is needed")),
        some => Ok(some),
    }
}

impl Profile {
    /// Converts the profile to the scheduler's type.
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
            Profile::Points { points_ms: points } => {
                let points: Result<Vec<_>, String> = points.iter().map(|(b, l)| Ok((*b, ms(*l)?))).collect();
                LatencyProfile::from_points(&points?)
            }
        };
        profile.map_err(|e| e.to_string())
    }
}

impl Entry {
    /// The least that the model needs; see [`fluid_need`].
    ///
    /// # Errors
    /// If its profile is invalid, or one request alone misses its SLO.
    pub fn need(&self) -> Result<FluidNeed, String> {
        let profile = self.profile.latency().map_err(|message| format!("model '{}': {message}", self.name))?;
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
    /// The first mistake in the text, with its line and column.
    pub fn parse(text: &str) -> Result<Self, BadWorkload> {
        let wrong =
            |e: toml::de::Error| at(text, e.span().map_or(0, |span| span.start), e.message().trim().replace('\n', " "));
        let workload: Workload = toml::from_str(text).map_err(wrong)?;
        let Places { models: places } = toml::from_str(text).map_err(wrong)?;
        let mut names = std::collections::BTreeSet::new();
        for (entry, place) in workload.models.iter().zip(places) {
            let wrong = |message| at(text, place.span().start, message);
            entry.need().map_err(wrong)?;
            if !names.insert(&entry.name) {
                return Err(wrong(format!("two models are named '{}'; give each model a name of its own", entry.name)));
            }
        }
        match workload.models.is_empty() {
            true => Err(at(text, 0, "there are no models: add [[models]]".to_owned())),
            false => Ok(workload),
        }
    }

    /// The problem that the partitioner solves.
    pub fn problem(&self) -> Problem {
        Problem {
            models: self
                .models
                .iter()
                .map(|m| Model {
                    name: m.name.clone(),
                    rate: m.rate,
                    requests: m.rate,
                    static_memory: m.memory,
                    dynamic_memory: m.dynamic_memory,
                    load_cost: m.load_cost,
                    loaded_in: Vec::new(),
                    running: m.running_on,
                })
                .collect(),
            sub_clusters: self.sub_clusters,
            max_rate: self.max_rate,
            runs: None,
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
