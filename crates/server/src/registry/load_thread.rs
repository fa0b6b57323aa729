//! Loads models on threads of their own, some side by side.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::Registry;
use super::overlay::Overlay;
use crate::error::ServiceError;
use crate::serving::ServedModel;
use crate::watchdog::Owner;

/// A model that is ready to be taken into service.
pub struct LoadedModel {
    pub served: ServedModel,
    pub overlay: Option<Overlay>,
    /// The versions that did not load, and why.
    pub failures: BTreeMap<u64, String>,
}

/// Why a model is not taken into service.
pub struct LoadFailure {
    pub error: ServiceError,
    /// The versions that were tried and did not load, and why.
    pub versions: BTreeMap<u64, String>,
}

/// A load that goes on.
struct LoadThread {
    model: String,
    /// Where its outcome goes; `None`: it was left behind.
    done: Mutex<Option<tokio::sync::oneshot::Sender<Result<LoadedModel, LoadFailure>>>>,
}

impl LoadThread {
    /// Hands the outcome over; gives it back if nobody waits for it.
    fn finish(&self, outcome: Result<LoadedModel, LoadFailure>) -> Option<Result<LoadedModel, LoadFailure>> {
        match self.done.lock().take() {
            Some(done) => done.send(outcome).err(),
            None => Some(outcome),
        }
    }

    fn failure(&self, reason: &str) -> LoadFailure {
        ServiceError::Unavailable(format!("model '{}' is not loaded: {reason}", self.model)).into()
    }
}

impl Owner for LoadThread {
    fn leave_behind(&self, reason: &str) {
        drop(self.finish(Err(self.failure(reason))));
    }
}

impl From<ServiceError> for LoadFailure {
    fn from(error: ServiceError) -> Self {
        LoadFailure { error, versions: BTreeMap::new() }
    }
}

impl Registry {
    /// Loads a model on a thread of its own, once fewer than [`ServerOptions::load_threads`] do so, at a low priority, so that this does not take the processor from those who
    /// are served. If a run of it does not end, what comes of it is given up.
    pub(super) async fn spawn_load(
        &self,
        name: &str,
        load: impl FnOnce() -> Result<LoadedModel, LoadFailure> + Send + 'static,
    ) -> Result<LoadedModel, LoadFailure> {
        let _permit = self.loads.acquire().await;
        if self.serving.is_draining() {
            return Err(ServiceError::Unavailable("the server is shutting down".to_owned()).into());
        }
        let (done, result) = tokio::sync::oneshot::channel();
        let loading = Arc::new(LoadThread { model: name.to_owned(), done: Mutex::new(Some(done)) });
        let (watchdog, serving) = (self.watchdog.clone(), self.serving.clone());
        std::thread::Builder::new()
            .name("load".to_owned())
            .spawn(move || {
                // Without the right to it, the work is done at normal priority. Threads that are started here would keep it:
                // engines have theirs before.
                let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 10);
                let owner: Weak<LoadThread> = Arc::downgrade(&loading);
                let post = watchdog.post(owner);
                post.begin_load(&loading.model);
                let mut loaded = std::panic::catch_unwind(AssertUnwindSafe(load))
                    .unwrap_or_else(|_| Err(ServiceError::Internal("loading ended in a panic".to_owned()).into()));
                if let Some(reason) = post.end() {
                    if let Ok(loaded) = &loaded {
                        serving.forget_queues(loaded.served.versions.values());
                    }
                    loaded = Err(loading.failure(&reason));
                }
                // A receiver that is gone was a client that did not wait.
                if let Some(Ok(loaded)) = loading.finish(loaded) {
                    serving.forget_queues(loaded.served.versions.values());
                }
            })
            .map_err(|error| ServiceError::Internal(format!("no thread to work on: {error}")))?;
        result.await.unwrap_or_else(|_| Err(ServiceError::Internal("loading ended in a panic".to_owned()).into()))
    }
}
