//! Compares a policy that `auto` chose with `exclusive` on the same requests.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::auto::MARGIN;
use super::segment_profile::SegmentProfile;
use crate::ids::RequestId;
use crate::time::{Duration, Time};

/// The requests of a window.
const WINDOW: usize = 256;
/// A policy has lost for good after this many lost windows in a row.
const LOSSES: u32 = 2;
/// The first requests of a policy are not compared. Leftovers of the policy before it are still in
/// its way, and its lanes are cold.
const SETTLING: u64 = 64;
/// The most requests after a window's last that the guard remembers until the window has ended.
const BEHIND: usize = 4 * WINDOW;
/// The largest share of a model's devices that other models may have. Beyond this share the rest
/// cannot be told reliably.
const MOST_OTHERS: f64 = 0.98;

/// How `exclusive` would treat the requests.
#[derive(Clone, Debug)]
pub struct GuardOptions {
    /// The latencies of the batches of `exclusive`.
    pub profile: SegmentProfile,
    /// The largest batch, in items.
    pub max_batch: u32,
    /// The time to hand something over to another thread: a batch to its lane, or an answer to the
    /// client's thread.
    pub launch: Duration,
    /// The batches that run at once on all devices of the model.
    pub at_once: u32,
    /// Whether requests that cannot meet their deadline are given up.
    pub drop: bool,
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GuardEnd {
    /// The request was answered.
    Answered,
    /// The request was given up because it could not meet its deadline.
    Dropped,
    /// The request is not compared, because its client left or its run failed.
    Gone,
}

/// The outcome of a window's requests under the policy, and in the simulation of `exclusive`.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct GuardWindow {
    /// The requests that are compared.
    pub requests: u32,
    /// The compared requests that were answered by their deadline.
    pub in_time: u32,
    /// The compared requests that `exclusive` would have answered by their deadline.
    pub exclusive_in_time: u32,
    /// The policy's mean latency over the requests that both answered in time.
    #[serde(rename = "latency_ns")]
    pub latency: Duration,
    /// The mean latency of `exclusive` over the same requests.
    #[serde(rename = "exclusive_latency_ns")]
    pub exclusive_latency: Duration,
    /// The share of the model's devices that other models had during the window.
    #[serde(default)]
    pub others: f64,
}

impl GuardWindow {
    /// Whether the policy was worse by more than [`MARGIN`]: it answered fewer requests in time, or
    /// its mean latency was longer.
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

/// The state of a guard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuardState {
    /// The policy has not lost so far and stays.
    Watching,
    /// The policy has lost: the model goes back to `exclusive`.
    Back,
}

/// The windows that a guard has compared, and its verdict.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct GuardReport {
    /// The guard's state.
    pub state: GuardState,
    /// The windows that were compared.
    pub windows: u64,
    /// The latest windows that were lost in a row.
    pub losses: u32,
    /// The latest window.
    pub last: Option<GuardWindow>,
}

/// Compares the outcome of requests with their outcome under `exclusive`, window by window.
///
/// The guard simulates `exclusive` as a shadow. The requests of a window reach the shadow at their
/// real arrival times. Whenever the shadow is free, it makes one batch of all waiting requests,
/// which takes the time of the profile. This comparison holds at any load. If the policy is slower,
/// clients that wait for answers send less, and the shadow is done early. If the policy is faster,
/// clients send more than the shadow can answer, and its queue grows. Requests that waited when a
/// window began also wait for the shadow. Contention for cores slows real runs but not the shadow.
/// So in doubt the guard decides against the policy.
///
/// **Other models.** The shadow does not get the device time that other models had during a window.
/// Each of its batches takes longer, as if the batch got the rest of the device all the time.
/// [`DeviceUse`](super::DeviceUse) tells the others' time: models with concurrent launches share
/// that time evenly. A policy gains nothing by delaying others' launches, as its own launches then
/// take part of the time. The policy also takes no blame for how other models' policies use their
/// part.
///
/// After two lost windows in a row the guard's state is [`GuardState::Back`] for good. The next
/// policy gets a guard of its own.
#[derive(Debug)]
pub struct AutoGuard {
    options: GuardOptions,
    /// The requests that came before the first window.
    settling: u64,
    /// The requests that have not ended.
    open: BTreeMap<RequestId, Open>,
    window: Option<OpenWindow>,
    report: GuardReport,
}

#[derive(Debug)]
struct Open {
    arrival: Time,
    deadline: Time,
    rows: u32,
    /// Whether the request belongs to the window.
    counts: bool,
}

#[derive(Debug)]
struct OpenWindow {
    begin: Time,
    /// The time that the model's devices had been busy for other models when the window began, on
    /// average.
    others: Duration,
    shadow: Shadow,
    /// The requests that came.
    came: usize,
    /// The requests of the window that have not ended.
    open: usize,
    /// The latencies of ended requests; `None`: not in time.
    ended: BTreeMap<RequestId, Option<Duration>>,
}

#[derive(Debug)]
struct ShadowRequest {
    /// `None`: the request does not belong to the window.
    request: Option<RequestId>,
    arrival: Time,
    deadline: Time,
    rows: u32,
}

/// The simulation of `exclusive` on the requests of a window.
#[derive(Debug)]
struct Shadow {
    waiting: VecDeque<ShadowRequest>,
    /// When each place for a running batch is free; there are [`GuardOptions::at_once`] places.
    free_at: Vec<Time>,
    /// The latencies of ended requests; `None`: not in time.
    ended: BTreeMap<RequestId, Option<Duration>>,
}

impl AutoGuard {
    /// A guard that has seen no request.
    pub fn new(options: GuardOptions) -> Self {
        let report = GuardReport { state: GuardState::Watching, windows: 0, losses: 0, last: None };
        AutoGuard { options, settling: 0, open: BTreeMap::new(), window: None, report }
    }

    /// The windows so far and the verdict.
    pub fn report(&self) -> &GuardReport {
        &self.report
    }

    /// Handles the arrival of a request of `rows` items. When a window begins, it calls `others`:
    /// the time that the model's devices have been busy for other models, on average. The origin of
    /// that time is arbitrary.
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
        // Requests after the window's last are still in the way of those before them.
        if window.shadow.waiting.len() < WINDOW + BEHIND {
            let its = counts.then_some(request);
            window.shadow.waiting.push_back(ShadowRequest { request: its, arrival: now, deadline, rows });
        }
        self.open.insert(request, Open { arrival: now, deadline, rows, counts });
    }

    /// Handles the end of a request. Returns true if the policy has just lost for good. An unknown
    /// request is ignored. When a window ends, it calls `others`, as [`Self::handle_request`] does.
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
        // A window in which nearly all requests went away teaches nothing.
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

    /// Ends the window. `others` is the time that the model's devices have been busy for other
    /// models by now.
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
    /// Runs all waiting requests with the share `left` of the devices.
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
