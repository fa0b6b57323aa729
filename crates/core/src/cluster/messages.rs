//! What the models' queues and the matchmaker say to each other.

use serde::{Deserialize, Serialize};

use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId};
use crate::time::{Duration, Time};

/// The batch that a model would send next to a device of one kind, and when: it may start in `[exec, latest]`, never before
/// (Symphony §3.1, *schedulable window*).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Candidate {
    /// Items.
    pub size: u32,
    /// The earliest start.
    pub exec: Time,
    /// The last start that meets its earliest deadline.
    pub latest: Time,
    /// When its first request arrived: of candidates that are equally urgent, the one that has waited longest goes first. Those without
    /// a deadline are all equally urgent.
    pub since: Time,
    /// How long before its start it is sent: [`super::NetworkBudget::delay`] of its size.
    pub delay: Duration,
    /// How long it runs there, `l(size)`.
    pub takes: Duration,
    /// `l(max_batch)` of the model on this kind, by which the kinds are compared: the least is the fastest.
    pub pace: Duration,
}

impl Candidate {
    /// When its model timer fires: when it has to be sent to start at `exec`.
    pub(crate) fn send(&self) -> Time {
        self.exec - self.delay
    }
}

/// A device for a model, now. To be answered with an [`Answer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Grant {
    /// Whose candidate may be sent.
    pub model: ModelId,
    /// Where.
    pub device: DeviceId,
    /// Of which kind the device is: whose candidate it takes.
    pub kind: DeviceKind,
    /// When the device is expected to be done with what it has: the batch cannot start before. `Time::ZERO`: it has nothing.
    pub free_at: Time,
}

/// What a model's queue says to a [`Grant`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// A batch is on its way there.
    Started {
        /// What was granted.
        grant: Grant,
        /// The batch, as its completion will name it.
        batch: BatchId,
        /// When it gets there.
        arrives: Time,
        /// How long it runs.
        expected: Duration,
    },
    /// There was nothing to run after all.
    Declined {
        /// What was granted.
        grant: Grant,
    },
}
