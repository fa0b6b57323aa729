//! The groups of operators of a device: what decides them, and the one that runs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::launch::{Launch, Span};
use super::overlap::{
    GroupOrder, GroupPart, LearnedPredictor, OperatorGroup, Overlap, OverlapModel, OverlapOptions, OverlapOutput,
    Predictor,
};
use super::request::{DeviceDrop, DeviceReject, DeviceRequest};
use super::resident::ResidentKey;
use super::segment_profile::SegmentProfile;
use crate::ids::{ModelId, RequestId};
use crate::time::{Duration, Time};

/// How groups of operators of a device are made, as plain data.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct GroupSettings {
    /// What says how long groups take; `None`: nobody can, and requests run one at a time.
    pub predictor: Option<LearnedPredictor>,
    /// The relative error that it was below for 95% of the samples that it was tested with.
    pub error: f64,
    /// Which request is next, and whether others run beside it.
    #[serde(default)]
    pub order: GroupOrder,
}

impl Default for GroupSettings {
    fn default() -> Self {
        GroupSettings { predictor: None, error: OverlapOptions::default().error, order: GroupOrder::Headroom }
    }
}

/// What was decided about a request of a model that shares groups with others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupDecision {
    /// These operators of it are in the group that begins.
    Run(GroupPart),
    /// It is given up.
    Drop(RequestId, DeviceDrop),
}

/// What a group that is done took.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupEnd {
    /// The model of its most urgent request.
    pub model: ModelId,
    /// Its operators, the most urgent request first.
    pub parts: Vec<GroupPart>,
    /// What the predictor said.
    pub predicted: Option<Duration>,
    /// What that was taken for, by what groups before it took.
    pub expected: Option<Duration>,
    /// What it took.
    pub took: Duration,
}

/// What is known of groups: what was learned, or else, of requests alone, what was measured of their models.
#[derive(Debug, Default)]
struct DevicePredictor {
    learned: Option<LearnedPredictor>,
    profiles: BTreeMap<ModelId, SegmentProfile>,
}

impl Predictor for DevicePredictor {
    fn predict(&self, groups: &[&[GroupPart]]) -> Vec<Option<Duration>> {
        let alone = |group: &[GroupPart]| {
            let [part] = group else { return None };
            let from = |segment| Some(self.profiles.get(&part.model)?.remaining(segment, part.rows, part.length));
            Some(from(part.operators.first)?.saturating_sub(from(part.operators.end)?))
        };
        let mut predicted = self.learned.as_ref().map_or(vec![None; groups.len()], |learned| learned.predict(groups));
        for (predicted, group) in predicted.iter_mut().zip(groups) {
            *predicted = predicted.or_else(|| alone(group));
        }
        predicted
    }
}

/// The groups of a device: what decides them for all models that share them, and the one that runs.
#[derive(Debug)]
pub struct DeviceGroups {
    overlap: Overlap<DevicePredictor>,
    /// Whose each request is.
    owners: BTreeMap<RequestId, ResidentKey>,
    /// Launches of the group that begins.
    forming: Vec<Launch>,
    running: Option<RunningGroup>,
}

#[derive(Debug)]
struct RunningGroup {
    group: OperatorGroup,
    /// Launches of it that are not done.
    left: usize,
    span: Option<Span>,
}

impl Default for DeviceGroups {
    fn default() -> Self {
        // How many may wait is said for each model.
        let options = OverlapOptions { queue_bound: u32::MAX, ..OverlapOptions::default() };
        DeviceGroups {
            overlap: Overlap::new(options, DevicePredictor::default()),
            owners: BTreeMap::new(),
            forming: Vec::new(),
            running: None,
        }
    }
}

impl DeviceGroups {
    /// What decides, to look at.
    pub fn stats(&self) -> GroupStats {
        let (stats, margin) = (self.overlap.stats(), self.overlap.margins().of(2));
        let of_second = |margin: Duration| margin.as_secs_f64();
        let second = Duration::from_millis(1_000);
        GroupStats {
            groups: stats.groups,
            together: stats.together,
            overtaken: stats.overtaken,
            expected: of_second(margin.expected(second)),
            bound: of_second(margin.bound(second)),
        }
    }

    /// Groups are made like this from now on.
    pub fn set(&mut self, now: Time, GroupSettings { predictor, error, order }: GroupSettings) {
        let at_once = predictor.as_ref().map_or(1, |predictor| predictor.layout().at_once);
        self.overlap.predictor_mut().learned = predictor;
        self.overlap.handle_order(now, order);
        self.overlap.handle_predictor(now, at_once, error);
    }

    /// A model comes whose requests share groups with those of others, or changes; `None`: it goes, and none of its requests is there any more.
    pub fn set_model(&mut self, now: Time, model: ModelId, comes: Option<(OverlapModel, SegmentProfile)>) {
        let profiles = &mut self.overlap.predictor_mut().profiles;
        let comes = comes.map(|(comes, profile)| {
            profiles.insert(model, profile);
            comes
        });
        if comes.is_none() {
            profiles.remove(&model);
        }
        self.overlap.handle_model(now, model, comes);
    }

    /// A request comes.
    ///
    /// # Errors
    /// As [`Overlap::handle_request`].
    pub fn request(&mut self, now: Time, of: ResidentKey, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.overlap.handle_request(now, request)?;
        self.owners.insert(request.id, of);
        Ok(())
    }

    /// Nothing more of a request is to run.
    pub fn forget(&mut self, now: Time, request: RequestId) {
        self.owners.remove(&request);
        self.overlap.handle_cancel(now, request);
    }

    /// A launch that is part of the group that begins.
    pub fn add(&mut self, launch: Launch) {
        self.forming.push(launch);
    }

    /// The launches of the group whose parts were handed out: all of them begin together. None: nobody wanted any of it, and it is over.
    pub fn begin(&mut self, now: Time, group: OperatorGroup) -> Vec<Launch> {
        let launches = std::mem::take(&mut self.forming);
        if launches.is_empty() {
            self.overlap.handle_completion(now, group.id, Span { start: now, end: now });
        } else {
            self.running = Some(RunningGroup { group, left: launches.len(), span: None });
        }
        launches
    }

    /// A launch of the group that runs is done; gives what the group took, if it was the last.
    pub fn end_part(&mut self, now: Time, span: Span) -> Option<GroupEnd> {
        let running = self.running.as_mut()?;
        let whole = running.span.get_or_insert(span);
        *whole = Span { start: whole.start.min(span.start), end: whole.end.max(span.end) };
        running.left -= 1;
        let RunningGroup { group, span, .. } = self.running.take_if(|running| running.left == 0)?;
        let span = span.unwrap_or(Span { start: now, end: now });
        self.overlap.handle_completion(now, group.id, span);
        let OperatorGroup { parts, predicted, expected, .. } = group;
        let model = parts.first()?.model;
        Some(GroupEnd { model, parts, predicted, expected, took: span.end.since(span.start) })
    }

    /// The next decision, and whose it is.
    pub fn poll(&mut self) -> Option<OverlapOutput> {
        self.overlap.poll_output()
    }

    /// Whose a request is.
    pub fn owner(&self, request: RequestId) -> Option<ResidentKey> {
        self.owners.get(&request).copied()
    }

    /// When the next group is to be decided, beside the one that runs.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.overlap.poll_timeout()
    }

    /// The time has come.
    pub fn timeout(&mut self, now: Time) {
        self.overlap.handle_timeout(now);
    }
}

/// What the groups of a device came to.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct GroupStats {
    /// Groups of operators that have begun.
    pub groups: u64,
    /// Of these, of several requests.
    pub together: u64,
    /// Groups that were decided in time, and did not suit any more when the device was free.
    pub overtaken: u64,
    /// What a group of several requests probably takes, of what is predicted.
    pub expected: f64,
    /// What it surely takes, of what is predicted.
    pub bound: f64,
}
