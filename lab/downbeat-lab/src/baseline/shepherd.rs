//! Shepherd Flex: the largest batch first, which may preempt a much smaller running one.

use std::collections::BTreeSet;

use downbeat_core::cluster::{ModelOptions, Reject, Request};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};

use super::backlog::Waiting;
use super::backlogs::{BacklogModel, Backlogs};
use super::fleet::Fleet;
use downbeat_sim::{ClusterScheduler, Decision};

/// A batch preempts a running one if it has at least this many times its size.
const PREEMPTION: f64 = 3.03;

/// Shepherd's online algorithm Flex (Zhang et al., NSDI '23, §4; Symphony §2.2).
///
/// | rule | source |
/// |---|---|
/// | one candidate for each model: its largest batch whose members all meet their deadlines | NSDI '23 §4; Symphony §2.2 |
/// | a device that becomes free takes the largest of them | Symphony §2.2 |
/// | eager: a device never waits while there is a candidate | Symphony §2.2 |
/// | a candidate of at least 3.03 times the size of a batch that runs takes its device; the work done is lost | NSDI '23 §4; Symphony §2.2 says 3; 3.03 as corrected by its author |
/// | the members of a preempted batch wait again, and are given up when they are hopeless | NSDI '23 §4 |
///
/// Left open, and decided in favour of Shepherd:
/// - *Which batch is preempted*: the smallest running one, which loses the least work; among
///   equals, the one on the smallest device.
/// - *Whether a preempted member may join the batch that takes its place*: no, because its earlier
///   deadline would shrink that batch.
/// - *What a preemption costs*: nothing but the lost work.
/// - *Which of two candidates of one size*: the one with the earlier latest start.
/// - *How a candidate is gathered*: [`Gather`].
#[derive(Debug, Default)]
pub struct Shepherd {
    gather: Gather,
    backlogs: Backlogs,
    /// By device: the running batch.
    running: Vec<RunningBatch>,
    /// The size and device of each running batch.
    sizes: BTreeSet<(u32, DeviceId)>,
    fleet: Fleet,
}

/// The way that Shepherd gathers a candidate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Gather {
    /// As many requests from the head of the queue as still meet the head's deadline (Symphony
    /// §3.2's reading of Shepherd).
    #[default]
    Prefix,
    /// The largest batch of any of the waiting requests. Heads with too close a deadline are passed
    /// over, and wait until they fit or are hopeless.
    Largest,
}

#[derive(Debug, Default)]
struct RunningBatch {
    model: ModelIndex,
    members: Vec<Waiting>,
}

type ModelIndex = u32;

/// The batch that a model would launch now.
struct Candidate {
    passed: usize,
    size: u32,
    latest: Time,
}

impl Shepherd {
    /// Makes a scheduler without models and devices.
    pub fn new(gather: Gather) -> Self {
        Shepherd { gather, ..Self::default() }
    }

    fn candidate(&self, now: Time, model: ModelIndex) -> Option<Candidate> {
        let BacklogModel { profile, backlog } = &self.backlogs.models()[model as usize];
        let (passed, size) = match self.gather {
            Gather::Prefix => (0, backlog.prefix(now, profile)),
            Gather::Largest => backlog.largest(now, profile),
        };
        let earliest = backlog.get(passed).filter(|_| size > 0)?;
        Some(Candidate { passed, size, latest: earliest.deadline - profile.latency.latency(size) })
    }

    /// Drops hopeless requests. Without its old head, a queue may hold a larger batch.
    fn expire(&mut self, now: Time) {
        while let Some(model) = self.backlogs.expired(now) {
            self.backlogs.refresh(now, model, &mut self.fleet);
            self.preempt(now, model);
        }
    }

    /// Gives free devices the largest candidates.
    fn dispatch(&mut self, now: Time) {
        while !self.backlogs.is_empty()
            && let Some(device) = self.fleet.first_free()
        {
            let candidates =
                (0..self.backlogs.models().len() as u32).filter_map(|model| Some((self.candidate(now, model)?, model)));
            let largest = candidates.min_by_key(|(c, model)| (std::cmp::Reverse(c.size), c.latest, *model));
            let Some((candidate, model)) = largest else { return };
            self.start(now, device, model, &candidate);
        }
    }

    /// Lets the candidate of `model` preempt a batch that is much smaller.
    fn preempt(&mut self, now: Time, mut model: ModelIndex) {
        while self.fleet.first_free().is_none()
            && let Some(&(size, device)) = self.sizes.first()
            && let Some(candidate) = self.candidate(now, model)
            && f64::from(candidate.size) >= PREEMPTION * f64::from(size)
        {
            let RunningBatch { model: stopped, members } = std::mem::take(&mut self.running[device.0 as usize]);
            self.sizes.remove(&(size, device));
            self.fleet.preempt(device);
            // Starts before the stopped members return.
            self.start(now, device, model, &candidate);
            for member in members {
                self.backlogs.push(stopped, member);
            }
            self.backlogs.refresh(now, stopped, &mut self.fleet);
            // With its members back, the stopped model's candidate may preempt another device. The
            // loop ends, because each round runs a larger batch.
            model = stopped;
        }
    }

    fn start(&mut self, now: Time, device: DeviceId, model: ModelIndex, candidate: &Candidate) {
        let running = &mut self.running[device.0 as usize];
        running.model = model;
        running.members.clear();
        running.members.extend(self.backlogs.take(model, candidate.passed, candidate.size));
        self.sizes.insert((candidate.size, device));
        let expected = self.backlogs.models()[model as usize].profile.latency.latency(candidate.size);
        self.fleet.dispatch(now, device, ModelId(model), running.members.iter().map(|member| member.id), expected);
        self.backlogs.refresh(now, model, &mut self.fleet);
    }
}

impl ClusterScheduler for Shepherd {
    fn add_model(&mut self, _now: Time, options: ModelOptions, _slo: Duration, _rate: f64) -> ModelId {
        self.backlogs.add(&options)
    }

    fn add_device(&mut self, now: Time, _kind: DeviceKind) -> DeviceId {
        let device = self.fleet.add();
        self.running.push(RunningBatch::default());
        self.dispatch(now);
        device
    }

    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject> {
        self.expire(now);
        let index = request.model.0;
        self.backlogs.admit(now, now, &request)?;
        self.backlogs.refresh(now, index, &mut self.fleet);
        self.dispatch(now);
        self.preempt(now, index);
        Ok(())
    }

    fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        if self.fleet.completed(device, batch) {
            let size = self.running[device.0 as usize].members.len() as u32;
            self.sizes.remove(&(size, device));
            self.expire(now);
            self.dispatch(now);
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        self.expire(now);
    }

    fn poll_decision(&mut self) -> Option<Decision> {
        self.fleet.poll_decision()
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.backlogs.next_expiry()
    }

    fn recycle(&mut self, members: Vec<RequestId>) {
        self.fleet.recycle(members);
    }
}
