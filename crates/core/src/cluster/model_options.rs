//! The options that say how a model is scheduled.

use serde::{Deserialize, Serialize};

use super::batch_policy::DropPolicy;
use super::dispatch_policy::DispatchPolicy;
use super::request::PriorityLevel;
use crate::device_profiles::DeviceProfiles;
use crate::ids::ModelId;
use crate::profile::LatencyProfile;
use crate::time::Duration;

/// A request without a deadline may wait for this many of the largest batches, however long they
/// take.
pub const PATIENCE: u32 = 10;

/// The options that say how a model is scheduled.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ModelOptions {
    /// `l(b)` of the model on each kind of device.
    pub profiles: DeviceProfiles,
    /// The largest batch, in items; 0 is taken as 1. A shorter profile is extended.
    pub max_batch: u32,
    /// Which requests are given up for deadlines.
    pub drop: DropPolicy,
    /// When a candidate may start.
    pub dispatch: DispatchPolicy,
    /// Batches of the model that may run at once; `u32::MAX`: as many as there are devices. 0 is
    /// taken as 1.
    pub max_in_flight: u32,
    /// The model whose `max_in_flight` this model shares. That limit counts the batches of both
    /// models together, and this model's own limit does not count.
    pub shares_limit: Option<ModelId>,
    /// How long a request without a deadline and without a queue expiry may wait. If [`PATIENCE`]
    /// of the largest batches take longer, it may wait that long. `Duration::MAX`: without a bound.
    /// A request that would wait longer is rejected, and one that has waited longer is dropped.
    pub max_wait: Duration,
    /// The priority levels, the highest first. An empty list is taken as one level without a bound.
    pub levels: Vec<PriorityLevel>,
}

impl ModelOptions {
    /// A model with this profile on every kind of device and one priority level without a bound.
    /// Its batches are as large as the profile allows, and as many run at once as there are
    /// devices.
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

    /// Whether the scheduler decides when the model's candidates start, or which requests are
    /// dropped.
    pub fn is_adaptive(&self) -> bool {
        self.dispatch.is_adaptive() || self.drop == DropPolicy::Adaptive
    }
}
