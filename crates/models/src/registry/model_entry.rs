//! The registry's entry of a model: the states of its versions, and the files and the configuration
//! that load requests brought.

use std::collections::BTreeMap;

use downbeat_repository::Fingerprint;
use parking_lot::Mutex;

use super::overlay::Overlay;
use crate::serving::Model;

/// Why a model is not there yet whose turn to be loaded has not come.
pub const WAITING: &str = "waiting to be loaded";

/// The state of a model version in the repository index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VersionState {
    Loading,
    Ready,
    Unloading,
    Unavailable,
}

impl VersionState {
    /// The state's name in the repository index.
    pub fn name(self) -> &'static str {
        match self {
            VersionState::Loading => "LOADING",
            VersionState::Ready => "READY",
            VersionState::Unloading => "UNLOADING",
            VersionState::Unavailable => "UNAVAILABLE",
        }
    }
}

/// A model of the repository, in service or not.
#[derive(Default)]
pub struct ModelEntry {
    /// Held while the model is loaded or unloaded: one after the other, in the order asked for.
    pub busy: tokio::sync::Mutex<()>,
    /// The states of its versions; version 0: the model as a whole.
    pub states: Mutex<BTreeMap<u64, (VersionState, String)>>,
    /// The files it was loaded from, if a load request brought its own.
    pub overlay: Mutex<Option<Overlay>>,
    /// The configuration that a load request brought for the files in the repository, with the
    /// fingerprint of these files. As in Triton, it holds for later loads without a configuration,
    /// until the files change or the model is unloaded.
    pub kept: Mutex<Option<(String, Fingerprint)>>,
}

impl ModelEntry {
    /// The configuration of an earlier load request, if it holds for these files.
    pub fn kept_for(&self, files: &Fingerprint) -> Option<String> {
        let kept = self.kept.lock();
        kept.as_ref().filter(|(_, seen)| seen == files).map(|(config, _)| config.clone())
    }

    /// Sets the state of a version.
    pub fn set(&self, version: u64, state: VersionState, reason: String) {
        self.states.lock().insert(version, (state, reason));
    }

    /// Sets the state of these versions, and forgets all others.
    pub fn set_all(&self, versions: impl Iterator<Item = u64>, state: VersionState, reason: &str) {
        *self.states.lock() = versions.map(|version| (version, (state, reason.to_owned()))).collect();
    }

    /// Sets the states after a load: served versions are ready, failed ones are not.
    pub fn settle(&self, served: &Model, failures: &BTreeMap<u64, String>) {
        let ready = served.versions.keys().map(|version| (*version, (VersionState::Ready, String::new())));
        let failed = failures.iter().map(|(version, reason)| (*version, (VersionState::Unavailable, reason.clone())));
        *self.states.lock() = failed.chain(ready).collect();
    }
}
