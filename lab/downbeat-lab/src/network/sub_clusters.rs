//! Sub-clusters of a network whose scheduler decides which models each backend loads.

use downbeat_core::Duration;
use downbeat_roles::SubClusterOptions;

/// Sub-clusters, and the loading of models by backends. Each backend could load every model.
#[derive(Clone, PartialEq, Debug)]
pub struct SubClusters {
    /// The options of the division.
    pub options: SubClusterOptions,
    /// The typical time to load a model: a load takes half to one and a half of this, unloading a
    /// quarter.
    pub load_time: Duration,
    /// Share of the loads that fail, until all faults are mended.
    pub load_fails: f64,
    /// Bytes for models on each device, of which a model takes [`MODEL_BYTES`]; `None`: unknown.
    pub memory: Option<u64>,
    /// True if backends begin with all models, false if they begin with none.
    pub begins_loaded: bool,
}

impl SubClusters {
    /// The most models that a backend holds at a time; `None`: any number.
    pub(super) fn most_models(&self) -> Option<usize> {
        self.memory.map(|memory| (memory / MODEL_BYTES) as usize)
    }
}

/// The bytes of each model.
pub const MODEL_BYTES: u64 = 1 << 20;
