//! The operator groups of a device: the control that forms them, and the running group.

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

/// The settings of a device's operator groups, as plain data.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct GroupSettings {
    /// The predictor of group latencies; `None`: there is no prediction, and requests run one at a
    /// time.
    pub predictor: Option<LearnedPredictor>,
    /// The predictor's relative error was below this for 95% of its test samples.
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

/// A decision about a request of a model that shares groups with others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupDecision {
    /// These operators of the request are in the group that begins.
    Run(GroupPart),
    /// The request is given up.
    Drop(RequestId, DeviceDrop),
}

/// The predicted and the actual latency of a group that is done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupEnd {
    /// The model of the group's most urgent request.
    pub model: ModelId,
    /// The group's operators, the most urgent request first.
    pub parts: Vec<GroupPart>,
    /// The predictor's answer.
    pub predicted: Option<Duration>,
    /// The predicted latency, corrected by the latencies of earlier groups.
    pub expected: Option<Duration>,
    /// The group's actual latency.
    pub took: Duration,
}

/// Predicts groups by the learned predictor. If it cannot tell, a single request is predicted by
/// the measured profile of its model.
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

/// The operator groups of a device: the control that forms them for all models that share them, and
/// the running group.
#[derive(Debug)]
pub struct DeviceGroups {
    overlap: Overlap<DevicePredictor>,
    /// The owner of each request.
    owners: BTreeMap<RequestId, ResidentKey>,
    /// The launches of the group that begins.
    forming: Vec<Launch>,
    running: Option<RunningGroup>,
}

#[derive(Debug)]
struct RunningGroup {
    group: OperatorGroup,
    /// The launches of the group that are not done.
    left: usize,
    span: Option<Span>,
}

impl Default for DeviceGroups {
    fn default() -> Self {
        // The bound of the queue is set for each model.
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
    /// The counters and margins of the groups.
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

    /// Sets how groups are formed from now on.
    pub fn set(&mut self, now: Time, GroupSettings { predictor, error, order }: GroupSettings) {
        let at_once = predictor.as_ref().map_or(1, |predictor| predictor.layout().at_once);
        self.overlap.predictor_mut().learned = predictor;
        self.overlap.handle_order(now, order);
        self.overlap.handle_predictor(now, at_once, error);
    }

    /// Adds or changes a model whose requests share groups with those of others. `None` removes the
    /// model, of which no request may be left.
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

    /// Handles the arrival of a request.
    ///
    /// # Errors
    /// As for [`Overlap::handle_request`].
    pub fn request(&mut self, now: Time, of: ResidentKey, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.overlap.handle_request(now, request)?;
        self.owners.insert(request.id, of);
        Ok(())
    }

    /// Forgets a request: no more of its operators will run.
    pub fn forget(&mut self, now: Time, request: RequestId) {
        self.owners.remove(&request);
        self.overlap.handle_cancel(now, request);
    }

    /// Adds a launch to the group that begins.
    pub fn add(&mut self, launch: Launch) {
        self.forming.push(launch);
    }

    /// Begins the group whose parts were handed out, and returns its launches, which all begin
    /// together. Without launches, because no request wanted any part, the group ends at once.
    pub fn begin(&mut self, now: Time, group: OperatorGroup) -> Vec<Launch> {
        let launches = std::mem::take(&mut self.forming);
        if launches.is_empty() {
            self.overlap.handle_completion(now, group.id, Span { start: now, end: now });
        } else {
            self.running = Some(RunningGroup { group, left: launches.len(), span: None });
        }
        launches
    }

    /// Handles the completion of a launch of the running group. Returns the group's end if this
    /// launch was its last.
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

    /// Takes the next decision.
    pub fn poll(&mut self) -> Option<OverlapOutput> {
        self.overlap.poll_output()
    }

    /// The owner of a request.
    pub fn owner(&self, request: RequestId) -> Option<ResidentKey> {
        self.owners.get(&request).copied()
    }

    /// When to decide the next group, beside the running one.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.overlap.poll_timeout()
    }

    /// Handles the timeout of [`Self::poll_timeout`].
    pub fn timeout(&mut self, now: Time) {
        self.overlap.handle_timeout(now);
    }
}

/// The counters and margins of a device's groups.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct GroupStats {
    /// The groups of operators that have begun.
    pub groups: u64,
    /// The groups of several requests.
    pub together: u64,
    /// The groups that were decided in time, but no longer suited when the device was free.
    pub overtaken: u64,
    /// The probable latency of a group of several requests, as a multiple of the predicted one.
    pub expected: f64,
    /// The safe upper bound of the latency, as a multiple of the predicted one.
    pub bound: f64,
}
