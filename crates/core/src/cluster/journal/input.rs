//! What happens to a machine, as data.

use serde::{Deserialize, Serialize};

use super::{Decision, Machine, MachineKind};
use crate::cluster::demand::Demand;
use crate::cluster::dispatch_policy::DispatchPolicy;
use crate::cluster::matchmaker::{Answer, Candidate, Grant, Matchmaker};
use crate::cluster::model_queue::ModelOptions;
use crate::cluster::network::NetworkBudget;
use crate::cluster::request_queue::{Request, Ticket};
use crate::cluster::scheduler::{Reject, Scheduler};
use crate::cluster::shard::Shard;
use crate::device_profiles::DeviceProfiles;
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId};
use crate::time::{Duration, Time};

/// An input of a [`Scheduler`], a [`Shard`] or a [`Matchmaker`]: each takes those that it has a function for.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
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

impl Machine for Scheduler {
    fn kind(&self) -> MachineKind {
        MachineKind::Scheduler
    }

    fn apply(&mut self, now: Time, input: Input) -> Reply {
        match input {
            Input::Request(request) => return Reply::Request(self.handle_request(now, request)),
            Input::Cancel { model, ticket } => return Reply::Cancel(self.handle_cancel(now, model, ticket)),
            Input::Completion { device, batch } => self.handle_completion(now, device, batch),
            Input::Timeout => self.handle_timeout(now),
            Input::AddModel(_, options) => return Reply::Model(self.add_model(now, *options)),
            Input::RemoveModel(model) => self.remove_model(now, model),
            Input::SetProfile(model, profiles) => self.set_profile(now, model, *profiles),
            Input::SetDispatch(model, dispatch) => self.set_dispatch(now, model, dispatch),
            Input::Flush(model) => self.flush(now, model),
            Input::SetWakeMargin(margin) => self.set_wake_margin(now, margin),
            Input::SetNetwork(network) => self.set_network(now, network),
            Input::AddDevice(kind) => return Reply::Device(self.add_device(now, kind)),
            Input::RemoveDevice(device) => self.remove_device(now, device),
            Input::SetLoad(device, until) => self.set_load(device, until),
            _ => return Reply::Foreign,
        }
        Reply::Done
    }

    fn poll(&mut self) -> Option<Decision> {
        self.poll_output().map(Decision::Output)
    }
}

impl Machine for Shard {
    fn kind(&self) -> MachineKind {
        let (index, shards) = self.place();
        MachineKind::Shard { index, shards }
    }

    fn apply(&mut self, now: Time, input: Input) -> Reply {
        match input {
            Input::Request(request) => return Reply::Request(self.handle_request(now, &request)),
            Input::Cancel { model, ticket } => return Reply::Cancel(self.handle_cancel(now, model, ticket)),
            Input::Timeout => {
                self.handle_timeout(now);
            }
            // A model that is there would be lost with its requests.
            Input::AddModel(model, _) if self.queue(model).is_some() => return Reply::Foreign,
            Input::AddModel(model, options) => self.add_model(now, model, *options),
            Input::RemoveModel(model) => {
                self.remove_model(now, model);
            }
            Input::SetProfile(model, profiles) => self.set_profile(now, model, *profiles),
            Input::SetDispatch(model, dispatch) => self.set_dispatch(now, model, dispatch),
            Input::Flush(model) => self.flush(now, model),
            Input::SetWakeMargin(margin) => self.set_wake_margin(now, margin),
            Input::SetNetwork(network) => self.set_network(now, network),
            Input::SetDevices(kind, devices) => self.set_devices(now, kind, devices),
            Input::SetOtherDemand(demand) => self.set_other_demand(now, demand),
            Input::Grant(grant) => self.handle_grant(now, grant),
            _ => return Reply::Foreign,
        }
        Reply::Done
    }

    fn poll(&mut self) -> Option<Decision> {
        // In the order that the shard asks for.
        if let Some((model, kind, candidate)) = self.poll_candidate() {
            return Some(Decision::Candidate(model, kind, candidate));
        }
        let answer = self.poll_answer().map(Decision::Answer);
        answer.or_else(|| self.poll_output().map(Decision::Output))
    }
}

impl Machine for Matchmaker {
    fn kind(&self) -> MachineKind {
        MachineKind::Matchmaker
    }

    fn apply(&mut self, now: Time, input: Input) -> Reply {
        self.set_time(now);
        match input {
            Input::AddLimit(max_in_flight) => return Reply::Model(self.add_model(max_in_flight)),
            Input::AddSharedLimit(other) => return Reply::Model(self.add_model_sharing(other)),
            Input::RemoveModel(model) => self.remove_model(model),
            Input::SetNetwork(network) => self.set_sends_ahead(network.is_remote()),
            Input::AddDevice(kind) => return Reply::Device(self.add_device(kind)),
            Input::RemoveDevice(device) => {
                self.remove_device(device);
            }
            Input::SetLoad(device, until) => self.set_load(device, until),
            Input::Candidate(model, kind, candidate) => self.inform_candidate(model, kind, candidate),
            Input::Answer(answer @ (Answer::Started { grant, .. } | Answer::Declined { grant })) => {
                if !self.is_open(&grant) {
                    return Reply::Foreign;
                }
                self.handle_answer(answer);
            }
            Input::Completion { device, batch } => {
                self.completed(now, device, batch);
            }
            Input::Timeout => {}
            _ => return Reply::Foreign,
        }
        Reply::Done
    }

    fn poll(&mut self) -> Option<Decision> {
        self.poll_grant(self.time()).map(Decision::Grant)
    }
}
