//! The models that a frontend's clients may ask for, from the leading scheduler's messages.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use downbeat_core::Duration;
use downbeat_models::preprocess::{Preprocess, Preprocessing, asks_for_steps};
use downbeat_models::serving::{ServedRollout, unknown_model, version_of};
use downbeat_protocol::InferRequest;
use downbeat_protocol::inference::ModelStatistics;
use downbeat_repository::rollout_terms;
use downbeat_roles::{BatchRun, ServedModel};
use downbeat_service::error::ServiceError;
use downbeat_service::metrics::statistics::Phases;
use downbeat_service::metrics::trouble::Sample;
use downbeat_service::metrics::{Metrics, ModelMetrics};
use downbeat_service::report::live::LiveModel;
use downbeat_service::report::missed::MissedRequests;
use downbeat_service::unanswered::Unanswered;
use parking_lot::{Mutex, RwLock};

use super::remote_ensemble::RemoteEnsemble;
use crate::backend::definition::Definition;

/// A phase that a backend reports as longer counts as this long.
pub const LONGEST_PHASE: Duration = Duration::from_millis(3_600_000);

/// The phases of a run, each at most `most` long. The backend may be wrong, and the sums of times
/// must not overflow.
fn phases_of(run: &BatchRun, most: Duration) -> Phases {
    Phases {
        compute_input: run.compute_input.min(most),
        compute_infer: run.compute_infer.min(most),
        compute_output: run.compute_output.min(most),
    }
}

/// A version of a model that runs on backends.
pub struct RemoteVersion {
    /// The model's name.
    pub name: String,
    /// The version's number.
    pub number: u64,
    /// The version's number, in the form that clients write.
    pub version: String,
    /// The requirements on the version's requests.
    pub definition: Definition,
    /// The steps of an ensemble; `None`: the model runs on backends.
    pub ensemble: Option<RemoteEnsemble>,
    /// The bytes that `definition` was read from.
    bytes: Vec<u8>,
    /// The steps to the version's inputs, if it takes more than tensors. Empty until the steps are
    /// ready; then the steps, or why they failed.
    steps: OnceLock<Result<Arc<Preprocess>, String>>,
    metrics: ModelMetrics,
}

/// A model that runs on backends.
pub struct RemoteModel {
    /// Ready versions, ascending.
    pub versions: BTreeMap<u64, Arc<RemoteVersion>>,
    /// How the model's new version is rolled out; `None`: there is no rollout.
    pub rollout: Option<Arc<ServedRollout>>,
    /// Bytes of the inputs of requests in flight.
    pub input_bytes: Arc<AtomicU64>,
}

impl RemoteModel {
    /// The version a client named. A client that named none gets the newest version, or that of a
    /// rollout which answers where the rollout does not choose.
    ///
    /// # Errors
    /// As [`version_of`].
    pub fn version(&self, name: &str, version: &str) -> Result<&Arc<RemoteVersion>, ServiceError> {
        let of_rollout = |rollout: &Arc<ServedRollout>| self.versions.get(&rollout.default_version());
        match self.rollout.as_ref().filter(|_| version.is_empty()).and_then(of_rollout) {
            Some(version) => Ok(version),
            None => version_of(name, &self.versions, version),
        }
    }

    /// Looks for a rollout in the newest version's configuration. The rollout `before` goes on if its
    /// files and terms are the same.
    fn settle(mut self, name: &str, before: Option<&Arc<RemoteModel>>, metrics: &Arc<Metrics>) -> Self {
        let newest = self.versions.values().next_back().filter(|newest| newest.ensemble.is_none());
        let Some(terms) = newest.and_then(|newest| rollout_terms(&newest.definition.config)) else { return self };
        let loaded: Vec<u64> = self.versions.keys().copied().collect();
        let mut files = crc32fast::Hasher::new();
        self.versions.values().for_each(|version| files.update(version.definition.fingerprint.as_bytes()));
        let files = Some(u64::from(files.finalize()));
        let begun = ServedRollout::begin(name, terms, &loaded, files, metrics.clone());
        self.rollout = begun.map(|rollout| rollout.or_same(before.and_then(|before| before.rollout.clone())));
        self
    }
}

/// All models that clients may ask for.
pub struct RemoteModels {
    models: RwLock<BTreeMap<String, Arc<RemoteModel>>>,
    /// By model: the newest decision about its rollout, of any frontend.
    decisions: Mutex<BTreeMap<String, Vec<u8>>>,
    /// Whether a rollout has a header that asks for its new version.
    has_rollout_header: AtomicBool,
    preprocessing: Arc<Preprocessing>,
}

impl RemoteVersion {
    /// Prepares the version's steps on another thread, because reading a large vocabulary takes a
    /// while.
    fn make_steps(self: &Arc<Self>, preprocessing: &Arc<Preprocessing>) {
        let Some(recipe) = self.definition.recipe.clone() else { return };
        let (this, shared) = (self.clone(), preprocessing.clone());
        let make = move || {
            let made = recipe.unpack().and_then(|recipe| shared.steps(&recipe, &this.definition.codec));
            if let Err(reason) = &made {
                tracing::error!(model = %this.name, version = this.number, %reason, "this frontend cannot take the model's preprocess steps");
            }
            let _ = this.steps.set(made);
        };
        preprocessing.spawn(make);
    }

    /// The steps for a request, or `None` if the request brings tensors.
    ///
    /// # Errors
    /// `Unavailable` if the steps are not ready.
    pub fn preprocess_of(&self, request: &InferRequest) -> Result<Option<&Arc<Preprocess>>, ServiceError> {
        if self.definition.recipe.is_none() || !asks_for_steps(&self.definition.config, request) {
            return Ok(None);
        }
        let reason = match self.steps.get() {
            Some(Ok(steps)) => return Ok(Some(steps)),
            Some(Err(reason)) => reason,
            None => "the steps are being made ready; try again",
        };
        Err(ServiceError::Unavailable(format!("model '{}': preprocess steps: {reason}", self.name)))
    }

    /// Checks a request's inputs as far as possible without their data.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the tensor, the expected properties and the given ones.
    pub fn check_inputs(&self, request: &InferRequest) -> Result<(), ServiceError> {
        match self.preprocess_of(request)? {
            Some(steps) => steps.check(request, &self.definition.codec).map(drop),
            None => self.definition.codec.check_inputs(request),
        }
    }

    /// The run that a backend reports, with no more items than the version allows. The backend may
    /// be wrong, and the statistics have an entry for each size.
    pub fn run_of(&self, run: BatchRun) -> BatchRun {
        BatchRun { items: run.items.clamp(1, self.definition.codec.max_batch.max(1)), ..run }
    }

    /// Counts a batch of requests, whose items may have come from several frontends.
    pub fn record_launch(&self, run: &BatchRun) {
        self.metrics.record_launch(run.items, phases_of(run, LONGEST_PHASE));
    }

    /// Counts a request of `rows` items that got its result after `took`, and whether it was late.
    /// `run` is that of its batch. `None`: it ran alone, after its batch had failed. Returns the
    /// request's time in queues.
    pub fn record_answer(&self, rows: u32, (took, late): (Duration, bool), run: Option<BatchRun>) -> Duration {
        let (phases, queued) = match run {
            Some(run) => {
                let phases = phases_of(&run, took);
                let Phases { compute_input, compute_infer, compute_output } = phases;
                let after = [run.ended_ago, compute_input, compute_infer, compute_output];
                (phases, after.into_iter().fold(took, Duration::saturating_sub))
            }
            None => {
                self.metrics.record_launch(rows, Phases::default());
                Default::default()
            }
        };
        self.metrics.record_requests(rows, phases, std::iter::once((queued, took, late)));
        queued
    }

    /// Counts a request of an ensemble that was answered after `took`, and whether it was late. All
    /// steps together waited for `waited` and ran for `ran`.
    pub fn record_whole(&self, rows: u32, (took, late): (Duration, bool), (waited, ran): (Duration, Duration)) {
        let phases = Phases { compute_infer: ran.min(LONGEST_PHASE), ..Phases::default() };
        self.metrics.record_batch(rows, phases, std::iter::once((waited, took, late)));
    }

    /// The protocol's statistics of the version.
    pub fn statistics(&self) -> ModelStatistics {
        self.metrics.statistics(&self.name, &self.version)
    }

    /// The last requests that missed.
    pub fn missed(&self) -> &MissedRequests {
        self.metrics.missed()
    }

    /// The counts of the version's requests by outcome.
    pub fn sample(&self) -> Sample {
        let (name, version, counts) = (self.name.clone(), self.version.clone(), self.metrics.counts());
        Sample { model: name, version, counts, means: None }
    }

    /// The version's counts, as a page shows them.
    pub fn live(&self) -> LiveModel {
        let [latency, batches] = self.metrics.histograms();
        let mut model = LiveModel {
            model: self.name.clone(),
            version: self.version.clone(),
            state: "READY".to_owned(),
            slo_ms: self.definition.slo.map(|slo| slo.as_millis_f64()),
            max_batch: self.definition.codec.max_batch,
            ensemble: self.ensemble.is_some(),
            steps: self.ensemble.as_ref().map(RemoteEnsemble::steps_report).unwrap_or_default(),
            latency,
            batches,
            ..LiveModel::default()
        };
        model.take_counts(&self.metrics.counts());
        model
    }

    /// Notes that the first answer of a decoupled model came `after` the arrival of its request.
    pub fn record_first_answer(&self, after: Duration) {
        self.metrics.record_first_answer(after);
    }

    /// Counts a request that got no result, and ended `after` its arrival.
    pub fn record_not_answered(&self, reason: Unanswered, after: Duration) {
        self.metrics.record_not_answered(reason, after);
    }
}

/// Reads a definition, and the steps of an ensemble.
fn read(name: &str, definition: &[u8], metrics: &Metrics) -> Result<(Definition, Option<RemoteEnsemble>), String> {
    let read = Definition::decode(definition)?;
    let ensemble = RemoteEnsemble::of(name, &read, metrics)?;
    Ok((read, ensemble))
}

impl RemoteModels {
    /// No models yet.
    pub fn new(preprocessing: Preprocessing) -> Self {
        let (models, decisions, has_rollout_header) = Default::default();
        RemoteModels { models, decisions, has_rollout_header, preprocessing: Arc::new(preprocessing) }
    }

    /// Replaces the models that clients may ask for.
    pub fn replace(&self, served: Vec<ServedModel>, metrics: &Arc<Metrics>) {
        let before = self.models.read().clone();
        let mut now = BTreeMap::<String, RemoteModel>::new();
        for ServedModel { model, version, definition, .. } in served {
            let there = before.get(&model);
            let same = there.and_then(|there| there.versions.get(&version)).filter(|same| same.bytes == definition);
            let read = match same {
                Some(same) => Ok(same.clone()),
                None => read(&model, &definition, metrics).map(|(read, ensemble)| {
                    // Backends describe a model alike but for hints about times. The counts go on if
                    // the description of another backend comes, since the version before still lives.
                    let version = Arc::new(RemoteVersion {
                        ensemble,
                        metrics: metrics.model(&model, &version.to_string()),
                        name: model.clone(),
                        number: version,
                        version: version.to_string(),
                        definition: read,
                        bytes: definition,
                        steps: OnceLock::new(),
                    });
                    version.make_steps(&self.preprocessing);
                    version
                }),
            };
            match read {
                Ok(read) => {
                    let input_bytes = there.map(|there| there.input_bytes.clone()).unwrap_or_default();
                    let fresh = RemoteModel { versions: BTreeMap::new(), rollout: None, input_bytes };
                    now.entry(model).or_insert(fresh).versions.insert(version, read);
                }
                Err(reason) => {
                    tracing::error!(%model, version, %reason, "a backend's description of the model cannot be read")
                }
            }
        }
        let names: Vec<&String> = now.keys().filter(|name| !before.contains_key(*name)).collect();
        if !names.is_empty() {
            tracing::info!(models = ?names, "served");
        }
        let gone: Vec<&String> = before.keys().filter(|name| !now.contains_key(*name)).collect();
        if !gone.is_empty() {
            tracing::info!(models = ?gone, "no longer served");
        }
        let settle = |(name, model): (String, RemoteModel)| {
            let model = model.settle(&name, before.get(&name), metrics);
            (name, Arc::new(model))
        };
        let now: BTreeMap<String, Arc<RemoteModel>> = now.into_iter().map(settle).collect();
        let decisions = self.decisions.lock();
        let mut has_header = false;
        for (name, rollout) in now.iter().filter_map(|(name, model)| Some((name, model.rollout.as_ref()?))) {
            has_header |= rollout.header().is_some();
            if let Some(decision) = decisions.get(name) {
                rollout.follow(decision);
            }
        }
        self.has_rollout_header.store(has_header, Ordering::Release);
        *self.models.write() = now;
    }

    /// Takes a decision about the rollout of a model, which holds for its present and later rollouts of
    /// the same files.
    pub fn decide(&self, model: &str, decision: Vec<u8>) {
        let mut decisions = self.decisions.lock();
        if let Some(rollout) = self.models.read().get(model).and_then(|model| model.rollout.as_ref()) {
            rollout.follow(&decision);
        }
        decisions.insert(model.to_owned(), decision);
    }

    /// The header by which a request for the model asks for its new version; `None`: there is none.
    pub fn rollout_header(&self, name: &str) -> Option<String> {
        if !self.has_rollout_header.load(Ordering::Relaxed) {
            return None;
        }
        Some(self.models.read().get(name)?.rollout.as_ref()?.header()?.to_owned())
    }

    /// Whether a version may be asked for, and so may the models of its steps and of theirs.
    pub fn is_ready(&self, name: &str, version: &str) -> bool {
        let (mut open, mut seen) = (vec![(name.to_owned(), version.to_owned())], BTreeSet::new());
        while let Some(next) = open.pop() {
            let Ok(version) = self.version(&next.0, &next.1) else { return false };
            if seen.insert(next) {
                let steps = version.ensemble.iter().flat_map(RemoteEnsemble::models);
                open.extend(steps.map(|(model, version)| (model.to_owned(), version)));
            }
        }
        true
    }

    pub fn is_empty(&self) -> bool {
        self.models.read().is_empty()
    }

    /// All models, by name.
    pub fn all(&self) -> BTreeMap<String, Arc<RemoteModel>> {
        self.models.read().clone()
    }

    /// The model of this name.
    ///
    /// # Errors
    /// `NotFound`; `Unavailable` as long as no scheduler has sent the list of models.
    pub fn get(&self, name: &str) -> Result<Arc<RemoteModel>, ServiceError> {
        let models = self.models.read();
        if let Some(model) = models.get(name) {
            return Ok(model.clone());
        }
        if models.is_empty() {
            let reason = "no backend serves a model yet, or no scheduler leads (GET /v2/cluster)";
            return Err(ServiceError::Unavailable(format!("model '{name}' cannot be asked for: {reason}")));
        }
        let known: Vec<String> = models.keys().cloned().collect();
        Err(ServiceError::NotFound(unknown_model(name, &known)))
    }

    /// A version of the model of this name.
    ///
    /// # Errors
    /// As [`RemoteModels::get`] and [`RemoteModel::version`].
    pub fn version(&self, name: &str, version: &str) -> Result<Arc<RemoteVersion>, ServiceError> {
        self.get(name)?.version(name, version).cloned()
    }
}
