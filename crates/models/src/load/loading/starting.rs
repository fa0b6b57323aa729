//! Starts a loaded version on its devices, and gives it lanes.

use std::sync::Arc;

use downbeat_core::ModelId;
use downbeat_core::device::{AutoInputs, GuardOptions, SegmentProfile};
use downbeat_engine::{Lane, Model};
use downbeat_host::device as host;
use downbeat_host::device::{DeviceHost, LaneSetup, LanesWanted, Padding, Placements, RequestEvents};
use downbeat_host::groups::group_predictor::GroupMember;
use downbeat_host::run::row_judgement::RowJudgement;

use super::{Loading, Runnable};
use crate::load::engines::MOST_EXECUTORS;
use crate::load::policy_choice::{Chosen, Profiled};
use crate::load::warm_up::{self, Sample};
use crate::measure::profile_store::ProfileStore;
use crate::measure::profiler::Threads;
use crate::policy_guard::PolicyGuard;

impl Loading<'_> {
    /// The version's part in operator groups, if its policy runs groups.
    pub(super) fn group(&self, model: &dyn Model, threads: usize) -> Option<GroupMember> {
        let (size, predictor) = (self.part.map(|part| &*part.size), self.context.predictor.clone());
        let place = ProfileStore::place_key(&self.source.engine.info(), Threads::Chosen(threads), size);
        let file = || ProfileStore::file_key(self.file).map_err(|error| format!("{}: {error}", self.file.display()));
        let is_one = self.policy.name.forms_groups();
        is_one
            .then(|| GroupMember::new(predictor, (&self.definition.name, self.number), file, &place, model.segments()))
    }

    /// Starts its lanes on its devices, and warms them up. Returns them with the guard of the policy
    /// that `auto` chose.
    pub(super) fn start(
        &self,
        Runnable { model, codec, padding, device: measured, lane }: Runnable,
        chosen: Option<&Chosen>,
        Profiled { profile, threads, .. }: &Profiled,
        segments: SegmentProfile,
    ) -> anyhow::Result<(Placements, Option<Arc<PolicyGuard>>)> {
        let (context, definition) = (self.context, &self.definition);
        let samples = match definition.warmups.is_empty() && !self.takes_made_up() {
            true => Arc::default(),
            false => warm_up::samples(definition, &codec)?,
        };
        let limit = context.options.models.get(&definition.name).and_then(|model| model.gpu_memory);
        let hosts = self.hosts();
        let id = context.driver.next_model();
        let guard = chosen.filter(|_| self.routed).map(|chosen| Arc::new(self.guard(chosen, id, &hosts)));
        let setup = LaneSetup {
            id,
            name: &definition.name,
            version: &self.version,
            model: &model,
            codec: codec.clone(),
            segments,
            profile: profile.clone(),
            policy: &self.policy,
            listener: guard.clone().map(|guard| guard as Arc<dyn RequestEvents>),
            queue_delay: context.options.queue_delay(&definition.name, definition.batching.max_queue_delay),
            drop: self.drops(),
            queue_bound: context.queue_bound(definition),
            group: self.group.clone(),
            cores: self.cores(),
            knee: self.knee(&*model, *threads, codec.max_batch),
            metrics: &context.metrics.lanes,
            looker: &context.looker,
            watch_rows: self.watch_rows(),
            memory: self.held.as_ref(),
            hosts: &hosts,
            partitions: &self.placed.partitions,
            warm_up: warm_up::later(
                self.source.engine.clone(),
                definition.name.clone(),
                &model,
                &codec,
                &samples,
                limit,
            ),
        };
        Ok((self.start_lanes(setup, padding, &samples, (measured, lane))?, guard))
    }

    /// The hosts of its devices.
    fn hosts(&self) -> Vec<Arc<DeviceHost>> {
        let is_there = |host: &&Arc<DeviceHost>| self.placed.devices.contains(&host.device);
        self.context.driver.hosts().iter().filter(is_there).cloned().collect()
    }

    /// The guard of the policy that `auto` chose.
    fn guard(&self, chosen: &Chosen, id: ModelId, hosts: &[Arc<DeviceHost>]) -> PolicyGuard {
        let AutoInputs { profile, max_batch, launch, .. } = chosen.inputs.clone();
        let options = GuardOptions { profile, max_batch, launch, at_once: self.at_once(), drop: self.drops() };
        PolicyGuard::new(options, self.context.clock, id, self.placed.home(), hosts)
    }

    /// Starts the lanes of `setup`, and warms them up. `lane` exists already, on the device of the
    /// measurements.
    fn start_lanes(
        &self,
        setup: LaneSetup,
        padding: Option<Arc<Padding>>,
        samples: &[Sample],
        (measured, lane): (usize, Option<Box<dyn Lane>>),
    ) -> anyhow::Result<Placements> {
        let (model, codec) = (setup.model, setup.codec.clone());
        let mut warm_up = self.warm_up(&**model, &codec);
        let mut count = 1;
        let hosted = if self.routed {
            // The sizes were found for one lane; now the version has more.
            warm_up.run = None;
            host::start(setup, padding, |device, specs, lanes| {
                count = lanes.len();
                warm_up.lanes(samples, device, specs, lanes)
            })?
        } else {
            let is_warm = self.on_gpus && lane.is_some();
            host::start_granted(setup, self.lanes_wanted(measured, lane), |device, lane| match device {
                // The lane of the measurements has run all sizes before.
                device if is_warm && device == measured => warm_up.with_samples(samples, lane),
                _ => warm_up.whole(samples, device, lane),
            })?
        };
        if self.routed || self.on_gpus {
            warm_up.say(count);
        }
        Ok(hosted)
    }

    /// See [`LaneSetup::watch_rows`].
    fn watch_rows(&self) -> Option<(u32, bool)> {
        let every = self.context.options.row_check_every;
        let acts = self.judgement.as_ref().and_then(RowJudgement::watch)?;
        (every > 0).then_some((every, acts))
    }

    /// The lanes of a model whose batches the scheduler makes. `first` exists already, on the
    /// device of the measurements.
    fn lanes_wanted(&self, measured: usize, first: Option<Box<dyn Lane>>) -> LanesWanted {
        match self.context.at_once(&self.definition) as usize {
            _ if self.on_gpus => LanesWanted::EachDevice(first.map(|lane| (measured, lane))),
            // The options do not set the number of devices: it may still grow.
            at_once if self.context.executors_grow() => LanesWanted::AnyDevice(at_once.min(MOST_EXECUTORS)),
            at_once => LanesWanted::AnyDevice(at_once.min(self.placed.devices.len())),
        }
    }
}
