//! The replay of past arrivals: the cluster's scheduler and device policies on emulated devices.

use std::collections::BTreeMap;

use super::candidate::{RehearsedModel, Replayable};
use super::emulated::EmulatedDevice;
use super::hold_off::HoldOff;
use crate::cluster::{Behaviour, ExecutionNoise, Output, PastArrival, Random, Request, Scheduler, Tally};
use crate::device::auto_inputs::Overlap;
use crate::device::entry::PolicyOptions;
use crate::device::exclusive::ExclusiveOptions;
use crate::device::launch::{GrantedBatch, Launch, Span};
use crate::device::output::DeviceOutput;
use crate::device::request::DeviceRequest;
use crate::device::scheduler::{DeviceScheduler, Layout};
use crate::device::segment_profile::SegmentProfile;
use crate::ids::{DeviceId, DeviceKind, LaneId, ModelId, PartitionId, RequestId};
use crate::time::{Duration, Time};

/// A model with its candidates.
#[derive(Clone, Debug)]
pub(super) struct StagedModel {
    pub model: RehearsedModel,
    pub candidates: Vec<Replayable>,
    /// The latencies of the model's launches, as shares of its profile's.
    pub noise: ExecutionNoise,
    /// The index of the model's current candidate.
    pub current: usize,
    /// The model's behaviour under `exclusive`.
    pub behaviour: Option<Behaviour>,
    /// The candidates that have lost in reality.
    pub hold_off: HoldOff,
}

/// The devices and models of a replay.
#[derive(Clone, Debug)]
pub(super) struct Stage {
    /// The models by number; `None`: there is none of that number.
    pub models: Vec<Option<StagedModel>>,
    pub devices: u32,
    /// The batches that the cluster's scheduler runs at once on each device.
    pub at_once: u32,
    /// How long before its last moment the scheduler starts a batch that waits.
    pub wake_margin: Duration,
    pub seed: u64,
}

/// A part of the past: the arrivals in `lead..end`, of which those from `counted` on count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub lead: usize,
    pub counted: usize,
    pub end: usize,
}

/// A replay of the past with one candidate for each model.
#[derive(Debug)]
pub(super) struct Replay {
    /// The models by number; `None`: there is none, and its requests are ignored.
    models: Vec<Option<Played>>,
    scheduler: Scheduler,
    /// Our number of a model, by the scheduler's number.
    clustered: Vec<ModelId>,
    devices: Vec<Device>,
    /// Our number of a device and its lane, by the scheduler's number of the device.
    slots: Vec<(usize, LaneId)>,
    random: Random,
    next: usize,
    end: usize,
    /// The rate of the arrivals, in percent of the real rate.
    percent: u64,
    origin: Time,
    now: Time,
    tally: Tally,
}

#[derive(Debug)]
struct Played {
    /// The model's number in the cluster's scheduler; `None`: its batches are made on the devices.
    clustered: Option<ModelId>,
    /// The latencies of the model's segments, as its policy has it cut.
    profile: SegmentProfile,
    overlap: Overlap,
    launch: Duration,
    noise: ExecutionNoise,
}

#[derive(Debug)]
struct Device {
    scheduler: DeviceScheduler,
    emulated: EmulatedDevice,
    /// The scheduler's number of the device, by the lane of granted batches.
    granted: BTreeMap<LaneId, DeviceId>,
}

impl Replay {
    /// Prepares the replay of the arrivals of `part`, at `percent` of their real rate. `chosen` has
    /// the index of each model's candidate.
    pub fn new(stage: &Stage, chosen: &[usize], past: &[PastArrival], part: Part, percent: u64) -> Self {
        let Part { lead, counted, end } = part;
        let mut replay = Replay {
            models: Vec::new(),
            scheduler: Scheduler::new(),
            clustered: Vec::new(),
            devices: Vec::new(),
            slots: Vec::new(),
            random: Random(stage.seed),
            next: lead,
            end,
            percent,
            origin: past.get(lead).map_or(Time::ZERO, |first| first.at),
            now: Time::ZERO,
            tally: Tally::new(stage.models.len(), counted..end),
        };
        replay.scheduler.set_wake_margin(Time::ZERO, stage.wake_margin);
        for _ in 0..stage.devices.max(1) {
            replay.add_device(stage.at_once.max(1));
        }
        for (number, model) in (0..).map(ModelId).zip(&stage.models) {
            let candidate = chosen.get(number.0 as usize).copied().unwrap_or(0);
            let played = model.as_ref().and_then(|model| replay.add_model(number, model, candidate));
            replay.models.push(played);
        }
        replay
    }

    fn add_device(&mut self, at_once: u32) {
        let (number, mut scheduler) = (self.devices.len(), DeviceScheduler::new());
        // One partition with some lanes is never refused.
        let _ = scheduler.handle_layout(Time::ZERO, &Layout { shared_lanes: vec![at_once] });
        let mut granted = BTreeMap::new();
        for lane in scheduler.shared_lanes(PartitionId::default()) {
            granted.insert(*lane, self.scheduler.add_device(Time::ZERO, DeviceKind(0)));
            self.slots.push((number, *lane));
        }
        self.devices.push(Device { scheduler, emulated: EmulatedDevice::default(), granted });
    }

    fn add_model(&mut self, number: ModelId, staged: &StagedModel, candidate: usize) -> Option<Played> {
        let StagedModel { model, candidates, noise, behaviour, .. } = staged;
        let spec = candidates.get(candidate)?.spec.as_ref();
        let mut profile = model.model.profile.clone();
        for device in &mut self.devices {
            let built = match spec {
                None => ExclusiveOptions { profile: profile.clone() }.build(),
                Some(spec) => spec.build().ok()?,
            };
            profile = built.profile.clone();
            device.scheduler.handle_model(Time::ZERO, number, Some(built)).ok()?;
        }
        let clustered = spec.is_none().then(|| {
            self.clustered.push(number);
            let added = self.scheduler.add_model(Time::ZERO, model.options.clone());
            self.scheduler.set_behaviour(Time::ZERO, added, *behaviour);
            added
        });
        let overlap = model.overlap.clone().unwrap_or_default();
        Some(Played { clustered, profile, overlap, launch: model.launch, noise: noise.clone() })
    }

    /// Replays at most `events` events. Returns their number, and whether the replay is complete.
    pub fn step(&mut self, past: &[PastArrival], events: u64) -> (u64, bool) {
        let mut used = 0;
        while used < events {
            let arrival = if self.next < self.end { self.time_of(past, self.next) } else { Time::MAX };
            let ends = self.devices.iter().filter_map(|device| device.emulated.next_end());
            let end = ends.min().unwrap_or(Time::MAX);
            let timers = self.devices.iter().filter_map(|device| device.scheduler.poll_timeout());
            let timers = timers.map(|(at, _)| at).chain(self.scheduler.poll_timeout().map(|(at, _)| at));
            let timer = timers.min().unwrap_or(Time::MAX);
            let next = end.min(arrival).min(timer);
            if next == Time::MAX {
                return (used, true);
            }
            self.now = self.now.max(next);
            if end == next {
                self.complete();
            } else if arrival == next {
                self.arrive(past);
            } else {
                self.scheduler.handle_timeout(self.now);
                for device in &mut self.devices {
                    device.scheduler.handle_timeout(self.now);
                }
            }
            self.decide(past);
            used += 1;
        }
        (used, false)
    }

    /// The outcome of the replay.
    pub fn into_tally(mut self) -> Tally {
        self.tally.span = self.now.since(Time::ZERO);
        self.tally
    }

    /// The time of an arrival in the replay.
    fn time_of(&self, past: &[PastArrival], index: usize) -> Time {
        Time::from_nanos(past[index].at.since(self.origin).as_nanos().saturating_mul(100) / self.percent)
    }

    fn arrive(&mut self, past: &[PastArrival]) {
        let index = self.next;
        self.next += 1;
        let PastArrival { budget, model, size, level, .. } = past[index];
        let Some(played) = self.models.get(model.0 as usize).and_then(Option::as_ref) else { return };
        let (id, now) = (RequestId(index as u64), self.now);
        let deadline = if budget == Duration::MAX { Time::MAX } else { now + budget };
        let accepted = match played.clustered {
            Some(model) => {
                let request = Request { id, model, deadline, queue_expiry: Time::MAX, level, size };
                self.scheduler.handle_request(now, request).is_ok()
            }
            None => {
                let request = DeviceRequest { id, model, deadline, size, length: 0 };
                let soonest = self.devices.iter_mut().min_by_key(|device| device.scheduler.free_at(now, model));
                soonest.is_some_and(|device| device.scheduler.handle_request(now, &request).is_ok())
            }
        };
        self.tally.offered(index, model);
        if !accepted {
            self.tally.bad(index, model);
        }
    }

    fn complete(&mut self) {
        for number in 0..self.devices.len() {
            while let Some((launch, span)) = self.devices[number].emulated.poll_end(self.now) {
                self.over(number, &launch, span);
            }
        }
    }

    fn over(&mut self, number: usize, launch: &Launch, span: Span) {
        let device = &mut self.devices[number];
        self.tally.busy += span.end.since(span.start);
        device.scheduler.handle_completion(self.now, launch.id, span, &[]);
        if let Some(batch) = launch.granted
            && let Some(slot) = device.granted.get(&launch.lane)
        {
            self.scheduler.handle_completion(self.now, *slot, batch);
        }
    }

    fn decide(&mut self, past: &[PastArrival]) {
        loop {
            let mut more = false;
            self.tell_loads();
            while let Some(output) = self.scheduler.poll_output() {
                more = true;
                self.dispatch(past, output);
            }
            for number in 0..self.devices.len() {
                while let Some(output) = self.devices[number].scheduler.poll_output() {
                    more = true;
                    self.carry_out(past, number, output);
                }
            }
            if !more {
                return;
            }
        }
    }

    /// Tells the scheduler the other load of its devices, if some models' batches are made on them.
    fn tell_loads(&mut self) {
        if self.clustered.is_empty() || self.models.iter().flatten().all(|model| model.clustered.is_some()) {
            return;
        }
        for (slot, (device, _)) in (0..).map(DeviceId).zip(&self.slots) {
            let load = self.devices[*device].scheduler.load(self.now, PartitionId::default());
            self.scheduler.set_load(slot, load);
        }
    }

    fn dispatch(&mut self, past: &[PastArrival], output: Output) {
        match output {
            Output::Drop { request, .. } => self.bad(past, request),
            Output::Dispatch { batch, device: slot, model, members, size, .. } => {
                let (Some(model), Some((device, lane))) =
                    (self.clustered.get(model.0 as usize), self.slots.get(slot.0 as usize))
                else {
                    return;
                };
                let granted =
                    GrantedBatch { id: batch, model: *model, lane: *lane, members: members.clone(), rows: size };
                if self.devices[*device].scheduler.handle_batch(self.now, granted).is_err() {
                    self.scheduler.handle_completion(self.now, slot, batch);
                    members.iter().for_each(|request| self.bad(past, *request));
                }
                self.scheduler.recycle(members);
            }
        }
    }

    fn carry_out(&mut self, past: &[PastArrival], number: usize, output: DeviceOutput) {
        match output {
            DeviceOutput::Admit { model, request, .. } => {
                self.devices[number].scheduler.handle_input(self.now, model, request);
            }
            DeviceOutput::Launch(launch) => self.launch(number, launch),
            DeviceOutput::Group(launches) => launches.into_iter().for_each(|launch| self.launch(number, launch)),
            DeviceOutput::Reply { request, .. } => {
                let index = request.0 as usize;
                let took = self.now.since(self.time_of(past, index));
                let PastArrival { model, budget, .. } = past[index];
                self.tally.done(index, model, took, budget);
            }
            DeviceOutput::Drop { request, .. } => self.bad(past, request),
            DeviceOutput::Prepare { model, .. } => {
                self.devices[number].scheduler.handle_prepared(self.now, model, Ok(()));
            }
            DeviceOutput::Switch { .. } | DeviceOutput::Free { .. } | DeviceOutput::Note { .. } => {}
        }
    }

    fn launch(&mut self, number: usize, launch: Launch) {
        let Some(Played { profile, overlap, launch: hand_over, noise, .. }) =
            self.models.get(launch.model.0 as usize).and_then(Option::as_ref)
        else {
            return;
        };
        let from = |segment| profile.remaining(segment, launch.computed_rows, launch.length);
        let alone = from(launch.segments.first).saturating_sub(from(launch.segments.end));
        let (alone, demand) = (noise.took(&mut self.random, alone) + *hand_over, overlap.demand(launch.computed_rows));
        self.devices[number].emulated.launch(self.now, launch, alone, demand);
    }

    fn bad(&mut self, past: &[PastArrival], request: RequestId) {
        let index = request.0 as usize;
        self.tally.bad(index, past[index].model);
    }
}
