//! The parts of a device policy's settings: the demands of the policy, the facts about its model, and
//! the readers of values.

use std::collections::BTreeMap;

use serde::de::value::{Error as ValueError, MapDeserializer};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::segment_profile::SegmentProfile;
use crate::ids::PartitionId;
use crate::time::Duration;

/// The user's settings by name, as they are written.
pub type WrittenSettings = BTreeMap<String, Value>;

/// The most lanes of a model.
pub const MOST_LANES: u32 = 256;
/// The largest batch, and the most slots of a ring.
pub const MOST_ROWS: u32 = 1 << 24;
/// A day in milliseconds: the longest time in a setting.
const LONGEST_MS: f64 = 86_400_000.0;

/// The places where a model is cut into segments, at load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// The model stays one segment.
    #[default]
    Whole,
    /// Into this many segments of about equal measured time. Each cut is near the ideal point,
    /// where few bytes are alive.
    Stages(usize),
    /// As [`Cut::Stages`], or into as many segments as the model can be cut into, if these are
    /// fewer. At least two.
    UpTo(usize),
    /// After these values or operators, named as in the graph that the engine runs.
    At(Vec<String>),
}

/// The length to which a policy pads requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PaddedTo {
    /// The longest request that is allowed.
    Allowed,
    /// The longest request of a batch.
    Batch,
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

/// Checks that a number is between 1 and `most`.
pub(super) fn at_most(what: &str, number: u32, most: u32) -> Result<(), String> {
    match (1..=most).contains(&number) {
        true => Ok(()),
        false => Err(format!("{what} is {number}; it must be 1 to {most}")),
    }
}
