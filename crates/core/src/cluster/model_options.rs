//! How a model is to be scheduled.

use serde::{Deserialize, Serialize};

use super::batch_policy::DropPolicy;
use super::dispatch_policy::DispatchPolicy;
use super::request::PriorityLevel;
use crate::device_profiles::DeviceProfiles;
use crate::ids::ModelId;
use crate::profile::LatencyProfile;
use crate::time::Duration;

/// Largest batches that a request without a deadline waits for, however long they take.
pub const PATIENCE: u32 = 10;

/// How a model is to be scheduled.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ModelOptions {
    /// `l(b)` of the model on each kind of device.
    pub profiles: DeviceProfiles,
    /// The largest batch, in items; 0 is taken as 1. A profile is extended if it ends before.
    pub max_batch: u32,
    /// What is given up for deadlines.
    pub drop: DropPolicy,
    /// When a candidate may start.
    pub dispatch: DispatchPolicy,
    /// Batches of the model that may run at once; `u32::MAX`: as many as there are devices. 0 is taken as 1.
    pub max_in_flight: u32,
    /// The model with which it shares that model's `max_in_flight`: so many batches run at once of both together, and its own does not count.
    pub shares_limit: Option<ModelId>,
    /// How long a request may wait that has neither a deadline nor a queue expiry, or as long as [`PATIENCE`] of the largest batches take if that is
    /// longer; `Duration::MAX`: as long as it takes. One that would wait longer is rejected, one that has is dropped.
    pub max_wait: Duration,
    /// The priority levels, the highest first. None at all is taken as one without a bound.
    pub levels: Vec<PriorityLevel>,
}

impl ModelOptions {
    /// A model with this profile on every kind of device, in batches as large as it goes, as many at once as there are devices, and with
    /// one priority level without a bound.
    pub fn new(profile: LatencyProfile, dispatch: DispatchPolicy, drop: DropPolicy) -> Self {
        let max_batch = profile.max_batch();
        ModelOptions {
            profiles: profile.into(),
            max_batch,
            drop,
            dispatch,
            max_in_flight: u32::MAX,
            shares_limit: None,
            max_wait: Duration::MAX,
            levels: Vec::new(),
        }
    }

    /// Whether it leaves it to the scheduler when its candidates start, or what is dropped.
    pub fn is_adaptive(&self) -> bool {
        matches!(self.dispatch, DispatchPolicy::Adaptive { .. }) || self.drop == DropPolicy::Adaptive
    }
}
