//! A device from the matchmaker's point of view.

use crate::ids::{BatchId, DeviceKind, ModelId};
use crate::time::{Duration, Time};

#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceState {
    pub kind: DeviceKind,
    /// The device's place among the devices of its kind.
    pub place: u32,
    pub present: bool,
    pub granted: Option<ModelId>,
    /// The batch that runs, or is on its way to an idle device.
    pub first: Option<Sent>,
    /// The batch behind `first`.
    pub second: Option<Sent>,
    /// When `first` is expected to be done.
    pub free_at: Time,
    /// When work from outside the scheduler is expected to be done; `Time::ZERO`: there is no such
    /// work.
    pub load: Time,
}

/// A batch that was sent to a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub model: ModelId,
    pub batch: BatchId,
    /// When the batch reaches the device.
    pub arrives: Time,
    /// How long the batch runs.
    pub expected: Duration,
}

impl DeviceState {
    /// A device that is present and has no batch.
    pub fn new(kind: DeviceKind, place: u32) -> Self {
        let (granted, first, second) = (None, None, None);
        DeviceState { kind, place, present: true, granted, first, second, free_at: Time::ZERO, load: Time::ZERO }
    }

    /// Whether the device has no batch, and none is about to come.
    pub fn is_free(&self) -> bool {
        self.first.is_none() && self.granted.is_none()
    }

    /// When the device can begin another batch; `Time::MAX`: it takes no batch.
    pub fn ready_at(&self, sends_ahead: bool) -> Time {
        if !self.present || self.granted.is_some() || self.second.is_some() {
            return Time::MAX;
        }
        match self.first {
            None => Time::ZERO,
            Some(_) if sends_ahead => self.free_at,
            Some(_) => Time::MAX,
        }
    }

    /// Notes that a batch is on its way. Returns when the device is expected to be done with all
    /// its batches.
    pub fn send(&mut self, sent: Sent) -> Time {
        if self.first.is_none() {
            self.first = Some(sent);
            self.free_at = sent.arrives + sent.expected;
            self.free_at
        } else {
            self.second = Some(sent);
            sent.arrives.max(self.free_at) + sent.expected
        }
    }

    /// Notes that a batch is done at `now`. `None`: the device does not have this batch.
    pub fn complete(&mut self, now: Time, batch: BatchId) -> Option<Sent> {
        let Some(sent) = self.first.take_if(|sent| sent.batch == batch) else {
            // The batch, or its completion, overtook the batch before it. Each batch ends by its
            // own completion.
            return self.second.take_if(|sent| sent.batch == batch);
        };
        self.first = self.second.take();
        self.free_at = self.first.map_or(Time::ZERO, |next| next.arrives.max(now) + next.expected);
        Some(sent)
    }
}
