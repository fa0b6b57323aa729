//! The scheduler's queue for the requests of one shape of a model version.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions as QueueOptions, PriorityLevel};
use downbeat_core::device::PartitionId;
use downbeat_core::device_profiles::DeviceProfiles;
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_driver::QueueHandle;
use downbeat_repository::ModelDefinition;
use downbeat_service::options::ServerOptions;
use parking_lot::Mutex;

use crate::device::Placement;
use crate::device_map::ModelDevices;
use crate::refiner::ProfileRefiner;

/// A new share replaces the present share only if the two differ by this many percent points.
const SHARE_STEP: u8 = 10;

/// The scheduler's queue for the requests of one shape.
pub struct Queue {
    /// The queue's place in the scheduler.
    pub place: QueueHandle,
    /// Whether requests wait for others of their shape, for a time that is set.
    pub gathers: bool,
    /// When it was last used, nanoseconds of the server's clock.
    pub last_used_ns: AtomicU64,
    /// The queue's options in the scheduler, when no step of a pipeline uses the queue.
    options: QueueOptions,
    /// The part of the devices that steps of pipelines may count on, percent; 0: no step uses the
    /// queue.
    step_share: AtomicU8,
    /// The devices that its batches run on.
    pub placed: ModelDevices,
    /// By site, as `placed` numbers them: learns the latency of its batches in service.
    pub refiners: Box<[Mutex<ProfileRefiner>]>,
    /// The version on each device.
    models: Box<[Arc<Placement>]>,
}

impl Queue {
    /// The scheduler's options for the first queue of a version. `profiles` has its latencies by
    /// site; at most `at_once` batches run at a time.
    pub fn options(
        options: &ServerOptions,
        definition: &ModelDefinition,
        placed: &ModelDevices,
        profiles: &[LatencyProfile],
        at_once: u32,
    ) -> QueueOptions {
        let (name, batching) = (&definition.name, &definition.batching);
        let queue_delay = options.queue_delay(name, batching.max_queue_delay);
        let configured = definition.dispatch.clone().or_else(|| {
            // A queue delay in config.pbtxt is a wish for Triton's own policy.
            let timeout = DispatchPolicy::Timeout { delay: queue_delay, preferred: Vec::new() };
            (batching.max_queue_delay > Duration::ZERO).then_some(timeout)
        });
        // Loading a model refuses `Route`: this server routes no requests to others.
        let dispatch = options.dispatch_policy(name, configured).with_delay(queue_delay, &batching.preferred);
        let profiles = placed.profiles(|site| profiles[site].clone());
        Self::options_for(options, definition, profiles, dispatch, at_once)
    }

    /// The options that the scheduler of a cluster has for a version whose device policy makes the
    /// batches. `profile`: the version's latencies.
    pub fn routed_options(
        options: &ServerOptions,
        definition: &ModelDefinition,
        profile: LatencyProfile,
    ) -> QueueOptions {
        Self::options_for(options, definition, profile.into(), DispatchPolicy::Route, u32::MAX)
    }

    fn options_for(
        options: &ServerOptions,
        definition: &ModelDefinition,
        profiles: DeviceProfiles,
        dispatch: DispatchPolicy,
        at_once: u32,
    ) -> QueueOptions {
        let (name, batching) = (&definition.name, &definition.batching);
        let queue_delay = options.queue_delay(name, batching.max_queue_delay);
        let drop = options.drop_policy(name, definition.drop, dispatch.clone());
        let levels = batching.levels.iter().map(|level| PriorityLevel {
            max_queue: if level.max_queue_size == 0 { u32::MAX } else { level.max_queue_size },
            timeout_action: level.timeout_action,
        });
        QueueOptions {
            max_batch: batching.max_batch_size.max(1),
            profiles,
            drop,
            dispatch,
            max_in_flight: at_once,
            shares_limit: None,
            max_wait: options.max_queue_wait(name).map_or(Duration::MAX, |wait| wait + queue_delay),
            levels: levels.collect(),
        }
    }

    /// The scheduler's options for a queue of another shape of the same version, with the latencies
    /// `profiles`, by site.
    pub fn options_beside(&self, profiles: &[LatencyProfile]) -> QueueOptions {
        QueueOptions {
            profiles: self.placed.profiles(|site| profiles[site].clone()),
            shares_limit: Some(self.place.model),
            ..self.options.clone()
        }
    }

    /// Makes a queue with this place in the scheduler since `now`.
    pub fn new(
        place: QueueHandle,
        options: QueueOptions,
        placed: &ModelDevices,
        profiles: Vec<LatencyProfile>,
        models: Box<[Arc<Placement>]>,
        now: Time,
    ) -> Self {
        let gathers = matches!(options.dispatch, DispatchPolicy::Timeout { delay, .. } if delay > Duration::ZERO);
        Queue {
            place,
            gathers,
            last_used_ns: now.as_nanos().into(),
            options,
            step_share: AtomicU8::new(0),
            placed: placed.clone(),
            refiners: profiles.into_iter().map(|profile| Mutex::new(ProfileRefiner::new(profile))).collect(),
            models,
        }
    }

    /// The version on a device.
    pub fn on_device(&self, device: usize) -> Option<&Arc<Placement>> {
        self.models.iter().find(|model| model.device == device)
    }

    /// The queue's options in the scheduler, when no step of a pipeline uses the queue.
    pub fn settings(&self) -> &QueueOptions {
        &self.options
    }

    /// The present dispatch policy: batches of a step leave early.
    pub fn dispatch(&self) -> DispatchPolicy {
        match self.step_share.load(Ordering::Relaxed) {
            0 => self.options.dispatch.clone(),
            share => self.options.dispatch.clone().of_step(share),
        }
    }

    /// Sets the part of the devices that steps may count on, percent; `None`: no step uses the queue.
    /// Returns whether that changes the dispatch policy. A share that is nearly the same changes
    /// nothing.
    pub(crate) fn set_step_share(&self, share: Option<u8>) -> bool {
        let share = share.map_or(0, |share| share.clamp(1, 100));
        let before = self.step_share.load(Ordering::Relaxed);
        let is_alike = before > 0 && share > 0 && before.abs_diff(share) < SHARE_STEP;
        if share == before || is_alike {
            return false;
        }
        let was = self.dispatch();
        self.step_share.store(share, Ordering::Relaxed);
        was != self.dispatch()
    }

    /// Whether requests that cannot make their deadline are given up.
    pub fn drops(&self) -> bool {
        self.options.drop != DropPolicy::None
    }

    /// The refiner of its batches' latency on a partition of a device, and on partitions like that.
    pub fn refiner(&self, device: usize, partition: PartitionId) -> &Mutex<ProfileRefiner> {
        // Each site has a refiner.
        &self.refiners[self.placed.site(device, partition)]
    }

    /// The present latency profiles, by site.
    pub fn profiles(&self) -> Vec<LatencyProfile> {
        self.refiners.iter().map(|refiner| refiner.lock().profile().clone()).collect()
    }

    /// The least known latency of a batch, at any site: a guess keeps no request from being tried.
    pub fn least(&self, rows: u32) -> Duration {
        let each = self.refiners.iter().map(|refiner| refiner.lock().profile().known_latency(rows));
        each.min().unwrap_or(Duration::ZERO)
    }
}
