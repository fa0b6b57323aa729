//! The advice on device policies from a decision log.

use std::collections::BTreeMap;
use std::path::PathBuf;

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, Output, Request, Scheduler};
use downbeat_core::device::{
    DeviceOutput, DeviceRequest, DeviceScheduler, ExclusiveOptions, GrantedBatch, LaneId, Launch, Layout, ModelSpec,
    PartitionId, PolicyName, SegmentProfile, Span, WindowedOptions,
};
use downbeat_core::journal::Journal;
use downbeat_core::journal::cluster::{Decision, Input};
use downbeat_core::journal::device::DeviceInput;
use downbeat_core::{DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_sim::what_if::{BadDeviceLog, DeviceAdvice, DeviceLog};

const MODEL: ModelId = ModelId(0);

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// A model that takes 1 ms an item and 4 ms a batch, with batches of at most 8.
fn profile() -> LatencyProfile {
    LatencyProfile::linear(us(1_000), us(4_000), 8).unwrap()
}

fn windowed(window: Duration) -> ModelSpec {
    let profile = SegmentProfile::whole(&profile());
    let options =
        WindowedOptions { profile, max_batch: 8, window, fill: false, drop: true, queue_bound: 4_096, ahead: 0 };
    ModelSpec::new(&options, PartitionId::default())
}

/// A server's scheduler and device with their logs. A launch takes what its profile says.
struct Server {
    scheduler: Journal<Scheduler>,
    device: Journal<DeviceScheduler>,
    running: Vec<(Time, Launch)>,
    /// Every other launch ends so much later than the device had it.
    stall: Duration,
}

impl Server {
    /// A server with a model under this policy; `None`: `exclusive`.
    fn new(policy: Option<ModelSpec>) -> Self {
        let (scheduler, device) = (Journal::on(Scheduler::new()), Journal::on(DeviceScheduler::new()));
        let mut server = Server { scheduler, device, running: Vec::new(), stall: Duration::ZERO };
        let layout = Layout { shared_lanes: vec![1] };
        assert_eq!(server.device.apply(Time::ZERO, DeviceInput::Layout(layout)), Ok(true));
        server.scheduler.apply(Time::ZERO, Input::AddDevice(DeviceKind(0)));
        if policy.is_none() {
            let options = ModelOptions::new(profile(), DispatchPolicy::Eager, DropPolicy::HeadDrop);
            server.scheduler.apply(Time::ZERO, Input::AddModel(MODEL, Box::new(options)));
        }
        let exclusive = ExclusiveOptions { profile: SegmentProfile::whole(&profile()) };
        let spec = policy.unwrap_or_else(|| ModelSpec::new(&exclusive, PartitionId::default()));
        server.apply(Time::ZERO, DeviceInput::Model(MODEL, Some(spec.named("net 1".to_owned()))));
        server
    }

    fn apply(&mut self, now: Time, input: DeviceInput) {
        let _ = self.device.apply(now, input);
        self.decide(now);
    }

    fn decide(&mut self, now: Time) {
        while let Some(decision) = self.scheduler.poll() {
            if let Decision::Output(Output::Dispatch { batch: id, members, size: rows, .. }) = decision {
                let batch = GrantedBatch { id, model: MODEL, lane: LaneId(0), members, rows };
                self.apply(now, DeviceInput::Batch(batch));
            }
        }
        while let Some(output) = self.device.poll() {
            if let DeviceOutput::Launch(launch) = output {
                let stall = if launch.id.0 % 2 == 0 { self.stall } else { Duration::ZERO };
                self.running.push((now + profile().latency(launch.computed_rows) + stall, launch));
            }
        }
    }

    /// Lets all events happen that are due by `until`.
    fn advance(&mut self, until: Time) {
        loop {
            let timer = self.device.machine().poll_timeout().map(|(at, _)| at);
            let end = self.running.iter().map(|(at, _)| *at).min();
            let Some(now) = timer.into_iter().chain(end).min().filter(|at| *at <= until) else { return };
            match self.running.iter().position(|(at, _)| *at == now) {
                None => self.apply(now, DeviceInput::Timeout),
                Some(index) => {
                    let (end, launch) = self.running.remove(index);
                    let stall = if launch.id.0 % 2 == 0 { self.stall } else { Duration::ZERO };
                    let end = Time::ZERO + end.since(Time::ZERO + stall);
                    let start = Time::ZERO + end.since(Time::ZERO + profile().latency(launch.computed_rows));
                    let span = Span { start, end };
                    if let Some(batch) = launch.granted {
                        self.scheduler.apply(now, Input::Completion { device: DeviceId(0), batch });
                    }
                    self.apply(now, DeviceInput::Completion { launch: launch.id, span, exits: Vec::new() });
                }
            }
        }
    }

    /// A log of `count` requests, due after 60 ms, with these gaps in turn.
    fn log(mut self, gaps_us: &[u64], count: u64, is_routed: bool) -> Vec<(PathBuf, Vec<u8>)> {
        let mut now = Time::ZERO + us(1_000_000);
        for (id, gap) in (0..count).map(RequestId).zip(gaps_us.iter().cycle()) {
            now += us(*gap);
            self.advance(now);
            let deadline = now + us(60_000);
            if is_routed {
                let request = DeviceRequest { id, model: MODEL, deadline, size: 1, length: 0 };
                self.apply(now, DeviceInput::Request(request));
            } else {
                let request = Request { id, model: MODEL, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
                self.scheduler.apply(now, Input::Request(request));
                self.decide(now);
            }
        }
        self.advance(now + us(1_000_000));
        let (mut scheduler, mut device) = (Vec::new(), Vec::new());
        self.scheduler.take_log(&mut scheduler);
        self.device.take_log(&mut device);
        vec![("shard-0.log".into(), scheduler), ("device-0.log".into(), device)]
    }
}

fn advise(files: &[(PathBuf, Vec<u8>)], together: Option<f64>) -> DeviceAdvice {
    let together: BTreeMap<String, f64> = together.map(|factor| ("net".to_owned(), factor)).into_iter().collect();
    DeviceLog::of(files).unwrap().advise(&together, 1, &|_, _| true).unwrap()
}

/// Requests 20 ms apart that each wait 40 ms for others in vain.
#[test]
fn a_window_that_only_costs_time_is_given_up() {
    let advice = advise(&Server::new(Some(windowed(us(40_000)))).log(&[19_000, 21_000], 1_000, true), None);
    assert!(advice.is_faithful, "{advice}");
    let change = advice.models[0].change.as_ref().unwrap();
    assert!(change.policy == PolicyName::EXCLUSIVE || change.settings["window_ms"] == 0.0, "{advice}");
    let words = &advice.models[0].words;
    assert!(
        words.contains("On the second half, which did not choose it") && words.ends_with("Change to it."),
        "{words}"
    );
    let judged = advice.rows.iter().filter(|row| row.second.is_some()).count();
    assert_eq!(judged, 3, "the log, the policy in use and the best one: {advice}");
    assert!(advice.notes[0].contains("--together net=FACTOR"), "{advice}");
}

#[test]
fn a_good_policy_stays() {
    let advice = advise(&Server::new(Some(windowed(Duration::ZERO))).log(&[19_000, 21_000], 1_000, true), None);
    assert!(advice.is_faithful && advice.models[0].change.is_none(), "{advice}");
    assert!(advice.models[0].words.contains("by a margin worth a change"), "{advice}");
}

/// 900 requests a second are more than one batch after another can answer.
#[test]
fn lanes_side_by_side_are_advised_if_they_do_not_disturb_each_other() {
    let log = Server::new(None).log(&[1_100], 4_000, false);
    let advice = advise(&log, Some(2.0));
    assert!(advice.is_faithful, "{advice}");
    assert_eq!(advice.models[0].change.as_ref().map(|change| change.policy), Some(PolicyName::ELASTIC), "{advice}");
    assert!(advice.notes.is_empty(), "{advice}");
    let disturbed = self::advise(&log, Some(1.0));
    assert!(
        disturbed.models[0].change.as_ref().is_none_or(|change| change.policy != PolicyName::ELASTIC),
        "{disturbed}"
    );
}

/// The gain of the first half is gone in the second, where requests come so seldom that no policy
/// is late.
#[test]
fn a_gain_that_does_not_hold_changes_nothing() {
    let mut gaps = vec![1_100; 1_500];
    gaps.extend([40_000; 1_500]);
    let advice = advise(&Server::new(None).log(&gaps, 3_000, false), Some(2.0));
    assert!(advice.is_faithful && advice.models[0].change.is_none(), "{advice}");
    assert!(advice.models[0].words.contains("That is not worth a change"), "{advice}");
}

/// The log's launches take what the profile says, and half of its requests are answered 200 ms late
/// for a reason that no record names.
#[test]
fn a_replay_that_does_not_match_the_log_changes_nothing() {
    let mut server = Server::new(Some(windowed(us(40_000))));
    server.stall = us(200_000);
    let advice = advise(&server.log(&[19_000, 21_000], 1_000, true), None);
    assert!(!advice.is_faithful && advice.models[0].change.is_none(), "{advice}");
    assert!(advice.models[0].words.starts_with("net: keep windowed. The replay"), "{advice}");
}

#[test]
fn logs_that_cannot_be_compared_are_refused() {
    let log = Server::new(None).log(&[5_000], 300, false);
    let few = DeviceLog::of(&log).unwrap().advise(&BTreeMap::new(), 1, &|_, _| true).unwrap_err();
    assert_eq!(few.to_string(), "300 requests are too few for an advice; at least 400 are needed");
    let stopped = DeviceLog::of(&Server::new(None).log(&[5_000], 500, false)).unwrap();
    let stopped = stopped.advise(&BTreeMap::new(), 1, &|_, _| false).unwrap_err();
    assert!(stopped.to_string().contains("interrupted"), "{stopped}");
    assert!(matches!(DeviceLog::of(&log[..1]), Err(BadDeviceLog::NoDevice)));
    let empty = DeviceLog::of(&Server::new(None).log(&[], 0, false)).unwrap_err();
    assert_eq!(empty.to_string(), "the log has no request that can be replayed");
}
