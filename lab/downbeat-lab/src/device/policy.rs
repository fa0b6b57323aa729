//! Device policies by name, and their tuning.

use std::fmt;
use std::str::FromStr;

use downbeat_core::Duration;
use downbeat_core::device::{
    Cut, DeviceModel, Joining, LaneMix, PartitionId, PolicyModel, PolicyName, SegmentProfile, WrittenSettings,
};
use serde_json::{Value, json};

use super::architecture::Architecture;
use super::failure::DeviceFailure;
use super::model::EmulatedModel;

/// A device policy by name: a policy of a paper, which is one of the table with settings, or a
/// policy of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DevicePolicyName {
    /// One batch at a time, of the requests that wait (E²bird §3.2; DVABatch's ZeroBatch).
    NoWait,
    /// One batch at a time, of the requests that come within a tuned window (E²bird §3.2;
    /// DVABatch's DelayBatch).
    OptWait,
    /// Like `OptWait`, filled up to the largest batch with dummies (E²bird §3.2).
    Static,
    /// One mix of lanes for every load (E²bird §7.2).
    NEbird,
    /// The best mix of lanes for each load (E²bird §7.3).
    EEbird,
    /// Batches that change while they run (DVABatch).
    DvaBatch,
    /// A policy of the table that makes batches, with its default settings.
    Plain(PolicyName),
}

impl DevicePolicyName {
    /// Returns all names: first the papers' policies, then the policies of the table.
    pub fn all() -> impl Iterator<Item = DevicePolicyName> {
        use DevicePolicyName::*;
        let plain = PolicyName::all().filter(|policy| policy.makes_batches()).map(Plain);
        [NoWait, OptWait, Static, NEbird, EEbird, DvaBatch].into_iter().chain(plain)
    }

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            DevicePolicyName::NoWait => "no-wait",
            DevicePolicyName::OptWait => "opt-wait",
            DevicePolicyName::Static => "static",
            DevicePolicyName::NEbird => "n-ebird",
            DevicePolicyName::EEbird => "e-ebird",
            DevicePolicyName::DvaBatch => "dvabatch",
            DevicePolicyName::Plain(policy) => policy.name(),
        }
    }

    /// Returns the default number of stages into which the policy cuts a model (DVABatch §7.1).
    pub fn stages(self, model: &EmulatedModel) -> usize {
        let cut = |policy: PolicyName| policy.read(&WrittenSettings::new()).map(|chosen| chosen.settings.cut().0);
        match self {
            DevicePolicyName::DvaBatch if model.has_length() => 2,
            DevicePolicyName::DvaBatch => 4,
            DevicePolicyName::Plain(policy) => match cut(policy) {
                Ok(Cut::Stages(stages)) => stages,
                _ => 1,
            },
            _ => 1,
        }
    }
}

impl fmt::Display for DevicePolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DevicePolicyName {
    type Err = DeviceFailure;

    fn from_str(text: &str) -> Result<Self, DeviceFailure> {
        let name = match text {
            "zerobatch" => "no-wait",
            "delaybatch" => "opt-wait",
            other => other,
        };
        let found = DevicePolicyName::all().find(|policy| policy.name() == name);
        found.ok_or_else(|| {
            let all: Vec<&str> = DevicePolicyName::all().map(DevicePolicyName::name).collect();
            let all = all.join(", ");
            DeviceFailure(format!(
                "'{text}' is no device policy; there are {all}, and zerobatch and delaybatch, which are no-wait and opt-wait"
            ))
        })
    }
}

/// The inputs of policies: a model's measured times, and the settings that were tuned for the
/// model.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// The times of the model's segments.
    pub profile: SegmentProfile,
    /// Requests vary in length.
    pub padded: bool,
    /// The largest batch.
    pub max_batch: u32,
    /// The window of [`DevicePolicyName::OptWait`] and [`DevicePolicyName::Static`].
    pub window: Duration,
    /// The batches that a policy of one batch at a time makes ahead. No later request joins these.
    /// Today's Triton has 0. DVABatch was measured on a Triton with 1
    /// ([`WindowedOptions::ahead`](downbeat_core::device::WindowedOptions::ahead)).
    pub ahead: u32,
    /// The best mix for each load, for [`DevicePolicyName::EEbird`].
    pub mixes: Vec<(u32, LaneMix)>,
    /// The settings of [`DevicePolicyName::DvaBatch`].
    pub diversity: Diversity,
}

/// The policies of DVABatch that a model uses, with their settings (§7.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Diversity {
    /// Pairs of buffers.
    pub pairs: u16,
    /// Policy I: requests vary in length.
    pub by_length: bool,
    /// Policy II: operators prefer different batches.
    pub by_operator: bool,
    /// Policy III: requests come unevenly.
    pub by_load: bool,
    /// With policy III: the rule by which requests join.
    pub joining: Joining,
    /// With policy I: how long the oldest request may wait for others while batches run.
    pub window: Duration,
}

impl Diversity {
    /// Returns the paper's settings for a network (§8.1). BERT has policy I, which covers the load
    /// too. The other networks have policy III; U-Net and LinkNet also have policy II.
    pub fn of(model: &EmulatedModel) -> Self {
        let by_length = model.has_length();
        let by_operator = matches!(model.architecture(), Some(Architecture::UNet | Architecture::LinkNet));
        let joining = Joining::IfSooner;
        Diversity { pairs: 2, by_length, by_operator, by_load: !by_length, joining, window: Duration::ZERO }
    }
}

/// Lengths at which a model with lengths is measured.
const LENGTHS: [u32; 9] = [4, 16, 32, 64, 96, 128, 192, 256, 512];
/// Items that may wait: far more than in any run of interest.
const QUEUE_BOUND: u32 = 1 << 20;
/// OPT_Wait's window for ResNet152 with batches of up to 32, as a share of such a batch's time: 30
/// of 93.7 ms (E²bird §3.2).
const WINDOW: f64 = 30.0 / 93.7;

impl Tuning {
    /// Measures a model. The window is in proportion to the one that the paper gives for one model.
    /// Mixes come later.
    ///
    /// # Errors
    /// If `max_batch` is 0.
    pub fn new(model: &EmulatedModel, max_batch: u32) -> Result<Self, DeviceFailure> {
        let lengths: &[u32] = if model.has_length() { &LENGTHS } else { &[0] };
        let profile = model.profile(lengths, max_batch)?;
        let window = Duration::from_secs_f64(profile.total(max_batch, 64).as_secs_f64() * WINDOW);
        let diversity = Diversity::of(model);
        Ok(Tuning { profile, padded: model.has_length(), max_batch, window, ahead: 0, mixes: Vec::new(), diversity })
    }

    /// Returns the policy's name in the table, and its settings. E-Ebird without measured mixes has
    /// N-Ebird's settings.
    fn settings(&self, name: DevicePolicyName) -> (&'static str, Value) {
        let (window, ahead) = (self.window.as_millis_f64(), self.ahead);
        match name {
            DevicePolicyName::NoWait => ("windowed", json!({ "window_ms": 0, "ahead": ahead })),
            DevicePolicyName::OptWait => ("windowed", json!({ "window_ms": window, "ahead": ahead })),
            DevicePolicyName::Static => ("windowed", json!({ "window_ms": window, "fill": true, "ahead": ahead })),
            DevicePolicyName::EEbird if !self.mixes.is_empty() => {
                let mixes = self.mixes.iter().map(|(load, mix)| (load.to_string(), Value::String(mix.to_string())));
                ("elastic", json!({ "max_running": self.max_batch, "mixes": Value::Object(mixes.collect()) }))
            }
            DevicePolicyName::NEbird | DevicePolicyName::EEbird => {
                ("elastic", json!({ "max_running": self.max_batch }))
            }
            DevicePolicyName::DvaBatch => {
                let Diversity { pairs, by_length, by_operator, by_load, joining, window } = self.diversity;
                let window = window.as_millis_f64();
                let switches = json!({
                    "buffer_pairs": pairs, "lengths": by_length, "operators": by_operator, "load": by_load,
                    "joining": joining, "window_ms": window
                });
                ("staged", switches)
            }
            DevicePolicyName::Plain(policy) => (policy.name(), json!({})),
        }
    }

    /// Builds the policy of that name.
    ///
    /// # Errors
    /// If the policy cannot serve the model.
    pub fn policy(&self, name: DevicePolicyName) -> Result<DeviceModel, DeviceFailure> {
        let (policy, settings) = self.settings(name);
        let refused = |error: &dyn fmt::Display| {
            DeviceFailure(format!("the device policy {name} cannot have this model: {error}"))
        };
        let policy: PolicyName = policy.parse().map_err(|error| refused(&error))?;
        let settings: WrittenSettings = serde_json::from_value(settings).map_err(|error| refused(&error))?;
        let settings = policy.read(&settings).map_err(|error| refused(&error))?.settings;
        let ring = settings.ring(self.max_batch, self.padded).map_err(|error| refused(&error))?;
        let model = PolicyModel {
            partition: PartitionId::default(),
            profile: self.profile.clone(),
            max_batch: self.max_batch,
            padded: self.padded,
            queue_delay: Duration::ZERO,
            drop: false,
            queue_bound: QUEUE_BOUND,
            // A ring only where the policy needs one: copies take no time here.
            ring_slots: ring.filter(|ring| ring.must).map_or(0, |ring| ring.least),
            cores: None,
        };
        settings.spec(model).map_err(|error| refused(&error))?.build().map_err(|error| refused(&error))
    }
}
