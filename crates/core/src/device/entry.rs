//! The interface of a device policy to the table of policies: the policy's name, options, settings and
//! demands.

use std::fmt;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use super::auto_inputs::{AutoInputs, Overlap};
use super::scheduler::{BadPolicy, DeviceModel};
use super::settings::{self, Cut, ExitRule, PaddedTo, PolicyModel, RingNeed};
use super::staging::Staging;
use crate::ids::PartitionId;

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

/// Predicts the highest throughput of a model's policy, in items per second. `None`: the policy
/// cannot have the model.
pub type Predict = fn(&AutoInputs, &Overlap) -> Option<f64>;

/// A line of the table.
#[derive(Debug)]
pub struct PolicyEntry {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    pub(super) makes_batches: bool,
    pub(super) forms_groups: bool,
    pub(super) predict: Predict,
    pub(super) build: fn(&Value) -> Result<DeviceModel, String>,
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
        let (settings, keys) = (read::<S>, settings::keys::<S>);
        let predict: Predict = |_, _| None;
        let (makes_batches, forms_groups, build) = (true, false, build::<O>);
        PolicyEntry { name, about, makes_batches, forms_groups, predict, build, settings, keys }
    }

    /// The entry of a policy that leaves batches to the cluster's scheduler.
    pub const fn granted(self) -> Self {
        PolicyEntry { makes_batches: false, ..self }
    }

    /// The entry of a policy whose requests run in groups of operators with those of other models
    /// ([`overlap`](super::overlap)).
    pub const fn grouped(self) -> Self {
        PolicyEntry { forms_groups: true, ..self }
    }

    /// The entry of a policy that `auto` may choose by this prediction.
    pub const fn predicted(self, predict: Predict) -> Self {
        PolicyEntry { predict, ..self }
    }
}

fn build<O: PolicyOptions>(options: &Value) -> Result<DeviceModel, String> {
    let options = O::deserialize(options).map_err(|error| error.to_string())?;
    options.check()?;
    Ok(options.build())
}

/// The name of a policy in the table of policies, or [`PolicyName::AUTO`].
#[derive(Clone, Copy)]
pub struct PolicyName(pub(super) &'static PolicyEntry);

impl PolicyName {
    /// The name of the policy that is made of options `O`.
    pub const fn of<O: PolicyOptions>() -> Self {
        PolicyName(O::ENTRY)
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

    /// Whether the policy's requests run in groups of operators with those of other models.
    pub const fn forms_groups(self) -> bool {
        self.0.forms_groups
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

impl Serialize for PolicyName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.name)
    }
}

/// The settings of a policy, from which the policy's options follow. The settings also tell what
/// the host of a model must prepare for the policy.
///
/// Settings are read from [`WrittenSettings`](super::WrittenSettings). Each may be left out or has a default.
pub trait PolicySettings: fmt::Debug + Send + Sync {
    /// Checks the settings alone and in combination, without a model.
    ///
    /// # Errors
    /// The mistake, with the names of the settings.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// Where the model is cut into segments, and whether the user asked for exactly this. A default
    /// cut is left out if the model cannot be cut.
    fn cut(&self) -> (Cut, bool) {
        (Cut::Whole, true)
    }

    /// The number of lanes that run at once under full load and share the device's cores.
    fn at_once(&self) -> u32 {
        1
    }

    /// The largest request in items that the policy takes, of a model with batches of up to
    /// `max_batch`.
    ///
    /// # Errors
    /// If the settings do not suit the model.
    fn largest_request(&self, max_batch: u32) -> Result<u32, String> {
        Ok(max_batch)
    }

    /// The input ring for requests of at most `max_batch` items. `padded`: requests vary in length.
    ///
    /// # Errors
    /// If the settings do not suit the model.
    fn ring(&self, max_batch: u32, padded: bool) -> Result<Option<RingNeed>, String> {
        let _ = (max_batch, padded);
        Ok(None)
    }

    /// The rules by which requests may be answered before the last segment.
    fn exits(&self) -> &[ExitRule] {
        &[]
    }

    /// The length to which the policy pads requests of different lengths, if this costs a CPU more
    /// than batches gain.
    fn costly_padding(&self) -> Option<PaddedTo> {
        None
    }

    /// The stages and buffer pairs that suit the settings, if the settings leave them to a search when
    /// the model is loaded. Several: the search tries them all.
    fn open_stagings(&self) -> Vec<Staging> {
        Vec::new()
    }

    /// The same settings with these stages and buffer pairs; `None`: the policy has none.
    fn with_staging(&self, _: Staging) -> Option<Arc<dyn PolicySettings>> {
        None
    }

    /// Adds the policy's demands to the inputs of [`auto`](super::AutoInputs), if the policy can
    /// have the model.
    fn tell_auto(&self, _: &mut AutoInputs) {}

    /// The policy for a model.
    ///
    /// # Errors
    /// If the settings do not suit the model.
    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String>;
}

/// Reads the settings of a policy of this type from an object.
fn read<S: PolicySettings + DeserializeOwned + 'static>(written: Value) -> Result<Arc<dyn PolicySettings>, String> {
    match S::deserialize(written) {
        Ok(settings) => Ok(Arc::new(settings)),
        Err(error) => Err(error.to_string()),
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
        ModelSpec { name: String::new(), policy: PolicyName::of::<O>(), options, partition }
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
