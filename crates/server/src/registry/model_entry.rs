//! What the registry knows of one model: where its versions stand, and the files and the configuration that load requests brought.

use std::collections::BTreeMap;

use downbeat_repository::Fingerprint;
use parking_lot::Mutex;

use super::overlay::Overlay;
use crate::serving::ServedModel;

/// Why a model is not there yet whose turn to be loaded has not come.
pub const WAITING: &str = "waiting to be loaded";

/// Where a model version stands, as the repository index says it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VersionState {
    Loading,
    Ready,
    Unloading,
    Unavailable,
}

impl VersionState {
    /// As the repository index says it.
    pub fn name(self) -> &'static str {
        match self {
            VersionState::Loading => "LOADING",
            VersionState::Ready => "READY",
            VersionState::Unloading => "UNLOADING",
            VersionState::Unavailable => "UNAVAILABLE",
        }
    }
}

/// One model of the repository, in service or not.
#[derive(Default)]
pub struct ModelEntry {
    /// Held while the model is loaded or unloaded: one after the other, in the order asked for.
    pub busy: tokio::sync::Mutex<()>,
    /// Where its versions stand; version 0: the model as a whole.
    pub states: Mutex<BTreeMap<u64, (VersionState, String)>>,
    /// The files it was loaded from, where a load request brought its own.
    pub overlay: Mutex<Option<Overlay>>,
    /// The configuration that a load request brought for the files in the repository, and what those were then: as in Triton, it holds for later
    /// loads without one, as long as the files stay as they are and the model is not unloaded.
    pub kept: Mutex<Option<(String, Fingerprint)>>,
}

impl ModelEntry {
    /// A version stands so; the others as before.
    pub fn set(&self, version: u64, state: VersionState, reason: String) {
        self.states.lock().insert(version, (state, reason));
    }

    /// Its versions stand so, and no others.
    pub fn set_all(&self, versions: impl Iterator<Item = u64>, state: VersionState, reason: &str) {
        *self.states.lock() = versions.map(|version| (version, (state, reason.to_owned()))).collect();
    }

    /// The states after a load: what is served is ready, what failed is not.
    pub fn settle(&self, served: &ServedModel, failures: &BTreeMap<u64, String>) {
        let ready = served.versions.keys().map(|version| (*version, (VersionState::Ready, String::new())));
        let failed = failures.iter().map(|(version, reason)| (*version, (VersionState::Unavailable, reason.clone())));
        *self.states.lock() = failed.chain(ready).collect();
    }
}
