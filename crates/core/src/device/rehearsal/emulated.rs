//! A device that takes what was measured.

use std::collections::VecDeque;

use crate::device::launch::{Launch, Span};
use crate::time::{Duration, Time};

/// A device on which a launch takes what was measured of it, and launches side by side what was measured of two.
///
/// Each launch keeps a share of the device busy, its *demand*, and all slow down alike where that is more than there is. What a demand is follows from two
/// lanes of the model together ([`Overlap::demand`](crate::device::Overlap::demand)): where they do 1.25 times what one does each asks for 0.8 of the
/// device. Where they do not disturb each other it is taken to be half, so that more than two are never predicted to do more than two may. The
/// demands of different models are added as those of one: no two of them were measured together.
#[derive(Debug, Default)]
pub(super) struct EmulatedDevice {
    /// By lane: what runs, and what waits behind it.
    lanes: Vec<VecDeque<Work>>,
    now: Time,
}

#[derive(Debug)]
struct Work {
    launch: Launch,
    start: Time,
    /// Nanoseconds that it still takes alone.
    left: f64,
    /// The share of the device that it keeps busy.
    demand: f64,
}

impl EmulatedDevice {
    /// A launch comes to its lane, and takes so long alone, and keeps such a share of the device busy.
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
        // A nanosecond later rather than earlier.
        Some(self.now + Duration::from_nanos((least / self.speed()).ceil() as u64))
    }

    /// A launch that has ended by now, if one has.
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

    /// What each launch gets done, of what it gets done alone.
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
