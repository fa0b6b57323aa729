//! The records of a cluster's machines. Records that a log has for every request have short forms.

use serde::{Deserialize, Serialize};

use super::record::{Decision, Input, Reply};
use crate::cluster::{Answer, DispatchReason, ModelOptions, Output, Reject, Request, StartBound};
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId, RequestId};
use crate::journal::machine::{MachineKind, Record, Records};
use crate::journal::names::QueueName;
use crate::journal::writer::{Writer, difference, push, sum};
use crate::time::{Duration, Time};

/// The records of a cluster's machines: the scheduler, its shards and the matchmaker.
///
/// An id in a short form is the difference to the last of its kind. `after` is the time since the
/// input before; times of decisions are relative to the last input. All differences wrap, so that
/// every value comes back.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClusterRecords {
    request: u64,
    batch: u64,
    /// The last completed batch: completions come in another order than dispatches.
    completed: u64,
}

/// A short form, as it is read. [`ClusterRecords`] writes the same: the number of the variant, then
/// its fields.
#[derive(Deserialize)]
enum Short {
    /// A request of one item, of level 0, without a queue expiry.
    Plain { after: i64, id: i64, model: ModelId, budget: i64 },
    /// Any other request.
    Request { after: i64, id: i64, model: ModelId, deadline: Time, queue_expiry: Time, level: u32, size: u32 },
    /// [`Input::Completion`].
    Completion { after: i64, device: DeviceId, batch: i64 },
    /// [`Input::Timeout`].
    Timeout { after: i64 },
    /// [`Output::Dispatch`]. Its members are relative to each other, the first to the last request.
    Dispatch {
        batch: i64,
        device: DeviceId,
        model: ModelId,
        size: u32,
        start: i64,
        expected: Duration,
        bound: StartBound,
        exec: i64,
        latest: i64,
        deadline: i64,
        left: u32,
        members: Vec<i64>,
    },
}

/// The numbers of the variants of [`Short`].
const PLAIN: u8 = 0;
const REQUEST: u8 = 1;
const COMPLETION: u8 = 2;
const TIMEOUT: u8 = 3;
const DISPATCH: u8 = 4;

/// Kinds of devices, shards and models are dense: a number beyond any use would only take memory.
const MOST: u32 = 1 << 20;

impl Records for ClusterRecords {
    type Input = Input;
    type Reply = Reply;
    type Refusal = Reject;
    type Decision = Decision;

    fn are_of(machine: MachineKind) -> bool {
        !matches!(machine, MachineKind::Device(_) | MachineKind::Pipelines | MachineKind::Requests)
    }

    fn refusal(reply: &Reply) -> Option<Reject> {
        if let Reply::Request(Err(reject)) = reply { Some(*reject) } else { None }
    }

    fn is_foreign(reply: &Reply) -> bool {
        *reply == Reply::Foreign
    }

    fn is_sound(input: &Input) -> bool {
        match input {
            Input::AddModel(ModelId(index), _) => *index < MOST,
            Input::AddDevice(kind) | Input::SetDevices(kind, _) | Input::Candidate(_, kind, _) => {
                *kind <= DeviceKind::LARGEST
            }
            _ => true,
        }
    }

    fn request_in(input: &Input) -> Option<RequestId> {
        if let Input::Request(request) = input { Some(request.id) } else { None }
    }

    fn request_ended_by(decision: &Decision) -> Option<RequestId> {
        if let Decision::Output(Output::Drop { request, .. }) = decision { Some(*request) } else { None }
    }

    fn model_of(record: &Record<Self>) -> Option<ModelId> {
        match record {
            Record::Input(_, input) => model_of_input(input),
            Record::Refused(_) => None,
            Record::Decision(Decision::Output(Output::Dispatch { model, .. } | Output::Drop { model, .. })) => {
                Some(*model)
            }
            Record::Decision(Decision::Candidate(model, ..)) => Some(*model),
            Record::Decision(Decision::Answer(Answer::Started { grant, .. } | Answer::Declined { grant })) => {
                Some(grant.model)
            }
            Record::Decision(Decision::Grant(grant)) => Some(grant.model),
        }
    }

    fn is_setup(input: &Input) -> bool {
        matches!(
            input,
            Input::AddModel(..)
                | Input::AddLimit(_)
                | Input::AddSharedLimit(_)
                | Input::RemoveModel(_)
                | Input::SetNetwork(_)
                | Input::SetModelNetwork(..)
                | Input::AddDevice(_)
                | Input::RemoveDevice(_)
                | Input::SetDevices(..)
                | Input::SetWakeMargin(_)
                | Input::SetLent(_)
                | Input::Name(..)
        )
    }

    fn remember(setup: &mut Vec<(Time, Input)>, now: Time, input: &Input) {
        let options_of = |setup: &mut Vec<(Time, Input)>, wanted: ModelId, change: &dyn Fn(&mut ModelOptions)| {
            for (_, before) in setup {
                if let Input::AddModel(model, options) = before
                    && *model == wanted
                {
                    change(options);
                }
            }
        };
        match input {
            Input::SetProfile(model, profiles) => {
                options_of(setup, *model, &|options| options.profiles = (**profiles).clone());
            }
            Input::SetDispatch(model, dispatch) => {
                options_of(setup, *model, &|options| options.dispatch = dispatch.clone());
            }
            Input::RemoveModel(gone) => setup.retain(|(_, before)| model_of_input(before) != Some(*gone)),
            Input::SetDevices(kind, _) => {
                setup.retain(|(_, before)| !matches!(before, Input::SetDevices(other, _) if other == kind));
                setup.push((now, input.clone()));
            }
            input if Self::is_setup(input) => setup.push((now, input.clone())),
            _ => {}
        }
    }

    fn name_in(input: &Input) -> Option<(ModelId, QueueName)> {
        if let Input::Name(model, name) = input { Some((*model, (**name).clone())) } else { None }
    }

    fn write_input(&mut self, log: &mut Vec<u8>, now: Time, after: i64, input: &Input) -> bool {
        match input {
            Input::Request(request) => self.write_request(log, now, after, request),
            Input::Completion { device, batch } => {
                let batch = difference(batch.0, std::mem::replace(&mut self.completed, batch.0));
                numbers(log, COMPLETION, [zigzag(after), u64::from(device.0), zigzag(batch)]);
            }
            Input::Timeout => numbers(log, TIMEOUT, [zigzag(after)]),
            _ => return false,
        }
        true
    }

    fn write_decision(&mut self, log: &mut Vec<u8>, now: Time, decision: &Decision) -> bool {
        matches!(decision, Decision::Output(output) if self.write_output(log, now, output))
    }

    fn read_short<'a>(&mut self, now: Time, bytes: &'a [u8]) -> postcard::Result<(Record<Self>, &'a [u8])> {
        let (short, rest) = postcard::take_from_bytes(bytes)?;
        Ok((self.record(now, short), rest))
    }
}

/// The model that an input is about.
fn model_of_input(input: &Input) -> Option<ModelId> {
    match input {
        Input::Request(request) => Some(request.model),
        Input::Answer(Answer::Started { grant, .. } | Answer::Declined { grant }) | Input::Grant(grant) => {
            Some(grant.model)
        }
        Input::Cancel { model, .. }
        | Input::AddModel(model, _)
        | Input::AddSharedLimit(model)
        | Input::RemoveModel(model)
        | Input::SetProfile(model, _)
        | Input::SetDispatch(model, _)
        | Input::SetBehaviour(model, _)
        | Input::SetModelNetwork(model, _)
        | Input::SetLent(model)
        | Input::Flush(model)
        | Input::Candidate(model, ..)
        | Input::Name(model, _) => Some(*model),
        _ => None,
    }
}

impl ClusterRecords {
    fn write_request(&mut self, log: &mut Vec<u8>, now: Time, after: i64, request: &Request) {
        let Request { id, model, deadline, queue_expiry, level, size } = *request;
        let id = difference(id.0, std::mem::replace(&mut self.request, id.0));
        if size == 1 && level == 0 && queue_expiry == Time::MAX {
            let budget = difference(deadline.as_nanos(), now.as_nanos());
            numbers(log, PLAIN, [zigzag(after), zigzag(id), u64::from(model.0), zigzag(budget)]);
        } else {
            push(log, &(REQUEST, after, id, model, deadline, queue_expiry, level, size));
        }
    }

    /// Writes a dispatch. False: a drop has no short form.
    fn write_output(&mut self, log: &mut Vec<u8>, now: Time, output: &Output) -> bool {
        let Output::Dispatch { batch, device, model, members, size, start, expected, reason } = output else {
            return false;
        };
        let DispatchReason { bound, exec, latest, deadline, left } = *reason;
        let [start, exec, latest, deadline] =
            [*start, exec, latest, deadline].map(|at| difference(at.as_nanos(), now.as_nanos()));
        let batch = difference(batch.0, std::mem::replace(&mut self.batch, batch.0));
        let members = Members { ids: members, last: self.request };
        let place = (DISPATCH, batch, device, model, size, start, expected);
        push(log, &(place, bound, exec, latest, deadline, left, members));
        true
    }

    /// The record of a short form.
    fn record(&mut self, now: Time, short: Short) -> Record<Self> {
        let at = |after: i64| Time::from_nanos(sum(now.as_nanos(), after));
        match short {
            Short::Plain { after, id, model, budget } => {
                self.request = sum(self.request, id);
                let (now, id) = (at(after), RequestId(self.request));
                let deadline = Time::from_nanos(sum(now.as_nanos(), budget));
                let request = Request { id, model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
                Record::Input(now, Input::Request(request))
            }
            Short::Request { after, id, model, deadline, queue_expiry, level, size } => {
                self.request = sum(self.request, id);
                let id = RequestId(self.request);
                Record::Input(at(after), Input::Request(Request { id, model, deadline, queue_expiry, level, size }))
            }
            Short::Completion { after, device, batch } => {
                self.completed = sum(self.completed, batch);
                Record::Input(at(after), Input::Completion { device, batch: BatchId(self.completed) })
            }
            Short::Timeout { after } => Record::Input(at(after), Input::Timeout),
            Short::Dispatch {
                batch,
                device,
                model,
                size,
                start,
                expected,
                bound,
                exec,
                latest,
                deadline,
                left,
                members,
            } => {
                self.batch = sum(self.batch, batch);
                let mut last = self.request;
                let member = |difference: i64| {
                    last = sum(last, difference);
                    RequestId(last)
                };
                let members = members.into_iter().map(member).collect();
                let [start, exec, latest, deadline] = [start, exec, latest, deadline].map(at);
                let reason = DispatchReason { bound, exec, latest, deadline, left };
                let batch = BatchId(self.batch);
                let output = Output::Dispatch { batch, device, model, members, size, start, expected, reason };
                Record::Decision(Decision::Output(output))
            }
        }
    }
}

impl Writer<ClusterRecords> {
    /// As `Writer::input`, without the detour through [`Input`].
    pub fn request(&mut self, now: Time, request: &Request) {
        let after = self.after(now);
        self.records.write_request(&mut self.bytes, now, after, request);
    }

    /// As `Writer::decision`, without the detour through [`Decision`].
    pub fn output(&mut self, output: &Output) {
        if !self.records.write_output(&mut self.bytes, self.now, output) {
            self.decision(&Decision::Output(output.clone()));
        }
    }
}

/// The members of a dispatch.
struct Members<'a> {
    ids: &'a [RequestId],
    /// The last request.
    last: u64,
}

impl Serialize for Members<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut last = self.last;
        serializer.collect_seq(self.ids.iter().map(|id| difference(id.0, std::mem::replace(&mut last, id.0))))
    }
}

/// A signed integer as postcard writes it, small where it is near zero.
fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

/// Appends an entry of numbers only, by hand: a log has one or two for every request.
fn numbers<const N: usize>(log: &mut Vec<u8>, tag: u8, numbers: [u64; N]) {
    const { assert!(N <= 4, "an entry has room for four numbers of up to 10 bytes") };
    let mut entry = [0; 48];
    entry[0] = tag;
    let mut end = 1;
    for mut number in numbers {
        while number >= 0x80 {
            entry[end] = number as u8 | 0x80;
            number >>= 7;
            end += 1;
        }
        entry[end] = number as u8;
        end += 1;
    }
    // A copy of fixed length takes no call.
    let length = log.len() + end;
    log.extend_from_slice(&entry);
    log.truncate(length);
}
