//! Reads the decision log of one device.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use downbeat_core::device::{DeviceOutput, DeviceRequest, LaneId, Launch, LaunchId, ModelSpec, Span};
use downbeat_core::journal::device::{DeviceInput, DeviceRecords};
use downbeat_core::journal::{Entry, LogError, Record, read};
use downbeat_core::{Duration, ModelId, RequestId, Time};

/// The content of a device's log.
#[derive(Debug, Default)]
pub(super) struct DevicePart {
    /// The models with their last policies, and when each came last.
    pub models: BTreeMap<ModelId, (Time, ModelSpec)>,
    /// The requests that came to models whose policies make batches.
    pub requests: Vec<(Time, DeviceRequest)>,
    /// The device's model of each request.
    pub models_of: HashMap<RequestId, ModelId>,
    /// When requests were answered; `None`: they were refused or given up.
    pub ends: HashMap<RequestId, Option<Time>>,
    pub launches: Vec<Ran>,
    /// The lanes of each partition for batches of the scheduler.
    pub shared_lanes: Vec<u32>,
    /// Names of inputs that a replay does not have.
    pub passed_over: BTreeSet<&'static str>,
    /// The launches that run, and when they were decided; `None`: an earlier launch had the lane.
    running: HashMap<LaunchId, (Option<Time>, Launch)>,
    busy_lanes: BTreeMap<LaneId, u32>,
}

/// A launch that has ended.
#[derive(Debug)]
pub(super) struct Ran {
    pub launch: Launch,
    pub span: Span,
    /// From the decision to the news of the end, less the run itself; `None`: it waited for its
    /// lane.
    pub handed_over: Option<Duration>,
}

impl DevicePart {
    /// Reads a log file.
    pub fn read(bytes: &[u8]) -> Result<DevicePart, LogError> {
        let (_, entries) = read::<DeviceRecords>(bytes)?;
        let (mut part, mut now) = (DevicePart::default(), Time::ZERO);
        for entry in entries {
            let Entry { record, .. } = entry?;
            match record {
                Record::Input(at, input) => {
                    now = at;
                    part.input(now, input);
                }
                Record::Refused(_) => part.refused(),
                Record::Decision(decision) => part.decision(now, decision),
            }
        }
        Ok(part)
    }

    fn input(&mut self, now: Time, input: DeviceInput) {
        match input {
            DeviceInput::Layout(layout) => self.shared_lanes = layout.shared_lanes,
            DeviceInput::Model(model, Some(spec)) => {
                self.models.insert(model, (now, spec));
            }
            DeviceInput::Request(request) => {
                self.models_of.insert(request.id, request.model);
                self.requests.push((now, request));
            }
            DeviceInput::Batch(batch) => {
                self.models_of.extend(batch.members.iter().map(|member| (*member, batch.model)));
            }
            DeviceInput::Completion { launch, span, .. } => self.completed(now, launch, span),
            DeviceInput::Cancel(..) => drop(self.passed_over.insert("cancelled requests (they are served)")),
            DeviceInput::Move(..) => drop(self.passed_over.insert("models that moved to another partition")),
            DeviceInput::Limit(..) => drop(self.passed_over.insert("limits of batches")),
            DeviceInput::Model(_, None)
            | DeviceInput::Input(..)
            | DeviceInput::Prepared(..)
            | DeviceInput::Switch(_)
            | DeviceInput::Groups(_)
            | DeviceInput::Timeout => {}
        }
    }

    /// Marks the last request as refused.
    fn refused(&mut self) {
        if let Some((_, request)) = self.requests.last() {
            self.ends.entry(request.id).or_insert(None);
        }
    }

    fn decision(&mut self, now: Time, decision: DeviceOutput) {
        match decision {
            DeviceOutput::Launch(launch) => self.launched(now, launch),
            DeviceOutput::Group(launches) => launches.into_iter().for_each(|launch| self.launched(now, launch)),
            DeviceOutput::Reply { request, .. } => drop(self.ends.insert(request, Some(now))),
            DeviceOutput::Drop { request, .. } => drop(self.ends.insert(request, None)),
            _ => {}
        }
    }

    fn launched(&mut self, now: Time, launch: Launch) {
        let before = self.busy_lanes.entry(launch.lane).or_default();
        let decided = (*before == 0).then_some(now);
        *before += 1;
        self.running.insert(launch.id, (decided, launch));
    }

    fn completed(&mut self, now: Time, launch: LaunchId, span: Span) {
        let Some((decided, launch)) = self.running.remove(&launch) else { return };
        if let Some(lane) = self.busy_lanes.get_mut(&launch.lane) {
            *lane = lane.saturating_sub(1);
        }
        let handed_over = decided.map(|decided| now.since(decided).saturating_sub(span.end.since(span.start)));
        self.launches.push(Ran { launch, span, handed_over });
    }
}
