//! What would have saved a request.

use std::fmt;

use downbeat_core::cluster::{DropReason, Reject};
use downbeat_core::{Duration, RequestId, Time};
use serde::Serialize;

use super::outcome::Outcome;
use super::window::{LoggedBatch, LoggedRequest, Window};
use super::words::{many, ms, told};
use crate::tables::recording::MAX_REQUESTS;
use crate::what_if::{Part, Parts, Recorded, Setting};

/// A change that would have saved a request, as far as the log supports the claim.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Remedy {
    /// A later deadline.
    LaterDeadline {
        /// How much later.
        by_ms: f64,
        /// The time from arrival to that deadline.
        slo_ms: f64,
        /// Whether the request would have needed at least this; otherwise exactly this, if all
        /// decisions had stayed.
        is_least: bool,
    },
    /// A smaller batch: by the profile, as much slower or faster as the batch was.
    SmallerBatch {
        /// The largest batch that would have been in time, in items.
        items: u32,
        /// The time that such a batch takes.
        takes_ms: f64,
    },
    /// More devices, by a replay of the requests around this one.
    MoreDevices(MoreDevices),
}

/// The result of a replay with one device more.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MoreDevices {
    /// The devices of the log.
    pub devices: u32,
    /// The requests of the replay.
    pub requests: usize,
    /// Requests without an answer in time, in a replay with the devices of the log.
    pub bad_as_it_was: usize,
    /// The same with one device more.
    pub bad_with_one_more: usize,
    /// Whether this request is in time with one device more; `None`: the replay answers the request in
    /// time with the devices of the log, and so says nothing about it.
    pub saves: Option<bool>,
}

/// Shorter spans are not worth a later deadline.
const TICK: Duration = Duration::from_micros(1);

/// The changes that would have saved a request.
pub(super) fn remedies(window: &Window, request: &LoggedRequest, outcome: Outcome) -> Vec<Remedy> {
    if !outcome.is_bad() || request.deadline == Time::MAX {
        return Vec::new();
    }
    let mut remedies = Vec::new();
    remedies.extend(later_deadline(window, request));
    remedies.extend(smaller_batch(window, request));
    if outcome == Outcome::Late || outcome.is_given_up() || outcome == Outcome::QueueFull {
        remedies.extend(more_devices(window, request).map(Remedy::MoreDevices));
    }
    remedies
}

fn later_deadline(window: &Window, request: &LoggedRequest) -> Option<Remedy> {
    let (needed, is_least) = match (request.refused, request.dropped, window.end_of(request)) {
        (Some(Reject::DeadlineImpossible { needed, .. }), ..) => (request.at + needed, true),
        (None, Some((at, DropReason::Hopeless, detail)), _) => (at + detail.needed, true),
        (None, None, Some(end)) => (end, false),
        _ => return None,
    };
    let by = needed.since(request.deadline);
    let (by_ms, slo_ms) = (ms(by), ms(needed.since(request.arrived())));
    (by > TICK).then_some(Remedy::LaterDeadline { by_ms, slo_ms, is_least })
}

fn smaller_batch(window: &Window, request: &LoggedRequest) -> Option<Remedy> {
    let batch: &LoggedBatch = window.batch_of(request)?;
    let (end, expected, model) = (batch.end?, batch.expected?, batch.model?);
    if end <= request.deadline || batch.members.len() < 2 || expected == Duration::ZERO {
        return None;
    }
    let options = window.parts.iter().find_map(|part| part.models.get(&model))?;
    let profile = options.profiles.first();
    let pace = end.since(batch.start).as_secs_f64() / expected.as_secs_f64();
    let left = request.deadline.since(batch.start).as_secs_f64();
    let takes = |items: u32| profile.latency(items).as_secs_f64() * pace;
    let items = (request.size..batch.size).rev().find(|items| takes(*items) <= left)?;
    Some(Remedy::SmallerBatch { items, takes_ms: takes(items) * 1e3 })
}

/// Replays the requests around this one, with the devices of the log and with one more.
fn more_devices(window: &Window, request: &LoggedRequest) -> Option<MoreDevices> {
    let parts: Vec<Part> = window.parts.to_vec();
    let mut seen: Vec<(Time, RequestId)> =
        parts.iter().flat_map(|part| &part.requests).map(|seen| (seen.at, seen.request.id)).collect();
    // As `Recorded` orders them.
    seen.sort_by_key(|(at, _)| *at);
    let place = seen.iter().position(|(_, id)| *id == request.request)?;
    let mut recorded = Recorded::of_parts(Parts::join(parts)).ok()?;
    // Later requests matter only as far as they compete with this one.
    let until = request.deadline.max(request.at);
    let behind = seen.partition_point(|(at, _)| *at <= until).max(place + 1);
    let first = behind.saturating_sub(MAX_REQUESTS).min(place);
    let behind = behind.min(first + MAX_REQUESTS);
    recorded.arrivals = recorded.arrivals.get(first..behind)?.into();
    let setting = Setting { rehearse: false, ..Setting::of(&recorded) };
    let run = |devices: u32| {
        let mut simulation = recorded.simulation(&Setting { devices, ..setting.clone() }).ok()?;
        simulation.record = true;
        let requests = simulation.run().ok()?.recording.requests;
        let bad = requests.iter().filter(|request| !request.good).count();
        Some((requests.get(place - first)?.good, bad, requests.len()))
    };
    let (is_good_anyway, bad_as_it_was, requests) = run(recorded.devices)?;
    let (is_good, bad_with_one_more, _) = run(recorded.devices + 1)?;
    let saves = (!is_good_anyway).then_some(is_good);
    Some(MoreDevices { devices: recorded.devices, requests, bad_as_it_was, bad_with_one_more, saves })
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remedy::LaterDeadline { by_ms, slo_ms, is_least: true } => {
                write!(f, "a deadline at least {} later ({} in all)", told(*by_ms), told(*slo_ms))
            }
            Remedy::LaterDeadline { by_ms, slo_ms, is_least: false } => {
                write!(f, "a deadline {} later ({} in all), with the same decisions", told(*by_ms), told(*slo_ms))
            }
            Remedy::SmallerBatch { items, takes_ms } => {
                write!(
                    f,
                    "a batch of at most {}, which takes {} by its profile and this run",
                    many(*items as usize, "item"),
                    told(*takes_ms)
                )
            }
            Remedy::MoreDevices(more) => more.fmt(f),
        }
    }
}

impl fmt::Display for MoreDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MoreDevices { devices, requests, bad_as_it_was, bad_with_one_more, saves } = self;
        let verdict = match saves {
            Some(true) => "one device more",
            Some(false) => "not one device more",
            None => "perhaps one device more",
        };
        write!(
            f,
            "{verdict}: in a replay of {requests} of the requests around it, {bad_as_it_was} fail with {devices} and \
             {bad_with_one_more} with {} devices",
            devices + 1
        )
    }
}
