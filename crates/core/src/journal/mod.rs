//! The decision log: the inputs and the decisions of a state machine, so that a run can be read and
//! replayed.
//!
//! A [`Journal`] is a state machine of this crate that writes down its inputs, with their times,
//! and its decisions. [`replay`] feeds the inputs of a log to a fresh machine and compares the
//! decisions. Each [`Machine`] has its own log. Such a machine is the whole [`Scheduler`] on one
//! thread, or the [`DeviceScheduler`](crate::device::DeviceScheduler) of a device. If a driver runs
//! the [`Shard`]s and the [`Matchmaker`] apart, each of them has a log. The
//! [`PipelineBook`](pipelines::PipelineBook) of a server has the requests of its pipelines.
//!
//! **Format.** A log begins with `DBLOG`, a byte for the version of the format, and the
//! [`MachineKind`]. Blocks of entries follow. Each block has a [`BlockHead`] and can be read without
//! the blocks before. The entries are in the form of
//! [`postcard`](https://postcard.jamesmunns.com/wire-format). An entry is a tag and its content: an
//! input, with the time since the input before, or a refusal, or a decision. [`Records`] names the
//! types of the content, and may have shorter forms: a request takes about nine bytes in the form
//! of `cluster/short.rs`. The format has version 5. A log that was cut off is read up to its last
//! whole entry.
//!
//! **Names and clocks.** Inputs name the models of a log ([`Names`]). A block has the time of the
//! wall clock, if the driver gives one. [`requests`] has the requests by the names that their
//! clients gave them.
//!
//! **Cost.** `lab/downbeat-lab/examples/journal.rs` measures some nanoseconds a request. Nothing is
//! allocated once the buffer has grown. A journal that is off costs a branch an input and a branch
//! a decision. The written bytes stay in memory until [`Journal::take_log`]: the driver must call
//! it often enough to bound the memory.
//!
//! ```
//! use downbeat_core::cluster::Scheduler;
//! use downbeat_core::journal::{Form, Journal, replay, show};
//! use downbeat_core::journal::cluster::Input;
//! use downbeat_core::{DeviceKind, Time};
//!
//! let mut journal = Journal::on(Scheduler::new());
//! journal.apply(Time::from_nanos(5), Input::AddDevice(DeviceKind(0)));
//! while journal.poll().is_some() {}
//! let mut log = Vec::new();
//! journal.take_log(&mut log);
//!
//! assert_eq!(replay(&log)?.divergence, None);
//! let lines: Vec<String> = show(&log, Form::Json)?.collect::<Result<_, _>>()?;
//! assert_eq!(lines, [r#"{"at":0,"begin":"the scheduler"}"#, r#"{"at":5,"told":{"add_device":0}}"#]);
//! # Ok::<(), downbeat_core::journal::LogError>(())
//! ```

mod block;
pub mod cluster;
pub mod device;
mod entry;
mod machine;
mod names;
pub mod pipelines;
mod reader;
mod replay;
pub mod requests;
mod show;
mod writer;

use crate::cluster::{Answer, Candidate, Grant, Matchmaker, Output, Reject, Request, Scheduler, Shard, Ticket};
use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId, RequestId};
use crate::time::Time;

pub use block::{BlockHead, BlockKind};
use cluster::{ClusterRecords, Decision, Input};
pub use entry::Entry;
pub use machine::{Fact, Machine, MachineKind, NoDecision, Record, Records};
pub use names::{Names, QueueName};
pub use reader::{LogError, machine_of, read, read_blocks};
pub use replay::{Divergence, Replayed, replay};
pub use show::{Form, Lines, Shown, ShownEntries, heading, show, show_entries};
use writer::Writer;

/// A machine and the writer of its inputs and decisions, if it has one. The journal changes no
/// answer of the machine.
///
/// Every input must come through the journal, and every decision must be polled from it. The driver
/// polls all decisions of a [`Scheduler`] after each input, and all of a [`Matchmaker`] after
/// [`Input::Timeout`] only.
#[derive(Debug)]
pub struct Journal<M: Machine> {
    machine: M,
    writer: Option<Writer<M::Records>>,
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
    pub fn apply(&mut self, now: Time, input: <M::Records as Records>::Input) -> <M::Records as Records>::Reply {
        let Some(writer) = &mut self.writer else { return self.machine.apply(now, input) };
        writer.input(now, &input);
        let reply = self.machine.apply(now, input);
        if let Some(refusal) = M::Records::refusal(&reply) {
            writer.refusal(&refusal);
        }
        reply
    }

    /// The machine's next decision.
    pub fn poll(&mut self) -> Option<<M::Records as Records>::Decision> {
        let decision = self.machine.poll();
        if let (Some(writer), Some(decision)) = (&mut self.writer, &decision) {
            writer.decision(decision);
        }
        decision
    }

    /// Moves the bytes that were written since the last call to the end of `into`.
    pub fn take_log(&mut self, into: &mut Vec<u8>) {
        self.take_log_at(0, into);
    }

    /// As [`Journal::take_log`], with a wall clock: the driver's time zero is `zero_unix_ns`
    /// nanoseconds after the Unix epoch.
    pub fn take_log_at(&mut self, zero_unix_ns: u64, into: &mut Vec<u8>) {
        if let Some(writer) = &mut self.writer {
            writer.take(zero_unix_ns, into);
        }
    }

    /// Begins a further file of the log: moves the file's first bytes to the end of `into`. These bytes
    /// have the setup of the machine so far, such as the names of models. So the file can be read
    /// alone. Take the log before: the bytes until now belong to the file before.
    pub fn begin_file(&mut self, zero_unix_ns: u64, into: &mut Vec<u8>) {
        if let Some(writer) = &mut self.writer {
            writer.begin_file(zero_unix_ns, into);
        }
    }

    /// Ends the log, without the bytes that were not taken. The bytes that were taken can be
    /// replayed.
    pub fn stop(&mut self) {
        self.writer = None;
    }

    /// Bytes that were written since the last [`Journal::take_log`].
    pub fn pending(&self) -> usize {
        self.writer.as_ref().map_or(0, Writer::pending)
    }
}

/// The calls that a driver makes most often, without the detour through [`Input`] and [`Decision`].
impl<M: Machine<Records = ClusterRecords>> Journal<M> {
    /// Writes down an input that the machine is about to get.
    fn note(&mut self, now: Time, input: impl FnOnce() -> Input) {
        if let Some(writer) = &mut self.writer {
            writer.input(now, &input());
        }
    }

    /// Hands the machine a request.
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
            writer.refusal(reject);
        }
        result
    }

    /// The machine's next output.
    fn output(&mut self, poll: impl FnOnce(&mut M) -> Option<Output>) -> Option<Output> {
        let output = poll(&mut self.machine);
        if let (Some(writer), Some(output)) = (&mut self.writer, &output) {
            writer.output(output);
        }
        output
    }

    /// The machine's next decision of another kind.
    fn other<T: Copy>(
        &mut self,
        poll: impl FnOnce(&mut M) -> Option<T>,
        decision: impl FnOnce(T) -> Decision,
    ) -> Option<T> {
        let polled = poll(&mut self.machine);
        if let (Some(writer), Some(polled)) = (&mut self.writer, polled) {
            writer.decision(&decision(polled));
        }
        polled
    }
}

/// The calls that a driver makes most often.
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
        self.note(now, || Input::Cancel { model, ticket });
        self.machine.handle_cancel(now, model, ticket)
    }

    /// As [`Scheduler::handle_completion`].
    pub fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        self.note(now, || Input::Completion { device, batch });
        self.machine.handle_completion(now, device, batch);
    }

    /// As [`Scheduler::handle_timeout`].
    pub fn handle_timeout(&mut self, now: Time) {
        self.note(now, || Input::Timeout);
        self.machine.handle_timeout(now);
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

/// The calls that a driver makes most often.
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
        self.other(Shard::poll_candidate, |(model, kind, candidate)| Decision::Candidate(model, kind, candidate))
    }

    /// As [`Shard::poll_answer`].
    pub fn poll_answer(&mut self) -> Option<Answer> {
        self.other(Shard::poll_answer, Decision::Answer)
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

/// The calls that a driver makes most often. A call without a time has the time of the event
/// before.
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
    pub fn completed(&mut self, now: Time, device: DeviceId, batch: BatchId) -> Option<ModelId> {
        self.note(now, || Input::Completion { device, batch });
        self.machine.set_time(now);
        self.machine.completed(now, device, batch)
    }

    /// Begins to poll grants at `now`. Every grant must be polled before the next input, by
    /// [`Journal::poll_grant`].
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
        self.other(|machine| machine.poll_grant(machine.time()), Decision::Grant)
    }
}
