//! The rules of models that move between backends, judged from outside.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::roles::{Assignment, Message, NodeId, Refusal, RequestEnd, Stamp};
use downbeat_core::{Duration, Time};

use super::process::model_of;

/// How old what a scheduler knows of others can be while there is trouble: the longest pause, what wires take, and how long a peer is silent before it is lost.
const KNOWN_WITHIN: Duration = Duration::from_millis(1_000);

/// A model that a backend has loaded.
#[derive(Clone, Copy, Debug)]
struct Copy {
    since: Time,
    /// When a scheduler was told of it first.
    offered: Option<Time>,
    /// By whom the backend was told to give it up, and when in that one's words.
    told: Option<(NodeId, Option<Stamp>)>,
}

/// What is known of a backend that lives.
#[derive(Debug)]
struct Living {
    since: Time,
    /// It was told to go.
    is_draining: bool,
    /// Models that it could not load when it tried last.
    failed: BTreeSet<usize>,
}

/// Looks at which models backends have loaded, and at what they are told. Calm is when nothing but joins, drains and moves has happened for a while: no process killed, stopped or slow, no wire cut, no connection
/// between a scheduler and another ended.
///
/// - *last copy stays*: who has a model is told to give it up only while another one has it that was not told so; in calm at that moment, otherwise within the time in which whoever says so must have heard of its end,
///   or that the model is there.
///   A backend that leaves is let go, in calm, only while others have its models, or if none that stays can load them. (In trouble whoever leads may see nobody else at all.)
/// - *moves refuse nothing*: in calm, no request is refused for its model being unknown or removed while a backend that stays has had it all the time.
/// - *runs where it is loaded*: a backend begins batches only of models that it has, and gives none up that it runs.
#[derive(Debug)]
pub(super) struct CopyJudge {
    /// How long after trouble there is calm, and how long after an event all have heard of it.
    settles: Duration,
    troubled_until: Time,
    copies: BTreeMap<(usize, NodeId), Copy>,
    /// When a copy of a model came to its end last, other than by being told.
    ended: BTreeMap<usize, Time>,
    living: BTreeMap<NodeId, Living>,
    said: BTreeSet<(NodeId, Stamp)>,
    let_go: BTreeSet<(NodeId, NodeId)>,
    /// The last question how to divide models had no answer.
    has_no_plan: bool,
}

impl CopyJudge {
    /// `settles`: how long after an event all have heard of it, if nothing goes wrong.
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
        }
    }

    /// Something goes wrong until then.
    pub fn troubled(&mut self, until: Time) {
        self.troubled_until = self.troubled_until.max(until);
    }

    fn is_calm(&self, now: Time) -> bool {
        now >= self.troubled_until + self.settles
    }

    /// There is a plan, or there could be none.
    pub fn planned(&mut self, has_no_plan: bool) {
        self.has_no_plan = has_no_plan;
    }

    /// Whether there was no plan when one was asked for last.
    pub fn has_no_plan(&self) -> bool {
        self.has_no_plan
    }

    /// A backend begins, or is there already.
    pub fn begins(&mut self, now: Time, backend: NodeId) {
        let living = || Living { since: now, is_draining: false, failed: BTreeSet::new() };
        self.living.entry(backend).or_insert_with(living);
    }

    /// A backend is to go.
    pub fn drains(&mut self, backend: NodeId) {
        if let Some(living) = self.living.get_mut(&backend) {
            living.is_draining = true;
        }
    }

    /// A backend tried to load a model.
    pub fn loaded(&mut self, now: Time, backend: NodeId, model: usize, is_there: bool) {
        let Some(living) = self.living.get_mut(&backend) else { return };
        if is_there {
            living.failed.remove(&model);
            self.copies.insert((model, backend), Copy { since: now, offered: None, told: None });
        } else {
            living.failed.insert(model);
        }
    }

    /// A backend has a model no more.
    pub fn unloads(&mut self, now: Time, backend: NodeId, model: usize) {
        if self.copies.remove(&(model, backend)).is_some_and(|copy| copy.told.is_none()) {
            self.ended.insert(model, now);
        }
    }

    /// A process is dead.
    pub fn died(&mut self, now: Time, process: NodeId) {
        self.living.remove(&process);
        let of = self.copies.keys().filter(|(_, backend)| *backend == process);
        for (model, backend) in of.copied().collect::<Vec<_>>() {
            self.copies.remove(&(model, backend));
            self.ended.insert(model, now);
        }
    }

    /// A backend and a scheduler have no link any more: what the one was told and has not heard does not come.
    pub fn lost(&mut self, backend: NodeId, scheduler: NodeId) {
        for ((_, at), copy) in &mut self.copies {
            if *at == backend && copy.told.is_some_and(|(by, _)| by == scheduler) {
                copy.told = None;
            }
        }
    }

    /// One says something to another, perhaps once more; what is wrong with it.
    pub fn sent(&mut self, now: Time, from: NodeId, to: NodeId, message: &Message<u64>) -> Option<String> {
        match message {
            Message::Offer(offer) => {
                let heard = offer.assigned.as_ref().map(|assigned| assigned.stamp);
                for model in offer.models.iter().filter_map(|model| model_of(&model.model)) {
                    let Some(copy) = self.copies.get_mut(&(model, from)) else { continue };
                    copy.offered.get_or_insert(now);
                    // It may have been told to keep it after all.
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

    /// Of whom those that a scheduler did not tell to give a model up.
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
            // Of one that was offered just now, or while the scheduler stood still, that one may not have heard.
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

    /// A request of a model ends; what is wrong with that.
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
