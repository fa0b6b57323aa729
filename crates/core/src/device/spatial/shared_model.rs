//! A model on a divided device: its share, and the one to come.

use super::batch_control::BatchControl;
use super::decision::{ShareReason, SpatialOptions};
use super::fair_share::Claim;
use super::knee::UNKNOWN_KNEE;
use super::self_tuning::SelfTuning;
use crate::time::{Duration, Time};

/// A model that comes to a divided device.
#[derive(Clone, Debug)]
pub struct SpatialModel {
    /// Its SLO: how long a batch may take.
    pub slo: Duration,
    /// Its knee, compute units; `None`: nobody knows, and it begins with 30% (GSLICE §3.2.3).
    pub knee: Option<u32>,
    /// How its batches are limited.
    pub batch: BatchControl,
}

/// Where a model's lanes stand.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShareState {
    /// Compute units that it runs on; 0: it has none yet.
    pub active: u32,
    /// Compute units that it is to have.
    pub target: u32,
    /// Lanes that are made for it beside those it runs on: on how many units, and whether they are ready.
    pub standby: Option<(u32, bool)>,
    /// Whether somebody has set its share.
    pub by_hand: bool,
}

/// A model on the device.
#[derive(Debug)]
pub struct SharedModel {
    pub state: ShareState,
    pub batch: BatchControl,
    pub tuning: SelfTuning,
    /// Compute units that it asks for.
    pub demand: f64,
    /// When its share was changed.
    pub changed: Time,
    /// Its share stays until then.
    pub held_until: Time,
    /// Its lanes could not be made, and are tried again then.
    pub failed_until: Option<Time>,
    /// Why it is to have its target.
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

    /// Whether what is measured may change its share.
    pub fn is_free(&self, now: Time) -> bool {
        let ShareState { active, standby, by_hand, .. } = self.state;
        active > 0 && standby.is_none() && !by_hand && self.failed_until.is_none() && now >= self.held_until
    }

    /// It runs on so many units from now on.
    pub fn switch(&mut self, now: Time, units: u32, held_until: Time) {
        (self.state.active, self.state.standby) = (units, None);
        (self.changed, self.held_until) = (now, held_until);
        self.tuning.handle_share();
        self.batch.handle_share();
    }
}
