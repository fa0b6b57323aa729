//! The table of device policies. A new policy is a file beside this one, and a line in this table.
//! All code that knows policies by name uses the table.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::elastic::ElasticOptions;
use super::exclusive::ExclusiveOptions;
use super::overlapped::OverlappedOptions;
use super::scheduler::{BadPolicy, DeviceModel};
use super::settings::{self, PolicySettings};
use super::staged::StagedOptions;
use super::windowed::WindowedOptions;
use crate::ids::PartitionId;

/// The most lanes of a model.
pub const MOST_LANES: u32 = 256;
/// The largest batch, and the most slots of a ring.
pub const MOST_ROWS: u32 = 1 << 24;

/// Every policy.
static POLICIES: [&PolicyEntry; 5] = [
    ExclusiveOptions::ENTRY,
    WindowedOptions::ENTRY,
    ElasticOptions::ENTRY,
    StagedOptions::ENTRY,
    OverlappedOptions::ENTRY,
];

/// The options of a policy, with their checks and the policy that follows from them.
pub trait PolicyOptions: Serialize + DeserializeOwned {
    /// The policy's place in the table.
    const ENTRY: &'static PolicyEntry;

    /// Whether a policy can be made with these options.
    ///
    /// # Errors
    /// The reason why not, in words.
    fn check(&self) -> Result<(), String>;

    /// Makes the policy, for a model in the whole of a device. Requires options that pass
    /// [`check`](Self::check).
    fn build(self) -> DeviceModel;
}

/// A line of the table.
#[derive(Debug)]
pub struct PolicyEntry {
    name: &'static str,
    about: &'static str,
    makes_batches: bool,
    build: fn(&Value) -> Result<DeviceModel, String>,
    pub(super) settings: fn(Value) -> Result<Arc<dyn PolicySettings>, String>,
    pub(super) keys: fn() -> &'static [&'static str],
}

impl PolicyEntry {
    /// A policy with this name in flags, files and logs. It is made of options `O`, which follow
    /// from settings `S`. `about` tells in a few words how batches are made.
    pub const fn new<O, S>(name: &'static str, about: &'static str) -> Self
    where
        O: PolicyOptions,
        S: PolicySettings + DeserializeOwned + 'static,
    {
        let (settings, keys) = (settings::read::<S>, settings::keys::<S>);
        PolicyEntry { name, about, makes_batches: true, build: build::<O>, settings, keys }
    }

    /// The entry of a policy that leaves batches to the cluster's scheduler.
    pub const fn granted(self) -> Self {
        PolicyEntry { makes_batches: false, ..self }
    }
}

fn build<O: PolicyOptions>(options: &Value) -> Result<DeviceModel, String> {
    let options = O::deserialize(options).map_err(|error| error.to_string())?;
    options.check()?;
    Ok(options.build())
}

/// The name of a policy in the table, or [`PolicyName::AUTO`].
#[derive(Clone, Copy)]
pub struct PolicyName(pub(super) &'static PolicyEntry);

impl PolicyName {
    /// The policy that every model can have: the scheduler makes its batches.
    pub const EXCLUSIVE: PolicyName = PolicyName(ExclusiveOptions::ENTRY);

    /// The policy that runs one batch after another.
    pub const WINDOWED: PolicyName = PolicyName(WindowedOptions::ENTRY);

    /// E²bird's policy.
    pub const ELASTIC: PolicyName = PolicyName(ElasticOptions::ENTRY);

    /// DVABatch's policy.
    pub const STAGED: PolicyName = PolicyName(StagedOptions::ENTRY);

    /// Abacus' policy.
    pub const OVERLAP: PolicyName = PolicyName(OverlappedOptions::ENTRY);

    /// The choice of a policy by measurements, where the model is served
    /// ([`AutoInputs::choose`](super::AutoInputs::choose)). It is not in the table.
    pub const AUTO: PolicyName = PolicyName(&PolicyEntry {
        name: "auto",
        about: "whichever suits a model, as measured",
        makes_batches: false,
        build: |_| Err(NO_POLICY.to_owned()),
        settings: |_| Err(NO_POLICY.to_owned()),
        keys: || &[],
    });

    /// All policies in the table.
    pub fn all() -> impl Iterator<Item = PolicyName> {
        POLICIES.into_iter().map(PolicyName)
    }

    /// The name in flags, files and logs.
    pub const fn name(self) -> &'static str {
        self.0.name
    }

    /// How the policy's batches are made, in a few words.
    pub const fn about(self) -> &'static str {
        self.0.about
    }

    /// Whether the policy gets requests and makes batches of them. If so, the model needs a batch
    /// dimension, and items of one shape or items that can be padded. Otherwise the cluster's
    /// scheduler makes the batches.
    pub const fn makes_batches(self) -> bool {
        self.0.makes_batches
    }
}

impl PartialEq for PolicyName {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
    }
}

impl Eq for PolicyName {}

impl fmt::Debug for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

/// The error for [`PolicyName::AUTO`] in places where no model is served.
const NO_POLICY: &str =
    "auto is a choice between policies, made for each model where it is served; name one of them here";

/// A name that is not in the table.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown device policy '{found}'; expected one of: {}, {}", POLICIES.map(|entry| entry.name).join(", "), PolicyName::AUTO)]
pub struct UnknownPolicy {
    found: String,
}

impl FromStr for PolicyName {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = PolicyName::all().chain([PolicyName::AUTO]).find(|policy| policy.0.name == name);
        found.ok_or_else(|| UnknownPolicy { found: name.chars().take(64).collect() })
    }
}

impl Serialize for PolicyName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.name)
    }
}

impl<'de> Deserialize<'de> for PolicyName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// A policy for a model as plain data: its name, options and partition.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ModelSpec {
    /// The user's name of the model, for the log.
    #[serde(default)]
    pub name: String,
    policy: PolicyName,
    #[serde(with = "options")]
    options: Value,
    partition: PartitionId,
}

impl ModelSpec {
    /// The policy with these options, in a partition.
    pub fn new<O: PolicyOptions>(options: &O, partition: PartitionId) -> Self {
        // The options are numbers, words and lists of them, which always serialize. A null value
        // would build no policy.
        let options = serde_json::to_value(options).unwrap_or_default();
        ModelSpec { name: String::new(), policy: PolicyName(O::ENTRY), options, partition }
    }

    /// The same policy for a model with this name.
    pub fn named(self, name: String) -> Self {
        ModelSpec { name, ..self }
    }

    /// The policy's name.
    pub fn policy(&self) -> PolicyName {
        self.policy
    }

    /// The policy's options by name.
    pub fn options(&self) -> &Value {
        &self.options
    }

    /// Makes the policy, without requests.
    ///
    /// # Errors
    /// [`BadPolicy::Options`] if the options are not of this policy, or do not pass its checks.
    pub fn build(&self) -> Result<DeviceModel, BadPolicy> {
        let PolicyName(entry) = self.policy;
        let model = (entry.build)(&self.options);
        let model = model.map_err(|reason| BadPolicy::Options { policy: entry.name, reason })?;
        Ok(DeviceModel { partition: self.partition, ..model })
    }
}

/// The options of a policy in files. A self-describing format such as JSON has the value itself.
/// Postcard is not self-describing, and has the options as JSON text.
mod options {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use serde_json::Value;

    pub fn serialize<S: Serializer>(options: &Value, serializer: S) -> Result<S::Ok, S::Error> {
        match serializer.is_human_readable() {
            true => options.serialize(serializer),
            false => serializer.collect_str(options),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Value, D::Error> {
        match deserializer.is_human_readable() {
            true => Value::deserialize(deserializer),
            false => serde_json::from_str(&String::deserialize(deserializer)?).map_err(D::Error::custom),
        }
    }
}

/// Checks that a number is between 1 and `most`.
pub(super) fn at_most(what: &str, number: u32, most: u32) -> Result<(), String> {
    match (1..=most).contains(&number) {
        true => Ok(()),
        false => Err(format!("{what} is {number}; it must be 1 to {most}")),
    }
}
