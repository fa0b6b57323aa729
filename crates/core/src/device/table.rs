//! The table of device policies: a new one is a file beside this one, and a line here.

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::elastic::ElasticOptions;
use super::granted::GrantedOptions;
use super::scheduler::{BadPolicy, DeviceModel};
use super::staged::StagedOptions;
use super::windowed::WindowedOptions;
use crate::ids::PartitionId;

/// The largest number of lanes of a model.
pub const MOST_LANES: u32 = 256;
/// The largest batch, and the most slots of a ring.
pub const MOST_ROWS: u32 = 1 << 24;

/// Every policy.
pub static POLICIES: [&PolicyEntry; 4] =
    [GrantedOptions::ENTRY, WindowedOptions::ENTRY, ElasticOptions::ENTRY, StagedOptions::ENTRY];

/// The options of a policy: what they may be, and what comes of them.
pub trait PolicyOptions: Serialize + DeserializeOwned {
    /// The policy's place in the table.
    const ENTRY: &'static PolicyEntry;

    /// Whether a policy can be made.
    ///
    /// # Errors
    /// Why not, in words.
    fn check(&self) -> Result<(), String>;

    /// The policy, for a model in the whole of a device. To be called with options that pass [`check`](Self::check).
    fn build(self) -> DeviceModel;
}

/// A line of the table.
#[derive(Debug)]
pub struct PolicyEntry {
    /// The policy's name in flags, files and logs.
    pub name: &'static str,
    build: fn(&Value) -> Result<DeviceModel, String>,
}

impl PolicyEntry {
    /// A policy that is made of such options.
    pub const fn new<O: PolicyOptions>(name: &'static str) -> Self {
        PolicyEntry { name, build: build::<O> }
    }
}

fn build<O: PolicyOptions>(options: &Value) -> Result<DeviceModel, String> {
    let options = O::deserialize(options).map_err(|error| error.to_string())?;
    options.check()?;
    Ok(options.build())
}

/// A policy for a model as plain data: which, with which options, where.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelSpec {
    /// What people call the model, for the log.
    #[serde(default)]
    pub name: String,
    #[serde(with = "by_name")]
    policy: &'static PolicyEntry,
    options: Value,
    partition: PartitionId,
}

impl PartialEq for ModelSpec {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
            && self.policy.name == other.policy.name
            && self.partition == other.partition
            && self.options == other.options
    }
}

impl ModelSpec {
    /// These options, in a partition.
    pub fn new<O: PolicyOptions>(options: &O, partition: PartitionId) -> Self {
        // Numbers, words and lists of them: nothing of it can fail, and what is nothing builds no policy.
        let options = serde_json::to_value(options).unwrap_or_default();
        ModelSpec { name: String::new(), policy: O::ENTRY, options, partition }
    }

    /// The same for a model of that name.
    pub fn named(self, name: String) -> Self {
        ModelSpec { name, ..self }
    }

    /// The policy's name.
    pub fn policy(&self) -> &'static str {
        self.policy.name
    }

    /// The policy, fresh.
    ///
    /// # Errors
    /// [`BadPolicy::Options`] if the options are none of this policy, or do not pass its checks.
    pub fn build(&self) -> Result<DeviceModel, BadPolicy> {
        let model = (self.policy.build)(&self.options);
        let model = model.map_err(|reason| BadPolicy::Options { policy: self.policy.name, reason })?;
        Ok(DeviceModel { partition: self.partition, ..model })
    }
}

/// The policy of that name.
pub fn policy(name: &str) -> Option<&'static PolicyEntry> {
    POLICIES.into_iter().find(|entry| entry.name == name)
}

/// Checks a number that is at least 1.
pub(super) fn at_most(what: &str, number: u32, most: u32) -> Result<(), String> {
    match (1..=most).contains(&number) {
        true => Ok(()),
        false => Err(format!("{what} is {number}; it must be 1 to {most}")),
    }
}

/// A policy by its name.
mod by_name {
    use super::*;

    pub fn serialize<S: serde::Serializer>(entry: &&'static PolicyEntry, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(entry.name)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<&'static PolicyEntry, D::Error> {
        let name = String::deserialize(deserializer)?;
        let names = POLICIES.map(|entry| entry.name).join(", ");
        policy(&name)
            .ok_or_else(|| D::Error::custom(format!("unknown device policy '{name}'; expected one of: {names}")))
    }
}
