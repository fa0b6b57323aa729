//! Decides which models each backend must have, while a scheduler leads (Symphony §4.4).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::assignment::{Assignment, Divided, MoveLimit, PlanWanted, PlannedModel, Stamp, SubClusterPlan};
use crate::epoch::Epoch;
use crate::message::{NodeId, Offer};
use downbeat_core::time::{Duration, Time};

/// The time to load a byte of a model, as long as no backend has loaded any. It is that of a disk of
/// 200 MB/s.
const NANOS_A_BYTE: f64 = 5.0;

/// The number of sub-clusters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SubClusterCount {
    /// This number, if there are at least as many backends.
    Fixed(u32),
    /// The least number whose devices hold their models, and whose requests are within the limit.
    Least,
}

/// How the assigner divides models among sub-clusters of backends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SubClusterOptions {
    /// The number of sub-clusters.
    pub count: SubClusterCount,
    /// How often models are divided anew. With `Duration::MAX`, only a change of backends, a new
    /// model or a user's wish causes a new plan.
    pub plan_every: Duration,
    /// How much one plan may change.
    pub moves: MoveLimit,
    /// The most requests per second of a sub-cluster (`Rmax`); `None`: any number.
    pub most_requests: Option<u32>,
}

/// The recent load of a model.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ModelLoad {
    /// Requests per second.
    pub requests: f64,
    /// The number of devices that the requests keep busy.
    pub devices: f64,
}

/// The assigner's view of a backend.
#[derive(Debug)]
pub(super) struct BackendView<'a> {
    pub node: NodeId,
    /// The order in which backends came.
    pub joined: u64,
    pub is_leaving: bool,
    pub offer: &'a Offer,
    /// Models that the scheduler may plan on this backend.
    pub ready: BTreeSet<&'a str>,
}

/// The assigner's wishes to the outside.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum AssignerOutput {
    /// Find a plan.
    Want(PlanWanted),
    /// Keep this new plan.
    Keep(SubClusterPlan),
    /// Show this text to people.
    Note(String),
}

/// Messages for backends.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub assignments: Vec<(NodeId, Assignment)>,
    /// Leaving backends whose models other backends have by now.
    pub let_go: Vec<NodeId>,
}

/// The facts, besides loads and limits, that a plan depends on.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Facts {
    sub_clusters: u32,
    models: BTreeSet<String>,
    /// Models that a backend could not load, if another number of sub-clusters may help.
    failed: BTreeSet<String>,
}

/// The sub-cluster that a planned model must be in.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The sub-cluster of the plan, or the next one that can load the model if no backend of the
    /// plan's can.
    group: u32,
    /// Whether any backend of the sub-cluster can load the model.
    can_be: bool,
    /// Whether all backends of the sub-cluster that can load the model have it.
    is_ready: bool,
}

/// Decides which models each backend must have.
///
/// The assigner divides backends whose models it controls into sub-clusters of even size. Each
/// backend must have the models that the plan puts in its sub-cluster. A backend keeps a model
/// until all backends of the model's sub-cluster that can load it have it, so no request waits for
/// a move. A planner outside makes the plans, on [`AssignerOutput::Want`].
///
/// A new leader goes on from the assignments that backends report and, where there is a store, from
/// the last plan.
#[derive(Debug)]
pub(super) struct Assigner {
    options: SubClusterOptions,
    epoch: Epoch,
    /// The number of the last stamp.
    number: u64,
    plan: Option<SubClusterPlan>,
    /// By model: its sub-cluster. This is the plan's sub-cluster if a backend there can load the
    /// model.
    placed: BTreeMap<String, u32>,
    /// By backend: its sub-cluster.
    groups: BTreeMap<NodeId, u32>,
    told: BTreeMap<NodeId, Assignment>,
    /// Backends may still be on their way here until then.
    settles_at: Time,
    is_settled: bool,
    /// How long backends may come and go before models are divided anew.
    quiet: Duration,
    plans_at: Time,
    /// A change that the last plan does not cover.
    unplanned: Option<Facts>,
    /// The facts of the last question to the planner.
    tried: Option<Facts>,
    pending: Option<PlanWanted>,
    outputs: VecDeque<AssignerOutput>,
}

impl Assigner {
    /// The assigner of a scheduler that begins to lead, and that knows its backends after
    /// `settles`. `plan`: the last known plan.
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

    /// Divides models anew at the next opportunity.
    pub fn handle_wanted(&mut self, now: Time) {
        self.plans_at = self.plans_at.min(now);
    }

    /// Takes the answer to [`AssignerOutput::Want`]: the sub-cluster of each model, or why there is
    /// no plan.
    pub fn handle_planned(&mut self, number: u64, planned: Result<Divided, String>) {
        let Some(wanted) = self.pending.take_if(|wanted| wanted.number == number) else { return };
        let divided = match planned {
            Ok(divided) if divided.models.len() == wanted.models.len() => divided,
            Ok(_) => return,
            Err(reason) => {
                let among = match (wanted.least, wanted.most) {
                    (least, most) if least == most => format!("{most} sub-clusters"),
                    (least, most) => format!("{least} to {most} sub-clusters"),
                };
                let note = format!("models are not divided among {among} anew: {reason}");
                return self.outputs.push_back(AssignerOutput::Note(note));
            }
        };
        if let Some(reason) = divided.too_many_requests {
            let note = format!("a sub-cluster has more requests than it should take: {reason}");
            self.outputs.push_back(AssignerOutput::Note(note));
        }
        let sub_clusters = divided.sub_clusters.clamp(wanted.least, wanted.most);
        let of = |(model, to): (PlannedModel, u32)| (model.name, to.min(sub_clusters.saturating_sub(1)));
        let models = wanted.models.into_iter().zip(divided.models).map(of).collect();
        let plan = SubClusterPlan { stamp: self.stamp(), sub_clusters, models };
        self.outputs.push_back(AssignerOutput::Keep(plan.clone()));
        self.plan = Some(plan);
        // Repeats all assignments, so that backends retry failed loads.
        self.told.clear();
    }

    /// The next wish to the outside.
    pub fn poll_output(&mut self) -> Option<AssignerOutput> {
        self.outputs.pop_front()
    }

    /// When [`Assigner::settle`] must be called again at the latest.
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

    /// The number of sub-clusters, if so many backends stay.
    fn count(&self, staying: usize) -> u32 {
        let staying = u32::try_from(staying).unwrap_or(u32::MAX);
        match self.options.count {
            SubClusterCount::Fixed(count) => count.min(staying),
            SubClusterCount::Least => self.plan.as_ref().map_or(1, |plan| plan.sub_clusters.max(1)).min(staying),
        }
    }

    /// Updates assignments for the backends as they are now. `load`: the load of a model.
    pub fn settle(&mut self, now: Time, backends: &[BackendView<'_>], load: impl Fn(&str) -> ModelLoad) -> Told {
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
        let count = self.count(staying.len());
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
                // A model that no other backend can load does not hold this one back. The backend
                // serves it until it goes.
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

    /// Takes over the plan that an earlier leader's assignments follow.
    fn adopt(&mut self, staying: &[&BackendView<'_>]) {
        let heard = staying.iter().filter_map(|backend| backend.offer.assigned.as_ref());
        let newest = heard.clone().map(|assigned| assigned.plan).max();
        if newest > self.plan.as_ref().map(|plan| plan.stamp) {
            let of = heard.filter(|assigned| Some(assigned.plan) == newest);
            // Also counts sub-clusters without models.
            let sub_clusters = of.clone().map(|assigned| assigned.sub_cluster.saturating_add(1)).max().unwrap_or(0);
            let models: BTreeMap<String, u32> = of
                .flat_map(|assigned| assigned.planned.iter().map(|model| (model.clone(), assigned.sub_cluster)))
                .collect();
            self.plan = newest.map(|stamp| SubClusterPlan { stamp, sub_clusters, models });
        }
    }

    /// Makes sub-clusters of even size, and moves as few backends as possible.
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
            // The backend that came last moves.
            if let Some(node) = members.get_mut(from).and_then(Vec::pop)
                && let Some(to) = members.get_mut(to)
            {
                to.push(node);
            }
        }
        let of = |(group, members): (u32, Vec<NodeId>)| members.into_iter().map(move |node| (node, group));
        self.groups = (0..).zip(members).flat_map(of).collect();
    }

    /// Asks for a plan if a plan is due.
    fn want(&mut self, now: Time, staying: &[&BackendView<'_>], count: u32, load: impl Fn(&str) -> ModelLoad) {
        let loadable = || staying.iter().flat_map(|backend| &backend.offer.repository);
        let names: BTreeSet<&str> = loadable().map(|loadable| &*loadable.model).collect();
        if names.is_empty() || count == 0 {
            self.plans_at = now + self.options.plan_every;
            return;
        }
        let failed = loadable().filter(|of| of.failed.is_some() && self.options.count == SubClusterCount::Least);
        let failed: BTreeSet<String> = failed.map(|of| of.model.clone()).collect();
        let planned = self.plan.as_ref();
        let is_planned = failed.is_empty()
            && planned.is_some_and(|plan| {
                plan.sub_clusters == count && names.iter().all(|model| plan.models.contains_key(*model))
            });
        let models = names.iter().map(|model| (*model).to_owned()).collect();
        let facts = Facts { sub_clusters: count, models, failed };
        let unplanned = (!is_planned && self.tried.as_ref() != Some(&facts)).then(|| facts.clone());
        if unplanned.is_some() && self.unplanned != unplanned {
            // The first plan is made at once, since all backends have had the time to come.
            let soon = if planned.is_none() { now } else { now + self.quiet };
            self.plans_at = self.plans_at.min(soon);
        }
        self.unplanned = unplanned;
        if self.plans_at > now || self.pending.is_some() {
            return;
        }
        self.plans_at = now + self.options.plan_every;
        self.tried = Some(facts);
        let models = self.models_to_plan(names, staying, (count, load));
        let (least, most) = match self.options.count {
            SubClusterCount::Fixed(_) => (count, count),
            SubClusterCount::Least => (1, u32::try_from(staying.len()).unwrap_or(u32::MAX)),
        };
        self.number += 1;
        let wanted = PlanWanted {
            number: self.number,
            least,
            most,
            present: self.plan.as_ref().map_or(0, |_| count),
            models,
            memory: staying.iter().filter_map(|backend| backend.offer.memory).min(),
            runs: staying.iter().filter_map(|backend| backend.offer.runs).max(),
            most_requests: self.options.most_requests,
            moves: self.options.moves,
        };
        self.pending = Some(wanted.clone());
        self.outputs.push_back(AssignerOutput::Want(wanted));
    }

    /// The models with these names, as far as backends know them.
    fn models_to_plan(
        &self,
        names: BTreeSet<&str>,
        staying: &[&BackendView<'_>],
        (count, load): (u32, impl Fn(&str) -> ModelLoad),
    ) -> Vec<PlannedModel> {
        let loadable = || staying.iter().flat_map(|backend| &backend.offer.repository);
        let (mut nanos, mut bytes) = (0.0, 0.0);
        for (took, of) in loadable().filter_map(|of| Some((of.load_time?, of.memory))) {
            (nanos, bytes) = (nanos + took.as_nanos() as f64, bytes + of as f64);
        }
        let nanos_a_byte = if bytes > 0.0 { nanos / bytes } else { NANOS_A_BYTE };
        let model = |name: &str| {
            let its = || loadable().filter(|loadable| loadable.model == name);
            let memory = its().map(|loadable| loadable.memory).max().unwrap_or(0);
            let known = its().filter_map(|loadable| loadable.load_time).max();
            let is_loaded = |group: &u32| {
                let mut of = staying.iter().filter(|backend| self.group(backend.node) == Some(*group));
                of.all(|backend| backend.ready.contains(name))
            };
            let ModelLoad { requests, devices } = load(name);
            PlannedModel {
                name: name.to_owned(),
                load: devices,
                requests,
                memory,
                run_memory: its().map(|loadable| loadable.run_memory).max().unwrap_or(0),
                load_time: known.unwrap_or_else(|| Duration::from_nanos((memory as f64 * nanos_a_byte) as u64)),
                loaded_in: (0..count).filter(is_loaded).collect(),
                running: self.placed.get(name).copied(),
            }
        };
        names.into_iter().map(model).collect()
    }

    /// Whether a plan for the present backends and models is being made, or soon will be. A failed
    /// planner is not asked about the same facts again at once.
    fn plan_may_come(&self) -> bool {
        self.pending.is_some() || self.unplanned.is_some()
    }

    /// By model: the sub-cluster that it must be in.
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

    /// By model: its sub-cluster, as of the last [`Assigner::settle`].
    pub fn placed(&self) -> &BTreeMap<String, u32> {
        &self.placed
    }

    /// The models that a backend must have. First the models of its sub-cluster; then the models
    /// that it keeps until other backends have them.
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
            // No other backend can have the model, unless a coming plan gives the model a place.
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
