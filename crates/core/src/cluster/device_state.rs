//! A device as the matchmaker knows it.

use crate::ids::{BatchId, DeviceKind, ModelId};
use crate::time::{Duration, Time};

#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceState {
    pub kind: DeviceKind,
    /// Its place among the devices of its kind.
    pub place: u32,
    pub present: bool,
    pub granted: Option<ModelId>,
    /// What runs, or is on its way to an idle device.
    pub first: Option<Sent>,
    /// What comes after that.
    pub second: Option<Sent>,
    /// When `first` is expected to be done.
    pub free_at: Time,
    /// When what others run there is expected to be done; `Time::ZERO`: there is nothing.
    pub load: Time,
}

/// A batch that was sent to a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub model: ModelId,
    pub batch: BatchId,
    /// When it gets there.
    pub arrives: Time,
    /// How long it runs.
    pub expected: Duration,
}

impl DeviceState {
    /// Present, without a batch.
    pub fn new(kind: DeviceKind, place: u32) -> Self {
        let (granted, first, second) = (None, None, None);
        DeviceState { kind, place, present: true, granted, first, second, free_at: Time::ZERO, load: Time::ZERO }
    }

    /// Whether it has no batch, and none is about to come.
    pub fn is_free(&self) -> bool {
        self.first.is_none() && self.granted.is_none()
    }

    /// When it can begin another batch; `Time::MAX`: it takes none.
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

    /// A batch is on its way; when the device is expected to be done with all.
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

    /// A batch is done at `now`; `None`: it is not there.
    pub fn complete(&mut self, now: Time, batch: BatchId) -> Option<Sent> {
        let Some(sent) = self.first.take_if(|sent| sent.batch == batch) else {
            // It overtook the batch before it, or that one's completion: each ends by its own.
            return self.second.take_if(|sent| sent.batch == batch);
        };
        self.first = self.second.take();
        self.free_at = self.first.map_or(Time::ZERO, |next| next.arrives.max(now) + next.expected);
        Some(sent)
    }
}
