//! DVABatch: who is in a batch while it runs.

mod batch_table;
mod buffers;
mod clusters;
mod executor;
mod meta_operations;
mod pipeline;

use std::collections::VecDeque;

use super::launch::{DeviceOutput, LaneSpec, SegmentRange};
use super::policy::{DevicePolicy, DeviceTimeout};
use super::request::{DeviceReject, DeviceRequest};
use super::request_pool::{PoolStats, RequestPool, Waiting};
use super::segment_profile::SegmentProfile;
use crate::ids::{LaunchId, ModelId, RequestId};
use crate::time::{Duration, Time};
use batch_table::BatchTable;
use buffers::BufferPairs;
use executor::{Executor, ExecutorEvent, ExecutorState, Item};

/// How a [`Staged`] batches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StagedOptions {
    /// The model.
    pub model: ModelId,
    /// What its segments take; each is a stage.
    pub profile: SegmentProfile,
    /// Pairs of buffers: 1 makes stages run one after another, 2 is best (DVABatch §8.6).
    pub pairs: u16,
    /// The most items of a batch, and with `by_length` of all that run.
    pub max_batch: u32,
    /// Policy I, for requests that vary in length: batches of like length, side by side.
    pub by_length: bool,
    /// Policy II, for operators that prefer batches of different sizes: split where the rest takes no longer in two halves.
    pub by_operator: bool,
    /// Policy III, for requests that come unevenly: let them join the newest batch.
    pub by_load: bool,
    /// With `by_length`: how long the oldest request may wait for others while batches run; `None`: as long as the first stage takes
    /// for the largest batch (DVABatch §7.2).
    pub window: Option<Duration>,
    /// With `by_load`: nobody joins a batch that is older (T_comp_wait, DVABatch §7.2); `None`: half the time of the largest batch.
    pub comp_wait: Option<Duration>,
    /// Slots of the input ring, one an item; 0: inputs stay with the host until their batch is launched.
    pub ring_slots: u32,
    /// Give up requests that can no longer be answered by their deadline.
    pub drop: bool,
    /// The most items that wait.
    pub queue_bound: u32,
}

/// DVABatch's scheduler: a batch runs stage by stage, and between stages it may be stretched by requests that came later, or split.
///
/// Each stage has an executor with a lane and a queue of its own. An executor works when the pair of buffers of its next batch is legitimate
/// (`buffers.rs`), and goes through the states of figure 11 (`executor.rs`). One pair therefore makes the stages work one after
/// another, two make them a pipeline; parts of a split batch share a pair, and run one after another.
///
/// After every event, in this order (DVABatch §4.2: input before operator before load): what a completed stage leaves is split if that is
/// worth it; requests join the newest batch if they may and it is worth it; else they become new batches.
#[derive(Debug)]
pub struct Staged {
    options: StagedOptions,
    stages: u16,
    lanes: Vec<LaneSpec>,
    pool: RequestPool,
    outputs: VecDeque<DeviceOutput>,
    table: BatchTable,
    /// By stage: what it has to run.
    queues: Vec<VecDeque<Item>>,
    executors: Vec<Executor>,
    buffers: BufferPairs,
    next_launch: u64,
}

impl Staged {
    /// Nothing waits, all executors are active. Asserts that there is a pair of buffers, and that a batch has a size and fits a ring.
    pub fn new(options: StagedOptions) -> Self {
        assert!(options.pairs > 0 && options.max_batch > 0, "stages need a pair of buffers and a batch an item");
        assert!(options.ring_slots == 0 || options.ring_slots >= options.max_batch, "the ring holds a batch");
        let stages = options.profile.segments();
        let lane = |stage| LaneSpec { max_rows: options.max_batch, segments: SegmentRange::new(stage, stage + 1) };
        Staged {
            stages,
            lanes: (0..stages).map(lane).collect(),
            pool: RequestPool::new(
                options.queue_bound,
                options.ring_slots,
                options.drop.then(|| options.profile.clone()),
            ),
            outputs: VecDeque::new(),
            table: BatchTable::default(),
            queues: vec![VecDeque::new(); usize::from(stages)],
            executors: (0..stages).map(|_| Executor::new()).collect(),
            buffers: BufferPairs::new(stages, options.pairs),
            next_launch: 0,
            options,
        }
    }

    fn executor(&mut self, stage: u16) -> &mut Executor {
        &mut self.executors[usize::from(stage)]
    }

    /// Everything that can begin, does.
    fn advance(&mut self, now: Time) {
        self.pool.drop_hopeless(now, &mut self.outputs);
        loop {
            // Last stages first: what they hand back is what those before them wait for.
            let mut changed = false;
            for stage in (0..self.stages).rev() {
                changed |= self.wake(stage);
            }
            changed |= self.stretch(now) || self.make_batches(now);
            for stage in (0..self.stages).rev() {
                changed |= self.pull(stage);
                changed |= self.check(stage);
            }
            if !changed {
                return;
            }
        }
    }

    /// Whether the first stage could take something new.
    fn first_is_free(&self) -> bool {
        self.executors[0].state() == ExecutorState::Active && self.queues[0].is_empty()
    }
}

impl DevicePolicy for Staged {
    fn lanes(&self) -> &[LaneSpec] {
        &self.lanes
    }

    fn handle_request(&mut self, now: Time, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.pool.push(now, request, self.options.max_batch, &mut self.outputs)?;
        self.advance(now);
        Ok(())
    }

    fn handle_input(&mut self, now: Time, request: RequestId) {
        if self.pool.mark_ready(request, &mut self.outputs) {
            self.advance(now);
        }
    }

    fn handle_completion(&mut self, now: Time, launch: LaunchId, exits: &[RequestId]) {
        let Some(stage) = self.executors.iter().position(|executor| executor.launch == Some(launch)) else { return };
        let stage = stage as u16;
        let executor = self.executor(stage);
        executor.launch = None;
        let Some(mut item) = executor.item.take() else { return };
        let Some(pair) = item.pair else { return };
        self.buffers.end(stage, self.stages, pair);
        if let Some(completed) =
            self.table.get_mut(item.batch).and_then(|batch| batch.completed.get_mut(usize::from(stage)))
        {
            *completed += item.rows;
        }
        for slots in item.slots.drain(..) {
            self.pool.release(slots, &mut self.outputs);
        }
        self.let_out(&mut item, stage, launch, exits);
        self.move_on(item, stage);
        let last = stage + 1 == self.stages;
        let has_pair = last || self.buffers.any_legitimate(stage).is_some();
        let executor = self.executor(stage);
        if !executor.owed.contains(&pair) {
            executor.owed.push(pair);
        }
        executor.on(if has_pair { ExecutorEvent::EndsWithPair } else { ExecutorEvent::EndsWithoutPair });
        self.advance(now);
    }

    fn handle_cancel(&mut self, now: Time, request: RequestId) -> bool {
        // One that runs leaves its batch at the end of the stage that it is in.
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
        // Without `by_length` nothing that could begin waits.
        let waits = self.options.by_length && self.first_is_free() && !self.table.is_empty();
        let fits = |waiting: &&Waiting| {
            waits && waiting.request.size <= self.options.max_batch.saturating_sub(self.pool.running_rows())
        };
        let oldest = self.pool.ready().next().filter(fits);
        let window = oldest.map(|waiting| (waiting.arrival + self.window(), DeviceTimeout::Window));
        window.into_iter().chain(self.pool.hopeless_at()).min()
    }

    fn stats(&self) -> PoolStats {
        self.pool.stats()
    }
}
