//! A device that launches share: launches that run at the same time slow each other down.

use std::collections::VecDeque;

use downbeat_core::device::LaneId;
use downbeat_core::{Duration, Time};

use super::limits::{DeviceLimits, SLICE, Sharing};
use super::sharing::{Sharer, share_bandwidth, share_units};
use super::work::{WHOLE_BANDWIDTH, Work};

/// Work is counted in this many parts of a nanosecond, so that sharing loses next to nothing to
/// rounding.
pub(super) const PARTS: u64 = 1 << 20;

/// The direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Direction {
    /// From the host to the device.
    In,
    /// From the device to the host.
    Out,
}

/// A launch or a copy that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Completed {
    /// A launch.
    Launch {
        /// The lane on which it ran.
        lane: LaneId,
        /// The caller's number for the launch.
        token: u64,
    },
    /// A copy.
    Copy {
        /// The copy's direction.
        direction: Direction,
        /// The caller's number for the copy.
        token: u64,
    },
}

/// A device under virtual time, in partitions.
///
/// The host issues the kernels of a launch in order, up to [`ahead`](DeviceLimits::ahead) before
/// the device reaches them. The device runs these one after another with a
/// [`gap`](DeviceLimits::gap). One host does all issuing (the driver's lock), so launches that
/// issue at the same time share the host. Each takes longer the more launches are under way, which
/// makes many small batches slow (E²bird §6.3, figure 12).
///
/// Kernels of launches on different lanes run side by side. Each runs as fast as alone while their
/// units fit into the partition. Beyond that they share the units by the rule of [`Sharing`].
/// Inside a partition kernels also [interfere](DeviceLimits::interference_permille). The memory's
/// bandwidth belongs to the whole device. Where kernels would draw more, the smallest draws are met
/// in full and the other kernels get equal parts. Copies take turns, one each way at a time, and
/// disturb no kernel.
///
/// The contract is that of a state machine. Time never goes back, and the caller calls
/// [`advance`](Self::advance) no later than [`next_event`](Self::next_event). Arithmetic is in
/// integers: the same calls give the same completions. A launch alone takes exactly
/// [`Work::alone`].
#[derive(Clone, Debug)]
pub struct ContendedDevice {
    limits: DeviceLimits,
    /// Units, by partition.
    partitions: Vec<u32>,
    now: Time,
    /// By lane.
    lanes: Vec<Option<RunningLaunch>>,
    copies: [VecDeque<Copying>; 2],
    /// The lane that has the device and the end of its slice, where lanes take turns.
    slice: (usize, Time),
    /// Units in use until the next change. `used` sums the past use over nanoseconds.
    units_now: u32,
    used: u128,
    /// The next turn.
    turns: u64,
}

#[derive(Clone, Debug)]
struct RunningLaunch {
    token: u64,
    partition: usize,
    work: Work,
    /// Kernels that the host has issued.
    issued: usize,
    host: Activity<HostStep>,
    /// The kernel that the device is at.
    at: usize,
    device: Activity<DeviceStep>,
    /// The position of the current kernel's start in the order of all kernels' starts.
    turn: u64,
}

/// The current step of a launch, on its host side or its device side.
#[derive(Clone, Copy, Debug)]
struct Activity<S> {
    step: S,
    /// The time that the step still needs alone, in parts.
    left: u64,
    /// Parts per nanosecond, until a step begins or ends.
    speed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HostStep {
    Overhead,
    Issue,
    /// The host has issued all kernels that it may.
    Idle,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DeviceStep {
    /// The host has not issued the next kernel.
    Idle,
    Gap,
    Run,
    After,
}

impl<S> Activity<S> {
    fn of(step: S, takes: Duration) -> Self {
        Activity { step, left: takes.as_nanos().saturating_mul(PARTS), speed: PARTS }
    }

    /// Returns the nanoseconds until the step ends. A step without speed returns `None`: it waits
    /// for the end of another step.
    fn ends_in(&self) -> Option<u64> {
        (self.speed > 0 || self.left == 0).then(|| self.left.div_ceil(self.speed.max(1)))
    }

    fn pass(&mut self, nanos: u64) {
        self.left = self.left.saturating_sub(self.speed.saturating_mul(nanos));
    }
}

#[derive(Clone, Copy, Debug)]
struct Copying {
    token: u64,
    ends: Time,
}

impl RunningLaunch {
    /// Begins every step that can begin now. Returns whether any did, and whether the whole launch
    /// is done.
    fn settle(&mut self, limits: &DeviceLimits, turns: &mut u64) -> (bool, bool) {
        let mut changed = false;
        loop {
            let kernels = &self.work.kernels;
            let may_issue = self.issued < kernels.len() && self.issued <= self.at + limits.ahead as usize;
            match self.host.step {
                HostStep::Overhead | HostStep::Issue if self.host.left == 0 => {
                    self.issued += usize::from(self.host.step == HostStep::Issue);
                    self.host = Activity::of(HostStep::Idle, Duration::ZERO);
                    changed = true;
                    continue;
                }
                HostStep::Idle if may_issue => {
                    self.host = Activity::of(HostStep::Issue, kernels[self.issued].issue);
                    changed = true;
                    continue;
                }
                _ => {}
            }
            let next = match self.device.step {
                DeviceStep::Idle if self.at < kernels.len() && self.issued > self.at => {
                    (self.turn, *turns) = (*turns, *turns + 1);
                    Activity::of(DeviceStep::Run, kernels[self.at].run)
                }
                DeviceStep::Idle if self.at == kernels.len() && self.host.step == HostStep::Idle => {
                    Activity::of(DeviceStep::After, self.work.after)
                }
                DeviceStep::Gap if self.device.left == 0 => Activity::of(DeviceStep::Idle, Duration::ZERO),
                DeviceStep::Run if self.device.left == 0 => {
                    self.at += 1;
                    let gap = if self.at < kernels.len() { limits.gap } else { Duration::ZERO };
                    Activity::of(DeviceStep::Gap, gap)
                }
                DeviceStep::After if self.device.left == 0 => return (true, true),
                _ => return (changed, false),
            };
            (self.device, changed) = (next, true);
        }
    }

    fn ends_in(&self) -> Option<u64> {
        let host = self.host.ends_in().filter(|_| self.host.step != HostStep::Idle);
        let device = self.device.ends_in().filter(|_| self.device.step != DeviceStep::Idle);
        host.into_iter().chain(device).min()
    }
}

impl ContendedDevice {
    /// Makes an idle device of one partition at time zero. Asserts that it has a unit and copies at
    /// some speed.
    pub fn new(limits: DeviceLimits, lanes: usize) -> Self {
        assert!(limits.units > 0, "a device has at least one compute unit");
        assert!(limits.copy_bytes_per_second > 0.0, "a device copies at some speed");
        ContendedDevice {
            limits,
            partitions: vec![limits.units],
            now: Time::ZERO,
            lanes: vec![None; lanes],
            copies: [VecDeque::new(), VecDeque::new()],
            slice: (0, Time::ZERO),
            units_now: 0,
            used: 0,
            turns: 0,
        }
    }

    /// Starts a launch in the first partition. Asserts as [`Self::launch_in`].
    pub fn launch(&mut self, now: Time, lane: LaneId, token: u64, work: Work) {
        self.launch_in(now, 0, lane, token, work);
    }

    /// Starts a launch in a partition. Asserts that the lane is free and that no kernel claims more
    /// units than the partition has.
    pub fn launch_in(&mut self, now: Time, partition: usize, lane: LaneId, token: u64, work: Work) {
        self.reach(now);
        let units = 1..=self.units(partition);
        assert!(
            work.kernels.iter().all(|kernel| units.contains(&kernel.units)),
            "a kernel uses units of its partition"
        );
        let index = lane.0 as usize;
        if index >= self.lanes.len() {
            self.lanes.resize_with(index + 1, || None);
        }
        let place = &mut self.lanes[index];
        assert!(place.is_none(), "{lane} runs one launch at a time");
        let (host, device) =
            (Activity::of(HostStep::Overhead, work.overhead), Activity::of(DeviceStep::Idle, Duration::ZERO));
        *place = Some(RunningLaunch { token, partition, work, issued: 0, host, at: 0, device, turn: 0 });
        self.share();
    }

    /// Returns the compute units of a partition.
    pub fn units(&self, partition: usize) -> u32 {
        self.partitions.get(partition).copied().unwrap_or(self.limits.units)
    }

    /// Sets the compute units of a partition, at least one, and adds the partition if it is new.
    /// Running launches go on with their share of the new number.
    pub fn set_units(&mut self, now: Time, partition: usize, units: u32) {
        self.reach(now);
        if partition >= self.partitions.len() {
            self.partitions.resize(partition + 1, self.limits.units);
        }
        self.partitions[partition] = units.max(1);
        self.share();
    }

    /// Returns the number of partitions, past ones included.
    pub fn partitions(&self) -> usize {
        self.partitions.len()
    }

    /// Begins a copy, or puts it behind the copies of the same direction.
    pub fn copy(&mut self, now: Time, direction: Direction, token: u64, bytes: u64) {
        self.reach(now);
        let takes = self.limits.copy_fixed + Duration::from_secs_f64(bytes as f64 / self.limits.copy_bytes_per_second);
        let queue = &mut self.copies[direction as usize];
        let begins = queue.back().map_or(now, |last| last.ends);
        queue.push_back(Copying { token, ends: begins + takes });
    }

    /// Returns the next instant of change if the caller adds nothing; `None` if nothing is under
    /// way.
    pub fn next_event(&self) -> Option<Time> {
        let copies = self.copies.iter().filter_map(|queue| Some(queue.front()?.ends));
        let steps = self.lanes.iter().flatten().filter_map(RunningLaunch::ends_in);
        let turns_end = self.takes_turns().then_some(self.slice.1);
        copies.chain(steps.min().map(|span| self.now + Duration::from_nanos(span))).chain(turns_end).min()
    }

    /// Lets time pass and returns the completions in the order of time. At one instant copies in
    /// come first, then copies out, then lanes by number.
    pub fn advance(&mut self, to: Time) -> Vec<Completed> {
        let mut done = Vec::new();
        loop {
            self.settle(&mut done);
            match self.next_event() {
                Some(next) if next <= to => self.pass(next),
                _ => break,
            }
        }
        self.pass(to.max(self.now));
        self.settle(&mut done);
        done
    }

    /// Returns whether a kernel of this lane has units now.
    pub fn runs_kernel(&self, lane: LaneId) -> bool {
        let running = self.lanes.get(lane.0 as usize).and_then(Option::as_ref);
        running.is_some_and(|running| running.device.step == DeviceStep::Run && running.device.speed > 0)
    }

    /// Returns the units in use now: never above the partitions' units.
    pub fn used_units(&self) -> u32 {
        self.units_now
    }

    /// Returns the units in use, summed over the nanoseconds until now.
    pub fn used_unit_nanos(&self) -> u128 {
        self.used
    }

    /// Returns the share of the memory's bandwidth that is drawn now: never above 1.
    pub fn drawn_bandwidth(&self) -> f64 {
        let running = self.lanes.iter().flatten().filter(|running| running.device.step == DeviceStep::Run);
        let drawn = running.map(|running| {
            f64::from(running.work.kernels[running.at].draw) * running.device.speed as f64 / PARTS as f64
        });
        drawn.sum::<f64>() / f64::from(WHOLE_BANDWIDTH)
    }

    /// Returns whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.lanes.iter().all(Option::is_none) && self.copies.iter().all(VecDeque::is_empty)
    }

    fn reach(&mut self, now: Time) {
        assert!(now >= self.now, "time never goes back");
        assert!(self.next_event().is_none_or(|next| next >= now), "a device is advanced before it is given more");
        self.pass(now);
    }

    /// Returns whether a kernel waits for the end of another lane's slice.
    fn takes_turns(&self) -> bool {
        let waits = |running: &RunningLaunch| running.device.step == DeviceStep::Run && running.device.speed == 0;
        self.limits.sharing == Sharing::TimeSliced && self.lanes.iter().flatten().any(waits)
    }

    /// Returns the lane that has the device, where lanes take turns. The next lane with a kernel to
    /// run follows once a slice is over or its lane has left the device.
    fn turn(&mut self) -> usize {
        let on_device = |lane: &Option<RunningLaunch>| {
            lane.as_ref().is_some_and(|running| matches!(running.device.step, DeviceStep::Gap | DeviceStep::Run))
        };
        let (lane, until) = self.slice;
        if self.now < until && self.lanes.get(lane).is_some_and(on_device) {
            return lane;
        }
        let count = self.lanes.len();
        let next = (1..=count).map(|step| (lane + step) % count).find(|lane| on_device(&self.lanes[*lane]));
        self.slice = (next.unwrap_or(lane), self.now + SLICE);
        self.slice.0
    }

    /// Sets the speed of every step by the launches under way now.
    fn share(&mut self) {
        let sliced = (self.limits.sharing == Sharing::TimeSliced).then(|| self.turn());
        let active = self.lanes.iter().flatten().count() as u64;
        let issuing = self.lanes.iter().flatten().filter(|running| running.host.step == HostStep::Issue).count() as u64;
        let crowding = 1000 + u64::from(self.limits.crowding_permille) * active.saturating_sub(1);
        let mut sharers = Vec::with_capacity(self.lanes.len());
        for (index, running) in self.lanes.iter_mut().enumerate() {
            let Some(running) = running else { continue };
            if running.host.step == HostStep::Issue && !self.limits.own_hosts {
                running.host.speed = PARTS * 1000 / (issuing * crowding);
            }
            if running.device.step == DeviceStep::Run {
                let kernel = running.work.kernels[running.at];
                let has_turn = sliced.is_none_or(|lane| lane == index);
                let (partition, turn) = (running.partition, running.turn);
                sharers.push(Sharer {
                    lane: index,
                    partition,
                    turn,
                    kernel,
                    units: 0,
                    speed: if has_turn { PARTS } else { 0 },
                });
            }
        }
        share_units(&self.limits, &self.partitions, &mut sharers);
        share_bandwidth(&mut sharers);
        self.units_now = sharers.iter().map(|sharer| sharer.units).sum();
        for sharer in sharers {
            if let Some(running) = &mut self.lanes[sharer.lane] {
                running.device.speed = sharer.speed;
            }
        }
    }

    /// Lets every step go on at its present speed.
    fn pass(&mut self, to: Time) {
        let span = to.since(self.now).as_nanos();
        if span > 0 {
            self.used += u128::from(self.units_now) * u128::from(span);
            for running in self.lanes.iter_mut().flatten() {
                running.host.pass(span);
                running.device.pass(span);
            }
        }
        self.now = to;
    }

    /// Removes completed work and begins the steps after it.
    fn settle(&mut self, done: &mut Vec<Completed>) {
        for direction in [Direction::In, Direction::Out] {
            let queue = &mut self.copies[direction as usize];
            while let Some(copy) = queue.pop_front_if(|copy| copy.ends <= self.now) {
                done.push(Completed::Copy { direction, token: copy.token });
            }
        }
        let mut any = self.takes_turns() && self.now >= self.slice.1;
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            let Some(running) = lane else { continue };
            let (changed, is_done) = running.settle(&self.limits, &mut self.turns);
            any |= changed;
            if is_done {
                done.push(Completed::Launch { lane: LaneId(index as u32), token: running.token });
                *lane = None;
            }
        }
        if any {
            self.share();
        }
    }
}
