//! Every batch and request of a run, to be drawn.

use downbeat_core::{DeviceId, ModelId, RequestId, Time};

/// Every batch and request of a run, to be drawn. At most [`MAX_REQUESTS`] requests; later ones are left out, with their batches.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Recording {
    /// In order of their start.
    pub batches: Vec<RecordedBatch>,
    /// In order of arrival.
    pub requests: Vec<RecordedRequest>,
}

/// A batch that ran.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordedBatch {
    /// Where.
    pub device: DeviceId,
    /// Of which model.
    pub model: ModelId,
    /// Its start.
    pub start: Time,
    /// Its end, or when it was preempted; `Time::MAX` if the run ended before.
    pub end: Time,
    /// Items.
    pub size: u32,
    /// Whether it was stopped before its end.
    pub preempted: bool,
}

/// A request that arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordedRequest {
    /// When it arrived.
    pub arrival: Time,
    /// For which model.
    pub model: ModelId,
    /// Index of the batch that it was in last.
    pub batch: Option<usize>,
    /// Whether it was answered by its deadline.
    pub good: bool,
}

/// Requests that are recorded, at most.
pub const MAX_REQUESTS: usize = 20_000;

impl Recording {
    pub(crate) fn arrival(&mut self, now: Time, model: ModelId) {
        if self.requests.len() < MAX_REQUESTS {
            self.requests.push(RecordedRequest { arrival: now, model, batch: None, good: false });
        }
    }

    /// A batch starts; its index.
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
