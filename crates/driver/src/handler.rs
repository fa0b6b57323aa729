//! The interface of a driver: a clock, payloads, and a place for the decision logs.

use std::fmt::Debug;

use downbeat_core::Time;
use downbeat_core::cluster::{Output, Shard};
use downbeat_core::journal::{Journal, Machine, MachineKind};

/// Handles events and carries out decisions: the part of a driver that has a clock and knows
/// payloads.
pub trait Handler: Send + Sync + 'static {
    /// An event of a shard: a request or a cancellation.
    type Event: Send;
    /// A shard's data beside its queues: the payloads of its waiting requests. Only the thread in
    /// the shard touches them.
    type RequestTable: Send;
    /// The wishes of a thread that posts an event: handed down to the decisions that the thread
    /// carries out. The default: no wish.
    type Context: Default;

    /// The present time. The time never goes back on any thread, as seen from any other.
    fn now(&self) -> Time;

    /// Does the work of an event, with the `handle_*` of the shard.
    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, requests: &mut Self::RequestTable, event: Self::Event);

    /// Carries a decision out, on a thread with this context. Recycle the members of a dispatch in
    /// this shard, or later in any shard.
    fn carry_out(
        &self,
        moment: Moment,
        shard: &mut Journal<Shard>,
        requests: &mut Self::RequestTable,
        output: Output,
        context: &mut Self::Context,
    );
}

/// Bytes of a log that are collected before the sink gets them.
pub const LOG_BUFFER: usize = 64 << 10;

/// The sink of the decision logs ([`downbeat_core::journal`]).
pub trait LogSink: Send + Sync + Debug {
    /// Takes the next bytes of a machine's log, in whole entries. This must not wait, because the
    /// caller has an event to handle. `false`: the log ends before these bytes, and the machine is
    /// not logged any more.
    fn append(&self, machine: MachineKind, bytes: Vec<u8>) -> bool;

    /// Whether the next bytes of a machine's log should be in a further file. The sink then gets them
    /// by [`LogSink::begin_file`].
    fn wants_file(&self, _machine: MachineKind) -> bool {
        false
    }

    /// Takes the first bytes of a further file of a machine's log. `false`: as for
    /// [`LogSink::append`].
    fn begin_file(&self, _machine: MachineKind, _bytes: Vec<u8>) -> bool {
        false
    }

    /// The time zero of [`Handler::now`], in nanoseconds since the Unix epoch, as the wall clock says
    /// now; 0: the logs have no wall clock.
    fn zero_unix_ns(&self) -> u64 {
        0
    }
}

/// Gives a sink the log of a machine that has at least `at_least` bytes. Ends the log if the sink
/// refuses the bytes.
pub fn hand_over<M: Machine>(sink: &dyn LogSink, journal: &mut Journal<M>, at_least: usize) {
    if journal.pending() >= at_least {
        let mut bytes = Vec::with_capacity(journal.pending());
        journal.take_log_at(sink.zero_unix_ns(), &mut bytes);
        let machine = journal.machine().kind();
        let mut goes_on = sink.append(machine, bytes);
        if goes_on && sink.wants_file(machine) {
            let mut bytes = Vec::new();
            journal.begin_file(sink.zero_unix_ns(), &mut bytes);
            goes_on = sink.begin_file(machine, bytes);
        }
        if !goes_on {
            journal.stop();
        }
    }
}

/// The time of an event, and the state of the devices known at that time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moment {
    /// The present time.
    pub now: Time,
    /// When the next device is expected to be free, by the matchmaker's last word. `Time::ZERO` if
    /// a device is free, `Time::MAX` without devices.
    pub expected_free: Time,
}
