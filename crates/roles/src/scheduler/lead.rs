//! The state of a scheduler while it leads: the queues of all models and the slots of all backends.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::assigner::{Assigner, AssignerOutput, ModelLoad, SubClusterOptions};
use super::budgets::{Measured, ModelBudget};
use super::cluster_map::ClusterMap;
use super::known_backend::Backend;
use super::load_count::LoadCount;
use super::model_rates::ModelRates;
use super::orders::{Orders, Word};
use super::questions::Questions;
use super::rehearsed::{RehearsalEvent, RehearsedScheduler};
use super::seat_loads::SeatLoads;
use super::served_models::{NoQueue, ServedModels};
use super::waiting::{Admitted, MOST_ALIASES, MOST_REQUESTS, Place, Waiting};
use crate::assignment::SubClusterPlan;
use crate::epoch::Epoch;
use crate::links::Links;
use crate::message::{
    BatchKey, Doing, HandedIn, Hello, Message, NodeId, Offer, Plan, QueueAlias, QueueKey, Refusal, RequestKey, Role,
    Told,
};
use crate::rollouts::{Received, Rollouts};
use downbeat_core::cluster::{
    AutoscaleSample, Behaviour, DropReason, Order, Output, Reject, Request, Scheduler, Ticket,
};
use downbeat_core::ids::{BatchId, DeviceId, ModelId, RequestId};
use downbeat_core::time::{Duration, Time};

/// How often network budgets are measured anew.
const MEASURE_EVERY: Duration = Duration::from_millis(100);
/// A connected backend may take this many times the settle time to send its offer.
const OFFERS_WITHIN: u64 = 10;

/// A request that waits until a backend offers its model.
#[derive(Debug)]
struct Parked {
    frontend: u32,
    queue: QueueAlias,
    request: Request,
}

/// A sub-cluster in its present state.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SubCluster {
    /// The sub-cluster's backends, each with the models that it must still load.
    pub backends: Vec<(NodeId, Vec<String>)>,
    /// The sub-cluster's models, by name.
    pub models: Vec<String>,
    /// Requests per second of the models, about over the last minute.
    pub requests: f64,
    /// The number of devices that these keep busy, in full batches.
    pub busy: f64,
    /// Bytes that the models take on each device, without their runs.
    pub memory: u64,
}

/// The state of a scheduler while it leads.
#[derive(Debug)]
pub(super) struct Lead {
    epoch: Epoch,
    scheduler: RehearsedScheduler,
    map: ClusterMap,
    models: ServedModels,
    waiting: Waiting,
    parked: BTreeMap<RequestId, Parked>,
    /// Requests whose inputs are not ready, by the time when they enter their queues.
    coming: BTreeMap<(Time, RequestId), Parked>,
    /// Until then backends may still be on their way here, and requests wait for models without an
    /// offer.
    settles_at: Time,
    /// Until then such requests wait if a connected backend has not sent its offer.
    offers_by: Time,
    /// When to check again whether parked requests have waited long enough.
    unparks_at: Time,
    /// Whether frontends have heard of models.
    is_settled: bool,
    models_changed: bool,
    measures_at: Time,
    load: LoadCount,
    rates: ModelRates,
    seat_loads: SeatLoads,
    /// Decisions whose batches count in `seat_loads`, and which are not carried out yet.
    decided: VecDeque<Output>,
    orders: Orders,
    rollouts: Rollouts,
    /// Models whose decisions must be sent, with the frontend that told one, and whether that one was
    /// new.
    told_rollouts: Vec<(String, NodeId, bool)>,
    questions: Questions,
    /// Answers to this scheduler's own questions.
    told: VecDeque<(u64, Option<Told>)>,
    /// Assigns models to backends, if this scheduler does so.
    assigner: Option<Assigner>,
    /// Whether backends, or their offers, have changed since the last assignments.
    assigns: bool,
}

/// The instant at which the time `left` is over.
fn end_of(now: Time, left: Duration) -> Time {
    if left == Duration::MAX { Time::MAX } else { now + left }
}

impl Lead {
    /// Begins to lead. The caller reports connected nodes with [`Lead::handle_up`]. `settles`: how
    /// long backends may be on their way here. `sub_clusters`: how models are divided among backends,
    /// and the last known plan; `None`: backends choose their own models.
    pub fn new(
        epoch: Epoch,
        (wake_margin, order): (Duration, Order),
        is_rehearsed: bool,
        settles: Duration,
        sub_clusters: Option<(SubClusterOptions, Option<SubClusterPlan>)>,
        now: Time,
    ) -> Self {
        let assigner = sub_clusters.map(|(options, plan)| Assigner::new(options, epoch, plan, now, settles));
        let settles_at = now + settles;
        let mut scheduler = RehearsedScheduler::new(is_rehearsed);
        scheduler.set_wake_margin(now, wake_margin);
        scheduler.set_order(now, order);
        Lead {
            epoch,
            scheduler,
            map: ClusterMap::new(epoch, assigner.is_some()),
            models: ServedModels::new(settles),
            waiting: Waiting::default(),
            parked: BTreeMap::new(),
            coming: BTreeMap::new(),
            settles_at,
            offers_by: now + settles.saturating_mul(OFFERS_WITHIN),
            unparks_at: settles_at,
            is_settled: false,
            models_changed: false,
            measures_at: now + MEASURE_EVERY,
            load: LoadCount::default(),
            rates: ModelRates::new(now),
            seat_loads: SeatLoads::default(),
            decided: VecDeque::new(),
            orders: Orders::default(),
            rollouts: Rollouts::default(),
            told_rollouts: Vec::new(),
            questions: Questions::default(),
            told: VecDeque::new(),
            assigner,
            assigns: true,
        }
    }

    /// Counts of requests and busy device time, for advice on the number of devices. `None`:
    /// backends may still be on their way here.
    pub fn sample(&self) -> Option<AutoscaleSample> {
        let LoadCount { good, bad, busy, .. } = self.load;
        self.is_settled.then(|| AutoscaleSample { good, bad, busy, devices: self.map.devices() })
    }

    /// Ends a request without a batch.
    fn refuse(&mut self, id: RequestId, refusal: Refusal) {
        self.load.refused(refusal);
        self.waiting.end(id, Some(refusal));
    }

    /// Refuses a request that was not admitted.
    fn refuse_at_once(&mut self, frontend: u32, number: u64, reject: Reject) {
        let refusal = Refusal::Rejected(reject);
        self.load.refused(refusal);
        self.waiting.refuse(frontend, number, refusal);
    }

    /// Takes the events for the rehearsal since the last call.
    pub fn rehearsal_events(&mut self) -> impl Iterator<Item = RehearsalEvent> {
        self.scheduler.heard()
    }

    /// Carries out what a rehearsal has found.
    pub fn handle_behaviour(&mut self, now: Time, model: ModelId, behaviour: Option<Behaviour>) {
        self.scheduler.set_behaviour(now, model, behaviour);
    }

    /// Carries out what a rehearsal has found: the order of turns.
    pub fn handle_order_of_turns(&mut self, now: Time, order: Order) {
        self.scheduler.set_order(now, order);
    }

    /// The scheduler that makes the decisions.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Requests that wait or are in batches.
    pub fn requests(&self) -> usize {
        self.waiting.len()
    }

    /// Handles the arrival of a frontend or a backend.
    pub fn handle_up<P: Clone>(&mut self, now: Time, links: &mut Links<P>, hello: &Hello) {
        match hello.role {
            Role::Frontend => {
                let place = self.waiting.handle_frontend(hello.node, hello.address.clone());
                self.map.forget(None, Some(place));
            }
            Role::Backend => self.map.handle_up(hello),
            Role::Scheduler { .. } => return,
        }
        links.say(now, hello.node, Message::Leads(self.epoch));
        if hello.role == Role::Frontend {
            for message in self.rollouts.messages() {
                links.say(now, hello.node, message);
            }
        }
        if hello.role == Role::Frontend && self.is_settled {
            links.say(now, hello.node, Message::Models(self.models.list()));
        }
    }

    /// Handles the loss of a frontend or a backend.
    pub fn handle_lost(&mut self, now: Time, node: NodeId) {
        let name = self.map.backend_mut(node).map(|backend| backend.name.clone()).unwrap_or_default();
        self.orders.handle_lost(node, &name);
        self.handle_asker_lost(node);
        for (id, place) in self.waiting.handle_frontend_lost(node) {
            self.withdraw(now, id, place);
        }
        let (batches, changed) = self.map.handle_lost(now, &mut self.scheduler, &mut self.models, node);
        self.seat_loads.forget(node);
        self.models_changed |= changed;
        self.assigns = true;
        for batch in batches {
            for id in &batch.members {
                self.waiting.end(*id, Some(Refusal::Lost));
            }
            self.scheduler.note_answers(now, batch.model, batch.members.len() as u32, true);
            self.scheduler.recycle(batch.members);
        }
        self.settle(now);
    }

    /// Removes a waiting request, and tells no frontend.
    fn withdraw(&mut self, now: Time, id: RequestId, place: Place) {
        let is_out = match place {
            Place::Parked => self.parked.remove(&id).is_some(),
            Place::Coming(at) => self.coming.remove(&(at, id)).is_some(),
            Place::Queued(model, ticket) => {
                let is_out = self.scheduler.handle_cancel(now, model, ticket);
                if is_out {
                    self.scheduler.note_answers(now, model, 1, false);
                }
                is_out
            }
            Place::Dispatched => false,
        };
        if is_out {
            self.waiting.end(id, None);
        }
    }

    /// Handles a message from a peer.
    pub fn handle_message<P>(&mut self, now: Time, role: Role, from: NodeId, message: Message<P>) {
        match (role, message) {
            (Role::Frontend, Message::Queue { alias, key }) => {
                if let Some(frontend) = self.waiting.place_of(from) {
                    self.waiting.set_alias(frontend, alias, Arc::new(key));
                }
            }
            (Role::Frontend, Message::Requests(requests)) => self.handle_requests(now, from, &requests),
            (Role::Frontend, Message::Cancel(numbers)) => {
                let Some(frontend) = self.waiting.place_of(from) else { return };
                for number in numbers {
                    if let Some((id, place)) = self.waiting.find(frontend, number) {
                        self.withdraw(now, id, place);
                    }
                }
            }
            (Role::Frontend, Message::Ready(numbers)) => {
                let Some(frontend) = self.waiting.place_of(from) else { return };
                for number in numbers {
                    if let Some((id, Place::Coming(at))) = self.waiting.find(frontend, number) {
                        self.handle_come(now, (at, id));
                    }
                }
            }
            (Role::Frontend, Message::Order { number, model, doing }) => {
                self.handle_order((from, number), &model, doing)
            }
            (Role::Frontend, Message::Rollout { model, number, decision }) => {
                self.handle_rollout(from, model, (number, &decision));
            }
            (Role::Backend, Message::Ordered { number, failed }) => {
                if let Some(backend) = self.map.backend_mut(from) {
                    self.orders.handle_done(number, (from, &backend.name), failed);
                }
            }
            (_, Message::Ask { number, question }) => self.questions.ask((Some(from), number), question),
            (_, Message::Tell { number, answer }) => self.questions.handle_tell(from, number, answer),
            (Role::Backend, Message::UnderWay(running)) => {
                self.map.handle_under_way(now, &mut self.scheduler, from, &running);
            }
            (Role::Backend, Message::Offer(offer)) => self.handle_offer(now, from, *offer),
            (Role::Backend, Message::Delays(delays)) => {
                if let Some(backend) = self.map.backend_mut(from) {
                    if backend.delays.as_ref().is_some_and(|known| known.differs(&delays)) {
                        self.measures_at = self.measures_at.min(now);
                    }
                    backend.delays = Some(delays);
                }
            }
            (Role::Backend, Message::Completed { batch, ran, missed }) => {
                self.handle_completed(now, from, batch, ran.map(|(_, took)| took), &missed);
            }
            (Role::Backend, Message::Leave) => self.assigns |= self.map.handle_leave(from),
            // Not a message for a scheduler, or not from a peer of this role: ignored.
            _ => {}
        }
    }

    /// Takes a frontend's decision about a rollout. If it is the newest, all other frontends must hear
    /// it. Otherwise this frontend must hear the newest.
    fn handle_rollout(&mut self, from: NodeId, model: String, (number, decision): (u64, &[u8])) {
        match self.rollouts.handle(&model, number, decision) {
            Received::New => self.told_rollouts.push((model, from, true)),
            Received::Known => {}
            Received::Old => self.told_rollouts.push((model, from, false)),
        }
    }

    /// Puts a question of this scheduler itself to all frontends and backends.
    pub fn ask(&mut self, number: u64, question: Vec<u8>) {
        self.questions.ask((None, number), question);
    }

    /// The next answer to a question of this scheduler itself; without one, the question has ended.
    pub fn poll_told(&mut self) -> Option<(u64, Option<Told>)> {
        self.told.pop_front()
    }

    /// Handles the loss of a peer that may have asked something. Other schedulers ask, too.
    pub fn handle_asker_lost(&mut self, node: NodeId) {
        self.questions.handle_lost(node);
    }

    /// Orders a client's change of a model on all backends that load models on orders.
    fn handle_order(&mut self, wish: (NodeId, u64), model: &str, doing: Doing) {
        if self.assigner.is_some() {
            let reason = "the scheduler divides models among sub-clusters, and has them loaded and unloaded itself";
            return self.orders.refuse(wish, reason.to_owned());
        }
        let is_there = |offer: &Offer| offer.models.iter().any(|offered| offered.model == model);
        let of = |can: &dyn Fn(&Offer) -> bool| -> BTreeSet<NodeId> {
            // A backend without a repository for orders has fixed models.
            let offer = |backend: &Backend| backend.offer.as_ref().is_some_and(|o| !o.repository.is_empty() && can(o));
            self.map.backends().filter(|(_, backend)| offer(backend)).map(|(node, _)| node).collect()
        };
        let backends = match doing {
            Doing::Unload => of(&is_there),
            Doing::Load => Some(of(&|offer| offer.loadable(model).is_some()))
                .filter(|found| !found.is_empty())
                .unwrap_or_else(|| {
                    // Ensembles are not listed there. A backend without the model says so.
                    of(&|_| true)
                }),
        };
        self.orders.begin(wish, (model, doing), backends);
    }

    fn handle_requests(&mut self, now: Time, from: NodeId, requests: &[HandedIn]) {
        let Some(frontend) = self.waiting.place_of(from) else { return };
        for handed in requests {
            if self.waiting.named(frontend, handed.queue).is_none() {
                if handed.queue.0 >= MOST_ALIASES {
                    self.refuse_at_once(frontend, handed.number, Reject::QueueFull { bound: 0 });
                }
                // The frontend handed the request in during an earlier lead of this scheduler. A
                // frontend that follows this lead names its queues anew, and then hands in all its
                // requests again.
                continue;
            }
            let (deadline, queue_expiry) = (end_of(now, handed.left), end_of(now, handed.queue_left));
            let id = match self.waiting.admit(frontend, handed.number, (deadline, queue_expiry, handed.level)) {
                Admitted::New(id) => id,
                Admitted::Known => continue,
                Admitted::Full => {
                    self.refuse_at_once(frontend, handed.number, Reject::QueueFull { bound: MOST_REQUESTS });
                    continue;
                }
            };
            let request = Request {
                id,
                model: ModelId(u32::MAX),
                deadline,
                queue_expiry,
                level: handed.level,
                size: handed.size,
            };
            let parked = Parked { frontend, queue: handed.queue, request };
            match self.enters_at(now, &parked, handed.ready_in) {
                at if at <= now => self.enter(now, parked),
                at => {
                    self.waiting.set_place(id, Place::Coming(at));
                    self.coming.insert((at, id), parked);
                }
            }
        }
    }

    /// Puts a request into its queue whose inputs are ready, or will be when a batch begins.
    fn handle_come(&mut self, now: Time, (at, id): (Time, RequestId)) {
        if let Some(parked) = self.coming.remove(&(at, id)) {
            self.waiting.set_place(id, Place::Parked);
            self.enter(now, parked);
        }
    }

    /// When a request enters its queue whose inputs are ready after `ready_in` (Symphony §4.3): a
    /// batch that is planned then begins when they are. Until then the plan is on its way to the
    /// backend, and the backend's claim on its way to the frontend.
    fn enters_at(&mut self, now: Time, parked: &Parked, ready_in: Duration) -> Time {
        if ready_in == Duration::ZERO {
            return now;
        }
        let queue = self.queue_of(now, parked.frontend, parked.queue);
        let control = queue.map_or(Duration::ZERO, |queue| self.models.control(queue));
        now + ready_in.saturating_sub(control)
    }

    /// Puts a request into its queue, or refuses it with the reason.
    fn enter(&mut self, now: Time, mut parked: Parked) {
        let id = parked.request.id;
        let model = self.queue_of(now, parked.frontend, parked.queue).and_then(|queue| {
            let left =
                if parked.request.deadline == Time::MAX { Duration::MAX } else { parked.request.deadline.since(now) };
            self.models.model_of(now, &mut self.scheduler, queue, left)
        });
        let reject = match model {
            Ok(model) => {
                parked.request.model = model;
                self.rates.arrived(model);
                match self.admit(now, parked.request) {
                    Ok(ticket) => {
                        self.waiting.set_place(id, Place::Queued(model, ticket));
                        // The next request must find the device of this one loaded.
                        while self.map.has_seats()
                            && let Some(output) = self.scheduler.poll_output()
                        {
                            self.count_seat_load(now, &output);
                            self.decided.push_back(output);
                        }
                        return;
                    }
                    Err(reject) => reject,
                }
            }
            Err(NoQueue::Unknown) if self.may_be_offered(now) => {
                self.parked.insert(id, parked);
                return;
            }
            Err(NoQueue::Unknown) => Reject::UnknownModel,
            Err(NoQueue::Full) => Reject::QueueFull { bound: 0 },
        };
        self.refuse(id, Refusal::Rejected(reject));
    }

    /// Puts a request into its queue. No network budget refuses a request that fresh measurements
    /// would allow.
    fn admit(&mut self, now: Time, request: Request) -> Result<Ticket, Reject> {
        self.scheduler.note_arrival(now, &request);
        let mut admitted = self.scheduler.handle_request(now, request);
        if let Err(reject @ Reject::DeadlineImpossible { .. }) = admitted {
            let given = (request.size, request.deadline.since(now));
            admitted = match self.models.relent(now, &mut self.scheduler, request.model, given) {
                Ok(()) => self.scheduler.handle_request(now, request),
                Err(better) => Err(better.unwrap_or(reject)),
            };
        }
        if admitted.is_err() {
            self.scheduler.note_answers(now, request.model, 1, true);
        }
        admitted
    }

    /// Puts a request back that its queue has given up as hopeless, if fresh measurements of the
    /// network would allow it. Returns whether it waits again.
    fn readmit(&mut self, now: Time, id: RequestId, model: ModelId, size: u32) -> bool {
        let Some(request) = self.waiting.request(id, model, size).filter(|request| request.deadline > now) else {
            return false;
        };
        let given = (size, request.deadline.since(now));
        if self.models.relent(now, &mut self.scheduler, model, given).is_err() {
            return false;
        }
        let ticket = self.scheduler.handle_request(now, request);
        ticket.map(|ticket| self.waiting.set_place(id, Place::Queued(model, ticket))).is_ok()
    }

    /// The place of the queue that a frontend's alias stands for.
    fn queue_of(&mut self, now: Time, frontend: u32, alias: QueueAlias) -> Result<u32, NoQueue> {
        let (key, place) = self.waiting.named(frontend, alias).ok_or(NoQueue::Unknown)?;
        if let Some(place) = place {
            return Ok(place);
        }
        let key = key.clone();
        let (place, forgotten) = self.models.place(now, &mut self.scheduler, &key).ok_or(NoQueue::Full)?;
        if let Some(forgotten) = forgotten {
            self.waiting.forget_queue(forgotten);
            self.map.forget(Some(forgotten), None);
        }
        self.waiting.set_queue(frontend, alias, place);
        Ok(place)
    }

    fn handle_offer(&mut self, now: Time, from: NodeId, offer: Offer) {
        let changed = self.map.handle_offer(now, &mut self.scheduler, &mut self.models, from, offer);
        self.models_changed |= changed;
        self.assigns = true;
        if changed && !self.parked.is_empty() {
            for (_, parked) in std::mem::take(&mut self.parked) {
                self.enter(now, parked);
            }
        }
        self.settle(now);
    }

    /// Whether a model without an offer may soon get one, from a backend that is on its way or has
    /// not sent its offer.
    fn may_be_offered(&self, now: Time) -> bool {
        now < self.settles_at || (now < self.offers_by && self.map.awaits_offer())
    }

    /// Lets frontends hear of models once all backends have sent their offers.
    fn settle(&mut self, now: Time) {
        if !self.is_settled && (self.map.is_complete() || now >= self.settles_at) {
            self.is_settled = true;
            self.models_changed = true;
        }
        self.unparks_at = if now < self.settles_at { self.settles_at } else { self.offers_by };
        if !self.may_be_offered(now) && !self.parked.is_empty() {
            for (_, parked) in std::mem::take(&mut self.parked) {
                self.enter(now, parked);
            }
        }
    }

    fn handle_completed(
        &mut self,
        now: Time,
        from: NodeId,
        batch: BatchKey,
        took: Option<Duration>,
        missed: &[RequestKey],
    ) {
        let busy = took.and_then(|took| self.map.busy(batch, took));
        if batch.epoch == self.epoch {
            self.end_seat_load(now, batch.batch);
        }
        let Some(done) = self.map.handle_completed(now, &mut self.scheduler, from, batch) else { return };
        self.scheduler.note_answers(now, done.model, done.members.len() as u32, took.is_none());
        if let Some(took) = took {
            self.scheduler.note_run(done.model, took, done.expected);
        }
        let members = done.members;
        if let Some((busy, needed)) = busy {
            self.load.batch(busy, needed);
        }
        for id in &members {
            let is_missed = !missed.is_empty() && self.waiting.key(*id).is_some_and(|key| missed.contains(&key));
            if !is_missed && took.is_some() {
                self.load.ran(self.waiting.is_late(now, *id));
            }
            self.waiting.end(*id, is_missed.then_some(Refusal::Missed(batch)));
        }
        self.scheduler.recycle(members);
    }

    /// Counts the work of a batch on a device with seats. A seat's batch costs a device what its
    /// items cost in a full batch.
    fn count_seat_load(&mut self, now: Time, output: &Output) {
        let Output::Dispatch { batch, device, model, size, expected, .. } = output else { return };
        let Some((site, is_seat)) = self.map.site(*device) else { return };
        let part = if is_seat { self.load.needed_part(&self.scheduler, *model, *size, *expected) } else { 1.0 };
        let takes = Duration::from_secs_f64(expected.as_secs_f64() * part);
        let until = self.seat_loads.sent(now, *batch, site, takes);
        self.map.set_load(&mut self.scheduler, site, until);
    }

    /// Takes back the work of a batch that is done.
    fn end_seat_load(&mut self, now: Time, batch: BatchId) {
        if self.map.has_seats()
            && let Some((site, until)) = self.seat_loads.ended(now, batch)
        {
            self.map.set_load(&mut self.scheduler, site, until);
        }
    }

    /// The scheduler's next decision.
    fn poll_decision(&mut self, now: Time) -> Option<Output> {
        if let Some(decided) = self.decided.pop_front() {
            return Some(decided);
        }
        let output = self.scheduler.poll_output()?;
        if self.map.has_seats() {
            self.count_seat_load(now, &output);
        }
        Some(output)
    }

    /// Does everything that is due.
    pub fn handle_timeout<P: Clone>(&mut self, now: Time, links: &Links<P>) {
        self.scheduler.handle_timeout(now);
        while let Some((at, id)) = self.coming.keys().next().copied().filter(|(at, _)| *at <= now) {
            self.handle_come(now, (at, id));
        }
        self.models_changed |= self.models.give_up(now, &mut self.scheduler, |key| self.map.may_have(key));
        self.settle(now);
        if now >= self.measures_at {
            self.measures_at = now + MEASURE_EVERY;
            self.load.forget_costs();
            self.measure(now, links);
            let models = &self.models;
            self.rates.measure(now, |model| models.queue_of(model).map(|(_, key)| &*key.model));
        }
        self.assigns |= self.assigner.as_ref().is_some_and(|assigner| assigner.poll_timeout() <= now);
    }

    /// Sends backends their assignments, and lets leaving backends go.
    fn assign<P: Clone>(&mut self, now: Time, links: &mut Links<P>) {
        if !std::mem::take(&mut self.assigns) {
            return;
        }
        let let_go = match &mut self.assigner {
            None => self.map.backends().filter(|(_, backend)| backend.is_leaving).map(|(node, _)| node).collect(),
            Some(assigner) => {
                let views: Vec<_> = self.map.backends().filter_map(|(node, backend)| backend.view(node)).collect();
                let (rates, models) = (&self.rates, &self.models);
                let told = assigner.settle(now, &views, |model| load_of(rates, models, model));
                for (node, assigned) in told.assignments {
                    let place = (node, &assigned);
                    let changed = self.map.handle_assigned(now, &mut self.scheduler, &mut self.models, place);
                    self.models_changed |= changed;
                    links.say(now, node, Message::Assign(assigned));
                }
                told.let_go
            }
        };
        for node in let_go {
            if self.map.let_go(now, &mut self.scheduler, node) {
                links.say(now, node, Message::LetGo);
            }
        }
    }

    /// The assigner, if this scheduler assigns models to backends.
    pub fn assigner_mut(&mut self) -> Option<&mut Assigner> {
        self.assigns = true;
        self.assigner.as_mut()
    }

    /// The assigner's next wish to the outside.
    pub fn poll_plan(&mut self) -> Option<AssignerOutput> {
        self.assigner.as_mut()?.poll_output()
    }

    /// The sub-clusters in their present state.
    pub fn sub_clusters(&self) -> Vec<SubCluster> {
        let Some(assigner) = &self.assigner else { return Vec::new() };
        let mut all: BTreeMap<u32, SubCluster> = BTreeMap::new();
        for (model, group) in assigner.placed() {
            let offers = self.map.backends().filter_map(|(_, backend)| backend.offer.as_ref()?.loadable(model));
            let memory = offers.map(|loadable| loadable.memory).max().unwrap_or(0);
            let ModelLoad { requests, devices } = load_of(&self.rates, &self.models, model);
            let group = all.entry(*group).or_default();
            group.models.push(model.clone());
            group.requests += requests;
            group.busy += devices;
            group.memory = group.memory.saturating_add(memory);
        }
        for (node, backend) in self.map.backends() {
            let (Some(group), Some(view)) = (assigner.group(node), backend.view(node)) else { continue };
            let group = all.entry(group).or_default();
            let missing = group.models.iter().filter(|model| !view.ready.contains(&***model)).cloned().collect();
            group.backends.push((node, missing));
        }
        all.into_values().collect()
    }

    /// Plans with the delays measured now (Symphony appendix D).
    fn measure<P: Clone>(&mut self, now: Time, links: &Links<P>) {
        let measured = self.map.backends().filter_map(|(node, backend)| {
            let kinds = backend.slots.iter().filter_map(|slot| slot.kind).collect();
            let there = links.one_way(node).unwrap_or_default();
            let fresh_there = links.fresh_way(now, node).unwrap_or_default();
            Some(Measured { kinds, there, fresh_there, delays: backend.delays.clone()? })
        });
        let measured: Vec<Measured> = measured.collect();
        self.models.set_budgets(now, &mut self.scheduler, &measured);
    }

    /// The network budget of each model, by the backends that have the model.
    pub fn budgets(&self) -> impl Iterator<Item = ModelBudget> {
        self.models.budgets().filter_map(|((model, version), (kind, network))| {
            let has = |backend: &Backend| backend.slots.iter().any(|slot| slot.kind == Some(kind));
            let backends = self.map.backends().filter(|(_, backend)| has(backend));
            let backends: Vec<String> = backends.map(|(_, backend)| backend.name.clone()).collect();
            let is_there = !backends.is_empty();
            is_there.then(|| ModelBudget { model: model.clone(), version: *version, backends, network })
        })
    }

    /// Sends the scheduler's decisions to frontends and backends.
    pub fn flush<P: Clone>(&mut self, now: Time, links: &mut Links<P>) {
        while let Some(output) = self.poll_decision(now) {
            match output {
                Output::Dispatch { batch, device, model, members, size, start, expected, .. } => {
                    let times = (start.since(now), expected);
                    self.dispatch(now, links, (batch, device, model), members, size, times);
                }
                Output::Drop { request, model, reason, detail } => {
                    if reason == DropReason::Hopeless && self.readmit(now, request, model, detail.size) {
                        continue;
                    }
                    self.scheduler.note_answers(now, model, 1, true);
                    let key = self.models.queue_of(model).map(|(_, key)| (key.model.clone(), key.version));
                    let is_known = || key.as_ref().is_some_and(|key| self.models.fingerprint(key).is_some());
                    // The queue begins anew with other settings. Frontends hand its requests in
                    // again.
                    let refusal = match reason {
                        DropReason::ModelRemoved if is_known() => Refusal::Lost,
                        reason => Refusal::Dropped(reason),
                    };
                    self.refuse(request, refusal);
                }
            }
        }
        self.assign(now, links);
        while let Some(word) = self.orders.poll() {
            match word {
                Word::Do { backend, order: number, model, doing } => {
                    links.say(now, backend, Message::Order { number, model, doing });
                }
                Word::Done { wish: (frontend, number), failed } => {
                    links.say(now, frontend, Message::Ordered { number, failed });
                }
            }
        }
        for (model, from, is_new) in std::mem::take(&mut self.told_rollouts) {
            let Some(message) = self.rollouts.message(&model) else { continue };
            let hears = |frontend: &NodeId| (*frontend == from) != is_new;
            for frontend in frontends(links).into_iter().filter(hears) {
                links.say(now, frontend, message.clone());
            }
        }
        self.told.extend(self.questions.flush(now, links));
        while let Some((frontend, refused)) = self.waiting.poll_refused() {
            links.say(now, frontend, Message::Refused(refused));
        }
        if self.is_settled && std::mem::take(&mut self.models_changed) {
            for frontend in frontends(links) {
                links.say(now, frontend, Message::Models(self.models.list()));
            }
        }
    }

    fn dispatch<P: Clone>(
        &mut self,
        now: Time,
        links: &mut Links<P>,
        (batch, device, model): (BatchId, DeviceId, ModelId),
        members: Vec<RequestId>,
        size: u32,
        (starts_in, expected): (Duration, Duration),
    ) {
        for id in &members {
            self.waiting.set_place(*id, Place::Dispatched);
        }
        let needed = self.load.needed_part(&self.scheduler, model, size, expected);
        let (node, slot) = match self.map.handle_dispatch(batch, device, (model, expected, needed), members) {
            Ok(to) => to,
            Err(members) => {
                for id in &members {
                    self.waiting.end(*id, Some(Refusal::Lost));
                }
                self.end_seat_load(now, batch);
                return self.scheduler.recycle(members);
            }
        };
        self.meet(now, links, node, batch);
        let Some((place, key)) = self.models.queue_of(model) else { return };
        let queue = QueueAlias(place);
        if self.map.backend_mut(node).is_some_and(|backend| backend.told.insert(place)) {
            links.say(now, node, Message::Queue { alias: queue, key: QueueKey::clone(key) });
        }
        let name = BatchKey { epoch: self.epoch, batch };
        let (members, claims) = self.waiting.planned(self.map.members(batch));
        // Inputs take longer than the plan: their frontends hear of the batch first.
        for (frontend, numbers) in claims {
            links.say(now, frontend, Message::Claim { batch: name, backend: node, numbers });
        }
        let plan = Plan { batch: name, slot, queue, members, size, starts_in, expected };
        links.say(now, node, Message::Plan(plan));
    }

    /// Tells a backend the addresses of the batch's frontends that it has not heard of.
    fn meet<P: Clone>(&mut self, now: Time, links: &mut Links<P>, node: NodeId, batch: BatchId) {
        let mut last = u32::MAX;
        let mut strangers: Vec<u32> = Vec::new();
        for id in self.map.members(batch) {
            let Some((place, _)) = self.waiting.owner(*id) else { continue };
            if place != std::mem::replace(&mut last, place) && !self.map.has_met(node, place) {
                strangers.push(place);
            }
        }
        for place in strangers {
            let Some(backend) = self.map.backend_mut(node) else { return };
            if backend.met.insert(place)
                && let Some(frontend) = self.waiting.frontend(place)
            {
                let meet = Message::Meet { frontend: frontend.node, address: frontend.address.clone() };
                links.say(now, node, meet);
            }
        }
    }

    /// The next text to show to people.
    pub fn poll_note(&mut self) -> Option<String> {
        self.map.poll_note()
    }

    /// When to call [`Lead::handle_timeout`], and why.
    pub fn poll_timeout(&self) -> (Time, &'static str) {
        let due = self.scheduler.poll_timeout().map_or(Time::MAX, |(at, _)| at);
        let settles = if self.is_settled && self.parked.is_empty() { Time::MAX } else { self.unparks_at };
        let assigns = self.assigner.as_ref().map_or(Time::MAX, Assigner::poll_timeout);
        let others = [
            (settles, "models that nobody offers"),
            (self.measures_at, "what messages take"),
            (assigns, "which models backends have"),
            (self.coming.keys().next().map_or(Time::MAX, |(at, _)| *at), "inputs that will be ready"),
            (self.models.gives_up_at(), "models whose backends were lost"),
        ];
        others.into_iter().fold((due, "a batch or a deadline"), |least, due| if due.0 < least.0 { due } else { least })
    }
}

/// The frontends whose links are up.
fn frontends<P: Clone>(links: &Links<P>) -> Vec<NodeId> {
    links.peers().filter(|peer| peer.role == Role::Frontend).map(|peer| peer.node).collect()
}

/// The recent load of a model.
fn load_of(rates: &ModelRates, models: &ServedModels, model: &str) -> ModelLoad {
    let requests = rates.of(model);
    ModelLoad { requests, devices: requests * models.least_seconds(model) }
}
