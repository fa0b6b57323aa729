//! The candidates and the devices of one kind, as the matchmaker knows them.

use std::cmp::Reverse;

use super::indexed_heap::IndexedHeap;
use super::messages::Candidate;
use super::ready_tree::ReadyTree;
use crate::ids::{DeviceId, DeviceKind};
use crate::time::{Duration, Time};

/// The most candidates whose turns are compared.
const MOST_COMPARED: usize = 16;
/// A candidate without a deadline has to start once it has waited for so many of its own runs.
const LONGEST_TURN: u64 = 10;

/// What decides between candidates that may be sent: `latest`, then `since`.
pub(super) type Urgency = (Time, Time);

#[derive(Debug, Default)]
pub(super) struct KindState {
    /// By model.
    pub candidates: Vec<Option<Candidate>>,
    /// By model: when to send the candidates that may not be sent yet.
    pub deferred: IndexedHeap<Time>,
    /// By model: the candidates that may be sent. The first heap has those that wait for a device of this kind only; heap
    /// `1 + f` those that wait, besides, until kind `f`, faster for them, has no free device.
    pub schedulable: Vec<IndexedHeap<Urgency>>,
    /// By model: the delays of the schedulable candidates; kept while batches are sent ahead.
    pub delays: IndexedHeap<Reverse<Duration>>,
    pub devices: Vec<DeviceId>,
    /// By place in `devices`: when the device can begin another batch.
    pub ready: ReadyTree,
    pub present: u32,
    pub free: u32,
}

impl KindState {
    /// Makes room for kinds up to `kind`, and so many models.
    pub fn make_room(kinds: &mut Vec<KindState>, kind: DeviceKind, models: usize) {
        while kinds.len() <= kind.0 as usize {
            kinds.push(KindState { candidates: vec![None; models], ..KindState::default() });
        }
        let classes = if kinds.len() == 1 { 1 } else { 1 + kinds.len() };
        for kind in kinds {
            kind.schedulable.resize(classes, IndexedHeap::new());
        }
    }

    /// Takes the model out of what waits here.
    pub fn forget(&mut self, model: u32) {
        self.deferred.remove(model);
        self.forget_schedulable(model);
    }

    fn forget_schedulable(&mut self, model: u32) {
        for heap in &mut self.schedulable {
            heap.remove(model);
        }
        self.delays.remove(model);
    }

    /// The model's candidate waits for its time.
    pub fn defer(&mut self, model: u32, candidate: &Candidate) {
        self.forget_schedulable(model);
        self.deferred.set(model, candidate.send());
    }

    /// The model's candidate waits for a device.
    pub fn schedule(&mut self, model: u32, class: usize, candidate: &Candidate, sends_ahead: bool) {
        self.schedulable[class].set(model, (candidate.latest, candidate.since));
        if sends_ahead {
            self.delays.set(model, Reverse(candidate.delay));
        }
    }

    pub fn is_schedulable(&self, model: u32) -> bool {
        self.schedulable.iter().any(|heap| heap.get(model).is_some())
    }

    /// The candidate that takes the least time an item, of those that wait for a device of this kind, if all could be run before the first of them has to
    /// start: that makes the mean wait the shortest (Smith's rule), and costs no deadline. What has none has to start once it has waited for ten of its own
    /// runs. `None` too if it takes not a quarter less than the most `urgent`: profiles are not that exact, and who came first goes first. `O(1)`: where there
    /// are more than a few, there is hardly time for all.
    pub fn cheapest(&self, now: Time, urgent: u32) -> Option<u32> {
        let KindState { candidates, schedulable, present, .. } = self;
        let waiting = &schedulable[0];
        if !(2..=MOST_COMPARED).contains(&waiting.len()) {
            return None;
        }
        let mut work = Duration::ZERO;
        let mut begins = Time::MAX;
        let mut cheapest: Option<(Candidate, u32)> = None;
        // By the item, in a common denominator.
        let cost = |of: &Candidate, other: &Candidate| u128::from(of.takes.as_nanos()) * u128::from(other.size);
        for model in waiting.ids() {
            let candidate = candidates[model as usize]?;
            work += candidate.takes;
            let last = if candidate.latest == Time::MAX {
                candidate.since + candidate.takes.saturating_mul(LONGEST_TURN)
            } else {
                candidate.latest
            };
            begins = begins.min(last);
            if cheapest.as_ref().is_none_or(|(best, id)| {
                (cost(&candidate, best), candidate.since, model) < (cost(best, &candidate), best.since, *id)
            }) {
                cheapest = Some((candidate, model));
            }
        }
        let (candidate, model) = cheapest?;
        let urgent = candidates[urgent as usize]?;
        if cost(&candidate, &urgent).saturating_mul(4) > cost(&urgent, &candidate).saturating_mul(3) {
            return None;
        }
        let share = Duration::from_nanos(work.as_nanos() / u64::from((*present).max(1)));
        (now + candidate.takes + share <= begins).then_some(model)
    }

    /// The longest way of a candidate that waits for a device.
    pub fn reach(&self) -> Duration {
        self.delays.peek().map_or(Duration::ZERO, |(Reverse(delay), _)| delay)
    }
}
