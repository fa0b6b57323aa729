//! Which models each backend is to have, while a scheduler leads (Symphony §4.4).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::assignment::{Assignment, PlanWanted, PlannedModel, Stamp, SubClusterPlan};
use super::epoch::Epoch;
use super::message::{NodeId, Offer};
use crate::time::{Duration, Time};

/// How models are divided among sub-clusters of backends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SubClusterOptions {
    /// How many sub-clusters there are, while there are as many backends.
    pub count: u32,
    /// How often models are divided anew; `Duration::MAX`: only when backends come and go, models are new, or somebody asks.
    pub plan_every: Duration,
    /// Models that one plan may move; `None`: any number.
    pub most_moves: Option<u32>,
}

/// What the assigner knows of a backend.
#[derive(Debug)]
pub(super) struct BackendView<'a> {
    pub node: NodeId,
    /// Who came first.
    pub joined: u64,
    pub is_leaving: bool,
    pub offer: &'a Offer,
    /// Models that may be planned there.
    pub ready: BTreeSet<&'a str>,
}

/// What the assigner has others do.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum AssignerOutput {
    /// Find a plan.
    Want(PlanWanted),
    /// There is a new one.
    Keep(SubClusterPlan),
    /// People should know.
    Note(String),
}

/// What backends are to be told.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub assignments: Vec<(NodeId, Assignment)>,
    /// Backends that leave, and whose models others have.
    pub let_go: Vec<NodeId>,
}

/// Where a planned model is to be.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The sub-cluster of the plan, or the next one that can have it if no backend there can.
    group: u32,
    /// Backends there can have it.
    can_be: bool,
    /// All of these have it.
    is_ready: bool,
}

/// Says which models each backend is to have.
///
/// Backends that may be told are divided into sub-clusters of even size, and each is to have the models that the plan has in its own. A model is not taken from a backend before all backends of its sub-cluster that
/// can have it do, so that no request waits for a move. Plans are made by whoever is asked with [`AssignerOutput::Want`].
///
/// What it needs to go on from whoever led before is what backends say that they were told and, where there is a store, the last plan.
#[derive(Debug)]
pub(super) struct Assigner {
    options: SubClusterOptions,
    epoch: Epoch,
    /// Of the last thing that was said.
    number: u64,
    plan: Option<SubClusterPlan>,
    /// By model: where it is to be, which is where the plan has it if it can be there.
    placed: BTreeMap<String, u32>,
    /// By backend: its sub-cluster.
    groups: BTreeMap<NodeId, u32>,
    told: BTreeMap<NodeId, Assignment>,
    /// Until then backends may be on their way here.
    settles_at: Time,
    is_settled: bool,
    /// How long backends that come and go are waited for before models are divided anew.
    quiet: Duration,
    plans_at: Time,
    /// There is something that the last plan does not have: the number of sub-clusters, models.
    unplanned: Option<(u32, BTreeSet<String>)>,
    /// What somebody was last asked about.
    tried: Option<(u32, BTreeSet<String>)>,
    pending: Option<PlanWanted>,
    outputs: VecDeque<AssignerOutput>,
}

impl Assigner {
    /// Of a scheduler that leads from now on, and knows its backends after `settles`. `plan`: the last one that is known.
    pub fn new(
        options: SubClusterOptions,
        epoch: Epoch,
        plan: Option<SubClusterPlan>,
        now: Time,
        settles: Duration,
    ) -> Self {
        Assigner {
            options,
            epoch,
            number: 0,
            plan,
            placed: BTreeMap::new(),
            groups: BTreeMap::new(),
            told: BTreeMap::new(),
            settles_at: now + settles,
            is_settled: false,
            quiet: settles,
            plans_at: now + options.plan_every,
            unplanned: None,
            tried: None,
            pending: None,
            outputs: VecDeque::new(),
        }
    }

    fn stamp(&mut self) -> Stamp {
        self.number += 1;
        Stamp { epoch: self.epoch, number: self.number }
    }

    /// Models are to be divided anew.
    pub fn handle_wanted(&mut self, now: Time) {
        self.plans_at = self.plans_at.min(now);
    }

    /// The answer to [`AssignerOutput::Want`]: by model the sub-cluster, or why there is no plan.
    pub fn handle_planned(&mut self, number: u64, planned: Result<Vec<u32>, String>) {
        let Some(wanted) = self.pending.take_if(|wanted| wanted.number == number) else { return };
        let assignment = match planned {
            Ok(assignment) if assignment.len() == wanted.models.len() => assignment,
            Ok(_) => return,
            Err(reason) => {
                let note = format!("models are not divided among {} sub-clusters anew: {reason}", wanted.sub_clusters);
                return self.outputs.push_back(AssignerOutput::Note(note));
            }
        };
        let of = |(model, to): (PlannedModel, u32)| (model.name, to.min(wanted.sub_clusters.saturating_sub(1)));
        let models = wanted.models.into_iter().zip(assignment).map(of).collect();
        let plan = SubClusterPlan { stamp: self.stamp(), sub_clusters: wanted.sub_clusters, models };
        self.outputs.push_back(AssignerOutput::Keep(plan.clone()));
        self.plan = Some(plan);
        // What could not be loaded is tried again.
        self.told.clear();
    }

    /// What is to be done outside.
    pub fn poll_output(&mut self) -> Option<AssignerOutput> {
        self.outputs.pop_front()
    }

    /// When [`Assigner::settle`] is to be called again at the latest.
    pub fn poll_timeout(&self) -> Time {
        match (self.is_settled, &self.pending) {
            (false, _) => self.settles_at,
            (true, Some(_)) => Time::MAX,
            (true, None) => self.plans_at,
        }
    }

    /// The sub-cluster of a backend.
    pub fn group(&self, node: NodeId) -> Option<u32> {
        self.groups.get(&node).copied()
    }

    /// Goes by what backends are there and have now. `load`: devices that a model keeps busy.
    pub fn settle(&mut self, now: Time, backends: &[BackendView<'_>], load: impl Fn(&str) -> f64) -> Told {
        self.told.retain(|node, _| backends.iter().any(|backend| backend.node == *node));
        let mut let_go: Vec<NodeId> = Vec::new();
        let managed = backends.iter().filter(|backend| !backend.offer.repository.is_empty());
        let (leaving, mut staying): (Vec<_>, Vec<_>) = managed.partition(|backend| backend.is_leaving);
        let_go.extend(backends.iter().filter(|b| b.is_leaving && b.offer.repository.is_empty()).map(|b| b.node));
        if now < self.settles_at {
            return Told { assignments: Vec::new(), let_go };
        }
        self.is_settled = true;
        staying.sort_by_key(|backend| backend.joined);
        self.adopt(&staying);
        let count = self.options.count.min(staying.len() as u32);
        self.regroup(&staying, count);
        let places = self.places(&staying, count);
        self.placed = places.iter().map(|(model, place)| (model.clone(), place.group)).collect();
        self.want(now, &staying, count, load);
        let mut assignments = Vec::new();
        for backend in staying.iter().chain(&leaving) {
            let (planned, mut kept) = self.wanted(backend, &staying, &places, count);
            if backend.is_leaving && kept.is_empty() {
                let_go.push(backend.node);
                continue;
            }
            if backend.is_leaving {
                // What nobody else can have does not hold it back, and is served until it goes.
                let has_place = |model: &str| places.get(model).is_some_and(|place| place.can_be);
                let names = backend.offer.repository.iter().map(|loadable| &loadable.model);
                let is_kept =
                    |model: &String| kept.contains(model) || (backend.ready.contains(&**model) && !has_place(model));
                kept = names.filter(|model| is_kept(model)).cloned().collect();
            }
            let Some(plan) = self.plan.as_ref().map(|plan| plan.stamp) else { continue };
            let sub_cluster = self.group(backend.node).unwrap_or(0);
            let is_same = |told: &Assignment| {
                (told.plan, told.sub_cluster, &told.planned, &told.kept) == (plan, sub_cluster, &planned, &kept)
            };
            if !self.told.get(&backend.node).is_some_and(is_same) {
                let assignment = Assignment { stamp: self.stamp(), plan, sub_cluster, planned, kept };
                self.told.insert(backend.node, assignment.clone());
                assignments.push((backend.node, assignment));
            }
        }
        Told { assignments, let_go }
    }

    /// Takes over what whoever led before told backends.
    fn adopt(&mut self, staying: &[&BackendView<'_>]) {
        let heard = staying.iter().filter_map(|backend| backend.offer.assigned.as_ref());
        let newest = heard.clone().map(|assigned| assigned.plan).max();
        if newest > self.plan.as_ref().map(|plan| plan.stamp) {
            let of = heard.filter(|assigned| Some(assigned.plan) == newest);
            // Also those that have no models.
            let sub_clusters = of.clone().map(|assigned| assigned.sub_cluster.saturating_add(1)).max().unwrap_or(0);
            let models: BTreeMap<String, u32> = of
                .flat_map(|assigned| assigned.planned.iter().map(|model| (model.clone(), assigned.sub_cluster)))
                .collect();
            self.plan = newest.map(|stamp| SubClusterPlan { stamp, sub_clusters, models });
        }
    }

    /// Has sub-clusters of even size, and as few backends as possible go to another.
    fn regroup(&mut self, staying: &[&BackendView<'_>], count: u32) {
        self.groups.retain(|node, group| *group < count && staying.iter().any(|backend| backend.node == *node));
        if count == 0 {
            return;
        }
        let mut members: Vec<Vec<NodeId>> = vec![Vec::new(); count as usize];
        let mut strangers = Vec::new();
        for backend in staying {
            let told = backend.offer.assigned.as_ref().map(|assigned| assigned.sub_cluster);
            let group = self.group(backend.node).or(told);
            match group.and_then(|group| members.get_mut(group as usize)) {
                Some(group) => group.push(backend.node),
                None => strangers.push(backend.node),
            }
        }
        for node in strangers {
            if let Some(least) = members.iter_mut().min_by_key(|members| members.len()) {
                least.push(node);
            }
        }
        loop {
            let sizes = || members.iter().map(Vec::len).enumerate();
            let least = sizes().min_by_key(|(group, size)| (*size, *group));
            let most = sizes().max_by_key(|(group, size)| (*size, *group));
            let (Some((to, small)), Some((from, large))) = (least, most) else { break };
            if large <= small + 1 {
                break;
            }
            // Who came last goes.
            if let Some(node) = members.get_mut(from).and_then(Vec::pop)
                && let Some(to) = members.get_mut(to)
            {
                to.push(node);
            }
        }
        let of = |(group, members): (u32, Vec<NodeId>)| members.into_iter().map(move |node| (node, group));
        self.groups = (0..).zip(members).flat_map(of).collect();
    }

    /// Asks for a plan if one is due.
    fn want(&mut self, now: Time, staying: &[&BackendView<'_>], count: u32, load: impl Fn(&str) -> f64) {
        let mut memory: BTreeMap<&str, u64> = BTreeMap::new();
        for loadable in staying.iter().flat_map(|backend| &backend.offer.repository) {
            let most = memory.entry(&loadable.model).or_default();
            *most = loadable.memory.max(*most);
        }
        if memory.is_empty() || count == 0 {
            self.plans_at = now + self.options.plan_every;
            return;
        }
        let planned = self.plan.as_ref();
        let is_planned = planned.is_some_and(|plan| {
            plan.sub_clusters == count && memory.keys().all(|model| plan.models.contains_key(*model))
        });
        let facts = (count, memory.keys().map(|model| (*model).to_owned()).collect::<BTreeSet<String>>());
        let unplanned = (!is_planned && self.tried.as_ref() != Some(&facts)).then(|| facts.clone());
        if unplanned.is_some() && self.unplanned != unplanned {
            // The first plan is made at once, as everybody has had the time to come.
            let soon = if planned.is_none() { now } else { now + self.quiet };
            self.plans_at = self.plans_at.min(soon);
        }
        self.unplanned = unplanned;
        if self.plans_at > now || self.pending.is_some() {
            return;
        }
        self.plans_at = now + self.options.plan_every;
        self.tried = Some(facts);
        let model = |(name, memory): (&str, u64)| PlannedModel {
            name: name.to_owned(),
            load: load(name),
            memory,
            running: self.placed.get(name).copied(),
        };
        let models = memory.into_iter().map(model).collect();
        self.number += 1;
        let wanted = PlanWanted {
            number: self.number,
            sub_clusters: count,
            models,
            memory: staying.iter().filter_map(|backend| backend.offer.memory).min(),
            most_moves: self.options.most_moves,
        };
        self.pending = Some(wanted.clone());
        self.outputs.push_back(AssignerOutput::Want(wanted));
    }

    /// Somebody is asked for a plan of what is there now, or will be soon: there is none if somebody was, and it could not be made.
    fn plan_may_come(&self) -> bool {
        self.pending.is_some() || self.unplanned.is_some()
    }

    /// By model: where it is to be.
    fn places(&self, staying: &[&BackendView<'_>], count: u32) -> BTreeMap<String, Place> {
        let mut places = BTreeMap::new();
        for (model, planned) in self.plan.iter().flat_map(|plan| &plan.models).filter(|(_, group)| **group < count) {
            let of = |group: u32| {
                let its = staying.iter().filter(move |backend| self.group(backend.node) == Some(group));
                its.filter(|backend| backend.offer.can_load(model))
            };
            let groups = (0..count).map(|after| (planned + after) % count);
            let found = groups.into_iter().find(|group| of(*group).next().is_some());
            let group = found.unwrap_or(*planned);
            let is_ready = of(group).all(|backend| backend.ready.contains(&**model));
            places.insert(model.clone(), Place { group, can_be: found.is_some(), is_ready });
        }
        places
    }

    /// By model: the sub-cluster that it is to be in, as of the last time that this was looked at.
    pub fn placed(&self) -> &BTreeMap<String, u32> {
        &self.placed
    }

    /// What a backend is to have: the models of its sub-cluster, and those that it has until others have them.
    fn wanted(
        &self,
        backend: &BackendView<'_>,
        staying: &[&BackendView<'_>],
        places: &BTreeMap<String, Place>,
        count: u32,
    ) -> (Vec<String>, Vec<String>) {
        let plan = self.plan.as_ref();
        let group = self.group(backend.node).filter(|_| !backend.is_leaving);
        let is_planned = |model: &str| group.is_some() && places.get(model).map(|place| place.group) == group;
        let is_kept = |model: &str| match places.get(model).filter(|place| place.can_be) {
            Some(place) => !place.is_ready,
            // Nobody else can have it, unless a plan is to come that says where.
            None if backend.is_leaving => {
                let is_late = plan.is_none_or(|plan| plan.sub_clusters != count || !plan.models.contains_key(model));
                is_late && self.plan_may_come() && staying.iter().any(|other| other.offer.can_load(model))
            }
            None => true,
        };
        let names = backend.offer.repository.iter().map(|loadable| &*loadable.model);
        let (planned, others): (Vec<&str>, Vec<&str>) = names.partition(|model| is_planned(model));
        let kept = others.into_iter().filter(|model| backend.ready.contains(model) && is_kept(model));
        let owned = |models: Vec<&str>| models.into_iter().map(str::to_owned).collect();
        (owned(planned), kept.map(str::to_owned).collect())
    }
}
