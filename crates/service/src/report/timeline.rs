//! The answer to `GET /v2/timeline`.

use std::collections::BTreeMap;

use downbeat_core::Duration;
use downbeat_core::cluster::StartBound;
use serde::{Deserialize, Serialize};

/// How long launches are remembered.
pub const REMEMBERED: Duration = Duration::from_millis(60_000);

/// The answer of `GET /v2/timeline`: the last launches on the lanes of devices.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct Timeline {
    /// The begin of the timeline. This and all other times are nanoseconds of the server's clock.
    pub from_ns: u64,
    /// The end of the timeline: now.
    pub now_ns: u64,
    /// By model, version and device.
    pub devices: Vec<PastLaunches>,
    /// The rules of [`PastDeparture::rule`] in words, to follow "the batch left then because".
    #[serde(default)]
    pub rules: BTreeMap<String, String>,
    /// The backends of a cluster whose launches these are; empty: they are the process's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backends: Vec<TimelineBackend>,
}

/// A backend in the timeline of its cluster. All times are of the clock of the process that was
/// asked.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct TimelineBackend {
    /// The backend's name.
    pub backend: String,
    /// The most that its times may be wrong, by the shortest round trips of messages; `None`: its
    /// clock is not known yet, and its launches are left out.
    pub error_ns: Option<u64>,
    /// Whether no launch of the backend in the shown time is missing.
    pub complete: bool,
}

/// A launch that has ended.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug, Default)]
pub struct PastLaunch {
    /// Index of its lane.
    pub lane: u32,
    /// The partition of the launch; 0 if the device is not divided.
    #[serde(default)]
    pub partition: u32,
    /// The batch's number, as the device counts.
    pub batch: u64,
    /// The scheduler's number for the batch, if the scheduler made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granted: Option<u64>,
    /// The segments that it ran, the last excluded.
    pub segments: [u16; 2],
    /// Items that were asked for.
    pub rows: u32,
    /// Items that were computed.
    pub computed_rows: u32,
    /// The length to which its members were padded; 0 if the model's shapes are fixed.
    pub length: u32,
    /// When it began, nanoseconds of the server's clock.
    pub begin_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// The members that are steps of pipelines' requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<PastStep>,
    /// The number of its members.
    #[serde(default)]
    pub members: u32,
    /// The numbers of its first members, as in the decision log.
    #[serde(default)]
    pub requests: Vec<u64>,
    /// The ids that clients gave to these requests, in the same order, and empty where a client gave
    /// none. Left out if all are empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<String>,
    /// The earliest deadline of its members; `None`: none has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ns: Option<u64>,
    /// Why its batch left; `None`: the device policy made the batch, or the scheduler of another process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<PastDeparture>,
}

/// Why the scheduler let a batch leave.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PastDeparture {
    /// The rule that decided, one of [`Timeline::rules`].
    pub rule: String,
    /// When the batch's schedulable window opened; `None`: it had no begin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_ns: Option<u64>,
    /// The latest start that lost no request; `None`: any start was in time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latest_ns: Option<u64>,
    /// Items that stayed in the queue.
    pub behind: u32,
}

/// The rules of [`PastDeparture::rule`], with what they mean.
pub fn rules() -> BTreeMap<String, String> {
    StartBound::ALL.map(|bound| (bound.name().to_owned(), bound.why().to_owned())).into()
}

/// A request in a launch that is a step of a pipeline's request.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct PastStep {
    /// The name of the ensemble, or of the model whose code calls.
    pub pipeline: String,
    /// The number of the pipeline's request, as in the decision log.
    pub request: u64,
    /// The number of the step. `1.0` is step 0 of the ensemble that step 1 runs.
    pub step: String,
    /// When the step's inputs were there, nanoseconds of the server's clock.
    pub reached_ns: u64,
}

/// The last launches of a model version on a device.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug, Default)]
pub struct PastLaunches {
    /// Model name.
    pub model: String,
    /// Model version.
    pub version: String,
    /// The name of the backend that the device is of; empty: the process's own.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub backend: String,
    /// Number of the device.
    pub device: usize,
    /// Number of the partition; 0 if the device is not divided.
    pub partition: u32,
    /// The device policy.
    pub policy: String,
    /// The largest batch of each lane.
    pub lanes: Vec<u32>,
    /// Whether no launch of the time in question is missing.
    pub complete: bool,
    /// The launches, in the order of their ends.
    pub launches: Vec<PastLaunch>,
}

impl PastLaunches {
    /// Joins the entries of a device that differ in their launches only. Example: a model was loaded again, and all its launches
    /// are in one entry. With other lanes or another policy than before, it has a second entry.
    pub fn join(self, device: &mut Vec<PastLaunches>) {
        match device.iter_mut().find(|other| other.facts() == self.facts()) {
            Some(same) => {
                same.complete &= self.complete;
                same.launches.extend(self.launches);
                same.launches.sort_by_key(|launch| launch.end_ns);
            }
            None => device.push(self),
        }
    }

    /// Everything but the launches.
    fn facts(&self) -> (&str, &str, &str, usize, u32, &str, &[u32]) {
        let PastLaunches { model, version, backend, device, partition, policy, lanes, .. } = self;
        (model, version, backend, *device, *partition, policy, lanes)
    }

    /// Moves all times by so many nanoseconds, to another process's clock.
    pub fn shift(&mut self, by: i64) {
        let shift = |at: &mut u64| *at = at.saturating_add_signed(by);
        for launch in &mut self.launches {
            let PastLaunch { begin_ns, end_ns, steps, deadline_ns, left, .. } = launch;
            [begin_ns, end_ns].into_iter().for_each(shift);
            deadline_ns.iter_mut().for_each(shift);
            steps.iter_mut().for_each(|step| shift(&mut step.reached_ns));
            let times = left.iter_mut().flat_map(|left| [&mut left.window_ns, &mut left.latest_ns]);
            times.flatten().for_each(shift);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_before_a_reload_are_in_one_entry_with_those_after() {
        let of = |policy: &str, ends: &[u64], complete| PastLaunches {
            policy: policy.to_owned(),
            complete,
            launches: ends.iter().map(|end_ns| PastLaunch { end_ns: *end_ns, ..PastLaunch::default() }).collect(),
            ..PastLaunches::default()
        };
        let mut devices = vec![of("exclusive", &[2, 5], true)];
        of("windowed", &[1], true).join(&mut devices);
        of("exclusive", &[3], false).join(&mut devices);
        assert_eq!(devices, [of("exclusive", &[2, 3, 5], false), of("windowed", &[1], true)]);
    }

    #[test]
    fn all_times_of_launches_move_to_another_clock() {
        let left = PastDeparture { rule: "full".into(), window_ns: Some(4), latest_ns: Some(30), behind: 0 };
        let step = PastStep { pipeline: "p".into(), request: 1, step: "0".into(), reached_ns: 7 };
        let (deadline_ns, left, steps) = (Some(40), Some(left), vec![step]);
        let launch = PastLaunch { begin_ns: 10, end_ns: 20, deadline_ns, left, steps, ..PastLaunch::default() };
        let mut past = PastLaunches { launches: vec![launch], ..PastLaunches::default() };
        past.shift(100);
        let launch = &past.launches[0];
        assert_eq!((launch.begin_ns, launch.end_ns, launch.deadline_ns), (110, 120, Some(140)));
        assert_eq!(launch.steps[0].reached_ns, 107);
        past.shift(-105);
        let launch = &past.launches[0];
        // A time before the clock's start is its start.
        assert_eq!(launch.left.as_ref().map(|left| (left.window_ns, left.latest_ns)), Some((Some(0), Some(25))));
        assert_eq!(launch.begin_ns, 5);
    }
}
