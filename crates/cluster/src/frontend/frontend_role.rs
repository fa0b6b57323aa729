//! A frontend's state machine with the requests that wait for answers.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::Arc;

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::journal::requests::{RequestInput, Way as LoggedWay, WayClaim, WayRun, bounded};
use downbeat_core::{Duration, RequestId, Time};
use downbeat_host::device::CounterHasher;
use downbeat_host::request::reply::{Answered, Reply};
use downbeat_host::request_log::RequestLog;
use downbeat_roles::{
    BatchRun, Doing, FrontendNode, FrontendOptions, FrontendOutput, NewRequest, NodeId, OrderFailure, Outcome, Refusal,
    RequestEnd, Role, RoleNode, Way,
};
use downbeat_service::error::ServiceError;
use downbeat_service::metrics::Metrics;
use downbeat_service::refusal;
use downbeat_service::report::missed::Miss;
use downbeat_service::unanswered::Unanswered;
use tokio::sync::{mpsc, oneshot};

use super::remote_ensemble::Began;
use super::remote_models::{LONGEST_PHASE, RemoteModels, RemoteVersion};
use super::tenant_counts::TenantCounts;
use crate::node::machine::{Machine, Step};
use crate::node::status::{StatusBoard, shown};
use crate::view::asks::{Asks, ViewEvent};
use crate::wire::tensors::Tensors;

/// A request that waits for its answer.
pub struct RemoteCall {
    pub version: Arc<RemoteVersion>,
    pub arrival: Time,
    /// The deadline; [`Time::MAX`]: none.
    pub deadline: Time,
    /// Whether the deadline is the model's SLO.
    pub deadline_is_slo: bool,
    pub rows: u32,
    pub reply: Reply,
    /// Takes the times of the run; `None`: the request has neither an ensemble nor a tenant.
    pub hears: Option<Box<HearsRun>>,
    /// Takes the answers of a decoupled model; `None`: the model gives one answer.
    pub stream: Option<mpsc::Sender<StreamedAnswer>>,
}

/// An answer of a decoupled model.
pub struct StreamedAnswer {
    /// The answer; `None`: the answers end without another.
    pub answer: Option<Result<Tensors, ServiceError>>,
    /// Whether no answer follows.
    pub is_last: bool,
}

/// Takes the times of a request's run for its ensemble and for its tenant.
pub struct HearsRun {
    /// The step that the request is.
    pub began: Option<Began>,
    /// The counts of tenants, and the request's tenant.
    pub tenant: Option<(Arc<TenantCounts>, Arc<str>)>,
}

impl HearsRun {
    /// A request of `rows` items was in this batch, which began at `began`.
    fn ran(&self, rows: u32, run: &BatchRun, began: Time) {
        if let Some(told) = &self.began {
            *told.lock() = Some(began);
        }
        if let Some((tenants, tenant)) = &self.tenant {
            let part = f64::from(rows.min(run.items)) / f64::from(run.items.max(1));
            let whole = run.compute_infer.min(LONGEST_PHASE).as_secs_f64();
            tenants.ran(tenant, Duration::from_secs_f64(whole * part));
        }
    }
}

/// An event from a frontend's threads to its node. A ticket names each request; the thread that
/// hands the request in draws the ticket.
pub enum FrontendEvent {
    /// A client's request, by its ticket.
    Request(u64, NewRequest<Tensors>, RemoteCall),
    /// A client's request whose tensors are expected at this time.
    Announced(u64, NewRequest<()>, Time, RemoteCall),
    /// The tensors of this ticket's announced request.
    Ready(u64, Tensors),
    /// The client of this ticket's request has taken so many of its streamed answers.
    Room(u64, u32),
    /// The client of this ticket's request has gone. The ticket has counted the request.
    Cancel(u64),
    /// This frontend has made this decision about the rollout of a model.
    Rollout(String, Vec<u8>),
    /// A client wants this change of a model.
    Order(String, Doing, oneshot::Sender<Result<(), OrderFailure>>),
    /// A question about the whole cluster, or the answer to a question.
    View(ViewEvent),
}

/// When a client should try again that no scheduler's lead could serve.
const RETRY_AFTER: downbeat_core::Duration = downbeat_core::Duration::from_millis(1_000);

type Table<T> = HashMap<u64, T, BuildHasherDefault<CounterHasher>>;

/// A frontend's state machine, and the clients that wait.
pub struct FrontendRole {
    node: FrontendNode<Tensors>,
    /// By the state machine's number: the request's ticket and call.
    calls: Table<(u64, RemoteCall)>,
    /// By the state machine's number: the ticket and the client of a request whose last streamed answer
    /// has not come.
    streams: Table<(u64, mpsc::Sender<StreamedAnswer>)>,
    /// By ticket: the state machine's number.
    numbers: Table<u64>,
    /// By number: the clients that wait for changes of models.
    orders: Table<oneshot::Sender<Result<(), OrderFailure>>>,
    next_order: u64,
    asks: Asks,
    /// The decision log; `None`: there is none.
    log: Option<Arc<RequestLog>>,
    models: Arc<RemoteModels>,
    metrics: Arc<Metrics>,
    board: StatusBoard,
}

impl FrontendRole {
    /// A frontend without requests.
    pub fn new(
        node: NodeId,
        options: FrontendOptions,
        now: Time,
        (models, metrics, board): (Arc<RemoteModels>, Arc<Metrics>, StatusBoard),
        (asks, log): (Asks, Option<Arc<RequestLog>>),
    ) -> Self {
        let node = FrontendNode::new(node, options, now);
        let (calls, streams, numbers, orders) = Default::default();
        FrontendRole { node, calls, streams, numbers, orders, next_order: 0, asks, log, models, metrics, board }
    }

    /// Keeps the call of a request that the node has taken.
    fn begin(&mut self, (ticket, number): (u64, u64), mut call: RemoteCall) {
        if let Some(stream) = call.stream.take() {
            self.streams.insert(number, (ticket, stream));
        }
        self.numbers.insert(ticket, number);
        self.calls.insert(number, (ticket, call));
    }

    /// Passes on one of the answers to a request.
    fn stream(&mut self, now: Time, number: u64, answer: StreamedAnswer) {
        let Some((ticket, client)) = self.streams.get(&number) else { return };
        let (ticket, is_last) = (*ticket, answer.is_last);
        let has_room = client.try_send(answer).is_ok();
        if has_room && !is_last {
            return;
        }
        self.streams.remove(&number);
        // A request that still runs has its end later.
        if !self.calls.contains_key(&number) {
            self.numbers.remove(&ticket);
            if !is_last {
                self.node.handle_cancel(now, number);
            }
        }
    }

    /// Ends the answers to a request whose backend is lost.
    fn end_stream(&mut self, now: Time, number: u64) {
        let reason = "the backend of this request was lost before the last answer".to_owned();
        let answer = Some(Err(ServiceError::Unavailable(reason)));
        self.stream(now, number, StreamedAnswer { answer, is_last: true });
    }

    /// Notes the way of a request in the decision log.
    fn note(&self, log: &RequestLog, (ticket, call): (u64, &RemoteCall), now: Time, way: Way, run: Option<BatchRun>) {
        let claim = way.claim.map(|(node, batch, at)| {
            let name = self.node.links().hello(node).map_or_else(|| shown(node), |hello| hello.name.clone());
            let backend = bounded(&name, RequestInput::MOST_ID).to_owned();
            let (epoch, rank) = (batch.epoch.number, batch.epoch.rank);
            WayClaim { backend, epoch, rank, batch: batch.batch.0, at }
        });
        let run = run.zip(way.claim).map(|(run, (.., claimed))| {
            // The backend may be wrong: nothing runs before its claim.
            let (began, ended) = times_of(&run, now, claimed);
            WayRun { device: run.device, items: run.items, began, ended }
        });
        let RemoteCall { version, arrival, deadline, rows, .. } = call;
        let (returned, lost) = (way.returned, way.lost);
        let way = LoggedWay { items: *rows, arrived: *arrival, deadline: *deadline, returned, lost, claim, run };
        log.went(RequestId(ticket), &version.name, way);
    }

    /// Answers a request.
    fn end(&mut self, now: Time, number: u64, end: RequestEnd<Tensors>, way: Way) {
        let Some((ticket, call)) = self.calls.remove(&number) else { return };
        let (goes_on, run) = match &end {
            RequestEnd::Ran(outcome, run) if !outcome.is_failed() => {
                (matches!(outcome, Outcome::Streamed), run.map(|run| call.version.run_of(run)))
            }
            _ => (false, None),
        };
        if !goes_on {
            self.streams.remove(&number);
        }
        if !self.streams.contains_key(&number) {
            self.numbers.remove(&ticket);
            if goes_on {
                // The client has no stream, or has had its last answer.
                self.node.handle_cancel(now, number);
            }
        }
        if let Some(log) = &self.log {
            self.note(log, (ticket, &call), now, way, run);
        }
        if let Some(run) = run.filter(|run| run.counts) {
            call.version.record_launch(&run);
        }
        if let (Some(hears), Some(run)) = (&call.hears, &run) {
            hears.ran(call.rows, run, times_of(run, now, call.arrival).0);
        }
        // The ticket has counted a request whose client left.
        if call.reply.is_closed() {
            return;
        }
        let took = now.since(call.arrival);
        let answered = match outcome(&call, end, now) {
            Ok(outputs) => {
                let is_late = now > call.deadline;
                let waited = call.version.record_answer(call.rows, (took, is_late), run);
                let rows = run.map_or(0, |run| run.items);
                let miss = is_late.then(|| Box::new(Miss::Late { waited, rows }));
                Answered { answer: Ok(outputs.into_iter().collect()), miss }
            }
            Err((reason, error)) => {
                call.version.record_not_answered(reason, took);
                Answered { answer: Err(error), miss: Some(Box::new(Miss::Unanswered(reason))) }
            }
        };
        call.reply.send_answered(answered);
    }
}

/// When a run that is reported `now` began and ended, at the earliest at `earliest`.
fn times_of(run: &BatchRun, now: Time, earliest: Time) -> (Time, Time) {
    let ended = (now - run.ended_ago).max(earliest);
    let phases = [run.compute_input, run.compute_infer, run.compute_output];
    (phases.into_iter().fold(ended, |at, phase| at - phase).max(earliest), ended)
}

/// The answer for a request's client.
fn outcome(call: &RemoteCall, end: RequestEnd<Tensors>, now: Time) -> Result<Tensors, (Unanswered, ServiceError)> {
    let (model, full) = (&call.version.name, call.version.definition.full);
    Err(match end {
        RequestEnd::Ran(Outcome::Outputs(outputs), _) => return Ok(outputs),
        RequestEnd::Ran(Outcome::Streamed, _) if call.version.definition.config.is_decoupled() => {
            return Ok(Tensors::default());
        }
        RequestEnd::Ran(Outcome::Streamed, _) => {
            let message = format!("the backend of model '{model}' sent no answer: this is a defect");
            (Unanswered::Engine, ServiceError::Internal(message))
        }
        RequestEnd::Ran(Outcome::Failed { code, message }, _) => {
            let error = ServiceError::of_code(code, message);
            (Unanswered::of(&error), error)
        }
        RequestEnd::Refused(Refusal::Rejected(Reject::UnknownModel) | Refusal::Dropped(DropReason::ModelRemoved)) => {
            let message = format!(
                "no backend has model '{model}' any more: it was unloaded, or the last one that had it was lost"
            );
            (Unanswered::Unloaded, ServiceError::Unavailable(message))
        }
        RequestEnd::Refused(Refusal::Rejected(reject)) => refusal::rejected(model, &reject, call.deadline_is_slo, full),
        RequestEnd::Refused(Refusal::Dropped(reason)) => refusal::dropped(model, reason, now.since(call.arrival)),
        RequestEnd::TooLate => {
            let waited = now.since(call.arrival);
            let message = format!(
                "no backend ran this request of model '{model}' by its deadline, {waited} after its arrival: no scheduler led, the backend was lost, or its run took too long"
            );
            (Unanswered::Hopeless, ServiceError::DeadlineExceeded(message))
        }
        RequestEnd::NoLeader => {
            let message = format!(
                "no scheduler leads, so this request of model '{model}' cannot run: check that a scheduler runs and \
                 that this frontend reaches it (GET /v2/cluster), and try again"
            );
            (Unanswered::QueueTimeout, ServiceError::QueueFull { message, retry_after: RETRY_AFTER })
        }
        RequestEnd::Lost | RequestEnd::Refused(Refusal::Lost | Refusal::Missed(_)) => {
            let message = format!(
                "the backend that ran this request of model '{model}' was lost, and the request may not run again, or was tried too often"
            );
            (Unanswered::Lost, ServiceError::Unavailable(message))
        }
    })
}

impl Machine for FrontendRole {
    type Node = FrontendNode<Tensors>;
    type Event = FrontendEvent;

    fn node(&self) -> &Self::Node {
        &self.node
    }

    fn node_mut(&mut self) -> &mut Self::Node {
        &mut self.node
    }

    fn accepts(&self, role: Role) -> bool {
        role == Role::Backend
    }

    fn handle_event(&mut self, now: Time, event: FrontendEvent) {
        match event {
            FrontendEvent::Request(ticket, request, call) => {
                let number = self.node.handle_request(now, request);
                self.begin((ticket, number), call);
            }
            FrontendEvent::Announced(ticket, request, ready_at, call) => {
                let number = self.node.handle_announced(now, request, ready_at);
                self.begin((ticket, number), call);
            }
            FrontendEvent::Ready(ticket, payload) => {
                // The scheduler may have refused the request meanwhile.
                if let Some(number) = self.numbers.get(&ticket) {
                    self.node.handle_ready(now, *number, payload);
                }
            }
            FrontendEvent::Room(ticket, answers) => {
                // The last answer may have come meanwhile.
                if let Some(number) = self.numbers.get(&ticket) {
                    self.node.handle_room(now, *number, answers);
                }
            }
            FrontendEvent::Order(model, doing, client) => {
                let number = self.next_order;
                self.next_order += 1;
                self.orders.insert(number, client);
                self.node.handle_order(now, number, (model, doing));
            }
            FrontendEvent::Rollout(model, decision) => self.node.handle_rollout(now, &model, &decision),
            FrontendEvent::View(ViewEvent::Ask(question, client)) => {
                let number = self.asks.ask(client);
                self.node.handle_ask(now, number, question);
            }
            FrontendEvent::View(ViewEvent::Tell(from, answer)) => self.node.handle_tell(now, from, answer),
            FrontendEvent::Cancel(ticket) => {
                if let Some(number) = self.numbers.remove(&ticket) {
                    self.calls.remove(&number);
                    self.streams.remove(&number);
                    self.node.handle_cancel(now, number);
                }
            }
        }
    }

    fn poll_step(&mut self, now: Time) -> Option<Step> {
        loop {
            let Some(output) = self.node.poll_output(now) else {
                self.board.led(self.node.leader().is_some());
                return None;
            };
            match output {
                FrontendOutput::Note(note) => tracing::warn!("{note}"),
                FrontendOutput::Send(peer, frame) => return Some(Step::Send(peer, frame)),
                FrontendOutput::Lost(peer) => return Some(Step::Close(peer)),
                FrontendOutput::Rollout { model, decision } => self.models.decide(&model, decision),
                FrontendOutput::End { number, end, way } => self.end(now, number, end, way),
                FrontendOutput::Streamed { number, answer, is_last } => {
                    let answer = answer.map(|outcome| match outcome {
                        Outcome::Outputs(outputs) => Ok(outputs),
                        Outcome::Failed { code, message } => Err(ServiceError::of_code(code, message)),
                        Outcome::Streamed => Err(ServiceError::Internal("the backend sent no answer".to_owned())),
                    });
                    self.stream(now, number, StreamedAnswer { answer, is_last });
                }
                FrontendOutput::StreamLost(number) => self.end_stream(now, number),
                FrontendOutput::Ordered { number, result } => {
                    // The client may have gone.
                    if let Some(client) = self.orders.remove(&number) {
                        let _ = client.send(result);
                    }
                }
                FrontendOutput::Asked { from, question } => self.asks.asked(from, question),
                FrontendOutput::Told(number, told) => {
                    let leader = self.node.leader();
                    let own = leader.and_then(|leader| self.node.links().clock(leader));
                    self.asks.told(number, told, (own, leader.is_some()));
                }
                FrontendOutput::Models(models) => self.models.replace(models, &self.metrics),
                FrontendOutput::Leader { epoch, handed_in, .. } => {
                    self.board.follows(epoch, false);
                    self.board.handed_in(handed_in);
                }
            }
        }
    }

    fn report(&self) {
        self.board.run_again(self.node.run_again());
        self.board.late_answers(self.node.late_answers());
    }
}
