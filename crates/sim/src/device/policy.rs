//! Device policies by name, and what they are tuned with.

use std::fmt;
use std::str::FromStr;

use downbeat_core::Duration;
use downbeat_core::device::{
    DeviceModel, ElasticOptions, LaneMix, MixTable, PolicyOptions, SegmentProfile, StagedOptions, WindowedOptions,
};

use super::architecture::Architecture;
use super::model::{BadModel, EmulatedModel};

/// A device policy by its name in the papers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DevicePolicyName {
    /// One batch at a time, of whatever waits (E²bird §3.2; DVABatch's ZeroBatch).
    NoWait,
    /// One batch at a time, of what comes within a tuned window (E²bird §3.2; DVABatch's DelayBatch).
    OptWait,
    /// As that, filled up to the largest batch with dummies (E²bird §3.2).
    Static,
    /// One mix of lanes for every load (E²bird §7.2).
    NEbird,
    /// The best mix of lanes for each load (E²bird §7.3).
    EEbird,
    /// Batches that change while they run (DVABatch).
    DvaBatch,
}

/// A word that is no device policy.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "'{name}' is no device policy; there are no-wait, opt-wait, static, n-ebird, e-ebird, dvabatch, and zerobatch and delaybatch, which are no-wait and opt-wait"
)]
pub struct UnknownDevicePolicy {
    name: String,
}

impl DevicePolicyName {
    /// All of them.
    pub const ALL: [DevicePolicyName; 6] = [
        DevicePolicyName::NoWait,
        DevicePolicyName::OptWait,
        DevicePolicyName::Static,
        DevicePolicyName::NEbird,
        DevicePolicyName::EEbird,
        DevicePolicyName::DvaBatch,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            DevicePolicyName::NoWait => "no-wait",
            DevicePolicyName::OptWait => "opt-wait",
            DevicePolicyName::Static => "static",
            DevicePolicyName::NEbird => "n-ebird",
            DevicePolicyName::EEbird => "e-ebird",
            DevicePolicyName::DvaBatch => "dvabatch",
        }
    }
}

impl fmt::Display for DevicePolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DevicePolicyName {
    type Err = UnknownDevicePolicy;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = match text {
            "zerobatch" => "no-wait",
            "delaybatch" => "opt-wait",
            other => other,
        };
        let found = DevicePolicyName::ALL.into_iter().find(|policy| policy.name() == name);
        found.ok_or_else(|| UnknownDevicePolicy { name: text.to_owned() })
    }
}

/// What policies are made from: a model's measured times, and what was tuned for it.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// What the model's segments take.
    pub profile: SegmentProfile,
    /// The largest batch.
    pub max_batch: u32,
    /// The window of [`DevicePolicyName::OptWait`] and [`DevicePolicyName::Static`].
    pub window: Duration,
    /// The best mix for each load, for [`DevicePolicyName::EEbird`].
    pub mixes: Vec<(u32, LaneMix)>,
    /// What [`DevicePolicyName::DvaBatch`] does.
    pub diversity: Diversity,
}

/// What DVABatch does for a model: which of its policies, with what (§7.2).
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
    /// See [`StagedOptions::window`].
    pub window: Option<Duration>,
    /// See [`StagedOptions::comp_wait`].
    pub comp_wait: Option<Duration>,
}

impl Diversity {
    /// What the paper does for a network (§8.1): lengths for BERT, which settles the load too, operators for U-Net and LinkNet.
    pub fn of(model: &EmulatedModel) -> Self {
        let by_length = model.has_length();
        let by_operator = matches!(model.architecture(), Some(Architecture::UNet | Architecture::LinkNet));
        Diversity {
            pairs: 2,
            by_length,
            by_operator,
            by_load: !by_length,
            window: Some(Duration::ZERO),
            comp_wait: None,
        }
    }
}

/// Lengths at which a model whose requests have one is measured.
const LENGTHS: [u32; 9] = [4, 16, 32, 64, 96, 128, 192, 256, 512];
/// Items that may wait: far more than any run that is of interest.
const QUEUE_BOUND: u32 = 1 << 20;
/// Slots of the ring for each item that may run (E²bird §5.1: several).
const SLOTS: u32 = 4;
/// OPT_Wait's window for ResNet152 with batches of up to 32, as a share of what such a batch takes: 30 of 93.7 ms (E²bird §3.2).
const WINDOW: f64 = 30.0 / 93.7;

impl Tuning {
    /// What a model's measurement gives; the window that the paper gives for one model, in proportion; no mixes yet.
    ///
    /// # Errors
    /// If `max_batch` is 0.
    pub fn new(model: &EmulatedModel, max_batch: u32) -> Result<Self, BadModel> {
        let lengths: &[u32] = if model.has_length() { &LENGTHS } else { &[0] };
        let profile = model.profile(lengths, max_batch)?;
        let window = Duration::from_secs_f64(profile.total(max_batch, 64).as_secs_f64() * WINDOW);
        let diversity = Diversity::of(model);
        Ok(Tuning { profile, max_batch, window, mixes: Vec::new(), diversity })
    }

    /// The policy of that name. E-Ebird without measured mixes has N-Ebird's.
    pub fn policy(&self, name: DevicePolicyName) -> DeviceModel {
        let windowed = |window, fill| -> DeviceModel {
            WindowedOptions {
                profile: self.profile.clone(),
                max_batch: self.max_batch,
                window,
                fill,
                drop: false,
                queue_bound: QUEUE_BOUND,
            }
            .build()
        };
        let elastic = |mixes| -> DeviceModel {
            ElasticOptions {
                profile: self.profile.clone(),
                mixes,
                max_running: self.max_batch,
                ring_slots: self.max_batch * SLOTS,
                drop: false,
                queue_bound: QUEUE_BOUND,
            }
            .build()
        };
        match name {
            DevicePolicyName::NoWait => windowed(Duration::ZERO, false),
            DevicePolicyName::OptWait => windowed(self.window, false),
            DevicePolicyName::Static => windowed(self.window, true),
            DevicePolicyName::NEbird => elastic(MixTable::naive(self.max_batch)),
            DevicePolicyName::EEbird => {
                let enhanced = MixTable::enhanced(self.mixes.clone());
                elastic(enhanced.unwrap_or_else(|_| MixTable::naive(self.max_batch)))
            }
            DevicePolicyName::DvaBatch => {
                let Diversity { pairs, by_length, by_operator, by_load, window, comp_wait } = self.diversity;
                StagedOptions {
                    profile: self.profile.clone(),
                    pairs,
                    max_batch: self.max_batch,
                    by_length,
                    by_operator,
                    by_load,
                    window,
                    comp_wait,
                    ring_slots: 0,
                    drop: false,
                    queue_bound: QUEUE_BOUND,
                }
                .build()
            }
        }
    }
}
