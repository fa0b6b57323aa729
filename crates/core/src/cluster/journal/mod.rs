//! The decision log: what came in and what was decided, with the numbers behind it, so that a run can be read and played again.
//!
//! A [`Journal`] is a state machine of this crate that writes down its inputs, with their times, and its decisions. [`replay`] feeds the inputs of
//! a log to a fresh machine and says whether it decides the same, or where it does not. It is for each of the machines: the whole
//! [`Scheduler`] on one thread, or a [`Shard`] and the [`Matchmaker`] of a driver that runs these apart, each with its own log.
//!
//! **Format.** Eight bytes (`DBLOG`, the format's version, the machine, 0; for a shard then its index and the number of shards), then one
//! entry after another: the [`postcard`](https://postcard.jamesmunns.com/wire-format) form of `Wire` in `wire.rs`. Integers are variable in length, and
//! what grows (times, request ids, batch ids) is written as the difference to the entry before, so that a request takes about nine
//! bytes and its share of a dispatch one or two. A log that was cut off is read up to its last whole entry. Version 2.
//!
//! **Cost.** `lab/downbeat-lab/examples/journal.rs` measures it: some nanoseconds a request, without an allocation once the buffer has grown. What is
//! written stays in memory until [`Journal::take_log`]; that it is taken often enough is the driver's to see to.

mod machine;
mod reader;
mod record;
mod text;
mod trial;
mod wire;

use super::matchmaker::Matchmaker;
use super::messages::{Answer, Candidate, Grant};
use super::output::{Output, Reject};
use super::request::Request;
use super::request_queue::Ticket;
use super::scheduler::Scheduler;
use super::shard::Shard;
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId, RequestId};
use crate::time::Time;

pub use machine::{Machine, MachineKind};
pub use reader::{Divergence, LogError, Replayed, read, replay};
pub use record::{Decision, Entry, Input, Record, Reply};
pub use trial::{CandidateRecord, TrialRecord};
use wire::Writer;

/// A machine that writes down its inputs and its decisions, if it is told to.
///
/// Every input has to come through the journal and every decision has to be polled from it, a [`Scheduler`]'s after each input, a
/// [`Matchmaker`]'s after [`Input::Timeout`] only, and then all: what is written down is what passes. It changes nothing of what the machine says.
#[derive(Debug)]
pub struct Journal<M> {
    machine: M,
    writer: Option<Writer>,
}

impl<M: Machine> Journal<M> {
    /// A fresh machine that is not written down.
    pub fn off(machine: M) -> Self {
        Journal { machine, writer: None }
    }

    /// A fresh machine that is written down from its first input on.
    pub fn on(machine: M) -> Self {
        let writer = Some(Writer::new(machine.kind()));
        Journal { machine, writer }
    }

    /// The machine, to look at.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// Hands the machine an input.
    pub fn apply(&mut self, now: Time, input: Input) -> Reply {
        if let Some(writer) = &mut self.writer {
            writer.input(now, &input);
        }
        let reply = self.machine.apply(now, input);
        if let (Some(writer), Reply::Request(Err(reject))) = (&mut self.writer, &reply) {
            writer.reject(reject);
        }
        reply
    }

    /// Writes an input down that the machine is about to get.
    fn note(&mut self, now: Time, input: impl FnOnce() -> Input) {
        if let Some(writer) = &mut self.writer {
            writer.input(now, &input());
        }
    }

    /// Hands the machine a request, without the detour through [`Input`].
    fn request(
        &mut self,
        now: Time,
        request: &Request,
        handle: impl FnOnce(&mut M) -> Result<Ticket, Reject>,
    ) -> Result<Ticket, Reject> {
        if let Some(writer) = &mut self.writer {
            writer.request(now, request);
        }
        let result = handle(&mut self.machine);
        if let (Some(writer), Err(reject)) = (&mut self.writer, &result) {
            writer.reject(reject);
        }
        result
    }

    /// The machine's next output, without the detour through [`Decision`].
    fn output(&mut self, poll: impl FnOnce(&mut M) -> Option<Output>) -> Option<Output> {
        let output = poll(&mut self.machine);
        if let (Some(writer), Some(output)) = (&mut self.writer, &output) {
            writer.output(output);
        }
        output
    }

    /// The machine's next decision.
    pub fn poll(&mut self) -> Option<Decision> {
        let decision = self.machine.poll();
        if let (Some(writer), Some(decision)) = (&mut self.writer, &decision) {
            writer.decision(decision);
        }
        decision
    }

    /// Moves what was written since the last time to the end of `into`.
    pub fn take_log(&mut self, into: &mut Vec<u8>) {
        if let Some(writer) = &mut self.writer {
            into.append(&mut writer.bytes);
        }
    }

    /// From now on nothing is written down; what was not taken is lost. What was taken plays again up to here.
    pub fn stop(&mut self) {
        self.writer = None;
    }

    /// Bytes that were written since the last [`Journal::take_log`].
    pub fn pending(&self) -> usize {
        self.writer.as_ref().map_or(0, |writer| writer.bytes.len())
    }
}

/// What is asked most often, without the detour through [`Input`].
impl Journal<Scheduler> {
    /// As [`Scheduler::handle_request`].
    ///
    /// # Errors
    /// As there.
    pub fn handle_request(&mut self, now: Time, request: Request) -> Result<Ticket, Reject> {
        self.request(now, &request, |machine| machine.handle_request(now, request))
    }

    /// As [`Scheduler::handle_cancel`].
    pub fn handle_cancel(&mut self, now: Time, model: ModelId, ticket: Ticket) -> bool {
        self.apply(now, Input::Cancel { model, ticket }) == Reply::Cancel(true)
    }

    /// As [`Scheduler::handle_completion`].
    pub fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        self.apply(now, Input::Completion { device, batch });
    }

    /// As [`Scheduler::handle_timeout`].
    pub fn handle_timeout(&mut self, now: Time) {
        self.apply(now, Input::Timeout);
    }

    /// As [`Scheduler::poll_output`].
    pub fn poll_output(&mut self) -> Option<Output> {
        self.output(Scheduler::poll_output)
    }

    /// As [`Scheduler::recycle`].
    pub fn recycle(&mut self, members: Vec<RequestId>) {
        self.machine.recycle(members);
    }
}

/// What a driver asks most often, without the detour through [`Input`] and [`Decision`].
impl Journal<Shard> {
    /// As [`Shard::handle_request`].
    ///
    /// # Errors
    /// As there.
    pub fn handle_request(&mut self, now: Time, request: &Request) -> Result<Ticket, Reject> {
        self.request(now, request, |machine| machine.handle_request(now, request))
    }

    /// As [`Shard::handle_cancel`].
    pub fn handle_cancel(&mut self, now: Time, model: ModelId, ticket: Ticket) -> bool {
        self.note(now, || Input::Cancel { model, ticket });
        self.machine.handle_cancel(now, model, ticket)
    }

    /// As [`Shard::handle_grant`].
    pub fn handle_grant(&mut self, now: Time, grant: Grant) {
        self.note(now, || Input::Grant(grant));
        self.machine.handle_grant(now, grant);
    }

    /// As [`Shard::poll_candidate`].
    pub fn poll_candidate(&mut self) -> Option<(ModelId, DeviceKind, Option<Candidate>)> {
        let changed = self.machine.poll_candidate();
        if let (Some(writer), Some((model, kind, candidate))) = (&mut self.writer, changed) {
            writer.decision(&Decision::Candidate(model, kind, candidate));
        }
        changed
    }

    /// As [`Shard::poll_answer`].
    pub fn poll_answer(&mut self) -> Option<Answer> {
        let answer = self.machine.poll_answer();
        if let (Some(writer), Some(answer)) = (&mut self.writer, answer) {
            writer.decision(&Decision::Answer(answer));
        }
        answer
    }

    /// As [`Shard::poll_output`].
    pub fn poll_output(&mut self) -> Option<Output> {
        self.output(Shard::poll_output)
    }

    /// As [`Shard::recycle`].
    pub fn recycle(&mut self, members: Vec<RequestId>) {
        self.machine.recycle(members);
    }
}

/// What a driver asks most often. What has no time of its own is as of the event before.
impl Journal<Matchmaker> {
    /// As [`Matchmaker::inform_candidate`].
    pub fn inform_candidate(&mut self, model: ModelId, kind: DeviceKind, candidate: Option<Candidate>) {
        self.note(self.machine.time(), || Input::Candidate(model, kind, candidate));
        self.machine.inform_candidate(model, kind, candidate);
    }

    /// As [`Matchmaker::handle_answer`].
    pub fn handle_answer(&mut self, answer: Answer) {
        self.note(self.machine.time(), || Input::Answer(answer));
        self.machine.handle_answer(answer);
    }

    /// As [`Matchmaker::completed`].
    pub fn completed(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        self.note(now, || Input::Completion { device, batch });
        self.machine.set_time(now);
        self.machine.completed(now, device, batch);
    }

    /// Begins to poll grants at `now`: up to the next input every one has to be polled, by [`Journal::poll_grant`].
    pub fn handle_timeout(&mut self, now: Time) {
        self.note(now, || Input::Timeout);
        self.machine.set_time(now);
    }

    /// As [`Matchmaker::expected_free`], which is no input.
    pub fn expected_free(&mut self) -> Time {
        self.machine.expected_free()
    }

    /// As [`Matchmaker::poll_grant`], at the time of the last event.
    pub fn poll_grant(&mut self) -> Option<Grant> {
        let grant = self.machine.poll_grant(self.machine.time());
        if let (Some(writer), Some(grant)) = (&mut self.writer, grant) {
            writer.decision(&Decision::Grant(grant));
        }
        grant
    }
}
