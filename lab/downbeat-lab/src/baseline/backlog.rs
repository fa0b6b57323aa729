//! The requests of one model that wait, in the order of their deadlines.

use std::collections::VecDeque;

use downbeat_core::cluster::{ModelOptions, Reject, Request};
use downbeat_core::{Duration, LatencyProfile, RequestId, Time};

/// A waiting request. The order is by deadline, then by arrival.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Waiting {
    pub deadline: Time,
    pub id: RequestId,
}

/// A model as baselines know it.
#[derive(Clone, Debug)]
pub(super) struct Profile {
    pub latency: LatencyProfile,
    pub max_batch: u32,
}

impl Profile {
    pub fn new(options: &ModelOptions) -> Self {
        // The baselines know one kind of device.
        let latency = options.profiles.first().clone();
        Profile { latency, max_batch: options.max_batch.max(1) }
    }

    /// The largest batch that may run and takes at most `budget`.
    pub fn largest_within(&self, budget: Duration) -> u32 {
        self.latency.largest_up_to(self.max_batch, budget)
    }

    /// Rejects a request that a batch of one could not meet from `start`. Rejects requests of
    /// several items, which no baseline's paper has.
    pub fn admit(&self, now: Time, start: Time, request: &Request) -> Result<(), Reject> {
        match request.size {
            0 => return Err(Reject::ZeroSize),
            1 => {}
            _ => return Err(Reject::TooLarge { max_batch: 1 }),
        }
        if start + self.latency.latency(1) > request.deadline {
            let needed = start.since(now) + self.latency.latency(1);
            return Err(Reject::DeadlineImpossible { needed, allowed: request.deadline.since(now) });
        }
        Ok(())
    }
}

/// The requests of one model that wait, in the order of their deadlines.
#[derive(Clone, Debug, Default)]
pub(super) struct Backlog {
    waiting: VecDeque<Waiting>,
}

impl Backlog {
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn head(&self) -> Option<Waiting> {
        self.waiting.front().copied()
    }

    /// The request behind the first `passed`.
    pub fn get(&self, passed: usize) -> Option<Waiting> {
        self.waiting.get(passed).copied()
    }

    /// Usually the newest has the last deadline.
    pub fn push(&mut self, request: Waiting) {
        match self.waiting.back() {
            Some(last) if *last > request => {
                let at = self.waiting.partition_point(|w| *w < request);
                self.waiting.insert(at, request);
            }
            _ => self.waiting.push_back(request),
        }
    }

    pub fn pop(&mut self) -> Option<Waiting> {
        self.waiting.pop_front()
    }

    /// Takes the head if it cannot be met even alone.
    pub fn pop_hopeless(&mut self, now: Time, profile: &Profile) -> Option<Waiting> {
        let hopeless = |head: &mut Waiting| now + profile.latency.latency(1) > head.deadline;
        self.waiting.pop_front_if(hopeless)
    }

    /// Returns the time when the head becomes hopeless.
    pub fn hopeless_at(&self, profile: &Profile) -> Option<Time> {
        let head = self.waiting.front().filter(|head| head.deadline != Time::MAX)?;
        Some(head.deadline - profile.latency.latency(1) + Duration::from_nanos(1))
    }

    /// The largest batch of the first requests that meets the head's deadline if it starts now.
    pub fn prefix(&self, now: Time, profile: &Profile) -> u32 {
        let Some(head) = self.waiting.front() else { return 0 };
        profile.largest_within(head.deadline.since(now)).min(self.waiting.len() as u32)
    }

    /// Finds the largest batch of any requests that all meet their deadlines if it starts now.
    /// Returns the number of heads that it passes over, and its size. Sizes are feasible up to some
    /// size: a larger batch takes longer, and fewer requests have the time.
    pub fn largest(&self, now: Time, profile: &Profile) -> (usize, u32) {
        let passed = |size: u32| {
            let end = now + profile.latency.latency(size);
            self.waiting.partition_point(|w| w.deadline < end)
        };
        let (mut good, mut most) = (0, profile.max_batch.min(self.waiting.len() as u32));
        while good < most {
            let middle = good + (most - good).div_ceil(2);
            if passed(middle) + middle as usize <= self.waiting.len() { good = middle } else { most = middle - 1 }
        }
        (if good == 0 { 0 } else { passed(good) }, good)
    }

    /// Takes `size` requests behind the first `passed`.
    pub fn take(&mut self, passed: usize, size: u32) -> impl Iterator<Item = Waiting> + '_ {
        self.waiting.drain(passed..passed + size as usize)
    }
}
