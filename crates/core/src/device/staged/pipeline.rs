//! The way of batches through the stages: executors take them, run them and pass them on (DVABatch
//! §6.2).

use super::Staged;
use super::executor::{ExecutorEvent, ExecutorState, Item};
use crate::device::{InputSource, Launch, RequestPool, RingRun, SegmentRange, Turn};

impl Staged {
    /// Activates an inactive executor that has a legitimate pair again. An active or checking
    /// executor hands back the pairs that it is done with.
    pub(super) fn wake(&mut self, stage: u16) -> bool {
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

    /// Lets an active executor take the next batch.
    pub(super) fn pull(&mut self, stage: u16) -> bool {
        if self.executor(stage).state() != ExecutorState::Active {
            return false;
        }
        let legitimate = self.buffers.any_legitimate(stage);
        let Some(mut item) = self.queues[usize::from(stage)].pop_front() else { return false };
        if item.pair.is_none() {
            // Only a batch before the first stage has no pair. An active executor has a pair,
            // unless a split took it back.
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

    /// Runs an executor's batch, if the batch's pair is legitimate.
    pub(super) fn check(&mut self, turn: &mut Turn<'_>, stage: u16) -> bool {
        let executor = &mut self.executors[usize::from(stage)];
        let (ExecutorState::Checking, Some(item)) = (executor.state(), executor.item.as_ref()) else { return false };
        let Some(pair) = item.pair.filter(|pair| self.buffers.is_legitimate(stage, *pair)) else { return false };
        self.buffers.begin(stage, pair);
        let id = turn.new_launch();
        let inputs = match one_run(&self.pool, &item.slots) {
            _ if stage > 0 => InputSource::Device,
            Some(run) => InputSource::Ring(run),
            None if self.options.ring_slots > 0 => InputSource::Device,
            None => InputSource::Host,
        };
        turn.launch(Launch {
            id,
            batch: item.batch,
            granted: None,
            model: turn.model(),
            lane: turn.lanes()[usize::from(stage)],
            segments: SegmentRange::new(stage, stage + 1),
            members: item.members.clone(),
            rows: item.rows,
            computed_rows: item.rows,
            length: self.table.get(item.batch).map_or(0, |batch| batch.length),
            inputs,
        });
        executor.launch = Some(id);
        executor.on(ExecutorEvent::IsLegitimate);
        true
    }

    /// Passes a batch on after a stage.
    pub(super) fn move_on(&mut self, turn: &mut Turn<'_>, mut item: Item, stage: u16) {
        let Some(pair) = item.pair else { return };
        let last = stage + 1 == self.stages;
        let together = self.table.get(item.batch).and_then(|batch| batch.stretch.as_ref()).map(|stretch| stretch.stage);
        if item.members.is_empty() {
            if !last {
                self.buffers.drain(stage, pair);
            }
            self.buffers.finish(&item.families);
            match together {
                // The other side of the stretch goes on alone.
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
            // The joining rows go into the pair of the batch, so that their own pair is free.
            if let Some(pair) = joined.pair {
                self.buffers.drain(stage, pair);
            }
            whole.members.extend(joined.members);
            whole.rows += joined.rows;
            if let Some(batch) = self.table.get_mut(whole.batch) {
                let completed = batch.completed.get(usize::from(stage));
                debug_assert_eq!(completed, Some(&whole.rows), "the stage has run all of a batch that is together");
                batch.stretch = None;
            }
            item = whole;
        } else if together.is_none() && self.split(turn, &item, stage) {
            return;
        }
        self.queues[usize::from(stage) + 1].push_back(item);
    }
}

/// The slots as one run, if they are neighbours in the ring.
fn one_run(pool: &RequestPool, slots: &[RingRun]) -> Option<RingRun> {
    let (first, rest) = slots.split_first()?;
    rest.iter().try_fold(*first, |run, next| {
        pool.are_neighbours(run, *next).then_some(RingRun { count: run.count + next.count, ..run })
    })
}
