//! New, stretch and split: when requests join or leave a batch (DVABatch §5, §7.2).

use super::batch_table::Stretch;
use super::executor::Item;
use super::{Joining, Staged, clusters};
use crate::device::request_pool::PooledRequest;
use crate::device::{DeviceRequest, LaunchId, Note, Turn};
use crate::ids::{BatchId, RequestId};
use crate::time::Duration;

/// The device time that a split may cost, in thousandths: measured latencies are no more exact.
const SPLIT_TOLERANCE: u64 = 20;
const PERMILLE: u64 = 1000;

impl Staged {
    /// Whether a batch of `rows` items would be split after stage `from` or a later one (DVABatch
    /// §5.2.2).
    pub(super) fn may_split(&self, from: u16, rows: u32, length: u32) -> bool {
        self.options.by_operator && (from + 1..self.stages).any(|stage| self.parts(stage, rows, length) > 1)
    }

    /// The number of parts into which a batch is split before `stage` (DVABatch §7.2, policy II).
    /// The batch is halved while a half takes at most half the time of the whole, or hardly more,
    /// in the remaining stages.
    pub(super) fn parts(&self, stage: u16, rows: u32, length: u32) -> u32 {
        let profile = &self.options.profile;
        let (mut size, mut parts) = (rows, 1);
        while size > 1 {
            let half = size.div_ceil(2);
            let (whole, halves) =
                (profile.remaining(stage, size, length), profile.remaining(stage, half, length).saturating_mul(2));
            if whole.saturating_mul(PERMILLE) < halves.saturating_mul(PERMILLE - SPLIT_TOLERANCE) {
                break;
            }
            (size, parts) = (half, parts * 2);
        }
        parts.min(rows)
    }

    /// Policy III: requests that wait join the newest batch (DVABatch §5.2.2, §7.2).
    pub(super) fn stretch(&mut self, turn: &mut Turn<'_>) -> bool {
        // Requests of other lengths need no running batch to join. They get a batch of their own
        // beside it (§7.2).
        if !self.options.by_load || self.options.by_length || self.pool.ready_rows() == 0 || turn.is_crowded() {
            return false;
        }
        let Some((id, batch)) = self.table.newest().filter(|_| self.first_is_free()) else { return false };
        let profile = &self.options.profile;
        let comp_wait = self.options.comp_wait;
        let comp_wait = comp_wait.unwrap_or_else(|| {
            Duration::from_nanos(profile.total(self.options.max_batch, batch.length).as_nanos() / 2)
        });
        let room = self.options.max_batch.saturating_sub(batch.rows);
        if batch.may_split || batch.stretch.is_some() || turn.now() >= batch.created + comp_wait || room == 0 {
            return false;
        }
        // If the batch is in a stage, the requests join after that stage. If it waits before a
        // stage, it waits there until they arrive.
        let in_stage =
            (1..self.stages).find(|s| self.holds(*s, id) && self.executors[usize::from(*s)].launch.is_some());
        let before = || (1..self.stages).find(|s| self.queues[usize::from(*s)].iter().any(|item| item.batch == id));
        let Some(stage) = in_stage.or_else(|| before().map(|stage| stage - 1)) else { return false };
        let in_executor = self.executors[usize::from(stage)].item.iter();
        let item = in_executor.chain(self.queues.iter().flatten()).find(|item| item.batch == id);
        // The joining requests go through another pair of buffers. The batch's own pair holds its
        // rows until they arrive.
        let pair = (0..self.options.pairs)
            .find(|pair| item.is_some_and(|item| item.pair != Some(*pair)) && self.buffers.is_legitimate(0, *pair));
        // After the last stage there is nothing left to share.
        let Some(pair) = pair.filter(|_| stage + 1 < self.stages) else { return false };
        let (members, joined, _) = self.pool.neighbours(room);
        if members.is_empty() || self.pool.longest(members.len()) > batch.length {
            return false;
        }
        let (rows, length) = (batch.rows, batch.length);
        if self.options.joining == Joining::IfSooner && !self.is_sooner_together(stage, rows, joined, length) {
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
        turn.note(Note::Stretch { batch: id, joined, rows: rows + joined, stage });
        self.queues[0].push_back(item);
        true
    }

    /// Whether `joined` items that join a batch of `rows` after `stage` are worth it. The answers
    /// together must come sooner than the answers of two batches, one after the other.
    fn is_sooner_together(&self, stage: u16, rows: u32, joined: u32, length: u32) -> bool {
        let profile = &self.options.profile;
        let rest = |rows| profile.remaining(stage + 1, rows, length).as_nanos();
        let there = profile.total(joined, length).as_nanos().saturating_sub(rest(joined));
        let apart = u128::from(rows + joined) * u128::from(rest(rows))
            + u128::from(joined) * u128::from(profile.total(joined, length).as_nanos());
        let together = u128::from(rows + joined) * (u128::from(there) + u128::from(rest(rows + joined)));
        together < apart
    }

    pub(super) fn holds(&self, stage: u16, batch: BatchId) -> bool {
        self.executors[usize::from(stage)].item.as_ref().is_some_and(|item| item.batch == batch)
    }

    /// Takes requests out of the pool, as an item for a batch's queue.
    pub(super) fn take(&mut self, batch: BatchId, members: Vec<RequestId>, joins: bool) -> Item {
        let (mut rows, mut slots) = (0, Vec::new());
        for request in &members {
            let Some(PooledRequest { request, slots: run, .. }) = self.pool.begin(*request) else { continue };
            rows += request.size;
            slots.extend(run);
        }
        Item { batch, members, rows, pair: None, joins, slots, families: Vec::new() }
    }

    /// The time that the oldest request may wait for others while batches run.
    pub(super) fn window(&self) -> Duration {
        match self.options.window {
            _ if !self.options.by_length => Duration::ZERO,
            Some(window) => window,
            None => self.options.profile.time(0, self.options.max_batch, self.pool.longest(usize::MAX)),
        }
    }

    /// Whether the next batch waits until no batch runs: as with one pair of buffers. On a crowded
    /// device batches side by side take units from other models, and each is late. Policy I bounds
    /// the items of batches side by side itself.
    fn keeps_to_one_batch(&self, turn: &Turn<'_>) -> bool {
        !self.options.by_length && !self.table.is_empty() && turn.is_crowded()
    }

    /// Turns waiting requests into batches, if the first stage is free (DVABatch §5.1: new).
    pub(super) fn make_batches(&mut self, turn: &mut Turn<'_>) -> bool {
        let oldest = self.pool.ready().next().filter(|_| self.first_is_free());
        let Some(oldest) = oldest.map(|waiting| waiting.arrival) else { return false };
        if self.keeps_to_one_batch(turn) {
            return false;
        }
        // Policy I: all batches side by side have at most the items of one largest batch.
        let running = if self.options.by_length { self.pool.running_rows() } else { 0 };
        let room = self.options.max_batch.saturating_sub(running);
        let full = self.pool.ready_rows() >= room;
        if !full && !self.table.is_empty() && turn.now() < oldest + self.window() {
            return false;
        }
        if !self.options.by_length {
            let (members, rows, _) = self.pool.neighbours(room);
            let longest = self.pool.longest(members.len());
            return self.new_batch(turn, members, rows, longest);
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
        // Shortest first: so the most requests are answered soonest.
        taken.sort_by_key(|request| request.length);
        let lengths: Vec<(u32, u32)> = taken.iter().map(|request| (request.length, request.size)).collect();
        let mut begin = 0;
        let mut made = false;
        for end in clusters::clusters(&lengths, &self.options.profile, self.options.max_batch) {
            let members = &taken[begin..end];
            let rows = members.iter().map(|request| request.size).sum();
            let ids = members.iter().map(|request| request.id).collect();
            made |= self.new_batch(turn, ids, rows, lengths[end - 1].0);
            begin = end;
        }
        made
    }

    pub(super) fn new_batch(&mut self, turn: &mut Turn<'_>, members: Vec<RequestId>, rows: u32, length: u32) -> bool {
        if members.is_empty() {
            return false;
        }
        let may_split = self.may_split(0, rows, length);
        let batch = turn.new_batch();
        self.table.insert(batch, turn.now(), rows, length, self.stages, may_split);
        let item = self.take(batch, members, false);
        turn.note(Note::New { batch, rows, length });
        self.queues[0].push_back(item);
        true
    }

    /// Lets members leave whose answer is final or whose clients have gone.
    pub(super) fn let_out(
        &mut self,
        turn: &mut Turn<'_>,
        item: &mut Item,
        stage: u16,
        launch: LaunchId,
        exits: &[RequestId],
    ) {
        let last = stage + 1 == self.stages;
        let mut left = 0;
        item.members.retain(|request| {
            let leaves = last || self.pool.has_gone(*request) || exits.contains(request);
            if leaves {
                left += self.pool.finish(*request, launch, turn);
            }
            !leaves
        });
        item.rows -= left;
        if left > 0 && !last {
            turn.note(Note::Exit { batch: item.batch, rows: left, stage });
            if let Some(batch) = self.table.get_mut(item.batch) {
                batch.rows -= left;
                for completed in batch.completed.iter_mut().take(usize::from(stage) + 1) {
                    *completed = completed.saturating_sub(left);
                }
            }
        }
    }

    /// Ends a stretch of which one side is empty: the other side goes on as the batch.
    pub(super) fn end_stretch(&mut self, batch: BatchId) {
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

    /// Policy II: splits a batch before the next stage, if the remaining stages take no longer for
    /// the parts (DVABatch §7.2). Returns whether it did.
    pub(super) fn split(&mut self, turn: &mut Turn<'_>, item: &Item, stage: u16) -> bool {
        let (Some(pair), Some(batch)) = (item.pair, self.table.get(item.batch)) else { return false };
        let parts = if self.options.by_operator { self.parts(stage + 1, item.rows, batch.length) } else { 1 };
        if parts < 2 {
            return false;
        }
        let size = item.rows.div_ceil(parts);
        let mut items: Vec<Item> = Vec::new();
        for request in &item.members {
            let rows = self.pool.running_size(*request);
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
                part.batch = turn.new_batch();
                self.table.insert_part(part.batch, item.batch, part.rows, stage);
            }
        }
        if let (Some(batch), Some(first)) = (self.table.get_mut(item.batch), items.first()) {
            batch.rows = first.rows;
            batch.may_split = true;
        }
        let into = items.iter().skip(1).map(|part| part.batch).collect();
        turn.note(Note::Split { batch: item.batch, into, stage });
        self.queues[usize::from(stage) + 1].extend(items);
        true
    }
}
