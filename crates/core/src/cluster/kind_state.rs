//! The candidates and the devices of one kind, from the matchmaker's point of view.

use std::cmp::Reverse;

use super::indexed_heap::IndexedHeap;
use super::messages::Candidate;
use super::order::{FairTime, Order};
use super::ready_tree::ReadyTree;
use crate::ids::{DeviceId, DeviceKind, ModelId};
use crate::time::{Duration, Time};

/// The largest number of candidates whose turns are compared.
const MOST_COMPARED: usize = 16;
/// A candidate without a deadline must start once it has waited for this many of its own runs.
const LONGEST_TURN: u64 = 10;

/// The key that orders candidates that may be sent: `latest`, then `since`. Under [`Order::Fair`]:
/// the begin in fair time, then `latest`. Candidates of lent queues come after all others.
pub(super) type Turn = (Time, Time);

/// Turns of lent queues have this or more in their second half. No clock gets there in 292 years.
const LENT: u64 = 1 << 63;

/// The rule of the turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turns {
    Shortest,
    Urgency,
    Fair,
    /// Some queues are lent: they come last, and the others in this order.
    Lending(Order),
}

impl Turns {
    fn new(order: Order, lends: bool) -> Self {
        match order {
            order if lends => Turns::Lending(order),
            Order::Shortest => Turns::Shortest,
            Order::Urgency => Turns::Urgency,
            Order::Fair => Turns::Fair,
        }
    }
}

impl Default for Turns {
    fn default() -> Self {
        Turns::new(Order::default(), false)
    }
}

/// The candidate that a free device should take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Choice {
    /// The candidate with the first turn.
    First,
    /// This model's candidate, before its turn.
    Other(u32),
    /// The candidate with the first turn, if the devices can be lent.
    Lent,
}

#[derive(Debug, Default)]
pub(super) struct KindState {
    /// By model.
    pub candidates: Vec<Option<Candidate>>,
    /// By model: when to send each candidate that may not be sent yet.
    pub deferred: IndexedHeap<Time>,
    /// By model: the candidates that may be sent. The candidates of the first heap wait only for a
    /// device of this kind. The candidates of heap `1 + f` also wait until kind `f`, which is
    /// faster for them, has no free device.
    pub schedulable: Vec<IndexedHeap<Turn>>,
    /// By model: the delays of the schedulable candidates. Kept only while batches are sent ahead.
    pub delays: IndexedHeap<Reverse<Duration>>,
    order: Order,
    turns: Turns,
    /// By model: whether its queue is lent. A model without an entry is not.
    lent: Vec<bool>,
    /// By model: how long its last candidate could wait, from its first request to its latest start.
    /// Kept while queues are lent, for models with deadlines whose queues are not.
    waits: IndexedHeap<Duration>,
    /// Maintained under [`Order::Fair`] only.
    fair: FairTime,
    pub devices: Vec<DeviceId>,
    /// By place in `devices`: when the device can begin another batch.
    pub ready: ReadyTree,
    pub present: u32,
    pub free: u32,
}

impl KindState {
    /// Makes room for kinds up to `kind`, and for `models` models.
    pub fn make_room(kinds: &mut Vec<KindState>, kind: DeviceKind, models: usize, order: Order) {
        while kinds.len() <= kind.0 as usize {
            let (candidates, fair) = (vec![None; models], FairTime::new(models));
            let mut kind = KindState { candidates, fair, ..KindState::default() };
            kind.lent = kinds.first().map_or_else(Vec::new, |first| first.lent.clone());
            kind.set_order(order);
            kinds.push(kind);
        }
        let classes = if kinds.len() == 1 { 1 } else { 1 + kinds.len() };
        for kind in kinds {
            kind.schedulable.resize(classes, IndexedHeap::new());
        }
    }

    /// Adds the next model.
    pub fn join(&mut self) {
        self.candidates.push(None);
        self.fair.join();
    }

    /// Sets the order in which candidates get devices. It applies to candidates that are scheduled
    /// from now on.
    pub fn set_order(&mut self, order: Order) {
        (self.order, self.fair) = (order, FairTime::new(self.candidates.len()));
        self.turns = Turns::new(order, self.lent.contains(&true));
    }

    /// Makes the queue of a model a lent one. It applies to candidates that are scheduled from now
    /// on.
    pub fn set_lent(&mut self, model: u32) {
        let model = model as usize;
        self.lent.resize(self.lent.len().max(model + 1), false);
        self.lent[model] = true;
        self.turns = Turns::new(self.order, true);
    }

    fn is_lent(&self, model: u32) -> bool {
        self.lent.get(model as usize).copied().unwrap_or(false)
    }

    /// A model is granted a device, which takes no other batch for now.
    pub fn granted(&mut self, model: ModelId, place: u32) {
        if self.order == Order::Fair {
            self.fair.granted(model);
        }
        self.ready.set(place, Time::MAX);
    }

    /// The batch of a model that was granted a device takes this long.
    pub fn runs(&mut self, model: ModelId, takes: Duration) {
        if self.order == Order::Fair {
            self.fair.runs(model, takes);
        }
    }

    /// Removes the model from all heaps of this kind.
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

    /// Notes that the model's candidate waits for its time.
    pub fn defer(&mut self, model: u32, candidate: &Candidate) {
        self.forget_schedulable(model);
        self.deferred.set(model, candidate.send());
    }

    /// Notes that the model's candidate waits for a device.
    pub fn schedule(&mut self, model: u32, class: usize, candidate: &Candidate, sends_ahead: bool) {
        let turn = match self.turns {
            Turns::Shortest | Turns::Urgency => (candidate.latest, candidate.since),
            Turns::Fair => (self.fair.begin(model), candidate.latest),
            Turns::Lending(order) => self.lending_turn(order, model, candidate),
        };
        self.schedulable[class].set(model, turn);
        if sends_ahead {
            self.delays.set(model, Reverse(candidate.delay));
        }
    }

    #[cold]
    fn lending_turn(&mut self, order: Order, model: u32, candidate: &Candidate) -> Turn {
        let Candidate { latest, since, takes, .. } = *candidate;
        if latest < Time::MAX && !self.is_lent(model) {
            // A late candidate would leave no wait at all. Devices that begin such batches in turn
            // are free this often.
            let turn = Duration::from_nanos(takes.as_nanos() / u64::from(self.present.max(1)));
            self.waits.set(model, latest.since(since).max(turn));
        }
        match order {
            // Half of the latest start leaves room for the mark. The order of the halves is the
            // same.
            _ if self.is_lent(model) => (Time::MAX, Time::from_nanos(LENT | candidate.latest.as_nanos() >> 1)),
            Order::Shortest | Order::Urgency => (candidate.latest, candidate.since),
            Order::Fair => (self.fair.begin(model), candidate.latest),
        }
    }

    /// Defers the model's candidate, which may be sent already, until `until`.
    pub fn hold(&mut self, model: u32, until: Time) {
        self.forget_schedulable(model);
        self.deferred.set(model, until);
    }

    /// The shortest time that a candidate of a queue which is not lent could wait for a device.
    pub fn shortest_wait(&self) -> Option<Duration> {
        self.waits.peek().map(|(wait, _)| wait)
    }

    /// Appends when the deferred candidates may start that start before `end`, those of lent queues
    /// left out. Such a candidate grows while it waits, and starts earlier then. It is taken to
    /// double: no start is before `latest - takes`. The list is in arbitrary order.
    pub fn reserved(&self, now: Time, end: Time, starts: &mut Vec<Time>) {
        let own = self.deferred.ids().filter(|model| !self.is_lent(*model));
        let candidates = own.filter_map(|model| self.candidates[model as usize]);
        let start = |candidate: Candidate| candidate.send().min(candidate.latest - candidate.takes).max(now);
        starts.extend(candidates.map(start).filter(|start| *start < end));
    }

    /// Whether any candidate waits for a device of this kind, or will by `now`.
    #[inline(always)]
    pub fn is_awaited(&self, now: Time) -> bool {
        self.deferred.peek().is_some_and(|(send, _)| send <= now)
            || self.schedulable.iter().any(|heap| !heap.is_empty())
    }

    pub fn is_schedulable(&self, model: u32) -> bool {
        self.schedulable.iter().any(|heap| heap.get(model).is_some())
    }

    /// The candidate that a device takes when `urgent` has the first turn.
    pub fn choose(&self, now: Time, urgent: u32) -> Choice {
        let waiting = &self.schedulable[0];
        if self.turns != Turns::Shortest {
            return self.choose_lending(now, urgent);
        }
        if !(2..=MOST_COMPARED).contains(&waiting.len()) {
            return Choice::First;
        }
        self.cheapest(now, urgent, waiting.ids()).map_or(Choice::First, Choice::Other)
    }

    #[cold]
    fn choose_lending(&self, now: Time, urgent: u32) -> Choice {
        let waiting = &self.schedulable[0];
        match self.turns {
            Turns::Lending(_) if self.is_lent(urgent) => Choice::Lent,
            Turns::Lending(Order::Shortest) if (2..=MOST_COMPARED).contains(&waiting.len()) => {
                let own = waiting.ids().filter(|model| !self.is_lent(*model));
                self.cheapest(now, urgent, own).map_or(Choice::First, Choice::Other)
            }
            _ => Choice::First,
        }
    }

    /// Under [`Order::Shortest`]: the candidate with the least device time an item, of the
    /// candidates that wait for a device of this kind. Smith's rule: this order makes the mean wait
    /// the shortest. `None` unless all of them could run before the first of them must start, so
    /// that the order costs no deadline. A candidate without a deadline must start once it has
    /// waited for ten of its own runs. `None` also if the candidate does not save at least a
    /// quarter against `urgent`, the most urgent: profiles are not that exact. `O(1)`, as more than
    /// 16 candidates are not compared: there is hardly time for all.
    fn cheapest(&self, now: Time, urgent: u32, waiting: impl Iterator<Item = u32>) -> Option<u32> {
        let KindState { candidates, present, .. } = self;
        let mut work = Duration::ZERO;
        let mut begins = Time::MAX;
        let mut cheapest: Option<(Candidate, u32)> = None;
        // Time an item, as fractions with a common denominator.
        let cost = |of: &Candidate, other: &Candidate| u128::from(of.takes.as_nanos()) * u128::from(other.size);
        for model in waiting {
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

    /// The first of the candidates that wait only for a device of this kind.
    pub fn next_turn(kinds: &[KindState], kind: usize) -> Option<(Turn, u32)> {
        let heaps = kinds[kind].schedulable.iter().enumerate();
        let open = heaps.filter(|(class, _)| *class == 0 || kinds[class - 1].free == 0);
        open.filter_map(|(_, heap)| heap.peek()).min()
    }

    /// The fastest kind that is faster for the model than `kind` and could take its batch. With
    /// `free`, only kinds with a free device count.
    pub fn waits_for(kinds: &[KindState], model: u32, kind: usize, free: bool) -> Option<usize> {
        let candidate = |kind: usize| kinds[kind].candidates[model as usize];
        let pace = candidate(kind)?.pace;
        let faster = |other: usize| {
            let candidate = candidate(other).filter(|candidate| candidate.pace < pace)?;
            (!free || kinds[other].free > 0).then_some((candidate.pace, other))
        };
        (0..kinds.len()).filter_map(faster).min().map(|(_, other)| other)
    }

    /// The device (its place) that should take a batch, of the devices that can begin one by `by`.
    /// `load` tells when a device is done with work from outside the scheduler; the least loaded
    /// device wins.
    pub fn least_loaded(&self, by: Time, load: impl Fn(DeviceId) -> Time) -> Option<u32> {
        let load = |place: u32| load(self.devices[place as usize]);
        let first = self.ready.first_by(by)?;
        if load(first) == Time::ZERO {
            return Some(first);
        }
        self.ready.all_by(by).min_by_key(|place| (load(*place), *place))
    }

    /// The longest delay of a candidate that waits for a device.
    pub fn reach(&self) -> Duration {
        self.delays.peek().map_or(Duration::ZERO, |(Reverse(delay), _)| delay)
    }
}
