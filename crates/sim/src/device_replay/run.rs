//! The replay of past arrivals: the cluster's scheduler and device policies on emulated devices.

use std::collections::BTreeMap;
use std::ops::Range;

use downbeat_core::cluster::{ExecutionNoise, Output, PastArrival, Random, Request, Scheduler};
use downbeat_core::device::{
    DeviceOutput, DeviceRequest, DeviceScheduler, ExclusiveOptions, GrantedBatch, LaneId, Launch, Layout, ModelSpec,
    Overlap, PartitionId, PolicyOptions, SegmentProfile, Span,
};
use downbeat_core::{DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};

use super::candidate::ReplayedModel;
use super::emulated::EmulatedDevice;

/// Models on devices whose recorded requests are replayed.
///
/// A replay uses fresh copies of the state machines that serve models: a [`Scheduler`] for models
/// under `exclusive`, and a [`DeviceScheduler`] for each device. The devices are emulated by
/// measurements: profiles by batch size, latencies of segments, overlap of two lanes, hand-over
/// time, and noise. The same inputs give the same counts.
///
/// Two facts are not measured, and the replay assumes them. More than two lanes do as much work as
/// two do. Models share a device as lanes of one model do.
#[derive(Clone, Debug)]
pub struct DeviceReplay {
    /// The models, by their numbers in the arrivals.
    pub models: Vec<ReplayedModel>,
    /// The number of devices. Each model is on all of them.
    pub devices: u32,
    /// The batches that the cluster's scheduler runs at once on each device.
    pub at_once: u32,
    /// How long before its last moment the scheduler starts a batch that waits for others.
    pub wake_margin: Duration,
    /// Chooses the noise of launches.
    pub seed: u64,
}

/// The outcome of a model's requests in a replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReplayCount {
    /// The requests.
    pub requests: u64,
    /// Requests that were answered by their deadline.
    pub in_time: u64,
    /// Requests that were answered after their deadline.
    pub late: u64,
    /// Requests that were refused or given up.
    pub dropped: u64,
    /// The sum over all answers of the time from the arrival.
    pub delay: Duration,
}

impl DeviceReplay {
    /// Replays the arrivals, with a policy for each model (`None`: `exclusive`). Only the arrivals
    /// in `counted` count. Returns the outcome by model.
    pub fn run(
        &self,
        policies: &[Option<&ModelSpec>],
        arrivals: &[PastArrival],
        counted: Range<usize>,
    ) -> Vec<ReplayCount> {
        let mut run = Run::new(self, policies, arrivals, counted);
        while run.step() {}
        run.counts
    }

    /// Like [`Self::run`], but gives up once more than `most_bad` of the counted requests of all
    /// models are late or dropped. Returns `None` then.
    pub fn run_within(
        &self,
        policies: &[Option<&ModelSpec>],
        arrivals: &[PastArrival],
        counted: Range<usize>,
        most_bad: u64,
    ) -> Option<Vec<ReplayCount>> {
        let mut run = Run::new(self, policies, arrivals, counted);
        let is_over =
            |counts: &[ReplayCount]| counts.iter().map(|count| count.late + count.dropped).sum::<u64>() > most_bad;
        while run.step() {
            if is_over(&run.counts) {
                return None;
            }
        }
        Some(run.counts)
    }
}

/// A replay on its way.
struct Run<'a> {
    arrivals: &'a [PastArrival],
    counted: Range<usize>,
    counts: Vec<ReplayCount>,
    /// The models by number; `None`: its policy cannot have it, and its requests are refused.
    models: Vec<Option<Played>>,
    scheduler: Scheduler,
    /// Our number of a model, by the scheduler's number.
    clustered: Vec<ModelId>,
    devices: Vec<Device>,
    /// Our number of a device and its lane, by the scheduler's number of the device.
    slots: Vec<(usize, LaneId)>,
    random: Random,
    next: usize,
    now: Time,
}

struct Played {
    /// The model's number in the cluster's scheduler; `None`: its batches are made on the devices.
    clustered: Option<ModelId>,
    /// The latencies of the model's segments, as its policy has it cut.
    profile: SegmentProfile,
    overlap: Overlap,
    launch: Duration,
    noise: ExecutionNoise,
}

struct Device {
    scheduler: DeviceScheduler,
    emulated: EmulatedDevice,
    /// The scheduler's number of the device, by the lane of granted batches.
    granted: BTreeMap<LaneId, DeviceId>,
}

impl<'a> Run<'a> {
    fn new(
        replay: &DeviceReplay,
        policies: &[Option<&ModelSpec>],
        arrivals: &'a [PastArrival],
        counted: Range<usize>,
    ) -> Self {
        let mut run = Run {
            arrivals,
            counted,
            counts: vec![ReplayCount::default(); replay.models.len()],
            models: Vec::new(),
            scheduler: Scheduler::new(),
            clustered: Vec::new(),
            devices: Vec::new(),
            slots: Vec::new(),
            random: Random(replay.seed),
            next: 0,
            now: Time::ZERO,
        };
        run.scheduler.set_wake_margin(Time::ZERO, replay.wake_margin);
        for _ in 0..replay.devices.max(1) {
            run.add_device(replay.at_once.max(1));
        }
        for (number, model) in (0..).map(ModelId).zip(&replay.models) {
            let policy = policies.get(number.0 as usize).copied().flatten();
            let played = run.add_model(number, model, policy);
            run.models.push(played);
        }
        run
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

    fn add_model(&mut self, number: ModelId, model: &ReplayedModel, policy: Option<&ModelSpec>) -> Option<Played> {
        let mut profile = model.model.profile.clone();
        for device in &mut self.devices {
            let built = match policy {
                None => ExclusiveOptions { profile: profile.clone() }.build(),
                Some(spec) => spec.build().ok()?,
            };
            profile = built.profile.clone();
            device.scheduler.handle_model(Time::ZERO, number, Some(built)).ok()?;
        }
        let clustered = policy.is_none().then(|| {
            self.clustered.push(number);
            self.scheduler.add_model(Time::ZERO, model.options.clone())
        });
        let mut noise = ExecutionNoise::default();
        model.shares.iter().for_each(|share| noise.add(*share));
        let overlap = model.overlap.clone().unwrap_or_default();
        Some(Played { clustered, profile, overlap, launch: model.launch, noise })
    }

    /// Replays the next event; false: there is none.
    fn step(&mut self) -> bool {
        let arrival = self.arrivals.get(self.next).map_or(Time::MAX, |next| next.at);
        let ends = self.devices.iter().filter_map(|device| device.emulated.next_end());
        let end = ends.min().unwrap_or(Time::MAX);
        let timers = self.devices.iter().filter_map(|device| device.scheduler.poll_timeout());
        let timers = timers.map(|(at, _)| at).chain(self.scheduler.poll_timeout().map(|(at, _)| at));
        let next = end.min(arrival).min(timers.min().unwrap_or(Time::MAX));
        if next == Time::MAX {
            return false;
        }
        self.now = self.now.max(next);
        if end == next {
            self.complete();
        } else if arrival == next {
            self.arrive();
        } else {
            self.scheduler.handle_timeout(self.now);
            for device in &mut self.devices {
                device.scheduler.handle_timeout(self.now);
            }
        }
        self.decide();
        true
    }

    fn arrive(&mut self) {
        let index = self.next;
        self.next += 1;
        let PastArrival { budget, model, size, level, .. } = self.arrivals[index];
        self.count(index, |count| count.requests += 1);
        let (id, now) = (RequestId(index as u64), self.now);
        let deadline = if budget == Duration::MAX { Time::MAX } else { now + budget };
        let played = self.models.get(model.0 as usize).and_then(Option::as_ref);
        let is_accepted = match played.map(|played| played.clustered) {
            None => false,
            Some(Some(model)) => {
                let request = Request { id, model, deadline, queue_expiry: Time::MAX, level, size };
                self.scheduler.handle_request(now, request).is_ok()
            }
            Some(None) => {
                let request = DeviceRequest { id, model, deadline, size, length: 0 };
                let soonest = self.devices.iter_mut().min_by_key(|device| device.scheduler.free_at(now, model));
                soonest.is_some_and(|device| device.scheduler.handle_request(now, &request).is_ok())
            }
        };
        if !is_accepted {
            self.drop(id);
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
        device.scheduler.handle_completion(self.now, launch.id, span, &[]);
        if let Some(batch) = launch.granted
            && let Some(slot) = device.granted.get(&launch.lane)
        {
            self.scheduler.handle_completion(self.now, *slot, batch);
        }
    }

    fn decide(&mut self) {
        loop {
            let mut more = false;
            self.tell_loads();
            while let Some(output) = self.scheduler.poll_output() {
                more = true;
                self.dispatch(output);
            }
            for number in 0..self.devices.len() {
                while let Some(output) = self.devices[number].scheduler.poll_output() {
                    more = true;
                    self.carry_out(number, output);
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

    fn dispatch(&mut self, output: Output) {
        match output {
            Output::Drop { request, .. } => self.drop(request),
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
                    members.iter().for_each(|request| self.drop(*request));
                }
                self.scheduler.recycle(members);
            }
        }
    }

    fn carry_out(&mut self, number: usize, output: DeviceOutput) {
        match output {
            DeviceOutput::Admit { model, request, .. } => {
                self.devices[number].scheduler.handle_input(self.now, model, request);
            }
            DeviceOutput::Launch(launch) => self.launch(number, launch),
            DeviceOutput::Group(launches) => launches.into_iter().for_each(|launch| self.launch(number, launch)),
            DeviceOutput::Reply { request, .. } => self.reply(request),
            DeviceOutput::Drop { request, .. } => self.drop(request),
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

    fn reply(&mut self, request: RequestId) {
        let index = request.0 as usize;
        let PastArrival { at, budget, .. } = self.arrivals[index];
        let took = self.now.since(at);
        self.count(index, |count| {
            *(if took <= budget { &mut count.in_time } else { &mut count.late }) += 1;
            count.delay += took;
        });
    }

    fn drop(&mut self, request: RequestId) {
        self.count(request.0 as usize, |count| count.dropped += 1);
    }

    /// Changes the count of an arrival's model, if the arrival counts.
    fn count(&mut self, index: usize, change: impl FnOnce(&mut ReplayCount)) {
        let model = self.arrivals[index].model.0 as usize;
        if self.counted.contains(&index)
            && let Some(count) = self.counts.get_mut(model)
        {
            change(count);
        }
    }
}
