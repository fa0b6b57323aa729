//! The scheduler's queue for the requests of one shape of a model version.

use std::sync::atomic::AtomicU64;

use downbeat_core::cluster::{self, ModelOptions as QueueOptions, PriorityLevel};
use downbeat_core::device::PartitionId;
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_driver::QueueHandle;
use downbeat_repository::ModelDefinition;
use downbeat_repository::policy::{DispatchPolicy, DropPolicy};
use parking_lot::Mutex;

use crate::options::ServerOptions;
use crate::placement::Placed;
use crate::refiner::ProfileRefiner;

/// The scheduler's queue for the requests of one shape.
pub struct Queue {
    /// Where it is in the scheduler.
    pub place: QueueHandle,
    /// Whether requests wait for others of their shape, for a time that is set.
    pub gathers: bool,
    /// When it was last used, nanoseconds of the server's clock.
    pub last_used_ns: AtomicU64,
    /// What the scheduler was told of it.
    options: QueueOptions,
    /// The devices that its batches run on.
    pub placed: Placed,
    /// By site, as `placed` numbers them: learns the latency of its batches from what they take there.
    pub refiners: Box<[Mutex<ProfileRefiner>]>,
}

impl Queue {
    /// What the scheduler is told of the first queue of a version, of whose batches at most `at_once` run at a time and take what `profiles` say, by site.
    pub fn options(
        options: &ServerOptions,
        definition: &ModelDefinition,
        placed: &Placed,
        profiles: &[LatencyProfile],
        at_once: u32,
    ) -> QueueOptions {
        let (name, batching) = (&definition.name, &definition.batching);
        let configured = definition.dispatch.or_else(|| {
            // A queue delay in config.pbtxt is a wish for Triton's own policy.
            (batching.max_queue_delay > Duration::ZERO).then_some(DispatchPolicy::Timeout)
        });
        let chosen = options.dispatch_policy(name, configured);
        let dispatch = match chosen {
            DispatchPolicy::Deferred => cluster::DispatchPolicy::Deferred,
            DispatchPolicy::Latest => cluster::DispatchPolicy::Latest,
            // The latter is refused when a model is loaded: nothing is routed from here.
            DispatchPolicy::Eager | DispatchPolicy::Route => cluster::DispatchPolicy::Eager,
            DispatchPolicy::Adaptive => cluster::DispatchPolicy::Adaptive { consolidate: false },
            DispatchPolicy::Consolidating => cluster::DispatchPolicy::Adaptive { consolidate: true },
            DispatchPolicy::Timeout => cluster::DispatchPolicy::Timeout {
                delay: batching.max_queue_delay,
                preferred: batching.preferred.clone(),
            },
        };
        let drop = match options.drop_policy(name, definition.drop, chosen) {
            DropPolicy::Window => cluster::DropPolicy::WindowDrop,
            DropPolicy::Adaptive => cluster::DropPolicy::Adaptive,
            DropPolicy::Head => cluster::DropPolicy::HeadDrop,
            DropPolicy::None => cluster::DropPolicy::None,
        };
        let levels = batching.levels.iter().map(|level| PriorityLevel {
            max_queue: if level.max_queue_size == 0 { u32::MAX } else { level.max_queue_size },
            timeout_action: level.timeout_action,
        });
        QueueOptions {
            max_batch: batching.max_batch_size.max(1),
            profiles: placed.profiles(|site| profiles[site].clone()),
            drop,
            dispatch,
            max_in_flight: at_once,
            shares_limit: None,
            max_wait: options.max_queue_wait(name).map_or(Duration::MAX, |wait| wait + batching.max_queue_delay),
            levels: levels.collect(),
        }
    }

    /// What the scheduler is told of a queue for another shape of the same version, whose batches take what `profiles` say, by site.
    pub fn options_beside(&self, profiles: &[LatencyProfile]) -> QueueOptions {
        QueueOptions {
            profiles: self.placed.profiles(|site| profiles[site].clone()),
            shares_limit: Some(self.place.model),
            ..self.options.clone()
        }
    }

    /// A queue that is at this place in the scheduler since `now`.
    pub fn new(
        place: QueueHandle,
        options: QueueOptions,
        placed: &Placed,
        profiles: Vec<LatencyProfile>,
        now: Time,
    ) -> Self {
        let gathers =
            matches!(options.dispatch, cluster::DispatchPolicy::Timeout { delay, .. } if delay > Duration::ZERO);
        Queue {
            place,
            gathers,
            last_used_ns: now.as_nanos().into(),
            options,
            placed: placed.clone(),
            refiners: profiles.into_iter().map(|profile| Mutex::new(ProfileRefiner::new(profile))).collect(),
        }
    }

    /// What the scheduler was told of it.
    pub fn settings(&self) -> &QueueOptions {
        &self.options
    }

    /// Whether requests that cannot make their deadline are given up.
    pub fn drops(&self) -> bool {
        self.options.drop != cluster::DropPolicy::None
    }

    /// Learns what its batches take on a partition of a device, and those like it.
    pub fn refiner(&self, device: usize, partition: PartitionId) -> &Mutex<ProfileRefiner> {
        // There is one for each site.
        &self.refiners[self.placed.site(device, partition)]
    }

    /// What its batches take now, by site.
    pub fn profiles(&self) -> Vec<LatencyProfile> {
        self.refiners.iter().map(|refiner| refiner.lock().profile().clone()).collect()
    }

    /// The least that a batch is known to take, wherever it runs: a guess keeps no request from being tried.
    pub fn least(&self, rows: u32) -> Duration {
        let each = self.refiners.iter().map(|refiner| refiner.lock().profile().known_latency(rows));
        each.min().unwrap_or(Duration::ZERO)
    }
}
