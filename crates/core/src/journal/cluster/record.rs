//! The inputs and decisions of a cluster's machines, as data.

use serde::{Deserialize, Serialize};

use super::trial::TrialRecord;
use crate::cluster::{
    Answer, Behaviour, Candidate, Demand, DispatchPolicy, Grant, ModelOptions, NetworkBudget, Order, Output, Reject,
    Request, Ticket,
};
use crate::device_profiles::DeviceProfiles;
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId};
use crate::journal::names::QueueName;
use crate::time::{Duration, Time};

/// An input of a [`Scheduler`](crate::cluster::Scheduler), a [`Shard`](crate::cluster::Shard) or a
/// [`Matchmaker`](crate::cluster::Matchmaker). Each machine takes the inputs that it has a function
/// for.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Input {
    /// A request has arrived.
    Request(Request),
    /// The client of a request has gone.
    Cancel {
        /// The request's model.
        model: ModelId,
        /// The ticket that the request got when it was accepted.
        ticket: Ticket,
    },
    /// A batch is done.
    Completion {
        /// Where.
        device: DeviceId,
        /// Which.
        batch: BatchId,
    },
    /// Time has passed. A matchmaker may then give grants.
    Timeout,
    /// A model is added to a scheduler or a shard. A shard is told the id; a scheduler gives ids
    /// out in order.
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
    /// The time that messages take.
    SetNetwork(NetworkBudget),
    /// A device joins.
    AddDevice(DeviceKind),
    /// A device leaves.
    RemoveDevice(DeviceId),
    /// A shard is told how many devices of a kind there are.
    SetDevices(DeviceKind, u32),
    /// A shard is told the demand of the other shards' models on the devices.
    SetOtherDemand(Demand),
    /// A shard gets a device for a model.
    Grant(Grant),
    /// A matchmaker is told a model's newest candidate for a kind of device.
    Candidate(ModelId, DeviceKind, Option<Candidate>),
    /// A matchmaker gets the answer to a grant.
    Answer(Answer),
    /// A model is added to a matchmaker. It shares the limit of batches in flight with the named
    /// model.
    AddSharedLimit(ModelId),
    /// The waiting requests of a model no longer wait for others to join their batch.
    Flush(ModelId),
    /// The time when a device will be done with work from outside the scheduler.
    SetLoad(DeviceId, Time),
    /// The behaviour of an adaptive model. `None`: the load regime decides.
    SetBehaviour(ModelId, Option<Behaviour>),
    /// The result of a trial of the rehearsal. It changes nothing by itself: its consequences are
    /// inputs of their own.
    Trial(Box<TrialRecord>),
    /// The order in which the candidates of all models get devices.
    SetOrder(Order),
    /// The time that messages take for a model, by kind of device.
    SetModelNetwork(ModelId, Vec<(DeviceKind, NetworkBudget)>),
    /// The queue of a model gets only device time that no other queue needs.
    SetLent(ModelId),
    /// A model has a name. This changes nothing: it is for readers of the log.
    Name(ModelId, Box<QueueName>),
}

/// The immediate answer of a machine to an input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply {
    /// Nothing.
    Done,
    /// The answer to a request.
    Request(Result<Ticket, Reject>),
    /// The answer to a cancellation: whether the request was queued and has left.
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
    /// A decision of a scheduler or a shard.
    Output(Output),
    /// A shard's newest candidate of a model for a kind of device.
    Candidate(ModelId, DeviceKind, Option<Candidate>),
    /// A shard's answer to a grant.
    Answer(Answer),
    /// A matchmaker's grant of a device.
    Grant(Grant),
}
