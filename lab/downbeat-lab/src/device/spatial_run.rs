//! Several models on one divided device under virtual time, divided by GSLICE or a baseline.

use downbeat_core::device::spatial::SpatialOptions;
use downbeat_core::{Duration, Time};

use rand_distr::{Distribution, Exp};
use rand_pcg::Pcg64;

use super::architecture::Architecture;
use super::failure::DeviceFailure;
use super::platform::Platform;
use super::spatial_play::Play;
use super::spatial_report::SharingReport;

/// The way that models share the device.
#[derive(Clone, PartialEq, Debug)]
pub enum SharedBy {
    /// Each model has a share that follows from its knee and from measurements.
    Gslice(SpatialOptions),
    /// Each model has this share, in compute units, for good.
    Shares(Vec<u32>),
    /// All models have the whole device at once: MPS as it comes.
    All,
    /// Models take turns on the whole device: processes without MPS.
    Turns,
}

/// The rule that limits a model's batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchedBy {
    /// A fixed number of items.
    Fixed(u32),
    /// GSLICE's rule.
    Slab,
    /// The rule of Clipper's paper.
    Aimd,
    /// The rule of Clipper's code.
    Clipper,
}

/// The load of a model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum SharingLoad {
    /// More items wait at all times than a batch takes.
    Busy,
    /// Items a second, evenly.
    Even(f64),
    /// Items a second, Poisson.
    Poisson(f64),
}

impl SharingLoad {
    /// Draws the time from a request to the next; [`Duration::MAX`] for `Busy`, which has no
    /// arrivals.
    pub(super) fn gap(self, rng: &mut Pcg64) -> Duration {
        match self {
            SharingLoad::Busy => Duration::MAX,
            SharingLoad::Even(rate) => Duration::from_secs_f64(1.0 / rate),
            SharingLoad::Poisson(rate) => {
                Exp::new(rate).map_or(Duration::MAX, |gaps| Duration::from_secs_f64(gaps.sample(rng)))
            }
        }
    }
}

/// A model of a run.
#[derive(Clone, Copy, Debug)]
pub struct SharingModel {
    /// The model's network.
    pub architecture: Architecture,
    /// The instant at which the model comes.
    pub from: Time,
    /// The instant at which the model goes.
    pub until: Time,
    /// The model's load.
    pub load: SharingLoad,
    /// The model's knee in compute units, if known.
    pub knee: Option<u32>,
    /// The model's SLO.
    pub slo: Duration,
    /// The rule that limits the model's batches.
    pub batch: BatchedBy,
    /// The time to make new lanes for the model, once it is on the device.
    pub prepares: Duration,
    /// The model's batches that run at once (GSLICE §3.3: two where that helps), each from a queue
    /// of its own. A request goes to the shorter queue.
    pub streams: u32,
    /// Whether inputs are copied before a batch begins. Otherwise copies run beside computing
    /// (GSLICE §3.3.2).
    pub copied: bool,
    /// Whether the model stops while lanes with another share are made. GSLICE keeps the old lanes
    /// running (figure 16).
    pub restarts: bool,
}

impl SharingModel {
    /// Makes a model that is there for the whole run, always busy, with one batch at a time and an
    /// unknown knee.
    pub fn new(architecture: Architecture, slo: Duration, batch: BatchedBy) -> Self {
        SharingModel {
            architecture,
            from: Time::ZERO,
            until: Time::MAX,
            load: SharingLoad::Busy,
            knee: None,
            slo,
            batch,
            prepares: Duration::from_millis(5_000),
            streams: 1,
            copied: false,
            restarts: false,
        }
    }
}

/// A run of models that share a device.
#[derive(Clone, Debug)]
pub struct SpatialRun {
    /// The device.
    pub platform: Platform,
    /// The way that models share the device.
    pub shared: SharedBy,
    /// The models, by number.
    pub models: Vec<SharingModel>,
    /// The length of the run.
    pub span: Duration,
    /// The seed of all random numbers: arrivals and noise.
    pub seed: u64,
}

impl SpatialRun {
    /// Plays the run and returns the report of each model, by number.
    ///
    /// # Errors
    /// If a model has no profile.
    pub fn play(&self) -> Result<Vec<SharingReport>, DeviceFailure> {
        Play::new(self).run()
    }
}
