//! A judge of the rules that frontends, schedulers and backends must keep.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use downbeat_core::{Duration, Time};
use downbeat_roles::{BatchKey, Epoch, Frame, Member, Message, NodeId, Outcome, RequestEnd, RequestKey};

use super::streams;

/// A broken rule. Only the first one of a run counts: the others may be its consequences.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Broken {
    /// The time since the run's begin.
    pub at: Time,
    /// The name of the rule.
    pub rule: &'static str,
    /// The event that broke the rule.
    pub what: String,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Asked {
    at: Time,
    deadline: Time,
    input: u64,
    may_repeat: bool,
    /// False while its frontend makes its inputs.
    is_ready: bool,
    /// True once the request was answered, or its client has gone.
    is_over: bool,
    /// The number of times that it has begun to run.
    runs: u32,
    /// The number of its streamed answers that have come.
    answers: u64,
    /// No more streamed answers may come.
    has_last: bool,
    /// The places where it runs, with the start of each run.
    running: Vec<(NodeId, BatchKey, Time)>,
    /// The batches that its inputs were sent to, with the most time that was left then.
    inputs: Vec<(BatchKey, Duration)>,
}

/// Watches all processes by one clock, and reports broken rules:
///
/// - *ends once*: each request that a frontend was asked ends exactly once, unless its client has
///   gone or its frontend is dead, and with its own answer;
/// - *epochs grow*: a backend obeys no lower epoch than before, and no slot begins a batch of a
///   lower epoch than before;
/// - *one backend*: a request runs in two places at once only if its frontend and one of the two
///   places have lost each other;
/// - *one run*: a request runs twice only if its model may repeat requests;
/// - *answers in order*: the answers of a decoupled model come once and in order, until the last
///   answer or the loss of the backend. After the first answer no later batch gets the inputs of
///   the request;
/// - *inputs are ready*: no request runs before its frontend has made its inputs;
/// - *budgets shrink*: no process states, or is given, more time than is left until the client's
///   deadline, or more than was stated before;
/// - *own epochs*: where a store allots epochs, no two schedulers lead in epochs of the same
///   number;
/// - *losses have causes*: a request ends as lost only if a process has lost another one since the
///   request was asked;
/// - *nothing waits*: once all faults are mended, every request ends, and no process keeps any
///   state of a request.
///
/// The rules of models that move are in `copies.rs`.
#[derive(Debug)]
pub struct NetworkJudge {
    has_store: bool,
    /// The longest time between a backend's claim of a request and the start of its run.
    claimed_before: Duration,
    requests: HashMap<RequestKey, Asked>,
    /// Requests of living frontends that have not ended.
    open: BTreeSet<RequestKey>,
    /// Requests of living frontends that have ended, and whose last streamed answer has not come.
    streaming: BTreeSet<RequestKey>,
    obeyed: BTreeMap<NodeId, Epoch>,
    slots: BTreeMap<(NodeId, u32), Epoch>,
    led: BTreeMap<u64, NodeId>,
    /// By frontend and backend: the time when the two last lost each other.
    lost: BTreeMap<(NodeId, NodeId), Time>,
    /// When any two processes last lost each other.
    last_lost: Option<Time>,
    repeated: u64,
    broken: Option<Broken>,
}

impl NetworkJudge {
    /// Makes the judge of a run with or without a store that allots epochs. `claimed_before`: the
    /// longest time between a backend's claim of a request and the start of its run.
    pub fn new(has_store: bool, claimed_before: Duration) -> Self {
        NetworkJudge {
            has_store,
            claimed_before,
            requests: HashMap::new(),
            open: BTreeSet::new(),
            streaming: BTreeSet::new(),
            obeyed: BTreeMap::new(),
            slots: BTreeMap::new(),
            led: BTreeMap::new(),
            lost: BTreeMap::new(),
            last_lost: None,
            repeated: 0,
            broken: None,
        }
    }

    /// Returns how often a request began to run again.
    pub fn repeated(&self) -> u64 {
        self.repeated
    }

    /// Returns the first rule that was broken.
    pub fn broken(&self) -> Option<&Broken> {
        self.broken.as_ref()
    }

    /// Returns the number of requests of living frontends that are open, or wait for answers.
    pub fn open(&self) -> usize {
        self.open.len() + self.streaming.len()
    }

    /// Returns the number of open requests of living frontends that have no deadline.
    pub fn open_without_deadline(&self) -> u64 {
        let has_none =
            |request: &&RequestKey| self.requests.get(request).is_some_and(|asked| asked.deadline == Time::MAX);
        self.open.iter().filter(has_none).count() as u64
    }

    /// Records that a rule is broken.
    pub fn breaks(&mut self, at: Time, rule: &'static str, what: impl FnOnce() -> String) {
        if self.broken.is_none() {
            self.broken = Some(Broken { at, rule, what: what() });
        }
    }

    /// Records that a client asks.
    pub fn asked(&mut self, now: Time, request: RequestKey, deadline: Time, input: u64, may_repeat: bool) {
        let (running, inputs) = (Vec::new(), Vec::new());
        let (is_ready, is_over, runs, answers, has_last) = (true, false, 0, 0, false);
        let asked =
            Asked { at: now, deadline, input, may_repeat, is_ready, is_over, runs, answers, has_last, running, inputs };
        self.open.insert(request);
        if self.requests.insert(request, asked).is_some() {
            self.breaks(now, "ends once", || format!("{request:?} is the name of two requests"));
        }
    }

    /// Records that a frontend begins to make the inputs of a request.
    pub fn announced(&mut self, request: RequestKey) {
        if let Some(asked) = self.requests.get_mut(&request) {
            asked.is_ready = false;
        }
    }

    /// Records that the inputs of a request are ready.
    pub fn ready(&mut self, request: RequestKey) {
        if let Some(asked) = self.requests.get_mut(&request) {
            asked.is_ready = true;
        }
    }

    /// Records that a client has gone. Returns true if its request was open.
    pub fn cancelled(&mut self, request: RequestKey) -> bool {
        self.open.remove(&request);
        self.streaming.remove(&request);
        let Some(asked) = self.requests.get_mut(&request) else { return false };
        asked.has_last = true;
        !std::mem::replace(&mut asked.is_over, true)
    }

    /// Records one of the answers to a request. `answer`: its tensors.
    pub fn streamed(&mut self, now: Time, request: RequestKey, answer: Option<u64>, is_last: bool) {
        let rule = "answers in order";
        let Some(asked) = self.requests.get_mut(&request) else {
            return self.breaks(now, rule, || format!("{request:?}, which nobody asked, has an answer"));
        };
        let (had_last, due) = (asked.has_last, streams::answer(asked.input, asked.answers));
        asked.answers += u64::from(answer.is_some());
        asked.has_last |= is_last;
        if is_last {
            self.streaming.remove(&request);
        }
        if had_last {
            self.breaks(now, rule, || format!("{request:?} has an answer after its last one, or without a client"));
        }
        if let Some(answer) = answer.filter(|answer| *answer != due) {
            self.breaks(now, rule, || format!("{request:?} has the answer {answer:#x} in the place of {due:#x}"));
        }
    }

    /// Records that a frontend gives up the answers to a request, whose backend it has lost.
    pub fn stream_lost(&mut self, now: Time, request: RequestKey) {
        let was_open = self.streaming.remove(&request);
        let Some(asked) = self.requests.get_mut(&request) else { return };
        let (asked_at, had_last) = (asked.at, std::mem::replace(&mut asked.has_last, true));
        if !was_open || had_last {
            self.breaks(now, "answers in order", || format!("{request:?} waits for no answer, and is given up"));
        }
        if self.last_lost.is_none_or(|lost| lost < asked_at) {
            self.breaks(now, "losses have causes", || format!("the answers to {request:?} are lost without a loss"));
        }
    }

    /// Records that a frontend ends a request. Returns true if it ends in time.
    pub fn ended(&mut self, now: Time, request: RequestKey, end: &RequestEnd<u64>) -> bool {
        self.open.remove(&request);
        let Some(asked) = self.requests.get_mut(&request) else {
            self.breaks(now, "ends once", || format!("{request:?}, which nobody asked, ends: {end:?}"));
            return false;
        };
        let was_over = std::mem::replace(&mut asked.is_over, true);
        match end {
            RequestEnd::Ran(Outcome::Streamed, _) if !asked.has_last => drop(self.streaming.insert(request)),
            _ => asked.has_last = true,
        }
        let (asked_at, deadline, input, runs) = (asked.at, asked.deadline, asked.input, asked.runs);
        if was_over {
            self.breaks(now, "ends once", || format!("{request:?} ends once more, or without a client: {end:?}"));
        }
        match end {
            RequestEnd::Ran(outcome, _) => {
                if let Outcome::Outputs(outputs) = outcome
                    && *outputs != input
                {
                    self.breaks(now, "ends once", || format!("{request:?} gets the answer of another"));
                }
                if runs == 0 {
                    self.breaks(now, "ends once", || format!("{request:?} has an answer and did not run"));
                }
            }
            RequestEnd::TooLate if now < deadline => {
                self.breaks(now, "ends once", || {
                    format!("{request:?} of {asked_at:?} is too late before its deadline {deadline:?}")
                });
            }
            RequestEnd::Lost if self.last_lost.is_none_or(|lost| lost < asked_at) => {
                self.breaks(now, "losses have causes", || {
                    format!("{request:?} of {asked_at:?} is lost, and no process has lost another since then")
                });
            }
            _ => {}
        }
        now <= deadline
    }

    /// Records a process's message. A request's number in the message is the sender's, a
    /// frontend's.
    pub fn sent(&mut self, now: Time, frame: &Frame<u64>) {
        for message in &frame.messages {
            match message {
                Message::Requests(requests) => {
                    for handed in requests {
                        self.check_left(now, RequestKey { frontend: frame.from, number: handed.number }, handed.left);
                    }
                }
                Message::Inputs { batch, granted, .. } => {
                    for (number, left, _) in granted {
                        let request = RequestKey { frontend: frame.from, number: *number };
                        self.check_left(now, request, *left);
                        let Some(asked) = self.requests.get_mut(&request) else { continue };
                        match asked.inputs.iter_mut().find(|(to, _)| to == batch) {
                            Some((_, before)) => *before = (*before).max(*left),
                            None => {
                                // Inputs of an earlier batch may have waited on a link.
                                let is_new = asked.inputs.iter().all(|(to, _)| to < batch);
                                let runs_again = is_new && asked.answers > 0;
                                asked.inputs.push((*batch, *left));
                                if runs_again {
                                    let what = || format!("{request:?} is to run again after an answer");
                                    self.breaks(now, "answers in order", what);
                                }
                            }
                        }
                    }
                }
                _ => {}
            }
        }
    }

    fn check_left(&mut self, now: Time, request: RequestKey, left: Duration) {
        let Some(deadline) = self.requests.get(&request).map(|asked| asked.deadline) else {
            self.breaks(now, "ends once", || format!("{request:?}, which nobody asked, is handed on"));
            return;
        };
        let most = if deadline == Time::MAX { Duration::MAX } else { deadline.since(now) };
        if left > most || (left == Duration::MAX) != (most == Duration::MAX) {
            self.breaks(now, "budgets shrink", || format!("{request:?} has {most:?} left, and is given {left:?}"));
        }
    }

    /// Records that a backend begins a batch: each member with its inputs, and the time left by the
    /// backend's clock.
    pub fn begins(
        &mut self,
        now: Time,
        (backend, slot): (NodeId, u32),
        batch: BatchKey,
        members: &[Member<u64>],
        local: Time,
    ) {
        let last = self.slots.entry((backend, slot)).or_insert(Epoch::NONE);
        if batch.epoch < *last {
            let last = *last;
            self.breaks(now, "epochs grow", || format!("slot {slot} of {backend:?} begins {batch:?} after {last:?}"));
        } else {
            *last = batch.epoch;
        }
        if members.is_empty() {
            self.breaks(now, "one backend", || format!("{batch:?} runs without members"));
        }
        for member in members {
            self.member_begins(now, backend, batch, member, local);
        }
    }

    fn member_begins(&mut self, now: Time, backend: NodeId, batch: BatchKey, member: &Member<u64>, local: Time) {
        let request = member.request;
        let Some(asked) = self.requests.get_mut(&request) else {
            self.breaks(now, "ends once", || format!("{request:?}, which nobody asked, runs"));
            return;
        };
        asked.runs += 1;
        let is_ready = asked.is_ready;
        self.repeated += u64::from(asked.runs > 1);
        let said = asked.inputs.iter().find(|(to, _)| *to == batch).map(|(_, left)| *left);
        let left = if member.deadline == Time::MAX { Duration::MAX } else { member.deadline.since(local) };
        let is_wrong_input = asked.input != member.payload;
        let is_second = asked.runs > 1 && !asked.may_repeat;
        let earliest = Time::from_nanos(
            asked
                .running
                .first()
                .map_or(now, |(.., since)| *since)
                .as_nanos()
                .saturating_sub(self.claimed_before.as_nanos()),
        );
        let others: Vec<NodeId> = asked.running.iter().map(|(other, ..)| *other).collect();
        asked.running.push((backend, batch, now));
        if said.is_none_or(|said| left > said) {
            self.breaks(now, "budgets shrink", || format!("{request:?} runs with {left:?} left, of {said:?}"));
        }
        if !is_ready {
            self.breaks(now, "inputs are ready", || format!("{request:?} runs before its inputs are ready"));
        }
        if is_wrong_input {
            self.breaks(now, "ends once", || format!("{request:?} runs with inputs of another"));
        }
        if is_second {
            self.breaks(now, "one backend", || format!("{request:?} runs twice, and its model must not"));
        }
        // The frontend may have lost either of the two: the place that goes on without its frontend
        // may begin later.
        let lost_since = |peer: NodeId| self.lost.get(&(request.frontend, peer)).is_some_and(|lost| *lost >= earliest);
        let is_both_had = |other: &NodeId| !lost_since(*other) && !lost_since(backend);
        if let Some(other) = others.into_iter().find(is_both_had) {
            self.breaks(now, "one backend", || format!("{request:?} runs on {other:?} and on {backend:?} at once"));
        }
    }

    /// Records that a backend is done with a batch.
    pub fn is_done(&mut self, backend: NodeId, batch: BatchKey, members: &[RequestKey]) {
        for request in members {
            if let Some(asked) = self.requests.get_mut(request) {
                asked.running.retain(|(at, of, _)| (*at, *of) != (backend, batch));
            }
        }
    }

    /// Records that a backend obeys a scheduler.
    pub fn obeys(&mut self, now: Time, backend: NodeId, epoch: Epoch) {
        let last = self.obeyed.entry(backend).or_insert(Epoch::NONE);
        if epoch < *last {
            let last = *last;
            self.breaks(now, "epochs grow", || format!("{backend:?} obeys {epoch:?} after {last:?}"));
        } else {
            *last = epoch;
        }
    }

    /// Records that a scheduler leads.
    pub fn leads(&mut self, now: Time, scheduler: NodeId, epoch: Epoch) {
        let other = self.led.insert(epoch.number, scheduler).filter(|other| *other != scheduler);
        if let Some(other) = other
            && self.has_store
        {
            self.breaks(now, "own epochs", || format!("{scheduler:?} leads in {epoch:?} as {other:?} did"));
        }
    }

    /// Records that one of two processes has lost the other.
    pub fn lost(&mut self, now: Time, a: NodeId, b: NodeId) {
        self.last_lost = Some(now);
        self.lost.insert((a, b), now);
        self.lost.insert((b, a), now);
    }

    /// Records that a process is dead. Returns the number of requests that died with it.
    pub fn died(&mut self, process: NodeId) -> u64 {
        let from = RequestKey { frontend: process, number: 0 };
        let to = RequestKey { frontend: process, number: u64::MAX };
        let dead: Vec<RequestKey> = self.open.range(from..=to).copied().collect();
        for request in &dead {
            self.open.remove(request);
        }
        self.streaming.retain(|request| request.frontend != process);
        dead.len() as u64
    }

    /// Ends the run, long after all faults were mended.
    pub fn finish(&mut self, now: Time) {
        let open = self.open.len();
        if let Some(request) = self.open.first().copied() {
            self.breaks(now, "nothing waits", || format!("{open} requests have not ended, {request:?} among them"));
        }
    }
}
