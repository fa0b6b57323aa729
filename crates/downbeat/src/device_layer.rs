//! `[device]` of `downbeat.toml`: what makes batches on a device, for which models.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use downbeat_core::Duration;
use downbeat_core::device::{LaneMix, MixTable};
use downbeat_server::options::{DeviceGroup, DeviceOptions, DevicePolicy, DeviceSettings, ExitRule};
use serde::de::{Deserialize, Deserializer, Error as _};

use crate::layer::{millis, named};

/// Largest file of lanes that is read, bytes.
const MAX_MIXES_BYTES: u64 = 1 << 20;

/// `[device]`.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceLayer {
    #[serde(default, deserialize_with = "named")]
    pub policy: Option<DevicePolicy>,
    pub groups: Option<Vec<GroupLayer>>,
    pub partitions: Option<Vec<String>>,
}

/// `[[device.groups]]`.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupLayer {
    pub models: Vec<String>,
    #[serde(default, deserialize_with = "named")]
    pub policy: Option<DevicePolicy>,
    pub pad: Option<bool>,
    pub max_length: Option<u32>,
    pub pad_check_every: Option<u32>,
    pub mixes: Option<Mixes>,
    pub max_running: Option<u32>,
    pub ring_slots: Option<u32>,
    #[serde(default, rename = "window_ms", deserialize_with = "millis_or_zero")]
    pub window: Option<Duration>,
    pub fill: Option<bool>,
    pub stages: Option<u16>,
    pub cut_at: Option<Vec<String>>,
    pub buffer_pairs: Option<u16>,
    #[serde(default, rename = "comp_wait_ms", deserialize_with = "millis_or_zero")]
    pub comp_wait: Option<Duration>,
    #[serde(default, deserialize_with = "switch")]
    pub lengths: Option<bool>,
    #[serde(default, deserialize_with = "switch")]
    pub operators: Option<bool>,
    #[serde(default, deserialize_with = "switch")]
    pub load: Option<bool>,
    pub exits: Option<Vec<ExitLayer>>,
}

/// An entry of `exits`.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExitLayer {
    pub output: String,
    pub confidence: f32,
    #[serde(default)]
    pub answers: Vec<String>,
}

/// The lanes of an elastic group.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(
    untagged,
    expecting = "mixes is \"naive\", a file, or a table of lanes by load such as { 4 = \"4\", 16 = \"4,4,8\" }"
)]
pub enum Mixes {
    /// `naive`, or a file with such a table; relative to the options file.
    Named(PathBuf),
    /// By load: the lanes' batch sizes.
    Table(BTreeMap<String, String>),
}

/// A file of lanes, such as `downbeat profile --worker-mix` writes.
#[derive(serde::Deserialize)]
struct MixesFile {
    mixes: BTreeMap<String, String>,
}

impl DeviceLayer {
    /// Makes paths relative to `folder`.
    pub fn relative_to(&mut self, folder: &Path) {
        for group in self.groups.iter_mut().flatten() {
            if let Some(Mixes::Named(path)) = &mut group.mixes
                && path.as_os_str() != "naive"
            {
                *path = folder.join(&*path);
            }
        }
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
            options.groups = groups.iter().map(GroupLayer::group).collect::<anyhow::Result<_>>()?;
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
}

impl GroupLayer {
    fn group(&self) -> anyhow::Result<DeviceGroup> {
        let shown = self.models.join("', '");
        if self.models.is_empty() {
            bail!("[[device.groups]]: a group without models; name some in `models`, or \"*\" for all others");
        }
        let mixes = match &self.mixes {
            None => None,
            Some(Mixes::Named(name)) if name.as_os_str() == "naive" => None,
            Some(Mixes::Named(file)) => Some(read_mixes(file)?),
            Some(Mixes::Table(table)) => {
                Some(mix_table(table).map_err(|error| anyhow!("[[device.groups]] of '{shown}': mixes: {error:#}"))?)
            }
        };
        if self.stages == Some(0) || self.buffer_pairs == Some(0) {
            bail!("[[device.groups]] of '{shown}': stages and buffer_pairs are at least 1");
        }
        if self.stages.is_some() && self.cut_at.is_some() {
            bail!(
                "[[device.groups]] of '{shown}': `stages` and `cut_at` both say where the model is cut; leave one of them out"
            );
        }
        if self.max_length == Some(0) || self.max_running == Some(0) || self.ring_slots == Some(0) {
            bail!("[[device.groups]] of '{shown}': max_length, max_running and ring_slots are at least 1");
        }
        let settings = DeviceSettings {
            pad: self.pad.unwrap_or(false),
            max_length: self.max_length,
            pad_check_every: self.pad_check_every,
            mixes,
            max_running: self.max_running,
            ring_slots: self.ring_slots,
            window: self.window,
            fill: self.fill.unwrap_or(false),
            stages: self.stages,
            cut_at: self.cut_at.clone().unwrap_or_default(),
            buffer_pairs: self.buffer_pairs,
            comp_wait: self.comp_wait,
            lengths: self.lengths,
            operators: self.operators,
            load: self.load,
            exits: self.exits.iter().flatten().map(ExitLayer::rule).collect(),
        };
        Ok(DeviceGroup { models: self.models.clone(), policy: self.policy, settings })
    }
}

impl ExitLayer {
    fn rule(&self) -> ExitRule {
        ExitRule { output: self.output.clone(), confidence: self.confidence, answers: self.answers.clone() }
    }
}

fn read_mixes(file: &Path) -> anyhow::Result<MixTable> {
    let shown = file.display();
    let metadata = std::fs::metadata(file).with_context(|| format!("cannot read the lanes in {shown}"))?;
    if !metadata.is_file() || metadata.len() > MAX_MIXES_BYTES {
        bail!("{shown} is not a file of at most {MAX_MIXES_BYTES} bytes");
    }
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read the lanes in {shown}"))?;
    let read: MixesFile = toml::from_str(&text).map_err(|error| anyhow!("{shown}: {}", error.message()))?;
    mix_table(&read.mixes).with_context(|| shown.to_string())
}

/// The lanes by load. One of one item and one of two are added for each load (E²bird §7.3.2).
fn mix_table(table: &BTreeMap<String, String>) -> anyhow::Result<MixTable> {
    let mut mixes = BTreeMap::new();
    for (load, sizes) in table {
        let number: u32 = load.parse().map_err(|_| anyhow!("'{load}' is not a load: a number of items"))?;
        mixes.insert(number, sizes.parse::<LaneMix>()?);
    }
    Ok(MixTable::enhanced(mixes.into_iter().collect())?)
}

/// A time of zero is one, too.
fn millis_or_zero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let ms = f64::deserialize(deserializer)?;
    if ms == 0.0 { Ok(Some(Duration::ZERO)) } else { millis(serde::de::value::F64Deserializer::new(ms)) }
}

/// `true`, `false`, or `"auto"` for none of them.
fn switch<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<bool>, D::Error> {
    #[derive(serde::Deserialize)]
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
