//! The decision log of a device: what its scheduler was told and what it decided, as lines of JSON, so that a run can be read and played again.

use std::collections::VecDeque;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::groups::GroupSettings;
use super::launch::{GrantedBatch, Launch, Span};
use super::note::Note;
use super::output::DeviceOutput;
use super::overlap::GroupOrder;
use super::request::{DeviceReject, DeviceRequest};
use super::scheduler::{BadLayout, BadMove, BadPolicy, DeviceScheduler, Layout};
use super::table::ModelSpec;
use crate::ids::{LaunchId, ModelId, PartitionId, RequestId};
use crate::time::Time;

/// What happens to a [`DeviceScheduler`], as data: for each of its `handle_*` functions.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceInput {
    /// The device is divided.
    Layout(Layout),
    /// A model comes or changes, or goes.
    Model(ModelId, Option<ModelSpec>),
    /// A request came.
    Request(DeviceRequest),
    /// A batch came that somebody else made.
    Batch(GrantedBatch),
    /// The input of a request is on the device.
    Input(ModelId, RequestId),
    /// A client has gone, or was answered with an error.
    Cancel(ModelId, RequestId),
    /// A launch is done.
    Completion {
        /// Which.
        launch: LaunchId,
        /// When it had the device.
        span: Span,
        /// Members whose answers are final before the last segment.
        exits: Vec<RequestId>,
    },
    /// Lanes are made, or could not be.
    Prepared(ModelId, Result<(), String>),
    /// A model is to move to another partition.
    Move(ModelId, PartitionId),
    /// A model changes over to the lanes that are ready where it is to move.
    Switch(ModelId),
    /// Batches of a model have at most so many items.
    Limit(ModelId, u32),
    /// Groups of operators are made like this.
    Groups(GroupSettings),
    /// A time came that was asked for.
    Timeout,
}

/// Why an input changed nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DeviceRefusal {
    /// A layout.
    #[error(transparent)]
    Layout(#[from] BadLayout),
    /// A model.
    #[error(transparent)]
    Model(#[from] BadPolicy),
    /// A move.
    #[error(transparent)]
    Move(#[from] BadMove),
    /// A request or a batch.
    #[error(transparent)]
    Request(#[from] DeviceReject),
}

impl DeviceScheduler {
    /// Hands it an input. Gives whether a cancelled request, or lanes to change over to, were there, or batches can be limited; `true` for all else.
    ///
    /// # Errors
    /// What the function for this input says.
    pub fn apply(&mut self, now: Time, input: DeviceInput) -> Result<bool, DeviceRefusal> {
        match input {
            DeviceInput::Layout(layout) => self.handle_layout(now, &layout)?,
            DeviceInput::Model(model, spec) => {
                let comes = spec.map(|spec| spec.build()).transpose()?;
                self.handle_model(now, model, comes)?;
            }
            DeviceInput::Request(request) => self.handle_request(now, &request)?,
            DeviceInput::Batch(batch) => self.handle_batch(now, batch)?,
            DeviceInput::Input(model, request) => self.handle_input(now, model, request),
            DeviceInput::Cancel(model, request) => return Ok(self.handle_cancel(now, model, request)),
            DeviceInput::Completion { launch, span, exits } => self.handle_completion(now, launch, span, &exits),
            DeviceInput::Prepared(model, made) => self.handle_prepared(now, model, made),
            DeviceInput::Move(model, partition) => self.handle_move(now, model, partition)?,
            DeviceInput::Switch(model) => return Ok(self.handle_switch(now, model)),
            DeviceInput::Limit(model, rows) => return Ok(self.handle_limit(now, model, rows)),
            DeviceInput::Groups(settings) => self.handle_groups(now, settings),
            DeviceInput::Timeout => self.handle_timeout(now),
        }
        Ok(true)
    }
}

/// A line of a log.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DeviceRecord {
    /// When, by the driver's clock.
    pub at: Time,
    /// What.
    #[serde(flatten)]
    pub event: DeviceEvent,
}

/// What a device's scheduler was told, or decided.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceEvent {
    /// A log begins: whose it is.
    Begin(String),
    /// What it was told.
    Told(DeviceInput),
    /// What it was told changes nothing, and why.
    Refused(String),
    /// What it decided.
    Decision(DeviceOutput),
}

/// A device's scheduler that writes down what it is told and what it decides, if it is to.
///
/// Every input comes through [`apply`](Self::apply) and every decision is polled from it. What is written stays in memory until
/// [`take_log`](Self::take_log); that it is taken often enough is the driver's to see to.
#[derive(Debug)]
pub struct DeviceJournal {
    scheduler: DeviceScheduler,
    log: Option<Vec<u8>>,
    now: Time,
}

impl DeviceJournal {
    /// A fresh scheduler; with the name of whose log it is, one that is written down.
    pub fn new(name: Option<String>) -> Self {
        let mut journal =
            DeviceJournal { scheduler: DeviceScheduler::new(), log: name.is_some().then(Vec::new), now: Time::ZERO };
        journal.write(|| DeviceEvent::Begin(name.unwrap_or_default()));
        journal
    }

    /// The scheduler, to look at.
    pub fn scheduler(&self) -> &DeviceScheduler {
        &self.scheduler
    }

    fn write(&mut self, event: impl FnOnce() -> DeviceEvent) {
        let at = self.now;
        if let Some(log) = &mut self.log {
            // Numbers and words: nothing of it can fail, and a log must not end anything.
            if serde_json::to_writer(&mut *log, &DeviceRecord { at, event: event() }).is_ok() {
                log.push(b'\n');
            }
        }
    }

    /// As [`DeviceScheduler::apply`].
    ///
    /// # Errors
    /// As there.
    pub fn apply(&mut self, now: Time, input: DeviceInput) -> Result<bool, DeviceRefusal> {
        self.now = now;
        self.write(|| DeviceEvent::Told(input.clone()));
        let result = self.scheduler.apply(now, input);
        if let Err(refusal) = &result {
            self.write(|| DeviceEvent::Refused(refusal.to_string()));
        }
        result
    }

    /// As [`DeviceScheduler::poll_output`].
    pub fn poll_output(&mut self) -> Option<DeviceOutput> {
        let output = self.scheduler.poll_output()?;
        self.write(|| DeviceEvent::Decision(output.clone()));
        Some(output)
    }

    /// What was written since the last time.
    pub fn take_log(&mut self) -> Vec<u8> {
        self.log.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

/// A line that is none of a log.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct DeviceLogError {
    /// Which, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub reason: String,
}

/// The lines of a log, with their numbers. A last line that was cut off, as when the server was killed, is left out.
pub fn read(bytes: &[u8]) -> impl Iterator<Item = Result<(usize, DeviceRecord), DeviceLogError>> {
    let lines = bytes.split_inclusive(|byte| *byte == b'\n').zip(1..).filter(|(line, _)| !line.trim_ascii().is_empty());
    lines.filter_map(|(bytes, line)| match serde_json::from_slice(bytes) {
        Ok(record) => Some(Ok((line, record))),
        Err(error) if error.is_eof() && !bytes.ends_with(b"\n") => None,
        Err(error) => Some(Err(DeviceLogError { line, reason: error.to_string() })),
    })
}

/// What playing a log again gave.
#[derive(Clone, PartialEq, Debug)]
pub struct DeviceReplay {
    /// Inputs that were handed in.
    pub inputs: u64,
    /// Decisions that were the same.
    pub decisions: u64,
    /// Where the log and its replay part, if they do.
    pub divergence: Option<DeviceDivergence>,
}

/// Where a log and its replay part.
#[derive(Clone, PartialEq, Debug)]
pub struct DeviceDivergence {
    /// The line of the log, from 1.
    pub line: usize,
    /// What it says.
    pub logged: DeviceRecord,
    /// What was decided in its place; `None`: nothing.
    pub replayed: Option<DeviceRecord>,
}

impl fmt::Display for DeviceDivergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {} of the log: {}\nreplay: ", self.line, self.logged)?;
        match &self.replayed {
            Some(record) => record.fmt(f),
            None => f.write_str("nothing"),
        }
    }
}

/// Feeds the inputs of a log to a fresh scheduler, for each beginning in it, and says whether it decides the same.
///
/// # Errors
/// If a line is none of a log.
pub fn replay(bytes: &[u8]) -> Result<DeviceReplay, DeviceLogError> {
    let mut scheduler = DeviceScheduler::new();
    let mut replay = DeviceReplay { inputs: 0, decisions: 0, divergence: None };
    // A refusal comes at once, decisions when they are polled.
    let mut said: VecDeque<DeviceEvent> = VecDeque::new();
    for record in read(bytes) {
        let (line, logged) = record?;
        let at = logged.at;
        let is_told = matches!(logged.event, DeviceEvent::Told(_) | DeviceEvent::Begin(_));
        let replayed = match &logged.event {
            DeviceEvent::Decision(_) if said.is_empty() => scheduler.poll_output().map(DeviceEvent::Decision),
            _ => said.pop_front(),
        };
        let is_same = if is_told { replayed.is_none() } else { replayed.as_ref() == Some(&logged.event) };
        if !is_same {
            let replayed = replayed.map(|event| DeviceRecord { at, event });
            replay.divergence = Some(DeviceDivergence { line, logged, replayed });
            break;
        }
        match logged.event {
            DeviceEvent::Begin(_) => scheduler = DeviceScheduler::new(),
            DeviceEvent::Told(input) => {
                replay.inputs += 1;
                if let Err(refusal) = scheduler.apply(at, input) {
                    said.push_back(DeviceEvent::Refused(refusal.to_string()));
                }
            }
            DeviceEvent::Refused(_) | DeviceEvent::Decision(_) => replay.decisions += 1,
        }
    }
    Ok(replay)
}

impl fmt::Display for DeviceRecord {
    /// A line for people: milliseconds, what came in, `->` what was decided.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>14.6}  ", self.at.as_nanos() as f64 / 1e6)?;
        match &self.event {
            DeviceEvent::Begin(name) => {
                write!(f, "decision log of {name}: milliseconds, what came in, -> what was decided")
            }
            DeviceEvent::Told(input) => told(f, input),
            DeviceEvent::Refused(reason) => write!(f, "-> refused: {reason}"),
            DeviceEvent::Decision(output) => {
                f.write_str("-> ")?;
                decision(f, output)
            }
        }
    }
}

fn told(f: &mut fmt::Formatter<'_>, input: &DeviceInput) -> fmt::Result {
    match input {
        DeviceInput::Layout(layout) => write!(f, "layout: shared lanes by partition {:?}", layout.shared_lanes),
        DeviceInput::Model(model, Some(spec)) => {
            write!(f, "{model} comes: {} with the policy {}", spec.name, spec.policy())
        }
        DeviceInput::Model(model, None) => write!(f, "{model} goes"),
        DeviceInput::Request(request) => {
            write!(f, "request {}: {} items", request.id, request.size)?;
            if request.length > 0 {
                write!(f, " of length {}", request.length)?;
            }
            if request.deadline == Time::MAX { Ok(()) } else { write!(f, ", by {}", request.deadline) }
        }
        DeviceInput::Batch(batch) => {
            write!(
                f,
                "granted batch {} of {} for {}: {} items, {:?}",
                batch.id, batch.model, batch.lane, batch.rows, batch.members
            )
        }
        DeviceInput::Input(_, request) => write!(f, "input of {request} is there"),
        DeviceInput::Cancel(_, request) => write!(f, "cancel {request}"),
        DeviceInput::Completion { launch, exits, .. } if exits.is_empty() => write!(f, "{launch} is done"),
        DeviceInput::Completion { launch, exits, .. } => write!(f, "{launch} is done, {exits:?} exit"),
        DeviceInput::Prepared(model, Ok(())) => write!(f, "lanes of {model} are made"),
        DeviceInput::Prepared(model, Err(reason)) => write!(f, "lanes of {model} cannot be made: {reason}"),
        DeviceInput::Move(model, partition) => write!(f, "{model} is to move to {partition}"),
        DeviceInput::Switch(model) => write!(f, "{model} is to change over to its new lanes"),
        DeviceInput::Limit(model, rows) => write!(f, "batches of {model} have at most {rows} items"),
        DeviceInput::Groups(GroupSettings { order, .. }) if *order != GroupOrder::Headroom => {
            write!(f, "one request at a time, {order}")
        }
        DeviceInput::Groups(GroupSettings { predictor, error, .. }) => match predictor {
            Some(predictor) => write!(
                f,
                "a predictor of groups of up to {} of {} models, 95% of its errors below {:.1}%",
                predictor.layout().at_once,
                predictor.layout().models.len(),
                error * 100.0
            ),
            None => f.write_str("no predictor of groups: one request at a time"),
        },
        DeviceInput::Timeout => f.write_str("timeout"),
    }
}

fn decision(f: &mut fmt::Formatter<'_>, output: &DeviceOutput) -> fmt::Result {
    match output {
        DeviceOutput::Admit { request, slots, .. } => {
            write!(
                f,
                "{request} to slots {} to {}",
                slots.first,
                slots.first.saturating_add(slots.count).saturating_sub(1)
            )
        }
        DeviceOutput::Launch(its) => launch(f, its),
        DeviceOutput::Group(launches) => {
            f.write_str("together: ")?;
            launches.iter().try_for_each(|its| launch(f, its).and_then(|()| f.write_str("; ")))
        }
        DeviceOutput::Prepare { model, lanes, partition } => write!(f, "prepare {lanes:?} of {model} in {partition}"),
        DeviceOutput::Switch { model, from, to } => write!(f, "{model} switches from {from:?} to {to:?}"),
        DeviceOutput::Free { lanes, .. } => write!(f, "{lanes:?} are free"),
        DeviceOutput::Reply { request, launch } => write!(f, "reply to {request} from {launch}"),
        DeviceOutput::Drop { request, reason } => write!(f, "drop {request}: {reason:?}"),
        DeviceOutput::Note { note, .. } => match note {
            Note::New { batch, rows, .. } => write!(f, "new {batch} of {rows} items"),
            Note::Stretch { batch, joined, rows, stage } => {
                write!(f, "stretch {batch} by {joined} to {rows} items, together after stage {stage}")
            }
            Note::Split { batch, into, stage } => write!(f, "split {batch} into it and {into:?} after stage {stage}"),
            Note::Exit { batch, rows, stage } => write!(f, "{rows} items leave {batch} after stage {stage}"),
            Note::Switch { load } => write!(f, "lanes for a load of {load} items from now on"),
            Note::RingFull { waiting } => write!(f, "the input ring is full, {waiting} requests wait for room"),
            Note::Group { parts, predicted, took, .. } => {
                write!(f, "a group of {} requests took {took}", parts.len())?;
                predicted.map_or(Ok(()), |predicted| write!(f, ", predicted {predicted}"))
            }
            Note::PrepareFailed { partition, reason } => write!(f, "no lanes in {partition}: {reason}"),
        },
    }
}

fn launch(f: &mut fmt::Formatter<'_>, launch: &Launch) -> fmt::Result {
    let (first, last) = (launch.segments.first, launch.segments.end.saturating_sub(1));
    write!(f, "launch {} on {}: {}", launch.id, launch.lane, launch.batch)?;
    if let Some(granted) = launch.granted {
        write!(f, ", granted as {granted}")?;
    }
    write!(f, ", segments {first} to {last}, ")?;
    write!(f, "{} items ({} computed)", launch.rows, launch.computed_rows)?;
    if launch.length > 0 {
        write!(f, " padded to {}", launch.length)?;
    }
    write!(f, ", {:?}: {:?}", launch.inputs, launch.members)
}
