//! What a driver brings: a clock, payloads, and a place for the decision logs.

use std::fmt::Debug;

use downbeat_core::Time;
use downbeat_core::cluster::{Output, Shard};
use downbeat_core::journal::{Journal, Machine, MachineKind};

/// What is done with events and decisions: the part of a driver that has a clock and knows
/// payloads.
pub trait Handler: Send + Sync + 'static {
    /// What comes to a shard: a request, a cancellation.
    type Event: Send;
    /// What a shard has beside its queues: the payloads of what waits there. Only whoever is in the
    /// shard touches it.
    type RequestTable: Send;

    /// The time. It never goes back, on any thread, seen from any other.
    fn now(&self) -> Time;

    /// Does what an event asks for, with the `handle_*` of the shard.
    fn handle(&self, moment: Moment, shard: &mut Journal<Shard>, requests: &mut Self::RequestTable, event: Self::Event);

    /// Carries a decision out. The members of a dispatch are to be recycled, in the shard or later
    /// in any other.
    fn carry_out(&self, moment: Moment, shard: &mut Journal<Shard>, requests: &mut Self::RequestTable, output: Output);
}

/// Bytes of a log that are written before the sink gets them.
pub const LOG_BUFFER: usize = 64 << 10;

/// Where the decision logs go ([`downbeat_core::journal`]).
pub trait LogSink: Send + Sync + Debug {
    /// The next bytes of a machine's log, whole entries. It must not wait: whoever calls it has an
    /// event to work off. `false`: the log ends before these bytes, and the machine is not written
    /// down any more.
    fn append(&self, machine: MachineKind, bytes: Vec<u8>) -> bool;
}

/// Gives a sink the log of a machine once it has at least so many bytes. Ends the log if the sink
/// refuses them.
pub fn hand_over<M: Machine>(sink: &dyn LogSink, journal: &mut Journal<M>, at_least: usize) {
    if journal.pending() >= at_least {
        let mut bytes = Vec::with_capacity(journal.pending());
        journal.take_log(&mut bytes);
        if !sink.append(journal.machine().kind(), bytes) {
            journal.stop();
        }
    }
}

/// When something is handled, and what is known by then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moment {
    /// The time.
    pub now: Time,
    /// When the next device is expected to be free, as the matchmaker said last: `Time::ZERO` if
    /// one is, `Time::MAX` if there is none at all.
    pub expected_free: Time,
}
