//! The models in service, and the way of a request from a frontend to the driver and back.

mod answering;
mod comparison;
mod handover;
mod intake;
mod many;
mod missed;
mod model;
mod pipeline;
mod preparing;
pub mod rolled;
mod rollout;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use downbeat_core::cluster::ItemCost;
use downbeat_core::journal::QueueName;
use downbeat_core::shape_guess::{guessed_profile, nearest_shape};
use downbeat_core::tenants::{Standing, largest_lent_batch};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_engine::RequestAbout;
use downbeat_host::device::{QueuedCall, run_own};
use downbeat_host::request::batch_codec::{Admitted, ShapeKey};
use downbeat_host::request::call::Call;
use downbeat_host::request::queue::Queue;
use downbeat_host::request::reply::{Answered, Reply};
use downbeat_host::request::ticket::{Decider, Ticket};
use downbeat_host::request_log::RequestTrail;
use downbeat_host::run::watchdog::Watchdog;
use downbeat_host::scheduler::Driver;
use downbeat_protocol::{InferRequest, InferResponse, inference as pb};
use downbeat_repository::ModelDefinition;
use downbeat_service::budget::ByteBudget;
use downbeat_service::error::ServiceError;
use downbeat_service::options::ServerOptions;
use downbeat_service::refusal::queue_full;
use downbeat_service::report::client_ids::ClientIds;
use downbeat_service::report::live::LiveTenant;
use downbeat_service::tenants::{Charge, NamedPart, Tenants};
use downbeat_service::traces::Traces;
use downbeat_service::traces::open::TracePart;
use downbeat_service::unanswered::Unanswered;
use futures_util::FutureExt;
use intake::InputBytes;
use parking_lot::{Mutex, RwLock};
use pipeline::Weighing;

use crate::loaded_version::LoadedVersion;

pub use answering::{AnswerForm, FirstAnswer, answer_parameters, begin_many};
pub use intake::{Limits, Looked, Wishes, hold_inputs, response};
pub use missed::{Refused, Terms};
pub use model::{InFlight, Model, version_of};
pub use pipeline::{
    Callers, Counted, Failure, FoundModel, InPipeline, Pipeline, StepCount, StepEnd, StepPart, StepRuns, Trail, Within,
    adapt_inputs, run_steps,
};
pub use rollout::{ServedRollout, no_rollout};

/// Shapes of one model that have a queue of their own at a time.
const MOST_SHAPES: usize = 1024;
/// How long a model that is unloaded waits for runs that were told to end.
const RUNS_END_WITHIN: Duration = Duration::from_millis(8_000);
/// A shape that was unused for this long gives its queue up to a new shape.
const SHAPE_FORGOTTEN_AFTER: Duration = Duration::from_millis(60_000);

/// The answer to an inference request.
pub type Inferred = Result<InferResponse, ServiceError>;

/// Where a request comes from.
struct Origin<'w, 't> {
    arrival: Time,
    /// The request of an ensemble, or of a model's code, that the request is a step of.
    within: Option<&'w Within>,
    /// The request's trail in the decision log.
    trail: Option<Arc<RequestTrail<'t>>>,
    /// Whether no client waits for the answer, so that the request yields to all others.
    is_copy: bool,
}

/// Answers inference requests with the models in service.
pub struct Serving {
    options: Arc<ServerOptions>,
    driver: Arc<Driver>,
    budget: Arc<ByteBudget>,
    models: RwLock<BTreeMap<String, Arc<Model>>>,
    /// The ensembles in service. No name is in both maps for longer than a change of its kind takes.
    pipelines: RwLock<BTreeMap<String, Arc<Pipeline>>>,
    watchdog: Arc<Watchdog>,
    draining: AtomicBool,
    /// Whether a rollout has a header that asks for its new version.
    has_rollout_header: AtomicBool,
    weighing: Mutex<Weighing>,
    next_pipeline: AtomicU64,
    /// The number of requests of pipelines so far.
    trails: AtomicU64,
    tenants: Arc<Tenants>,
    traces: Arc<Traces>,
    /// The clients' names for the last requests.
    pub ids: ClientIds,
}

impl Serving {
    /// Serves no model yet.
    pub fn new(
        options: Arc<ServerOptions>,
        driver: Arc<Driver>,
        budget: Arc<ByteBudget>,
        watchdog: Arc<Watchdog>,
        traces: Arc<Traces>,
    ) -> Self {
        let (models, pipelines, draining) = (RwLock::default(), RwLock::default(), AtomicBool::new(false));
        let (weighing, next_pipeline, trails, ids) = Default::default();
        let devices = u32::try_from(driver.devices()).unwrap_or(u32::MAX);
        let tenants = Arc::new(Tenants::new(devices, driver.tenant_metrics()));
        Serving {
            options,
            driver,
            budget,
            models,
            pipelines,
            watchdog,
            draining,
            has_rollout_header: AtomicBool::new(false),
            weighing,
            next_pipeline,
            trails,
            tenants,
            traces,
            ids,
        }
    }

    /// A number for a new ensemble.
    pub fn next_pipeline(&self) -> u64 {
        self.next_pipeline.fetch_add(1, Ordering::Relaxed)
    }

    /// The model in service with this name.
    pub fn get(&self, name: &str) -> Option<Arc<Model>> {
        self.models.read().get(name).cloned()
    }

    /// The model, if it is in service, for a request: it does not leave before the request is done.
    pub fn enter(&self, name: &str) -> Option<InFlight> {
        // The request is counted under the lock: taking the model out of service later sees the
        // count.
        let models = self.models.read();
        let served = models.get(name)?.clone();
        served.occupancy.enter();
        Some(InFlight(served))
    }

    /// The ensemble in service with this name.
    pub fn pipeline(&self, name: &str) -> Option<Arc<Pipeline>> {
        self.pipelines.read().get(name).cloned()
    }

    /// The ensemble, if it is in service, for a request.
    pub fn enter_pipeline(&self, name: &str) -> Option<InPipeline> {
        let pipelines = self.pipelines.read();
        let pipeline = pipelines.get(name)?.clone();
        pipeline.occupancy.enter();
        Some(InPipeline(pipeline))
    }

    /// The models that run a request to `name`: the model itself, or those of an ensemble's steps and
    /// of theirs.
    pub fn models_behind(&self, name: &str) -> Vec<String> {
        let models_of = |name: &str| match self.pipeline(name) {
            Some(pipeline) => pipeline.ensemble().models().into_iter().map(str::to_owned).collect(),
            None => BTreeSet::new(),
        };
        let mut models = reached_from(name, models_of);
        models.retain(|model| self.pipeline(model).is_none());
        models
    }

    /// The number of a new request of a pipeline.
    fn next_trail(&self) -> u64 {
        self.trails.fetch_add(1, Ordering::Relaxed)
    }

    /// All ensembles in service.
    pub fn pipelines(&self) -> Vec<Arc<Pipeline>> {
        self.pipelines.read().values().cloned().collect()
    }

    /// Puts an ensemble into service, or takes it out. Returns the one that had the name before.
    pub fn replace_pipeline(&self, name: &str, pipeline: Option<Arc<Pipeline>>) -> Option<Arc<Pipeline>> {
        let mut pipelines = self.pipelines.write();
        match pipeline {
            Some(pipeline) => pipelines.insert(name.to_owned(), pipeline),
            None => pipelines.remove(name),
        }
    }

    /// Waits until an ensemble out of service has answered its requests.
    pub async fn retire_pipeline(&self, pipeline: &Pipeline) {
        pipeline.occupancy.wait_idle().await;
    }

    /// Whether a model or an ensemble of this name is in service.
    pub fn serves(&self, name: &str) -> bool {
        self.models.read().contains_key(name) || self.pipelines.read().contains_key(name)
    }

    /// The present time.
    pub fn now(&self) -> Time {
        self.driver.clock().now()
    }

    /// Whether a decision log has the requests.
    pub fn has_request_log(&self) -> bool {
        self.driver.request_log().is_some()
    }

    /// All models in service.
    pub fn all(&self) -> Vec<Arc<Model>> {
        self.models.read().values().cloned().collect()
    }

    /// Whether no model is in service.
    pub fn is_empty(&self) -> bool {
        self.models.read().is_empty() && self.pipelines.read().is_empty()
    }

    /// The traces of requests.
    pub fn traces(&self) -> &Arc<Traces> {
        &self.traces
    }

    /// Puts a model into service, or takes it out. Returns the model that had the name before.
    pub fn replace(&self, name: &str, served: Option<Arc<Model>>) -> Option<Arc<Model>> {
        if let Some(served) = &served {
            self.warn_of_shares(served);
        }
        let mut models = self.models.write();
        let before = match served {
            Some(served) => models.insert(name.to_owned(), served),
            None => models.remove(name),
        };
        let mut rollouts = models.values().filter_map(|model| model.rollout.as_ref());
        self.has_rollout_header.store(rollouts.any(|rollout| rollout.header().is_some()), Ordering::Release);
        before
    }

    /// The header by which a request for the model asks for its new version.
    pub fn rollout_header(&self, name: &str) -> Option<String> {
        if !self.has_rollout_header.load(Ordering::Relaxed) {
            return None;
        }
        Some(self.get(name)?.rollout.as_ref()?.header()?.to_owned())
    }

    /// Waits until a model out of service has answered its requests. Then gives up its queues and
    /// ends its runs, as no client waits for them. Returns whether they have ended.
    pub async fn retire(&self, served: &Model) -> bool {
        served.occupancy.wait_idle().await;
        self.forget_queues(served.versions.values());
        let until = self.driver.clock().now() + RUNS_END_WITHIN;
        while served.running() > 0 {
            if self.driver.clock().now() >= until || served.left_behind() == served.running() {
                return false;
            }
            served.versions.values().for_each(|version| self.watchdog.end_runs(&version.health));
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        true
    }

    /// Gives up the queues of versions that answer no more requests.
    pub fn forget_queues<'a>(&self, versions: impl Iterator<Item = &'a Arc<LoadedVersion>>) {
        for (_, queue) in versions.flat_map(|loaded| loaded.queues()) {
            self.driver.remove_queue(queue.place);
        }
    }

    /// From now on the server and its models are not ready. Requests that still come are answered:
    /// their clients do not know it yet, and the frontends end connections.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether the server is on its way out.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Whether no request is in flight.
    pub fn is_idle(&self) -> bool {
        self.models.read().values().all(|served| served.occupancy.in_flight(Ordering::Acquire) == 0)
            && self.pipelines.read().values().all(|pipeline| pipeline.occupancy.in_flight(Ordering::Acquire) == 0)
    }

    /// The version that a request is for, if it is taken now.
    ///
    /// # Errors
    /// `Unavailable` if the server drains, the version's devices are lost, its process is being
    /// restarted or a run of it does not end; the errors of [`Model::version`].
    pub fn check<'a>(&self, served: &'a Model, version: &str) -> Result<&'a Arc<LoadedVersion>, ServiceError> {
        let loaded = served.version(version)?;
        match loaded.out_of_service() {
            Some(reason) => Err(ServiceError::Unavailable(format!("model '{}': {reason}", loaded.name))),
            None => Ok(loaded),
        }
    }

    /// Runs an inference, which may be a step `within` a request of an ensemble, or a call of models'
    /// code. Dropping the future cancels the request.
    ///
    /// # Errors
    /// Any [`ServiceError`].
    pub fn infer(
        &self,
        served: &Model,
        request: InferRequest,
        within: Option<&Within>,
    ) -> impl Future<Output = Inferred> + Send {
        self.infer_since(self.now(), served, request, within)
    }

    /// As [`Serving::infer`], for a request that came at `arrival`.
    fn infer_since(
        &self,
        arrival: Time,
        served: &Model,
        request: InferRequest,
        within: Option<&Within>,
    ) -> impl Future<Output = Inferred> + Send {
        let trail = self.request_trail(&request);
        let origin = Origin { arrival, within, trail: trail.clone(), is_copy: false };
        // No `async fn`: its future would move the request once more.
        self.infer_to(served, request, origin, |_, _| ()).inspect(move |result| {
            if let Some(trail) = &trail {
                trail.ended(result);
            }
        })
    }

    /// The trail of a request in the decision log; `None`: there is no log.
    fn request_trail(&self, request: &InferRequest) -> Option<Arc<RequestTrail<'_>>> {
        let log = self.driver.request_log()?;
        Some(Arc::new(log.begin(self.driver.next_request(), request)))
    }

    /// As [`Serving::infer`]. `on_admitted` sees the request before it is handed over.
    async fn infer_to(
        &self,
        served: &Model,
        mut request: InferRequest,
        Origin { arrival, within, trail, is_copy }: Origin<'_, '_>,
        on_admitted: impl FnOnce(&Admitted, &Arc<LoadedVersion>),
    ) -> Inferred {
        let loaded = self.check(served, &request.model_version)?;
        let part = match request.parameters.is_empty() {
            true => None,
            false => self.trace_part(&mut request, loaded, within, arrival),
        };
        let slo = self.options.slo(&served.definition.name, served.definition.slo);
        let number = || trail.as_deref().map(RequestTrail::request);
        let wishes = Wishes { codec: &loaded.codec, batching: &served.definition.batching, slo };
        let Looked { wanted, limits } = wishes.look(&request, arrival)?.within(within);
        let prepared = match loaded.preprocess_of(&request) {
            // The future is boxed: other requests would move its memory for nothing.
            Some(steps) => {
                let prepared = Box::pin(self.prepare(served, loaded, steps, &mut request, &limits, arrival)).await;
                let terms = || Terms { number: number(), arrived: arrival, deadline: limits.deadline };
                Some(prepared.map_err(|refused| terms().refused(self.now(), loaded.missed(), &request, refused))?)
            }
            None => None,
        };
        let (place, _held) = prepared.map(|prepared| (prepared.place, prepared.held)).unzip();
        let (admitted, request) = wishes.admit(request).await?;
        let is_empty = admitted.is_empty;
        let leaving = Leaving::of(&admitted, limits.deadline);
        on_admitted(&admitted, loaded);
        if let Some(trail) = &trail {
            trail.has_terms(admitted.rows, limits.deadline);
        }
        let terms = || Terms { number: number(), arrived: arrival, deadline: limits.deadline };
        let refused =
            |error: ServiceError| terms().refused(self.now(), loaded.missed(), &request, Refused::from(error));
        let _input_bytes = self.take_in(served, loaded, &admitted).map_err(refused)?;
        let (reply, answer) = Reply::channel();
        let call = |admitted, charge| Call {
            admitted,
            loaded: loaded.clone(),
            arrival,
            deadline: limits.deadline,
            deadline_is_slo: limits.deadline_is_slo,
            is_probe: false,
            step: within.map(|within| within.mark.clone()),
            charge,
            trace: part,
            reply,
        };
        let hosts = &loaded.hosts;
        // A thread with several requests runs no launch: it would hold up the others, and make them
        // wait for batches of their own.
        let is_alone =
            served.occupancy.in_flight(Ordering::Relaxed) == 1 && within.is_none_or(|within| within.is_alone);
        let id = match &trail {
            None => self.driver.next_request(),
            Some(trail) => trail.request(),
        };
        self.ids.note(id, &request.id);
        if let Some(within) = within {
            within.mark.set_asked(id);
        }
        let decider = if hosts.is_routed {
            let length = hosts.length(&loaded.codec, &admitted)?;
            let (host, model) = hosts.soonest();
            if let Some(place) = place {
                place.pass_on(false);
            }
            let charge = match &limits.tenant {
                None => None,
                Some(tenant) => {
                    let cost = self.cost_of(admitted.rows, &model.profile, model.profile.max_batch(), slo);
                    self.charge(loaded, tenant, cost, arrival).map_err(refused)?
                }
            };
            run_own(is_alone, |own| host.submit(model, id, call(admitted, charge), length, own));
            Decider::Device(host.clone(), model.clone())
        } else {
            let queue = self.queue(&served.definition, loaded, &admitted, arrival)?;
            let Limits { queue_expiry, level, .. } = limits;
            let (queue, charge) = match &limits.tenant {
                None if is_copy => (self.yielding_queue(loaded, queue, &admitted, arrival).map_err(refused)?, None),
                None => (queue, None),
                Some(tenant) => {
                    self.charged_queue(loaded, queue, tenant, &admitted, (arrival, slo)).map_err(refused)?
                }
            };
            let (handle, has_place) = (queue.place, place.is_some());
            if let Some(place) = place {
                place.pass_on(true);
            }
            let queued = QueuedCall { call: call(admitted, charge), queue, queue_expiry, level, has_place };
            handover::hand_over(&self.driver, id, queued, arrival, is_alone);
            Decider::Scheduler(self.driver.clone(), handle)
        };
        let ticket = Ticket::new(decider, loaded.clone(), id, arrival);
        let Some(answered) = limits.wait(answer, || self.driver.clock().now().since(arrival)).await else {
            ticket.time_out();
            trail.iter().for_each(|trail| trail.timed_out());
            let error = limits.overrun(&request.model_name);
            let refused = Refused { reason: Some(Unanswered::Timeout), error };
            return Err(terms().refused(self.now(), loaded.missed(), &request, refused));
        };
        ticket.close();
        let Answered { answer: outputs, miss } = answered;
        if let Some(miss) = miss {
            terms().note(self.now(), loaded.missed(), &request, *miss, outputs.as_ref().err());
        }
        let about = leaving.stays();
        let outputs = if is_empty { loaded.codec.without_rows(outputs)? } else { outputs? };
        let mut response = response(request, &loaded.codec, &loaded.version, wanted.as_deref(), outputs);
        if let Some(parameters) = about.as_ref().and_then(|about| about.answer_parameters.get()) {
            response.parameters = answer_parameters(parameters)?;
        }
        Ok(response)
    }

    /// The part of a request's trace that is the request to this version; `None`: the request is not
    /// traced.
    fn trace_part(
        &self,
        request: &mut InferRequest,
        loaded: &LoadedVersion,
        within: Option<&Within>,
        arrival: Time,
    ) -> Option<Box<TracePart>> {
        self.traces.take(request)?.part((&loaded.name, &loaded.version), within.is_some(), arrival)
    }

    /// The device time that a request of `rows` items is charged.
    fn cost_of(&self, rows: u32, profile: &LatencyProfile, max_batch: u32, slo: Option<Duration>) -> Duration {
        ItemCost::new(profile, max_batch, slo.unwrap_or(Duration::MAX), self.tenants.devices()).of(rows)
    }

    /// Charges a request to its tenant; `None` if the server has no tenants.
    ///
    /// # Errors
    /// `TooMany` if the tenant has used up its quota.
    #[cold]
    fn charge(
        &self,
        loaded: &LoadedVersion,
        tenant: &str,
        cost: Duration,
        arrival: Time,
    ) -> Result<Option<Box<Charge>>, ServiceError> {
        let charge = self.tenants.arrive(arrival, tenant, cost);
        let charge = charge.inspect_err(|_| loaded.record_not_answered(Unanswered::QueueFull, Duration::ZERO))?;
        Ok(charge.map(Box::new))
    }

    /// Charges a request to its tenant, and finds the queue for its standing.
    ///
    /// # Errors
    /// `TooMany` if the tenant has used up its quota.
    #[cold]
    fn charged_queue(
        &self,
        loaded: &LoadedVersion,
        own: Arc<Queue>,
        tenant: &str,
        admitted: &Admitted,
        (arrival, slo): (Time, Option<Duration>),
    ) -> Result<(Arc<Queue>, Option<Box<Charge>>), ServiceError> {
        let most = own.settings().max_batch;
        let cost = own
            .refiners
            .first()
            .map_or(Duration::ZERO, |refiner| self.cost_of(admitted.rows, refiner.lock().profile(), most, slo));
        let charge = match self.charge(loaded, tenant, cost, arrival)? {
            Some(charge) if charge.standing() == Standing::Beyond => charge,
            charge => return Ok((own, charge)),
        };
        match self.yielding_queue(loaded, own, admitted, arrival) {
            Ok(lent) => Ok((lent, Some(charge))),
            Err(full) => Err(charge.refuse(arrival, &loaded.name, Unanswered::QueueFull, full)),
        }
    }

    /// The lent queue beside `own` for a request that yields to all others.
    ///
    /// # Errors
    /// `QueueFull` if the request has more rows than a lent batch.
    #[cold]
    fn yielding_queue(
        &self,
        loaded: &LoadedVersion,
        own: Arc<Queue>,
        admitted: &Admitted,
        arrival: Time,
    ) -> Result<Arc<Queue>, ServiceError> {
        let lent = self.lent_queue(loaded, &own, admitted, arrival);
        if admitted.rows > lent.settings().max_batch {
            loaded.record_not_answered(Unanswered::QueueFull, Duration::ZERO);
            return Err(queue_full(&loaded.name, lent.settings().max_batch, intake::RETRY_AFTER));
        }
        Ok(lent)
    }

    /// The queue beside `own` for requests beyond their tenants' shares.
    fn lent_queue(&self, loaded: &LoadedVersion, own: &Queue, admitted: &Admitted, now: Time) -> Arc<Queue> {
        let mut key = shape_key(loaded, admitted);
        key.push(LENT);
        if let Some(queue) = used_queue(loaded, &key, now) {
            return queue;
        }
        let most = own.settings().max_batch;
        let most = own.refiners.first().map_or(most, |refiner| {
            largest_lent_batch(refiner.lock().profile(), most, self.shortest_slo(), self.tenants.devices())
        });
        let name = QueueName { is_lent: true, ..loaded.queue_name(&shape_key(loaded, admitted)) };
        let queue = self.driver.add_lent_queue(name, own, most, loaded.hosts.models());
        self.put_queue(loaded, key, queue)
    }

    /// Puts a new queue into service. Returns the queue of that key: another thread may have been
    /// faster.
    fn put_queue(&self, loaded: &LoadedVersion, key: ShapeKey, queue: Arc<Queue>) -> Arc<Queue> {
        match loaded.insert_queue(key, queue.clone()) {
            Ok(()) => queue,
            Err(there) => {
                self.driver.remove_queue(queue.place);
                there
            }
        }
    }

    /// The shortest SLO of a model in service; [`Duration::MAX`]: no model has one.
    fn shortest_slo(&self) -> Duration {
        let models = self.models.read();
        let slos = models.values().filter_map(|model| self.options.slo(&model.definition.name, model.definition.slo));
        slos.min().unwrap_or(Duration::MAX)
    }

    /// Replaces the tenants' parts of the devices' time.
    pub fn set_tenants(&self, parts: &[NamedPart]) {
        if self.tenants.set(parts) {
            self.all().iter().for_each(|served| self.warn_of_shares(served));
        }
    }

    /// The parts and counts of the tenants; empty: there are none.
    pub fn tenants_report(&self) -> Vec<LiveTenant> {
        self.tenants.report()
    }

    /// Warns of a model whose requests the shares of tenants do not order.
    fn warn_of_shares(&self, served: &Model) {
        let routed = served.versions.values().filter(|loaded| loaded.hosts.is_routed);
        if let Some((_, placed)) = routed.flat_map(|loaded| loaded.hosts.devices()).next()
            && self.tenants.are_there()
        {
            tracing::warn!(
                model = %placed.name,
                policy = placed.policy_name,
                "the shares of tenants do not hold for this model, as its device policy makes the batches; \
                 give the model the device policy exclusive to keep them",
            );
        }
    }

    /// Holds the bytes of a request's inputs and checks that the version has memory to run them.
    ///
    /// # Errors
    /// `QueueFull` if the model's requests hold their share of the bytes; the errors of
    /// [`LoadedVersion::check_memory`].
    fn take_in<'a>(
        &self,
        served: &'a Model,
        loaded: &LoadedVersion,
        admitted: &Admitted,
    ) -> Result<InputBytes<'a>, ServiceError> {
        let held = hold_inputs(&self.budget, &served.input_bytes, &loaded.name, admitted.bytes());
        let held = held.inspect_err(|_| loaded.record_not_answered(Unanswered::QueueFull, Duration::ZERO))?;
        loaded.check_memory(admitted)?;
        Ok(held)
    }

    /// The queue for a request's shape. A shape that is new gets one, with the profile of the most
    /// similar shape there is, scaled by the number of elements.
    ///
    /// # Errors
    /// `Unavailable` if it has had too many shapes lately.
    pub fn queue(
        &self,
        definition: &ModelDefinition,
        loaded: &LoadedVersion,
        admitted: &Admitted,
        now: Time,
    ) -> Result<Arc<Queue>, ServiceError> {
        let key = shape_key(loaded, admitted);
        if let Some(queue) = used_queue(loaded, &key, now) {
            return Ok(queue);
        }
        let known = loaded.queues();
        if known.len() >= MOST_SHAPES {
            let mut oldest: Vec<_> =
                known.iter().map(|(key, queue)| (queue.last_used_ns.load(Ordering::Relaxed), key, queue)).collect();
            oldest.sort_unstable_by_key(|(used, key, _)| (*used, (*key).clone()));
            // The queue leaves the map first, so that no new request finds it. No request is on its way to
            // the queue, which was unused for a minute.
            let forgotten = oldest.into_iter().any(|(used, key, queue)| {
                now.since(Time::from_nanos(used)) >= SHAPE_FORGOTTEN_AFTER
                    && loaded.remove_queue(key, queue)
                    && (self.driver.remove_empty_queue(queue.place)
                        || loaded.insert_queue(key.clone(), queue.clone()).is_err())
            });
            if !forgotten {
                return Err(ServiceError::Unavailable(format!(
                    "model '{}' has had requests of {MOST_SHAPES} different shapes within {SHAPE_FORGOTTEN_AFTER}, the \
                     most that are kept apart; pad requests to fewer shapes",
                    loaded.name
                )));
            }
        }
        let slo = self.options.slo(&definition.name, definition.slo);
        // A lent queue has smaller batches, and no profile of its own.
        let own = || known.iter().filter(|(key, _)| key.last() != Some(&LENT));
        let Some((_, first)) = own().next() else {
            return Err(ServiceError::Internal(format!("model '{}' has no queue", loaded.name)));
        };
        let profile = guessed_profiles(own(), &key, slo);
        let (name, options) = (loaded.queue_name(&key), first.options_beside(&profile));
        let queue = self.driver.add_queue(name, options, &first.placed, profile, loaded.hosts.models());
        Ok(self.put_queue(loaded, key, queue))
    }
}

/// Tells a model that takes requests that a client has left: when it is dropped.
struct Leaving(Option<Arc<RequestAbout>>);

impl Leaving {
    /// The notice of a request with this deadline.
    fn of(request: &Admitted, deadline: Time) -> Leaving {
        if let Some(about) = &request.about {
            let _ = about.deadline.set(deadline);
        }
        Leaving(request.about.clone())
    }

    /// The client got its answer.
    fn stays(mut self) -> Option<Arc<RequestAbout>> {
        self.0.take()
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(about) = &self.0 {
            about.left.leave();
        }
    }
}

/// A model, and all models that are reached from it by `next_of`, each once. For example, `next_of` has
/// the models of an ensemble's steps.
pub fn reached_from(name: &str, next_of: impl Fn(&str) -> BTreeSet<String>) -> Vec<String> {
    let mut all = vec![name.to_owned()];
    let mut next = 0;
    while let Some(model) = all.get(next) {
        let new: Vec<String> = next_of(model).into_iter().filter(|model| !all.contains(model)).collect();
        all.extend(new);
        next += 1;
    }
    all
}

/// "There is no such model", with the name that was probably meant.
pub fn unknown_model(name: &str, known: &[String]) -> String {
    let hint = downbeat_repository::did_you_mean(name, known.iter().map(String::as_str));
    let shown: String = name.chars().take(128).collect();
    format!("Request for unknown model: '{shown}' is not found{hint} (the repository index lists the models)")
}

/// The last number in the key of a lent queue: no dimension is that large.
const LENT: i64 = i64::MAX;

/// The queue of this key, if there is one, which is used now.
fn used_queue(loaded: &LoadedVersion, key: &ShapeKey, now: Time) -> Option<Arc<Queue>> {
    let queue = loaded.queue(key)?;
    queue.last_used_ns.store(now.as_nanos(), Ordering::Relaxed);
    Some(queue)
}

/// The key of the queue for requests of this shape.
fn shape_key(loaded: &LoadedVersion, admitted: &Admitted) -> ShapeKey {
    if loaded.codec.has_varying_shapes() { loaded.codec.shape_key(admitted) } else { ShapeKey::new() }
}

/// A guess at the profiles of a shape, by hardware, from the most similar shape that is known;
/// empty if none is.
fn guessed_profiles<'a>(
    known: impl Iterator<Item = &'a (ShapeKey, Arc<Queue>)>,
    key: &ShapeKey,
    slo: Option<Duration>,
) -> Vec<LatencyProfile> {
    let nearest = nearest_shape(known.map(|(key, queue)| (key.as_slice(), queue)), key);
    let Some((queue, scale)) = nearest else { return Vec::new() };
    queue.profiles().iter().map(|profile| guessed_profile(profile, scale, slo)).collect()
}

/// The protocol's statistics of some versions.
pub fn statistics<'a>(versions: impl Iterator<Item = &'a Arc<LoadedVersion>>) -> Vec<pb::ModelStatistics> {
    versions.map(|version| version.statistics()).collect()
}
