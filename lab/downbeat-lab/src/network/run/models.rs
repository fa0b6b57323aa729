//! The loading of models by backends in a run, and the division of models among sub-clusters.

use std::collections::BTreeSet;

use downbeat_core::Duration;
use downbeat_roles::{Doing, NodeId, PlanWanted, SubClusterCount, SubClusterPlan};
use rand::RngExt;

use super::{Event, NetworkRun};
use crate::network::process::{Copy, Inbound, Machine, model_name, model_of, offer};
use crate::network::sub_clusters::MODEL_BYTES;

/// The time of an answer to the question how to divide the models.
const DIVIDING: Duration = Duration::from_millis(2);
/// The longest search for a division.
const SEARCH: Duration = Duration::from_millis(1_000);
/// Why a model is not loaded on a full device.
const NO_ROOM: &str = "it finds no memory";

impl NetworkRun<'_> {
    /// A backend begins to load or to unload a model.
    pub(super) fn model_does(&mut self, at: usize, name: &str, doing: Doing) {
        let Some(clusters) = &self.scenario.sub_clusters else { return };
        let Some(model) = model_of(name) else { return };
        let took = clusters.load_time.as_secs_f64() * (0.5 + self.rng.random::<f64>());
        let fails = self.rng.random::<f64>() < clusters.load_fails && !self.is_mended;
        let process = &mut self.processes[at];
        let (node, has_room) = (process.node(), process.has_room(clusters));
        let Some(copy) = process.copies.get_mut(model) else { return };
        let before = *copy;
        let (took, result) = match doing {
            Doing::Load if !has_room => (took, Err(NO_ROOM.to_owned())),
            Doing::Load if fails => (took, Err("it does not load".to_owned())),
            Doing::Load => {
                *copy = Copy::Loading;
                (took, Ok(()))
            }
            Doing::Unload => {
                *copy = Copy::Unloading;
                self.copies.unloads(self.now, node, model);
                (took / 4.0, Ok(()))
            }
        };
        let is_possible = match doing {
            Doing::Load => matches!(before, Copy::No | Copy::Failed | Copy::NoRoom),
            Doing::Unload => before == Copy::Loaded(0),
        };
        if !is_possible {
            let what = || format!("{node:?} is to {doing:?} {name}, which is {before:?}");
            self.judge.breaks(self.now, "runs where it is loaded", what);
        }
        let done = Inbound::Done { model, doing, result };
        self.events.push(self.now + Duration::from_secs_f64(took), Event::Comes(at, done));
    }

    /// Ends a backend's attempt to load or unload a model.
    pub(super) fn model_done(&mut self, at: usize, model: usize, doing: Doing, result: Result<(), String>) {
        let (now, scenario) = (self.now, self.scenario);
        let process = &mut self.processes[at];
        let (node, local) = (process.node(), process.local(now));
        let Some(copy) = process.copies.get_mut(model) else { return };
        *copy = match (doing, &result) {
            (Doing::Load, Ok(())) => Copy::Loaded(0),
            (Doing::Load, Err(reason)) if reason == NO_ROOM => Copy::NoRoom,
            (Doing::Load, Err(_)) => Copy::Failed,
            (Doing::Unload, _) => Copy::No,
        };
        if doing == Doing::Load {
            self.copies.loaded(now, node, model, result.is_ok());
        }
        let offered = offer(scenario, &process.copies);
        let Machine::Backend(backend) = &mut process.machine else { return };
        let name = model_name(model);
        // The result and the new offer may come in either order.
        if self.rng.random() {
            backend.handle_done(local, &name, doing, result);
            backend.handle_offer(local, offered);
        } else {
            backend.handle_offer(local, offered);
            backend.handle_done(local, &name, doing, result);
        }
    }

    pub(super) fn want_plan(&mut self, at: usize, wanted: &PlanWanted) {
        let planned = downbeat_plan::divide(wanted, SEARCH, &|| Duration::ZERO).map_err(|error| error.to_string());
        self.copies.planned(planned.is_err());
        self.outcome.plans += 1;
        self.events.push(self.now + DIVIDING, Event::Comes(at, Inbound::Planned(wanted.number, planned)));
    }

    /// Keeps a plan in the store, if there is a store and it is not away.
    pub(super) fn keep_plan(&mut self, plan: SubClusterPlan) {
        self.outcome.sub_clusters = self.outcome.sub_clusters.max(plan.sub_clusters);
        let is_there = self.scenario.has_store && self.store.1 <= self.now;
        if is_there && self.kept_plan.as_ref().is_none_or(|kept| kept.stamp < plan.stamp) {
            self.kept_plan = Some(plan);
        }
    }

    /// *The layout is reached*: sub-clusters are of even size, each backend has exactly the models
    /// of its sub-cluster, and each model has a backend. A model whose load failed may be missing
    /// in its sub-cluster, and then stays elsewhere. No load waits for memory that is free.
    pub(super) fn check_layout(&self) -> Result<(), String> {
        let Some(clusters) = &self.scenario.sub_clusters else { return Ok(()) };
        if let Some(at) = self.drains.keys().find(|at| !self.processes[**at].is_dead()) {
            return Err(format!("{} has not gone", self.processes[*at].hello.name));
        }
        let machines = self.processes.iter().map(|process| &process.machine);
        let leads = |machine: &Machine| match machine {
            Machine::Scheduler(node) if node.leads().is_some() => Some(node.sub_clusters()),
            _ => None,
        };
        let groups = machines.filter_map(leads).next().unwrap_or_default();
        let living = |process: &&super::Process| matches!(process.machine, Machine::Backend(_));
        let living: Vec<_> = self.processes.iter().filter(living).collect();
        let sizes: Vec<usize> = groups.iter().map(|group| group.backends.len()).collect();
        let (least, most) = (sizes.iter().min().copied().unwrap_or(0), sizes.iter().max().copied().unwrap_or(0));
        let count = match clusters.options.count {
            SubClusterCount::Fixed(count) => (count as usize).min(living.len()),
            SubClusterCount::Least => sizes.len(),
        };
        let members: BTreeSet<NodeId> =
            groups.iter().flat_map(|group| &group.backends).map(|(node, _)| *node).collect();
        let is_even = most <= least + 1 && sizes.len() == count && members.len() == living.len();
        if !is_even {
            return Err(format!(
                "{} backends are in sub-clusters of {sizes:?}, and should be in {count}",
                living.len()
            ));
        }
        if self.copies.has_no_plan() {
            return Ok(());
        }
        if let Some(memory) = clusters.memory
            && let Some(full) = groups.iter().find(|group| group.models.len() as u64 * MODEL_BYTES > memory)
        {
            return Err(format!("{full:?} has more models than its devices hold"));
        }
        let models = 0..self.scenario.models.len();
        for process in &living {
            let own = groups.iter().find(|group| group.backends.iter().any(|(node, _)| *node == process.node()));
            let is_planned = |model| own.is_some_and(|group| group.models.contains(&model_name(model)));
            let has_no_room = |model: &usize| process.copies.get(*model) == Some(&Copy::NoRoom);
            let forgotten = models.clone().find(|model| has_no_room(model) && is_planned(*model));
            if let Some(model) = forgotten.filter(|_| process.has_room(clusters)) {
                let name_of = &process.hello.name;
                return Err(format!("{name_of} has room by now for {}, and does not load it", model_name(model)));
            }
        }
        let has_failed = |model: &usize| {
            let of = |process: &&super::Process| process.copies.get(*model).copied();
            living.iter().filter_map(of).any(|copy| matches!(copy, Copy::Failed | Copy::NoRoom))
        };
        for model in models.filter(|model| !has_failed(model)) {
            let name = model_name(model);
            for process in &living {
                let mut own =
                    groups.iter().filter(|group| group.backends.iter().any(|(node, _)| *node == process.node()));
                let is_planned = own.any(|group| group.models.contains(&name));
                let copy = process.copies.get(model).copied().unwrap_or(Copy::No);
                if is_planned != matches!(copy, Copy::Loaded(_)) {
                    let name_of = &process.hello.name;
                    return Err(format!("{name_of} has {name} {copy:?}, and {groups:?} say {is_planned}"));
                }
            }
            if groups.iter().filter(|group| group.models.contains(&name)).count() != 1 {
                return Err(format!("{name} is not in one of {groups:?}"));
            }
        }
        Ok(())
    }
}
