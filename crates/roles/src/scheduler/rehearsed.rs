//! The scheduler of a lead, with the events that a rehearsal of its behaviours must hear.
//!
//! A rehearsal replays the last seconds on the present models and devices
//! ([`downbeat_core::cluster::Rehearsal`]). It needs CPU time beside the scheduler's, so it runs on
//! a thread of its own.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use downbeat_core::cluster::{DispatchPolicy, ModelOptions, NetworkBudget, PastArrival, Request, Scheduler};
use downbeat_core::device_profiles::DeviceProfiles;
use downbeat_core::ids::{DeviceId, DeviceKind, ModelId};
use downbeat_core::time::{Duration, Time};

/// An event of a lead for the rehearsal. A lead begins without models and devices.
#[derive(Clone, PartialEq, Debug)]
pub enum RehearsalEvent {
    /// A queue of requests for the model of this name.
    Added(ModelId, String, Box<ModelOptions>),
    /// The queue is gone.
    Removed(ModelId),
    /// Other profiles of a queue's batches.
    Profiles(ModelId, DeviceProfiles),
    /// Other networks of a queue's batches, by the kind of device.
    Network(ModelId, Vec<(DeviceKind, NetworkBudget)>),
    /// The number of devices of a kind.
    Devices(DeviceKind, u32),
    /// A request came, whether accepted or rejected.
    Arrived(PastArrival),
    /// Requests of a queue ended.
    Answered {
        /// When they ended.
        at: Time,
        /// Their queue.
        model: ModelId,
        /// Their number.
        requests: u32,
        /// Whether they ended without a run.
        lost: bool,
    },
    /// A batch took this share of the time by its profile.
    Ran(ModelId, f64),
}

/// The scheduler of a lead. If the lead is rehearsed, each change of models and devices is also an
/// event. All other methods of [`Scheduler`] can be called, too.
#[derive(Debug)]
pub(super) struct RehearsedScheduler {
    scheduler: Scheduler,
    /// `None`: there is no rehearsal.
    heard: Option<Heard>,
}

#[derive(Debug, Default)]
struct Heard {
    /// The driver takes all events after each input.
    events: Vec<RehearsalEvent>,
    devices: BTreeMap<DeviceKind, u32>,
    kinds: BTreeMap<DeviceId, DeviceKind>,
}

impl Heard {
    fn count(&mut self, kind: DeviceKind, change: i32) {
        let count = self.devices.entry(kind).or_default();
        *count = count.saturating_add_signed(change);
        self.events.push(RehearsalEvent::Devices(kind, *count));
    }
}

impl Deref for RehearsedScheduler {
    type Target = Scheduler;

    fn deref(&self) -> &Scheduler {
        &self.scheduler
    }
}

impl DerefMut for RehearsedScheduler {
    fn deref_mut(&mut self) -> &mut Scheduler {
        &mut self.scheduler
    }
}

impl RehearsedScheduler {
    /// A scheduler without models and devices.
    pub fn new(is_rehearsed: bool) -> Self {
        RehearsedScheduler { scheduler: Scheduler::new(), heard: is_rehearsed.then(Heard::default) }
    }

    /// Takes the events since the last call.
    pub fn heard(&mut self) -> impl Iterator<Item = RehearsalEvent> {
        self.heard.iter_mut().flat_map(|heard| heard.events.drain(..))
    }

    fn hear(&mut self, event: impl FnOnce() -> RehearsalEvent) {
        if let Some(heard) = &mut self.heard {
            heard.events.push(event());
        }
    }

    /// Notes that a request came to its queue.
    pub fn note_arrival(&mut self, now: Time, request: &Request) {
        self.hear(|| {
            let Request { deadline, model, size, level, .. } = *request;
            let budget = if deadline == Time::MAX { Duration::MAX } else { deadline.since(now) };
            RehearsalEvent::Arrived(PastArrival { at: now, budget, model, size, level })
        });
    }

    /// Notes that requests of a queue ended. `lost`: without a run.
    pub fn note_answers(&mut self, at: Time, model: ModelId, requests: u32, lost: bool) {
        self.hear(|| RehearsalEvent::Answered { at, model, requests, lost });
    }

    /// Notes that a batch took this time, in place of the `expected` one.
    pub fn note_run(&mut self, model: ModelId, took: Duration, expected: Duration) {
        if expected > Duration::ZERO {
            self.hear(|| RehearsalEvent::Ran(model, took.as_secs_f64() / expected.as_secs_f64()));
        }
    }

    /// Adds the queue of a model with this name. A replay leaves out models whose batches a device
    /// policy makes.
    pub fn add_model(&mut self, now: Time, name: &str, options: ModelOptions) -> ModelId {
        let is_heard = self.heard.is_some() && options.dispatch != DispatchPolicy::Route;
        let heard = is_heard.then(|| Box::new(options.clone()));
        let model = self.scheduler.add_model(now, options);
        if let Some(options) = heard {
            self.hear(|| RehearsalEvent::Added(model, name.to_owned(), options));
        }
        model
    }

    /// Removes a queue.
    pub fn remove_model(&mut self, now: Time, model: ModelId) {
        self.scheduler.remove_model(now, model);
        self.hear(|| RehearsalEvent::Removed(model));
    }

    /// Replaces the profiles of a queue's batches.
    pub fn set_profile(&mut self, now: Time, model: ModelId, profiles: DeviceProfiles) {
        self.hear(|| RehearsalEvent::Profiles(model, profiles.clone()));
        self.scheduler.set_profile(now, model, profiles);
    }

    /// Sets the networks of a queue's batches, by the kind of device.
    pub fn set_model_network(&mut self, now: Time, model: ModelId, networks: &[(DeviceKind, NetworkBudget)]) {
        self.hear(|| RehearsalEvent::Network(model, networks.to_vec()));
        self.scheduler.set_model_network(now, model, networks);
    }

    /// Adds a device, free.
    pub fn add_device(&mut self, now: Time, kind: DeviceKind) -> DeviceId {
        let device = self.scheduler.add_device(now, kind);
        if let Some(heard) = &mut self.heard {
            heard.kinds.insert(device, kind);
            heard.count(kind, 1);
        }
        device
    }

    /// Adds a seat, of which a replay knows nothing.
    pub fn add_seat(&mut self, now: Time, kind: DeviceKind) -> DeviceId {
        self.scheduler.add_device(now, kind)
    }

    /// Removes a device or a seat.
    pub fn remove_device(&mut self, now: Time, device: DeviceId) {
        self.scheduler.remove_device(now, device);
        if let Some(heard) = &mut self.heard
            && let Some(kind) = heard.kinds.remove(&device)
        {
            heard.count(kind, -1);
        }
    }
}
