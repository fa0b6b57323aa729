//! A rollout in service: its versions, its state and its counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use downbeat_core::Time;
use downbeat_core::rollout::{
    Outcome, Rollout, RolloutChange, RolloutDecision, RolloutState, RolloutTerms, Route, Side, request_hash,
};
use downbeat_protocol::InferRequest;
use downbeat_service::error::ServiceError;
use downbeat_service::metrics::Metrics;
use downbeat_service::report::rollout::{ASKS_FOR_NEW, RolloutReport};
use parking_lot::Mutex;

/// Copies of a model's requests that may be in flight. Further copies are skipped.
const MOST_COPIES: u64 = 4;

/// A rollout in service. Loads of the same files and terms share it.
pub struct ServedRollout {
    model: String,
    /// The numbers of the old and the new version.
    versions: [u64; 2],
    /// The terms in the configuration, and a hash of the model's files.
    origin: (RolloutTerms, Option<u64>),
    rollout: Mutex<Rollout>,
    /// Requests without an id so far.
    unnamed: AtomicU64,
    is_finished: AtomicBool,
    copies: AtomicU64,
    metrics: Arc<Metrics>,
}

impl ServedRollout {
    /// The rollout of a model by these terms, if both versions are loaded. `files`: a hash of the
    /// model's files; `None`: a load request brought the files.
    pub fn begin(
        name: &str,
        terms: RolloutTerms,
        loaded: &[u64],
        files: Option<u64>,
        metrics: Arc<Metrics>,
    ) -> Option<Self> {
        let Some(versions) = terms.versions(loaded.iter().copied()) else {
            tracing::warn!(
                model = %name, ?loaded, new = ?terms.version,
                "no rollout: it needs its new version and an older one, both loaded; version_policy selects versions"
            );
            return None;
        };
        Some(ServedRollout {
            model: name.to_owned(),
            versions,
            rollout: Mutex::new(Rollout::new(terms.clone())),
            origin: (terms, files),
            unnamed: AtomicU64::new(0),
            is_finished: AtomicBool::new(false),
            copies: AtomicU64::new(0),
            metrics,
        })
    }

    /// Whether this rollout comes from a load with the same files and terms.
    fn is_same(&self, before: &ServedRollout) -> bool {
        self.origin.1.is_some() && (self.versions, &self.origin) == (before.versions, &before.origin)
    }

    /// The rollout before, if this one comes from a load with the same files and terms.
    pub fn or_same(self, before: Option<Arc<ServedRollout>>) -> Arc<Self> {
        before.filter(|before| self.is_same(before)).unwrap_or_else(|| Arc::new(self))
    }

    /// The version of requests that name none and that the rollout does not send elsewhere.
    pub fn default_version(&self) -> u64 {
        self.versions[usize::from(self.is_finished.load(Ordering::Acquire))]
    }

    /// The header that asks for the new version.
    pub fn header(&self) -> Option<&str> {
        self.origin.0.header.as_deref()
    }

    /// The present state.
    pub fn state(&self) -> RolloutState {
        self.rollout.lock().state()
    }

    /// The report at `now`.
    pub fn report(&self, now: Time) -> RolloutReport {
        RolloutReport::of(&self.model, self.versions, &mut self.rollout.lock(), now)
    }

    /// The new version, and what the rollout gives to it, in words.
    pub fn told(&self) -> (String, String) {
        let rollout = self.rollout.lock();
        let percent = rollout.terms().share * 100.0;
        let words = match (rollout.state(), rollout.terms().shadow) {
            (RolloutState::Running, false) => format!("{percent}% of the requests"),
            (RolloutState::Running, true) => format!("copies of {percent}% of the requests"),
            (RolloutState::Finished, _) => "rolled out".to_owned(),
            (RolloutState::RolledBack, _) => format!("rolled back: {}", rollout.reason()),
        };
        (self.version(Side::New), words)
    }

    /// Changes the rollout by request.
    ///
    /// # Errors
    /// `InvalidArgument`, with the expected value.
    pub fn change(&self, change: &RolloutChange) -> Result<(), ServiceError> {
        let mut rollout = self.rollout.lock();
        rollout.change(change).map_err(|reason| {
            ServiceError::InvalidArgument(format!("the rollout of model '{}': {reason}", self.model))
        })?;
        self.is_finished.store(rollout.state() == RolloutState::Finished, Ordering::Release);
        tracing::info!(
            model = %self.model, state = rollout.state().name(), share = rollout.terms().share,
            shadow = rollout.terms().shadow, "the rollout was changed by request"
        );
        Ok(())
    }

    /// The present decision, for other frontends of the same files and terms.
    pub fn decision(&self) -> Vec<u8> {
        let decision = self.rollout.lock().decision();
        // Encoding cannot fail. Frontends ignore an empty result.
        serde_json::to_vec(&(self.files(), decision)).unwrap_or_default()
    }

    /// Takes over another frontend's decision, if it is about the same files and terms.
    pub fn follow(&self, decision: &[u8]) {
        let Ok((files, decision)) = serde_json::from_slice::<(u64, RolloutDecision)>(decision) else {
            tracing::warn!(model = %self.model, "another frontend's decision about the rollout cannot be read");
            return;
        };
        let mut rollout = self.rollout.lock();
        if files != self.files() || rollout.decision() == decision {
            return;
        }
        match rollout.follow(&decision) {
            Ok(()) => {
                self.is_finished.store(rollout.state() == RolloutState::Finished, Ordering::Release);
                tracing::info!(
                    model = %self.model, state = decision.state.name(), share = decision.share,
                    shadow = decision.shadow, reason = %decision.reason, "another frontend has changed the rollout"
                );
            }
            Err(reason) => {
                tracing::warn!(model = %self.model, %reason, "another frontend's rollout cannot be followed")
            }
        }
    }

    /// Tells rollouts of other files apart.
    fn files(&self) -> u64 {
        self.origin.1.unwrap_or_default()
    }

    /// The number of a version.
    pub fn version(&self, side: Side) -> String {
        self.versions[side as usize].to_string()
    }

    /// The way of a request.
    pub fn route(&self, request: &mut InferRequest) -> Route {
        let is_marked = request.parameters.remove(ASKS_FOR_NEW).is_some();
        let number = if request.id.is_empty() { self.unnamed.fetch_add(1, Ordering::Relaxed) } else { 0 };
        self.rollout.lock().route(request_hash(&request.id, number), is_marked)
    }

    /// Notes the end of a request. Returns whether the new version was rolled back now.
    pub fn note(&self, now: Time, side: Side, outcome: Outcome) -> bool {
        let version = self.version(side);
        self.metrics.count_rollout(&self.model, &version, outcome.name());
        let mut rollout = self.rollout.lock();
        let is_rolled_back = rollout.handle_outcome(now, side, outcome);
        if is_rolled_back {
            let reason = rollout.reason();
            tracing::warn!(model = %self.model, %version, %reason, "the new version was rolled back");
        }
        is_rolled_back
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// How far numbers of answers to copies may lie apart.
    pub fn tolerance(&self) -> f64 {
        self.rollout.lock().terms().tolerance
    }

    /// A place for a copy; `None`: there are as many as may be.
    pub fn place(self: &Arc<Self>) -> Option<CopyPlace> {
        let before = self.copies.fetch_add(1, Ordering::AcqRel);
        let place = CopyPlace(self.clone());
        (before < MOST_COPIES).then_some(place)
    }
}

/// The error for a model without a rollout.
pub fn no_rollout(model: &str) -> ServiceError {
    ServiceError::InvalidArgument(format!(
        "model '{model}' has no rollout; give its configuration the parameter 'rollout', and load two versions"
    ))
}

/// The place of a copy in flight.
pub struct CopyPlace(Arc<ServedRollout>);

impl CopyPlace {
    /// The rollout of the copy.
    pub fn rollout(&self) -> &ServedRollout {
        &self.0
    }
}

impl Drop for CopyPlace {
    fn drop(&mut self) {
        self.0.copies.fetch_sub(1, Ordering::AcqRel);
    }
}
