//! `[device]` of `downbeat.toml`: what makes batches on a device, for which models.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use downbeat_core::device::{BadSettings, read_one_of_any};
use downbeat_repository::did_you_mean;
use downbeat_server::options::{DeviceGroup, DeviceOptions, PolicyName, WrittenSettings};
use serde_json::Value;
use toml::Spanned;

use crate::layer::named;

/// Largest file of a setting that is read, bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// `[device]`.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceLayer {
    #[serde(default, deserialize_with = "named")]
    pub policy: Option<PolicyName>,
    groups: Option<Vec<GroupTable>>,
    pub partitions: Option<Vec<String>>,
    /// Where files named in it are.
    #[serde(skip)]
    folder: PathBuf,
}

/// `[[device.groups]]`: `models`, `policy`, and the policy's settings.
type GroupTable = BTreeMap<Spanned<String>, Spanned<toml::Value>>;

/// What is wrong in an options file, and at which byte.
pub type Misplaced = (usize, String);

impl DeviceLayer {
    /// `[device] policy` alone.
    pub fn of_policy(policy: Option<PolicyName>) -> Self {
        DeviceLayer { policy, ..DeviceLayer::default() }
    }

    /// Makes paths relative to `folder`.
    pub fn relative_to(&mut self, folder: &Path) {
        self.folder = folder.to_owned();
    }

    /// Checks what can be said of each key by itself.
    ///
    /// # Errors
    /// The first that is none, or has no value.
    pub fn check(&self) -> Result<(), Misplaced> {
        self.groups.iter().flatten().try_for_each(|group| read_group(group).map(drop))
    }

    /// What is given here, over what `options` already says.
    ///
    /// # Errors
    /// If a group contradicts itself or another, or its file of lanes cannot be read.
    pub fn apply(&self, options: &mut DeviceOptions) -> anyhow::Result<()> {
        options.policy = self.policy.unwrap_or(options.policy);
        if let Some(partitions) = &self.partitions {
            options.partitions.clone_from(partitions);
        }
        if let Some(groups) = &self.groups {
            options.groups = groups.iter().map(|group| self.group(group)).collect::<anyhow::Result<_>>()?;
        }
        for (index, group) in options.groups.iter().enumerate() {
            for (place, model) in group.models.iter().enumerate() {
                let before = options.groups.iter().take(index).flat_map(|group| &group.models);
                if before.chain(group.models.iter().take(place)).any(|other| other == model) {
                    bail!("[[device.groups]]: model '{model}' is named twice; leave it in one group");
                }
            }
        }
        Ok(())
    }

    fn group(&self, group: &GroupTable) -> anyhow::Result<DeviceGroup> {
        let mut group = read_group(group).map_err(|(_, reason)| anyhow!("[[device.groups]]: {reason}"))?;
        if group.models.is_empty() {
            bail!("[[device.groups]]: a group without models; name some in `models`, or \"*\" for all others");
        }
        for (key, value) in &mut group.settings {
            if let Some(file) = named_file(key, value) {
                *value = read_file(&self.folder.join(file), key)?;
            }
        }
        let shown = group.models.join("', '");
        let of_it = |error: BadSettings| anyhow!("[[device.groups]] of '{shown}': {error}");
        match group.policy.filter(|policy| *policy != PolicyName::AUTO) {
            Some(policy) => policy.read(&group.settings).map(drop).map_err(of_it)?,
            None => {
                let mut policies = PolicyName::all();
                policies.try_for_each(|policy| policy.read_known(&group.settings).map(drop)).map_err(of_it)?;
            }
        }
        Ok(group)
    }
}

/// A group, each of whose keys is known to its policy and has a value of its kind.
fn read_group(table: &GroupTable) -> Result<DeviceGroup, Misplaced> {
    let mut group = DeviceGroup { models: Vec::new(), policy: None, settings: WrittenSettings::new() };
    let value = |value: &Spanned<toml::Value>| value.get_ref().clone();
    let at = |spanned: &Spanned<toml::Value>, reason: String| (spanned.span().start, reason);
    if let Some(models) = table.get("models") {
        group.models = value(models).try_into().map_err(|error: toml::de::Error| {
            at(models, format!("models: {}: names are expected, such as [\"encoder\"]", error.message()))
        })?;
    }
    if let Some(policy) = table.get("policy") {
        group.policy = named(value(policy)).map_err(|error| at(policy, error.message().to_owned()))?;
    }
    for (key, spanned) in table.iter().filter(|(key, _)| !["models", "policy"].contains(&key.get_ref().as_str())) {
        // What is no number there is none here either.
        let value = serde_json::to_value(spanned.get_ref()).unwrap_or(Value::Null);
        let key_name = key.get_ref();
        // `auto` may come to be any.
        let read = match group.policy.filter(|policy| *policy != PolicyName::AUTO) {
            Some(policy) => policy.read_one(key_name, &value),
            None => read_one_of_any(key_name, &value),
        };
        match read {
            Err(BadSettings::Unknown { known, policy, key: unknown }) => {
                let hint = did_you_mean(&unknown, known.iter().copied().chain(["models", "policy"]));
                let reason = match hint.is_empty() {
                    true => BadSettings::Unknown { key: unknown, policy, known }.to_string(),
                    false => format!("unknown option '{unknown}'{hint}"),
                };
                return Err((key.span().start, reason));
            }
            Err(BadSettings::Value { reason, .. }) if named_file(key_name, &value).is_none() => {
                return Err(at(spanned, reason));
            }
            _ => {}
        }
        group.settings.insert(key_name.clone(), value);
    }
    Ok(group)
}

/// The file that a setting lies in whose value is a table: named in its place, with that table in it.
fn named_file<'a>(key: &str, value: &'a Value) -> Option<&'a str> {
    let file = value.as_str()?;
    let table = Value::Object(serde_json::Map::new());
    (read_one_of_any(key, value).is_err() && read_one_of_any(key, &table).is_ok()).then_some(file)
}

fn read_file(file: &Path, key: &str) -> anyhow::Result<Value> {
    let shown = file.display();
    let metadata = std::fs::metadata(file).with_context(|| format!("cannot read the {key} in {shown}"))?;
    if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
        bail!("{shown} is not a file of at most {MAX_FILE_BYTES} bytes");
    }
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read the {key} in {shown}"))?;
    let mut read: toml::Table = toml::from_str(&text).map_err(|error| anyhow!("{shown}: {}", error.message()))?;
    let value = read.remove(key).with_context(|| format!("{shown}: there is no table [{key}] in it"))?;
    let value = serde_json::to_value(value)?;
    let one = WrittenSettings::from([(key.to_owned(), value.clone())]);
    for policy in PolicyName::all() {
        policy.read_known(&one).map_err(|error| {
            let (error, name) = (error.to_string(), format!("{key}: "));
            anyhow!("{shown}: {}", error.strip_prefix(&name).unwrap_or(&error))
        })?;
    }
    Ok(value)
}
