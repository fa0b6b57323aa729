//! The inputs and decisions of a cluster's machines, as data.

use serde::{Deserialize, Serialize};

use super::trial::TrialRecord;
use crate::cluster::{
    Answer, Behaviour, Candidate, Demand, DispatchPolicy, Grant, ModelOptions, NetworkBudget, Order, Output, Reject,
    Request, Ticket,
};
use crate::device_profiles::DeviceProfiles;
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId};
use crate::time::{Duration, Time};

/// An input of a [`Scheduler`](crate::cluster::Scheduler), a [`Shard`](crate::cluster::Shard) or a [`Matchmaker`](crate::cluster::Matchmaker): each takes those that it has a function for.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Input {
    /// A request has arrived.
    Request(Request),
    /// A client is no longer interested.
    Cancel {
        /// The request's model.
        model: ModelId,
        /// What it was accepted with.
        ticket: Ticket,
    },
    /// A batch is done.
    Completion {
        /// Where.
        device: DeviceId,
        /// Which.
        batch: BatchId,
    },
    /// Time has passed. For a matchmaker: it may grant what there is.
    Timeout,
    /// A model is added to a scheduler or a shard. The id is the shard's to be told; a scheduler's gives ids out in order.
    AddModel(ModelId, Box<ModelOptions>),
    /// A model is added to a matchmaker, with its largest number of batches in flight.
    AddLimit(u32),
    /// A model is removed.
    RemoveModel(ModelId),
    /// A model has other latency profiles.
    SetProfile(ModelId, Box<DeviceProfiles>),
    /// A model has another dispatch policy.
    SetDispatch(ModelId, DispatchPolicy),
    /// How late wake-ups may come.
    SetWakeMargin(Duration),
    /// What messages take.
    SetNetwork(NetworkBudget),
    /// A device joins.
    AddDevice(DeviceKind),
    /// A device leaves.
    RemoveDevice(DeviceId),
    /// A shard is told how many devices of a kind there are.
    SetDevices(DeviceKind, u32),
    /// A shard is told what the models of others ask of the devices.
    SetOtherDemand(Demand),
    /// A shard gets a device for a model.
    Grant(Grant),
    /// A matchmaker is told a model's newest candidate for a kind of device.
    Candidate(ModelId, DeviceKind, Option<Candidate>),
    /// A matchmaker is told what came of a grant.
    Answer(Answer),
    /// A model is added to a matchmaker that shares another's largest number of batches in flight.
    AddSharedLimit(ModelId),
    /// What waits for a model waits for no others to join.
    Flush(ModelId),
    /// When a device will be done with what others than the scheduler run there.
    SetLoad(DeviceId, Time),
    /// What a model does where it is adaptive; nothing: as follows from the load of the moment.
    SetBehaviour(ModelId, Option<Behaviour>),
    /// What the rehearsal has tried, and found. It changes nothing: what follows from it are inputs of their own.
    Trial(Box<TrialRecord>),
    /// In which order candidates get devices, those of all models.
    SetOrder(Order),
    /// What messages take for a model, by kind of device.
    SetModelNetwork(ModelId, Vec<(DeviceKind, NetworkBudget)>),
}

/// What a machine says to an input at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply {
    /// Nothing.
    Done,
    /// To a request.
    Request(Result<Ticket, Reject>),
    /// To a cancellation: whether the request was queued and has left.
    Cancel(bool),
    /// The model that was added.
    Model(ModelId),
    /// The device that was added.
    Device(DeviceId),
    /// The input is for another machine, or for one in another state.
    Foreign,
}

/// What a machine decided.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Decision {
    /// Of a scheduler or a shard.
    Output(Output),
    /// A shard's newest candidate of a model for a kind of device.
    Candidate(ModelId, DeviceKind, Option<Candidate>),
    /// A shard's answer to a grant.
    Answer(Answer),
    /// Of a matchmaker.
    Grant(Grant),
}
