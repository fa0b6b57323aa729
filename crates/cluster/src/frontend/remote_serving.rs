//! A frontend as the [`Service`] behind its ports. The models run on backends.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use downbeat_core::rollout::RolloutChange;
use downbeat_core::{Duration, RequestId, Time};
use downbeat_host::request::reply::{Answered, Reply};
use downbeat_host::request_log::{RequestLog, RequestTrail};
use downbeat_models::preprocess::Preprocess;
use downbeat_models::serving::rolled::infer_rolled_out;
use downbeat_models::serving::{
    Limits, Looked, Refused, ServedRollout, Terms, Wishes, adapt_inputs, hold_inputs, no_rollout, response,
};
use downbeat_protocol::{InferRequest, InferResponse, inference as pb};
use downbeat_roles::{Doing, NewRequest, OrderFailure, QueueKey};
use downbeat_service::answers::Answers;
use downbeat_service::budget::{ByteBudget, Reservation};
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::metrics::Metrics;
use downbeat_service::options::ServerOptions;
use downbeat_service::refusal;
use downbeat_service::report::cluster_report::ClusterView;
use downbeat_service::report::live::LiveReport;
use downbeat_service::report::missed::{Miss, MissedReport};
use downbeat_service::report::policy_report::PolicyReport;
use downbeat_service::report::rollout::RolloutReport;
use downbeat_service::service::{LoadOverrides, ModelIndexEntry, ModelMetadata, Service};
use downbeat_service::tenants::{NamedPart, keeps_no_parts};
use downbeat_service::unanswered::Unanswered;
use downbeat_service::work::turn_end;
use futures_util::future::{BoxFuture, FutureExt};
use tokio::sync::{mpsc, oneshot};

use super::frontend_figures::FrontendFigures;
use super::frontend_role::{FrontendEvent, HearsRun, RemoteCall, StreamedAnswer};
use super::remote_ensemble::{Began, Due};
use super::remote_models::{RemoteModel, RemoteModels, RemoteVersion};
use super::remote_rollout::RemoteRequests;
use super::remote_streams;
use crate::view::View;
use crate::wire::about::{sent_about, take_parameters};
use crate::wire::arena::Arena;
use crate::wire::tensors::Tensors;

/// The most requests in flight at a frontend.
const MOST_IN_FLIGHT: u64 = 1 << 18;
/// How long the answer to a load waits until this frontend offers the model, and how often it looks.
const HEARS_WITHIN: Duration = Duration::from_millis(10_000);
const LOOKS_EVERY: Duration = Duration::from_millis(10);
/// When a client should try again at that limit.
const RETRY_AFTER: Duration = Duration::from_millis(1_000);

/// A copy has no deadline, so that clients' requests go first.
const OF_A_COPY: Due = Due { deadline: Time::MAX, is_slo: false, depth: 0, began: None };

/// Events that a thread sends to nodes at the end of its event loop's turn.
type Outbox = RefCell<Vec<(mpsc::UnboundedSender<FrontendEvent>, FrontendEvent)>>;

thread_local! {
    static OUTBOX: Outbox = Outbox::default();
}

/// Sends the collected events to nodes.
fn flush() {
    // A node that has ended has no waiting requests. A thread that has ended sends nothing.
    let _ = OUTBOX.try_with(|outbox| outbox.take().into_iter().for_each(|(events, event)| drop(events.send(event))));
}

/// Answers inference requests with models that run on backends.
pub struct RemoteServing {
    options: Arc<ServerOptions>,
    clock: Clock,
    pub budget: Arc<ByteBudget>,
    models: Arc<RemoteModels>,
    metrics: Arc<Metrics>,
    figures: Arc<FrontendFigures>,
    view: View,
    events: mpsc::UnboundedSender<FrontendEvent>,
    arena: Option<Arc<Arena>>,
    /// The decision log; `None`: there is none.
    log: Option<Arc<RequestLog>>,
    next_ticket: AtomicU64,
    in_flight: AtomicU64,
    draining: AtomicBool,
    /// The frontend itself: the task of a copy keeps it alive.
    this: Weak<RemoteServing>,
}

/// The right to cancel a request, by dropping the ticket.
struct Ticket<'a> {
    serving: &'a RemoteServing,
    version: &'a RemoteVersion,
    number: u64,
    arrival: Time,
    /// The reason to count for a request without an answer; `None`: already answered or counted.
    end: Option<Unanswered>,
    /// Whether the node has the request, and the client no answer.
    is_handed_in: bool,
    /// Gets the time when the run began; `None`: the request is no step of an ensemble.
    began: Option<Began>,
    /// Takes the answers of a decoupled model, until the node has the request.
    stream: Option<mpsc::Sender<StreamedAnswer>>,
}

/// The number of a request, and the takers of its log and its answers.
pub(super) struct Asking<'a> {
    /// The request's number at this frontend.
    pub number: u64,
    /// The request's entry in the decision log; `None`: there is none.
    pub trail: Option<&'a RequestTrail<'a>>,
    /// Takes any number of answers; `None`: the caller wants one answer.
    pub stream: Option<mpsc::Sender<StreamedAnswer>>,
}

/// A request that the scheduler hears of while its tensors are made.
struct Announced {
    rows: u32,
    answer: oneshot::Receiver<Answered>,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.serving.in_flight.fetch_sub(1, Ordering::Relaxed);
        if let Some(reason) = self.end {
            self.version.record_not_answered(reason, self.serving.clock.now().since(self.arrival));
        }
        if self.is_handed_in {
            self.serving.cancel(self.number);
        }
    }
}

impl RemoteServing {
    /// A frontend for the models of its node, which takes `events`.
    pub fn new(
        options: Arc<ServerOptions>,
        clock: Clock,
        budget: Arc<ByteBudget>,
        (metrics, figures, view): (Arc<Metrics>, Arc<FrontendFigures>, View),
        (events, arena): (mpsc::UnboundedSender<FrontendEvent>, Option<Arc<Arena>>),
        log: Option<Arc<RequestLog>>,
    ) -> Arc<Self> {
        let (next_ticket, in_flight, draining) = Default::default();
        let models = figures.models.clone();
        Arc::new_cyclic(|this| RemoteServing {
            options,
            clock,
            budget,
            models,
            metrics,
            figures,
            view,
            events,
            arena,
            log,
            next_ticket,
            in_flight,
            draining,
            this: this.clone(),
        })
    }

    /// Reports not ready from now on. Requests that still come are answered.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether no request is in flight.
    pub fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) == 0
    }

    /// All metrics in Prometheus' text format, as of now.
    ///
    /// # Errors
    /// If a metric cannot be written as text: a defect.
    pub fn metrics(&self) -> Result<String, prometheus::Error> {
        let models = self.models.all();
        for version in models.values().flat_map(|model| model.versions.values()) {
            let counts = version.sample().counts;
            self.metrics.set_outcomes(&version.name, &version.version, version.definition.slo, &counts);
        }
        let rollouts = models.iter().filter_map(|(name, model)| Some((name, model.rollout.as_ref()?)));
        self.metrics.set_rollout_states(rollouts.map(|(name, rollout)| [&**name, rollout.state().name()]));
        self.metrics.set_budget(&self.budget);
        self.metrics.set_abandoned(downbeat_service::work::work_pool::abandoned());
        self.metrics.render()
    }

    /// Passes an event to the node at the end of the event loop's turn. The node wakes once for all
    /// events of the turn, and they share a message.
    pub(super) fn hand_over(&self, event: FrontendEvent) {
        let is_first = OUTBOX.with_borrow_mut(|outbox| {
            outbox.push((self.events.clone(), event));
            outbox.len() == 1
        });
        if is_first {
            turn_end::at_end(flush);
        }
    }

    /// Tells the node that the client of a request has gone.
    pub(super) fn cancel(&self, number: u64) {
        flush();
        // A node that has ended has no requests. A node that has not heard of the request yet has
        // none of this number.
        let _ = self.events.send(FrontendEvent::Cancel(number));
    }

    /// Takes a place among the requests in flight.
    fn enter<'a>(&'a self, version: &'a RemoteVersion, arrival: Time, number: u64) -> Result<Ticket<'a>, ServiceError> {
        let in_flight = self.in_flight.fetch_add(1, Ordering::AcqRel);
        let (end, is_handed_in, began, stream) = (None, false, None, None);
        let ticket = Ticket { serving: self, version, number, arrival, end, is_handed_in, began, stream };
        if in_flight >= MOST_IN_FLIGHT {
            version.record_not_answered(Unanswered::QueueFull, Duration::ZERO);
            let message =
                format!("{in_flight} requests are in flight at this frontend, which is its limit; try again later");
            return Err(ServiceError::QueueFull { message, retry_after: RETRY_AFTER });
        }
        Ok(ticket)
    }

    /// Makes a request for the node, and the channel for its client's answer.
    fn asked<P>(
        &self,
        version: &Arc<RemoteVersion>,
        (ticket, limits): (&mut Ticket<'_>, &Limits),
        (shape, rows): (Vec<i64>, u32),
        payload: P,
    ) -> (NewRequest<P>, RemoteCall, oneshot::Receiver<Answered>) {
        let (reply, answer) = Reply::channel();
        let (deadline, deadline_is_slo) = (limits.deadline, limits.deadline_is_slo);
        let asked = NewRequest {
            queue: QueueKey { model: version.name.clone(), version: version.number, shape },
            payload,
            deadline,
            queue_expiry: limits.queue_expiry,
            level: limits.level,
            size: rows,
        };
        let tenants = &self.figures.tenants;
        let tenant = limits.tenant.as_deref().and_then(|name| Some((tenants.clone(), tenants.arrived(name)?)));
        let hears = (ticket.began.is_some() || tenant.is_some())
            .then(|| Box::new(HearsRun { began: ticket.began.clone(), tenant }));
        let (version, arrival, stream) = (version.clone(), ticket.arrival, ticket.stream.take());
        (asked, RemoteCall { version, arrival, deadline, deadline_is_slo, rows, reply, hears, stream }, answer)
    }

    /// Tells the scheduler of a request whose tensors are about to be made: its metadata waits in
    /// the queue meanwhile (Symphony §4.3). `None`: the scheduler hears of it later, because its
    /// queue depends on the tensors, or the time that they take is not known yet.
    fn announce(
        &self,
        version: &Arc<RemoteVersion>,
        (items, ready_at): (usize, Option<Time>),
        limits: &Limits,
        ticket: &mut Ticket<'_>,
    ) -> Option<Announced> {
        let codec = &version.definition.codec;
        let ready_at = ready_at.filter(|_| !codec.has_varying_shapes() && self.is_live())?;
        let rows = if codec.batched { u32::try_from(items).ok()? } else { 1 };
        let (asked, call, answer) = self.asked(version, (ticket, limits), (Vec::new(), rows), ());
        self.hand_over(FrontendEvent::Announced(ticket.number, asked, ready_at, call));
        ticket.is_handed_in = true;
        Some(Announced { rows, answer })
    }

    /// Makes a request's pictures or texts into the model's tensors, while its metadata waits in the
    /// scheduler's queue. A server of models has the same place, bound and refusals for these steps.
    /// But only the scheduler knows the devices' time, so the device time does not count in this
    /// method. Returns the tensors' hold on the byte budget.
    async fn prepare(
        &self,
        (model, version, steps): (&RemoteModel, &Arc<RemoteVersion>, &Arc<Preprocess>),
        request: &mut InferRequest,
        limits: &Limits,
        ticket: &mut Ticket<'_>,
    ) -> Result<(Reservation, Option<Announced>), Refused> {
        let (name, arrival) = (&version.name, ticket.arrival);
        let wrong = |error| Refused { reason: None, error };
        let items = steps.take(request, &version.definition.codec).map_err(wrong)?;
        let work = steps.look(&items).map_err(wrong)?;
        let mut refused = |reason, error| {
            ticket.end = reason;
            Refused { reason, error }
        };
        let full = Some(Unanswered::QueueFull);
        let _input_bytes =
            hold_inputs(&self.budget, &model.input_bytes, name, work.bytes()).map_err(|error| refused(full, error))?;
        let mut held = self.budget.reservation();
        held.grow(work.bytes()).map_err(|error| refused(full, error))?;
        let (now, deadline) = (self.clock.now(), limits.deadline);
        let start = steps.begins(now, deadline);
        if start > now && start > deadline {
            let error = refusal::busy_until(name, start.since(now), deadline.since(now));
            return Err(refused(Some(Unanswered::Impossible), error));
        }
        ticket.end = Some(Unanswered::Cancelled);
        let mut announced = self.announce(version, (items.len(), steps.ready_at(now, deadline, work)), limits, ticket);
        let making = steps.make(request, (items, work), &mut held, limits, deadline, arrival);
        let made = match &mut announced {
            None => making.await,
            Some(Announced { answer, .. }) => tokio::select! {
                biased;
                made = making => made,
                // The scheduler has refused the request, so nobody needs its tensors.
                answered = answer => {
                    (ticket.end, ticket.is_handed_in) = (None, false);
                    return Err(early(answered.ok()));
                }
            },
        };
        made.map_err(|(reason, error)| {
            ticket.end = reason;
            Refused { reason, error }
        })?;
        Ok((held, announced))
    }
}

/// The refusal of a request whose tensors were not ready yet. The node has counted it.
fn early(answered: Option<Answered>) -> Refused {
    let reason = answered.as_ref().and_then(|answered| match answered.miss.as_deref() {
        Some(Miss::Unanswered(reason)) => Some(*reason),
        _ => None,
    });
    let error = answered.and_then(|answered| answered.answer.err());
    let lost = || ServiceError::Internal("a request was answered before it ran: this is a defect".to_owned());
    Refused { reason, error: error.unwrap_or_else(lost) }
}

/// A request that is in flight for longer than one run.
pub(super) struct Entered<'a>(&'a AtomicU64);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl RemoteServing {
    /// Has all backends load or unload a model that load models by request.
    async fn order(&self, name: &str, doing: Doing) -> Result<(), ServiceError> {
        let (client, done) = oneshot::channel();
        // A node that has ended drops the event, and with it the sender.
        let _ = self.events.send(FrontendEvent::Order(name.to_owned(), doing, client));
        match done.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(OrderFailure::Refused(reason))) => Err(ServiceError::InvalidArgument(reason)),
            Ok(Err(OrderFailure::NoLeader)) => Err(ServiceError::Unavailable(format!(
                "no scheduler leads, or another has begun to lead since: look whether the backends have changed model \
                 '{name}' (POST /v2/repository/index), and try again"
            ))),
            Err(_) => Err(ServiceError::Unavailable("the frontend is shutting down".to_owned())),
        }
    }

    /// Waits until this frontend has heard of a change that backends have made.
    async fn until(&self, is_heard: impl Fn() -> bool) {
        let end = self.clock.now() + HEARS_WITHIN;
        while !is_heard() && self.clock.now() < end {
            tokio::time::sleep(LOOKS_EVERY.into()).await;
        }
    }

    /// The clock that decides.
    pub(super) fn clock(&self) -> Clock {
        self.clock
    }

    /// Counts a request in flight for longer than one run: between the steps of an ensemble, or between
    /// the answers of a decoupled model.
    pub(super) fn enter_long(&self) -> Entered<'_> {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        Entered(&self.in_flight)
    }

    /// Runs a step of an ensemble, which may be an ensemble.
    pub(super) fn infer_step(
        &self,
        request: InferRequest,
        due: Due,
    ) -> BoxFuture<'_, Result<InferResponse, ServiceError>> {
        let arrival = self.clock.now();
        let step = async move {
            let model = self.models.get(&request.model_name)?;
            self.infer_of(&model, (arrival, Some(due)), request, self.asking()).await
        };
        step.boxed()
    }

    /// The number of a new request.
    pub(super) fn number(&self) -> u64 {
        self.next_ticket.fetch_add(1, Ordering::Relaxed)
    }

    /// A new number, without an entry in the decision log.
    fn asking(&self) -> Asking<'_> {
        Asking { number: self.number(), trail: None, stream: None }
    }

    /// The decision log; `None`: there is none.
    pub(super) fn log(&self) -> Option<&RequestLog> {
        self.log.as_deref()
    }

    /// The model of a request.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`.
    pub(super) fn model(&self, request: &InferRequest) -> Result<Arc<RemoteModel>, ServiceError> {
        self.models.get(&request.model_name)
    }

    /// Tells the other frontends of the rollout's state.
    pub(super) fn tell_rollout(&self, rollout: &ServedRollout) {
        let (model, decision) = (rollout.model().to_owned(), rollout.decision());
        self.models.decide(&model, decision.clone());
        // A node that has ended has no peers.
        let _ = self.events.send(FrontendEvent::Rollout(model, decision));
    }

    /// The rollout of a model.
    fn served_rollout(&self, name: &str) -> Result<Arc<ServedRollout>, ServiceError> {
        self.models.get(name)?.rollout.clone().ok_or_else(|| no_rollout(name))
    }

    /// Runs a client's request of this model, and notes it in the decision log, if there is one.
    ///
    /// # Errors
    /// Any [`ServiceError`].
    pub(super) async fn infer_logged(
        &self,
        model: &RemoteModel,
        arrival: Time,
        request: InferRequest,
    ) -> Result<InferResponse, ServiceError> {
        let Some(log) = self.log() else {
            return self.infer_of(model, (arrival, None), request, self.asking()).await;
        };
        let number = self.number();
        let trail = log.begin(RequestId(number), &request);
        let asking = Asking { number, trail: Some(&trail), stream: None };
        let result = self.infer_of(model, (arrival, None), request, asking).await;
        trail.ended(&result);
        result
    }

    /// Runs a copy of a request of this model, which has no deadline.
    ///
    /// # Errors
    /// Any [`ServiceError`].
    pub(super) async fn infer_copy(
        &self,
        model: &RemoteModel,
        arrival: Time,
        copy: InferRequest,
    ) -> Result<InferResponse, ServiceError> {
        self.infer_of(model, (arrival, Some(OF_A_COPY)), copy, self.asking()).await
    }

    /// Runs a request of this model that came at `arrival`. `due`: the time of a step of an ensemble.
    ///
    /// # Errors
    /// Any [`ServiceError`].
    pub(super) async fn infer_of(
        &self,
        model: &RemoteModel,
        (arrival, due): (Time, Option<Due>),
        mut request: InferRequest,
        Asking { number, trail, stream }: Asking<'_>,
    ) -> Result<InferResponse, ServiceError> {
        let version = model.version(&request.model_name, &request.model_version)?;
        if let Some(ensemble) = &version.ensemble {
            return Box::pin(self.infer_ensemble((version, ensemble), request, due)).await;
        }
        let its = &version.definition;
        if its.config.is_decoupled() && stream.is_none() {
            return Err(ServiceError::Decoupled(request.model_name));
        }
        let wishes = Wishes { codec: &its.codec, batching: &its.batching, slo: its.slo };
        let mut looked = wishes.look(&request, arrival)?;
        let mut began = None;
        if let Some(Due { deadline, is_slo, began: told, .. }) = due {
            began = told;
            looked = looked.due(deadline, is_slo);
            if version.preprocess_of(&request)?.is_none() {
                adapt_inputs(&mut request.inputs, &its.codec.inputs);
            }
        }
        let Looked { wanted, limits } = looked;
        if let Some(trail) = trail {
            trail.has_terms(0, limits.deadline);
        }
        let logged = trail.map(RequestTrail::request);
        let terms = || Terms { number: logged, arrived: arrival, deadline: limits.deadline };
        let note =
            |request: &InferRequest, refused| terms().refused(self.clock.now(), version.missed(), request, refused);
        let mut ticket = self.enter(version, arrival, number).map_err(|error| note(&request, error.into()))?;
        (ticket.began, ticket.stream) = (began, stream);
        let (_prepared, announced) = match version.preprocess_of(&request)? {
            // Boxed, because its large state would burden all other requests.
            Some(steps) => {
                let prepared = self.prepare((model, version, steps), &mut request, &limits, &mut ticket);
                let (held, announced) = Box::pin(prepared).await.map_err(|refused| note(&request, refused))?;
                (Some(held), announced)
            }
            None => (None, None),
        };
        ticket.end = None;
        let (admitted, request) = wishes.admit(request).await?;
        let is_empty = admitted.is_empty;
        let held = hold_inputs(&self.budget, &model.input_bytes, &version.name, admitted.bytes());
        let _input_bytes = held.map_err(|error| {
            version.record_not_answered(Unanswered::QueueFull, Duration::ZERO);
            note(&request, error.into())
        })?;
        let varies = its.codec.has_varying_shapes();
        let shape = if varies { its.codec.shape_key(&admitted).to_vec() } else { Vec::new() };
        let rows = admitted.rows;
        if let Some(trail) = trail {
            trail.has_terms(rows, limits.deadline);
        }
        let about = admitted.about.as_deref().map(sent_about);
        let mut inputs = its.codec.client_inputs(admitted);
        inputs.extend(about);
        let payload = Tensors::kept(inputs, self.arena.as_ref());
        if !self.is_live() {
            return Err(ServiceError::Unavailable("the frontend is shutting down".to_owned()));
        }
        let answer = match announced {
            Some(announced) if announced.rows == rows => {
                self.hand_over(FrontendEvent::Ready(ticket.number, payload));
                announced.answer
            }
            Some(_) => {
                let message = format!("the tensors of a request of model '{}' are of {rows} items", version.name);
                return Err(ServiceError::Internal(format!("{message}, and the request of others: this is a defect")));
            }
            None => {
                let (asked, call, answer) = self.asked(version, (&mut ticket, &limits), (shape, rows), payload);
                self.hand_over(FrontendEvent::Request(ticket.number, asked, call));
                answer
            }
        };
        (ticket.end, ticket.is_handed_in) = (Some(Unanswered::Cancelled), true);
        let Some(Answered { answer: outputs, miss }) = limits.wait(answer, || self.clock.now().since(arrival)).await
        else {
            ticket.end = Some(Unanswered::Timeout);
            return Err(note(&request, Refused { reason: ticket.end, error: limits.overrun(&request.model_name) }));
        };
        (ticket.end, ticket.is_handed_in) = (None, false);
        if let Some(miss) = miss {
            terms().note(self.clock.now(), version.missed(), &request, *miss, outputs.as_ref().err());
        }
        let mut outputs = if is_empty { its.codec.without_rows(outputs)? } else { outputs? };
        let parameters = take_parameters(&its.codec, &mut outputs)?;
        let mut response = response(request, &its.codec, &version.version, wanted.as_deref(), outputs);
        if let Some(parameters) = parameters {
            response.parameters = parameters;
        }
        Ok(response)
    }
}

/// Refuses a question that only the model's backend can answer.
fn elsewhere<T>(what: &str) -> Result<T, ServiceError> {
    Err(ServiceError::Unimplemented(format!(
        "{what}: a frontend has no models of its own; ask the backend that serves the model (GET /v2/cluster)"
    )))
}

impl Service for RemoteServing {
    fn name(&self) -> &str {
        &self.options.server_name
    }

    fn is_live(&self) -> bool {
        !self.events.is_closed()
    }

    fn is_ready(&self) -> bool {
        let has_models = self.options.allow_empty || !self.models.is_empty();
        let can_ask = has_models && self.view.board.is_led();
        !self.draining.load(Ordering::Acquire) && self.is_live() && (can_ask || !self.options.strict_readiness)
    }

    fn is_model_ready(&self, name: &str, version: &str) -> bool {
        !self.draining.load(Ordering::Acquire) && self.models.is_ready(name, version)
    }

    fn model_metadata(&self, name: &str, version: &str) -> Result<ModelMetadata, ServiceError> {
        let model = self.models.get(name)?;
        let its = model.version(name, version)?;
        Ok(ModelMetadata {
            name: name.to_owned(),
            versions: model.versions.keys().map(u64::to_string).collect(),
            platform: its.definition.config.platform.clone(),
            signature: its.definition.codec.signature(),
        })
    }

    fn check_model(&self, name: &str, version: &str) -> Result<(), ServiceError> {
        self.models.version(name, version).map(|_| ())
    }

    fn check_inputs(&self, request: &InferRequest) -> Result<(), ServiceError> {
        self.models.version(&request.model_name, &request.model_version)?.check_inputs(request)
    }

    fn model_config(&self, name: &str, version: &str) -> Result<pb::ModelConfig, ServiceError> {
        Ok(self.models.version(name, version)?.definition.config.clone())
    }

    fn policy(&self, name: &str, version: &str) -> Result<PolicyReport, ServiceError> {
        self.check_model(name, version)?;
        elsewhere("the device policy of a model")
    }

    fn missed(&self, name: &str, version: &str) -> Result<MissedReport, ServiceError> {
        let its = self.models.version(name, version)?;
        Ok(its.missed().report(&its.name, &its.version, self.log.is_some()))
    }

    fn statistics(&self, name: &str, version: &str) -> Result<Vec<pb::ModelStatistics>, ServiceError> {
        if name.is_empty() {
            return Ok(self.figures.statistics());
        }
        let model = self.models.get(name)?;
        if version.is_empty() {
            return Ok(FrontendFigures::statistics_of(&model));
        }
        let its = model.version(name, version)?;
        Ok(vec![its.statistics()])
    }

    fn repository_index(&self, _ready_only: bool) -> Vec<ModelIndexEntry> {
        let entry = |its: &Arc<RemoteVersion>| ModelIndexEntry {
            name: its.name.clone(),
            version: its.version.clone(),
            state: "READY".to_owned(),
            reason: String::new(),
        };
        self.models.all().values().flat_map(|model| model.versions.values().map(entry).collect::<Vec<_>>()).collect()
    }

    async fn load(&self, name: &str, overrides: LoadOverrides) -> Result<(), ServiceError> {
        if overrides.config.is_some() || !overrides.files.is_empty() {
            return elsewhere("loading a model with another configuration or other files");
        }
        self.order(name, Doing::Load).await?;
        self.until(|| self.models.is_ready(name, "")).await;
        Ok(())
    }

    async fn unload(&self, name: &str) -> Result<(), ServiceError> {
        self.order(name, Doing::Unload).await?;
        self.until(|| self.models.get(name).is_err()).await;
        Ok(())
    }

    fn cluster(&self) -> Option<&dyn ClusterView> {
        Some(&self.view)
    }

    fn live(&self, history: bool) -> Option<LiveReport> {
        Some(self.figures.live(history))
    }

    fn keeps_traces(&self) -> bool {
        self.log.is_some()
    }

    async fn infer(&self, request: InferRequest) -> Result<InferResponse, ServiceError> {
        let model = self.models.get(&request.model_name)?;
        let rollout = model.rollout.clone().filter(|_| request.model_version.is_empty());
        match rollout.map(|rollout| (rollout, self.this.upgrade())) {
            // The future is boxed: other requests would move its memory for nothing.
            Some((rollout, Some(serving))) => {
                Box::pin(infer_rolled_out(RemoteRequests { serving, model }, rollout, request)).await
            }
            _ => self.infer_logged(&model, self.clock.now(), request).await,
        }
    }

    async fn infer_stream(&self, request: InferRequest) -> Result<Answers, ServiceError> {
        let is_decoupled = self.is_decoupled(&request.model_name, &request.model_version);
        match self.this.upgrade().filter(|_| is_decoupled) {
            Some(serving) => remote_streams::infer_many(serving, request).await,
            None => self.infer(request).await.map(Answers::one),
        }
    }

    fn is_decoupled(&self, name: &str, version: &str) -> bool {
        self.models.version(name, version).is_ok_and(|version| version.definition.config.is_decoupled())
    }

    fn rollout_header(&self, name: &str) -> Option<String> {
        self.models.rollout_header(name)
    }

    /// The state that all frontends share, and the requests of this frontend.
    fn rollout(&self, name: &str) -> Result<RolloutReport, ServiceError> {
        Ok(self.served_rollout(name)?.report(self.clock.now()))
    }

    fn change_rollout(&self, name: &str, change: &RolloutChange) -> Result<RolloutReport, ServiceError> {
        let rollout = self.served_rollout(name)?;
        rollout.change(change)?;
        self.tell_rollout(&rollout);
        self.rollout(name)
    }

    fn set_tenants(&self, parts: &[NamedPart]) -> Result<(), ServiceError> {
        keeps_no_parts(parts)?;
        self.figures.tenants.set(parts);
        Ok(())
    }

    fn labels(&self, name: &str, version: &str, output: &str) -> Vec<String> {
        let Ok(version) = self.models.version(name, version) else { return Vec::new() };
        let outputs = &version.definition.codec.outputs;
        let its = outputs.iter().find(|binding| binding.client.name == output);
        its.map(|binding| binding.labels.to_vec()).unwrap_or_default()
    }
}
