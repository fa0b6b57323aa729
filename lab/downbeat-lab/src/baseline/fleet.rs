//! The devices of a baseline: free ones, running batches, and decisions not yet taken by the
//! driver.

use std::collections::{BTreeSet, VecDeque};

use downbeat_core::cluster::{DropReason, IndexedHeap};
use downbeat_core::{BatchId, DeviceId, Duration, ModelId, RequestId, Time};

use downbeat_sim::Decision;

/// The devices of a baseline, and its decisions.
#[derive(Debug, Default)]
pub(super) struct Fleet {
    free: BTreeSet<DeviceId>,
    /// By device: the running batch.
    running: Vec<Option<BatchId>>,
    /// By busy device: the expected end of its batch.
    ends: IndexedHeap<Time>,
    next_batch: u64,
    decisions: VecDeque<Decision>,
    spare: Vec<Vec<RequestId>>,
}

impl Fleet {
    pub fn add(&mut self) -> DeviceId {
        let id = DeviceId(self.running.len() as u32);
        self.running.push(None);
        self.free.insert(id);
        id
    }

    /// Returns the free device of the smallest id.
    pub fn first_free(&self) -> Option<DeviceId> {
        self.free.first().copied()
    }

    pub fn is_free(&self, device: DeviceId) -> bool {
        self.free.contains(&device)
    }

    /// Returns the time when the next device is expected to be free, or never without devices.
    pub fn next_free(&self, now: Time) -> Time {
        if self.free.is_empty() { self.ends.peek().map_or(Time::MAX, |(at, _)| at.max(now)) } else { now }
    }

    pub fn dispatch(
        &mut self,
        now: Time,
        device: DeviceId,
        model: ModelId,
        members: impl Iterator<Item = RequestId>,
        expected: Duration,
    ) {
        let batch = BatchId(self.next_batch);
        self.next_batch += 1;
        self.free.remove(&device);
        self.running[device.0 as usize] = Some(batch);
        self.ends.set(device.0, now + expected);
        let mut ids = self.spare.pop().unwrap_or_default();
        ids.extend(members);
        let size = ids.len() as u32;
        let start = now;
        self.decisions.push_back(Decision::Dispatch { batch, device, model, members: ids, size, start, expected });
    }

    /// Stops the batch that runs on `device`.
    pub fn preempt(&mut self, device: DeviceId) {
        if let Some(batch) = self.running[device.0 as usize]
            && self.completed(device, batch)
        {
            self.decisions.push_back(Decision::Preempt { batch, device });
        }
    }

    pub fn drop(&mut self, request: RequestId, model: ModelId, reason: DropReason) {
        self.decisions.push_back(Decision::Drop { request, model, reason });
    }

    /// Records a completed batch. Returns `false` if the batch does not run on this device.
    pub fn completed(&mut self, device: DeviceId, batch: BatchId) -> bool {
        let Some(running) = self.running.get_mut(device.0 as usize).filter(|running| **running == Some(batch)) else {
            return false;
        };
        *running = None;
        self.ends.remove(device.0);
        self.free.insert(device)
    }

    pub fn poll_decision(&mut self) -> Option<Decision> {
        self.decisions.pop_front()
    }

    pub fn recycle(&mut self, mut members: Vec<RequestId>) {
        if self.spare.len() < 1024 {
            members.clear();
            self.spare.push(members);
        }
    }
}
