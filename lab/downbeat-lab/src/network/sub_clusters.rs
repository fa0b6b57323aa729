//! Sub-clusters of a network whose scheduler says which models backends have.

use downbeat_core::Duration;
use downbeat_core::roles::SubClusterOptions;

/// Sub-clusters, and how backends come to have models. Each backend could load all of them.
#[derive(Clone, PartialEq, Debug)]
pub struct SubClusters {
    /// How models are divided.
    pub options: SubClusterOptions,
    /// What a backend takes to load a model, from half to one and a half of this; unloading takes a quarter of that.
    pub load_time: Duration,
    /// Share of the loads that fail, until everything is mended.
    pub load_fails: f64,
    /// Bytes for models that each device has, of which a model takes [`MODEL_BYTES`]; `None`: not known.
    pub memory: Option<u64>,
    /// Backends begin with all models; otherwise with none.
    pub begins_loaded: bool,
}

/// What each model takes.
pub const MODEL_BYTES: u64 = 1 << 20;
