//! The answer to `GET /v2/live`: what a server does now, for the page `/ui` and for terminals.
//!
//! Counts run from the start of the server. A reader that asks once a second gets rates from the
//! differences. The history has the share of requests in time of the last hour, so that a reader that
//! has just come has it too.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};

use downbeat_core::{Duration, Time};
use serde::{Deserialize, Serialize};

use crate::clock::Clock;
use crate::metrics::trouble::Counts;
use crate::metrics::{batch_bounds, latency_bounds_ms};
use crate::unanswered::Unanswered;

/// The length of a part of the history.
pub const PART: Duration = Duration::from_millis(10_000);
/// Parts that are remembered: an hour.
pub const PARTS: usize = 360;
/// Versions of models with a history. The memory is at most 3 MiB.
const MOST_VERSIONS: usize = 256;

/// The answer of `GET /v2/live`.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct LiveReport {
    /// The name of the server.
    pub server: String,
    /// The version of Downbeat.
    pub version: Cow<'static, str>,
    /// Now, milliseconds since 1970.
    pub wall_ms: u64,
    /// Now, nanoseconds of the server's clock, as in `GET /v2/timeline`.
    pub now_ns: u64,
    /// Upper bounds of [`LiveModel::latency`], milliseconds; the last part has no bound.
    pub latency_bounds_ms: Vec<f64>,
    /// Upper bounds of [`LiveModel::batches`], items; the last part has no bound.
    pub batch_bounds: Vec<f64>,
    /// Models and ensembles, by version.
    pub models: Vec<LiveModel>,
    /// By device: seconds in which it was busy.
    pub device_busy_s: Vec<f64>,
    /// The tenants by name, and then the others; empty: there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<LiveTenant>,
    /// How long a part of [`LiveModel::history`] is, seconds.
    pub history_part_s: f64,
    /// Whether `GET /v2/cluster` has an answer.
    pub in_cluster: bool,
    /// By device: the backend and the device there, if the report is of a whole cluster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_names: Vec<DeviceName>,
    /// The frontends and backends of the cluster that the report is of; empty: it is of one process.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<LiveProcess>,
}

impl LiveReport {
    /// A report of one process without models and devices, by the clock of the server.
    pub fn new(server: &str, now: Time) -> Self {
        LiveReport {
            server: server.to_owned(),
            version: env!("CARGO_PKG_VERSION").into(),
            wall_ms: Clock::unix_millis(),
            now_ns: now.as_nanos(),
            latency_bounds_ms: latency_bounds_ms(),
            batch_bounds: batch_bounds(),
            models: Vec::new(),
            device_busy_s: Vec::new(),
            tenants: Vec::new(),
            history_part_s: PART.as_secs_f64(),
            in_cluster: false,
            device_names: Vec::new(),
            processes: Vec::new(),
        }
    }
}

/// A device of a cluster.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct DeviceName {
    /// The name of its backend.
    pub backend: String,
    /// The device's number on that backend.
    pub device: usize,
}

/// A process whose counts are in the report of its cluster.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct LiveProcess {
    /// The process's name.
    pub name: String,
    /// The process's number, drawn when it started.
    pub node: String,
    /// `frontend` or `backend`.
    pub role: Cow<'static, str>,
    /// Whether its counts are fresh.
    pub state: ProcessState,
}

/// Whether the counts of a process are fresh.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum ProcessState {
    /// The process has answered.
    Answers,
    /// The process has not answered in time. Its last counts stand.
    Silent,
    /// The leader is not connected to the process. Its last counts stand.
    Gone,
}

/// A version of a model.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug, Default)]
#[serde(default)]
pub struct LiveModel {
    /// The model's name.
    pub model: String,
    /// The version's number; empty: the model as a whole.
    pub version: String,
    /// The state, as in the repository index.
    pub state: String,
    /// Why it is not ready.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// What a rollout gives to this new version, in words; empty: it is no new version of a rollout.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub rollout: String,
    /// The device policy.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub policy: String,
    /// Whether it is an ensemble, which has no batches of its own.
    pub ensemble: bool,
    /// How long a request may take, milliseconds.
    pub slo_ms: Option<f64>,
    /// Most items of a batch.
    pub max_batch: u32,
    /// Items that wait now.
    pub waiting: u32,
    /// Requests that were answered by their deadline.
    pub in_time: u64,
    /// Requests that were answered late.
    pub late: u64,
    /// Requests without an answer, by reason.
    pub unanswered: BTreeMap<Cow<'static, str>, u64>,
    /// Items of the answered requests.
    pub items: u64,
    /// Answered requests by the time from arrival to result: one part more than there are bounds. Empty,
    /// as `batches` is, if the version shares its histograms (`metrics_detailed_models`).
    pub latency: Vec<u64>,
    /// Launches by size: one part more than there are bounds.
    pub batches: Vec<u64>,
    /// The latency of a batch by its items, milliseconds, as refined in service.
    pub profile: Vec<(u32, f64)>,
    /// The same, as it was when the model was loaded.
    pub profile_at_load: Vec<(u32, f64)>,
    /// The time of all launches by the refined profile, as a multiple of their time by the profile at
    /// load; `None`: there were no launches, or their sizes are unknown.
    pub slowdown: Option<f64>,
    /// The steps of an ensemble.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<LiveStep>,
    /// Parts of the last hour: seconds from a part's begin until now, offered requests, and requests in
    /// time. Parts without requests are left out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<(f64, u64, u64)>,
}

/// A step of an ensemble. Counts run from the start of the server.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct LiveStep {
    /// The name of its model.
    pub model: String,
    /// Its part of the weights of all steps, by which the time of a request is divided.
    pub share: f64,
    /// Requests that it has done.
    pub done: u64,
    /// The time of these requests from the step's inputs to the begin of its run, seconds in all.
    pub waited_s: f64,
    /// The time of these requests from the begin of the run to the outputs, seconds in all.
    pub ran_s: f64,
    /// Requests that it dropped, as the whole could not be in time.
    pub dropped: u64,
    /// Requests that failed in it for another reason.
    pub failed: u64,
}

impl LiveStep {
    /// Adds the counts of the same step at another frontend.
    fn add(&mut self, other: &LiveStep) {
        self.done = self.done.saturating_add(other.done);
        self.waited_s += other.waited_s;
        self.ran_s += other.ran_s;
        self.dropped = self.dropped.saturating_add(other.dropped);
        self.failed = self.failed.saturating_add(other.failed);
    }
}

/// A tenant. Counts run from the start of the server.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct LiveTenant {
    /// The tenant's name; `others`: all keys without a tenant.
    pub tenant: String,
    /// Its share of the devices' time.
    pub share: f64,
    /// The most of the devices' time that it may have; `None`: no bound.
    pub quota: Option<f64>,
    /// Requests within its share. In a cluster, which keeps no shares, all of its requests.
    pub within: u64,
    /// Requests beyond its share.
    pub beyond: u64,
    /// Requests that were refused because it had its share or its quota.
    pub refused: u64,
    /// The device time that it was charged, seconds. In a cluster, its items' part of the time of their
    /// batches.
    pub device_s: f64,
}

impl LiveTenant {
    /// Adds the counts of the same tenant at another frontend.
    pub fn add(&mut self, other: &LiveTenant) {
        self.within = self.within.saturating_add(other.within);
        self.beyond = self.beyond.saturating_add(other.beyond);
        self.refused = self.refused.saturating_add(other.refused);
        self.device_s += other.device_s;
    }
}

impl LiveModel {
    /// Requests that were answered late, rejected or dropped.
    pub fn missed(&self) -> u64 {
        let bad = self.unanswered.iter().filter(|(reason, _)| Unanswered::is_bad(reason));
        self.late + bad.map(|(_, count)| count).sum::<u64>()
    }

    /// Computes the slowdown from the profiles and the launches by size. `bounds` are the upper bounds of
    /// the parts of [`LiveModel::batches`].
    pub fn compare_profiles(&mut self, bounds: &[f64]) {
        let at_load: BTreeMap<u32, f64> = self.profile_at_load.iter().copied().collect();
        let (mut now, mut then) = (0.0, 0.0);
        for (part, launches) in self.batches.iter().enumerate().filter(|(_, launches)| **launches > 0) {
            let low = part.checked_sub(1).and_then(|before| bounds.get(before)).copied().unwrap_or(0.0);
            let high = bounds.get(part).copied().unwrap_or(f64::INFINITY);
            // The sizes of a part weigh the same.
            let sizes = self.profile.iter().filter(|(size, _)| f64::from(*size) > low && f64::from(*size) <= high);
            let pairs: Vec<(f64, f64)> = sizes.filter_map(|(size, ms)| Some((*ms, *at_load.get(size)?))).collect();
            let weight = *launches as f64 / pairs.len().max(1) as f64;
            now += weight * pairs.iter().map(|(now, _)| now).sum::<f64>();
            then += weight * pairs.iter().map(|(_, then)| then).sum::<f64>();
        }
        self.slowdown = (then > 0.0).then(|| now / then);
    }

    /// Adds the requests and launches that another frontend has counted.
    pub fn add_counts(&mut self, other: &LiveModel) {
        let add = |all: &mut u64, more: u64| *all = all.saturating_add(more);
        if self.rollout.is_empty() {
            self.rollout.clone_from(&other.rollout);
        }
        let add_parts = |all: &mut Vec<u64>, more: &[u64]| {
            all.resize(all.len().max(more.len()), 0);
            all.iter_mut().zip(more).for_each(|(all, more)| add(all, *more));
        };
        add(&mut self.in_time, other.in_time);
        add(&mut self.late, other.late);
        add(&mut self.items, other.items);
        for (reason, count) in &other.unanswered {
            add(self.unanswered.entry(reason.clone()).or_default(), *count);
        }
        add_parts(&mut self.latency, &other.latency);
        add_parts(&mut self.batches, &other.batches);
        for (place, more) in other.steps.iter().enumerate() {
            match self.steps.get_mut(place) {
                Some(step) => step.add(more),
                None => self.steps.push(more.clone()),
            }
        }
        self.history.extend(&other.history);
    }

    /// Takes the facts that a backend alone knows. Of several backends, the slowest has the word about
    /// times.
    pub fn take_facts(&mut self, backend: &LiveModel) {
        self.waiting = self.waiting.saturating_add(backend.waiting);
        self.max_batch = self.max_batch.max(backend.max_batch);
        self.slo_ms = self.slo_ms.or(backend.slo_ms);
        self.ensemble |= backend.ensemble;
        if self.policy.is_empty() {
            self.policy.clone_from(&backend.policy);
        } else if !backend.policy.is_empty() && !self.policy.split(", ").any(|known| known == backend.policy) {
            self.policy = format!("{}, {}", self.policy, backend.policy);
        }
        if self.profile.is_empty() || backend.slowdown > self.slowdown {
            self.profile.clone_from(&backend.profile);
            self.profile_at_load.clone_from(&backend.profile_at_load);
            self.slowdown = backend.slowdown;
        }
    }

    /// Takes over the outcomes of requests.
    pub fn take_counts(&mut self, counts: &Counts) {
        (self.in_time, self.late, self.items) = (counts.in_time(), counts.late, counts.items);
        let reasons = Unanswered::labels().into_iter().zip(counts.unanswered);
        self.unanswered = reasons.filter(|(_, count)| *count > 0).map(|(why, count)| (why.into(), count)).collect();
    }
}

/// The outcomes of requests in the last hour, by version of a model.
#[derive(Debug, Default)]
pub struct LiveHistory {
    versions: BTreeMap<[String; 2], Past>,
}

#[derive(Debug, Default)]
struct Past {
    before: Counts,
    /// A part's number since the start of the clock, offered requests, and requests in time.
    parts: VecDeque<(u64, u64, u64)>,
}

impl LiveHistory {
    /// Notes the outcomes of a version's requests until now.
    pub fn note(&mut self, now: Time, model: &str, version: &str, counts: &Counts) {
        let part = now.as_nanos() / PART.as_nanos();
        let name = [model, version].map(str::to_owned);
        if !self.versions.contains_key(&name) && self.versions.len() >= MOST_VERSIONS {
            return;
        }
        let past = self.versions.entry(name).or_default();
        let total = |counts: &Counts| counts.in_time() + counts.missed();
        let offered = total(counts).saturating_sub(total(&past.before));
        let in_time = counts.in_time().saturating_sub(past.before.in_time());
        past.before = *counts;
        if offered == 0 {
            return;
        }
        match past.parts.back_mut().filter(|(last, ..)| *last == part) {
            Some(last) => (last.1, last.2) = (last.1 + offered, last.2 + in_time),
            None => past.parts.push_back((part, offered, in_time)),
        }
        while past.parts.front().is_some_and(|(first, ..)| first + PARTS as u64 <= part) {
            past.parts.pop_front();
        }
    }

    /// The parts of a version, as [`LiveModel::history`] has them.
    pub fn of(&self, now: Time, model: &str, version: &str) -> Vec<(f64, u64, u64)> {
        let past = self.versions.get(&[model, version].map(str::to_owned));
        let seconds = now.as_nanos() as f64 / 1e9;
        let ago = |part: u64| seconds - part as f64 * PART.as_secs_f64();
        let parts = past.into_iter().flat_map(|past| past.parts.iter());
        parts.map(|(part, offered, in_time)| (ago(*part), *offered, *in_time)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(second: u64) -> Time {
        Time::ZERO + Duration::from_millis(1_000 * second)
    }

    fn counts(answered: u64, late: u64, dropped: u64) -> Counts {
        let mut counts = Counts { answered, late, ..Counts::default() };
        counts.unanswered[Unanswered::Hopeless as usize] = dropped;
        counts
    }

    #[test]
    fn the_history_has_an_hour_in_parts_of_ten_seconds() {
        let mut history = LiveHistory::default();
        history.note(second(1), "m", "1", &counts(10, 1, 0));
        history.note(second(2), "m", "1", &counts(20, 1, 2));
        history.note(second(12), "m", "1", &counts(20, 1, 2));
        history.note(second(25), "m", "1", &counts(25, 1, 2));
        assert_eq!(history.of(second(30), "m", "1"), [(30.0, 22, 19), (10.0, 5, 5)]);
        history.note(second(3_601), "m", "1", &counts(26, 2, 2));
        assert_eq!(history.of(second(3_601), "m", "1"), [(3_581.0, 5, 5), (1.0, 1, 0)]);
        assert!(history.of(second(30), "n", "1").is_empty());
    }

    #[test]
    fn a_slowdown_is_of_the_sizes_that_ran() {
        let profile = vec![(1, 12.0), (2, 20.0), (3, 30.0), (4, 44.0)];
        let profile_at_load = vec![(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)];
        let of = |batches: &[u64]| {
            let (profile, profile_at_load) = (profile.clone(), profile_at_load.clone());
            let mut model = LiveModel { batches: batches.to_vec(), profile, profile_at_load, ..LiveModel::default() };
            model.compare_profiles(&[1.0, 2.0, 4.0]);
            model.slowdown
        };
        assert_eq!(of(&[5, 0, 0, 0]), Some(1.2));
        // Once 12 for 10 ms, and twice the mean of 30 and 44 for that of 30 and 40.
        assert_eq!(of(&[1, 0, 2, 0]), Some((12.0 + 74.0) / (10.0 + 70.0)));
        assert_eq!([of(&[0; 4]), of(&[]), of(&[0, 0, 0, 9])], [None; 3]);
    }

    #[test]
    fn counts_of_frontends_add_up_and_facts_are_the_backends() {
        let unanswered = |count| BTreeMap::from([(Cow::Borrowed("queue_full"), count)]);
        let of = |in_time, part: Vec<u64>| LiveModel {
            in_time,
            unanswered: unanswered(in_time),
            batches: part,
            history: vec![(1.0, in_time, 1)],
            ..LiveModel::default()
        };
        let mut model = of(3, vec![1]);
        model.add_counts(&of(u64::MAX, vec![1, 5]));
        model.add_counts(&of(4, vec![]));
        assert_eq!((model.in_time, &model.batches[..]), (u64::MAX, &[2, 5][..]));
        assert_eq!((&model.unanswered, model.history.len()), (&unanswered(u64::MAX), 3));
        let backend = |policy: &str, slowdown| LiveModel {
            policy: policy.into(),
            waiting: 2,
            max_batch: 8,
            profile: vec![(1, slowdown)],
            slowdown: Some(slowdown),
            ..LiveModel::default()
        };
        for backend in [backend("elastic", 1.1), backend("staged", 1.3), backend("elastic", 1.2)] {
            model.take_facts(&backend);
        }
        assert_eq!((&*model.policy, model.waiting, model.max_batch), ("elastic, staged", 6, 8));
        assert_eq!((model.slowdown, &model.profile[..]), (Some(1.3), &[(1, 1.3)][..]));
    }

    #[test]
    fn the_history_is_bounded() {
        let mut history = LiveHistory::default();
        for model in 0..2 * MOST_VERSIONS {
            for time in 0..2 * PARTS as u64 {
                history.note(second(10 * time), &model.to_string(), "1", &counts(time, 0, 0));
            }
        }
        assert_eq!(history.versions.len(), MOST_VERSIONS);
        assert!(history.versions.values().all(|past| past.parts.len() <= PARTS));
    }
}
