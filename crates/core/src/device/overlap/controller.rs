//! The control that forms groups of operators by headroom.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::group::{GroupId, GroupPart, OperatorGroup};
use super::margin::Margins;
use super::order::GroupOrder;
use super::predictor::Predictor;
use super::search::{Found, GroupSearch};
use super::waiting::{OverlapModel, Waiting};
use crate::device::launch::Span;
use crate::device::request::{DeviceDrop, DeviceReject, DeviceRequest};
use crate::ids::{ModelId, RequestId};
use crate::time::{Duration, Time};

/// After this many requests given up in a row, with no group between them, the next one runs all
/// the same. Otherwise a predictor that has gone wrong would give up all requests, and no group
/// would show the error. Until groups of one request are measured, predictions drop no request.
const DROPS_IN_A_ROW: u32 = 8;
/// The margin alone keeps some groups small. Every 64th of them runs at the larger size of the bare
/// prediction, to find out whether the predictor has become right.
const TRIED_OF: u32 = 64;

/// The options of the control.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct OverlapOptions {
    /// The number of groups in one call of the predictor (Abacus §7.7: 4).
    pub ways: usize,
    /// The predictor's relative error was below this for 95% of its test samples.
    pub error: f64,
    /// The most requests of a group.
    pub at_once: usize,
    /// The time that requests must save by running side by side, as a share of their time together.
    /// At 0 they may even lose time, as in Abacus. The 10% are ours: on the emulated A100, groups
    /// that save less cost more than they gain (`lab/docs/abacus.md`).
    pub worth: f64,
    /// Which request is next, and whether others run beside it.
    pub order: GroupOrder,
    /// The most items that wait.
    pub queue_bound: u32,
}

impl Default for OverlapOptions {
    fn default() -> Self {
        OverlapOptions { ways: 4, error: 0.15, at_once: 4, worth: 0.1, order: GroupOrder::Headroom, queue_bound: 4_096 }
    }
}

/// A decision of the control.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OverlapOutput {
    /// Begin these operators together, keep intermediate tensors, and call
    /// [`Overlap::handle_completion`] when all are done.
    Run(OperatorGroup),
    /// All operators of the request are done: answer it.
    Reply {
        /// The request.
        request: RequestId,
    },
    /// The request will get no answer. Its intermediate tensors can go.
    Drop {
        /// The request.
        request: RequestId,
        /// The reason.
        reason: DeviceDrop,
    },
}

/// The counters of the control since its beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct OverlapStats {
    /// The groups that have begun.
    pub groups: u64,
    /// The groups of several requests.
    pub together: u64,
    /// The calls of the predictor.
    pub passes: u64,
    /// The calls of the predictor while the device had nothing to run.
    pub waited_for: u64,
    /// The groups that were decided in time, but no longer suited when the device was free.
    pub overtaken: u64,
}

/// Decides which operators of which requests run next on a device that models share (Abacus §6).
///
/// **Headroom** (§6.2, equation 2) is the time until a request's deadline, so that waiting, copying
/// and finished operators already count. The request with the least headroom goes first. The next
/// group holds all its remaining operators. The group also takes operators of one request of each
/// other model, as many as fit into the headroom by prediction. A request that cannot meet its
/// deadline even alone is given up.
///
/// **Beside the running group** the next one is decided (§6.3), with the headroom at the predicted
/// end of the running group (equation 3). The decision is made as soon as the outputs of the
/// running group are carried out ([`handle_timeout`](Self::handle_timeout)). It is made again if a
/// request comes that belongs into the group. It is also made again if the running group took so
/// long that the next one no longer suits.
///
/// **Margin** (ours). A prediction is corrected by the actual latencies of earlier groups. Several
/// requests run together only if 95% of such groups would be in time. A request is given up only if
/// half of such groups would be late. A predictor may be wrong by a factor. After eight groups the
/// margin knows this factor. Then groups may be smaller than they could be, but deadlines are kept.
///
/// **Contract.** Time never goes back. After each `handle_*` call
/// [`poll_output`](Self::poll_output) until it returns `None`, carry the outputs out, and then
/// follow [`poll_timeout`](Self::poll_timeout). At most one group runs; one
/// [`handle_completion`](Self::handle_completion) ends it. Events of unknown requests, models and
/// groups are ignored. The same calls give the same decisions.
#[derive(Debug)]
pub struct Overlap<P> {
    options: OverlapOptions,
    predictor: P,
    margins: Margins,
    models: BTreeMap<ModelId, OverlapModel>,
    /// The waiting requests by rank, then by arrival.
    waiting: BTreeMap<Key, Waiting>,
    /// The items of the waiting requests.
    items: u64,
    /// The number of waiting requests of each model.
    queued: BTreeMap<ModelId, u32>,
    keys: BTreeMap<RequestId, Key>,
    running: Option<Running>,
    planned: Option<Planned>,
    /// When the running group began, while the next one is not decided.
    undecided: Option<Time>,
    outputs: VecDeque<OverlapOutput>,
    arrivals: u64,
    drops_in_a_row: u32,
    /// The groups that the margin alone kept small.
    kept_small: u32,
    stats: OverlapStats,
}

type Key = (u64, u64);

#[derive(Debug)]
struct Running {
    group: OperatorGroup,
    since: Time,
    /// The requests that are answered when the group is done.
    ending: Vec<RequestId>,
}

#[derive(Debug)]
struct Planned {
    parts: Vec<GroupPart>,
    predicted: Option<Duration>,
    deadline: Time,
    is_trial: bool,
    /// The group's most urgent request is late, but must not be given up.
    is_late: bool,
}

impl<P: Predictor> Overlap<P> {
    /// A device without models.
    pub fn new(options: OverlapOptions, predictor: P) -> Self {
        Overlap {
            margins: Margins::new(options.error),
            options,
            predictor,
            models: BTreeMap::new(),
            waiting: BTreeMap::new(),
            items: 0,
            queued: BTreeMap::new(),
            keys: BTreeMap::new(),
            running: None,
            planned: None,
            undecided: None,
            outputs: VecDeque::new(),
            arrivals: 0,
            drops_in_a_row: 0,
            kept_small: 0,
            stats: OverlapStats::default(),
        }
    }

    /// The counters so far.
    pub fn stats(&self) -> OverlapStats {
        self.stats
    }

    /// The margins of the predictions.
    pub fn margins(&self) -> &Margins {
        &self.margins
    }

    /// The number of waiting requests. Requests between two of their groups count.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The predictor, for changes. Call [`handle_predictor`](Self::handle_predictor) after a
    /// change.
    pub fn predictor_mut(&mut self) -> &mut P {
        &mut self.predictor
    }

    /// Handles a change of the predictor. `error` is the new predictor's test error, and `at_once`
    /// the most requests of its groups. The latencies of earlier groups are forgotten.
    pub fn handle_predictor(&mut self, now: Time, at_once: usize, error: f64) {
        (self.options.at_once, self.options.error) = (at_once, error);
        self.margins = Margins::new(error);
        self.decide(now);
    }

    /// Changes the order in which requests run.
    pub fn handle_order(&mut self, now: Time, order: GroupOrder) {
        if order == self.options.order {
            return;
        }
        self.options.order = order;
        for ((_, arrival), waiting) in std::mem::take(&mut self.waiting) {
            let key = (self.rank(&waiting), arrival);
            self.keys.insert(waiting.request.id, key);
            self.waiting.insert(key, waiting);
        }
        self.decide(now);
    }

    /// The rank of a request: a lower rank runs sooner.
    fn rank(&self, waiting: &Waiting) -> u64 {
        match self.options.order {
            GroupOrder::Headroom | GroupOrder::Edf => waiting.request.deadline.as_nanos(),
            GroupOrder::Fcfs => 0,
            GroupOrder::Sjf => {
                let takes = self.predictor.predict(&[&[waiting.left()]]).pop().flatten();
                takes.map_or(0, Duration::as_nanos)
            }
        }
    }

    /// Adds a model, or changes it for later requests. `None` removes the model and drops its
    /// requests, except those whose last operators run.
    pub fn handle_model(&mut self, now: Time, model: ModelId, comes: Option<OverlapModel>) {
        if let Some(comes) = comes.filter(|model| model.operators > 0) {
            self.models.insert(model, comes);
        } else if self.models.remove(&model).is_some() {
            let of_it = |(key, waiting): (&Key, &Waiting)| (waiting.request.model == model).then_some(*key);
            let gone: Vec<Key> = self.waiting.iter().filter_map(of_it).collect();
            gone.into_iter().for_each(|key| self.give_up(key, DeviceDrop::Removed));
            self.decide(now);
        }
    }

    /// Handles the arrival of a request. All its items run at once: this control makes no batches.
    ///
    /// # Errors
    /// If its model is unknown, it has no item, its name is taken, or the queue is full.
    pub fn handle_request(&mut self, now: Time, request: &DeviceRequest) -> Result<(), DeviceReject> {
        let is_ending = |running: &Running| running.ending.contains(&request.id);
        let model = *self.models.get(&request.model).ok_or(DeviceReject::NoModel(request.model))?;
        if request.size == 0 {
            return Err(DeviceReject::Empty);
        }
        if self.keys.contains_key(&request.id) || self.running.as_ref().is_some_and(is_ending) {
            return Err(DeviceReject::NameTaken(request.id));
        }
        let bound = self.options.queue_bound;
        if self.items + u64::from(request.size) > u64::from(bound) {
            return Err(DeviceReject::QueueFull { bound });
        }
        let waiting = Waiting { request: *request, next: 0, model };
        let key = (self.rank(&waiting), self.arrivals);
        self.arrivals += 1;
        self.keys.insert(request.id, key);
        self.items += u64::from(request.size);
        *self.queued.entry(request.model).or_default() += 1;
        self.waiting.insert(key, waiting);
        // Behind another request of its model the request changes nothing.
        let is_behind = |planned: &Planned| {
            let of_model = planned.parts.iter().find(|part| part.model == request.model);
            of_model.and_then(|part| self.keys.get(&part.request)).is_some_and(|other| *other < key)
        };
        if self.running.is_none() || !self.planned.as_ref().is_some_and(is_behind) {
            self.decide(now);
        }
        Ok(())
    }

    /// Handles a cancelled request. Its running operators run on.
    pub fn handle_cancel(&mut self, now: Time, request: RequestId) {
        if let Some(running) = &mut self.running {
            running.ending.retain(|ending| *ending != request);
        }
        if let Some(key) = self.keys.get(&request).copied() {
            self.remove(key);
            self.decide(now);
        }
    }

    /// Handles the end of a group; `span` is the time in which the group had the device. The driver
    /// cancels failed requests before this call.
    pub fn handle_completion(&mut self, now: Time, group: GroupId, span: Span) {
        let Some(running) = self.running.take_if(|running| running.group.id == group) else { return };
        if let Some(predicted) = running.group.predicted {
            self.margins.handle_group(running.group.parts.len(), predicted, span.end.since(span.start));
        }
        self.outputs.extend(running.ending.into_iter().map(|request| OverlapOutput::Reply { request }));
        if self.planned.as_ref().is_some_and(|planned| !self.still_suits(now, planned)) {
            self.stats.overtaken += 1;
            self.planned = None;
        }
        match self.planned.take() {
            Some(planned) => self.launch(now, planned, 0),
            None => self.decide(now),
        }
    }

    /// When to call [`handle_timeout`](Self::handle_timeout) once all outputs are carried out: at
    /// once, or never.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.undecided
    }

    /// Decides the next group, once the running group has begun (§6.3). Without this call it is
    /// decided when the device is free.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.undecided.is_some() {
            self.decide(now);
        }
    }

    /// Takes the next decision.
    pub fn poll_output(&mut self) -> Option<OverlapOutput> {
        self.outputs.pop_front()
    }

    /// Decides the next group, and begins it if nothing runs.
    fn decide(&mut self, now: Time) {
        let start = self.running.as_ref().map_or(now, |running| self.ends(now, running));
        let before = self.stats.passes;
        self.undecided = None;
        self.planned = match self.options.order {
            GroupOrder::Headroom => self.plan(start),
            // Lateness is judged when the device is free.
            _ if self.running.is_some() => None,
            _ => self.first_in_time(now),
        };
        if self.running.is_none()
            && let Some(planned) = self.planned.take()
        {
            let waited_for = self.stats.passes - before;
            self.launch(now, planned, waited_for as u32);
        }
    }

    /// The probable end of the running group (equation 3). It is `now` if there is no prediction,
    /// or if the predicted end has passed.
    fn ends(&self, now: Time, running: &Running) -> Time {
        now.max(running.since + running.group.expected.unwrap_or(Duration::ZERO))
    }

    fn still_suits(&self, now: Time, planned: &Planned) -> bool {
        let needed = |predicted| self.margins.needed(planned.parts.len(), predicted);
        let needs = planned.predicted.map_or(Duration::ZERO, needed);
        planned.is_late || now < planned.deadline && (planned.is_trial || now + needs <= planned.deadline)
    }

    /// The first request in the order that is not late, alone. Late requests before it are given
    /// up.
    fn first_in_time(&mut self, now: Time) -> Option<Planned> {
        loop {
            let (key, first) = self.waiting.first_key_value()?;
            let (key, deadline, is_late) = (*key, first.request.deadline, now >= first.request.deadline);
            if !is_late || !first.model.drop {
                let parts = vec![first.left()];
                return Some(Planned { parts, predicted: None, deadline, is_trial: false, is_late });
            }
            self.give_up(key, DeviceDrop::Hopeless);
        }
    }

    /// The group that begins at `start`. Requests that cannot meet their deadline are given up.
    fn plan(&mut self, start: Time) -> Option<Planned> {
        loop {
            let (key, candidates) = self.candidates()?;
            let (deadline, may_drop) =
                self.waiting.get(&key).map(|first| (first.request.deadline, first.model.drop))?;
            let mut headroom = deadline.since(start);
            if headroom == Duration::ZERO && may_drop {
                self.give_up(key, DeviceDrop::Hopeless);
                continue;
            }
            let search =
                GroupSearch { predictor: &self.predictor, margins: Some(&self.margins), ways: self.options.ways };
            let mut found = search.find(&candidates, headroom);
            self.stats.passes += u64::from(found.passes);
            let mut is_trial = false;
            let is_late = found.parts.is_empty() && !may_drop;
            if is_late {
                // The request is late already, so a later end costs nothing.
                headroom = Duration::MAX;
                found = search.find(&candidates, headroom);
                self.stats.passes += u64::from(found.passes);
            }
            if found.parts.is_empty() {
                let most = if self.margins.of(1).is_measured() { DROPS_IN_A_ROW } else { 0 };
                if self.drops_in_a_row < most {
                    self.drops_in_a_row += 1;
                    self.give_up(key, DeviceDrop::Hopeless);
                    continue;
                }
                is_trial = true;
                found.parts = candidates[..1].to_vec();
                found.predicted = self.predictor.predict(&[&found.parts]).pop().flatten();
                self.stats.passes += 1;
            } else if found.parts.len() == 1 && candidates.len() > 1 {
                let search = GroupSearch { margins: None, ..search };
                let by_prediction = search.find(&candidates, headroom);
                self.stats.passes += u64::from(by_prediction.passes);
                if by_prediction.parts.len() > 1 {
                    self.kept_small += 1;
                    is_trial = self.kept_small.is_multiple_of(TRIED_OF);
                    found = if is_trial { by_prediction } else { found };
                }
            }
            if !is_trial {
                self.leave_out(&mut found);
            }
            return Some(Planned { parts: found.parts, predicted: found.predicted, deadline, is_trial, is_late });
        }
    }

    /// Reduces a group to its most urgent request if running side by side saves too little time.
    fn leave_out(&mut self, found: &mut Found) {
        let Some(together) = found.predicted.filter(|_| self.options.worth > 0.0 && found.parts.len() > 1) else {
            return;
        };
        let each: Vec<&[GroupPart]> = found.parts.chunks(1).collect();
        let alone = self.predictor.predict(&each);
        self.stats.passes += 1;
        let in_turn: f64 = alone.iter().flatten().map(|takes| takes.as_secs_f64()).sum();
        if in_turn < together.as_secs_f64() * (1.0 + self.options.worth) {
            found.parts.truncate(1);
            found.predicted = alone.first().copied().flatten();
        }
    }

    /// The remaining operators of each model's most urgent request, and the key of the first
    /// request.
    fn candidates(&self) -> Option<(Key, Vec<GroupPart>)> {
        let first = *self.waiting.keys().next()?;
        let most = self.options.at_once.clamp(1, self.queued.len().max(1));
        let mut parts: Vec<GroupPart> = Vec::with_capacity(most);
        for waiting in self.waiting.values() {
            if parts.iter().any(|part| part.model == waiting.request.model) {
                continue;
            }
            parts.push(waiting.left());
            if parts.len() == most {
                break;
            }
        }
        Some((first, parts))
    }

    fn give_up(&mut self, key: Key, reason: DeviceDrop) {
        if let Some(Waiting { request, .. }) = self.remove(key) {
            self.outputs.push_back(OverlapOutput::Drop { request: request.id, reason });
        }
    }

    fn remove(&mut self, key: Key) -> Option<Waiting> {
        let waiting = self.waiting.remove(&key)?;
        let DeviceRequest { id, model, size, .. } = waiting.request;
        self.keys.remove(&id);
        self.items -= u64::from(size);
        if let Some(queued) = self.queued.get_mut(&model) {
            *queued -= 1;
            self.queued.retain(|_, queued| *queued > 0);
        }
        Some(waiting)
    }

    /// Begins a group.
    fn launch(&mut self, now: Time, planned: Planned, waited_for: u32) {
        let Planned { parts, predicted, deadline, is_trial, .. } = planned;
        let mut ending = Vec::new();
        for GroupPart { request, operators, .. } in &parts {
            let Some(key) = self.keys.get(request).copied() else { continue };
            let Some(waiting) = self.waiting.get_mut(&key) else { continue };
            waiting.next = operators.end;
            if waiting.model.operators == operators.end {
                self.remove(key);
                ending.push(*request);
            }
        }
        let id = GroupId(self.stats.groups);
        self.stats.groups += 1;
        self.stats.together += u64::from(parts.len() > 1);
        self.stats.waited_for += u64::from(waited_for);
        self.drops_in_a_row = 0;
        let expected = predicted.map(|predicted| self.margins.of(parts.len()).expected(predicted));
        let group = OperatorGroup { id, parts, predicted, expected, deadline, waited_for, is_trial };
        self.outputs.push_back(OverlapOutput::Run(group.clone()));
        self.running = Some(Running { group, since: now, ending });
        self.undecided = (!self.waiting.is_empty() && self.options.order == GroupOrder::Headroom).then_some(now);
    }
}
