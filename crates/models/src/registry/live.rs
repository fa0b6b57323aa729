//! Reports the present counts of the registry's models, and their last hour.

use std::collections::BTreeMap;

use downbeat_core::{Duration, LatencyProfile};
use downbeat_service::clock::Clock;
use downbeat_service::metrics::trouble::Sample;
use downbeat_service::metrics::{batch_bounds, latency_bounds_ms};
use downbeat_service::report::live::{LiveModel, LiveReport, PART};

use super::Registry;
use crate::loaded_version::LoadedVersion;

/// The most batch sizes of a profile that a report has.
const MOST_SIZES: u32 = 64;

impl Registry {
    /// Notes the outcomes of all models' requests for the history.
    pub(super) fn note_history(&self) {
        let now = self.driver.clock().now();
        let mut history = self.history.lock();
        for Sample { model, version, counts, .. } in self.samples() {
            history.note(now, &model, &version, &counts);
        }
        for pipeline in self.serving.pipelines() {
            for record in pipeline.versions.values() {
                history.note(now, &record.name, &record.version, &record.counts());
            }
        }
    }

    /// The present counts of models and devices. `history`: with the last hour.
    pub(super) fn live_report(&self, history: bool) -> LiveReport {
        self.watch_load();
        let now = self.driver.clock().now();
        let mut models = self.live_states();
        for served in self.serving.all() {
            let slo = self.options.slo(&served.definition.name, served.definition.slo);
            for loaded in served.versions.values() {
                let name = (loaded.name.clone(), loaded.version.clone());
                fill(models.entry(name).or_default(), loaded, slo);
            }
        }
        for pipeline in self.serving.pipelines() {
            let slo = self.options.slo(&pipeline.definition.name, pipeline.definition.slo);
            for record in pipeline.versions.values() {
                let model = models.entry((record.name.clone(), record.version.clone())).or_default();
                (model.ensemble, model.slo_ms) = (true, slo.map(ms));
                model.take_counts(&record.counts());
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
            server: self.options.server_name.clone(),
            version: env!("CARGO_PKG_VERSION"),
            wall_ms: Clock::unix_millis(),
            now_ns: now.as_nanos(),
            latency_bounds_ms: latency_bounds_ms(),
            batch_bounds: batch_bounds(),
            models: named.collect(),
            device_busy_s: self.driver.hosts().iter().map(|host| host.occupancy.busy_seconds()).collect(),
            tenants: self.serving.tenants_report(),
            history_part_s: PART.as_secs_f64(),
            in_cluster: self.cluster.get().is_some(),
        }
    }

    /// The versions that the repository index has, with their states.
    fn live_states(&self) -> BTreeMap<(String, String), LiveModel> {
        let entries = self.entries.lock().clone();
        let mut models = BTreeMap::new();
        for (name, entry) in &entries {
            for (version, (state, reason)) in entry.states.lock().iter() {
                let version = if *version == 0 { String::new() } else { version.to_string() };
                let model =
                    LiveModel { state: state.name().to_owned(), reason: reason.clone(), ..LiveModel::default() };
                models.insert((name.clone(), version), model);
            }
        }
        models
    }
}

fn fill(model: &mut LiveModel, loaded: &LoadedVersion, slo: Option<Duration>) {
    let Sample { counts, means, .. } = loaded.sample(slo);
    model.take_counts(&counts);
    [model.latency, model.batches] = loaded.histograms();
    (model.slo_ms, model.waiting, model.policy) = (slo.map(ms), loaded.waiting(), loaded.policy().policy);
    if let Some(means) = means {
        model.max_batch = means.max_batch;
        model.profile = points(&means.profile, means.max_batch);
    }
    model.profile_at_load = points(&loaded.hosts.first().profile, model.max_batch);
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
