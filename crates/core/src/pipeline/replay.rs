//! A replay: requests of pipelines on emulated devices, in virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::division::Division;
use super::flow::{End, Flow};
use super::stage::{Stage, StageError};
use crate::ids::{BatchId, DeviceId};
use crate::time::{Duration, Time};

/// The arrival of a pipeline's request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PipelineArrival {
    /// When the request came.
    pub at: Time,
    /// The time from the arrival to the request's deadline; [`Duration::MAX`]: no deadline.
    pub budget: Duration,
    /// The request's pipeline.
    pub pipeline: usize,
}

/// A batch that runs: its end, its place among all launches, its pool, its device and its id.
type Running = (Time, u64, usize, DeviceId, BatchId);

/// Arrivals that flow through a [`Stage`] whose devices take the time of their profiles.
///
/// Example: a rehearsal replays the arrivals of the last seconds, 1.2 times as fast. The simulator
/// plays generated arrivals.
#[derive(Debug)]
pub struct Replay {
    flow: Flow,
    /// When batches end; of equal times the first that began.
    ends: BinaryHeap<Reverse<Running>>,
    launched: u64,
    next: usize,
    /// Rate of the arrivals, percent of the recorded rate.
    percent: u64,
    now: Time,
}

impl Replay {
    /// A replay at `percent` of the recorded rate, before its first event; 0 is taken as 1.
    ///
    /// # Errors
    /// If a number of the stage names nothing.
    pub fn new(stage: &Stage, percent: u64) -> Result<Replay, StageError> {
        let (flow, ends) = (Flow::new(stage)?, BinaryHeap::new());
        Ok(Replay { flow, ends, launched: 0, next: 0, percent: percent.max(1), now: Time::ZERO })
    }

    /// The time of the last event.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Arrivals that have come.
    pub fn arrived(&self) -> usize {
        self.next
    }

    /// When an arrival comes in this replay.
    pub fn comes(&self, arrivals: &[PipelineArrival], index: usize) -> Time {
        let since = arrivals[index].at.since(arrivals[0].at).as_nanos();
        Time::from_nanos(if self.percent == 100 { since } else { (since / self.percent).saturating_mul(100) })
    }

    /// Goes on by one event: a batch that ends, an arrival or a timeout, the earliest first.
    /// `false`: nothing is left to do.
    ///
    /// # Panics
    /// If an arrival names no pipeline of the stage.
    pub fn step(&mut self, arrivals: &[PipelineArrival], by: &mut dyn Division) -> bool {
        let arrival = if self.next < arrivals.len() { self.comes(arrivals, self.next) } else { Time::MAX };
        let end = self.ends.peek().map_or(Time::MAX, |Reverse((at, ..))| *at);
        let timeout = self.flow.poll_timeout().unwrap_or(Time::MAX);
        let next = end.min(arrival).min(timeout);
        if next == Time::MAX {
            return false;
        }
        self.now = self.now.max(next);
        if end == next {
            if let Some(Reverse((_, _, pool, device, batch))) = self.ends.pop() {
                self.flow.handle_completion(self.now, pool, device, batch, by);
            }
        } else if arrival == next {
            let PipelineArrival { budget, pipeline, .. } = arrivals[self.next];
            self.next += 1;
            self.flow.handle_arrival(self.now, pipeline, self.now + budget, by);
        } else {
            self.flow.handle_timeout(self.now);
        }
        while let Some(launch) = self.flow.poll_launch() {
            self.launched += 1;
            let end = self.now + launch.expected;
            self.ends.push(Reverse((end, self.launched, launch.pool, launch.device, launch.batch)));
        }
        true
    }

    /// The next request that ended. Its number is its place among the arrivals.
    pub fn poll_end(&mut self) -> Option<End> {
        self.flow.poll_end()
    }
}
