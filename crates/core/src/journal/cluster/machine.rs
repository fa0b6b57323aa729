//! The machines of a cluster: the whole scheduler, or its shards and the matchmaker apart.

use super::record::{Decision, Input, Reply};
use super::short::ClusterRecords;
use crate::cluster::{Answer, Matchmaker, Scheduler, Shard};
use crate::journal::machine::{Machine, MachineKind};
use crate::time::Time;

impl Machine for Scheduler {
    type Records = ClusterRecords;

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
            Input::SetBehaviour(model, behaviour) => self.set_behaviour(now, model, behaviour),
            Input::SetOrder(order) => self.set_order(now, order),
            Input::SetLent(model) => self.set_lent(now, model),
            Input::Flush(model) => self.flush(now, model),
            Input::SetWakeMargin(margin) => self.set_wake_margin(now, margin),
            Input::SetNetwork(network) => self.set_network(now, network),
            Input::SetModelNetwork(model, networks) => self.set_model_network(now, model, &networks),
            Input::AddDevice(kind) => return Reply::Device(self.add_device(now, kind)),
            Input::RemoveDevice(device) => self.remove_device(now, device),
            Input::SetLoad(device, until) => self.set_load(device, until),
            Input::Trial(_) | Input::Name(..) => {}
            _ => return Reply::Foreign,
        }
        Reply::Done
    }

    fn poll(&mut self) -> Option<Decision> {
        self.poll_output().map(Decision::Output)
    }

    /// The decisions are made by the input and wait.
    fn is_polled_after(&self, _input: &Input) -> bool {
        true
    }
}

impl Machine for Shard {
    type Records = ClusterRecords;

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
            Input::SetBehaviour(model, behaviour) => self.set_behaviour(now, model, behaviour),
            Input::SetLent(model) => self.set_lent(now, model),
            Input::Flush(model) => self.flush(now, model),
            Input::SetWakeMargin(margin) => self.set_wake_margin(now, margin),
            Input::SetNetwork(network) => self.set_network(now, network),
            Input::SetModelNetwork(model, networks) => self.set_model_network(now, model, &networks),
            Input::SetDevices(kind, devices) => self.set_devices(now, kind, devices),
            Input::SetOtherDemand(demand) => self.set_other_demand(now, demand),
            Input::Grant(grant) => self.handle_grant(now, grant),
            Input::Trial(_) | Input::Name(..) => {}
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
    type Records = ClusterRecords;

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
            Input::SetModelNetwork(_, networks) => {
                if networks.iter().any(|(_, network)| network.is_remote()) {
                    self.set_sends_ahead(true);
                }
            }
            Input::AddDevice(kind) => return Reply::Device(self.add_device(kind)),
            Input::RemoveDevice(device) => {
                self.remove_device(device);
            }
            Input::SetOrder(order) => self.set_order(order),
            Input::SetLent(model) => self.set_lent(model),
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
            Input::Timeout | Input::Name(..) => {}
            _ => return Reply::Foreign,
        }
        Reply::Done
    }

    fn poll(&mut self) -> Option<Decision> {
        self.poll_grant(self.time()).map(Decision::Grant)
    }

    /// A poll makes a grant, and a poll that gave nothing has consequences too. All polls follow a
    /// timeout.
    fn is_polled_after(&self, input: &Input) -> bool {
        *input == Input::Timeout
    }
}
