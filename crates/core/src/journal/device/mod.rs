//! The records of a device's scheduler.

mod text;

use serde::{Deserialize, Serialize};

use super::machine::{Machine, MachineKind, Records};
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

    fn request_ended_by(decision: &DeviceOutput) -> Option<RequestId> {
        if let DeviceOutput::Drop { request, .. } = decision { Some(*request) } else { None }
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
