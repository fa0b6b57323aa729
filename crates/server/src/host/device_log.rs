//! What a device policy is told and decides, as lines of JSON: the decision log of a device.

use std::fmt;

use downbeat_core::device::{DeviceOutput, DeviceRequest, LaneSpec, Launch, LaunchId, Note, Span};
use downbeat_core::{RequestId, Time};
use serde::{Deserialize, Serialize};

/// The first line of a log.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct DeviceLogHead {
    /// The model.
    pub model: String,
    /// Its version.
    pub version: String,
    /// The device.
    pub device: usize,
    /// The device policy's name.
    pub policy: String,
    /// Its lanes.
    pub lanes: Vec<LaneSpec>,
}

/// A line of a log.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct DeviceRecord {
    /// When, by the server's clock.
    pub at: Time,
    /// What.
    #[serde(flatten)]
    pub event: DeviceEvent,
}

/// What a device policy was told, or decided.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum DeviceEvent {
    /// A request came and was taken.
    Request(DeviceRequest),
    /// A request came and was refused.
    Refused {
        /// The request.
        request: DeviceRequest,
        /// Why, in words.
        reason: String,
    },
    /// The input of a request is in the ring.
    Input(RequestId),
    /// A launch is done.
    Completion {
        /// The launch.
        launch: LaunchId,
        /// When it had the device.
        span: Span,
        /// Members whose answers are final before the last segment.
        exits: Vec<RequestId>,
    },
    /// A client has gone, or was answered with an error.
    Cancel(RequestId),
    /// A time came that the policy had asked for.
    Timeout,
    /// What the policy decided.
    Decision(DeviceOutput),
}

impl fmt::Display for DeviceRecord {
    /// A line for people: milliseconds, what came in, `->` what was decided.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>14.6}  ", self.at.as_nanos() as f64 / 1e6)?;
        let request = |f: &mut fmt::Formatter<'_>, request: &DeviceRequest| {
            write!(f, "request {}: {} items", request.id, request.size)?;
            if request.length > 0 {
                write!(f, " of length {}", request.length)?;
            }
            if request.deadline == Time::MAX { Ok(()) } else { write!(f, ", by {}", request.deadline) }
        };
        match &self.event {
            DeviceEvent::Request(came) => request(f, came),
            DeviceEvent::Refused { request: came, reason } => {
                request(f, came)?;
                write!(f, "\n{:>16}-> refused: {reason}", "")
            }
            DeviceEvent::Input(request) => write!(f, "input of {request} is there"),
            DeviceEvent::Completion { launch, exits, .. } if exits.is_empty() => write!(f, "{launch} is done"),
            DeviceEvent::Completion { launch, exits, .. } => write!(f, "{launch} is done, {exits:?} exit"),
            DeviceEvent::Cancel(request) => write!(f, "cancel {request}"),
            DeviceEvent::Timeout => f.write_str("timeout"),
            DeviceEvent::Decision(output) => {
                f.write_str("-> ")?;
                decision(f, output)
            }
        }
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
            Note::PrepareFailed { partition, reason } => write!(f, "no lanes in {partition}: {reason}"),
        },
    }
}

fn launch(f: &mut fmt::Formatter<'_>, launch: &Launch) -> fmt::Result {
    let (first, last) = (launch.segments.first, launch.segments.end.saturating_sub(1));
    write!(f, "launch {} on {}: {}, segments {first} to {last}, ", launch.id, launch.lane, launch.batch)?;
    write!(f, "{} items ({} computed)", launch.rows, launch.computed_rows)?;
    if launch.length > 0 {
        write!(f, " padded to {}", launch.length)?;
    }
    write!(f, ", {:?}: {:?}", launch.inputs, launch.members)
}
