//! The user's settings of a device policy, and the policy that follows from them for a model.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::de::value::{Error as ValueError, MapDeserializer};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::segment_profile::SegmentProfile;
use super::table::{ModelSpec, PolicyName};
use crate::ids::PartitionId;
use crate::time::Duration;

/// The user's settings by name, as they are written.
pub type WrittenSettings = BTreeMap<String, Value>;

/// A day in milliseconds: the longest time in a setting.
const LONGEST_MS: f64 = 86_400_000.0;

/// The settings of a policy, from which the policy's options follow. The settings also tell what
/// the host of a model must prepare for the policy.
///
/// Settings are read from [`WrittenSettings`]. Each may be left out or has a default.
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

    /// The policy for a model.
    ///
    /// # Errors
    /// If the settings do not suit the model.
    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String>;
}

/// The places where a model is cut into segments, at load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// The model stays one segment.
    #[default]
    Whole,
    /// Into this many segments of about equal measured time. Each cut is near the ideal point,
    /// where few bytes are alive.
    Stages(usize),
    /// After these values or operators, named as in the graph that the engine runs.
    At(Vec<String>),
}

/// A policy's need of an input ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingNeed {
    /// The fewest slots, one an item; the ring may have more.
    pub least: u32,
    /// Whether the policy cannot serve the model without the ring.
    pub must: bool,
}

/// The rule by which a request of a model with several exits is answered before the last segment
/// (DVABatch §9.2).
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExitRule {
    /// The output that decides. The request is answered if each vector along the output's last
    /// dimension has a value of at least `confidence`.
    pub output: String,
    /// The threshold for `output`, for probabilities between 0 and 1.
    pub confidence: f32,
    /// The outputs without a value yet, which are answered with the value of `output`.
    #[serde(default)]
    pub answers: Vec<String>,
}

/// A model for which a policy is made.
#[derive(Clone, Debug)]
pub struct PolicyModel {
    /// The model's partition.
    pub partition: PartitionId,
    /// The latencies of the model's segments.
    pub profile: SegmentProfile,
    /// The most items of a request, and of a batch.
    pub max_batch: u32,
    /// Whether requests vary in length and are padded to the longest of their batch.
    pub padded: bool,
    /// The time that a request may wait for others, if the settings do not set it.
    pub queue_delay: Duration,
    /// Whether to give up requests that can no longer be answered by their deadline.
    pub drop: bool,
    /// The most items that wait.
    pub queue_bound: u32,
    /// The slots of the input ring; 0: there is no ring.
    pub ring_slots: u32,
    /// The cores that run the launches; `None`: launches side by side do not take cores from one
    /// another, as on a GPU.
    pub cores: Option<Cores>,
}

/// The cores that launches share with one another and with all other work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cores {
    /// The number of cores. More launches at once would only take cores from one another.
    pub count: u32,
    /// Launches of at most this latency are cheaper one after another than side by side.
    pub brief: Duration,
}

/// The settings for requests of different lengths in one batch. Every policy that makes batches has
/// them, and its host carries them out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PaddingSettings {
    /// Whether requests of different lengths share batches, padded with zeros. The model's answers
    /// must not depend on the padding.
    pub pad: bool,
    /// The longest request that is accepted; `None`: 4,096.
    pub max_length: Option<u32>,
    /// One in this many padded requests runs once more alone, off the path of requests, to compare
    /// the answers. 0: none; `None`: 256.
    pub pad_check_every: Option<u32>,
}

/// A policy with its settings.
#[derive(Clone, Debug)]
pub struct ChosenPolicy {
    /// The policy's name.
    pub name: PolicyName,
    /// The settings for requests of different lengths.
    pub padding: PaddingSettings,
    /// The policy's own settings.
    pub settings: Arc<dyn PolicySettings>,
}

/// The reason why settings of a policy are invalid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadSettings {
    /// The policy does not know the setting.
    #[error("unknown setting '{key}'{}; {}", known_elsewhere(key, *.policy), allowed(known))]
    Unknown {
        /// The setting's name.
        key: String,
        /// The policy; `None`: no policy knows the setting.
        policy: Option<PolicyName>,
        /// The names that the policy knows.
        known: Vec<&'static str>,
    },
    /// The value is invalid.
    #[error("{key}: {reason}")]
    Value {
        /// The setting's name.
        key: String,
        /// The reason, in words.
        reason: String,
    },
    /// Values are not possible, or not in combination.
    #[error("{0}")]
    Check(String),
}

fn allowed(known: &[&str]) -> String {
    match known {
        [] => "it has no settings".to_owned(),
        known => format!("here are allowed: {}", known.join(", ")),
    }
}

/// Names the other policies that know the setting.
fn known_elsewhere(key: &str, policy: Option<PolicyName>) -> String {
    let Some(policy) = policy else { return String::new() };
    let others = PolicyName::all().filter(|other| other.keys().contains(&key)).map(|other| other.to_string());
    let others = others.collect::<Vec<_>>().join(", ");
    let others = if others.is_empty() { others } else { format!(", only {others}") };
    format!(": the policy {policy} does not know it{others}")
}

impl PolicyName {
    /// The names of the policy's settings.
    pub fn keys(self) -> Vec<&'static str> {
        let padding = if self.makes_batches() { keys::<PaddingSettings>() } else { &[] };
        padding.iter().chain((self.0.keys)()).copied().collect()
    }

    /// Reads the policy's settings.
    ///
    /// # Errors
    /// For the first setting that is unknown or invalid, or for settings that do not go together.
    pub fn read(self, written: &WrittenSettings) -> Result<ChosenPolicy, BadSettings> {
        for (key, value) in written {
            self.read_one(key, value)?;
        }
        let (padding, own) = self.parse(written.clone()).map_err(BadSettings::Check)?;
        own.check().map_err(BadSettings::Check)?;
        if padding.max_length == Some(0) {
            return Err(BadSettings::Check("max_length is at least 1".to_owned()));
        }
        Ok(ChosenPolicy { name: self, padding, settings: own })
    }

    /// Reads the settings that the policy knows, as [`read`](Self::read) does, and ignores others.
    ///
    /// # Errors
    /// If a known setting is invalid.
    pub fn read_known(self, written: &WrittenSettings) -> Result<ChosenPolicy, BadSettings> {
        let known = self.keys();
        let of_it = written.iter().filter(|(key, _)| known.contains(&key.as_str()));
        self.read(&of_it.map(|(key, value)| (key.clone(), value.clone())).collect())
    }

    /// Checks one setting by itself, but not in combination with others.
    ///
    /// # Errors
    /// [`BadSettings::Unknown`] or [`BadSettings::Value`].
    pub fn read_one(self, key: &str, value: &Value) -> Result<(), BadSettings> {
        let known = self.keys();
        if !known.contains(&key) {
            return Err(BadSettings::Unknown { key: key.to_owned(), policy: Some(self), known });
        }
        let one = [(key.to_owned(), value.clone())];
        let read = self.parse(one.into()).map(drop);
        read.map_err(|reason| BadSettings::Value { key: key.to_owned(), reason })
    }

    fn parse(self, mut written: WrittenSettings) -> Result<(PaddingSettings, Arc<dyn PolicySettings>), String> {
        let padding = keys::<PaddingSettings>();
        let padding = written.extract_if(.., |key, _| padding.contains(&key.as_str())).collect();
        let padding = PaddingSettings::deserialize(Value::Object(padding)).map_err(|error| error.to_string())?;
        Ok((padding, (self.0.settings)(Value::Object(written.into_iter().collect()))?))
    }
}

/// Checks one setting of a policy that is not chosen yet, as [`PolicyName::read_one`] does.
///
/// # Errors
/// If no policy knows the setting, or a policy that knows it cannot read it.
pub fn read_one_of_any(key: &str, value: &Value) -> Result<(), BadSettings> {
    let mut known: Vec<_> = PolicyName::all().flat_map(PolicyName::keys).collect();
    known.sort_unstable();
    known.dedup();
    if !known.contains(&key) {
        return Err(BadSettings::Unknown { key: key.to_owned(), policy: None, known });
    }
    PolicyName::all().filter(|policy| policy.keys().contains(&key)).try_for_each(|policy| policy.read_one(key, value))
}

/// Reads the settings of a policy of this type from an object.
pub(super) fn read<S: PolicySettings + DeserializeOwned + 'static>(
    written: Value,
) -> Result<Arc<dyn PolicySettings>, String> {
    match S::deserialize(written) {
        Ok(settings) => Ok(Arc::new(settings)),
        Err(error) => Err(error.to_string()),
    }
}

/// The names of a struct's fields, as they are written.
pub(super) fn keys<S: DeserializeOwned>() -> &'static [&'static str] {
    let mut found: &'static [&'static str] = &[];
    // Only the names count. A value or an error of this call is thrown away.
    let _ = S::deserialize(Fields(&mut found));
    found
}

/// A deserializer that records the fields that a struct asks for.
struct Fields<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Fields<'_> {
    type Error = ValueError;

    fn deserialize_any<V: serde::de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        visitor.visit_map(MapDeserializer::new(std::iter::empty::<(&str, &str)>()))
    }

    fn deserialize_struct<V: serde::de::Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ValueError> {
        *self.0 = fields;
        self.deserialize_any(visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq tuple
        tuple_struct map enum identifier ignored_any
    }
}

/// Reads milliseconds, zero included.
pub(super) fn millis<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let ms = f64::deserialize(deserializer)?;
    match (0.0..=LONGEST_MS).contains(&ms) {
        true => Ok(Some(Duration::from_millis_f64(ms))),
        false => Err(D::Error::custom(format!("{ms} ms: must be between 0 and a day"))),
    }
}

/// Reads `true`, `false`, or `"auto"`, which gives `None`.
pub(super) fn switch<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<bool>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected true, false or \"auto\"")]
    enum Written {
        Switch(bool),
        Text(String),
    }
    match Written::deserialize(deserializer)? {
        Written::Switch(on) => Ok(Some(on)),
        Written::Text(text) if text == "auto" => Ok(None),
        Written::Text(text) => Err(D::Error::custom(format!("'{text}' is not true, false or \"auto\""))),
    }
}

/// Checks that each given number is at least 1.
pub(super) fn at_least_one(given: &[(&str, Option<u32>)]) -> Result<(), String> {
    match given.iter().find(|(_, number)| *number == Some(0)) {
        Some((name, _)) => Err(format!("{name} is 0; it must be at least 1")),
        None => Ok(()),
    }
}
