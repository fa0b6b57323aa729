//! The records of a device's scheduler.

mod text;

use serde::{Deserialize, Serialize};

use super::machine::{Machine, MachineKind, Record, Records};
use super::names::QueueName;
use crate::device::{
    BadLayout, BadMove, BadPolicy, DeviceOutput, DeviceReject, DeviceRequest, DeviceScheduler, GrantedBatch,
    GroupSettings, Layout, ModelSpec, Span,
};
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

/// The records of a device's scheduler. They have no short forms.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceRecords;

impl Records for DeviceRecords {
    type Input = DeviceInput;
    /// Whether a cancelled request, or lanes to change over to, were there, or batches can be
    /// limited. True for all else.
    type Reply = Result<bool, DeviceRefusal>;
    type Refusal = String;
    type Decision = DeviceOutput;

    fn are_of(machine: MachineKind) -> bool {
        matches!(machine, MachineKind::Device(_))
    }

    fn refusal(reply: &Self::Reply) -> Option<String> {
        reply.as_ref().err().map(ToString::to_string)
    }

    fn request_in(input: &DeviceInput) -> Option<RequestId> {
        if let DeviceInput::Request(request) = input { Some(request.id) } else { None }
    }

    fn model_of(record: &Record<Self>) -> Option<ModelId> {
        match record {
            Record::Input(_, input) => model_of_input(input),
            Record::Refused(_) => None,
            Record::Decision(output) => model_of_output(output),
        }
    }

    fn is_setup(input: &DeviceInput) -> bool {
        matches!(input, DeviceInput::Layout(_) | DeviceInput::Model(..))
    }

    fn remember(setup: &mut Vec<(Time, DeviceInput)>, now: Time, input: &DeviceInput) {
        match input {
            DeviceInput::Layout(_) => setup.retain(|(_, before)| !matches!(before, DeviceInput::Layout(_))),
            DeviceInput::Model(model, _) => setup.retain(|(_, before)| model_of_input(before) != Some(*model)),
            _ => return,
        }
        if !matches!(input, DeviceInput::Model(_, None)) {
            setup.push((now, input.clone()));
        }
    }

    fn name_in(input: &DeviceInput) -> Option<(ModelId, QueueName)> {
        let DeviceInput::Model(model, Some(spec)) = input else { return None };
        // The host names a model by its name and version.
        let (name, version) = spec.name.rsplit_once(' ').unwrap_or((&spec.name, ""));
        let name = QueueName { model: name.to_owned(), version: version.to_owned(), ..QueueName::default() };
        Some((*model, name))
    }

    fn request_ended_by(decision: &DeviceOutput) -> Option<RequestId> {
        if let DeviceOutput::Drop { request, .. } = decision { Some(*request) } else { None }
    }
}

/// The model that an input is about.
fn model_of_input(input: &DeviceInput) -> Option<ModelId> {
    match input {
        DeviceInput::Request(request) => Some(request.model),
        DeviceInput::Batch(batch) => Some(batch.model),
        DeviceInput::Model(model, _)
        | DeviceInput::Input(model, _)
        | DeviceInput::Cancel(model, _)
        | DeviceInput::Prepared(model, _)
        | DeviceInput::Move(model, _)
        | DeviceInput::Switch(model)
        | DeviceInput::Limit(model, _) => Some(*model),
        DeviceInput::Layout(_) | DeviceInput::Completion { .. } | DeviceInput::Groups(_) | DeviceInput::Timeout => None,
    }
}

/// The model that a decision is about.
fn model_of_output(output: &DeviceOutput) -> Option<ModelId> {
    match output {
        DeviceOutput::Launch(launch) => Some(launch.model),
        DeviceOutput::Prepare { model, .. } | DeviceOutput::Switch { model, .. } | DeviceOutput::Note { model, .. } => {
            Some(*model)
        }
        _ => None,
    }
}

impl Machine for DeviceScheduler {
    type Records = DeviceRecords;

    fn kind(&self) -> MachineKind {
        MachineKind::Device(self.number())
    }

    fn apply(&mut self, now: Time, input: DeviceInput) -> Result<bool, DeviceRefusal> {
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

    fn poll(&mut self) -> Option<DeviceOutput> {
        self.poll_output()
    }
}
