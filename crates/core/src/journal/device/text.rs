//! The inputs and decisions of a device's scheduler, in words.

use std::fmt;

use super::DeviceInput;
use crate::device::overlap::GroupOrder;
use crate::device::{DeviceOutput, GroupSettings, Launch, Note};
use crate::journal::machine::Fact;
use crate::journal::names::Names;
use crate::time::Time;

impl Fact for DeviceInput {
    fn tell(&self, _now: Time, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceInput::Layout(layout) => write!(f, "layout: shared lanes by partition {:?}", layout.shared_lanes),
            DeviceInput::Model(model, Some(spec)) => {
                write!(f, "{model} comes: {} with the policy {}", spec.name, spec.policy(), model = names.of(*model))
            }
            DeviceInput::Model(model, None) => write!(f, "{model} goes", model = names.of(*model)),
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
                    batch.id,
                    names.of(batch.model),
                    batch.lane,
                    batch.rows,
                    batch.members
                )
            }
            DeviceInput::Input(_, request) => write!(f, "input of {request} is there"),
            DeviceInput::Cancel(_, request) => write!(f, "cancel {request}"),
            DeviceInput::Completion { launch, exits, .. } if exits.is_empty() => write!(f, "{launch} is done"),
            DeviceInput::Completion { launch, exits, .. } => write!(f, "{launch} is done, {exits:?} exit"),
            DeviceInput::Prepared(model, Ok(())) => write!(f, "lanes of {model} are made", model = names.of(*model)),
            DeviceInput::Prepared(model, Err(reason)) => {
                write!(f, "lanes of {model} cannot be made: {reason}", model = names.of(*model))
            }
            DeviceInput::Move(model, partition) => {
                write!(f, "{model} is to move to {partition}", model = names.of(*model))
            }
            DeviceInput::Switch(model) => {
                write!(f, "{model} is to change over to its new lanes", model = names.of(*model))
            }
            DeviceInput::Limit(model, rows) => {
                write!(f, "batches of {model} have at most {rows} items", model = names.of(*model))
            }
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
}

impl Fact for DeviceOutput {
    fn tell(&self, _now: Time, names: &Names, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
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
            DeviceOutput::Prepare { model, lanes, partition } => {
                write!(f, "prepare {lanes:?} of {model} in {partition}", model = names.of(*model))
            }
            DeviceOutput::Switch { model, from, to } => {
                write!(f, "{model} switches from {from:?} to {to:?}", model = names.of(*model))
            }
            DeviceOutput::Free { lanes, .. } => write!(f, "{lanes:?} are free"),
            DeviceOutput::Reply { request, launch } => write!(f, "reply to {request} from {launch}"),
            DeviceOutput::Drop { request, reason } => write!(f, "drop {request}: {reason:?}"),
            DeviceOutput::Note { note, .. } => match note {
                Note::New { batch, rows, .. } => write!(f, "new {batch} of {rows} items"),
                Note::Stretch { batch, joined, rows, stage } => {
                    write!(f, "stretch {batch} by {joined} to {rows} items, together after stage {stage}")
                }
                Note::Split { batch, into, stage } => {
                    write!(f, "split {batch} into it and {into:?} after stage {stage}")
                }
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
