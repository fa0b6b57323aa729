//! DVABatch: requests join and leave a batch while it runs.

mod batch_table;
mod buffers;
mod clusters;
mod executor;
mod meta_operations;
mod pipeline;

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::auto_inputs::{AutoInputs, Overlap};
use super::entry::{ModelSpec, PolicyEntry, PolicyOptions, PolicySettings};
use super::launch::{LaneSpec, SegmentRange, Span};
use super::policy::DevicePolicy;
use super::request::{DeviceReject, DeviceRequest};
use super::request_pool::{PooledRequest, RequestPool};
use super::scheduler::DeviceModel;
use super::segment_profile::SegmentProfile;
use super::settings::{self, Cut, ExitRule, MOST_LANES, MOST_ROWS, PaddedTo, PolicyModel, RingNeed, at_most};
use super::staging::{BUFFER_PAIRS, Joining, STAGES, Staging, TRIED_PAIRS, TRIED_STAGES};
use super::turn::{DeviceTimeout, Turn};
use crate::ids::{LaunchId, PartitionId, RequestId};
use crate::time::{Duration, Time};
use batch_table::BatchTable;
use buffers::BufferPairs;
use executor::{Executor, ExecutorEvent, ExecutorState, Item};

/// The ring slots for each item of the largest batch, unless a setting says otherwise.
const SLOTS_AN_ITEM: u32 = 4;

/// The options of a [`Staged`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StagedOptions {
    /// The latencies of the segments, each of which is a stage.
    pub profile: SegmentProfile,
    /// The pairs of buffers: 1 makes stages run one after another, 2 is best (DVABatch §8.6).
    pub pairs: u16,
    /// The most items of a batch, and with `by_length` of all running batches.
    pub max_batch: u32,
    /// Policy I, for requests that vary in length: batches of similar lengths run side by side.
    pub by_length: bool,
    /// Policy II, for operators that prefer batches of different sizes: a batch is split where the
    /// remaining stages take no longer for two halves.
    pub by_operator: bool,
    /// Policy III, for uneven arrivals: requests may join the newest batch.
    pub by_load: bool,
    /// With `by_length`: the time that the oldest request may wait for others while batches run.
    /// `None`: the time of the first stage for the largest batch (DVABatch §7.2).
    pub window: Option<Duration>,
    /// With `by_load`: no request joins a batch older than this (T_comp_wait, DVABatch §7.2).
    /// `None`: half the time of the largest batch.
    pub comp_wait: Option<Duration>,
    /// With `by_load`: the rule by which requests join.
    #[serde(default)]
    pub joining: Joining,
    /// The slots of the input ring, one an item; 0: inputs stay on the host until their batch is
    /// launched.
    pub ring_slots: u32,
    /// Whether to give up requests that can no longer be answered by their deadline.
    pub drop: bool,
    /// The most items that wait.
    pub queue_bound: u32,
}

/// DVABatch's scheduler: a batch runs stage by stage. Between stages it may be stretched by
/// requests that came later, or split.
///
/// Each stage has an executor with a lane and a queue of its own. An executor works when the pair
/// of buffers of its next batch is legitimate (`buffers.rs`), and goes through the states of figure
/// 11 (`executor.rs`). So one pair makes the stages work one after another, and two make them a
/// pipeline. Parts of a split batch share a pair, and run one after another.
///
/// On a device that launches of other models crowd ([`Turn::is_crowded`]), no batch begins while
/// another runs, and no request joins.
///
/// After every event three steps follow in this order (DVABatch §4.2: input before operator before
/// load). First the output of a completed stage is split if that is worth it. Then requests join
/// the newest batch if they may and it is worth it. Otherwise they become new batches.
#[derive(Debug)]
pub struct Staged {
    options: StagedOptions,
    stages: u16,
    pool: RequestPool,
    table: BatchTable,
    /// The items that each stage has to run.
    queues: Vec<VecDeque<Item>>,
    executors: Vec<Executor>,
    buffers: BufferPairs,
}

impl Staged {
    /// A policy without requests, with all executors active. Asserts that there is a pair of
    /// buffers and that a batch has an item and fits the ring.
    pub fn new(options: StagedOptions) -> Self {
        assert!(options.pairs > 0 && options.max_batch > 0, "stages need a pair of buffers and a batch an item");
        assert!(options.ring_slots == 0 || options.ring_slots >= options.max_batch, "the ring holds a batch");
        let stages = options.profile.segments();
        Staged {
            stages,
            pool: RequestPool::new(
                options.queue_bound,
                options.ring_slots,
                options.drop.then(|| options.profile.clone()),
            ),
            table: BatchTable::default(),
            queues: vec![VecDeque::new(); usize::from(stages)],
            executors: (0..stages).map(|_| Executor::new()).collect(),
            buffers: BufferPairs::new(stages, options.pairs),
            options,
        }
    }

    fn executor(&mut self, stage: u16) -> &mut Executor {
        &mut self.executors[usize::from(stage)]
    }

    /// Whether the first stage could take a new batch.
    fn first_is_free(&self) -> bool {
        self.executors[0].state() == ExecutorState::Active && self.queues[0].is_empty()
    }
}

/// The user's settings of the policy.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct StagedSettings {
    /// The number of stages, of about equal time, into which the model is cut.
    stages: Option<u16>,
    /// The tensors after which the model is cut, instead of by `stages`.
    cut_at: Vec<String>,
    /// The pairs of buffers.
    buffer_pairs: Option<u16>,
    /// The slots of the input ring, one an item.
    ring_slots: Option<u32>,
    /// The time that the oldest request may wait for others; `None`: no time. DVABatch waits as
    /// long as the first stage takes for the largest batch (§7.2). Not to wait measured better
    /// (lab/docs/dvabatch.md).
    #[serde(rename = "window_ms", deserialize_with = "settings::millis")]
    window: Option<Duration>,
    /// The largest age of a batch that others may join; `None`: half the time of the largest batch.
    #[serde(rename = "comp_wait_ms", deserialize_with = "settings::millis")]
    comp_wait: Option<Duration>,
    /// When requests join a running batch. DVABatch lets them join whenever the batch is young
    /// enough (§7.2).
    joining: Joining,
    /// Policy I; `None`: if requests vary in length.
    #[serde(deserialize_with = "settings::switch")]
    lengths: Option<bool>,
    /// Policy II; `None`: yes.
    #[serde(deserialize_with = "settings::switch")]
    operators: Option<bool>,
    /// Policy III; `None`: if requests do not vary in length.
    #[serde(deserialize_with = "settings::switch")]
    load: Option<bool>,
    /// The rules by which requests may be answered before the last segment.
    exits: Vec<ExitRule>,
}

impl PolicySettings for StagedSettings {
    fn check(&self) -> Result<(), String> {
        let (stages, pairs) = (self.stages.map(u32::from), self.buffer_pairs.map(u32::from));
        settings::at_least_one(&[("stages", stages), ("buffer_pairs", pairs), ("ring_slots", self.ring_slots)])?;
        match self.stages.is_some() && !self.cut_at.is_empty() {
            true => Err("`stages` and `cut_at` both say where the model is cut; leave one of them out".to_owned()),
            false => Ok(()),
        }
    }

    fn cut(&self) -> (Cut, bool) {
        match self.stages {
            _ if !self.cut_at.is_empty() => (Cut::At(self.cut_at.clone()), true),
            Some(1) => (Cut::Whole, true),
            stages => (Cut::Stages(usize::from(stages.unwrap_or(STAGES))), stages.is_some()),
        }
    }

    fn at_once(&self) -> u32 {
        self.staging().at_once()
    }

    /// With `exits`, nothing is searched: the share of requests that leave early is not known.
    fn open_stagings(&self) -> Vec<Staging> {
        if !self.exits.is_empty() {
            return vec![self.staging()];
        }
        let (fixed, pairs) = ([self.staging().stages], self.buffer_pairs.map(|pairs| [pairs]));
        let stages: &[u16] = if self.stages.is_some() || !self.cut_at.is_empty() { &fixed } else { &TRIED_STAGES };
        let pairs: &[u16] = pairs.as_ref().map_or(&TRIED_PAIRS, |pairs| pairs);
        let mut all = Staging::all(stages, pairs, &[self.joining], false);
        // A single stage works the same with any pairs.
        all.retain(|staging| staging.stages > 1 || staging.pairs == pairs[0]);
        all
    }

    fn with_staging(&self, Staging { stages, pairs, joining }: Staging) -> Option<Arc<dyn PolicySettings>> {
        let stages = self.cut_at.is_empty().then_some(stages);
        Some(Arc::new(StagedSettings { stages, buffer_pairs: Some(pairs), joining, ..self.clone() }))
    }

    /// There is no ring if requests vary in length. The default ring is not required, as it may be
    /// too large.
    fn ring(&self, max_batch: u32, padded: bool) -> Result<Option<RingNeed>, String> {
        let Some(least) = self.ring_slots else {
            let least = max_batch.saturating_mul(SLOTS_AN_ITEM);
            return Ok((!padded).then_some(RingNeed { least, must: false }));
        };
        if padded {
            return Err(
                "ring_slots: with the policy staged, requests of a padded model have no slots in a ring, as each batch is padded to its longest request; leave ring_slots out"
                    .to_owned(),
            );
        }
        if least < max_batch {
            return Err(format!(
                "an input ring of {least} slots is too small: the largest request has {max_batch} items; ring_slots must be at least {max_batch}"
            ));
        }
        Ok(Some(RingNeed { least, must: true }))
    }

    fn exits(&self) -> &[ExitRule] {
        &self.exits
    }

    fn costly_padding(&self) -> Option<PaddedTo> {
        Some(PaddedTo::Batch)
    }

    fn tell_auto(&self, inputs: &mut AutoInputs) {
        inputs.stagings = self.open_stagings();
    }

    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String> {
        let PolicyModel { partition, profile, max_batch, padded, drop, queue_bound, ring_slots, .. } = model;
        let options = StagedOptions {
            profile,
            pairs: self.buffer_pairs.unwrap_or(BUFFER_PAIRS),
            max_batch,
            by_length: self.lengths.unwrap_or(padded),
            by_operator: self.operators.unwrap_or(true),
            by_load: self.load.unwrap_or(!padded),
            window: Some(self.window.unwrap_or(Duration::ZERO)),
            comp_wait: self.comp_wait,
            joining: self.joining,
            ring_slots,
            drop,
            queue_bound,
        };
        Ok(ModelSpec::new(&options, partition))
    }
}

impl StagedSettings {
    /// The stages and buffer pairs of the settings. Defaults stand for open numbers.
    fn staging(&self) -> Staging {
        let stages = match self.cut_at.len() {
            0 => self.stages.unwrap_or(STAGES),
            cuts => u16::try_from(cuts).unwrap_or(u16::MAX).saturating_add(1),
        };
        Staging { stages, pairs: self.buffer_pairs.unwrap_or(BUFFER_PAIRS), joining: self.joining }
    }
}

/// A batch of the largest size through all segments, with the best of the possible stages.
fn predict(inputs: &AutoInputs, overlap: &Overlap) -> Option<f64> {
    let max_batch = inputs.max_batch.max(1);
    let together = overlap.factor(max_batch);
    let rates = inputs.stagings.iter().filter_map(|staging| inputs.staged_rate(max_batch, *staging, together));
    rates.reduce(f64::max)
}

impl PolicyOptions for StagedOptions {
    const ENTRY: &'static PolicyEntry = &PolicyEntry::new::<StagedOptions, StagedSettings>(
        "staged",
        "batches that are stretched and split while they run",
    )
    .predicted(predict);

    fn check(&self) -> Result<(), String> {
        at_most("max_batch", self.max_batch, MOST_ROWS)?;
        at_most("pairs", u32::from(self.pairs), MOST_LANES)?;
        at_most("stages", u32::from(self.profile.segments()), MOST_LANES)?;
        if self.ring_slots == 0 {
            return Ok(());
        }
        at_most("ring_slots", self.ring_slots, MOST_ROWS)?;
        match self.ring_slots < self.max_batch {
            true => Err(format!(
                "a ring of {} slots is smaller than the largest batch of {}",
                self.ring_slots, self.max_batch
            )),
            false => Ok(()),
        }
    }

    fn build(self) -> DeviceModel {
        let profile = self.profile.clone();
        DeviceModel::new(Staged::new(self), profile)
    }
}

impl DevicePolicy for Staged {
    fn lanes(&self, partition: PartitionId) -> Vec<LaneSpec> {
        let segments = |stage| SegmentRange::new(stage, stage + 1);
        let max_rows = self.options.max_batch;
        (0..self.stages).map(|stage| LaneSpec { partition, max_rows, segments: segments(stage) }).collect()
    }

    fn pool(&self) -> Option<&RequestPool> {
        Some(&self.pool)
    }

    fn pool_mut(&mut self) -> Option<&mut RequestPool> {
        Some(&mut self.pool)
    }

    fn advance(&mut self, turn: &mut Turn<'_>) {
        self.pool.drop_hopeless(turn);
        loop {
            // The last stage goes first: earlier stages wait for the pairs that it hands back.
            let mut changed = false;
            for stage in (0..self.stages).rev() {
                changed |= self.wake(stage);
            }
            changed |= self.stretch(turn) || self.make_batches(turn);
            for stage in (0..self.stages).rev() {
                changed |= self.pull(stage);
                changed |= self.check(turn, stage);
            }
            if !changed {
                return;
            }
        }
    }

    fn handle_request(&mut self, turn: &mut Turn<'_>, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.pool.push(turn, request, self.options.max_batch)?;
        self.advance(turn);
        Ok(())
    }

    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, _: Span, exits: &[RequestId]) {
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
            self.pool.release(slots, turn);
        }
        self.let_out(turn, &mut item, stage, launch, exits);
        self.move_on(turn, item, stage);
        let last = stage + 1 == self.stages;
        let has_pair = last || self.buffers.any_legitimate(stage).is_some();
        let executor = self.executor(stage);
        if !executor.owed.contains(&pair) {
            executor.owed.push(pair);
        }
        executor.on(if has_pair { ExecutorEvent::EndsWithPair } else { ExecutorEvent::EndsWithoutPair });
        self.advance(turn);
    }

    fn poll_timeout(&self) -> Option<(Time, DeviceTimeout)> {
        // Without `by_length` every request that could begin has begun.
        let waits = self.options.by_length && self.first_is_free() && !self.table.is_empty();
        let fits = |waiting: &&PooledRequest| {
            waits && waiting.request.size <= self.options.max_batch.saturating_sub(self.pool.running_rows())
        };
        let oldest = self.pool.ready().next().filter(fits);
        let window = oldest.map(|waiting| (waiting.arrival + self.window(), DeviceTimeout::Window));
        window.into_iter().chain(self.pool.hopeless_at()).min()
    }

    fn backlog(&self) -> Duration {
        let profile = &self.options.profile;
        let rest = |stage: usize, item: &Item| {
            let length = self.table.get(item.batch).map_or(0, |batch| batch.length);
            profile.remaining(stage as u16, item.rows, length)
        };
        let queued =
            self.queues.iter().enumerate().flat_map(|(stage, items)| items.iter().map(move |item| (stage, item)));
        // A stage that runs an item is a launch already, and is not counted again. A stage that is
        // about to run an item is counted.
        let in_stages = self.executors.iter().enumerate().filter_map(|(stage, executor)| {
            executor.item.as_ref().map(|item| (stage + usize::from(executor.launch.is_some()), item))
        });
        let on_its_way = queued.chain(in_stages).fold(Duration::ZERO, |sum, (stage, item)| sum + rest(stage, item));
        on_its_way + self.pool.backlog(profile, self.options.max_batch)
    }
}
