//! What people may say about a device policy, and what follows from it for a model.

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

/// Settings by their names, as they are written.
pub type WrittenSettings = BTreeMap<String, Value>;

/// A day, milliseconds: the longest time that a setting may be.
const LONGEST_MS: f64 = 86_400_000.0;

/// The settings of a policy, and what follows from them: what the host of a model has to prepare for the policy, and the policy's options.
///
/// They are read from [`WrittenSettings`]; each is left out or has a default.
pub trait PolicySettings: fmt::Debug + Send + Sync {
    /// Whether they go together, and each is possible, whatever the model.
    ///
    /// # Errors
    /// What is wrong, with the names of the settings.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// Where the model is cut into segments, and whether somebody asked for just that: what nobody asked for is not cut where it cannot be.
    fn cut(&self) -> (Cut, bool) {
        (Cut::Whole, true)
    }

    /// How many of its lanes run at once when there is enough to do: they share the device's cores.
    fn at_once(&self) -> u32 {
        1
    }

    /// The largest request that it takes, items, of a model that could take batches of `max_batch`.
    ///
    /// # Errors
    /// If the settings do not suit the model.
    fn largest_request(&self, max_batch: u32) -> Result<u32, String> {
        Ok(max_batch)
    }

    /// The input ring that requests of at most `max_batch` items enter. `padded`: they vary in length.
    ///
    /// # Errors
    /// If the settings do not suit the model.
    fn ring(&self, max_batch: u32, padded: bool) -> Result<Option<RingNeed>, String> {
        let _ = (max_batch, padded);
        Ok(None)
    }

    /// Where requests may be answered before the last segment.
    fn exits(&self) -> &[ExitRule] {
        &[]
    }

    /// The policy for a model.
    ///
    /// # Errors
    /// If the settings do not suit the model.
    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String>;
}

/// Where to cut a model into segments, at load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// Not at all: one segment.
    #[default]
    Whole,
    /// Into so many segments of about equal measured time, each cut where few bytes are alive near the ideal point.
    Stages(usize),
    /// After these values or operators, by their names in the graph that the engine runs.
    At(Vec<String>),
}

/// An input ring that a policy asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingNeed {
    /// Slots, one an item; there may be more.
    pub least: u32,
    /// The policy cannot have the model without.
    pub must: bool,
}

/// When a request of a model with several exits is answered before the last segment (DVABatch §9.2).
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExitRule {
    /// The output that decides: the request is answered if in each vector along its last dimension some value is at least `confidence`.
    pub output: String,
    /// See `output`; for probabilities between 0 and 1.
    pub confidence: f32,
    /// The outputs that have no value yet, which are answered with the value of `output`.
    #[serde(default)]
    pub answers: Vec<String>,
}

/// A model as a policy is made for it.
#[derive(Clone, Debug)]
pub struct PolicyModel {
    /// Where it is.
    pub partition: PartitionId,
    /// What its segments take.
    pub profile: SegmentProfile,
    /// The most items of a request, and of a batch.
    pub max_batch: u32,
    /// Requests vary in length and are padded to that of the longest of their batch.
    pub padded: bool,
    /// How long a request may wait for others where the settings do not say.
    pub queue_delay: Duration,
    /// Give up requests that can no longer be answered by their deadline.
    pub drop: bool,
    /// The most items that wait.
    pub queue_bound: u32,
    /// Slots of the input ring that there is; 0: none.
    pub ring_slots: u32,
    /// Cores that run its launches; `None`: launches side by side do not take cores from one another, as on a GPU.
    pub cores: Option<Cores>,
}

/// Cores that launches share with one another and with all else.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cores {
    /// How many: more launches at once would only take them from one another.
    pub count: u32,
    /// Launches that take no longer are cheaper together, one after another, than side by side.
    pub brief: Duration,
}

/// How requests of different lengths share batches: settings of every policy that makes batches, which its host carries out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PaddingSettings {
    /// Requests of different lengths share batches, padded with zeros. The model's answers must not depend on it.
    pub pad: bool,
    /// The longest request that is taken; `None`: 4,096.
    pub max_length: Option<u32>,
    /// One in so many padded requests is run once more alone, off the path of requests, to see whether its answer is the same; 0: none; `None`: 256.
    pub pad_check_every: Option<u32>,
}

/// A policy with its settings.
#[derive(Clone, Debug)]
pub struct ChosenPolicy {
    /// Which.
    pub name: PolicyName,
    /// How requests of different lengths share batches.
    pub padding: PaddingSettings,
    /// Its own.
    pub settings: Arc<dyn PolicySettings>,
}

/// Why something is no settings of a policy.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadSettings {
    /// A name that the policy does not know.
    #[error("unknown setting '{key}'{}; {}", known_elsewhere(key, *.policy), allowed(known))]
    Unknown {
        /// The name.
        key: String,
        /// `None`: no policy knows it.
        policy: Option<PolicyName>,
        /// The names that it knows.
        known: Vec<&'static str>,
    },
    /// A value that is none.
    #[error("{key}: {reason}")]
    Value {
        /// Of which setting.
        key: String,
        /// Why not.
        reason: String,
    },
    /// Values that are not possible, or not together.
    #[error("{0}")]
    Check(String),
}

fn allowed(known: &[&str]) -> String {
    match known {
        [] => "it has no settings".to_owned(),
        known => format!("here are allowed: {}", known.join(", ")),
    }
}

/// Whose setting it is.
fn known_elsewhere(key: &str, policy: Option<PolicyName>) -> String {
    let Some(policy) = policy else { return String::new() };
    let others = PolicyName::all().filter(|other| other.keys().contains(&key)).map(|other| other.to_string());
    let others = others.collect::<Vec<_>>().join(", ");
    let others = if others.is_empty() { others } else { format!(", only {others}") };
    format!(": the policy {policy} does not know it{others}")
}

impl PolicyName {
    /// The names of its settings.
    pub fn keys(self) -> Vec<&'static str> {
        let padding = if self.makes_batches() { keys::<PaddingSettings>() } else { &[] };
        padding.iter().chain((self.0.keys)()).copied().collect()
    }

    /// Reads its settings.
    ///
    /// # Errors
    /// The first that it does not know, or that is none.
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

    /// As [`read`](Self::read), of those that it knows.
    ///
    /// # Errors
    /// As there.
    pub fn read_known(self, written: &WrittenSettings) -> Result<ChosenPolicy, BadSettings> {
        let known = self.keys();
        let of_it = written.iter().filter(|(key, _)| known.contains(&key.as_str()));
        self.read(&of_it.map(|(key, value)| (key.clone(), value.clone())).collect())
    }

    /// Checks one setting by itself, but not what it goes with.
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

/// Checks one setting of whichever policy there comes to be, as [`PolicyName::read_one`] does.
///
/// # Errors
/// If no policy knows it, or one that does cannot read it.
pub fn read_one_of_any(key: &str, value: &Value) -> Result<(), BadSettings> {
    let mut known: Vec<_> = PolicyName::all().flat_map(PolicyName::keys).collect();
    known.sort_unstable();
    known.dedup();
    if !known.contains(&key) {
        return Err(BadSettings::Unknown { key: key.to_owned(), policy: None, known });
    }
    PolicyName::all().filter(|policy| policy.keys().contains(&key)).try_for_each(|policy| policy.read_one(key, value))
}

/// The settings of a policy of this type, read from an object.
pub(super) fn read<S: PolicySettings + DeserializeOwned + 'static>(
    written: Value,
) -> Result<Arc<dyn PolicySettings>, String> {
    match S::deserialize(written) {
        Ok(settings) => Ok(Arc::new(settings)),
        Err(error) => Err(error.to_string()),
    }
}

/// The fields of a struct, by their names where it is written.
pub(super) fn keys<S: DeserializeOwned>() -> &'static [&'static str] {
    let mut found: &'static [&'static str] = &[];
    // What is made of no fields does not matter, nor whether it can be.
    let _ = S::deserialize(Fields(&mut found));
    found
}

/// Writes down which fields are asked for.
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

/// Milliseconds, zero included.
pub(super) fn millis<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let ms = f64::deserialize(deserializer)?;
    match (0.0..=LONGEST_MS).contains(&ms) {
        true => Ok(Some(Duration::from_millis_f64(ms))),
        false => Err(D::Error::custom(format!("{ms} ms: must be between 0 and a day"))),
    }
}

/// `true`, `false`, or `"auto"` for none of them.
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

/// Checks that what is given is at least 1.
pub(super) fn at_least_one(given: &[(&str, Option<u32>)]) -> Result<(), String> {
    match given.iter().find(|(_, number)| *number == Some(0)) {
        Some((name, _)) => Err(format!("{name} is 0; it must be at least 1")),
        None => Ok(()),
    }
}
