//! Whether a policy that `auto` chose is better than `exclusive` would have been for the same requests.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::auto::MARGIN;
use super::segment_profile::SegmentProfile;
use crate::ids::RequestId;
use crate::time::{Duration, Time};

/// Requests that are compared at a time.
const WINDOW: usize = 256;
/// So many losses in a row end it.
const LOSSES: u32 = 2;
/// The first requests of a policy are not compared: what the one before it has left is still in its way, and its lanes are cold.
const SETTLING: u64 = 64;
/// Requests after a window's last that are remembered until that has ended.
const BEHIND: usize = 4 * WINDOW;
/// The most of its devices that others may have had: beyond it what is left for a model cannot be told.
const MOST_OTHERS: f64 = 0.98;

/// What `exclusive` would do with the requests.
#[derive(Clone, Debug)]
pub struct GuardOptions {
    /// What its batches take.
    pub profile: SegmentProfile,
    /// The largest of them.
    pub max_batch: u32,
    /// What it takes to hand something over to another thread: a batch to its lane, an answer to who waits for it.
    pub launch: Duration,
    /// Batches that run at once on all devices of the model.
    pub at_once: u32,
    /// Whether requests that cannot make their deadline are given up.
    pub drop: bool,
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GuardEnd {
    /// It was answered.
    Answered,
    /// It was given up, as it could not make its deadline.
    Dropped,
    /// It is not compared: its client left, or its run failed.
    Gone,
}

/// The requests of a window, under the policy and as they would have been under `exclusive`.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct GuardWindow {
    /// Requests that are compared.
    pub requests: u32,
    /// Of these, answered by their deadline.
    pub in_time: u32,
    /// The same under `exclusive`.
    pub exclusive_in_time: u32,
    /// Mean latency of those that both answered in time.
    #[serde(rename = "latency_ns")]
    pub latency: Duration,
    /// The same under `exclusive`.
    #[serde(rename = "exclusive_latency_ns")]
    pub exclusive_latency: Duration,
    /// The share of its devices that other models had meanwhile.
    #[serde(default)]
    pub others: f64,
}

impl GuardWindow {
    /// Whether the policy was worse by more than [`MARGIN`]: answered fewer in time, or took longer for them.
    pub fn is_lost(&self) -> bool {
        let least = f64::from(self.exclusive_in_time) * (1.0 - MARGIN);
        let most = self.exclusive_latency.as_secs_f64() * (1.0 + MARGIN);
        f64::from(self.in_time) < least || self.latency.as_secs_f64() > most
    }
}

impl std::fmt::Display for GuardWindow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "of {} requests {} in time, {:.3} ms on average; exclusive: {}, {:.3} ms",
            self.requests,
            self.in_time,
            self.latency.as_millis_f64(),
            self.exclusive_in_time,
            self.exclusive_latency.as_millis_f64()
        )?;
        if self.others > 0.0 {
            write!(f, ", in what other models leave of the devices ({:.0}%)", (1.0 - self.others) * 100.0)?;
        }
        Ok(())
    }
}

/// Where a guard stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuardState {
    /// The policy stays as long as it does not lose.
    Watching,
    /// It has lost: back to `exclusive`.
    Back,
}

/// What a guard has seen.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct GuardReport {
    /// Where it stands.
    pub state: GuardState,
    /// Windows that were compared.
    pub windows: u64,
    /// Of these, the last that were lost one after the other.
    pub losses: u32,
    /// The last of them.
    pub last: Option<GuardWindow>,
}

/// Compares what becomes of requests with what would have become of them under `exclusive`, window by window.
///
/// `exclusive` runs here as a shadow: the requests of a window come to it when they really came, and it makes a batch of all that wait whenever it has nothing to run, which takes
/// what its profile says. That holds whatever the load is: where the policy is slower, clients that wait for answers send less, with which the shadow is done early; where it is
/// faster, they send more than the shadow can answer, whose queue grows. What was there when a window began is there for the shadow, too. Contention for the cores slows real runs down and the shadow not, so
/// that in doubt the policy loses.
///
/// **Other models.** What they had of its devices during a window the shadow has not: each of its batches takes as much longer as if it got the rest of the device all the time.
/// What they had is told by [`DeviceUse`](super::DeviceUse), which shares the time in which launches of several models ran out among them. So a policy cannot be saved by
/// keeping others' launches from their end: the more of its own run, the less of the time is theirs. Nor is it blamed for what the others' policies do with their part.
///
/// After two windows in a row that were lost it says [`GuardState::Back`], and nothing else: whatever takes its place gets a guard of its own.
#[derive(Debug)]
pub struct AutoGuard {
    options: GuardOptions,
    /// Requests that came before there was a window.
    settling: u64,
    /// Requests that have not ended.
    open: BTreeMap<RequestId, Open>,
    window: Option<OpenWindow>,
    report: GuardReport,
}

#[derive(Debug)]
struct Open {
    arrival: Time,
    deadline: Time,
    rows: u32,
    /// Whether it belongs to the window.
    counts: bool,
}

#[derive(Debug)]
struct OpenWindow {
    begin: Time,
    /// How long its devices had been busy for others then, on average.
    others: Duration,
    shadow: Shadow,
    /// Requests that came.
    came: usize,
    /// Of these, those that have not ended.
    open: usize,
    /// Latencies of those that have, by request; `None`: not in time.
    ended: BTreeMap<RequestId, Option<Duration>>,
}

#[derive(Debug)]
struct ShadowRequest {
    /// `None`: it does not belong to the window.
    request: Option<RequestId>,
    arrival: Time,
    deadline: Time,
    rows: u32,
}

/// `exclusive`, with the requests of a window.
#[derive(Debug)]
struct Shadow {
    waiting: VecDeque<ShadowRequest>,
    /// When each of what it runs on is free.
    free_at: Vec<Time>,
    /// Latencies by request; `None`: not in time.
    ended: BTreeMap<RequestId, Option<Duration>>,
}

impl AutoGuard {
    /// Has seen nothing.
    pub fn new(options: GuardOptions) -> Self {
        let report = GuardReport { state: GuardState::Watching, windows: 0, losses: 0, last: None };
        AutoGuard { options, settling: 0, open: BTreeMap::new(), window: None, report }
    }

    /// What it has seen.
    pub fn report(&self) -> &GuardReport {
        &self.report
    }

    /// A request comes, of so many items. `others` is asked for where a window begins: how long the model's devices have been busy for other models by now,
    /// on average, since whatever time.
    pub fn handle_request(
        &mut self,
        now: Time,
        request: RequestId,
        rows: u32,
        deadline: Time,
        others: impl FnOnce() -> Duration,
    ) {
        if self.report.state == GuardState::Back {
            return;
        }
        if self.settling < SETTLING {
            self.settling += 1;
            self.open.insert(request, Open { arrival: now, deadline, rows, counts: false });
            return;
        }
        let window = self.window.get_or_insert_with(|| {
            let before = self.open.values().fold(0u32, |sum, open| sum.saturating_add(open.rows));
            OpenWindow::new(now, others(), before, &self.options)
        });
        let counts = window.came < WINDOW;
        if counts {
            (window.came, window.open) = (window.came + 1, window.open + 1);
        }
        // What comes after the last of the window is still in the way of those before it.
        if window.shadow.waiting.len() < WINDOW + BEHIND {
            let its = counts.then_some(request);
            window.shadow.waiting.push_back(ShadowRequest { request: its, arrival: now, deadline, rows });
        }
        self.open.insert(request, Open { arrival: now, deadline, rows, counts });
    }

    /// A request has ended; says whether the policy has just lost for good. A request that is not known is nothing new. `others` as of
    /// [`Self::handle_request`], asked for where a window ends.
    pub fn handle_end(
        &mut self,
        now: Time,
        request: RequestId,
        end: GuardEnd,
        others: impl FnOnce() -> Duration,
    ) -> bool {
        let Some(Open { arrival, deadline, counts, .. }) = self.open.remove(&request) else { return false };
        let Some(window) = self.window.as_mut().filter(|_| counts) else { return false };
        window.open -= 1;
        match end {
            GuardEnd::Answered => {
                window.ended.insert(request, (now <= deadline).then(|| now.since(arrival)));
            }
            GuardEnd::Dropped => {
                window.ended.insert(request, None);
            }
            GuardEnd::Gone => {}
        }
        if window.came < WINDOW || window.open > 0 {
            return false;
        }
        let Some(window) = self.window.take() else { return false };
        let compared = window.compare(now, others(), &self.options);
        self.judge(compared)
    }

    fn judge(&mut self, window: GuardWindow) -> bool {
        // Of requests that nearly all went away nothing is learnt.
        if (window.requests as usize) < WINDOW / 2 {
            return false;
        }
        let report = &mut self.report;
        report.windows += 1;
        report.losses = if window.is_lost() { report.losses + 1 } else { 0 };
        report.last = Some(window);
        if report.losses < LOSSES {
            return false;
        }
        report.state = GuardState::Back;
        self.open.clear();
        true
    }
}

impl OpenWindow {
    fn new(now: Time, others: Duration, before: u32, options: &GuardOptions) -> Self {
        let max_batch = options.max_batch.max(1);
        let there = |rows| ShadowRequest { request: None, arrival: now, deadline: Time::MAX, rows };
        let full = (0..before / max_batch).map(|_| there(max_batch));
        let waiting = full.chain((!before.is_multiple_of(max_batch)).then(|| there(before % max_batch))).collect();
        let free_at = vec![now; options.at_once.max(1) as usize];
        let shadow = Shadow { waiting, free_at, ended: BTreeMap::new() };
        OpenWindow { begin: now, others, shadow, came: 0, open: 0, ended: BTreeMap::new() }
    }

    /// The window ends, and its devices have been busy for others so long by now.
    fn compare(mut self, now: Time, others: Duration, options: &GuardOptions) -> GuardWindow {
        let others = others.saturating_sub(self.others).as_secs_f64() / now.since(self.begin).as_secs_f64().max(1e-9);
        let others = others.min(MOST_OTHERS);
        self.shadow.run(1.0 - others, options);
        let mut found = GuardWindow { others, ..GuardWindow::default() };
        let (mut sum, mut exclusive_sum, mut both) = (0u128, 0u128, 0u128);
        for (request, latency) in &self.ended {
            let shadow = self.shadow.ended.get(request).copied().flatten();
            found.requests += 1;
            found.in_time += u32::from(latency.is_some());
            found.exclusive_in_time += u32::from(shadow.is_some());
            if let (Some(latency), Some(shadow)) = (latency, shadow) {
                both += 1;
                sum += u128::from(latency.as_nanos());
                exclusive_sum += u128::from(shadow.as_nanos());
            }
        }
        let mean = |sum: u128| Duration::from_nanos(u64::try_from(sum / both.max(1)).unwrap_or(u64::MAX));
        (found.latency, found.exclusive_latency) = (mean(sum), mean(exclusive_sum));
        found
    }
}

impl Shadow {
    /// Runs all that waits, with so much of its devices.
    fn run(&mut self, left: f64, options: &GuardOptions) {
        let takes =
            |rows| Duration::from_secs_f64(options.profile.total(rows, 0).as_secs_f64() / left) + options.launch;
        while let Some(first) = self.waiting.front() {
            let Some(free) = self.free_at.iter_mut().min() else { return };
            let begin = (*free).max(first.arrival);
            let (mut rows, mut members) = (0u32, Vec::new());
            while let Some(next) = self.waiting.front() {
                let is_hopeless = options.drop && begin + takes(next.rows) > next.deadline;
                let is_full = rows > 0 && rows.saturating_add(next.rows) > options.max_batch;
                if next.arrival > begin || is_full && !is_hopeless {
                    break;
                }
                let Some(next) = self.waiting.pop_front() else { break };
                if is_hopeless {
                    self.ended.extend(next.request.map(|request| (request, None)));
                    continue;
                }
                rows = rows.saturating_add(next.rows);
                members.push(next);
            }
            if rows == 0 {
                continue;
            }
            let end = begin + takes(rows);
            *free = end;
            let answered = end + options.launch;
            for ShadowRequest { request, arrival, deadline, .. } in members {
                let latency = (answered <= deadline).then(|| answered.since(arrival));
                self.ended.extend(request.map(|request| (request, latency)));
            }
        }
    }
}
