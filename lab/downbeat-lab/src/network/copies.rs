//! The rules of models that move between backends, judged from outside.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::{Duration, Time};
use downbeat_roles::{Assignment, Message, NodeId, Refusal, RequestEnd, Stamp};

use super::process::model_of;

/// The greatest age of a scheduler's knowledge of others during trouble: the longest pause, plus
/// the time on wires, plus the silence after which a peer is lost.
const KNOWN_WITHIN: Duration = Duration::from_millis(1_000);

/// A model that a backend has loaded.
#[derive(Clone, Copy, Debug)]
struct Copy {
    since: Time,
    /// The time when a scheduler first heard that the backend has the model.
    offered: Option<Time>,
    /// The scheduler that told the backend to give the model up, and the time in that scheduler's
    /// stamps.
    told: Option<(NodeId, Option<Stamp>)>,
}

/// The state of a living backend.
#[derive(Debug)]
struct Living {
    since: Time,
    /// True once the backend was told to drain.
    is_draining: bool,
    /// Models whose last load failed.
    failed: BTreeSet<usize>,
}

/// Checks which models backends have loaded, and which orders they get. The network is calm if
/// nothing but joins, drains and moves has happened for a while. No process was killed, stopped or
/// slow. No wire was cut, and no connection between a scheduler and another process ended.
///
/// - *last copy stays*: a backend is ordered to give a model up only while another backend has the
///   model and no such order. In calm that holds at this moment. In trouble it held within the time
///   after which the scheduler must have heard that the other copy ended, or that this one exists.
///   A draining backend is let go, in calm, only while others have its models, or if no staying
///   backend can load them. (In trouble a leader may see no other backend at all.)
/// - *moves refuse nothing*: in calm, no request is refused because its model is unknown or removed
///   while a staying backend has had the model all the time.
/// - *runs where it is loaded*: a backend begins batches only of models that it has, and gives no
///   model up that it runs.
#[derive(Debug)]
pub(super) struct CopyJudge {
    /// The time from trouble to calm, and from an event until all have heard of the event.
    settles: Duration,
    troubled_until: Time,
    copies: BTreeMap<(usize, NodeId), Copy>,
    /// The time when a copy of a model was last lost, other than by an order to give it up.
    ended: BTreeMap<usize, Time>,
    living: BTreeMap<NodeId, Living>,
    said: BTreeSet<(NodeId, Stamp)>,
    let_go: BTreeSet<(NodeId, NodeId)>,
    /// True if the last search for a division of the models found none.
    has_no_plan: bool,
    /// The searches without a result that no scheduler has told people of.
    unsaid: u32,
}

impl CopyJudge {
    /// `settles`: the time until all have heard of an event, if nothing goes wrong.
    pub fn new(settles: Duration) -> Self {
        CopyJudge {
            settles,
            troubled_until: Time::ZERO,
            copies: BTreeMap::new(),
            ended: BTreeMap::new(),
            living: BTreeMap::new(),
            said: BTreeSet::new(),
            let_go: BTreeSet::new(),
            has_no_plan: false,
            unsaid: 0,
        }
    }

    /// Records that trouble lasts until then.
    pub fn troubled(&mut self, until: Time) {
        self.troubled_until = self.troubled_until.max(until);
    }

    fn is_calm(&self, now: Time) -> bool {
        now >= self.troubled_until + self.settles
    }

    /// Records whether the last search found no plan.
    pub fn planned(&mut self, has_no_plan: bool) {
        self.has_no_plan = has_no_plan;
        self.unsaid += u32::from(has_no_plan);
    }

    /// A scheduler tells people something. Returns true if a search without a result is yet unsaid,
    /// and counts the search as said.
    pub fn take_unsaid(&mut self) -> bool {
        let is_unsaid = self.unsaid > 0;
        self.unsaid = self.unsaid.saturating_sub(1);
        is_unsaid
    }

    /// Returns true if the last search found no plan.
    pub fn has_no_plan(&self) -> bool {
        self.has_no_plan
    }

    /// Records a backend that begins, or that is already known.
    pub fn begins(&mut self, now: Time, backend: NodeId) {
        let living = || Living { since: now, is_draining: false, failed: BTreeSet::new() };
        self.living.entry(backend).or_insert_with(living);
    }

    /// Records that a backend was told to drain.
    pub fn drains(&mut self, backend: NodeId) {
        if let Some(living) = self.living.get_mut(&backend) {
            living.is_draining = true;
        }
    }

    /// Records that a backend tried to load a model.
    pub fn loaded(&mut self, now: Time, backend: NodeId, model: usize, is_there: bool) {
        let Some(living) = self.living.get_mut(&backend) else { return };
        if is_there {
            living.failed.remove(&model);
            self.copies.insert((model, backend), Copy { since: now, offered: None, told: None });
        } else {
            living.failed.insert(model);
        }
    }

    /// Records that a backend no longer has a model.
    pub fn unloads(&mut self, now: Time, backend: NodeId, model: usize) {
        if self.copies.remove(&(model, backend)).is_some_and(|copy| copy.told.is_none()) {
            self.ended.insert(model, now);
        }
    }

    /// Records that a process is dead.
    pub fn died(&mut self, now: Time, process: NodeId) {
        self.living.remove(&process);
        let of = self.copies.keys().filter(|(_, backend)| *backend == process);
        for (model, backend) in of.copied().collect::<Vec<_>>() {
            self.copies.remove(&(model, backend));
            self.ended.insert(model, now);
        }
    }

    /// Records that a backend and a scheduler have lost their link: an order that has not arrived
    /// is lost.
    pub fn lost(&mut self, backend: NodeId, scheduler: NodeId) {
        for ((_, at), copy) in &mut self.copies {
            if *at == backend && copy.told.is_some_and(|(by, _)| by == scheduler) {
                copy.told = None;
            }
        }
    }

    /// Records a message, perhaps a repeated one. Returns the rule that the message breaks.
    pub fn sent(&mut self, now: Time, from: NodeId, to: NodeId, message: &Message<u64>) -> Option<String> {
        match message {
            Message::Offer(offer) => {
                let heard = offer.assigned.as_ref().map(|assigned| assigned.stamp);
                for model in offer.models.iter().filter_map(|model| model_of(&model.model)) {
                    let Some(copy) = self.copies.get_mut(&(model, from)) else { continue };
                    copy.offered.get_or_insert(now);
                    // A later message may have told the backend to keep the model.
                    copy.told = copy.told.filter(|(_, said)| *said > heard);
                }
                None
            }
            Message::Assign(assigned) if self.said.insert((to, assigned.stamp)) => {
                self.assigns(now, from, to, assigned)
            }
            Message::LetGo if self.let_go.insert((from, to)) => self.lets_go(now, from, to),
            _ => None,
        }
    }

    /// Returns true if another backend has the model and `scheduler` has not told that backend to
    /// give it up.
    fn has_another(&self, model: usize, but: NodeId, scheduler: NodeId) -> bool {
        let mut others = self.copies.range((model, NodeId(0))..=(model, NodeId(u64::MAX)));
        others.any(|((_, at), copy)| *at != but && copy.told.is_none_or(|(by, _)| by != scheduler))
    }

    fn of(&self, backend: NodeId) -> Vec<(usize, Copy)> {
        let of = self.copies.iter().filter(|((_, at), _)| *at == backend);
        of.map(|((model, _), copy)| (*model, *copy)).collect()
    }

    fn assigns(&mut self, now: Time, from: NodeId, to: NodeId, assigned: &Assignment) -> Option<String> {
        let has =
            |model: usize| assigned.planned.iter().chain(&assigned.kept).any(|name| model_of(name) == Some(model));
        let mut wrong = None;
        for (model, copy) in self.of(to) {
            if has(model) || copy.told.is_some_and(|(by, _)| by == from) {
                continue;
            }
            // The scheduler may not have heard of the end of a copy that was offered just now, or
            // while the scheduler stood still.
            let heard_within = if self.is_calm(now) { self.settles } else { KNOWN_WITHIN };
            let is_known = copy.offered.is_some_and(|offered| offered + heard_within <= now);
            let ended = self.ended.get(&model).is_some_and(|ended| *ended + KNOWN_WITHIN >= now);
            let is_excused = !self.is_calm(now) && ended;
            if is_known && !is_excused && !self.has_another(model, to, from) {
                wrong = Some(format!("{to:?} is told to give up m{model}, which nobody else has: {assigned:?}"));
            }
            if let Some(copy) = self.copies.get_mut(&(model, to)) {
                copy.told = Some((from, Some(assigned.stamp)));
            }
        }
        wrong
    }

    fn lets_go(&mut self, now: Time, from: NodeId, to: NodeId) -> Option<String> {
        let mut wrong = None;
        for (model, copy) in self.of(to) {
            let can_load = |(node, living): (&NodeId, &Living)| {
                *node != to
                    && !living.is_draining
                    && living.since + self.settles <= now
                    && !living.failed.contains(&model)
            };
            let is_known = copy.offered.is_some_and(|offered| offered + self.settles <= now);
            let can_be_had = !self.has_no_plan && self.living.iter().any(can_load);
            if is_known && self.is_calm(now) && can_be_had && !self.has_another(model, to, from) {
                wrong = Some(format!("{to:?} is let go with m{model}, which nobody else has yet"));
            }
        }
        for ((_, at), copy) in &mut self.copies {
            if *at == to {
                copy.told = Some((from, None));
            }
        }
        wrong
    }

    /// Records the end of a request. Returns the rule that the end breaks, in words.
    pub fn request_ends(&self, now: Time, model: usize, end: &RequestEnd<u64>) -> Option<String> {
        let RequestEnd::Refused(Refusal::Rejected(Reject::UnknownModel) | Refusal::Dropped(DropReason::ModelRemoved)) =
            end
        else {
            return None;
        };
        let stays = |backend: &NodeId| self.living.get(backend).is_some_and(|living| !living.is_draining);
        let mut copies = self.copies.range((model, NodeId(0))..=(model, NodeId(u64::MAX)));
        let has = |((_, backend), copy): (&(usize, NodeId), &Copy)| {
            stays(backend)
                && copy.told.is_none()
                && copy.offered.is_some_and(|offered| offered.max(copy.since) + self.settles <= now)
        };
        let is_had = self.is_calm(now) && copies.any(has);
        is_had.then(|| format!("a request of m{model} ends so: {end:?}, and somebody has the model"))
    }
}
