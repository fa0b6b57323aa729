//! A loaded, warm model version: all that a device needs to run its batches.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use downbeat_core::journal::QueueName;
use downbeat_core::{Duration, Time};
use downbeat_host::device::Placements;
use downbeat_host::model_memory::HeldMemory;
use downbeat_host::request::batch_codec::{Admitted, BatchCodec, ShapeKey};
use downbeat_host::request::queue::Queue;
use downbeat_host::request::version_record::VersionRecord;
use downbeat_host::run::model_health::ModelHealth;
use downbeat_host::run::row_judgement::RowJudgement;
use downbeat_protocol::InferRequest;
use downbeat_repair::RepairedFile;
use downbeat_service::error::ServiceError;
use downbeat_service::metrics::ModelMetrics;
use downbeat_service::metrics::trouble::{Means, Sample};
use downbeat_service::report::policy_report::PolicyReport;
use parking_lot::RwLock;
use smallvec::SmallVec;
use tempfile::TempDir;

use crate::load::policy_choice::Chosen;
use crate::policy_guard::PolicyGuard;
use crate::preprocess::Preprocess;

/// A model version in service. Lives until its last request is answered, also after a newer version
/// took its place.
pub struct LoadedVersion {
    record: VersionRecord,
    /// Joins requests into batches.
    pub codec: Arc<BatchCodec>,
    /// The scheduler's queue for each shape of request; one if shapes do not vary.
    queues: RwLock<BTreeMap<ShapeKey, Arc<Queue>>>,
    /// Which requests surely have the memory that their runs take.
    fits: KnownToFit,
    /// The restarts of its executor process that were counted.
    restarts_counted: AtomicU64,
    /// The health of the version.
    pub health: Arc<ModelHealth>,
    /// The devices that the version is on.
    pub hosts: Placements,
    policy: PolicyReport,
    /// The steps from pictures or texts to its inputs, if it has some.
    pub preprocess: Option<Arc<Preprocess>>,
    /// The choice of `auto`, if it was asked for and could choose.
    pub chosen: Option<Chosen>,
    /// Watches its policy, if `auto` chose the policy.
    pub guard: Option<Arc<PolicyGuard>>,
    /// Whether its requests may share batches, if that was checked.
    pub rows: Option<RowJudgement>,
    /// Whether the server has taken note that its requests run alone, as an answer was wrong.
    pub is_parted: AtomicBool,
    /// Whether it answered its trial at load, or the samples that its configuration names.
    pub answers: bool,
    /// The CPU memory that it holds, if it is on the CPU.
    pub held: Option<HeldMemory>,
    /// How long its load took.
    pub load_time: Duration,
    /// The folder of its file, if the file was made for it. An engine may read the file again as
    /// long as the version has lanes.
    pub folder: Option<TempDir>,
    /// The repaired copy of its file, if there is one. An engine may read that copy again, too.
    pub repaired: Option<Arc<RepairedFile>>,
}

/// A model whose code has not said within this time that it is ready is not ready. Triton's time.
const LONGEST_CHECK: Duration = Duration::from_millis(5_000);

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
    /// The name of the queue for requests with this key, in the decision log.
    pub fn queue_name(&self, key: &[i64]) -> QueueName {
        let (model, version) = (self.record.name.clone(), self.record.version.clone());
        QueueName { model, version, shape: self.codec.shape_of(key), is_lent: false }
    }

    /// A version that is on these devices, by this policy.
    pub fn new(hosts: Placements, policy: PolicyReport, metrics: ModelMetrics, queue_bound: u32) -> Self {
        let first = hosts.first();
        let names = (first.name.clone(), first.version.clone());
        LoadedVersion {
            record: VersionRecord::new(names, first.model.clone(), metrics, hosts.activity().clone(), queue_bound),
            codec: first.tensors.codec.clone(),
            fits: KnownToFit::new(first.tensors.codec.has_varying_shapes()),
            health: first.health.clone(),
            queues: RwLock::default(),
            restarts_counted: AtomicU64::new(0),
            hosts,
            policy,
            preprocess: None,
            chosen: None,
            guard: None,
            rows: None,
            is_parted: AtomicBool::new(false),
            answers: true,
            held: None,
            load_time: Duration::ZERO,
            folder: None,
            repaired: None,
        }
    }

    /// Bytes that it takes on each of its devices, and bytes of a run beside these. The sessions of a
    /// GPU keep the memory of their runs.
    pub fn memory(&self) -> (u64, u64) {
        if let Some([weights, rings, run]) = self.held.as_ref().map(HeldMemory::bytes) {
            return (weights.saturating_add(rings), run);
        }
        let shares = self.hosts.devices().iter().filter_map(|(host, _)| self.model.device_share(host.device));
        (shares.map(|share| share.weights.saturating_add(share.session_bytes)).max().unwrap_or(0), 0)
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
        let guard = self.guard.as_ref().map(|guard| guard.report());
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

    /// Asks its code, if that has a check of its own, whether it is ready.
    pub async fn code_is_ready(&self) -> bool {
        let (sender, answer) = tokio::sync::oneshot::channel();
        if !self.model.ask_ready(Box::new(move |answer| drop(sender.send(answer)))) {
            return true;
        }
        let reason = match tokio::time::timeout(LONGEST_CHECK.into(), answer).await {
            Ok(Ok(Ok(()))) => return true,
            Ok(Ok(Err(reason))) => reason,
            Ok(Err(_)) => "its process has ended".to_owned(),
            Err(_) => format!("is_ready has not returned within {LONGEST_CHECK}"),
        };
        tracing::debug!(model = %self.name, version = %self.version, %reason, "the model's code is not ready");
        false
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
        self.hosts.waiting() + self.record.queued()
    }

    /// The outcomes of the version's requests, and how fast it is. `slo`: its requests may take
    /// this long.
    pub fn sample(&self, slo: Option<Duration>) -> Sample {
        let (name, version, counts) = (self.name.clone(), self.version.clone(), self.record.counts());
        Sample { model: name, version, counts, means: Some(self.means(slo)) }
    }

    /// `l(1)`: the time of a request of one item alone.
    pub fn alone(&self) -> Duration {
        self.means(None).profile.latency(1)
    }

    /// How long its devices were busy until now, with all their models, all devices together.
    pub fn busy_seconds(&self) -> f64 {
        self.hosts.devices().iter().map(|(host, _)| host.occupancy.busy_seconds()).sum()
    }

    /// The queue that was used last. Latencies differ by shape.
    pub fn last_queue(&self) -> Option<Arc<Queue>> {
        self.queues.read().values().max_by_key(|queue| queue.last_used_ns.load(Ordering::Relaxed)).cloned()
    }

    fn means(&self, slo: Option<Duration>) -> Means {
        let devices = u32::try_from(self.hosts.devices().len()).unwrap_or(u32::MAX);
        let queue = self.last_queue();
        let (profile, max_batch, at_once) = match queue {
            Some(queue) => {
                let settings = queue.settings();
                (queue.profiles().into_iter().next(), settings.max_batch, settings.max_in_flight.min(devices))
            }
            None => (None, self.codec.max_batch, devices),
        };
        Means { profile: profile.unwrap_or_else(|| self.hosts.first().profile.clone()), slo, max_batch, at_once }
    }
}

impl Deref for LoadedVersion {
    type Target = VersionRecord;

    fn deref(&self) -> &VersionRecord {
        &self.record
    }
}
