//! A loaded, warm model version: all that a device needs to run its batches.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use downbeat_core::probes::Probes;
use downbeat_core::{Duration, Time};
use downbeat_driver::QueueHandle;
use downbeat_engine::Model;
use downbeat_protocol::InferRequest;
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;
use tempfile::TempDir;

use crate::auto_model::AutoModel;
use crate::batch_codec::{Admitted, BatchCodec, ShapeKey};
use crate::clock::Clock;
use crate::engine_run::RunFailure;
use crate::error::ServiceError;
use crate::host::HostedVersion;
use crate::metrics::ModelMetrics;
use crate::model_health::ModelHealth;
use crate::model_memory::HeldMemory;
use crate::policy_report::PolicyReport;
use crate::preprocess::Preprocess;
use crate::queue::Queue;
use crate::row_judgement::RowJudgement;
use crate::statistics::{Phases, Statistics};
use crate::trouble::{Means, Sample};
use crate::unanswered::Unanswered;

/// A model version in service. Lives until its last request is answered, also after a newer version
/// took its place.
pub struct LoadedVersion {
    pub name: String,
    pub version: String,
    pub codec: Arc<BatchCodec>,
    metrics: ModelMetrics,
    /// The protocol's statistics of this version; one lock a batch.
    pub statistics: Mutex<Statistics>,
    /// The most items that may wait in all queues together.
    pub queue_bound: u32,
    /// The scheduler's queue for each shape of request; one if shapes do not vary.
    queues: RwLock<BTreeMap<ShapeKey, Arc<Queue>>>,
    model: Arc<dyn Model>,
    /// The queue that the last request joined, if that queue gathers requests.
    last_gathered: Mutex<Option<QueueHandle>>,
    waiting: AtomicU32,
    /// Which requests surely have the memory that their runs take.
    fits: KnownToFit,
    /// Probes of a device's policy: which requests it tries though the profile says they are late.
    /// The scheduler's queues have their own.
    pub probes: Mutex<Probes>,
    /// The restarts of its executor process that were counted.
    restarts_counted: AtomicU64,
    pub health: Arc<ModelHealth>,
    pub hosts: HostedVersion,
    policy: PolicyReport,
    /// The steps from pictures or texts to its inputs, if it has some.
    pub preprocess: Option<Arc<Preprocess>>,
    /// The version's part in the rehearsal, if `auto` was asked for and could choose.
    pub auto: Option<Arc<AutoModel>>,
    /// Whether its requests may share batches, if that was checked.
    pub rows: Option<RowJudgement>,
    /// Whether the server has taken note that its requests run alone, as an answer was wrong.
    pub is_parted: AtomicBool,
    /// Whether it answered its trial at load, or the samples that its configuration names.
    pub answers: bool,
    /// The CPU memory that it holds, if it is on the CPU.
    pub held: Option<HeldMemory>,
    /// The folder of its file, if the file was made for it. An engine may read the file again as
    /// long as the version has lanes.
    pub folder: Option<TempDir>,
}

/// The numbers of rows of which a request was found to fit, as a cache. Used only if all requests
/// of as many rows have the same shapes.
struct KnownToFit {
    varies: bool,
    /// Bit `r`: `r` rows fit.
    rows: AtomicU64,
}

impl KnownToFit {
    fn new(varies: bool) -> Self {
        KnownToFit { varies, rows: AtomicU64::new(0) }
    }

    /// The bit of this number of rows; 0 if there is no bit for it.
    fn of(&self, rows: u32) -> u64 {
        if self.varies { 0 } else { 1u64.checked_shl(rows).unwrap_or(0) }
    }

    fn has(&self, bit: u64) -> bool {
        self.rows.load(Ordering::Relaxed) & bit != 0
    }

    fn add(&self, bit: u64) {
        self.rows.fetch_or(bit, Ordering::Relaxed);
    }
}

impl LoadedVersion {
    /// A version that is on these devices, by this policy.
    pub fn new(hosts: HostedVersion, policy: PolicyReport, metrics: ModelMetrics, queue_bound: u32) -> Self {
        let first = hosts.first();
        LoadedVersion {
            name: first.name.clone(),
            version: first.version.clone(),
            codec: first.tensors.codec.clone(),
            fits: KnownToFit::new(first.tensors.codec.has_varying_shapes()),
            model: first.model.clone(),
            health: first.health.clone(),
            metrics,
            statistics: Mutex::default(),
            queue_bound,
            queues: RwLock::default(),
            last_gathered: Mutex::new(None),
            waiting: AtomicU32::new(0),
            probes: Mutex::default(),
            restarts_counted: AtomicU64::new(0),
            hosts,
            policy,
            preprocess: None,
            auto: None,
            rows: None,
            is_parted: AtomicBool::new(false),
            answers: true,
            held: None,
            folder: None,
        }
    }

    /// Checks a request's inputs as far as possible without their data, which may still be
    /// elsewhere.
    ///
    /// # Errors
    /// `InvalidArgument`, with the tensor, the expected value and the actual one.
    pub fn check_inputs(&self, request: &InferRequest) -> Result<(), ServiceError> {
        match self.preprocess_of(request) {
            Some(preprocess) => preprocess.check(request, &self.codec).map(drop),
            None => self.codec.check_inputs(request),
        }
    }

    /// The steps that a request must go through, if its inputs are not tensors already.
    pub fn preprocess_of(&self, request: &InferRequest) -> Option<&Arc<Preprocess>> {
        self.preprocess.as_ref().filter(|preprocess| preprocess.is_for(request))
    }

    /// Whether an answer was wrong because its request shared a batch, so that each request runs
    /// alone by now.
    pub fn has_mixed_rows(&self) -> bool {
        self.hosts.first().tensors.is_sharing_off()
    }

    /// The report on its policy.
    pub fn policy(&self) -> PolicyReport {
        let guard = self.hosts.guard().map(|guard| guard.report());
        PolicyReport { guard: guard.or_else(|| self.policy.guard.clone()), ..self.policy.clone() }
    }

    /// Whether a request may ever have the memory that its run takes.
    ///
    /// # Errors
    /// `InvalidArgument`, with the memory that the run would take, and the limit of runs.
    pub fn check_memory(&self, request: &Admitted) -> Result<(), ServiceError> {
        let Some(memory) = self.model.run_memory() else { return Ok(()) };
        let known = self.fits.of(request.rows);
        if self.fits.has(known) {
            return Ok(());
        }
        let shapes = self.codec.engine_shapes(request, request.rows as usize).enumerate();
        let inputs: SmallVec<[_; 4]> = shapes.map(|(index, shape)| (shape, request.input(index))).collect();
        let always = memory
            .check(inputs.iter().map(|(shape, data)| (&shape[..], *data)))
            .map_err(|error| ServiceError::InvalidArgument(format!("model '{}': {error}", self.name)))?;
        if always {
            self.fits.add(known);
        }
        Ok(())
    }

    /// Why it is not ready at `now`; `None` if it is ready.
    pub fn not_ready(&self, now: Time) -> Option<String> {
        self.out_of_service().or_else(|| self.health.not_ready(now))
    }

    /// Why it takes no requests; `None` if it takes them.
    pub fn out_of_service(&self) -> Option<String> {
        self.hosts.lost().or_else(|| self.restarting()).or_else(|| self.health.refuses())
    }

    /// The restarts of its executor process since the last call; `None` if it has no such process.
    pub fn new_restarts(&self) -> Option<u64> {
        let restarts = self.model.executor()?.restarts();
        Some(restarts.saturating_sub(self.restarts_counted.fetch_max(restarts, Ordering::Relaxed)))
    }

    /// Why it waits for its executor process; `None` if it does not.
    fn restarting(&self) -> Option<String> {
        self.model.executor()?.down()
    }

    /// The error for the client of a request that failed on a device.
    pub fn failure(&self, device: usize, failure: &RunFailure) -> ServiceError {
        let name = &self.name;
        match (self.model.lost(device).or_else(|| self.restarting()), failure) {
            (Some(lost), _) => ServiceError::Unavailable(format!("model '{name}': {lost}")),
            (None, RunFailure::Engine(reason)) => {
                ServiceError::Internal(format!("model '{name}' failed on this request: {reason}"))
            }
            (None, RunFailure::Ended(reason)) => ServiceError::DeadlineExceeded(format!("model '{name}': {reason}")),
            (None, RunFailure::Refused(reason)) => ServiceError::Unavailable(format!("model '{name}': {reason}")),
        }
    }

    /// Notes that a request has joined this queue, which gathers requests. Returns another queue
    /// whose requests wait in vain, as requests of another shape have begun to come.
    pub fn gathers_in(&self, queue: QueueHandle) -> Option<QueueHandle> {
        self.last_gathered.lock().replace(queue).filter(|before| *before != queue)
    }

    /// The queue for requests of this shape, if there is one yet.
    pub fn queue(&self, key: &ShapeKey) -> Option<Arc<Queue>> {
        self.queues.read().get(key).cloned()
    }

    /// Makes `queue` the one for requests of this shape.
    ///
    /// # Errors
    /// The present queue, if another thread was faster.
    pub fn insert_queue(&self, key: ShapeKey, queue: Arc<Queue>) -> Result<(), Arc<Queue>> {
        use std::collections::btree_map::Entry;
        match self.queues.write().entry(key) {
            Entry::Vacant(place) => {
                place.insert(queue);
                Ok(())
            }
            Entry::Occupied(there) => Err(there.get().clone()),
        }
    }

    /// Takes out the queue for one shape, if it is still this one. Returns whether it was.
    pub fn remove_queue(&self, key: &ShapeKey, queue: &Arc<Queue>) -> bool {
        let mut queues = self.queues.write();
        let is_it = queues.get(key).is_some_and(|there| Arc::ptr_eq(there, queue));
        if is_it {
            queues.remove(key);
        }
        is_it
    }

    /// All queues with their shapes.
    pub fn queues(&self) -> Vec<(ShapeKey, Arc<Queue>)> {
        self.queues.read().iter().map(|(key, queue)| (key.clone(), queue.clone())).collect()
    }

    /// Items that wait now, all shapes.
    pub fn waiting(&self) -> u32 {
        self.hosts.waiting() + self.waiting.load(Ordering::Relaxed)
    }

    /// Counts `rows` items into the queue; false if there is no room for them. The count is exact,
    /// even if the version's shapes are in several shards.
    pub fn begin_waiting(&self, rows: u32) -> bool {
        let more = |waiting: u32| Some(waiting.saturating_add(rows)).filter(|waiting| *waiting <= self.queue_bound);
        self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Counts `rows` items out of the queue.
    pub fn end_waiting(&self, rows: u32) {
        self.waiting.fetch_sub(rows, Ordering::Relaxed);
    }

    /// Counts a launch of `rows` items for requests that waited, took, and were late as given.
    pub fn record_batch(
        &self,
        rows: u32,
        phases: Phases,
        requests: impl ExactSizeIterator<Item = (Duration, Duration, bool)> + Clone,
    ) {
        self.metrics.record_batch(rows, phases, requests.clone());
        if let Some(auto) = &self.auto {
            requests.clone().for_each(|(_, took, late)| auto.ended(Some(took), !late));
        }
        let taken = requests.map(|(queued, took, _)| (queued, took));
        self.statistics.lock().record_batch(Clock::unix_millis(), rows, phases, taken);
    }

    /// The outcomes of the version's requests, and how fast it is. `slo`: its requests may take
    /// this long.
    pub fn sample(&self, slo: Option<Duration>) -> Sample {
        let (name, version, counts) = (self.name.clone(), self.version.clone(), self.metrics.counts());
        Sample { model: name, version, counts, means: Some(self.means(slo)) }
    }

    fn means(&self, slo: Option<Duration>) -> Means {
        let devices = u32::try_from(self.hosts.devices().len()).unwrap_or(u32::MAX);
        // Latencies differ by shape: the queue that was used last counts.
        let queues = self.queues.read();
        let queue = queues.values().max_by_key(|queue| queue.last_used_ns.load(Ordering::Relaxed));
        let (profile, max_batch, at_once) = match queue {
            Some(queue) => {
                let settings = queue.settings();
                (queue.profiles().into_iter().next(), settings.max_batch, settings.max_in_flight.min(devices))
            }
            None => (None, self.codec.max_batch, devices),
        };
        Means { profile: profile.unwrap_or_else(|| self.hosts.first().profile.clone()), slo, max_batch, at_once }
    }

    /// Counts a request that got no result, `after` its arrival.
    pub fn record_not_answered(&self, reason: Unanswered, after: Duration) {
        // A model that refuses all requests runs nothing, and the server would rest instead of
        // naming the trouble.
        self.hosts.stir();
        self.metrics.record_not_answered(reason);
        if let Some(auto) = self.auto.as_ref().filter(|_| reason.is_for_want_of_time()) {
            auto.ended(None, false);
        }
        self.statistics.lock().record_failure(after);
    }
}
