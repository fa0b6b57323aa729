//! A device that launches share: who runs slows the others down.

use std::collections::VecDeque;

use downbeat_core::device::LaneId;
use downbeat_core::{Duration, Time};
use serde::{Deserialize, Serialize};

/// Work is counted in this many parts of a nanosecond, so that sharing loses next to nothing to rounding.
const PARTS: u64 = 1 << 16;

/// One operator of a launch as the device sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kernel {
    /// What issuing it takes when nobody else issues: nothing of the launch computes meanwhile.
    pub issue: Duration,
    /// What it takes alone once issued.
    pub run: Duration,
    /// The compute units that it can use, at least 1 and at most the device's.
    pub units: u32,
}

/// What a launch has to do: some time that concerns nobody else, then its kernels one after another.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Work {
    /// Before the first kernel, on the host.
    pub overhead: Duration,
    /// In order.
    pub kernels: Vec<Kernel>,
}

impl Work {
    /// What it takes alone.
    pub fn alone(&self) -> Duration {
        self.kernels.iter().fold(self.overhead, |sum, kernel| sum + kernel.issue + kernel.run)
    }
}

/// Which way a copy goes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Direction {
    /// From the host to the device.
    In,
    /// Back.
    Out,
}

/// Something is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Completed {
    /// A launch.
    Launch {
        /// Where it ran.
        lane: LaneId,
        /// What the caller called it.
        token: u64,
    },
    /// A copy.
    Copy {
        /// Its way.
        direction: Direction,
        /// What the caller called it.
        token: u64,
    },
}

/// How kernels share units that do not suffice for all.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// All slow down in the same proportion.
    Proportional,
    /// Each takes what those issued before it leave over (E²bird §8.4: kernels wait until there are idle SMs).
    InOrder,
}

/// What a device offers to its launches and copies together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DeviceLimits {
    /// Compute units.
    pub units: u32,
    /// Who gets units when they do not suffice.
    pub sharing: Sharing,
    /// By how many thousandths each launch more that is under way lengthens the issue of a kernel: the cost of many streams.
    pub crowding_permille: u32,
    /// Bytes a second of a copy; one copy each way at a time.
    pub copy_bytes_per_second: f64,
    /// What each copy costs beside its bytes.
    pub copy_fixed: Duration,
}

impl DeviceLimits {
    /// So many units that are shared in proportion, and nothing else that launches disturb each other by.
    pub fn plain(units: u32) -> Self {
        DeviceLimits {
            units,
            sharing: Sharing::Proportional,
            crowding_permille: 0,
            copy_bytes_per_second: 1e12,
            copy_fixed: Duration::ZERO,
        }
    }
}

/// A device under virtual time.
///
/// Kernels of launches on different lanes run side by side. Each runs as fast as alone as long as the units that they can use fit; beyond
/// that they share them as [`Sharing`] says. Issuing a kernel is one host's work (the driver's lock), so that launches
/// which issue at the same time share it too, and each takes longer the more launches are under way: what makes many small batches slow
/// (E²bird §6.3, figure 12). Copies take turns, one each way at a time, and disturb no kernel.
///
/// Contract as a state machine's: time never goes back; [`advance`](Self::advance) at the latest when [`next_event`](Self::next_event) says.
/// Arithmetic is in integers: the same calls give the same completions. A launch alone takes exactly [`Work::alone`].
#[derive(Clone, Debug)]
pub struct ContendedDevice {
    limits: DeviceLimits,
    now: Time,
    /// By lane.
    lanes: Vec<Option<RunningLaunch>>,
    /// By lane, how fast its launch is until a phase begins or ends; those of idle lanes mean nothing.
    speeds: Vec<Speed>,
    copies: [VecDeque<Copying>; 2],
    /// Units in use, summed over nanoseconds.
    used: u128,
    /// The next turn.
    turns: u64,
}

#[derive(Clone, Debug)]
struct RunningLaunch {
    token: u64,
    kernels: Vec<Kernel>,
    at: usize,
    phase: Phase,
    /// What the phase still takes alone, in parts.
    left: u64,
    /// When it entered the phase, in the order of all that did.
    turn: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Overhead,
    Issue,
    Run,
}

#[derive(Clone, Copy, Debug)]
struct Copying {
    token: u64,
    ends: Time,
}

/// A speed: `progress / time`, at most 1.
#[derive(Clone, Copy, Debug)]
struct Speed {
    progress: u64,
    time: u64,
}

impl ContendedDevice {
    /// A device on which nothing runs, at time zero. Asserts that it has a unit and copies at some speed.
    pub fn new(limits: DeviceLimits, lanes: usize) -> Self {
        assert!(limits.units > 0, "a device has at least one compute unit");
        assert!(limits.copy_bytes_per_second > 0.0, "a device copies at some speed");
        ContendedDevice {
            limits,
            now: Time::ZERO,
            lanes: vec![None; lanes],
            speeds: vec![Speed { progress: 1, time: 1 }; lanes],
            copies: [VecDeque::new(), VecDeque::new()],
            used: 0,
            turns: 0,
        }
    }

    /// Starts a launch. Asserts that the lane is free and that no kernel claims units that there are not.
    pub fn launch(&mut self, now: Time, lane: LaneId, token: u64, work: Work) {
        self.reach(now);
        let units = 1..=self.limits.units;
        assert!(work.kernels.iter().all(|kernel| units.contains(&kernel.units)), "a kernel uses units of the device");
        let index = lane.0 as usize;
        if index >= self.lanes.len() {
            self.lanes.resize_with(index + 1, || None);
        }
        let place = &mut self.lanes[index];
        assert!(place.is_none(), "{lane} runs one launch at a time");
        let left = work.overhead.as_nanos().saturating_mul(PARTS);
        *place = Some(RunningLaunch { token, kernels: work.kernels, at: 0, phase: Phase::Overhead, left, turn: 0 });
        self.speeds = self.shared();
    }

    /// Compute units.
    pub fn units(&self) -> u32 {
        self.limits.units
    }

    /// Changes how many compute units there are, at least one. What runs goes on with what it gets of them.
    pub fn set_units(&mut self, now: Time, units: u32) {
        self.reach(now);
        self.limits.units = units.max(1);
        self.speeds = self.shared();
    }

    /// Begins a copy, or puts it behind those that go the same way.
    pub fn copy(&mut self, now: Time, direction: Direction, token: u64, bytes: u64) {
        self.reach(now);
        let takes = self.limits.copy_fixed + Duration::from_secs_f64(bytes as f64 / self.limits.copy_bytes_per_second);
        let queue = &mut self.copies[direction as usize];
        let begins = queue.back().map_or(now, |last| last.ends);
        queue.push_back(Copying { token, ends: begins + takes });
    }

    /// When something changes next if nothing is added; `None` if nothing is under way.
    pub fn next_event(&self) -> Option<Time> {
        let copies = self.copies.iter().filter_map(|queue| Some(queue.front()?.ends));
        copies.chain(self.next_phase_end()).min()
    }

    /// Lets time pass, and says what is done, in the order of time; at one instant copies in, copies out, then lanes by number.
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

    /// Units in use now: never above the device's.
    pub fn used_units(&self) -> u32 {
        self.wanted_units().min(u64::from(self.limits.units)) as u32
    }

    /// Units in use, summed over the nanoseconds until now.
    pub fn used_unit_nanos(&self) -> u128 {
        self.used
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.lanes.iter().all(Option::is_none) && self.copies.iter().all(VecDeque::is_empty)
    }

    fn reach(&mut self, now: Time) {
        assert!(now >= self.now, "time never goes back");
        assert!(self.next_event().is_none_or(|next| next >= now), "a device is advanced before it is given more");
        self.pass(now);
    }

    fn wanted_units(&self) -> u64 {
        let running = self.lanes.iter().flatten().filter(|running| running.phase == Phase::Run);
        running.map(|running| u64::from(running.kernels[running.at].units)).sum()
    }

    /// [`Self::speeds`] by what is on the lanes now.
    fn shared(&self) -> Vec<Speed> {
        let active = self.lanes.iter().flatten().count() as u64;
        let issuing = self.lanes.iter().flatten().filter(|running| running.phase == Phase::Issue).count() as u64;
        let crowding = 1000 + u64::from(self.limits.crowding_permille) * active.saturating_sub(1);
        let units = u64::from(self.limits.units);
        let wanted = self.wanted_units().max(units);
        let whole = Speed { progress: 1, time: 1 };
        let speed = |lane: &Option<RunningLaunch>| match lane.as_ref().map(|running| running.phase) {
            None | Some(Phase::Overhead) => whole,
            Some(Phase::Issue) => Speed { progress: 1000, time: issuing * crowding },
            Some(Phase::Run) => Speed { progress: units, time: wanted },
        };
        let mut speeds: Vec<Speed> = self.lanes.iter().map(speed).collect();
        if self.limits.sharing == Sharing::InOrder && wanted > units {
            let running = self.lanes.iter().enumerate().filter_map(|(index, lane)| Some((index, lane.as_ref()?)));
            let mut queue: Vec<_> = running.filter(|(_, running)| running.phase == Phase::Run).collect();
            queue.sort_unstable_by_key(|(_, running)| running.turn);
            let mut left = units;
            for (index, running) in queue {
                let time = u64::from(running.kernels[running.at].units);
                speeds[index] = Speed { progress: left.min(time), time };
                left -= left.min(time);
            }
        }
        speeds
    }

    fn next_phase_end(&self) -> Option<Time> {
        let lanes = self.lanes.iter().zip(&self.speeds).filter_map(|(lane, speed)| Some((lane.as_ref()?, speed)));
        // Who gets no unit waits for the end of another's phase.
        let spans = lanes.filter(|(running, speed)| speed.progress > 0 || running.left == 0).map(|(running, speed)| {
            let whole = u128::from(running.left) * u128::from(speed.time);
            whole.div_ceil(u128::from(speed.progress.max(1)) * u128::from(PARTS)) as u64
        });
        spans.min().map(|span| self.now + Duration::from_nanos(span))
    }

    /// Everything goes on at the speeds of now.
    fn pass(&mut self, to: Time) {
        let span = u128::from(to.since(self.now).as_nanos());
        if span > 0 {
            self.used += u128::from(self.used_units()) * span;
            let lanes = self.lanes.iter_mut().zip(&self.speeds);
            for (running, speed) in lanes.filter_map(|(lane, speed)| Some((lane.as_mut()?, speed))) {
                let passed = span * u128::from(PARTS) * u128::from(speed.progress) / u128::from(speed.time);
                running.left = running.left.saturating_sub(u64::try_from(passed).unwrap_or(u64::MAX));
            }
        }
        self.now = to;
    }

    /// Takes away what is done and begins what comes after it.
    fn settle(&mut self, done: &mut Vec<Completed>) {
        for direction in [Direction::In, Direction::Out] {
            let queue = &mut self.copies[direction as usize];
            while let Some(copy) = queue.pop_front_if(|copy| copy.ends <= self.now) {
                done.push(Completed::Copy { direction, token: copy.token });
            }
        }
        let mut changed = false;
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            while let Some(running) = lane.as_mut().filter(|running| running.left == 0) {
                changed = true;
                let (at, phase) = match running.phase {
                    Phase::Overhead => (running.at, Phase::Issue),
                    Phase::Issue => (running.at, Phase::Run),
                    Phase::Run => (running.at + 1, Phase::Issue),
                };
                match running.kernels.get(at) {
                    Some(kernel) => {
                        let next = if phase == Phase::Run { kernel.run } else { kernel.issue };
                        (running.at, running.phase, running.left) = (at, phase, next.as_nanos().saturating_mul(PARTS));
                        running.turn = self.turns;
                        self.turns += 1;
                    }
                    None => {
                        let lane_id = LaneId(index as u32);
                        done.push(Completed::Launch { lane: lane_id, token: running.token });
                        *lane = None;
                    }
                }
            }
        }
        if changed {
            self.speeds = self.shared();
        }
    }
}
