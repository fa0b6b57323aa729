//! Describes a version under `auto` to the rehearsal of device policies.

use std::sync::Arc;

use downbeat_core::LatencyProfile;
use downbeat_core::device::{Cores, Cut, PartitionId, PolicyModel, PolicyName, RehearsedModel, SegmentProfile};
use downbeat_engine::Model;
use downbeat_repository::policy::DropPolicy;

use super::Loading;
use crate::auto_model::{AutoModel, DeviceSet};
use crate::engines::most_threads;
use crate::host::BRIEF;
use crate::model_source::is_emulated;
use crate::policy_choice::Chosen;
use crate::queue::Queue;

/// The numbers of stages that are tried of an emulated model, which need no measuring.
const STAGES: [usize; 2] = [2, 4];

impl Loading<'_> {
    /// The version with its chosen policy. `segments` has the times of its segments, as that policy
    /// cuts the model.
    pub(super) fn auto_model(&self, mut chosen: Chosen, segments: &SegmentProfile) -> AutoModel {
        let Loading { context, definition, placed, .. } = self;
        let written = context.options.written_settings(&definition.name);
        let names_cut = ["stages", "cut_at"].iter().any(|key| written.contains_key(*key));
        if chosen.candidate.policy == PolicyName::STAGED && !names_cut {
            chosen.candidate.settings.insert("stages".to_owned(), segments.segments().into());
        }
        if chosen.rehearsed.is_none() {
            chosen.rehearsed = self.rehearsed(&chosen, segments).map(Arc::new);
        }
        let on = DeviceSet { devices: placed.devices.clone(), partition: placed.home() };
        let events = context.driver.device_events();
        AutoModel::new(definition.name.clone(), self.version.clone(), chosen, on, events)
    }

    /// The version as the rehearsal replays it; `None`: it is not rehearsed.
    fn rehearsed(&self, chosen: &Chosen, segments: &SegmentProfile) -> Option<RehearsedModel> {
        let Loading { context, definition, placed, .. } = self;
        let (options, inputs) = (&context.options, &chosen.inputs);
        let mut sites = placed.places().map(|(device, partition)| placed.site(device, partition));
        let first = sites.next();
        let is_alike = sites.all(|site| Some(site) == first);
        if !is_alike || options.rehearsal_cpu <= 0.0 || !inputs.is_batched || inputs.varies {
            return None;
        }
        let profile = &chosen.profiled.profile;
        let profiles: Vec<LatencyProfile> = (0..placed.sites()).map(|_| profile.clone()).collect();
        let mut queue = Queue::options(options, definition, placed, &profiles, context.at_once(definition));
        // A replay knows one kind of device.
        queue.profiles = profile.clone().into();
        let model = PolicyModel {
            partition: PartitionId::default(),
            profile: SegmentProfile::whole(profile),
            max_batch: inputs.max_batch,
            padded: false,
            queue_delay: options.queue_delay(&definition.name, definition.batching.max_queue_delay),
            drop: self.drops(),
            queue_bound: context.queue_bound(definition),
            ring_slots: 0,
            cores: self.cores().map(|count| Cores { count, brief: BRIEF }),
        };
        Some(RehearsedModel {
            options: queue,
            model,
            overlap: chosen.overlap.clone(),
            cuts: self.cuts(profile, segments),
            launch: inputs.launch,
            written: options.written_settings(&definition.name),
        })
    }

    /// The known profiles of its segments: of the present cut, or of an emulated model's cuts,
    /// which need no measuring.
    fn cuts(&self, profile: &LatencyProfile, segments: &SegmentProfile) -> Vec<SegmentProfile> {
        if !is_emulated(&self.definition) {
            return if segments.segments() > 1 { vec![segments.clone()] } else { Vec::new() };
        }
        let staged = self.context.options.settings_of(&self.definition.name, PolicyName::STAGED);
        let cut = staged.map(|staged| staged.settings.cut());
        let stages = match cut {
            Ok((Cut::Stages(stages), true)) => vec![stages],
            Ok((Cut::Stages(stages), false)) => STAGES.into_iter().chain([stages]).collect(),
            Ok((Cut::At(values), _)) => vec![values.len() + 1],
            Ok((Cut::Whole, _)) | Err(_) => Vec::new(),
        };
        let mut stages: Vec<usize> = stages.into_iter().filter(|stages| *stages > 1).collect();
        stages.sort_unstable();
        stages.dedup();
        stages.into_iter().map(|stages| SegmentProfile::even(profile, stages)).collect()
    }

    /// Whether requests that cannot make their deadline are given up.
    pub(super) fn drops(&self) -> bool {
        let (options, definition) = (&self.context.options, &self.definition);
        let dispatch = options.dispatch_policy(&definition.name, definition.dispatch.clone());
        options.drop_policy(&definition.name, definition.drop, dispatch) != DropPolicy::None
    }

    /// Compute units beyond which a launch of it is hardly faster, if known: on the CPU its
    /// threads.
    pub(super) fn knee(&self, model: &dyn Model, threads: usize, max_batch: u32) -> Option<u32> {
        let threads = u32::try_from(threads).ok().filter(|threads| *threads > 0);
        self.cores().and(threads).or_else(|| self.source.knee(model, max_batch))
    }

    /// Cores that run its launches, if it is on the CPU.
    pub(super) fn cores(&self) -> Option<u32> {
        let most = self.part.map_or_else(|| most_threads(&self.context.options), |part| part.threads);
        let cores = u32::try_from(most).unwrap_or(u32::MAX);
        (!self.on_gpus && !is_emulated(&self.definition)).then_some(cores)
    }
}
