//! The control of groups of operators by headroom.

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

/// So many requests given up in a row, with no group between them, and the next is run all the same: a predictor that has gone wrong would otherwise give up all, and
/// nothing would show it. None before the predictor was seen to be right about requests alone.
const DROPS_IN_A_ROW: u32 = 8;
/// Of so many groups that the margin alone kept from being larger, one is run by the prediction as it is, so that a predictor that has become right is found out.
const TRIED_OF: u32 = 64;

/// How groups are made.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct OverlapOptions {
    /// How many groups the predictor is asked for at a time (Abacus §7.7: 4).
    pub ways: usize,
    /// The relative error that the predictor was below for 95% of the samples that it was tested with.
    pub error: f64,
    /// The most requests of a group.
    pub at_once: usize,
    /// How much time requests have to save by running side by side, as a share of what they take then, to be in a group; 0: they may lose some, too, as in Abacus. 10% is ours: on the emulated A100 groups
    /// that save less cost more than they bring (`lab/docs/abacus.md`).
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

/// What is decided.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OverlapOutput {
    /// Begin these operators together, keep what is between them, and call [`Overlap::handle_completion`] when all are done.
    Run(OperatorGroup),
    /// All operators of the request are done: answer it.
    Reply {
        /// The request.
        request: RequestId,
    },
    /// The request will not be answered; what is kept of it can go.
    Drop {
        /// The request.
        request: RequestId,
        /// Why.
        reason: DeviceDrop,
    },
}

/// What was done since the beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct OverlapStats {
    /// Groups.
    pub groups: u64,
    /// Of these, of several requests.
    pub together: u64,
    /// How often the predictor was asked.
    pub passes: u64,
    /// How often while the device had nothing to run.
    pub waited_for: u64,
    /// Groups that were decided in time, and did not suit any more when the device was free.
    pub overtaken: u64,
}

/// Which operators of which requests run next on a device that models share (Abacus §6).
///
/// **Headroom** (§6.2, equation 2): the time until a request's deadline; what it waited, what was copied and what has run is in it. The request with the least goes first. All that is left of it is in
/// the next group, and of others, one of each model, as many operators as the prediction says that it has room for. Who cannot make it even alone is given up.
///
/// **Beside the running group** the next one is decided (§6.3): the headroom is that at the predicted end (equation 3). It is decided when the outputs of the one that begins are carried out
/// ([`handle_timeout`](Self::handle_timeout)), again where a request comes that belongs into it, or if the group before it took so long that it does not suit any more.
///
/// **Margin** (ours): predictions are taken for what groups before took that were predicted as long. Several requests run together only if 95% of such groups would be in time; one is given up only if half
/// of such would not. So a predictor that is wrong by a factor costs groups, and no deadlines: it is found out within eight groups.
///
/// **Contract.** Time never goes back. After each `handle_*` call [`poll_output`](Self::poll_output) until it gives nothing, carry the outputs out, and then do what
/// [`poll_timeout`](Self::poll_timeout) says. At most one group runs; it is answered by one [`handle_completion`](Self::handle_completion). Events of requests, models and groups that are not there are
/// ignored. Same calls, same decisions.
#[derive(Debug)]
pub struct Overlap<P> {
    options: OverlapOptions,
    predictor: P,
    margins: Margins,
    models: BTreeMap<ModelId, OverlapModel>,
    /// In their order, then as they came.
    waiting: BTreeMap<Key, Waiting>,
    /// Their items.
    items: u64,
    /// How many of each model there are among them.
    queued: BTreeMap<ModelId, u32>,
    keys: BTreeMap<RequestId, Key>,
    running: Option<Running>,
    planned: Option<Planned>,
    /// A group has begun, and what follows it is not decided; since when.
    undecided: Option<Time>,
    outputs: VecDeque<OverlapOutput>,
    arrivals: u64,
    drops_in_a_row: u32,
    /// Groups that the margin alone kept small.
    kept_small: u32,
    stats: OverlapStats,
}

type Key = (u64, u64);

#[derive(Debug)]
struct Running {
    group: OperatorGroup,
    since: Time,
    /// Who is answered when it is done.
    ending: Vec<RequestId>,
}

#[derive(Debug)]
struct Planned {
    parts: Vec<GroupPart>,
    predicted: Option<Duration>,
    deadline: Time,
    is_trial: bool,
    /// Its most urgent request is late, and is not given up.
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

    /// What was done so far.
    pub fn stats(&self) -> OverlapStats {
        self.stats
    }

    /// How far predictions are trusted.
    pub fn margins(&self) -> &Margins {
        &self.margins
    }

    /// How many requests wait, those that have begun and are not in the last of their groups among them.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// What says how long groups take, to be changed: then say so by [`handle_predictor`](Self::handle_predictor).
    pub fn predictor_mut(&mut self) -> &mut P {
        &mut self.predictor
    }

    /// The predictor is another from now on, which had this error when it was tested and knows groups of so many requests. What the former's groups took is forgotten.
    pub fn handle_predictor(&mut self, now: Time, at_once: usize, error: f64) {
        (self.options.at_once, self.options.error) = (at_once, error);
        self.margins = Margins::new(error);
        self.decide(now);
    }

    /// Requests run in another order from now on.
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

    /// The less, the sooner it runs.
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

    /// A model comes, or changes for what comes from now on; `None`: it goes, and its requests with it, but for those whose last operators run.
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

    /// A request has come. All its items run at once: what batches are made of is another's.
    ///
    /// # Errors
    /// If its model is not there, it has no item, its name is taken, or as many items wait as may.
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
        // Behind one of its model it changes nothing.
        let is_behind = |planned: &Planned| {
            let of_model = planned.parts.iter().find(|part| part.model == request.model);
            of_model.and_then(|part| self.keys.get(&part.request)).is_some_and(|other| *other < key)
        };
        if self.running.is_none() || !self.planned.as_ref().is_some_and(is_behind) {
            self.decide(now);
        }
        Ok(())
    }

    /// Nobody wants the answer any more. What runs of it runs on.
    pub fn handle_cancel(&mut self, now: Time, request: RequestId) {
        if let Some(running) = &mut self.running {
            running.ending.retain(|ending| *ending != request);
        }
        if let Some(key) = self.keys.get(&request).copied() {
            self.remove(key);
            self.decide(now);
        }
    }

    /// A group is done, and had the device so long. What has failed of it was cancelled before.
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

    /// When to call [`handle_timeout`](Self::handle_timeout) once all outputs are carried out: at once, or not at all.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.undecided
    }

    /// What runs has begun: decides what is next (§6.3). Where nobody says so it is decided when the device is free.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.undecided.is_some() {
            self.decide(now);
        }
    }

    /// The next decision.
    pub fn poll_output(&mut self) -> Option<OverlapOutput> {
        self.outputs.pop_front()
    }

    /// Decides what is next, and begins it if nothing runs.
    fn decide(&mut self, now: Time) {
        let start = self.running.as_ref().map_or(now, |running| self.ends(now, running));
        let before = self.stats.passes;
        self.undecided = None;
        self.planned = match self.options.order {
            GroupOrder::Headroom => self.plan(start),
            // Who is late is seen when the device is free.
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

    /// When what runs will probably be done (equation 3); at once if nobody knows, or if it should be already.
    fn ends(&self, now: Time, running: &Running) -> Time {
        now.max(running.since + running.group.expected.unwrap_or(Duration::ZERO))
    }

    fn still_suits(&self, now: Time, planned: &Planned) -> bool {
        let needed = |predicted| self.margins.needed(planned.parts.len(), predicted);
        let needs = planned.predicted.map_or(Duration::ZERO, needed);
        planned.is_late || now < planned.deadline && (planned.is_trial || now + needs <= planned.deadline)
    }

    /// The first in its turn that is not late, alone; gives up those before it.
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

    /// The group that begins at `start`; gives up who cannot make it.
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
                // Nothing makes it later than it matters.
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

    /// Leaves out of a group all but the most urgent request if it is not worth while.
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

    /// What is left of the most urgent request of each model, and the first's place.
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
