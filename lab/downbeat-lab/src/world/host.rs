//! One device of the world: its scheduler, and the emulated device that carries its decisions out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use downbeat_core::device::{
    BadLayout, BadPolicy, DeviceModel, DeviceOutput, DeviceReject, DeviceRequest, DeviceScheduler, GrantedBatch,
    InputSource, LaneId, LaneSpec, Launch, LaunchId, Layout, PartitionId, SegmentRange, Span,
};
use downbeat_core::{BatchId, DeviceId, Duration, ModelId, RequestId, Time};
use rand_distr::Normal;
use rand_pcg::Pcg64;

use super::ledger::{Ending, Failure};
use super::run::Outside;
use crate::device::{Completed, ContendedDevice, DeviceLimits, Direction, EmulatedModel, LaunchChecker, Work};

/// An event of a device that the world must learn of.
#[derive(Debug)]
pub(crate) enum Done {
    /// A request ended.
    Request(RequestId, Ending),
    /// A batch of the cluster's scheduler is done.
    Batch(DeviceId, BatchId),
    /// The device's scheduler asks for lanes of a model.
    Prepare(ModelId),
}

/// One device: its scheduler, and the emulated device that carries its decisions out.
#[derive(Debug)]
pub(crate) struct Host {
    number: usize,
    pub scheduler: DeviceScheduler,
    pub checker: LaunchChecker,
    limits: DeviceLimits,
    count: u32,
    /// The emulated device, with its partitions and the removed ones.
    device: ContendedDevice,
    models: BTreeMap<ModelId, EmulatedModel>,
    /// Requests that have not ended on this device.
    requests: BTreeMap<RequestId, Member>,
    /// The launches of each lane. The first one runs.
    lanes: BTreeMap<LaneId, VecDeque<LaunchId>>,
    /// Lanes that models hold.
    held: BTreeSet<LaneId>,
    flights: BTreeMap<LaunchId, Flight>,
    /// The slot of each batch of the cluster's scheduler.
    granted: BTreeMap<BatchId, DeviceId>,
    /// The begin of each copy under way.
    copies: BTreeMap<(Direction, u64), Time>,
    noise: Option<(Normal<f64>, Pcg64)>,
    /// The next launch takes this much longer.
    pub late: Duration,
    /// True while the device is lost.
    pub lost: bool,
    /// The time up to which [`Host::advance`] has passed.
    passed: Time,
    pub busy: Duration,
    pub done: VecDeque<Done>,
}

#[derive(Debug)]
struct Member {
    model: ModelId,
    length: u32,
    size: u32,
    /// True if each launch of this model copies its outputs back itself.
    with_host: bool,
}

/// A launch under way.
#[derive(Debug)]
struct Flight {
    launch: Launch,
    step: Step,
    start: Time,
}

/// The step that a launch has reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// The launch waits behind another one.
    Behind,
    /// The host joins the inputs.
    Gather,
    CopyIn,
    Compute,
    CopyOut,
}

/// Names a copy. The name tells whether the copy belongs to a launch or to a request.
fn launch_copy(launch: LaunchId) -> u64 {
    launch.0 * 2 + 1
}

fn request_copy(request: RequestId) -> u64 {
    request.0 * 2
}

impl Host {
    /// Makes the device of this number, with one partition and without models. The checker of its
    /// launches prints this seed.
    pub fn new(number: usize, seed: u64, limits: DeviceLimits, noise: Option<(Normal<f64>, Pcg64)>) -> Self {
        Host {
            number,
            scheduler: DeviceScheduler::new(),
            checker: LaunchChecker::new(seed),
            limits,
            count: 1,
            device: ContendedDevice::new(limits, 0),
            models: BTreeMap::new(),
            requests: BTreeMap::new(),
            lanes: BTreeMap::new(),
            held: BTreeSet::new(),
            flights: BTreeMap::new(),
            granted: BTreeMap::new(),
            copies: BTreeMap::new(),
            noise,
            late: Duration::ZERO,
            lost: false,
            passed: Time::ZERO,
            busy: Duration::ZERO,
            done: VecDeque::new(),
        }
    }

    /// Units in use, summed over the nanoseconds until now.
    pub fn used_unit_nanos(&self) -> u128 {
        self.device.used_unit_nanos()
    }

    /// Returns the lanes of a model with their purposes.
    pub fn lanes(&self, model: usize) -> Vec<(LaneId, LaneSpec)> {
        let lanes = self.scheduler.lanes(ModelId(model as u32)).iter();
        lanes.filter_map(|lane| Some((*lane, self.scheduler.lane(*lane)?))).collect()
    }

    /// Returns the most slots of its rings that were ever in use at a time.
    pub fn most_slots(&self) -> u32 {
        self.models.keys().map(|model| self.scheduler.stats(*model).most_occupied).max().unwrap_or(0)
    }

    /// Returns the number of partitions.
    pub fn partitions(&self) -> u32 {
        self.count
    }

    /// Returns the time of the next completion, if no work is added.
    pub fn next_event(&self) -> Option<Time> {
        self.device.next_event()
    }

    /// Divides the device, its units evenly.
    pub fn layout(&mut self, now: Time, layout: &Layout) -> Result<(), BadLayout> {
        self.scheduler.handle_layout(now, layout)?;
        let count = layout.shared_lanes.len();
        self.count = count as u32;
        // A launch that runs in a removed partition ends there.
        for partition in 0..self.device.partitions().max(count) {
            self.device.set_units(now, partition, self.limits.units / count as u32);
        }
        Ok(())
    }

    /// Adds, changes or removes a model.
    pub fn model(
        &mut self,
        now: Time,
        model: ModelId,
        comes: Option<(&EmulatedModel, DeviceModel)>,
    ) -> Result<(), BadPolicy> {
        let (emulated, policy) = comes.unzip();
        let slots = policy.as_ref().map_or(0, |comes| comes.policy.stats().slots);
        self.scheduler.handle_model(now, model, policy)?;
        if let Some(emulated) = emulated {
            self.models.insert(model, emulated.clone());
            self.checker.model(model, emulated.segment_count(), slots);
            self.held.extend(self.scheduler.lanes(model));
        }
        Ok(())
    }

    /// Takes in a request that the world routed to this device.
    pub fn request(&mut self, now: Time, request: &DeviceRequest) -> Result<(), DeviceReject> {
        let taken = self.scheduler.handle_request(now, request);
        self.checker.request(now, request, taken.is_ok());
        if taken.is_ok() {
            self.enter(request);
        }
        taken
    }

    fn enter(&mut self, request: &DeviceRequest) {
        let DeviceRequest { model, length, size, .. } = *request;
        self.requests.insert(request.id, Member { model, length, size, with_host: false });
    }

    /// Takes in a batch of the cluster's scheduler.
    pub fn batch(
        &mut self,
        now: Time,
        slot: DeviceId,
        batch: GrantedBatch,
        members: &[DeviceRequest],
    ) -> Result<(), DeviceReject> {
        let id = batch.id;
        self.scheduler.handle_batch(now, batch)?;
        self.granted.insert(id, slot);
        for member in members {
            self.checker.request(now, member, true);
            self.enter(member);
        }
        Ok(())
    }

    /// Learns that a client has gone. Returns true if its request was on this device and has left.
    pub fn cancel(&mut self, now: Time, model: ModelId, request: RequestId) -> bool {
        let was_there = self.scheduler.handle_cancel(now, model, request);
        if was_there {
            self.checker.cancelled(now, request);
            self.requests.remove(&request);
        }
        was_there
    }

    /// Lets time pass up to `now`, and handles every completion until then.
    pub fn advance(&mut self, now: Time, outside: &mut dyn Outside) {
        if !self.flights.is_empty() {
            self.busy += now.since(self.passed);
        }
        self.passed = now;
        for completed in self.device.advance(now) {
            self.complete(now, completed, outside);
        }
    }

    /// Carries out the decisions of the device's scheduler.
    pub fn carry_out(&mut self, now: Time, outside: &mut dyn Outside) {
        while let Some(output) = self.scheduler.poll_output() {
            match output {
                DeviceOutput::Admit { model, request, slots } => {
                    self.checker.admit(now, request, slots);
                    let length = self.requests.get(&request).map_or(0, |member| member.length);
                    let (bytes, _) = self.models[&model].item_bytes(length);
                    self.copy(now, Direction::In, request_copy(request), bytes * u64::from(slots.count));
                }
                DeviceOutput::Launch(launch) => self.launch(now, launch, outside),
                DeviceOutput::Group(launches) => {
                    for launch in launches {
                        self.launch(now, launch, outside);
                    }
                }
                DeviceOutput::Reply { request, .. } => {
                    self.checker.reply(now, request);
                    let Some(Member { model, length, size, with_host }) = self.requests.get(&request) else { continue };
                    if *with_host {
                        self.answer(request);
                    } else {
                        let (_, bytes) = self.models[model].item_bytes(*length);
                        self.copy(now, Direction::Out, request_copy(request), bytes * u64::from(*size));
                    }
                }
                DeviceOutput::Drop { request, .. } => {
                    self.checker.drop_request(now, request);
                    self.requests.remove(&request);
                    self.done.push_back(Done::Request(request, Ending::Dropped));
                }
                DeviceOutput::Note { note, .. } => outside.noted(self.number, &note),
                DeviceOutput::Prepare { model, lanes, .. } => {
                    self.held.extend(lanes);
                    self.done.push_back(Done::Prepare(model));
                }
                DeviceOutput::Switch { .. } => {}
                DeviceOutput::Free { lanes, .. } => {
                    for lane in lanes {
                        self.checker.free_lane(now, lane);
                        self.held.remove(&lane);
                    }
                }
            }
        }
    }

    fn copy(&mut self, now: Time, direction: Direction, token: u64, bytes: u64) {
        self.copies.insert((direction, token), now);
        self.device.copy(now, direction, token, bytes);
    }

    fn launch(&mut self, now: Time, launch: Launch, outside: &mut dyn Outside) {
        self.checker.launch(now, &launch, self.scheduler.lane(launch.lane));
        outside.launched(self.number, &launch);
        let with_host =
            launch.inputs == InputSource::Host && launch.segments.end == self.models[&launch.model].segment_count();
        for member in &launch.members {
            if let Some(member) = self.requests.get_mut(member) {
                member.with_host = with_host;
            }
        }
        let (lane, id) = (launch.lane, launch.id);
        self.flights.insert(id, Flight { launch, step: Step::Behind, start: now });
        let queue = self.lanes.entry(lane).or_default();
        queue.push_back(id);
        if queue.len() == 1 {
            self.begin(now, id, outside);
        }
    }

    /// Begins a launch that has its lane.
    fn begin(&mut self, now: Time, id: LaunchId, outside: &mut dyn Outside) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        flight.start = now;
        let launch = flight.launch.clone();
        outside.began(now, self.number, &launch);
        if self.lost {
            return;
        }
        let late = std::mem::take(&mut self.late);
        if launch.inputs == InputSource::Host {
            flight.step = Step::Gather;
            let model = &self.models[&launch.model];
            let bytes = model.item_bytes(launch.length).0 * u64::from(launch.computed_rows);
            let work = Work { overhead: model.gather(bytes) + late, ..Work::default() };
            self.compute(now, &launch, work);
        } else {
            flight.step = Step::Compute;
            let mut work = self.work(&launch);
            work.overhead += late;
            self.compute(now, &launch, work);
        }
    }

    fn partition(&self, launch: &Launch) -> usize {
        self.checker.partition(launch.lane).map_or(0, |PartitionId(partition)| partition as usize)
    }

    fn compute(&mut self, now: Time, launch: &Launch, work: Work) {
        let partition = self.partition(launch);
        self.device.launch_in(now, partition, launch.lane, launch.id.0, work);
    }

    /// Returns the work of a launch in its partition.
    fn work(&mut self, launch: &Launch) -> Work {
        let units = self.device.units(self.partition(launch));
        let mut work = self.models[&launch.model].work(launch.segments, launch.computed_rows, launch.length, units);
        if let Some((noise, rng)) = &mut self.noise {
            work.vary(noise, rng);
        }
        work
    }

    fn complete(&mut self, now: Time, completed: Completed, outside: &mut dyn Outside) {
        match completed {
            Completed::Copy { direction, token } => {
                if let Some(start) = self.copies.remove(&(direction, token)) {
                    outside.copied(now, start, direction);
                }
                match (token % 2 == 1, direction) {
                    (true, _) => self.proceed(now, LaunchId(token / 2), outside),
                    (false, Direction::In) => self.input(now, RequestId(token / 2), outside),
                    (false, Direction::Out) => self.answer(RequestId(token / 2)),
                }
            }
            Completed::Launch { token, .. } => self.proceed(now, LaunchId(token), outside),
        }
    }

    /// Learns that a request's input is on the device.
    fn input(&mut self, now: Time, request: RequestId, outside: &mut dyn Outside) {
        self.checker.input(now, request);
        if let Some(model) = self.checker.model_of(request) {
            self.scheduler.handle_input(now, model, request);
        }
        self.carry_out(now, outside);
    }

    fn answer(&mut self, request: RequestId) {
        self.requests.remove(&request);
        self.done.push_back(Done::Request(request, Ending::Replied));
    }

    /// Moves a launch to its next step after the current one is done.
    fn proceed(&mut self, now: Time, id: LaunchId, outside: &mut dyn Outside) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        let model = &self.models[&flight.launch.model];
        let (inputs, outputs) = model.item_bytes(flight.launch.length);
        let items = u64::from(flight.launch.computed_rows);
        let last = flight.launch.segments.end == model.segment_count();
        match flight.step {
            Step::Behind => {}
            Step::Gather => {
                flight.step = Step::CopyIn;
                self.copy(now, Direction::In, launch_copy(id), items * inputs);
            }
            Step::CopyIn => {
                flight.step = Step::Compute;
                let launch = flight.launch.clone();
                let work = self.work(&launch);
                self.compute(now, &launch, work);
            }
            Step::Compute if last && flight.launch.inputs == InputSource::Host => {
                flight.step = Step::CopyOut;
                self.copy(now, Direction::Out, launch_copy(id), items * outputs);
            }
            Step::Compute | Step::CopyOut => self.end(now, id, outside),
        }
    }

    fn end(&mut self, now: Time, id: LaunchId, outside: &mut dyn Outside) {
        let Some(Flight { launch, start, .. }) = self.flights.remove(&id) else { return };
        let queue = self.lanes.entry(launch.lane).or_default();
        queue.retain(|other| *other != id);
        let next = queue.front().copied();
        let all = SegmentRange::new(0, self.models[&launch.model].segment_count());
        let exits = if self.lost { Vec::new() } else { outside.completed(now, start, self.number, &launch, all) };
        self.checker.completion(now, &launch, &exits);
        if let Some(next) = next {
            self.begin(now, next, outside);
        }
        self.scheduler.handle_completion(now, id, Span { start, end: now }, &exits);
        self.carry_out(now, outside);
        if let Some(batch) = launch.granted
            && let Some(slot) = self.granted.remove(&batch)
        {
            self.done.push_back(Done::Batch(slot, batch));
        }
    }

    /// Loses the device: its models go, and everything that runs on it fails at once.
    pub fn lose(&mut self, now: Time, outside: &mut dyn Outside) {
        self.lost = true;
        self.late = Duration::ZERO;
        let failed = Ending::Failed(Failure::Lost(self.number));
        for model in self.models.keys().copied().collect::<Vec<_>>() {
            // The scheduler may not know the model, which is fine.
            let _ = self.scheduler.handle_model(now, model, None);
            self.carry_out(now, outside);
        }
        let mut device = ContendedDevice::new(self.limits, 0);
        device.advance(now);
        for partition in 0..self.device.partitions() {
            device.set_units(now, partition, self.device.units(partition));
        }
        self.device = device;
        let copies = std::mem::take(&mut self.copies);
        for ((direction, token), _) in copies.into_iter().filter(|((_, token), _)| token % 2 == 0) {
            let request = RequestId(token / 2);
            match direction {
                Direction::In => self.input(now, request, outside),
                Direction::Out if self.requests.remove(&request).is_some() => {
                    self.done.push_back(Done::Request(request, failed));
                }
                Direction::Out => {}
            }
        }
        while let Some((id, flight)) = self.flights.first_key_value() {
            let (id, model, members) = (*id, flight.launch.model, flight.launch.members.clone());
            for member in members {
                if self.cancel(now, model, member) {
                    self.done.push_back(Done::Request(member, failed));
                }
                self.carry_out(now, outside);
            }
            self.end(now, id, outside);
        }
    }

    /// Asserts that the scheduler keeps nothing after all models have gone.
    pub fn check_empty(&self, now: Time, seed: u64) {
        self.checker.end(now);
        let number = self.number;
        assert!(self.held.is_empty(), "seed {seed}, {now}: device {number} still has the lanes {:?}", self.held);
        for model in self.models.keys() {
            let stats = self.scheduler.stats(*model);
            let left = (stats.waiting, stats.running, stats.occupied);
            assert!(left == (0, 0, 0), "seed {seed}, {now}: device {number} still has {left:?} of {model}");
        }
        assert!(self.granted.is_empty(), "seed {seed}, {now}: device {number} still has batches {:?}", self.granted);
    }
}
