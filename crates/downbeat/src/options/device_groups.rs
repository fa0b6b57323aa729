//! `[[device.groups]]` of `downbeat.toml`: models with a device policy and settings of their own.

use std::path::Path;

use anyhow::{Context, anyhow};
use downbeat_core::device::{BadSettings, read_one_of_any};
use downbeat_repository::did_you_mean;
use downbeat_service::options::{DeviceGroup, PolicyName, WrittenSettings};
use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::options::options_file::{self, Misplaced, json};

/// Reads the groups from the written `value`.
///
/// # Errors
/// If a group contradicts itself or another group, has a setting that its policy does not know, or
/// a file of lanes cannot be read.
pub fn read(value: &Spanned<DeValue<'_>>, folder: &Path) -> Result<Vec<DeviceGroup>, Misplaced> {
    let here = |reason: String| (value.span().start, format!("[[device.groups]]: {reason}"));
    let tables = value.get_ref().as_array().ok_or_else(|| here("a list of tables is expected".to_owned()))?;
    let mut groups: Vec<DeviceGroup> = Vec::new();
    for table in tables.iter() {
        let at = table.span().start;
        let table = table.get_ref().as_table().ok_or_else(|| here("a table is expected".to_owned()))?;
        let mut group = read_group(table)?;
        complete(&mut group, folder).map_err(|error| (at, format!("[[device.groups]]{error:#}")))?;
        for (place, model) in group.models.iter().enumerate() {
            let before = groups.iter().flat_map(|group| &group.models);
            if before.chain(group.models.iter().take(place)).any(|other| other == model) {
                return Err(here(format!("model '{model}' is named twice; name each model in one group only")));
            }
        }
        groups.push(group);
    }
    Ok(groups)
}

/// Reads the files that contain settings of a group, and checks the group's settings together.
fn complete(group: &mut DeviceGroup, folder: &Path) -> anyhow::Result<()> {
    if group.models.is_empty() {
        return Err(anyhow!(": a group names no model; list models in `models`, or write \"*\" for all others"));
    }
    let shown = group.models.join("', '");
    for (key, value) in &mut group.settings {
        if let Some(file) = named_file(key, value) {
            *value = read_file(&folder.join(file), key).with_context(|| format!(" of '{shown}'"))?;
        }
    }
    let of_it = |error: BadSettings| anyhow!(" of '{shown}': {error}");
    match group.policy.filter(|policy| *policy != PolicyName::AUTO) {
        Some(policy) => policy.read(&group.settings).map(drop).map_err(of_it),
        None => PolicyName::all().try_for_each(|policy| policy.read_known(&group.settings).map(drop)).map_err(of_it),
    }
}

/// Reads a group. Its policy must know each key, and each value must be of the key's kind.
fn read_group(table: &DeTable<'_>) -> Result<DeviceGroup, Misplaced> {
    let mut group = DeviceGroup { models: Vec::new(), policy: None, settings: WrittenSettings::new() };
    let at = |spanned: &Spanned<DeValue<'_>>, reason: String| (spanned.span().start, reason);
    if let Some(models) = table.get("models") {
        group.models = serde_json::from_value(json(models))
            .map_err(|error| at(models, format!("models: {error}: names are expected, such as [\"encoder\"]")))?;
    }
    if let Some(policy) = table.get("policy") {
        let name = policy.get_ref().as_str().ok_or_else(|| at(policy, "policy: a name is expected".to_owned()))?;
        group.policy = Some(name.parse().map_err(|error| at(policy, format!("{error}")))?);
    }
    for (key, spanned) in table.iter().filter(|(key, _)| !["models", "policy"].contains(&key.get_ref().as_ref())) {
        let (name, value) = (key.get_ref().as_ref(), json(spanned));
        // `auto` may choose any policy.
        let read = match group.policy.filter(|policy| *policy != PolicyName::AUTO) {
            Some(policy) => policy.read_one(name, &value),
            None => read_one_of_any(name, &value),
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
            Err(BadSettings::Value { reason, .. }) if named_file(name, &value).is_none() => {
                return Err(at(spanned, reason));
            }
            _ => {}
        }
        group.settings.insert(name.to_owned(), value);
    }
    Ok(group)
}

/// The name of the file that contains a setting's table, if the setting's value is a file name.
fn named_file<'a>(key: &str, value: &'a Value) -> Option<&'a str> {
    let file = value.as_str()?;
    let table = Value::Object(serde_json::Map::new());
    (read_one_of_any(key, value).is_err() && read_one_of_any(key, &table).is_ok()).then_some(file)
}

fn read_file(file: &Path, key: &str) -> anyhow::Result<Value> {
    let shown = file.display();
    let text = options_file::text(file, options_file::MAX_BYTES)
        .with_context(|| format!("cannot read the {key} in {shown}"))?;
    let mut read: toml::Table = toml::from_str(&text).map_err(|error| anyhow!("{shown}: {}", error.message()))?;
    let value = read.remove(key).with_context(|| format!("{shown}: the file has no table [{key}]"))?;
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
