//! The policy `overlap`: a model's operators run in groups with those of other models.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::entry::{ModelSpec, PolicyEntry, PolicyOptions, PolicySettings};
use super::launch::{InputSource, LaneSpec, Launch, Permit, SegmentRange, Span};
use super::note::Note;
use super::output::DeviceOutput;
use super::overlap::OverlapModel;
use super::policy::DevicePolicy;
use super::request::{DeviceDrop, DeviceReject, DeviceRequest};
use super::request_pool::PoolStats;
use super::resident::Arbitrated;
use super::scheduler::DeviceModel;
use super::segment_profile::SegmentProfile;
use super::settings::{self, Cut, MOST_LANES, MOST_ROWS, PolicyModel, at_most};
use super::turn::Turn;
use crate::ids::{BatchId, LaunchId, PartitionId, RequestId};
use crate::time::Duration;

/// The number of operators, unless a setting says otherwise (Abacus §5.2 has 12 to 52).
const OPERATORS: u16 = 8;
/// The fewest models that are expected to run side by side.
const AT_ONCE: u32 = 2;

/// The options of an [`Overlapped`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverlappedOptions {
    /// The latencies of the segments, each of which is an operator.
    pub profile: SegmentProfile,
    /// The most items of a request.
    pub max_batch: u32,
    /// Whether to give up requests that can no longer be answered by their deadline.
    pub drop: bool,
    /// The most items that wait.
    pub queue_bound: u32,
}

/// A model whose operators run in groups with those of other models (Abacus §6). The arbiter
/// [`OverlapArbiter`](super::OverlapArbiter) forms the groups for all such models together. Requests are not
/// batched: each runs by itself. Intermediate tensors between two of its launches are kept.
///
/// A request in a group with others is answered as soon as its own launch is done. The barrier only
/// delays the next group.
#[derive(Debug)]
pub struct Overlapped {
    options: OverlappedOptions,
    requests: BTreeMap<RequestId, Open>,
    running: Option<(LaunchId, Permit)>,
    /// The items of requests that are in no launch.
    waiting: u32,
    /// The remaining latency of all waiting requests.
    backlog: Duration,
}

/// A request that is not answered.
#[derive(Clone, Copy, Debug)]
struct Open {
    rows: u32,
    length: u32,
    /// The request's batch, once it has begun.
    batch: Option<BatchId>,
    /// The request's remaining latency, if it waits.
    left: Duration,
    runs: bool,
}

impl Overlapped {
    /// A policy without requests. Asserts that the largest batch has at least one item.
    pub fn new(options: OverlappedOptions) -> Self {
        assert!(options.max_batch > 0, "a batch has at least one item");
        let (waiting, backlog) = (0, Duration::ZERO);
        Overlapped { options, requests: BTreeMap::new(), running: None, waiting, backlog }
    }

    fn segments(&self) -> SegmentRange {
        SegmentRange::new(0, self.options.profile.segments())
    }

    /// Lets a request wait for a launch from `segment` on.
    fn wait(&mut self, request: RequestId, segment: u16) {
        let Some(open) = self.requests.get_mut(&request) else { return };
        open.left = self.options.profile.remaining(segment, open.rows, open.length);
        open.runs = false;
        self.waiting += open.rows;
        self.backlog += open.left;
    }

    /// Takes a request off the waiting ones.
    fn leave(&mut self, Open { rows, left, runs, .. }: Open) {
        if !runs {
            self.waiting -= rows;
            self.backlog = self.backlog.saturating_sub(left);
        }
    }

    fn remove(&mut self, request: RequestId) -> bool {
        let Some(open) = self.requests.remove(&request) else { return false };
        self.leave(open);
        true
    }
}

/// The user's settings of the policy.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct OverlappedSettings {
    /// The number of operators, of about equal time, into which the model is cut.
    stages: Option<u16>,
    /// The tensors after which the model is cut, instead of by `stages`.
    cut_at: Vec<String>,
}

impl PolicySettings for OverlappedSettings {
    fn check(&self) -> Result<(), String> {
        settings::at_least_one(&[("stages", self.stages.map(u32::from))])?;
        match self.stages.is_some() && !self.cut_at.is_empty() {
            true => Err("`stages` and `cut_at` both say where the model is cut; leave one of them out".to_owned()),
            false => Ok(()),
        }
    }

    fn cut(&self) -> (Cut, bool) {
        match self.stages {
            _ if !self.cut_at.is_empty() => (Cut::At(self.cut_at.clone()), true),
            Some(1) => (Cut::Whole, true),
            stages => (Cut::Stages(usize::from(stages.unwrap_or(OPERATORS))), stages.is_some()),
        }
    }

    fn at_once(&self) -> u32 {
        AT_ONCE
    }

    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String> {
        let PolicyModel { partition, profile, max_batch, drop, queue_bound, .. } = model;
        Ok(ModelSpec::new(&OverlappedOptions { profile, max_batch, drop, queue_bound }, partition))
    }
}

impl PolicyOptions for OverlappedOptions {
    const ENTRY: &'static PolicyEntry = &PolicyEntry::new::<OverlappedOptions, OverlappedSettings>(
        "overlap",
        "operators of several models side by side, chosen by predicted times",
    )
    .grouped();

    fn check(&self) -> Result<(), String> {
        at_most("max_batch", self.max_batch, MOST_ROWS)?;
        at_most("stages", u32::from(self.profile.segments()), MOST_LANES)
    }

    fn build(self) -> DeviceModel {
        let profile = self.profile.clone();
        DeviceModel::new(Overlapped::new(self), profile)
    }
}

impl DevicePolicy for Overlapped {
    fn lanes(&self, partition: PartitionId) -> Vec<LaneSpec> {
        vec![LaneSpec { partition, max_rows: self.options.max_batch, segments: self.segments() }]
    }

    fn arbitrated(&self) -> Arbitrated {
        let OverlappedOptions { profile, drop, .. } = &self.options;
        Arbitrated { under: Some(OverlapModel { operators: profile.segments(), drop: *drop }), limited: false }
    }

    /// Launches the permitted request, if it is one of this policy's.
    fn advance(&mut self, turn: &mut Turn<'_>) {
        let Some(permit) = turn.permit() else { return };
        let Some(open) = self.requests.get(&permit.request).copied() else { return };
        self.leave(open);
        let id = turn.new_launch();
        let batch = open.batch.unwrap_or_else(|| {
            let batch = turn.new_batch();
            turn.note(Note::New { batch, rows: open.rows, length: open.length });
            batch
        });
        self.requests.insert(permit.request, Open { batch: Some(batch), runs: true, ..open });
        self.running = Some((id, permit));
        turn.launch(Launch {
            id,
            batch,
            granted: None,
            model: turn.model(),
            lane: turn.lanes()[0],
            segments: permit.segments,
            members: vec![permit.request],
            rows: open.rows,
            computed_rows: open.rows,
            length: open.length,
            inputs: if permit.segments.first == 0 { InputSource::Host } else { InputSource::Device },
        });
    }

    fn handle_request(&mut self, _: &mut Turn<'_>, request: &DeviceRequest) -> Result<(), DeviceReject> {
        let (DeviceRequest { id, size, length, .. }, bound) = (*request, self.options.queue_bound);
        if size > self.options.max_batch {
            return Err(DeviceReject::TooLarge { size, largest: self.options.max_batch });
        }
        if self.waiting.saturating_add(size) > bound {
            return Err(DeviceReject::QueueFull { bound });
        }
        if self.requests.contains_key(&id) {
            return Err(DeviceReject::NameTaken(id));
        }
        self.requests.insert(id, Open { rows: size, length, batch: None, left: Duration::ZERO, runs: false });
        self.wait(id, 0);
        Ok(())
    }

    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, _: Span, exits: &[RequestId]) {
        let Some((_, permit)) = self.running.take_if(|(running, _)| *running == launch) else { return };
        let Permit { request, segments } = permit;
        let is_done = segments.end == self.options.profile.segments() || exits.contains(&request);
        if !is_done {
            self.wait(request, segments.end);
        } else if self.remove(request) {
            turn.push(DeviceOutput::Reply { request, launch });
        }
    }

    fn handle_cancel(&mut self, _: &mut Turn<'_>, request: RequestId) -> bool {
        self.remove(request)
    }

    fn drop_waiting(&mut self, turn: &mut Turn<'_>, reason: DeviceDrop) {
        let is_new = |(request, open): (&RequestId, &Open)| open.batch.is_none().then_some(*request);
        let requests: Vec<RequestId> = self.requests.iter().filter_map(is_new).collect();
        for request in requests {
            self.remove(request);
            turn.push(DeviceOutput::Drop { request, reason });
        }
    }

    fn backlog(&self) -> Duration {
        self.backlog
    }

    fn stats(&self) -> PoolStats {
        let rows = |(_, permit): (_, Permit)| self.requests.get(&permit.request).map_or(0, |open| open.rows);
        let running = self.running.map_or(0, rows);
        PoolStats { waiting: self.waiting, running, ..PoolStats::default() }
    }
}
