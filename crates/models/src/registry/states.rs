//! The states of versions as the repository index, the metrics and the page show them.

use downbeat_core::Time;

use super::Registry;
use super::model_entry::{ModelEntry, VersionState};

/// A version that was loaded, or a model that could not be.
pub(super) struct VersionStatus {
    /// The model's name.
    pub name: String,
    /// The version's number; empty: the model as a whole.
    pub version: String,
    pub state: VersionState,
    /// Why the version is not ready, or what is wrong with it.
    pub reason: String,
}

impl Registry {
    /// The states of all versions that were to be loaded.
    pub(super) fn version_states(&self) -> Vec<VersionStatus> {
        let now = self.driver.clock().now();
        let entries = self.entries.lock().clone();
        let of = |(name, entry): (&String, &std::sync::Arc<ModelEntry>)| self.states_of(name, entry, now);
        entries.iter().flat_map(of).collect()
    }

    /// The states of a model's versions. A version that was loaded is unavailable while it cannot serve.
    pub(super) fn states_of(&self, name: &str, entry: &ModelEntry, now: Time) -> Vec<VersionStatus> {
        let served = self.serving.get(name);
        let pipeline_lacks = self.serving.pipeline(name).and_then(|pipeline| pipeline.not_ready(now));
        let states = entry.states.lock().clone();
        let status = |(number, (mut state, mut reason)): (u64, (VersionState, String))| {
            if let (VersionState::Ready, Some(why_not)) = (state, &pipeline_lacks) {
                (state, reason) = (VersionState::Unavailable, why_not.clone());
            }
            let loaded = served.as_ref().and_then(|served| served.versions.get(&number));
            if let (VersionState::Ready, Some(why_not)) = (state, loaded.and_then(|loaded| loaded.not_ready(now))) {
                (state, reason) = (VersionState::Unavailable, why_not);
            }
            if let (VersionState::Ready, Some(judgement)) = (state, loaded.and_then(|loaded| loaded.rows.as_ref())) {
                reason = judgement.complaint().unwrap_or(reason);
            }
            let version = if number == 0 { String::new() } else { number.to_string() };
            VersionStatus { name: name.to_owned(), version, state, reason }
        };
        states.into_iter().map(status).collect()
    }
}
