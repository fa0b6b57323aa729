//! Tests of a lane that gets its next launch while one is under way, which no policy does yet. The
//! engine's launches end when the test says so.

use std::collections::BTreeMap;
use std::ops::Range;
use std::thread::ThreadId;
use std::time::Duration as StdDuration;

use downbeat_core::LatencyProfile;
use downbeat_core::device::{
    DeviceModel, DeviceOutput, DevicePolicy, DeviceReject, DeviceRequest, InputSource, LaneSpec, LaunchId, ModelSpec,
    PartitionId, PolicyEntry, PolicyModel, PolicyOptions, PolicySettings, PoolStats, SegmentProfile, SegmentRange,
    Span, Turn,
};
use downbeat_core::probes::Doubt;
use downbeat_core::tensor::Signature;
use downbeat_engine::{LoadError, Model, Pending, Place, RunError};
use downbeat_service::options::RunLimits;
use downbeat_service::report::timeline::PastLaunch;
use parking_lot::Condvar;
use serde::{Deserialize, Serialize};

use super::super::own_launch::run_own;
use super::super::test_support::{self, Answer, Served, failure, item};
use super::*;

/// A time limit for events that are certain to come.
const LONG: StdDuration = StdDuration::from_secs(60);

/// Launches a request by itself as it comes, though the lane may be busy; at most two.
#[derive(Debug)]
struct AtOnce {
    under_way: BTreeMap<LaunchId, RequestId>,
}

/// The policy has no options.
#[derive(Debug, Serialize, Deserialize)]
struct AtOnceOptions;

impl PolicySettings for AtOnceOptions {
    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String> {
        Ok(ModelSpec::new(self, model.partition))
    }
}

impl PolicyOptions for AtOnceOptions {
    const ENTRY: &'static PolicyEntry = &PolicyEntry::new::<AtOnceOptions, AtOnceOptions>("at_once", "each by itself");

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn build(self) -> DeviceModel {
        let profile = LatencyProfile::linear(Duration::from_micros(1), Duration::ZERO, 4).unwrap();
        DeviceModel::new(AtOnce { under_way: BTreeMap::new() }, SegmentProfile::whole(&profile))
    }
}

impl DevicePolicy for AtOnce {
    fn lanes(&self, partition: PartitionId) -> Vec<LaneSpec> {
        vec![LaneSpec { partition, max_rows: 4, segments: SegmentRange::new(0, 1) }]
    }

    fn handle_request(&mut self, turn: &mut Turn<'_>, request: &DeviceRequest) -> Result<(), DeviceReject> {
        let (id, batch) = (turn.new_launch(), turn.new_batch());
        self.under_way.insert(id, request.id);
        assert!(self.under_way.len() <= 2, "there is one place behind the launch under way");
        turn.launch(Launch {
            id,
            batch,
            granted: None,
            model: request.model,
            lane: turn.lanes()[0],
            segments: SegmentRange::new(0, 1),
            members: vec![request.id],
            rows: request.size,
            computed_rows: request.size,
            length: 0,
            inputs: InputSource::Host,
        });
        Ok(())
    }

    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, _: Span, _: &[RequestId]) {
        if let Some(request) = self.under_way.remove(&launch) {
            turn.push(DeviceOutput::Reply { request, launch });
        }
    }

    fn handle_cancel(&mut self, _: &mut Turn<'_>, request: RequestId) -> bool {
        let launch = self.under_way.iter().find(|(_, other)| **other == request).map(|(launch, _)| *launch);
        launch.is_some_and(|launch| self.under_way.remove(&launch).is_some())
    }

    fn stats(&self) -> PoolStats {
        PoolStats::default()
    }
}

/// The launches that the engine got, and how many of them may end.
#[derive(Default)]
struct Device {
    state: Mutex<DeviceState>,
    changed: Condvar,
}

#[derive(Default)]
struct DeviceState {
    enqueued: u32,
    /// The threads that enqueued the launches, in their order.
    threads: Vec<ThreadId>,
    /// How many launches are over, counted from the first one enqueued.
    over: u32,
    /// Launches that fail, when they are enqueued or in the end.
    refused: Vec<u32>,
    failing: Vec<u32>,
}

impl Device {
    fn wait_until(&self, what: &str, reached: impl Fn(&DeviceState) -> bool) {
        let mut state = self.state.lock();
        while !reached(&state) {
            assert!(!self.changed.wait_for(&mut state, LONG).timed_out(), "{what}");
        }
    }

    fn end(&self, launches: u32) {
        self.state.lock().over += launches;
        self.changed.notify_all();
    }
}

/// A lane that gives back its inputs.
struct Echo(Arc<Device>);

struct EchoPending {
    device: Arc<Device>,
    number: u32,
    state: State,
}

impl Lane for Echo {
    fn run(&mut self, range: Range<usize>, state: &mut State) -> Result<(), RunError> {
        *state = self.enqueue(range, std::mem::take(state))?.wait()?;
        Ok(())
    }

    fn enqueue(&mut self, _range: Range<usize>, state: State) -> Result<Box<dyn Pending>, RunError> {
        let mut its = self.0.state.lock();
        its.enqueued += 1;
        its.threads.push(std::thread::current().id());
        self.0.changed.notify_all();
        let number = its.enqueued;
        if its.refused.contains(&number) {
            return Err(RunError::new("echo", "refused"));
        }
        Ok(Box::new(EchoPending { device: self.0.clone(), number, state }))
    }
}

impl Pending for EchoPending {
    fn is_over(&self) -> bool {
        self.device.state.lock().over >= self.number
    }

    /// The first of two launches claims a long time to spare, so that the second one is enqueued
    /// beside it. The second claims none.
    fn spare(&self) -> Duration {
        if self.number % 2 == 1 { LONG.into() } else { Duration::ZERO }
    }

    fn wait(self: Box<Self>) -> Result<State, RunError> {
        self.device.wait_until("a launch is not ended", |state| state.over >= self.number);
        if self.device.state.lock().failing.contains(&self.number) {
            return Err(RunError::new("echo", "failed"));
        }
        Ok(self.state)
    }
}

struct EchoModel {
    signature: Signature,
    device: Arc<Device>,
    is_bounded: bool,
}

impl Model for EchoModel {
    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn is_bounded(&self) -> bool {
        self.is_bounded
    }

    fn lane_at(&self, _place: Place) -> Result<Box<dyn Lane>, LoadError> {
        Ok(Box::new(Echo(self.device.clone())))
    }
}

/// A model on one lane.
struct OneLane {
    served: Served,
    device: Arc<Device>,
}

impl OneLane {
    fn new(limits: RunLimits) -> OneLane {
        OneLane::of(limits, false)
    }

    /// Whose launches any thread may run.
    fn with_brief_launches(limits: RunLimits) -> OneLane {
        OneLane::of(limits, true)
    }

    fn of(limits: RunLimits, is_bounded: bool) -> OneLane {
        let device = Arc::new(Device::default());
        let policy = ModelSpec::new(&AtOnceOptions, PartitionId::default());
        let engine = Arc::new(EchoModel { signature: test_support::signature(), device: device.clone(), is_bounded });
        let served = Served::new(engine, policy, &[], limits, Arc::new(|_, _, _| Ok(())));
        OneLane { served, device }
    }

    fn send(&self, item: u8) -> Answer {
        self.served.send(item).1
    }

    /// Sends a request; the calling thread may take the launch that follows.
    fn send_own(&self, item: u8, own: &mut OwnLaunch) -> Answer {
        self.served.send_own(item, own).1
    }

    fn past(&self) -> Vec<PastLaunch> {
        self.served.host.past_of(&self.served.model, Time::ZERO).launches
    }
}

impl Drop for OneLane {
    fn drop(&mut self) {
        self.device.end(1000);
    }
}

#[test]
fn the_next_launch_is_enqueued_early_and_answered_in_order() {
    let served = OneLane::new(RunLimits::default());
    for round in 0..20 {
        let first = served.send(1);
        served.device.wait_until("the first is not enqueued", |state| state.enqueued == 2 * round + 1);
        let mut second = served.send(2);
        // The thread looks for it while it waits.
        served.device.wait_until("the second is not enqueued", |state| state.enqueued == 2 * round + 2);
        served.device.end(1);
        assert_eq!(item(first), 1);
        assert!(second.try_recv().is_err(), "it is under way");
        served.device.end(1);
        assert_eq!(item(second), 2);
    }
    let past = served.past();
    assert_eq!(past.len(), 40);
    assert!(
        past.windows(2).all(|pair| pair[0].end_ns <= pair[1].begin_ns),
        "a lane has one launch at a time: {past:?}"
    );
}

/// After a stall of the machine, a profile may rule out every deadline. A probe shows whether that
/// is true. If a probe meets its deadline the next one follows at once: one probe a second would be
/// too few for a busy model.
#[test]
fn who_was_let_through_and_met_the_deadline_lets_the_next_through() {
    let served = OneLane::new(RunLimits::default());
    let now = served.served.host.clock.now();
    let tries = || served.served.record.probes.lock().tries(now, Doubt::Guess, Duration::ZERO);
    assert!(tries() && !tries(), "one at a time");
    for (deadline, is_probe, may) in [(Time::ZERO, true, false), (Time::MAX, false, false), (Time::MAX, true, true)] {
        // The launch may end before it comes: otherwise the lane would first wait for another
        // behind it.
        served.device.end(1);
        let (_, answer) = served.served.send_with(1, deadline, is_probe, &mut OwnLaunch::default());
        assert_eq!(item(answer), 1);
        assert_eq!(tries(), may, "{deadline:?}, {is_probe}");
    }
}

#[test]
fn a_failed_launch_is_answered_in_turn_and_spares_its_neighbour() {
    for (refused, failing, expected) in [
        (vec![], vec![1], [Err("failed"), Ok(2)]),
        (vec![], vec![2], [Ok(1), Err("failed")]),
        (vec![2], vec![], [Ok(1), Err("refused")]),
        (vec![2], vec![1], [Err("failed"), Err("refused")]),
    ] {
        let served = OneLane::new(RunLimits::default());
        *served.device.state.lock() = DeviceState { refused, failing, ..DeviceState::default() };
        let first = served.send(1);
        served.device.wait_until("the first is not enqueued", |state| state.enqueued == 1);
        let mut second = served.send(2);
        served.device.wait_until("the second is not enqueued", |state| state.enqueued == 2);
        assert!(second.try_recv().is_err(), "the first has not been answered");
        served.device.end(2);
        for (answer, expected) in [first, second].into_iter().zip(expected) {
            match expected {
                Ok(expected) => assert_eq!(item(answer), expected),
                Err(expected) => {
                    let error = failure(answer);
                    assert!(error.contains(expected), "{error}");
                }
            }
        }
        // The lane serves the next request.
        served.device.end(1);
        assert_eq!(item(served.send(3)), 3);
    }
}

#[test]
fn a_thread_that_does_not_come_back_leaves_both_launches_behind() {
    let least = Duration::from_millis(1);
    let served = OneLane::new(RunLimits { factor: 1, least, ..RunLimits::default() });
    let first = served.send(1);
    served.device.wait_until("the first is not enqueued", |state| state.enqueued == 1);
    let second = served.send(2);
    for answer in [first, second] {
        let error = failure(answer);
        assert!(error.contains("its limit") || error.contains("out of service"), "{error}");
    }
    // The run that was left behind is over, and another thread has the lane.
    served.device.end(100);
    let health = &served.served.model.health;
    while health.left_behind() > 0 || health.refuses().is_some() {
        std::thread::yield_now();
    }
    assert_eq!(item(served.send(3)), 3);
}

#[test]
fn a_brief_launch_runs_on_the_thread_that_brought_its_request() {
    let me = std::thread::current().id();
    for (may, is_bounded, here) in [(true, true, true), (true, false, false), (false, true, false)] {
        let served = OneLane::of(RunLimits::default(), is_bounded);
        served.device.end(1000);
        let mut answer = run_own(may, |own| served.send_own(7, own));
        if here {
            // The answer comes before `send` returns.
            assert_eq!(answer.try_recv().unwrap().answer.unwrap()[0].data[0], 7);
        } else {
            assert_eq!(item(answer), 7);
        }
        let threads = served.device.state.lock().threads.clone();
        assert_eq!(threads == [me], here, "the thread may: {may}, the launch is bounded: {is_bounded}");
    }
}

#[test]
fn a_thread_runs_one_launch_of_its_own_and_the_lanes_thread_the_next() {
    let served = OneLane::with_brief_launches(RunLimits::default());
    served.device.end(1000);
    let me = std::thread::current().id();
    let (mine, other) = run_own(true, |own| (served.send_own(1, own), served.send_own(2, own)));
    assert_eq!((item(mine), item(other)), (1, 2));
    let threads = served.device.state.lock().threads.clone();
    assert_eq!((threads.len(), threads.iter().filter(|thread| **thread == me).count()), (2, 1));
    // The thread takes no launch any more.
    assert_eq!(item(served.send(3)), 3);
    assert_ne!(served.device.state.lock().threads.last(), Some(&me));
}

#[test]
fn a_launch_is_its_lanes_again_where_the_thread_that_brought_it_panics() {
    let served = OneLane::with_brief_launches(RunLimits::default());
    served.device.end(1000);
    let (keep, kept) = std::sync::mpsc::channel();
    let panicked = std::panic::catch_unwind(AssertUnwindSafe(|| {
        run_own(true, |own| {
            keep.send(served.send_own(5, own)).unwrap();
            panic!("on purpose");
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(item(kept.recv().unwrap()), 5);
    assert_ne!(served.device.state.lock().threads, [std::thread::current().id()]);
}

#[test]
fn an_endless_brief_launch_leaves_the_work_to_other_threads() {
    let least = Duration::from_millis(1);
    let limits = RunLimits { factor: 1, least, ..RunLimits::default() };
    let served = Arc::new(OneLane::with_brief_launches(limits));
    let its = served.clone();
    let (answers, answered) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        // Stays in the engine until the device is done.
        run_own(true, |own| answers.send(its.send_own(1, own)).unwrap());
        let health = &its.served.model.health;
        while health.left_behind() > 0 || health.refuses().is_some() {
            std::thread::yield_now();
        }
        let mut again = run_own(true, |own| its.send_own(2, own));
        (again.try_recv().map(|answered| answered.answer.unwrap()[0].data[0]), std::thread::current().id())
    });
    let error = failure(answered.recv().unwrap());
    assert!(error.contains("its limit"), "{error}");
    served.device.end(1000);
    let (again, guest) = thread.join().unwrap();
    assert_eq!(again.unwrap(), 2);
    assert_eq!(served.device.state.lock().threads, [guest, guest]);
}
