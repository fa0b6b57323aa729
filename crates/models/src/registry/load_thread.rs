//! Loads models on threads of their own, some side by side.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};

use downbeat_host::run::watchdog::{Owner, Watchdog};
use downbeat_repository::ModelDefinition;
use downbeat_service::error::ServiceError;
use parking_lot::Mutex;

use super::overlay::Overlay;
use crate::serving::{Model, Serving};

/// A model that is ready to be taken into service.
pub struct LoadedModel {
    pub served: Served,
    pub overlay: Option<Overlay>,
    /// The versions that did not load, and why.
    pub failures: BTreeMap<u64, String>,
}

/// A loaded model of either kind.
pub enum Served {
    /// A model with files, warm.
    Model(Box<Model>),
    /// An ensemble, whose steps are not looked at yet.
    Ensemble(Box<ModelDefinition>),
}

/// Why a model is not taken into service.
pub struct LoadFailure {
    pub error: ServiceError,
    /// The versions that were tried and did not load, and why.
    pub versions: BTreeMap<u64, String>,
}

/// A load under way.
struct LoadThread {
    model: String,
    /// The receiver of its outcome; `None`: the load was left behind.
    done: Mutex<Option<tokio::sync::oneshot::Sender<Result<LoadedModel, LoadFailure>>>>,
}

impl LoadThread {
    /// Hands the outcome over; returns it if the caller has gone.
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

/// Loads a model on a thread of its own at a low priority, so that serving keeps the processor. If
/// a run of it does not end, the load is given up.
pub async fn load_on_thread(
    name: &str,
    (watchdog, serving): (Arc<Watchdog>, Arc<Serving>),
    load: impl FnOnce() -> Result<LoadedModel, LoadFailure> + Send + 'static,
) -> Result<LoadedModel, LoadFailure> {
    let panicked = || Err(ServiceError::Internal("the load of the model ended in a panic".to_owned()).into());
    let (done, result) = tokio::sync::oneshot::channel();
    let loading = Arc::new(LoadThread { model: name.to_owned(), done: Mutex::new(Some(done)) });
    let work = move || {
        // Without the right to it, the work is done at normal priority. Threads that are started
        // here would keep it: engines have theirs before.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 10);
        let owner: Weak<LoadThread> = Arc::downgrade(&loading);
        let post = watchdog.post(owner);
        post.begin_load(&loading.model);
        let loaded = std::panic::catch_unwind(AssertUnwindSafe(load)).unwrap_or_else(|_| panicked());
        let given_up = match post.end() {
            Some(reason) => {
                drop(loading.finish(Err(loading.failure(&reason))));
                Some(loaded)
            }
            // The receiver is gone if the client did not wait.
            None => loading.finish(loaded),
        };
        if let Some(Ok(LoadedModel { served: Served::Model(served), .. })) = given_up {
            serving.forget_queues(served.versions.values());
        }
    };
    let thread = std::thread::Builder::new().name("load".to_owned()).spawn(work);
    thread.map_err(|error| ServiceError::Internal(format!("cannot start a thread for the load: {error}")))?;
    result.await.unwrap_or_else(|_| panicked())
}
