//! A backend's state machine with the slots that run its batches.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};

use downbeat_core::{BatchId, DeviceId, Duration, RequestId, Time};
use downbeat_engine::RequestAbout;
use downbeat_host::device::{QueuedCall, run_own};
use downbeat_host::request::call::Call;
use downbeat_host::request::queue::Queue;
use downbeat_host::request::reply::{Answer, BatchAnswers, BatchRun as BatchLaunch, Gathered, Reply};
use downbeat_host::scheduler::SlotDone;
use downbeat_models::loaded_version::LoadedVersion;
use downbeat_models::registry::Registry;
use downbeat_models::serving::{FirstAnswer, InFlight};
use downbeat_protocol::{InferRequest, InferTensor};
use downbeat_roles::{
    BackendNode, BackendOptions, BackendOutput, BatchKey, BatchRun, Doing, Member, NodeId, Offer, Outcome, QueueKey,
    RequestKey, Role, RoleNode,
};
use downbeat_service::error::ServiceError;
use tokio::sync::mpsc;

use super::asked_requests::{self, AskedRequest, AskedRequests, Ran, RequestRun};
use super::model_loader::Told;
use super::slot_map::{Place, SlotMap};
use crate::node::machine::{Machine, Step};
use crate::node::status::StatusBoard;
use crate::view::asks::{Asks, ViewEvent};
use crate::wire::about::read_about;
use crate::wire::arena::Arena;
use crate::wire::tensors::Tensors;

/// An event from a backend's threads to its node.
pub enum BackendEvent {
    /// A slot is done with its batch.
    Ran(SlotDone),
    /// All requests of a seat's batch are answered.
    Answered(BatchId, BatchAnswers),
    /// A decoupled model has sent an answer to a request. True: no answer follows.
    Streamed(RequestRun, Option<Outcome<Tensors>>, bool),
    /// The backend's slots and models have changed.
    Offer(Offer),
    /// An ordered load or unload is done, or has failed.
    Done(String, Doing, Result<(), String>),
    /// The order of a scheduler, by its number there, is carried out, or has failed.
    Ordered((NodeId, u64), Result<(), String>),
    /// A question about the whole cluster, or the answer to a question.
    View(ViewEvent),
    /// The backend must leave.
    Drain,
}

/// A batch that waits for its slot.
struct Waiting {
    batch: BatchKey,
    queue: QueueKey,
    members: Vec<Member<Tensors>>,
}

/// A batch that runs on a slot.
struct Running {
    batch: BatchKey,
    slot: u32,
    members: Vec<RequestKey>,
    /// `None`: the batch has a seat, and its answers come with an event.
    answers: Option<Arc<Gathered>>,
    /// The items of each member, if the batch has a seat.
    items: Vec<u32>,
    /// Keeps the model from being unloaded during the batch.
    _model: InFlight,
}

/// A backend's state machine, and the batches of its slots.
pub struct BackendRole {
    node: BackendNode<Tensors>,
    registry: Registry,
    /// By slot: waiting batches, in the order of their runs.
    waiting: BTreeMap<u32, VecDeque<Waiting>>,
    /// Running batches, at most one on each slot that is no seat, by this process's ids.
    running: BTreeMap<BatchId, Running>,
    next_batch: u64,
    asked: AskedRequests,
    /// Loads and unloads models; the result comes as an event.
    loader: mpsc::UnboundedSender<Told>,
    slots: Arc<SlotMap>,
    /// Takes the answers of seats' batches.
    seats_done: SeatsDone,
    asks: Asks,
    board: StatusBoard,
    arena: Option<Arc<Arena>>,
}

/// The sender of this role's own events. It is set before the first batch.
pub type SeatsDone = Arc<OnceLock<mpsc::UnboundedSender<BackendEvent>>>;

/// The calls of a batch that is ready for its slot.
struct Prepared {
    model: InFlight,
    loaded: Arc<LoadedVersion>,
    calls: Vec<Call>,
    /// For a device policy: the items of each member, 0 where the member does not fit.
    items: Vec<u32>,
    /// The members, if the model takes requests instead of rows.
    asked: Vec<(RequestRun, AskedRequest)>,
}

impl BackendRole {
    /// A backend that runs the models of a registry, without batches.
    pub fn new(
        node: NodeId,
        options: BackendOptions,
        now: Time,
        (registry, loader): (Registry, mpsc::UnboundedSender<Told>),
        (slots, seats_done): (Arc<SlotMap>, SeatsDone),
        (board, arena): (StatusBoard, Option<Arc<Arena>>),
        asks: Asks,
    ) -> Self {
        let node = BackendNode::new(node, options, now);
        let (waiting, running, asked) = Default::default();
        let next_batch = 0;
        BackendRole {
            node,
            registry,
            waiting,
            running,
            next_batch,
            asked,
            loader,
            slots,
            seats_done,
            asks,
            board,
            arena,
        }
    }

    /// Gives a partition its next batch, if the partition is free.
    fn begin(&mut self, now: Time, slot: u32, partition: DeviceId) {
        while self.running.values().all(|running| running.slot != slot) {
            let Some(Waiting { batch, queue, members }) = self.waiting.get_mut(&slot).and_then(VecDeque::pop_front)
            else {
                return;
            };
            let requests: Vec<RequestKey> = members.iter().map(|member| member.request).collect();
            let answers = Arc::new(Gathered::default());
            let prepared = self.prepare(now, (batch, &queue), members, &answers);
            let jobs = prepared.and_then(|prepared| match prepared {
                Some(mut prepared) => {
                    self.asked.add(std::mem::take(&mut prepared.asked));
                    self.jobs(now, partition, prepared).map(Some)
                }
                None => Ok(None),
            });
            match jobs {
                Ok(None) => self.is_gone(now, batch, &queue),
                Ok(Some((model, jobs))) if !jobs.is_empty() => {
                    let id = self.next_id();
                    let (answers, items) = (Some(answers), Vec::new());
                    self.running.insert(id, Running { batch, slot, members: requests, answers, items, _model: model });
                    // A short batch without another beside it runs on the node's thread. Two
                    // changes of threads would take longer than the batch.
                    let is_alone = self.node.batches() == 1;
                    run_own(is_alone, |own| self.registry.driver.grant(partition, id, jobs, own));
                }
                jobs => self.done(now, batch, None, requests, answers.take(), jobs.err().as_ref()),
            }
        }
    }

    /// Hands the requests of a seat's batch to the device policy of their model.
    fn seat(&mut self, now: Time, (slot, device): (u32, usize), Waiting { batch, queue, members }: Waiting) {
        let requests: Vec<RequestKey> = members.iter().map(|member| member.request).collect();
        let id = self.next_id();
        let done = self.seats_done.clone();
        let answered = move |answers| {
            // A node that has ended takes no events.
            if let Some(done) = done.get() {
                drop(done.send(BackendEvent::Answered(id, answers)));
            }
        };
        let answers = Arc::new(Gathered::until_done(Box::new(answered)));
        match self.prepare(now, (batch, &queue), members, &answers) {
            Ok(None) => self.is_gone(now, batch, &queue),
            Ok(Some(Prepared { model, loaded, calls, items, asked })) => {
                self.asked.add(asked);
                let place = loaded.hosts.devices().iter().find(|(host, _)| host.device == device).cloned();
                let running = Running { batch, slot, members: requests, answers: None, items, _model: model };
                self.running.insert(id, running);
                let is_alone = self.node.batches() == 1 && calls.len() == 1;
                for call in calls {
                    let length = loaded.hosts.length(&loaded.codec, &call.admitted);
                    match (length, &place) {
                        (Ok(length), Some((host, model))) if loaded.hosts.is_routed => {
                            let request = self.registry.driver.next_request();
                            run_own(is_alone, |own| host.submit(model, request, call, length, own));
                        }
                        (Err(error), _) => call.reply.send(Err(error)),
                        _ => call.reply.send(Err(not_here(&queue.model, Place::Seat(device)))),
                    }
                }
            }
            Err(error) => self.done(now, batch, None, requests, BatchAnswers::default(), Some(&error)),
        }
    }

    /// The number of a new batch.
    fn next_id(&mut self) -> BatchId {
        let id = BatchId(self.next_batch);
        self.next_batch += 1;
        id
    }

    /// The model of a batch is gone, so no member has run. The members run on a backend that still
    /// has the model.
    fn is_gone(&mut self, now: Time, batch: BatchKey, queue: &QueueKey) {
        self.node.handle_unloaded(now, &queue.model, queue.version);
        self.node.handle_ran(now, batch, None, None, Vec::new());
    }

    /// Makes the calls of a batch's members. Members that do not fit are answered at once. `None`:
    /// the model was unloaded.
    fn prepare(
        &self,
        now: Time,
        (batch, queue): (BatchKey, &QueueKey),
        members: Vec<Member<Tensors>>,
        answers: &Arc<Gathered>,
    ) -> Result<Option<Prepared>, ServiceError> {
        let QueueKey { model: name, version, shape } = queue;
        let Some(model) = self.registry.serving().enter(name) else { return Ok(None) };
        let Some(loaded) = model.versions.get(version).cloned() else { return Ok(None) };
        if let Some(reason) = loaded.out_of_service() {
            return Err(ServiceError::Unavailable(format!("model '{name}': {reason}")));
        }
        let (mut calls, mut rows) = (Vec::with_capacity(members.len()), 0u32);
        let (mut items, mut asked) = (Vec::new(), Vec::new());
        if loaded.hosts.is_routed {
            items.resize(members.len(), 0);
        }
        for (place, Member { request, deadline, payload }) in members.into_iter().enumerate() {
            let reply = Reply::gathered(answers.clone(), place);
            let admitted = match admit(&loaded, name, payload) {
                Ok(admitted) => admitted,
                Err(error) => {
                    reply.send(Err(error));
                    continue;
                }
            };
            rows = rows.saturating_add(admitted.rows);
            if let Some(items) = items.get_mut(place) {
                *items = admitted.rows;
            }
            let its = loaded.codec.shape_key(&admitted);
            if rows > loaded.codec.max_batch || its[..] != shape[..] {
                let reason = format!(
                    "the batch of model '{name}' has members that cannot share a batch: this is a defect of its scheduler"
                );
                reply.send(Err(ServiceError::Internal(reason)));
                continue;
            }
            if let Some(about) = &admitted.about {
                let _ = about.deadline.set(deadline);
                let run = (request, batch);
                asked.extend(self.asked_request(now, run, about, &loaded).map(|asked| (run, asked)));
            }
            calls.push(Call {
                admitted,
                loaded: loaded.clone(),
                arrival: now,
                deadline,
                deadline_is_slo: false,
                is_probe: false,
                step: None,
                charge: None,
                trace: None,
                reply,
            });
        }
        Ok(Some(Prepared { model, loaded, calls, items, asked }))
    }

    /// A request whose model takes requests. `None`: the model has just been unloaded, or the process is
    /// about to end.
    fn asked_request(
        &self,
        now: Time,
        run: RequestRun,
        about: &Arc<RequestAbout>,
        loaded: &Arc<LoadedVersion>,
    ) -> Option<AskedRequest> {
        let model = self.registry.serving().enter(&loaded.name)?;
        if !model.definition.config.is_decoupled() {
            return Some(AskedRequest::with_one_answer(about.clone()));
        }
        let events = self.seats_done.get()?.clone();
        let first = FirstAnswer::of(self.registry.driver.clock(), now);
        let arena = self.arena.clone();
        Some(AskedRequest::decoupled(about.clone(), run, (loaded.clone(), model), (events, arena), first))
    }

    /// The calls of a partition's batch, with the queue of their shape.
    fn jobs(&self, now: Time, partition: DeviceId, prepared: Prepared) -> Result<Jobs, ServiceError> {
        let Prepared { model, loaded, calls, .. } = prepared;
        let runs = |(_, queue): &(_, Arc<Queue>)| self.registry.driver.runs(partition, queue);
        if loaded.hosts.is_routed || !loaded.queues().first().is_some_and(runs) {
            return Err(not_here(&loaded.name, Place::Partition(partition)));
        }
        let Some(first) = calls.first() else { return Ok((model, Vec::new())) };
        let queue = self.registry.serving().queue(&model.definition, &loaded, &first.admitted, now)?;
        let job = |call| {
            let queue = queue.clone();
            let job = QueuedCall { call, queue, queue_expiry: Time::MAX, level: 0, has_place: false };
            (self.registry.driver.next_request(), job)
        };
        Ok((model, calls.into_iter().map(job).collect()))
    }

    /// Reports the results of a batch to the state machine. `failed`: why the batch did not begin.
    fn done(
        &mut self,
        now: Time,
        batch: BatchKey,
        ran: Option<(u32, Duration)>,
        members: Vec<RequestKey>,
        BatchAnswers { answers, run }: BatchAnswers,
        failed: Option<&ServiceError>,
    ) {
        let lost = || ServiceError::Internal("the request was lost on its backend: this is a defect".to_owned());
        let mut outcomes: Vec<Option<Answer>> = members.iter().map(|_| None).collect();
        for (place, answer) in answers {
            if let Some(outcome) = outcomes.get_mut(place) {
                *outcome = Some(answer);
            }
        }
        let mut outcome = |(request, answer): (RequestKey, Option<Answer>)| {
            let answer = answer.unwrap_or_else(|| Err(failed.cloned().unwrap_or_else(lost)));
            let run = (request, batch);
            let outcome = match self.asked.ran(run, answer.is_ok()) {
                Ran::One(parameters) => asked_requests::outcome(answer, parameters, self.arena.as_ref()),
                Ran::Streamed => Outcome::Streamed,
            };
            (request, outcome)
        };
        let outcomes = members.into_iter().zip(outcomes).map(&mut outcome).collect();
        let run = run.map(|run| BatchRun {
            // The node knows the devices of its slots.
            device: 0,
            items: run.rows,
            compute_input: run.phases.compute_input,
            compute_infer: run.phases.compute_infer,
            compute_output: run.phases.compute_output,
            ended_ago: now.since(run.ended),
            counts: true,
        });
        self.node.handle_ran(now, batch, ran, run, outcomes);
    }
}

/// The model in service, and the jobs of its batch.
type Jobs = (InFlight, Vec<(RequestId, QueuedCall)>);

fn not_here(model: &str, place: Place) -> ServiceError {
    ServiceError::Internal(format!("model '{model}' does not run on {place} of this backend"))
}

/// The answered items of a seat's batch, and their part of the time of the launch that they shared
/// with other requests; `None`: nothing ran. `items`: those of each member.
fn device_time(BatchAnswers { answers, run }: &BatchAnswers, items: &[u32]) -> Option<(u32, Duration)> {
    let answered = answers.iter().filter(|(_, answer)| answer.is_ok());
    let ran = answered.filter_map(|(place, _)| items.get(*place)).fold(0, |ran: u32, items| ran.saturating_add(*items));
    let part = |run: &BatchLaunch| {
        let part = f64::from(ran) / f64::from(run.rows.max(ran));
        Duration::from_secs_f64(run.phases.compute_infer.as_secs_f64() * part)
    };
    (ran > 0).then(|| (ran, run.as_ref().map_or(Duration::ZERO, part)))
}

/// Checks a member's tensors like those of a client's request.
fn admit(
    loaded: &LoadedVersion,
    name: &str,
    payload: Tensors,
) -> Result<downbeat_host::request::batch_codec::Admitted, ServiceError> {
    let tensor =
        |(binding, part): (&downbeat_repository::TensorBinding, downbeat_host::request::batch_codec::OutputPart)| {
            InferTensor {
                name: binding.client.name.clone(),
                datatype: binding.datatype(),
                shape: part.shape,
                parameters: Default::default(),
                data: part.data,
            }
        };
    let mut parts = payload.into_iter();
    let inputs = loaded.codec.inputs.iter().zip(parts.by_ref()).map(tensor).collect();
    let mut request = InferRequest { model_name: name.to_owned(), inputs, ..InferRequest::default() };
    if let Some(about) = parts.next().filter(|_| loaded.codec.takes_requests) {
        read_about(&mut request, &about)?;
    }
    let admitted = loaded.codec.admit(&mut request)?;
    loaded.check_memory(&admitted)?;
    Ok(admitted)
}

impl Machine for BackendRole {
    type Node = BackendNode<Tensors>;
    type Event = BackendEvent;

    fn node(&self) -> &Self::Node {
        &self.node
    }

    fn node_mut(&mut self) -> &mut Self::Node {
        &mut self.node
    }

    fn accepts(&self, _role: Role) -> bool {
        false
    }

    fn handle_event(&mut self, now: Time, event: BackendEvent) {
        match event {
            BackendEvent::Ran(SlotDone { batch, ran }) => {
                if let Some(Running { batch, slot, members, answers, _model, .. }) = self.running.remove(&batch) {
                    let answers = answers.map(|answers| answers.take()).unwrap_or_default();
                    self.done(now, batch, ran, members, answers, None);
                    if let Some(Place::Partition(partition)) = self.slots.get(slot) {
                        self.begin(now, slot, partition);
                    }
                }
            }
            BackendEvent::Answered(batch, answers) => {
                if let Some(Running { batch, members, items, _model, .. }) = self.running.remove(&batch) {
                    self.done(now, batch, device_time(&answers, &items), members, answers, None);
                }
            }
            BackendEvent::Streamed(run, answer, is_last) => {
                if self.asked.streamed(run, is_last) {
                    self.node.handle_streamed(now, run.0, answer, is_last);
                }
            }
            BackendEvent::Offer(offer) => self.node.handle_offer(now, offer),
            BackendEvent::Done(model, doing, result) => self.node.handle_done(now, &model, doing, result),
            BackendEvent::Ordered(order, result) => self.node.handle_ordered(now, order, result),
            BackendEvent::View(ViewEvent::Ask(question, client)) => {
                let number = self.asks.ask(client);
                self.node.handle_ask(now, number, question);
            }
            BackendEvent::View(ViewEvent::Tell(from, answer)) => self.node.handle_tell(now, from, answer),
            BackendEvent::Drain => self.node.handle_drain(now),
        }
    }

    fn poll_step(&mut self, now: Time) -> Option<Step> {
        loop {
            match self.node.poll_output(now)? {
                BackendOutput::Send(peer, frame) => return Some(Step::Send(peer, frame)),
                BackendOutput::Connect { frontend, address } => return Some(Step::Connect(frontend, address)),
                BackendOutput::Lost(peer) => return Some(Step::Close(peer)),
                BackendOutput::Note(note) => tracing::warn!("{note}"),
                BackendOutput::Run { batch, slot, queue, members } => {
                    let waiting = Waiting { batch, queue, members };
                    match self.slots.get(slot) {
                        Some(Place::Partition(partition)) => {
                            self.waiting.entry(slot).or_default().push_back(waiting);
                            self.begin(now, slot, partition);
                        }
                        Some(Place::Seat(device)) => self.seat(now, (slot, device), waiting),
                        // The node refuses plans for slots that were not offered.
                        None => self.node.handle_ran(now, batch, None, None, Vec::new()),
                    }
                }
                BackendOutput::Model(model, doing) => {
                    let told = Told { model, doing, order: None };
                    if let Err(mpsc::error::SendError(Told { model, .. })) = self.loader.send(told) {
                        let reason = "the process is about to end".to_owned();
                        self.node.handle_done(now, &model, doing, Err(reason));
                    }
                }
                BackendOutput::Order { from, model, doing } => {
                    let told = Told { model, doing, order: Some(from) };
                    if self.loader.send(told).is_err() {
                        self.node.handle_ordered(now, from, Err("the process is about to end".to_owned()));
                    }
                }
                BackendOutput::Asked { from, question } => self.asks.asked(from, question),
                BackendOutput::Told(number, told) => {
                    let leader = self.node.leader();
                    let own = leader.and_then(|leader| self.node.links().clock(leader));
                    self.asks.told(number, told, (own, leader.is_some()));
                }
                BackendOutput::Left(requests) => self.asked.left(&requests),
                BackendOutput::PeerLost(peer) => self.asked.handle_lost(peer),
                BackendOutput::Room(request, answers) => self.asked.has_room(request, answers),
                BackendOutput::Leader(_, epoch) => self.board.follows(epoch, false),
                BackendOutput::Drained => return Some(Step::End),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use downbeat_host::request::reply::Gathered;
    use downbeat_service::metrics::statistics::Phases;

    use super::*;

    #[test]
    fn a_seats_batch_has_the_time_of_its_items() {
        let gathered = Arc::new(Gathered::default());
        let phases = Phases { compute_infer: Duration::from_millis(80), ..Phases::default() };
        // The launch has 8 items: 3 and 1 of this batch, of which the second member fails, and 4 of another.
        let [first, second] = [0, 1].map(|place| Reply::gathered(gathered.clone(), place));
        first.ran(BatchLaunch { rows: 8, phases, ended: Time::ZERO });
        first.send(Ok(Default::default()));
        second.send(Err(ServiceError::Internal("it fails".to_owned())));
        let answers = gathered.take();
        assert_eq!(device_time(&answers, &[3, 1]), Some((3, Duration::from_millis(30))));
        assert_eq!(device_time(&answers, &[0, 1]), None, "no item was answered");
    }
}
