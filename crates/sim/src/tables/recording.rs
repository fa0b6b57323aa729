//! The batches and requests of a run, for drawing.

use downbeat_core::{DeviceId, ModelId, RequestId, Time};

/// The batches and requests of a run, for drawing. At most [`MAX_REQUESTS`] requests; later ones
/// are left out, with their batches.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Recording {
    /// The batches, in order of their start.
    pub batches: Vec<RecordedBatch>,
    /// The requests, in order of arrival.
    pub requests: Vec<RecordedRequest>,
}

/// A batch that ran.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordedBatch {
    /// The device that ran the batch.
    pub device: DeviceId,
    /// The batch's model.
    pub model: ModelId,
    /// The batch's start.
    pub start: Time,
    /// The batch's end, or its preemption; `Time::MAX` if the run ended before.
    pub end: Time,
    /// The number of items.
    pub size: u32,
    /// Whether it was stopped before its end.
    pub preempted: bool,
}

/// A request that arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordedRequest {
    /// The arrival.
    pub arrival: Time,
    /// The request's model.
    pub model: ModelId,
    /// The index of the request's last batch.
    pub batch: Option<usize>,
    /// Whether it was answered by its deadline.
    pub good: bool,
}

/// Most requests that are recorded.
pub const MAX_REQUESTS: usize = 20_000;

impl Recording {
    pub(crate) fn arrival(&mut self, now: Time, model: ModelId) {
        if self.requests.len() < MAX_REQUESTS {
            self.requests.push(RecordedRequest { arrival: now, model, batch: None, good: false });
        }
    }

    /// Records a batch that starts. Returns its index, or `None` if no member is recorded.
    pub(crate) fn start(&mut self, batch: RecordedBatch, members: &[RequestId]) -> Option<usize> {
        let index = self.batches.len();
        let mut known = false;
        for member in members {
            if let Some(request) = self.requests.get_mut(member.0 as usize) {
                request.batch = Some(index);
                known = true;
            }
        }
        known.then(|| {
            self.batches.push(batch);
            index
        })
    }

    pub(crate) fn end(&mut self, index: usize, now: Time, preempted: bool) {
        if let Some(batch) = self.batches.get_mut(index) {
            (batch.end, batch.preempted) = (now, preempted);
        }
    }

    pub(crate) fn good(&mut self, request: RequestId) {
        if let Some(request) = self.requests.get_mut(request.0 as usize) {
            request.good = true;
        }
    }
}
