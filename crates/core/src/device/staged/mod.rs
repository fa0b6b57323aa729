//! DVABatch: who is in a batch while it runs.

mod batch_table;
mod buffers;
mod clusters;
mod executor;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::input_pool::{InputPool, PoolStats, Waiting};
use super::input_ring::SlotRun;
use super::launch::{DeviceOutput, InputSource, LaneId, LaneSpec, Launch, LaunchId, SegmentRange};
use super::note::Note;
use super::policy::{DevicePolicy, DeviceTimeout};
use super::request::{DeviceDrop, DeviceReject, DeviceRequest};
use super::segment_profile::SegmentProfile;
use crate::ids::{BatchId, ModelId, RequestId};
use crate::time::{Duration, Time};
use batch_table::{BatchTable, Stretch};
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
/// ([`BufferPairs`]), and goes through the states of figure 11 ([`executor::TRANSITIONS`]). One pair therefore makes the stages work one after
/// another, two make them a pipeline; parts of a split batch share a pair, and run one after another.
///
/// After every event, in this order (DVABatch §4.2: input before operator before load): what a completed stage leaves is split if that is
/// worth it; requests join the newest batch if they may and it is worth it; else they become new batches.
#[derive(Debug)]
pub struct Staged {
    options: StagedOptions,
    stages: u16,
    lanes: Vec<LaneSpec>,
    pool: InputPool,
    outputs: VecDeque<DeviceOutput>,
    table: BatchTable,
    /// By stage: what it has to run.
    queues: Vec<VecDeque<Item>>,
    executors: Vec<Executor>,
    buffers: BufferPairs,
    running: BTreeMap<RequestId, DeviceRequest>,
    running_rows: u32,
    /// Clients of these have gone while they ran.
    gone: BTreeSet<RequestId>,
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
            pool: InputPool::new(options.queue_bound, options.ring_slots),
            outputs: VecDeque::new(),
            table: BatchTable::default(),
            queues: vec![VecDeque::new(); usize::from(stages)],
            executors: (0..stages).map(|_| Executor::new()).collect(),
            buffers: BufferPairs::new(stages, options.pairs),
            running: BTreeMap::new(),
            running_rows: 0,
            gone: BTreeSet::new(),
            next_launch: 0,
            options,
        }
    }

    fn needed(profile: &SegmentProfile) -> impl Fn(&DeviceRequest) -> Duration {
        move |request| profile.total(request.size, request.length)
    }

    fn executor(&mut self, stage: u16) -> &mut Executor {
        &mut self.executors[usize::from(stage)]
    }

    /// Whether a batch of that many items would be split after some stage, the first of which is `from` (DVABatch §5.2.2).
    fn may_split(&self, from: u16, rows: u32, length: u32) -> bool {
        self.options.by_operator && (from + 1..self.stages).any(|stage| self.parts(stage, rows, length) > 1)
    }

    /// Into how many parts a batch is split before `stage`: halved as long as the rest takes at least twice as long for the whole as for a half
    /// (DVABatch §7.2, policy II).
    fn parts(&self, stage: u16, rows: u32, length: u32) -> u32 {
        let profile = &self.options.profile;
        let (mut size, mut parts) = (rows, 1);
        while size > 1 {
            let half = size.div_ceil(2);
            if profile.remaining(stage, size, length) < profile.remaining(stage, half, length).saturating_mul(2) {
                break;
            }
            (size, parts) = (half, parts * 2);
        }
        parts.min(rows)
    }

    /// Everything that can begin, does.
    fn advance(&mut self, now: Time) {
        if self.options.drop {
            while let Some(request) = self.pool.hopeless(now, Self::needed(&self.options.profile)) {
                self.pool.remove(request, &mut self.outputs);
                self.outputs.push_back(DeviceOutput::Drop { request, reason: DeviceDrop::Hopeless });
            }
        }
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

    /// An executor without a legitimate pair gets one; one that has one hands back what it is done with.
    fn wake(&mut self, stage: u16) -> bool {
        let mut changed = false;
        if self.executor(stage).state() == ExecutorState::Inactive && self.buffers.any_legitimate(stage).is_some() {
            self.executor(stage).on(ExecutorEvent::GetsPair);
            changed = true;
        }
        if matches!(self.executor(stage).state(), ExecutorState::Inactive | ExecutorState::Working) {
            return changed;
        }
        let owed = std::mem::take(&mut self.executor(stage).owed);
        for pair in owed {
            if self.buffers.hand_back(stage, pair) {
                changed = true;
            } else {
                self.executor(stage).owed.push(pair);
            }
        }
        changed
    }

    /// An active executor takes the next batch.
    fn pull(&mut self, stage: u16) -> bool {
        if self.executor(stage).state() != ExecutorState::Active {
            return false;
        }
        let legitimate = self.buffers.any_legitimate(stage);
        let Some(mut item) = self.queues[usize::from(stage)].pop_front() else { return false };
        if item.pair.is_none() {
            // Only before the first stage; an active executor has a pair, unless one was taken back by a split.
            if legitimate.is_none() {
                self.queues[usize::from(stage)].push_front(item);
                return false;
            }
            item.pair = legitimate;
        }
        let executor = self.executor(stage);
        executor.on(ExecutorEvent::Pulls);
        executor.item = Some(item);
        true
    }

    /// An executor that has a batch runs it, if the batch's pair is legitimate.
    fn check(&mut self, stage: u16) -> bool {
        let executor = &mut self.executors[usize::from(stage)];
        let (ExecutorState::Checking, Some(item)) = (executor.state(), executor.item.as_ref()) else { return false };
        let Some(pair) = item.pair.filter(|pair| self.buffers.is_legitimate(stage, *pair)) else { return false };
        self.buffers.begin(stage, pair);
        let id = LaunchId(self.next_launch);
        self.next_launch += 1;
        let inputs = match one_run(&self.pool, &item.slots) {
            _ if stage > 0 => InputSource::Device,
            Some(run) => InputSource::Ring(run),
            None if self.options.ring_slots > 0 => InputSource::Device,
            None => InputSource::Host,
        };
        self.outputs.push_back(DeviceOutput::Launch(Launch {
            id,
            batch: item.batch,
            model: self.options.model,
            lane: LaneId(u32::from(stage)),
            segments: SegmentRange::new(stage, stage + 1),
            members: item.members.clone(),
            rows: item.rows,
            computed_rows: item.rows,
            length: self.table.get(item.batch).map_or(0, |batch| batch.length),
            inputs,
        }));
        executor.launch = Some(id);
        executor.on(ExecutorEvent::IsLegitimate);
        true
    }

    /// Policy III: requests that wait join the newest batch (DVABatch §5.2.2, §7.2).
    fn stretch(&mut self, now: Time) -> bool {
        // Requests of other lengths need no batch that runs: they get one of their own beside it (§7.2).
        if !self.options.by_load || self.options.by_length || self.pool.ready_rows() == 0 {
            return false;
        }
        let Some((id, batch)) = self.table.newest().filter(|_| self.first_is_free()) else { return false };
        let profile = &self.options.profile;
        let comp_wait = self.options.comp_wait;
        let comp_wait = comp_wait.unwrap_or_else(|| {
            Duration::from_nanos(profile.total(self.options.max_batch, batch.length).as_nanos() / 2)
        });
        let room = self.options.max_batch.saturating_sub(batch.rows);
        if batch.may_split || batch.stretch.is_some() || now >= batch.created + comp_wait || room == 0 {
            return false;
        }
        // Where the batch is: in a stage, then they are together after it; or before one, then it waits there.
        let in_stage =
            (1..self.stages).find(|s| self.holds(*s, id) && self.executors[usize::from(*s)].launch.is_some());
        let before = || (1..self.stages).find(|s| self.queues[usize::from(*s)].iter().any(|item| item.batch == id));
        let Some(stage) = in_stage.or_else(|| before().map(|stage| stage - 1)) else { return false };
        let in_executor = self.executors[usize::from(stage)].item.iter();
        let item = in_executor.chain(self.queues.iter().flatten()).find(|item| item.batch == id);
        // Those who join go through another pair of buffers: that of the batch holds its rows until they are there.
        let pair = (0..self.options.pairs)
            .find(|pair| item.is_some_and(|item| item.pair != Some(*pair)) && self.buffers.is_legitimate(0, *pair));
        // After the last stage there is nothing left to do together.
        let Some(pair) = pair.filter(|_| stage + 1 < self.stages) else { return false };
        let (members, joined, _) = self.pool.neighbours(room);
        let longest = self.pool.ready().take(members.len()).map(|waiting| waiting.request.length).max();
        if members.is_empty() || longest.is_some_and(|length| length > batch.length) {
            return false;
        }
        // Worth it if the answers come sooner on the whole than those of two batches, one after the other.
        let (rows, length) = (batch.rows, batch.length);
        let rest = |rows| profile.remaining(stage + 1, rows, length).as_nanos();
        let there = profile.total(joined, length).as_nanos() - rest(joined);
        let apart = u128::from(rows + joined) * u128::from(rest(rows))
            + u128::from(joined) * u128::from(profile.total(joined, length).as_nanos());
        let together = u128::from(rows + joined) * (u128::from(there) + u128::from(rest(rows + joined)));
        if together >= apart {
            return false;
        }
        let waiting = self.queues.get_mut(usize::from(stage) + 1).and_then(|queue| {
            let at = queue.iter().position(|item| item.batch == id)?;
            queue.remove(at)
        });
        let may_split = self.may_split(stage, rows + joined, length);
        if let Some(batch) = self.table.get_mut(id) {
            batch.rows += joined;
            batch.may_split = may_split;
            batch.stretch = Some(Stretch { stage, waiting });
        }
        let item = Item { pair: Some(pair), ..self.take(id, members, true) };
        self.outputs.push_back(DeviceOutput::Note(Note::Stretch { batch: id, joined, rows: rows + joined, stage }));
        self.queues[0].push_back(item);
        true
    }

    /// Whether the first stage could take something new.
    fn first_is_free(&self) -> bool {
        self.executors[0].state() == ExecutorState::Active && self.queues[0].is_empty()
    }

    fn holds(&self, stage: u16, batch: BatchId) -> bool {
        self.executors[usize::from(stage)].item.as_ref().is_some_and(|item| item.batch == batch)
    }

    /// Takes requests out of the pool, as a member of a batch's queue.
    fn take(&mut self, batch: BatchId, members: Vec<RequestId>, joins: bool) -> Item {
        let (mut rows, mut slots) = (0, Vec::new());
        for request in &members {
            let Some(Waiting { request, slots: run, .. }) = self.pool.take(*request) else { continue };
            self.running.insert(request.id, request);
            rows += request.size;
            slots.extend(run);
        }
        self.running_rows += rows;
        Item { batch, members, rows, pair: None, joins, slots, families: Vec::new() }
    }

    /// How long the oldest request may wait for others while batches run.
    fn window(&self) -> Duration {
        let longest = || self.pool.ready().map(|waiting| waiting.request.length).max().unwrap_or(0);
        match self.options.window {
            _ if !self.options.by_length => Duration::ZERO,
            Some(window) => window,
            None => self.options.profile.time(0, self.options.max_batch, longest()),
        }
    }

    /// Requests that wait become batches, if the first stage is free (DVABatch §5.1: new).
    fn make_batches(&mut self, now: Time) -> bool {
        let first_is_free = self.executors[0].state() == ExecutorState::Active && self.queues[0].is_empty();
        let Some(oldest) = self.pool.ready().next().filter(|_| first_is_free).map(|waiting| waiting.arrival) else {
            return false;
        };
        // Policy I: what runs side by side is bounded by what one batch may have.
        let running = if self.options.by_length { self.running_rows } else { 0 };
        let room = self.options.max_batch.saturating_sub(running);
        let full = self.pool.ready_rows() >= room;
        if !full && !self.table.is_empty() && now < oldest + self.window() {
            return false;
        }
        if !self.options.by_length {
            let (members, rows, _) = self.pool.neighbours(room);
            let longest =
                self.pool.ready().take(members.len()).map(|waiting| waiting.request.length).max().unwrap_or(0);
            return self.new_batch(now, members, rows, longest);
        }
        let mut taken: Vec<DeviceRequest> = Vec::new();
        let mut rows = 0;
        for waiting in self.pool.ready() {
            if rows + waiting.request.size > room {
                break;
            }
            rows += waiting.request.size;
            taken.push(waiting.request);
        }
        // Shortest first: the most requests are answered soonest.
        taken.sort_by_key(|request| request.length);
        let lengths: Vec<(u32, u32)> = taken.iter().map(|request| (request.length, request.size)).collect();
        let mut begin = 0;
        let mut made = false;
        for end in clusters::clusters(&lengths, &self.options.profile, self.options.max_batch) {
            let members = &taken[begin..end];
            let rows = members.iter().map(|request| request.size).sum();
            let ids = members.iter().map(|request| request.id).collect();
            made |= self.new_batch(now, ids, rows, lengths[end - 1].0);
            begin = end;
        }
        made
    }

    fn new_batch(&mut self, now: Time, members: Vec<RequestId>, rows: u32, length: u32) -> bool {
        if members.is_empty() {
            return false;
        }
        let may_split = self.may_split(0, rows, length);
        let batch = self.table.new_batch(now, rows, length, self.stages, may_split);
        let item = self.take(batch, members, false);
        self.outputs.push_back(DeviceOutput::Note(Note::New { batch, rows, length }));
        self.queues[0].push_back(item);
        true
    }

    /// Members whose answer is final, or whose clients have gone, leave.
    fn let_out(&mut self, item: &mut Item, stage: u16, launch: LaunchId, exits: &[RequestId]) {
        let last = stage + 1 == self.stages;
        let mut left = 0;
        let (gone, running, outputs) = (&mut self.gone, &mut self.running, &mut self.outputs);
        item.members.retain(|request| {
            let has_gone = gone.remove(request);
            let leaves = last || has_gone || exits.contains(request);
            if leaves {
                left += running.remove(request).map_or(0, |request| request.size);
                if !has_gone {
                    outputs.push_back(DeviceOutput::Reply { request: *request, launch });
                }
            }
            !leaves
        });
        self.running_rows -= left;
        item.rows -= left;
        if left > 0 && !last {
            self.outputs.push_back(DeviceOutput::Note(Note::Exit { batch: item.batch, rows: left, stage }));
            if let Some(batch) = self.table.get_mut(item.batch) {
                batch.rows -= left;
                for completed in batch.completed.iter_mut().take(usize::from(stage) + 1) {
                    *completed = completed.saturating_sub(left);
                }
            }
        }
    }

    /// Where a batch goes after a stage.
    fn move_on(&mut self, mut item: Item, stage: u16) {
        let Some(pair) = item.pair else { return };
        let last = stage + 1 == self.stages;
        let together = self.table.get(item.batch).and_then(|batch| batch.stretch.as_ref()).map(|stretch| stretch.stage);
        if item.members.is_empty() {
            if !last {
                self.buffers.drain(stage, pair);
            }
            self.buffers.finish(&item.families);
            match together {
                // Who was to join, or to be joined, goes on alone.
                Some(_) => self.end_stretch(item.batch),
                None => self.table.remove(item.batch),
            }
            return;
        }
        if together == Some(stage) {
            let waiting = self.table.get_mut(item.batch).and_then(|batch| batch.stretch.as_mut()?.waiting.take());
            let Some(other) = waiting else {
                if let Some(stretch) = self.table.get_mut(item.batch).and_then(|batch| batch.stretch.as_mut()) {
                    stretch.waiting = Some(item);
                }
                return;
            };
            let (mut whole, joined) = if item.joins { (other, item) } else { (item, other) };
            // The rows that join go into the pair of the batch; theirs is free.
            if let Some(pair) = joined.pair {
                self.buffers.drain(stage, pair);
            }
            whole.members.extend(joined.members);
            whole.rows += joined.rows;
            if let Some(batch) = self.table.get_mut(whole.batch) {
                batch.stretch = None;
            }
            item = whole;
        } else if together.is_none() && self.split(&item, stage) {
            return;
        }
        self.queues[usize::from(stage) + 1].push_back(item);
    }

    /// One side of a stretch is empty: the other goes on as the batch.
    fn end_stretch(&mut self, batch: BatchId) {
        let Some(stretch) = self.table.get_mut(batch).and_then(|batch| batch.stretch.take()) else { return };
        if let Some(mut item) = stretch.waiting {
            item.joins = false;
            self.queues[usize::from(stretch.stage) + 1].push_back(item);
            return;
        }
        let in_queues = self.queues.iter_mut().flatten();
        let in_executors = self.executors.iter_mut().filter_map(|executor| executor.item.as_mut());
        for item in in_queues.chain(in_executors).filter(|item| item.batch == batch) {
            item.joins = false;
        }
    }

    /// Policy II: parts a batch before the next stage, if the rest takes no longer for it (DVABatch §7.2). Says whether it did.
    fn split(&mut self, item: &Item, stage: u16) -> bool {
        let (Some(pair), Some(batch)) = (item.pair, self.table.get(item.batch)) else { return false };
        let parts = if self.options.by_operator { self.parts(stage + 1, item.rows, batch.length) } else { 1 };
        if parts < 2 {
            return false;
        }
        let size = item.rows.div_ceil(parts);
        let mut items: Vec<Item> = Vec::new();
        for request in &item.members {
            let rows = self.running.get(request).map_or(0, |request| request.size);
            match items.last_mut() {
                Some(part) if part.rows + rows <= size => {
                    part.members.push(*request);
                    part.rows += rows;
                }
                _ => items.push(Item { members: vec![*request], rows, ..item.clone() }),
            }
        }
        if items.len() < 2 {
            return false;
        }
        let family = self.buffers.split(stage + 1, pair, items.len() as u32);
        for (index, part) in items.iter_mut().enumerate() {
            part.families.push(family);
            if index > 0 {
                part.batch = self.table.part_of(item.batch, part.rows, stage);
            }
        }
        if let (Some(batch), Some(first)) = (self.table.get_mut(item.batch), items.first()) {
            batch.rows = first.rows;
            batch.may_split = true;
        }
        let into = items.iter().skip(1).map(|part| part.batch).collect();
        self.outputs.push_back(DeviceOutput::Note(Note::Split { batch: item.batch, into, stage }));
        self.queues[usize::from(stage) + 1].extend(items);
        true
    }
}

/// The slots as one run, if they are one in the ring.
fn one_run(pool: &InputPool, slots: &[SlotRun]) -> Option<SlotRun> {
    let (first, rest) = slots.split_first()?;
    rest.iter().try_fold(*first, |run, next| {
        pool.are_neighbours(run, *next).then_some(SlotRun { count: run.count + next.count, ..run })
    })
}

impl DevicePolicy for Staged {
    fn lanes(&self) -> &[LaneSpec] {
        &self.lanes
    }

    fn handle_request(&mut self, now: Time, request: &DeviceRequest) -> Result<(), DeviceReject> {
        let needed = Self::needed(&self.options.profile)(request);
        if self.options.drop && request.deadline != Time::MAX && now + needed > request.deadline {
            return Err(DeviceReject::DeadlineImpossible { needed, allowed: request.deadline.since(now) });
        }
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
        if self.pool.remove(request, &mut self.outputs).is_some() {
            self.advance(now);
            return true;
        }
        // It leaves its batch at the end of the stage that it is in.
        self.running.contains_key(&request) && self.gone.insert(request)
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
            waits && waiting.request.size <= self.options.max_batch.saturating_sub(self.running_rows)
        };
        let oldest = self.pool.ready().next().filter(fits);
        let window = oldest.map(|waiting| (waiting.arrival + self.window(), DeviceTimeout::Window));
        let hopeless = self.pool.hopeless_at(Self::needed(&self.options.profile)).filter(|_| self.options.drop);
        window.into_iter().chain(hopeless.map(|at| (at, DeviceTimeout::Hopeless))).min()
    }

    fn stats(&self) -> PoolStats {
        self.pool.stats(self.running_rows)
    }
}
