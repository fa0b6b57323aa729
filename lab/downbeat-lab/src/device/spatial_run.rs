//! Several models on one divided device under virtual time: GSLICE, and what it is compared with.

use downbeat_core::device::spatial::SpatialOptions;
use downbeat_core::{Duration, Time};

use rand_distr::{Distribution, Exp};
use rand_pcg::Pcg64;

use super::architecture::Architecture;
use super::failure::DeviceFailure;
use super::platform::Platform;
use super::spatial_play::Play;
use super::spatial_report::SharingReport;

/// How models share the device.
#[derive(Clone, PartialEq, Debug)]
pub enum SharedBy {
    /// Each has a share that follows from its knee and what is measured.
    Gslice(SpatialOptions),
    /// Each has this share, in compute units, for good.
    Shares(Vec<u32>),
    /// All have all of it at once: MPS as it comes.
    All,
    /// One at a time has all of it: processes without MPS.
    Turns,
}

/// How a model's batches are limited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchedBy {
    /// So many items.
    Fixed(u32),
    /// GSLICE.
    Slab,
    /// Clipper's paper.
    Aimd,
    /// Clipper's code.
    Clipper,
}

/// What comes for a model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum SharingLoad {
    /// There is always more waiting than a batch takes.
    Busy,
    /// Items a second, evenly.
    Even(f64),
    /// Items a second, Poisson.
    Poisson(f64),
}

impl SharingLoad {
    /// How long after a request the next one comes; for ever where nobody counts.
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
    /// Its network.
    pub architecture: Architecture,
    /// When it comes.
    pub from: Time,
    /// When it goes.
    pub until: Time,
    /// What comes for it.
    pub load: SharingLoad,
    /// Its knee, compute units, if it is known.
    pub knee: Option<u32>,
    /// Its SLO.
    pub slo: Duration,
    /// Its batches.
    pub batch: BatchedBy,
    /// What making lanes for it takes, once it is there.
    pub prepares: Duration,
    /// Batches of it that run at once (GSLICE §3.3: two where that helps), each from a queue of its own; a request goes to the shorter one.
    pub streams: u32,
    /// Whether inputs are copied before a batch begins. Otherwise that happens beside what runs (GSLICE §3.3.2).
    pub copied: bool,
    /// Whether it stops while lanes with another share are made for it, where GSLICE has lanes that stand by (figure 16).
    pub restarts: bool,
}

impl SharingModel {
    /// There from the beginning to the end, always busy, one batch at a time, with a knee that nobody knows.
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

/// A run.
#[derive(Clone, Debug)]
pub struct SpatialRun {
    /// The device.
    pub platform: Platform,
    /// How it is shared.
    pub shared: SharedBy,
    /// By number.
    pub models: Vec<SharingModel>,
    /// How long.
    pub span: Duration,
    /// Of what launches take from run to run.
    pub seed: u64,
}

impl SpatialRun {
    /// Plays it: what came of each model, by number.
    ///
    /// # Errors
    /// If a model has no profile.
    pub fn play(&self) -> Result<Vec<SharingReport>, DeviceFailure> {
        Play::new(self).run(Time::ZERO + self.span)
    }
}
