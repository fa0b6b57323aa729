//! A model on a divided device, with its current and its next share.

use super::batch_control::BatchControl;
use super::decision::{ShareReason, SpatialOptions};
use super::fair_share::Claim;
use super::knee::UNKNOWN_KNEE;
use super::self_tuning::SelfTuning;
use crate::time::{Duration, Time};

/// A model that comes to a divided device.
#[derive(Clone, Debug)]
pub struct SpatialModel {
    /// The SLO: the longest time that a batch may take.
    pub slo: Duration,
    /// The knee in compute units. `None`: it is not known, and the model begins with 30% (GSLICE
    /// §3.2.3).
    pub knee: Option<u32>,
    /// The rule that limits the model's batches.
    pub batch: BatchControl,
}

/// The state of a model's share.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShareState {
    /// The compute units that the model runs on; 0: it has none yet.
    pub active: u32,
    /// The compute units that the model will have.
    pub target: u32,
    /// The units of the standby lanes, and whether the lanes are ready.
    pub standby: Option<(u32, bool)>,
    /// Whether the share was set by hand.
    pub by_hand: bool,
}

/// A model on the device.
#[derive(Debug)]
pub struct SharedModel {
    pub state: ShareState,
    pub batch: BatchControl,
    pub tuning: SelfTuning,
    /// The compute units that the model asks for.
    pub demand: f64,
    /// When the share was last changed.
    pub changed: Time,
    /// The share stays until this time.
    pub held_until: Time,
    /// When lanes that could not be made are tried again.
    pub failed_until: Option<Time>,
    /// The reason for the model's target.
    pub reason: ShareReason,
}

impl SharedModel {
    pub fn new(model: SpatialModel, options: &SpatialOptions) -> Self {
        let SpatialModel { slo, knee, batch } = model;
        let unknown = f64::from(options.units) * UNKNOWN_KNEE;
        SharedModel {
            state: ShareState::default(),
            batch,
            tuning: SelfTuning::new(slo, options),
            demand: knee.map_or(unknown, f64::from),
            changed: Time::ZERO,
            held_until: Time::ZERO,
            failed_until: None,
            reason: ShareReason::Came,
        }
    }

    pub fn claim(&self) -> Claim {
        Claim::of(self.demand)
    }

    /// Whether measurements may change the model's share.
    pub fn is_free(&self, now: Time) -> bool {
        let ShareState { active, standby, by_hand, .. } = self.state;
        active > 0 && standby.is_none() && !by_hand && self.failed_until.is_none() && now >= self.held_until
    }

    /// Switches the model to `units` compute units.
    pub fn switch(&mut self, now: Time, units: u32, held_until: Time) {
        (self.state.active, self.state.standby) = (units, None);
        (self.changed, self.held_until) = (now, held_until);
        self.tuning.handle_share();
        self.batch.handle_share();
    }
}
