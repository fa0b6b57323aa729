//! The messages between the models' queues and the matchmaker.

use serde::{Deserialize, Serialize};

use crate::ids::{BatchId, DeviceId, DeviceKind, ModelId};
use crate::time::{Duration, Time};

/// The batch that a model would send next to a device of one kind, and its schedulable window
/// (Symphony §3.1). The batch may start in `[exec, latest]`, never before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Candidate {
    /// Items of the batch.
    pub size: u32,
    /// The earliest start.
    pub exec: Time,
    /// The last start that meets the batch's earliest deadline.
    pub latest: Time,
    /// When the batch's first request arrived. Of equally urgent candidates, the one that has
    /// waited longest goes first. Candidates without a deadline are all equally urgent.
    pub since: Time,
    /// How long before its start the batch is sent: [`super::NetworkBudget::delay`] of its size.
    pub delay: Duration,
    /// How long the batch runs on its device: `l(size)`.
    pub takes: Duration,
    /// `l(max_batch)` of the model on this kind, by which kinds are compared: the kind with the
    /// least pace is the fastest.
    pub pace: Duration,
}

impl Candidate {
    /// When the candidate's model timer fires. A batch sent then can start at `exec`.
    pub(crate) fn send(&self) -> Time {
        self.exec - self.delay
    }
}

/// Grants a device to a model, now. The model's queue must send an [`Answer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Grant {
    /// The model whose candidate may be sent.
    pub model: ModelId,
    /// The granted device.
    pub device: DeviceId,
    /// The device's kind, whose candidate the device takes.
    pub kind: DeviceKind,
    /// When the device is expected to be done with its batches: the new batch cannot start before.
    /// `Time::ZERO`: it has no batch.
    pub free_at: Time,
}

/// The answer of a model's queue to a [`Grant`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// A batch is on its way to the device.
    Started {
        /// The answered grant.
        grant: Grant,
        /// The batch, as its completion will name it.
        batch: BatchId,
        /// When the batch reaches the device.
        arrives: Time,
        /// How long the batch runs.
        expected: Duration,
    },
    /// The queue had no batch to run after all.
    Declined {
        /// The answered grant.
        grant: Grant,
    },
}
