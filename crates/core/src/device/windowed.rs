//! One batch after another, by a window and a largest size: what serving systems do without either paper.

use std::collections::VecDeque;

use super::launch::{DeviceOutput, InputSource, LaneSpec, Launch, SegmentRange};
use super::note::Note;
use super::policy::{DevicePolicy, DeviceTimeout};
use super::request::{DeviceReject, DeviceRequest};
use super::request_pool::{PoolStats, RequestPool};
use super::segment_profile::SegmentProfile;
use crate::ids::{BatchId, LaneId, LaunchId, ModelId, RequestId};
use crate::time::{Duration, Time};

/// How a [`Windowed`] batches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WindowedOptions {
    /// The model.
    pub model: ModelId,
    /// What its batches take.
    pub profile: SegmentProfile,
    /// The most items of a batch.
    pub max_batch: u32,
    /// How long the oldest request may wait for others. Zero: E²bird's NO_Wait and DVABatch's ZeroBatch; tuned: OPT_Wait, DelayBatch.
    pub window: Duration,
    /// Fill every batch up to the largest with dummies (E²bird §3.2: Static).
    pub fill: bool,
    /// Give up requests that can no longer be answered by their deadline.
    pub drop: bool,
    /// The most items that wait.
    pub queue_bound: u32,
}

/// One lane, one batch at a time, which brings its inputs with it and takes its outputs back: the baseline of E²bird (§3.2) and DVABatch (§8.1).
///
/// A batch leaves when the lane is free and either it is as large as may be or its oldest request has waited for the window. Its members
/// are padded to the longest of them.
#[derive(Debug)]
pub struct Windowed {
    options: WindowedOptions,
    lanes: [LaneSpec; 1],
    pool: RequestPool,
    outputs: VecDeque<DeviceOutput>,
    running: Option<Running>,
    next: u64,
}

#[derive(Debug)]
struct Running {
    launch: LaunchId,
    members: Vec<RequestId>,
}

impl Windowed {
    /// Nothing waits. Asserts that batches have a size.
    pub fn new(options: WindowedOptions) -> Self {
        assert!(options.max_batch > 0, "a batch has at least one item");
        let segments = SegmentRange::new(0, options.profile.segments());
        Windowed {
            lanes: [LaneSpec { max_rows: options.max_batch, segments }],
            pool: RequestPool::new(options.queue_bound, 0, options.drop.then(|| options.profile.clone())),
            outputs: VecDeque::new(),
            running: None,
            next: 0,
            options,
        }
    }

    fn advance(&mut self, now: Time) {
        self.pool.drop_hopeless(now, &mut self.outputs);
        let Some(oldest) = self.pool.oldest().filter(|_| self.running.is_none()) else { return };
        let waited = now >= oldest.arrival + self.options.window;
        if !waited && self.pool.rows() < self.options.max_batch {
            return;
        }
        let (members, rows, _) = self.pool.neighbours(self.options.max_batch);
        let taken = members.iter().filter_map(|request| self.pool.begin(*request));
        let length = taken.map(|waiting| waiting.request.length).max().unwrap_or(0);
        let (launch, batch) = (LaunchId(self.next), BatchId(self.next));
        self.next += 1;
        self.outputs.push_back(DeviceOutput::Note(Note::New { batch, rows, length }));
        self.outputs.push_back(DeviceOutput::Launch(Launch {
            id: launch,
            batch,
            model: self.options.model,
            lane: LaneId(0),
            segments: self.lanes[0].segments,
            members: members.clone(),
            rows,
            computed_rows: if self.options.fill { self.options.max_batch } else { rows },
            length,
            inputs: InputSource::Host,
        }));
        self.running = Some(Running { launch, members });
    }
}

impl DevicePolicy for Windowed {
    fn lanes(&self) -> &[LaneSpec] {
        &self.lanes
    }

    fn handle_request(&mut self, now: Time, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.pool.push(now, request, self.options.max_batch, &mut self.outputs)?;
        self.advance(now);
        Ok(())
    }

    fn handle_input(&mut self, _: Time, _: RequestId) {}

    fn handle_completion(&mut self, now: Time, launch: LaunchId, _: &[RequestId]) {
        if self.running.as_ref().is_none_or(|running| running.launch != launch) {
            return;
        }
        for request in self.running.take().into_iter().flat_map(|running| running.members) {
            self.pool.finish(request, launch, &mut self.outputs);
        }
        self.advance(now);
    }

    fn handle_cancel(&mut self, now: Time, request: RequestId) -> bool {
        let was_there = self.pool.cancel(request, &mut self.outputs);
        self.advance(now);
        was_there
    }

    fn handle_timeout(&mut self, now: Time) {
        self.advance(now);
    }

    fn poll_output(&mut self) -> Option<DeviceOutput> {
        self.outputs.pop_front()
    }

    fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)> {
        let window = self.pool.oldest().filter(|_| self.running.is_none());
        let window = window.map(|oldest| (oldest.arrival + self.options.window, DeviceTimeout::Window));
        window.into_iter().chain(self.pool.hopeless_at()).min()
    }

    fn stats(&self) -> PoolStats {
        self.pool.stats()
    }
}
