//! A device that takes the measured latencies.

use std::collections::VecDeque;

use downbeat_core::device::{Launch, Span};
use downbeat_core::{Duration, Time};

/// A device on which a launch takes its measured latency, and launches side by side slow each other
/// down as two measured lanes do.
///
/// Each launch keeps a share of the device busy, its *demand*. If the demands add up to more than
/// one device, all launches slow down alike. The demand follows from two lanes of the model
/// together ([`Overlap::demand`](downbeat_core::device::Overlap::demand)). For example, if two lanes do
/// 1.25 times the work of one, each demands 0.8 of the device. If they do not disturb each other,
/// the demand is taken to be half. So more than two lanes are never predicted to do more than two
/// may. Demands of different models are added alike: no two models were measured together.
#[derive(Debug, Default)]
pub(super) struct EmulatedDevice {
    /// By lane: the running launch, then the launch that waits behind it.
    lanes: Vec<VecDeque<Work>>,
    now: Time,
}

#[derive(Debug)]
struct Work {
    launch: Launch,
    start: Time,
    /// The remaining nanoseconds of the launch alone.
    left: f64,
    /// The share of the device that the launch keeps busy.
    demand: f64,
}

impl EmulatedDevice {
    /// Gives a launch to its lane. `alone` is its latency alone, and `demand` the share of the
    /// device that it keeps busy.
    pub fn launch(&mut self, now: Time, launch: Launch, alone: Duration, demand: f64) {
        self.go_on(now);
        let lane = launch.lane.0 as usize;
        if self.lanes.len() <= lane {
            self.lanes.resize_with(lane + 1, VecDeque::new);
        }
        let left = alone.as_nanos() as f64;
        self.lanes[lane].push_back(Work { launch, start: now, left, demand });
    }

    /// When the next launch ends, if no other begins.
    pub fn next_end(&self) -> Option<Time> {
        let least = self.running().map(|work| work.left).reduce(f64::min)?;
        // Rounded up, so that the launch has ended by then.
        Some(self.now + Duration::from_nanos((least / self.speed()).ceil() as u64))
    }

    /// Takes a launch that has ended by now.
    pub fn poll_end(&mut self, now: Time) -> Option<(Launch, Span)> {
        self.go_on(now);
        let is_done = |lane: &VecDeque<Work>| lane.front().is_some_and(|work| work.left < 1.0);
        let lane = self.lanes.iter().position(is_done)?;
        let Work { launch, start, .. } = self.lanes[lane].pop_front()?;
        if let Some(next) = self.lanes[lane].front_mut() {
            next.start = now;
        }
        Some((launch, Span { start, end: now }))
    }

    fn running(&self) -> impl Iterator<Item = &Work> {
        self.lanes.iter().filter_map(VecDeque::front)
    }

    /// The speed of each launch, as a share of its speed alone.
    fn speed(&self) -> f64 {
        let (count, demand) = self.running().fold((0, 0.0), |(count, sum), work| (count + 1, sum + work.demand));
        if count > 1 { 1.0 / demand.max(1.0) } else { 1.0 }
    }

    fn go_on(&mut self, now: Time) {
        let done = now.since(self.now).as_nanos() as f64 * self.speed();
        self.now = self.now.max(now);
        for work in self.lanes.iter_mut().filter_map(VecDeque::front_mut) {
            work.left -= done;
        }
    }
}
