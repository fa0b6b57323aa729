//! Reports the present counts of the registry's models, and their last hour.

use std::collections::BTreeMap;

use downbeat_core::{Duration, LatencyProfile};
use downbeat_service::metrics::batch_bounds;
use downbeat_service::metrics::trouble::Counts;
use downbeat_service::report::live::{LiveModel, LiveReport};

use super::Registry;
use super::outcome_marks::OutcomeMark;
use super::states::VersionStatus;
use crate::loaded_version::LoadedVersion;

/// The most batch sizes of a profile that a report has.
const MOST_SIZES: u32 = 64;

/// The outcomes of a version's requests so far.
pub(super) struct Outcomes {
    pub name: String,
    pub version: String,
    /// How long a request may take.
    pub slo: Option<Duration>,
    /// Whether the scheduler makes its batches.
    pub is_scheduled: bool,
    pub counts: Counts,
}

impl Registry {
    /// The outcomes of the requests of all models and ensembles in service.
    pub(super) fn outcomes(&self) -> Vec<Outcomes> {
        let mut all = Vec::new();
        for served in self.serving.all() {
            let slo = self.options.slo(&served.definition.name, served.definition.slo);
            all.extend(served.versions.values().map(|loaded| {
                let (name, version, counts) = (loaded.name.clone(), loaded.version.clone(), loaded.counts());
                Outcomes { name, version, slo, is_scheduled: !loaded.hosts.is_routed, counts }
            }));
        }
        for pipeline in self.serving.pipelines() {
            let slo = self.options.slo(&pipeline.definition.name, pipeline.definition.slo);
            all.extend(pipeline.versions.values().map(|record| {
                let (name, version, counts) = (record.name.clone(), record.version.clone(), record.counts());
                Outcomes { name, version, slo, is_scheduled: false, counts }
            }));
        }
        all
    }

    /// Notes the outcomes of all models' requests for the history and for what-ifs.
    pub(super) fn note_history(&self) {
        let (now, outcomes) = (self.driver.clock().now(), self.outcomes());
        let mut history = self.history.lock();
        for Outcomes { name, version, counts, .. } in &outcomes {
            history.note(now, name, version, counts);
        }
        drop(history);
        let mut mark = OutcomeMark { at: now, requests: 0, in_time: 0 };
        for Outcomes { counts, .. } in outcomes.iter().filter(|its| its.is_scheduled) {
            mark.requests += counts.in_time() + counts.missed();
            mark.in_time += counts.in_time();
        }
        self.marks.lock().note(mark);
    }

    /// The present counts of models and devices. `history`: with the last hour.
    pub(super) fn live_report(&self, history: bool) -> LiveReport {
        self.watch_load();
        let now = self.driver.clock().now();
        let mut models: BTreeMap<(String, String), LiveModel> = BTreeMap::new();
        for VersionStatus { name, version, state, reason } in self.version_states() {
            let model = LiveModel { state: state.name().to_owned(), reason, ..LiveModel::default() };
            models.insert((name, version), model);
        }
        for Outcomes { name, version, slo, counts, .. } in self.outcomes() {
            let model = models.entry((name, version)).or_default();
            model.slo_ms = slo.map(ms);
            model.take_counts(&counts);
        }
        for served in self.serving.all() {
            for loaded in served.versions.values() {
                fill(models.entry((loaded.name.clone(), loaded.version.clone())).or_default(), loaded);
            }
            if let Some((version, words)) = served.rollout.as_ref().map(|rollout| rollout.told()) {
                models.entry((served.definition.name.clone(), version)).or_default().rollout = words;
            }
        }
        for pipeline in self.serving.pipelines() {
            for record in pipeline.versions.values() {
                let model = models.entry((record.name.clone(), record.version.clone())).or_default();
                model.ensemble = true;
                [model.latency, model.batches] = record.histograms();
                model.steps = pipeline.steps_report();
            }
        }
        let past = history.then(|| self.history.lock());
        let named = models.into_iter().map(|((name, version), mut model)| {
            model.history = past.as_ref().map(|past| past.of(now, &name, &version)).unwrap_or_default();
            LiveModel { model: name, version, ..model }
        });
        LiveReport {
            models: named.collect(),
            device_busy_s: self.driver.hosts().iter().map(|host| host.occupancy.busy_seconds()).collect(),
            tenants: self.serving.tenants_report(),
            in_cluster: self.cluster.get().is_some(),
            ..LiveReport::new(&self.options.server_name, now)
        }
    }
}

fn fill(model: &mut LiveModel, loaded: &LoadedVersion) {
    [model.latency, model.batches] = loaded.histograms();
    (model.waiting, model.policy) = (loaded.waiting(), loaded.policy().policy);
    if let Some(means) = loaded.sample(None).means {
        model.max_batch = means.max_batch;
        model.profile = points(&means.profile, means.max_batch);
    }
    model.profile_at_load = points(&loaded.hosts.first().profile, model.max_batch);
    model.compare_profiles(&batch_bounds());
}

/// The latencies of some batch sizes: all small ones, and then ever fewer.
fn points(profile: &LatencyProfile, max_batch: u32) -> Vec<(u32, f64)> {
    let most = max_batch.max(1);
    let step = most.div_ceil(MOST_SIZES);
    let sizes = (1..=most).step_by(step as usize).chain((step > 1).then_some(most));
    sizes.map(|size| (size, ms(profile.latency(size)))).collect()
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
