//! Tests of models that move between the partitions of a device while they serve, on an engine that
//! waits where a test tells it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};

use downbeat_core::device::{
    DeviceDrop, DeviceModel, DeviceOutput, DevicePolicy, DeviceReject, DeviceRequest, InputSource, Launch, LaunchId,
    ModelSpec, PolicyEntry, PolicyModel, PolicyOptions, PolicySettings, PoolStats, SegmentProfile, SegmentRange, Span,
    Turn,
};
use downbeat_core::tensor::Signature;
use downbeat_core::{Duration, LatencyProfile, RequestId, Time};
use downbeat_engine::{Lane, LoadError, Model, Part, RunError, Share, State};
use downbeat_service::options::RunLimits;
use parking_lot::Condvar;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde::{Deserialize, Serialize};

use super::super::test_support::{self, Answer, Served, failure, item};
use super::*;

/// A time limit for events that are certain to come.
const LONG: std::time::Duration = std::time::Duration::from_secs(60);
/// The partitions of the device.
const PARTITIONS: u32 = 3;
/// The lanes of the model.
const LANES: usize = 2;

/// A policy that runs each request by itself.
#[derive(Debug, Default)]
struct Single {
    waiting: VecDeque<RequestId>,
    /// By launch: its lane and request; `None`: the request's client has gone.
    running: BTreeMap<LaunchId, (LaneId, Option<RequestId>)>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct SingleOptions;

impl PolicySettings for SingleOptions {
    fn spec(&self, model: PolicyModel) -> Result<ModelSpec, String> {
        Ok(ModelSpec::new(self, model.partition))
    }
}

impl PolicyOptions for SingleOptions {
    const ENTRY: &'static PolicyEntry = &PolicyEntry::new::<SingleOptions, SingleOptions>("single", "each by itself");

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn build(self) -> DeviceModel {
        let profile = LatencyProfile::linear(Duration::from_micros(1), Duration::ZERO, 4).unwrap();
        DeviceModel::new(Single::default(), SegmentProfile::whole(&profile))
    }
}

impl DevicePolicy for Single {
    fn lanes(&self, partition: PartitionId) -> Vec<LaneSpec> {
        vec![LaneSpec { partition, max_rows: 4, segments: SegmentRange::new(0, 1) }; LANES]
    }

    fn advance(&mut self, turn: &mut Turn<'_>) {
        for lane in turn.lanes().to_vec() {
            if self.running.values().any(|(other, _)| *other == lane) {
                continue;
            }
            let Some(request) = self.waiting.pop_front() else { break };
            let (id, batch) = (turn.new_launch(), turn.new_batch());
            self.running.insert(id, (lane, Some(request)));
            turn.launch(Launch {
                id,
                batch,
                granted: None,
                model: turn.model(),
                lane,
                segments: SegmentRange::new(0, 1),
                members: vec![request],
                rows: 1,
                computed_rows: 1,
                length: 0,
                inputs: InputSource::Host,
            });
        }
    }

    fn handle_request(&mut self, turn: &mut Turn<'_>, request: &DeviceRequest) -> Result<(), DeviceReject> {
        self.waiting.push_back(request.id);
        self.advance(turn);
        Ok(())
    }

    fn handle_completion(&mut self, turn: &mut Turn<'_>, launch: LaunchId, _: Span, _: &[RequestId]) {
        if let Some((_, Some(request))) = self.running.remove(&launch) {
            turn.push(DeviceOutput::Reply { request, launch });
        }
        self.advance(turn);
    }

    fn handle_cancel(&mut self, _: &mut Turn<'_>, request: RequestId) -> bool {
        if let Some((_, its)) = self.running.values_mut().find(|(_, its)| *its == Some(request)) {
            *its = None;
            return true;
        }
        let before = self.waiting.len();
        self.waiting.retain(|other| *other != request);
        self.waiting.len() < before
    }

    fn drop_waiting(&mut self, turn: &mut Turn<'_>, reason: DeviceDrop) {
        let drop = |request| DeviceOutput::Drop { request, reason };
        self.waiting.drain(..).for_each(|request| turn.push(drop(request)));
    }

    fn stats(&self) -> PoolStats {
        let (waiting, running) = (self.waiting.len() as u32, self.running.len() as u32);
        PoolStats { waiting, running, ..PoolStats::default() }
    }
}

/// The behaviour of the engine, and its record of runs.
#[derive(Default)]
struct Device {
    state: Mutex<DeviceState>,
    changed: Condvar,
    /// The number of existing lanes.
    lanes: AtomicUsize,
}

#[derive(Default)]
struct DeviceState {
    /// Shares whose runs wait.
    closed: BTreeSet<u32>,
    /// Runs that were begun, by share.
    begun: BTreeMap<u32, u32>,
    /// The first run of lanes that are made later waits.
    warm_up_closed: bool,
    warm_ups: u32,
    /// The failure of lanes that are made later.
    fails: Option<Failure>,
    made: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Failure {
    SecondLane,
    WarmUp,
    Panic,
}

impl Device {
    fn change(&self, change: impl FnOnce(&mut DeviceState)) {
        change(&mut self.state.lock());
        self.changed.notify_all();
    }

    fn wait_until(&self, what: &str, reached: impl Fn(&DeviceState) -> bool) {
        let mut state = self.state.lock();
        while !reached(&state) {
            assert!(!self.changed.wait_for(&mut state, LONG).timed_out(), "{what}");
        }
    }

    fn close(&self, partition: u32) {
        self.change(|state| assert!(state.closed.insert(partition)));
    }

    fn open(&self, partition: u32) {
        self.change(|state| assert!(state.closed.remove(&partition)));
    }

    fn lanes(&self) -> usize {
        self.lanes.load(Ordering::SeqCst)
    }
}

/// A lane that gives back its inputs.
struct Echo(Arc<Device>, u32);

impl Lane for Echo {
    fn run(&mut self, _range: Range<usize>, _state: &mut State) -> Result<(), RunError> {
        self.0.change(|state| *state.begun.entry(self.1).or_default() += 1);
        self.0.wait_until("a run goes on", |state| !state.closed.contains(&self.1));
        Ok(())
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.0.lanes.fetch_sub(1, Ordering::SeqCst);
    }
}

struct EchoModel(Signature, Arc<Device>);

impl Model for EchoModel {
    fn signature(&self) -> &Signature {
        &self.0
    }

    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError> {
        let mut state = self.1.state.lock();
        state.made += 1;
        if state.fails == Some(Failure::SecondLane) && state.made.is_multiple_of(LANES) {
            let (path, reason) = ("m".into(), "no memory for it".to_owned());
            return Err(LoadError::File { path, reason });
        }
        let Share::Part(partition) = place.share else { panic!("{place:?} is no partition") };
        self.1.lanes.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(Echo(self.1.clone(), partition)))
    }
}

fn serve() -> (Served, Arc<Device>) {
    let device = Arc::new(Device::default());
    let part = |index| Part { share: Share::Part(index), threads: 1, units: 1, size: String::new() };
    let parts: Vec<Part> = (0..PARTITIONS).map(part).collect();
    let its = device.clone();
    let warm_up: crate::device::WarmUpLanes = Arc::new(move |_, specs, lanes| {
        assert_eq!((specs.len(), lanes.len()), (LANES, LANES));
        its.change(|state| state.warm_ups += 1);
        its.wait_until("the warm-up goes on", |state| !state.warm_up_closed);
        let fails = its.state.lock().fails;
        assert_ne!(fails, Some(Failure::Panic), "a defect");
        anyhow::ensure!(fails != Some(Failure::WarmUp), "a lane does not run");
        Ok(())
    });
    let policy = ModelSpec::new(&SingleOptions, PartitionId::default());
    let engine = Arc::new(EchoModel(test_support::signature(), device.clone()));
    (Served::new(engine, policy, &parts, RunLimits::default(), warm_up), device)
}

/// Has lanes made in a partition, in which the model is not. The receiver hears of the outcome.
fn prepare(served: &Served, to: u32) -> Receiver<Result<(), String>> {
    let (ready, is_ready) = channel();
    let ready = Box::new(move |made| ready.send(made).unwrap());
    assert_eq!(served.host.prepare_move(&served.model, PartitionId(to), ready), Ok(true));
    is_ready
}

/// Moves the model to a partition.
fn move_to(served: &Served, to: u32) {
    prepare(served, to).recv_timeout(LONG).expect("each move ends").expect("lanes can be made");
    assert!(served.host.change_over(&served.model));
}

fn until(what: &str, reached: impl Fn() -> bool) {
    let clock = downbeat_service::clock::Clock::start();
    while !reached() {
        assert!(clock.now() < Time::ZERO + Duration::from_millis(60_000), "{what}");
        std::thread::yield_now();
    }
}

fn events(served: &Served, event: &str) -> f64 {
    served.metric(&format!("event=\"{event}\""))
}

#[test]
fn what_runs_ends_where_it_is_and_what_comes_runs_on_the_other_lanes() {
    let (served, device) = serve();
    device.close(0);
    let (_, mut first) = served.send(1);
    let (_, mut second) = served.send(2);
    device.wait_until("two do not run", |state| state.begun.get(&0) == Some(&2));
    move_to(&served, 1);
    assert_eq!(events(&served, "switch"), 1.0);
    let (_, third) = served.send(3);
    assert_eq!(item(third), 3);
    assert!(first.try_recv().is_err() && second.try_recv().is_err(), "they run where they did");
    let past = served.host.past_of(&served.model, Time::ZERO);
    assert_eq!((past.partition, past.lanes), (1, vec![4; LANES]));
    device.open(0);
    assert_eq!((item(first), item(second)), (1, 2));
    until("the former lanes are there still", || device.lanes() == LANES);
    assert_eq!(served.metric("downbeat_lanes{"), LANES as f64);
}

#[test]
fn a_waiting_request_is_launched_on_the_other_lanes_at_once() {
    let (served, device) = serve();
    device.close(0);
    let running = [served.send(1).1, served.send(2).1];
    device.wait_until("two do not run", |state| state.begun.get(&0) == Some(&2));
    let (_, third) = served.send(3);
    move_to(&served, 1);
    assert_eq!(item(third), 3);
    assert_eq!(device.state.lock().begun.get(&1), Some(&1));
    device.open(0);
    assert_eq!(running.map(item), [1, 2]);
}

#[test]
fn lanes_that_cannot_all_be_made_change_nothing_and_none_is_left() {
    for fails in [Failure::SecondLane, Failure::WarmUp, Failure::Panic] {
        let (served, device) = serve();
        device.change(|state| state.fails = Some(fails));
        for sent in [1, 2] {
            assert!(prepare(&served, 1).recv_timeout(LONG).expect("each move ends").is_err(), "{fails:?}");
            assert!(!served.host.change_over(&served.model), "{fails:?}");
            assert_eq!(item(served.send(sent).1), sent, "{fails:?}");
            until("nothing is said", || events(&served, "prepare_failed") == f64::from(sent));
        }
        until("lanes are left", || device.lanes() == LANES);
        assert_eq!((events(&served, "switch"), served.metric("downbeat_lanes{")), (0.0, LANES as f64), "{fails:?}");
        assert_eq!(device.state.lock().begun.keys().copied().collect::<Vec<_>>(), [0], "{fails:?}");
        device.change(|state| state.fails = None);
        move_to(&served, 1);
        assert_eq!(item(served.send(3).1), 3, "{fails:?}");
    }
}

#[test]
fn a_model_that_is_removed_while_its_lanes_are_made_leaves_none_behind() {
    for fails in [None, Some(Failure::WarmUp)] {
        let (served, device) = serve();
        device.change(|state| (state.warm_up_closed, state.fails) = (true, fails));
        let _is_ready = prepare(&served, 1);
        device.wait_until("nobody makes lanes", |state| state.warm_ups == 1);
        served.host.remove_model(&served.model);
        assert!(failure(served.send(2).1).contains("'m'"), "there is no such model");
        device.change(|state| state.warm_up_closed = false);
        until("lanes are left", || device.lanes() == 0);
    }
}

#[test]
fn a_model_removed_during_a_switch_answers_its_launches_only() {
    for switches in [true, false] {
        let (served, device) = serve();
        device.close(0);
        device.close(1);
        let on_first = [served.send(1).1, served.send(2).1];
        device.wait_until("two do not run", |state| state.begun.get(&0) == Some(&2));
        let mut more: Vec<(u8, Answer)> = (3..6).map(|sent| (sent, served.send(sent).1)).collect();
        if switches {
            move_to(&served, 1);
            device.wait_until("it is not moved", |state| state.begun.get(&1) == Some(&2));
        } else {
            prepare(&served, 1).recv_timeout(LONG).expect("each move ends").expect("lanes can be made");
        }
        served.host.remove_model(&served.model);
        for (_, answer) in more.split_off(if switches { 2 } else { 0 }) {
            assert!(failure(answer).contains("unloaded"), "it waited");
        }
        device.open(0);
        device.open(1);
        assert_eq!(on_first.map(item), [1, 2]);
        more.into_iter().for_each(|(sent, answer)| assert_eq!(item(answer), sent));
        until("lanes are left", || device.lanes() == 0);
    }
}

/// Moves the model to random partitions. Returns how often it has changed over.
fn moved_at_random(served: &Served, rng: &mut Pcg64Mcg) -> u32 {
    let mut changed = 0;
    for _ in 0..60 {
        let (ready, is_ready) = channel();
        let to = PartitionId(rng.random_range(0..PARTITIONS));
        let ready = Box::new(move |made| ready.send(made).unwrap());
        // The host refuses a move after the model has gone: then `ready` is not called.
        if let Ok(true) = served.host.prepare_move(&served.model, to, ready)
            && is_ready.recv().expect("each move comes to an end").is_ok()
            && rng.random_bool(0.8)
        {
            changed += u32::from(served.host.change_over(&served.model));
        }
    }
    changed
}

/// Several clients send and leave, while the model is moved all the time, and lanes sometimes cannot
/// be made.
fn under_load(seed: u64) -> (f64, f64) {
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let (served, device) = serve();
    let (served, removed) = (Arc::new(served), rng.random_bool(0.5));
    let client = |seed: u64| {
        let (served, device) = (served.clone(), device.clone());
        std::thread::spawn(move || {
            let mut rng = Pcg64Mcg::seed_from_u64(seed);
            let mut open: VecDeque<(u8, Answer)> = VecDeque::new();
            let mut answered = 0;
            let mut end = |(sent, answer): (u8, Answer)| match answer.blocking_recv().map(|answered| answered.answer) {
                Ok(Ok(outputs)) => {
                    assert_eq!(outputs[0].data[0], sent, "of whoever asked");
                    answered += 1;
                }
                // Only requests that came after the removal, or waited then, may fail.
                Ok(Err(error)) => assert!(removed, "{error}"),
                Err(_) => panic!("a request is lost"),
            };
            for sent in 0..200u8 {
                let (request, answer) = served.send(sent);
                if rng.random_bool(0.1) {
                    drop(answer);
                    served.host.cancel(&served.model, request);
                } else {
                    open.push_back((sent, answer));
                }
                while open.len() > rng.random_range(0..12) {
                    open.pop_front().into_iter().for_each(&mut end);
                }
                if rng.random_bool(0.05) {
                    let failures = [None, None, Some(Failure::SecondLane), Some(Failure::WarmUp)];
                    let fails = failures[rng.random_range(0..failures.len())];
                    device.change(|state| state.fails = fails);
                }
                if removed && sent == 190 {
                    served.host.remove_model(&served.model);
                }
            }
            open.into_iter().for_each(end);
            answered
        })
    };
    let clients: Vec<_> = (0..3).map(|client_of| client(seed * 10 + client_of)).collect();
    let changed = moved_at_random(&served, &mut rng);
    let answered: u32 = clients.into_iter().map(|client| client.join().unwrap()).sum();
    assert!(answered > 0);
    // Lanes that the model has not switched to go away with the next move.
    let _ = served.host.prepare_move(&served.model, served.host.partition(&served.model), Box::new(|_| ()));
    until("lanes are left", || device.lanes() == if removed { 0 } else { LANES });
    assert_eq!(events(&served, "switch"), f64::from(changed), "each is counted");
    let stats = served.host.waiting(&served.model);
    assert_eq!(stats, 0, "nothing waits");
    (events(&served, "switch"), events(&served, "prepare_failed"))
}

#[test]
fn each_request_is_answered_once_however_often_the_model_is_moved() {
    let (mut switches, mut failures) = (0.0, 0.0);
    for seed in 0..20 {
        println!("seed {seed}");
        let (switched, failed) = under_load(seed);
        switches += switched;
        failures += failed;
    }
    assert!(switches > 20.0 && failures > 0.0, "{switches} switches and {failures} failures");
}
