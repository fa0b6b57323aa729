//! A model in service: its configuration, its ready versions, and its requests in flight.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_repository::ModelDefinition;
use downbeat_service::error::ServiceError;
use tokio::sync::Notify;

use super::rollout::ServedRollout;
use crate::loaded_version::LoadedVersion;

/// A model as it is served now: its configuration and its ready versions.
pub struct Model {
    /// Configuration, completed.
    pub definition: ModelDefinition,
    /// Ready versions, ascending.
    pub versions: BTreeMap<u64, Arc<LoadedVersion>>,
    /// How the model's new version is rolled out; `None`: there is no rollout.
    pub rollout: Option<Arc<ServedRollout>>,
    pub(super) occupancy: Occupancy,
    /// Bytes of the inputs of requests in flight.
    pub(super) input_bytes: AtomicU64,
}

/// The requests in flight of a model or an ensemble.
#[derive(Default)]
pub struct Occupancy {
    in_flight: AtomicU64,
    idle: Notify,
}

impl Model {
    /// A model with these ready versions, and without requests.
    pub fn new(definition: ModelDefinition, versions: BTreeMap<u64, Arc<LoadedVersion>>) -> Self {
        Model { definition, versions, rollout: None, occupancy: Occupancy::default(), input_bytes: AtomicU64::new(0) }
    }

    /// Runs that go on, of all versions.
    pub(super) fn running(&self) -> u32 {
        self.versions.values().map(|version| version.health.running()).sum()
    }

    /// The number of its runs that were left behind.
    pub(super) fn left_behind(&self) -> u32 {
        self.versions.values().map(|version| version.health.left_behind()).sum()
    }

    /// The version a client named. A client that named none gets the newest version, or the old
    /// version of a rollout.
    ///
    /// # Errors
    /// The errors of [`version_of`].
    pub fn version(&self, version: &str) -> Result<&Arc<LoadedVersion>, ServiceError> {
        if let Some(rollout) = &self.rollout
            && version.is_empty()
            && let Some(loaded) = self.versions.get(&rollout.default_version())
        {
            return Ok(loaded);
        }
        version_of(&self.definition.name, &self.versions, version)
    }

    /// Whether the version that a new one of this number replaces answered its trial. The replaced
    /// version is the one of the same number, or else the newest, unless that `stays` in service
    /// beside the new one.
    pub fn answers(&self, version: u64, stays: impl Fn(u64) -> bool) -> bool {
        let newest = || self.versions.iter().next_back().filter(|(number, _)| !stays(**number));
        let before = self.versions.get(&version).or_else(|| newest().map(|(_, newest)| newest));
        before.is_some_and(|before| before.answers)
    }
}

impl Occupancy {
    /// Counts a request in.
    pub(super) fn enter(&self) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts a request out.
    pub(super) fn leave(&self) {
        if self.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.idle.notify_waiters();
        }
    }

    /// The number of requests in flight, by the order `order`.
    pub(super) fn in_flight(&self, order: Ordering) -> u64 {
        self.in_flight.load(order)
    }

    /// Waits until no request is in flight.
    pub(super) async fn wait_idle(&self) {
        loop {
            let mut idle = std::pin::pin!(self.idle.notified());
            // Registered before the look, so that a guard dropped in between is not missed.
            idle.as_mut().enable();
            if self.in_flight(Ordering::Acquire) == 0 {
                return;
            }
            idle.await;
        }
    }
}

/// The version of a model that a client named, or the newest if it named none.
///
/// # Errors
/// `NotFound`, naming the versions there are; `InvalidArgument` if it is no number.
pub fn version_of<'a, T>(name: &str, versions: &'a BTreeMap<u64, T>, version: &str) -> Result<&'a T, ServiceError> {
    let found = if version.is_empty() {
        versions.values().next_back()
    } else {
        let number: u64 = version.parse().map_err(|_| {
            ServiceError::InvalidArgument(format!(
                "failed to get model version from specified version string '{}': versions of model '{name}' are positive \
                 numbers",
                version.chars().take(64).collect::<String>()
            ))
        })?;
        versions.get(&number)
    };
    found.ok_or_else(|| {
        let ready: Vec<String> = versions.keys().map(u64::to_string).collect();
        ServiceError::NotFound(format!(
            "Request for unknown model: '{name}' version {version} is not found; ready: {}",
            if ready.is_empty() { "none".to_owned() } else { ready.join(", ") }
        ))
    })
}

/// A model that cannot leave while this request is in flight.
pub struct InFlight(pub(super) Arc<Model>);

impl std::ops::Deref for InFlight {
    type Target = Model;

    fn deref(&self) -> &Model {
        &self.0
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.occupancy.leave();
    }
}
