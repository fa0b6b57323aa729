//! The lanes of a device, the launches on them, and the forecast of their ends.

use std::collections::{BTreeMap, VecDeque};

use super::launch::{LaneSpec, Launch, SegmentRange, Span};
use super::output::DeviceOutput;
use super::resident::{Resident, ResidentKey, Standby};
use crate::ids::{BatchId, LaneId, LaunchId, ModelId, PartitionId};
use crate::time::{Duration, Time};

/// The owner of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    /// No single policy: the scheduler grants the lane to batches.
    All,
    /// The policy of one model.
    One(ResidentKey),
}

/// A place in a partition for one launch that runs and at most one that waits behind it.
#[derive(Clone, Copy, Debug)]
struct Lane {
    spec: LaneSpec,
    /// `None`: the lane is free, and the next new lane gets its id.
    owner: Option<Owner>,
    /// Whether the lane becomes free as soon as nothing runs on it.
    leaving: bool,
    runs: Option<LaunchId>,
    waits: Option<LaunchId>,
}

/// A launch under way.
#[derive(Clone, Copy, Debug)]
struct Flight {
    of: ResidentKey,
    lane: LaneId,
    /// The time that the launch takes alone.
    alone: Duration,
    /// The rest of that time, at the last reckoning.
    left: Duration,
}

/// The state that all policies of a device share: lanes, launches, new ids, and the decisions to
/// carry out.
///
/// **Forecast.** A launch takes the time of its model's profile. Launches that run in one partition
/// at the same time share it evenly, like threads on one processor. Even if they run one after
/// another, each is done by the time that this forecast says all are. An overdue launch counts as
/// done. A launch's completion ends its reckoning, early or late, and so corrects the forecast.
#[derive(Debug, Default)]
pub struct Device {
    lanes: Vec<Lane>,
    flights: BTreeMap<LaunchId, Flight>,
    /// When the rest of each launch was last reckoned.
    reckoned: Time,
    /// The shared lanes of each partition.
    shared: Vec<Vec<LaneId>>,
    outputs: VecDeque<DeviceOutput>,
    next_launch: u64,
    next_batch: u64,
}

impl Device {
    pub fn new_batch(&mut self) -> BatchId {
        self.next_batch += 1;
        BatchId(self.next_batch - 1)
    }

    pub fn new_launch(&mut self) -> LaunchId {
        self.next_launch += 1;
        LaunchId(self.next_launch - 1)
    }

    pub fn push(&mut self, output: DeviceOutput) {
        self.outputs.push_back(output);
    }

    /// The number of decisions that are not taken yet.
    pub fn decisions(&self) -> usize {
        self.outputs.len()
    }

    /// The decisions that were added after the first `earlier` ones.
    pub fn since(&self, earlier: usize) -> impl Iterator<Item = &DeviceOutput> {
        self.outputs.iter().skip(earlier)
    }

    /// Lets the launches among the decisions after the first `earlier` ones begin together. Returns
    /// the number of launches.
    pub fn join_launches(&mut self, earlier: usize) -> usize {
        let mut launches = Vec::new();
        for output in self.outputs.split_off(earlier) {
            match output {
                DeviceOutput::Launch(launch) => launches.push(launch),
                other => self.push(other),
            }
        }
        let count = launches.len();
        match count {
            0 | 1 => launches.into_iter().for_each(|launch| self.push(DeviceOutput::Launch(launch))),
            _ => self.push(DeviceOutput::Group(launches)),
        }
        count
    }

    pub fn pop(&mut self) -> Option<DeviceOutput> {
        self.outputs.pop_front()
    }

    pub fn has_partition(&self, partition: PartitionId) -> bool {
        (partition.0 as usize) < self.shared.len()
    }

    fn partitions(&self) -> impl Iterator<Item = PartitionId> + use<> {
        (0..self.shared.len() as u32).map(PartitionId)
    }

    pub fn shared_lanes(&self, partition: PartitionId) -> &[LaneId] {
        self.shared.get(partition.0 as usize).map_or(&[], Vec::as_slice)
    }

    pub fn spec(&self, lane: LaneId) -> Option<LaneSpec> {
        self.lanes.get(lane.0 as usize).filter(|lane| lane.owner.is_some()).map(|lane| lane.spec)
    }

    /// Sets the number of shared lanes of each partition. Surplus lanes go once nothing runs on
    /// them.
    pub fn share(&mut self, lanes: &[u32]) {
        let segments = SegmentRange::new(0, u16::MAX);
        for partition in lanes.len()..self.shared.len() {
            let gone = std::mem::take(&mut self.shared[partition]);
            self.release(&gone, None);
        }
        self.shared.resize(lanes.len(), Vec::new());
        for (index, count) in lanes.iter().enumerate() {
            let spec = LaneSpec { partition: PartitionId(index as u32), max_rows: u32::MAX, segments };
            let mut mine = std::mem::take(&mut self.shared[index]);
            while mine.len() < *count as usize {
                mine.push(self.add(spec, Owner::All));
            }
            let gone = mine.split_off(*count as usize);
            self.release(&gone, None);
            self.shared[index] = mine;
        }
    }

    fn add(&mut self, spec: LaneSpec, owner: Owner) -> LaneId {
        let lane = Lane { spec, owner: Some(owner), leaving: false, runs: None, waits: None };
        let index = self.lanes.iter().position(|lane| lane.owner.is_none()).unwrap_or(self.lanes.len());
        match self.lanes.get_mut(index) {
            Some(free) => *free = lane,
            None => self.lanes.push(lane),
        }
        LaneId(index as u32)
    }

    /// Adds lanes for a policy.
    pub fn add_lanes(&mut self, of: ResidentKey, specs: &[LaneSpec]) -> Vec<LaneId> {
        specs.iter().map(|spec| self.add(*spec, Owner::One(of))).collect()
    }

    /// Frees each of these lanes once nothing runs on it.
    pub fn release(&mut self, lanes: &[LaneId], of: Option<ResidentKey>) {
        for lane in lanes {
            if let Some(lane) = self.lanes.get_mut(lane.0 as usize) {
                lane.leaving = true;
            }
        }
        self.free(lanes, of);
    }

    /// Frees the leaving lanes among `lanes` on which nothing runs.
    fn free(&mut self, lanes: &[LaneId], of: Option<ResidentKey>) {
        let mut freed = Vec::new();
        for id in lanes {
            if let Some(lane) = self.lanes.get_mut(id.0 as usize)
                && lane.leaving
                && lane.owner.is_some()
                && lane.runs.is_none()
            {
                lane.owner = None;
                freed.push(*id);
            }
        }
        if !freed.is_empty() {
            self.push(DeviceOutput::Free { model: of.map(|of| of.model), lanes: freed });
        }
    }

    fn lane_of(&self, lane: LaneId, of: ResidentKey) -> Option<&Lane> {
        let lane = self.lanes.get(lane.0 as usize)?;
        (lane.owner == Some(Owner::All) || lane.owner == Some(Owner::One(of))).then_some(lane)
    }

    pub fn has_room(&self, lane: LaneId, of: ResidentKey) -> bool {
        self.lane_of(lane, of).is_some_and(|lane| !lane.leaving && lane.waits.is_none())
    }

    /// Gives a launch to its lane. Asserts that the lane has room.
    pub fn begin(&mut self, now: Time, of: &Resident, launch: &Launch) {
        assert!(
            self.has_room(launch.lane, of.key),
            "a lane of the policy holds one that runs and one that waits behind it"
        );
        self.reckon(now);
        let alone = of.time(launch);
        self.flights.insert(launch.id, Flight { of: of.key, lane: launch.lane, alone, left: alone });
        let lane = &mut self.lanes[launch.lane.0 as usize];
        match lane.runs {
            None => lane.runs = Some(launch.id),
            Some(_) => lane.waits = Some(launch.id),
        }
    }

    /// Handles the completion of a launch. Returns the launch's owner and the time that it takes
    /// alone, or `None` if there is no such launch.
    pub fn end(&mut self, now: Time, launch: LaunchId, span: Span) -> Option<(ResidentKey, Duration)> {
        let flight = *self.flights.get(&launch)?;
        self.reckon(now);
        self.flights.remove(&launch);
        let lane = &mut self.lanes[flight.lane.0 as usize];
        if lane.runs == Some(launch) {
            lane.runs = lane.waits.take();
            // The next launch has had the lane since that end.
            let next = lane.runs.and_then(|next| self.flights.get_mut(&next));
            if let Some(next) = next {
                next.left = next.left.saturating_sub(now.since(span.end));
            }
        } else {
            lane.waits = None;
        }
        let of = match lane.owner {
            Some(Owner::One(of)) => Some(of),
            _ => None,
        };
        self.free(&[flight.lane], of);
        Some((flight.of, flight.alone))
    }

    /// Whether a launch of a policy is under way.
    pub fn has_launches(&self, of: ResidentKey) -> bool {
        self.flights.values().any(|flight| flight.of == of)
    }

    /// Whether a launch of another model is under way in a partition.
    pub fn has_others(&self, partition: PartitionId, model: ModelId) -> bool {
        self.flights.values().any(|flight| flight.of.model != model && self.partition(flight) == Some(partition))
    }

    fn partition(&self, flight: &Flight) -> Option<PartitionId> {
        self.lanes.get(flight.lane.0 as usize).map(|lane| lane.spec.partition)
    }

    fn runs(&self, id: LaunchId, flight: &Flight) -> bool {
        self.lanes.get(flight.lane.0 as usize).is_some_and(|lane| lane.runs == Some(id))
    }

    /// The progress of each running launch in a partition since the last reckoning.
    fn progress(&self, now: Time, partition: PartitionId) -> Duration {
        let mine = |flight: &Flight| self.partition(flight) == Some(partition) && flight.left > Duration::ZERO;
        let running = self.flights.iter().filter(|(id, flight)| mine(flight) && self.runs(**id, flight)).count();
        Duration::from_nanos(now.since(self.reckoned).as_nanos() / (running as u64).max(1))
    }

    fn reckon(&mut self, now: Time) {
        if now <= self.reckoned {
            return;
        }
        for partition in self.partitions() {
            let done = self.progress(now, partition);
            let lanes = &self.lanes;
            for (id, flight) in &mut self.flights {
                let lane = &lanes[flight.lane.0 as usize];
                if lane.runs == Some(*id) && lane.spec.partition == partition {
                    flight.left = flight.left.saturating_sub(done);
                }
            }
        }
        self.reckoned = now;
    }

    /// The remaining time of all launches in a partition.
    pub fn left(&self, now: Time, partition: PartitionId) -> Duration {
        self.lefts(now, partition).fold(Duration::ZERO, |sum, (_, left)| sum + left)
    }

    /// The remaining time of the launches on policies' own lanes; `None`: there are no such
    /// launches.
    pub fn own_left(&self, now: Time, partition: PartitionId) -> Option<Duration> {
        let own = |lane: LaneId| self.lanes.get(lane.0 as usize).is_some_and(|lane| lane.owner != Some(Owner::All));
        let lefts = self.lefts(now, partition).filter(|(lane, _)| own(*lane)).map(|(_, left)| left);
        lefts.reduce(|sum, left| sum + left)
    }

    /// The remaining time of each launch in a partition, with its lane.
    fn lefts(&self, now: Time, partition: PartitionId) -> impl Iterator<Item = (LaneId, Duration)> {
        let progress = self.progress(now, partition);
        let mine = self.flights.iter().filter(move |(_, flight)| self.partition(flight) == Some(partition));
        mine.map(move |(id, flight)| match self.runs(*id, flight) {
            true => (flight.lane, flight.left.saturating_sub(progress)),
            false => (flight.lane, flight.left),
        })
    }

    /// Orders standby lanes for a policy that has none, in a partition that exists.
    pub fn prepare(&mut self, of: &mut Resident, partition: PartitionId, specs: &[LaneSpec]) {
        let specs: Vec<LaneSpec> = specs.iter().map(|spec| LaneSpec { partition, ..*spec }).collect();
        let lanes = self.add_lanes(of.key, &specs);
        of.standby = Some(Standby { partition, lanes: lanes.clone(), ready: false });
        self.push(DeviceOutput::Prepare { model: of.key.model, lanes, partition });
    }

    /// Replaces the policy's lanes by its standby lanes, if they are ready.
    pub fn switch(&mut self, of: &mut Resident) -> bool {
        let standby = of.standby.take_if(|standby| standby.ready);
        let Some(Standby { partition, lanes, .. }) = standby else { return false };
        let from = std::mem::replace(&mut of.lanes, lanes.clone());
        of.partition = partition;
        self.push(DeviceOutput::Switch { model: of.key.model, from: from.clone(), to: lanes });
        self.release(&from, Some(of.key));
        true
    }
}
