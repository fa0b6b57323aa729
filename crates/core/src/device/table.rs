//! The table of device policies. Server, simulator, repository, `auto` and command line know
//! policies only by this table.
//!
//! A new policy is a file beside this one and a line in `POLICIES` (and the `mod` line that Rust
//! asks for). `table/tests.rs` is such a file, and this is the rest of
//! its diff:
//!
//! ```text
//!  static POLICIES: &[&PolicyEntry] = &[
//!      ...
//!      OverlappedOptions::ENTRY,
//! +    ToyOptions::ENTRY,
//!  ];
//! ```
//!
//! | finds the policy | by |
//! |---|---|
//! | `downbeat.toml`, the command line, `config.pbtxt` | [`PolicyName`], its keys and [`PolicyName::read`] |
//! | the server, before it loads a model | [`PolicySettings`]: the cut, ring and lanes to prepare |
//! | server, simulator and journal | [`ModelSpec::build`](super::ModelSpec::build) |
//! | `auto` | [`PolicyEntry::predicted`] and [`PolicySettings::tell_auto`] |

use std::str::FromStr;
use std::sync::Arc;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::elastic::ElasticOptions;
use super::entry::{PolicyEntry, PolicyName, PolicyOptions, PolicySettings};
use super::exclusive::ExclusiveOptions;
use super::overlapped::OverlappedOptions;
use super::settings::{PaddingSettings, WrittenSettings, keys};
use super::staged::StagedOptions;
use super::windowed::WindowedOptions;

/// Every policy.
static POLICIES: &[&PolicyEntry] = &[
    ExclusiveOptions::ENTRY,
    WindowedOptions::ENTRY,
    ElasticOptions::ENTRY,
    StagedOptions::ENTRY,
    OverlappedOptions::ENTRY,
    #[cfg(test)]
    tests::ToyOptions::ENTRY,
];

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
    /// The policy that every model can have: the scheduler makes its batches.
    pub const EXCLUSIVE: PolicyName = PolicyName::of::<ExclusiveOptions>();

    /// The policy that runs one batch after another.
    pub const WINDOWED: PolicyName = PolicyName::of::<WindowedOptions>();

    /// E²bird's policy.
    pub const ELASTIC: PolicyName = PolicyName::of::<ElasticOptions>();

    /// DVABatch's policy.
    pub const STAGED: PolicyName = PolicyName::of::<StagedOptions>();

    /// The choice of a policy by measurements, where the model is served
    /// ([`AutoInputs::choose`](super::AutoInputs::choose)). It is not in the table.
    pub const AUTO: PolicyName = PolicyName(&PolicyEntry {
        name: "auto",
        about: "the policy that suits a model best, as measured",
        makes_batches: false,
        forms_groups: false,
        predict: |_, _| None,
        build: |_| Err(NO_POLICY.to_owned()),
        settings: |_| Err(NO_POLICY.to_owned()),
        keys: || &[],
    });

    /// All policies in the table.
    pub fn all() -> impl Iterator<Item = PolicyName> {
        POLICIES.iter().copied().map(PolicyName)
    }

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

/// The error for [`PolicyName::AUTO`] in places where no model is served.
const NO_POLICY: &str = "auto chooses a policy for each model where the model is served; name one policy here";

/// A name that is not in the table.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown device policy '{found}'; expected one of: {}, {}", PolicyName::all().map(PolicyName::name).collect::<Vec<_>>().join(", "), PolicyName::AUTO)]
pub struct UnknownPolicy {
    found: String,
}

impl FromStr for PolicyName {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = PolicyName::all().chain([PolicyName::AUTO]).find(|policy| policy.name() == name);
        found.ok_or_else(|| UnknownPolicy { found: name.chars().take(64).collect() })
    }
}

impl<'de> Deserialize<'de> for PolicyName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests;
