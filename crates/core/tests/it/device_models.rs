//! Several models with different policies on one device, which come, change, move and go at random
//! times. The test judges from outside, and replays the log.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use downbeat_core::device::overlap::{FeatureLayout, FeatureModel, Layer, LearnedPredictor, Mlp};
use downbeat_core::device::*;
use downbeat_core::journal::Journal;
use downbeat_core::journal::device::DeviceInput;
use downbeat_core::{BatchId, Duration, LatencyProfile, ModelId, RequestId, Time};
use proptest::prelude::*;

use crate::journal_checks::{check, taken};

const PARTITION: PartitionId = PartitionId(0);
const SEGMENTS: u16 = 3;
const MOST: u32 = 8;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Exclusive,
    Windowed { window_us: u64, ahead: u32 },
    Elastic,
    Staged { by_length: bool, ring: bool },
    Overlap,
}

impl Kind {
    fn profile() -> SegmentProfile {
        let table = |us: u64| (1..=MOST).map(|rows| Duration::from_micros(us * (4 + u64::from(rows)))).collect();
        let segment = |us| vec![LatencyProfile::from_table(table(us)).unwrap()];
        SegmentProfile::new(vec![0], &[segment(10), segment(30), segment(5)]).unwrap()
    }

    fn spec(self, drop: bool) -> ModelSpec {
        let (profile, queue_bound) = (Kind::profile(), 20);
        match self {
            Kind::Exclusive => ModelSpec::new(&ExclusiveOptions { profile }, PARTITION),
            Kind::Windowed { window_us, ahead } => {
                let window = Duration::from_micros(window_us);
                let options =
                    WindowedOptions { profile, max_batch: MOST, window, fill: false, drop, queue_bound, ahead };
                ModelSpec::new(&options, PARTITION)
            }
            Kind::Elastic => {
                let (mixes, max_running, ring_slots) = (MixTable::naive(MOST), MOST, 2 * MOST);
                let options =
                    ElasticOptions { profile, mixes, max_running, ring_slots, drop, queue_bound, cores: None };
                ModelSpec::new(&options, PARTITION)
            }
            Kind::Overlap => {
                ModelSpec::new(&OverlappedOptions { profile, max_batch: MOST, drop, queue_bound }, PARTITION)
            }
            Kind::Staged { by_length, ring } => ModelSpec::new(
                &StagedOptions {
                    profile,
                    pairs: 2,
                    max_batch: MOST,
                    by_length,
                    by_operator: true,
                    by_load: true,
                    window: None,
                    comp_wait: None,
                    joining: Joining::default(),
                    ring_slots: if ring { 2 * MOST } else { 0 },
                    drop,
                    queue_bound,
                },
                PARTITION,
            ),
        }
    }
}

/// Predicts the same for all groups of up to three of the models of the test.
fn predictor(ms: f32) -> LearnedPredictor {
    let known = |model| FeatureModel { model: ModelId(model), operators: SEGMENTS };
    let layout = FeatureLayout { models: (0..120).map(known).collect(), at_once: 3 };
    let layer = Layer { weights: vec![0.0; layout.len()], biases: vec![ms.ln()] };
    let mlp = Mlp::new(vec![0.0; layout.len()], vec![1.0; layout.len()], vec![layer]).unwrap();
    LearnedPredictor::new(layout, mlp).unwrap()
}

#[derive(Clone, Debug)]
enum Step {
    /// A request, or for an exclusive model a batch of so many requests. `model` chooses among the
    /// models.
    Arrive {
        model: usize,
        size: u32,
        length: u32,
        deadline_us: Option<u64>,
    },
    Cancel(usize),
    Come(Kind, bool),
    Change(usize, Kind, bool),
    Go(usize),
    Share(u32),
    /// To another partition, or back.
    Move(usize, u32),
    /// A model's lanes are ready, or cannot be made.
    Prepared(usize, bool),
    Switch(usize),
    Limit(usize, u32),
    /// The predictor says that a group takes so many milliseconds. None: there is no predictor.
    Predict(Option<f32>),
}

fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
    let kind = || {
        prop_oneof![
            Just(Kind::Exclusive),
            (0..300u64, 0..3u32).prop_map(|(window_us, ahead)| Kind::Windowed { window_us, ahead }),
            Just(Kind::Elastic),
            any::<(bool, bool)>().prop_map(|(by_length, ring)| Kind::Staged { by_length, ring }),
            Just(Kind::Overlap),
            Just(Kind::Overlap),
        ]
    };
    let deadline = prop_oneof![2 => Just(None), 1 => (100..5_000u64).prop_map(Some)];
    let step = prop_oneof![
        30 => (any::<usize>(), 1..4u32, 1..20u32, deadline)
            .prop_map(|(model, size, length, deadline_us)| Step::Arrive { model, size, length, deadline_us }),
        4 => any::<usize>().prop_map(Step::Cancel),
        3 => (kind(), any::<bool>()).prop_map(|(kind, drop)| Step::Come(kind, drop)),
        1 => (any::<usize>(), kind(), any::<bool>()).prop_map(|(model, kind, drop)| Step::Change(model, kind, drop)),
        1 => any::<usize>().prop_map(Step::Go),
        1 => (1..3u32).prop_map(Step::Share),
        3 => (any::<usize>(), 0..3u32).prop_map(|(model, partition)| Step::Move(model, partition)),
        4 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(model, made)| Step::Prepared(model, made)),
        4 => any::<usize>().prop_map(Step::Switch),
        1 => (any::<usize>(), 1..10u32).prop_map(|(model, rows)| Step::Limit(model, rows)),
        1 => prop::option::weighted(0.7, 0.01..2.0f32).prop_map(Step::Predict),
    ];
    prop::collection::vec((prop_oneof![Just(0), 1..200u64, 200..2_000u64], step), 1..120)
}

struct Known {
    model: ModelId,
    deadline: Time,
    size: u32,
    /// Segments that have run.
    done: u16,
    exited: bool,
    running: Option<LaunchId>,
    is_open: bool,
}

struct World {
    journal: Journal<DeviceScheduler>,
    log: Vec<u8>,
    models: BTreeMap<ModelId, Kind>,
    gone: BTreeSet<ModelId>,
    requests: BTreeMap<RequestId, Known>,
    /// The launches of each lane: the first one runs, since the time in `since`.
    lanes: BTreeMap<LaneId, VecDeque<Launch>>,
    since: BTreeMap<LaneId, Time>,
    ends: BTreeSet<(Time, LaneId)>,
    inputs: BTreeSet<(Time, ModelId, RequestId)>,
    /// The model of each lane, until the lane is free.
    owners: BTreeMap<LaneId, ModelId>,
    /// Models that wait for lanes.
    preparing: Vec<ModelId>,
    switches: u32,
    /// The launched batches: each with its model and the batch as which it was granted.
    batches: BTreeMap<BatchId, (ModelId, Option<BatchId>)>,
    /// Models that have run in groups. A prediction may make the arbiter give up their requests.
    grouped: BTreeSet<ModelId>,
    /// The group lanes of these models.
    group_lanes: BTreeSet<LaneId>,
    /// Launches of the running group.
    group: BTreeSet<LaunchId>,
    state: u64,
    /// Counts of requests answered in time, answered late, dropped as hopeless or with their model,
    /// and cancelled.
    met: u32,
    missed: u32,
    dropped: u32,
    cancelled: u32,
    accepted: u32,
}

impl World {
    fn new() -> Self {
        World {
            journal: Journal::on(DeviceScheduler::new()),
            log: Vec::new(),
            models: BTreeMap::new(),
            gone: BTreeSet::new(),
            requests: BTreeMap::new(),
            lanes: BTreeMap::new(),
            since: BTreeMap::new(),
            ends: BTreeSet::new(),
            inputs: BTreeSet::new(),
            owners: BTreeMap::new(),
            preparing: Vec::new(),
            switches: 0,
            batches: BTreeMap::new(),
            grouped: BTreeSet::new(),
            group_lanes: BTreeSet::new(),
            group: BTreeSet::new(),
            state: 1,
            met: 0,
            missed: 0,
            dropped: 0,
            cancelled: 0,
            accepted: 0,
        }
    }

    fn draw(&mut self, most: u64) -> u64 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) % most
    }

    fn tell(&mut self, now: Time, input: DeviceInput) -> bool {
        let told = self.journal.apply(now, input);
        while let Some(output) = self.journal.poll() {
            self.carry_out(now, output);
        }
        if self.draw(9) == 0 {
            self.journal.take_log(&mut self.log);
        }
        told.unwrap_or(false)
    }

    fn run_until(&mut self, end: Time) {
        loop {
            let launch = self.ends.first().map(|(at, _)| *at);
            let input = self.inputs.first().map(|(at, ..)| *at);
            let timer = self.journal.machine().poll_timeout().map(|(at, _)| at);
            let Some(at) = [launch, input, timer].into_iter().flatten().min().filter(|at| *at < end) else { return };
            if launch == Some(at) {
                self.complete(at);
            } else if input == Some(at) {
                let (_, model, request) = self.inputs.pop_first().unwrap();
                self.tell(at, DeviceInput::Input(model, request));
            } else {
                self.tell(at, DeviceInput::Timeout);
                assert!(
                    self.journal.machine().poll_timeout().is_none_or(|(next, _)| next > at),
                    "a timer changes something"
                );
            }
        }
    }

    fn begin(&mut self, now: Time, lane: LaneId) {
        let took = Duration::from_micros(1 + self.draw(600));
        self.since.insert(lane, now);
        self.ends.insert((now + took, lane));
    }

    fn complete(&mut self, now: Time) {
        let (_, lane) = self.ends.pop_first().unwrap();
        let launch = self.lanes.get_mut(&lane).and_then(VecDeque::pop_front).unwrap();
        self.group.remove(&launch.id);
        let start = self.since[&lane];
        if !self.lanes[&lane].is_empty() {
            self.begin(now, lane);
        }
        let mut exits = Vec::new();
        for member in &launch.members {
            let may_exit = launch.segments.end < SEGMENTS && self.draw(8) == 0;
            let known = self.requests.get_mut(member).unwrap();
            (known.running, known.done) = (None, launch.segments.end);
            if may_exit && known.is_open {
                known.exited = true;
                exits.push(*member);
            }
        }
        self.tell(now, DeviceInput::Completion { launch: launch.id, span: Span { start, end: now }, exits });
    }

    fn close(&mut self, request: RequestId) -> &Known {
        let known = self.requests.get_mut(&request).unwrap();
        assert!(std::mem::take(&mut known.is_open), "{request} ends once");
        known
    }

    fn launch(&mut self, now: Time, launch: Launch) {
        let shared = self.journal.machine().shared_lanes(PARTITION).contains(&launch.lane);
        assert!(
            shared || self.owners.get(&launch.lane) == Some(&launch.model),
            "{} is not {}'s",
            launch.lane,
            launch.model
        );
        let mut rows = 0;
        for member in &launch.members {
            let known = self.requests.get_mut(member).unwrap();
            assert_eq!(known.model, launch.model);
            assert!(known.running.replace(launch.id).is_none(), "{member} is in one launch at a time");
            assert!(known.done == launch.segments.first && !known.exited, "{member} runs its segments in order");
            rows += known.size;
        }
        assert_eq!(rows, launch.rows);
        let whose = (launch.model, launch.granted);
        let before = self.batches.insert(launch.batch, whose);
        assert!(before.is_none_or(|before| before == whose), "{} is the name of one batch", launch.batch);
        assert_eq!(launch.granted.is_some(), shared, "who makes batches is not on shared lanes");
        let lane = self.lanes.entry(launch.lane).or_default();
        lane.push_back(launch.clone());
        assert!(lane.len() <= 2, "one runs and one waits behind it");
        if lane.len() == 1 {
            self.begin(now, launch.lane);
        }
    }

    /// Launches that begin together, each of another model, while no launch of the group before
    /// still runs (Abacus §6.1).
    fn begin_group(&mut self, launches: &[Launch]) {
        assert!(self.group.is_empty(), "one group at a time");
        let models: BTreeSet<ModelId> = launches.iter().map(|launch| launch.model).collect();
        assert_eq!(models.len(), launches.len(), "a group has one request of each model");
        assert!(launches.iter().all(|launch| self.group_lanes.contains(&launch.lane) && launch.members.len() == 1));
        self.group.extend(launches.iter().map(|launch| launch.id));
    }

    fn carry_out(&mut self, now: Time, output: DeviceOutput) {
        match output {
            DeviceOutput::Admit { model, request, .. } => {
                self.inputs.insert((now + Duration::from_micros(5), model, request));
            }
            DeviceOutput::Launch(launch) => {
                if self.group_lanes.contains(&launch.lane) {
                    self.begin_group(std::slice::from_ref(&launch));
                }
                self.launch(now, launch);
            }
            DeviceOutput::Group(launches) => {
                self.begin_group(&launches);
                launches.into_iter().for_each(|launch| self.launch(now, launch));
            }
            DeviceOutput::Reply { request, launch: _ } => {
                let known = self.close(request);
                assert!(known.running.is_none() && (known.exited || known.done == SEGMENTS), "{request} has run");
                match now <= known.deadline {
                    true => self.met += 1,
                    false => self.missed += 1,
                }
            }
            DeviceOutput::Drop { request, reason } => {
                let known = self.close(request);
                let (model, deadline) = (known.model, known.deadline);
                let has_run = known.running.is_some() || known.done > 0;
                let is_late = now + Kind::profile().total(known.size, 0) > deadline;
                let is_hopeless = match self.grouped.contains(&model) {
                    true => deadline < Time::MAX,
                    false => is_late && !has_run,
                };
                assert!(reason == DeviceDrop::Hopeless || !has_run, "{request} has not run");
                let is_right = if reason == DeviceDrop::Removed { self.gone.contains(&model) } else { is_hopeless };
                assert!(is_right, "{request}: {reason:?}");
                self.dropped += 1;
            }
            DeviceOutput::Free { model, lanes } => {
                for lane in lanes {
                    assert!(self.lanes.remove(&lane).unwrap_or_default().is_empty(), "{lane} is idle");
                    assert_eq!(self.owners.remove(&lane), model, "{lane} was {model:?}'s");
                    self.group_lanes.remove(&lane);
                }
            }
            DeviceOutput::Prepare { model, lanes, partition } => {
                // A changed model may have launches under way for its former policy.
                self.preparing.push(model);
                if self.models.get(&model) == Some(&Kind::Overlap) {
                    self.group_lanes.extend(&lanes);
                }
                for lane in lanes {
                    assert_eq!(self.journal.machine().lane(lane).map(|spec| spec.partition), Some(partition));
                    assert!(self.owners.insert(lane, model).is_none(), "{lane} is one model's");
                }
            }
            DeviceOutput::Switch { model, from, to } => {
                assert!(from.iter().chain(&to).all(|lane| self.owners.get(lane) == Some(&model)));
                self.switches += 1;
            }
            DeviceOutput::Note { .. } => {}
        }
    }

    fn step(&mut self, now: Time, id: u64, step: Step) {
        let pick = |models: &BTreeMap<ModelId, Kind>, n: usize| models.keys().nth(n % models.len().max(1)).copied();
        match step {
            Step::Come(..) | Step::Change(..) => {
                let (model, kind, drop) = match step {
                    Step::Change(n, kind, drop) if !self.models.is_empty() => {
                        (pick(&self.models, n).unwrap(), kind, drop)
                    }
                    Step::Come(kind, drop) | Step::Change(_, kind, drop) => (ModelId(id as u32), kind, drop),
                    _ => return,
                };
                assert!(self.tell(now, DeviceInput::Model(model, Some(kind.spec(drop)))));
                self.models.insert(model, kind);
                if kind == Kind::Overlap {
                    self.group_lanes.extend(self.journal.machine().lanes(model));
                    self.grouped.extend(drop.then_some(model));
                }
                for lane in self.journal.machine().lanes(model) {
                    assert!(self.owners.insert(*lane, model).is_none(), "{lane} is one model's");
                }
            }
            Step::Go(n) => {
                let Some(model) = pick(&self.models, n) else { return };
                self.models.remove(&model);
                self.gone.insert(model);
                assert!(self.tell(now, DeviceInput::Model(model, None)));
            }
            Step::Share(lanes) => {
                assert!(self.tell(now, DeviceInput::Layout(Layout { shared_lanes: vec![lanes, 0] })));
            }
            Step::Move(n, to) => {
                let Some(model) = pick(&self.models, n) else { return };
                let lanes = self.journal.machine().lanes(model).to_vec();
                let told = self.tell(now, DeviceInput::Move(model, PartitionId(to)));
                assert!(!told || to < 2 && !lanes.is_empty());
            }
            Step::Prepared(n, made) => {
                // The chosen model may be one that goes.
                let Some(model) = self.preparing.get(n % self.preparing.len().max(1)).copied() else { return };
                self.prepared(now, model, made);
            }
            Step::Switch(n) => {
                let Some(model) = pick(&self.models, n) else { return };
                let before = self.switches;
                let is_ready = self.tell(now, DeviceInput::Switch(model));
                assert_eq!(self.switches - before, u32::from(is_ready));
            }
            Step::Limit(n, rows) => {
                let Some(model) = pick(&self.models, n) else { return };
                // Not every policy takes a limit.
                self.tell(now, DeviceInput::Limit(model, rows));
            }
            Step::Predict(ms) => {
                let predictor = ms.map(predictor);
                self.tell(
                    now,
                    DeviceInput::Groups(GroupSettings { predictor, error: 0.1, ..GroupSettings::default() }),
                );
            }
            Step::Cancel(n) => {
                let Some((request, known)) = self.requests.iter().nth(n % self.requests.len().max(1)) else { return };
                let (request, model, is_open) = (*request, known.model, known.is_open);
                // The request is closed before the scheduler learns of the cancel: a launch that
                // holds it goes on.
                if is_open {
                    self.close(request);
                    self.cancelled += 1;
                }
                assert_eq!(self.tell(now, DeviceInput::Cancel(model, request)), is_open, "{request} is there or not");
            }
            Step::Arrive { model, size, length, deadline_us } => {
                let Some(model) = pick(&self.models, model) else { return };
                let deadline = deadline_us.map_or(Time::MAX, |after| now + Duration::from_micros(after));
                let known =
                    |size| Known { model, deadline, size, done: 0, exited: false, running: None, is_open: true };
                let first = RequestId(id * 10);
                let scheduler = self.journal.machine();
                assert!(scheduler.free_at(now, model) >= now);
                if self.models[&model] != Kind::Exclusive {
                    self.requests.insert(first, known(size));
                    let request = DeviceRequest { id: first, model, deadline, size, length };
                    return self.accept(now, DeviceInput::Request(request), &[first]);
                }
                let has_room = |lane: &&LaneId| self.lanes.get(*lane).is_none_or(|launches| launches.len() < 2);
                let Some(lane) = scheduler.shared_lanes(PARTITION).iter().find(has_room).copied() else { return };
                let members: Vec<RequestId> = (0..u64::from(size)).map(|n| RequestId(first.0 + n)).collect();
                members.iter().for_each(|member| assert!(self.requests.insert(*member, known(1)).is_none()));
                let batch = GrantedBatch { id: BatchId(id), model, lane, members: members.clone(), rows: size };
                self.accept(now, DeviceInput::Batch(batch), &members);
            }
        }
    }

    fn prepared(&mut self, now: Time, model: ModelId, made: bool) {
        self.preparing.retain({
            let mut is_first = true;
            move |other| *other != model || !std::mem::take(&mut is_first)
        });
        self.tell(now, DeviceInput::Prepared(model, if made { Ok(()) } else { Err("no memory".to_owned()) }));
    }

    fn accept(&mut self, now: Time, input: DeviceInput, requests: &[RequestId]) {
        if self.tell(now, input) {
            self.accepted += requests.len() as u32;
        } else {
            requests
                .iter()
                .for_each(|request| assert!(self.requests.remove(request).is_some_and(|known| known.is_open)));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Each request is answered, dropped or cancelled once and counted so. No lane runs two
    /// launches, or has two waiting. The log replays alike.
    #[test]
    fn models_come_change_and_go(steps in steps(), seed in any::<u64>()) {
        let mut world = World::new();
        world.state = seed;
        let mut now = Time::ZERO;
        let first = [Step::Share(1), Step::Come(Kind::Exclusive, false), Step::Come(Kind::Elastic, true)].map(|step| (0, step));
        for (id, (gap_us, step)) in first.into_iter().chain(steps).enumerate() {
            now += Duration::from_micros(gap_us);
            world.run_until(now);
            world.step(now, id as u64, step);
        }
        world.run_until(Time::MAX);
        prop_assert!(world.requests.values().all(|known| !known.is_open), "everything was answered");
        prop_assert_eq!(world.accepted, world.met + world.missed + world.dropped + world.cancelled);
        let last = now + Duration::from_millis(1_000_000);
        while let Some(model) = world.preparing.first().copied() {
            world.prepared(last, model, true);
        }
        for model in std::mem::take(&mut world.models).into_keys() {
            world.tell(last, DeviceInput::Model(model, None));
        }
        prop_assert!(world.owners.is_empty(), "lanes of models that went are free: {:?}", world.owners);

        world.log.extend(taken(world.journal));
        check(DeviceScheduler::new(), &world.log);
    }
}
