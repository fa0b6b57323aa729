//! Shards and the matchmaker with messages that take their time, in every order that a driver on
//! threads may bring about. The checker knows only the inputs and the outputs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use downbeat_core::cluster::*;
use downbeat_core::journal::Journal;
use downbeat_core::journal::cluster::{Input, Reply};
use downbeat_core::{
    BatchId, DeviceId, DeviceKind, DeviceProfiles, Duration, LatencyProfile, ModelId, RequestId, Time,
};
use proptest::prelude::*;

use crate::journal_checks::{check, taken};

const KINDS: u32 = 2;
const SHARDS: u32 = 3;
const MODELS: u32 = 5;
const MAX_BATCH: u32 = 4;

#[derive(Clone, Debug)]
enum Step {
    Wait {
        us: u64,
    },
    Request {
        model: u32,
        size: u32,
        slo_us: u64,
    },
    Cancel(usize),
    /// A shard receives one message.
    ToShard(u32),
    /// The matchmaker receives so many messages, and then grants as many candidates as it can.
    ToMatchmaker(usize),
    Complete(usize),
    RemoveDevice(usize),
    AddDevice(u32),
    RemoveModel(u32),
    SetProfile(u32, u64),
    SetNetwork(u64, u64),
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..300u64).prop_map(|us| Step::Wait { us }),
        14 => (0..MODELS, 1..3u32, 100..3000u64).prop_map(|(model, size, slo_us)| Step::Request { model, size, slo_us }),
        2 => any::<usize>().prop_map(Step::Cancel),
        9 => (0..SHARDS).prop_map(Step::ToShard),
        9 => (0..5usize).prop_map(Step::ToMatchmaker),
        6 => any::<usize>().prop_map(Step::Complete),
        1 => any::<usize>().prop_map(Step::RemoveDevice),
        1 => (0..KINDS).prop_map(Step::AddDevice),
        1 => (0..80u64, 0..20u64).prop_map(|(control, data)| Step::SetNetwork(control, data)),
        1 => (0..MODELS).prop_map(Step::RemoveModel),
        1 => (0..MODELS, 50..600u64).prop_map(|(model, us)| Step::SetProfile(model, us)),
    ]
}

enum ToMatchmaker {
    /// A shard wrote the model's place for its newest candidate.
    Changed(ModelId),
    Answer(Answer),
    Completed(DeviceId, BatchId),
    Removed(ModelId),
}

struct World {
    now: Time,
    shards: Vec<Journal<Shard>>,
    matchmaker: Journal<Matchmaker>,
    grants: Vec<VecDeque<Grant>>,
    to_matchmaker: VecDeque<ToMatchmaker>,
    newest: BTreeMap<(ModelId, DeviceKind), Option<Candidate>>,
    /// Devices that have not left, with the running batch and the batches sent behind it.
    devices: BTreeMap<DeviceId, (DeviceKind, Vec<(BatchId, ModelId)>)>,
    waiting: BTreeMap<RequestId, (Request, Ticket)>,
    batches: BTreeSet<BatchId>,
    next_request: u64,
}

/// Models with an odd number run at half the speed on the second kind, the others alike on both.
fn profiles(model: u32, us: u64) -> DeviceProfiles {
    let profile = |factor| {
        let (alpha, beta) = (Duration::from_micros(40 * factor), Duration::from_micros(us * factor));
        LatencyProfile::linear(alpha, beta, MAX_BATCH).unwrap()
    };
    if model.is_multiple_of(2) {
        return profile(1).into();
    }
    DeviceProfiles::by_kind([(DeviceKind(0), profile(1)), (DeviceKind(1), profile(2))]).unwrap()
}

fn shard_of(model: ModelId) -> usize {
    (model.0 % SHARDS) as usize
}

impl World {
    fn new() -> Self {
        let mut matchmaker = Journal::on(Matchmaker::new());
        let mut shards: Vec<_> = (0..SHARDS).map(|index| Journal::on(Shard::new(index, SHARDS))).collect();
        let dispatches = [
            DispatchPolicy::Deferred,
            DispatchPolicy::Eager,
            DispatchPolicy::Timeout { delay: Duration::from_micros(200), preferred: vec![2] },
        ];
        for index in 0..MODELS {
            let max_in_flight = if index == 0 { 1 } else { u32::MAX };
            let model = ModelId(index);
            matchmaker.apply(Time::ZERO, Input::AddLimit(max_in_flight));
            let options = ModelOptions {
                profiles: profiles(index, 100),
                max_batch: MAX_BATCH,
                drop: if index % 2 == 0 { DropPolicy::WindowDrop } else { DropPolicy::HeadDrop },
                dispatch: dispatches[index as usize % 3].clone(),
                max_in_flight,
                shares_limit: None,
                max_wait: Duration::MAX,
                levels: Vec::new(),
            };
            shards[shard_of(model)].apply(Time::ZERO, Input::AddModel(model, Box::new(options)));
        }
        let mut device = |kind: u32| {
            matchmaker.apply(Time::ZERO, Input::AddDevice(DeviceKind(kind)));
            (DeviceId(kind), (DeviceKind(kind), Vec::new()))
        };
        let devices = (0..KINDS).map(&mut device).collect();
        for shard in &mut shards {
            for kind in (0..KINDS).map(DeviceKind) {
                shard.apply(Time::ZERO, Input::SetDevices(kind, 1));
            }
        }
        World {
            now: Time::ZERO,
            shards,
            matchmaker,
            grants: (0..SHARDS).map(|_| VecDeque::new()).collect(),
            to_matchmaker: VecDeque::new(),
            newest: BTreeMap::new(),
            devices,
            waiting: BTreeMap::new(),
            batches: BTreeSet::new(),
            next_request: 0,
        }
    }

    fn apply(&mut self, step: &Step) {
        let now = self.now;
        match *step {
            Step::Wait { us } => self.now += Duration::from_micros(us),
            Step::Request { model, size, slo_us } => {
                let (id, model) = (RequestId(self.next_request), ModelId(model));
                self.next_request += 1;
                let deadline = now + Duration::from_micros(slo_us);
                let request = Request { id, model, deadline, queue_expiry: Time::MAX, level: 0, size };
                if let Ok(ticket) = self.shards[shard_of(model)].handle_request(now, &request) {
                    self.waiting.insert(id, (request, ticket));
                }
                self.collect(shard_of(model));
            }
            Step::Cancel(n) => {
                if let Some((&id, &(request, ticket))) = self.waiting.iter().nth(n % (self.waiting.len() + 1)) {
                    let at = shard_of(request.model);
                    if self.shards[at].handle_cancel(now, request.model, ticket) {
                        assert!(self.waiting.remove(&id).is_some(), "{id} left twice");
                    }
                    self.collect(at);
                }
            }
            Step::ToShard(shard) => self.deliver_grant(shard as usize),
            Step::ToMatchmaker(messages) => self.deliver(messages),
            Step::Complete(n) => {
                let busy: Vec<_> =
                    self.devices.iter().filter(|(_, (_, sent))| !sent.is_empty()).map(|(id, _)| *id).collect();
                if !busy.is_empty() {
                    let device = busy[n % busy.len()];
                    let (batch, _) = self.devices.get_mut(&device).unwrap().1.remove(0);
                    self.to_matchmaker.push_back(ToMatchmaker::Completed(device, batch));
                }
            }
            Step::RemoveDevice(n) => {
                // One device stays, so that everything is answered in the end.
                if self.devices.len() > 1 {
                    let device = *self.devices.keys().nth(n % self.devices.len()).unwrap();
                    self.devices.remove(&device);
                    self.matchmaker.apply(now, Input::RemoveDevice(device));
                    self.devices_changed();
                }
            }
            Step::AddDevice(kind) => {
                let Reply::Device(device) = self.matchmaker.apply(now, Input::AddDevice(DeviceKind(kind))) else {
                    panic!()
                };
                self.devices.insert(device, (DeviceKind(kind), Vec::new()));
                self.devices_changed();
            }
            Step::RemoveModel(model) => {
                let at = shard_of(ModelId(model));
                if self.shards[at].machine().queue(ModelId(model)).is_some() {
                    self.shards[at].apply(now, Input::RemoveModel(ModelId(model)));
                    self.to_matchmaker.push_back(ToMatchmaker::Removed(ModelId(model)));
                }
                self.collect(at);
                assert!(
                    self.waiting.values().all(|(request, _)| request.model != ModelId(model)),
                    "its queue is empty"
                );
            }
            Step::SetProfile(model, us) => {
                let input = Input::SetProfile(ModelId(model), Box::new(profiles(model, us)));
                self.shards[shard_of(ModelId(model))].apply(now, input);
                self.collect(shard_of(ModelId(model)));
            }
            Step::SetNetwork(control, data) => {
                let [control, data] = [control, data].map(Duration::from_micros);
                let network = NetworkBudget { control, data, reply: Duration::ZERO };
                self.matchmaker.apply(now, Input::SetNetwork(network));
                for shard in 0..self.shards.len() {
                    self.shards[shard].apply(now, Input::SetNetwork(network));
                    self.collect(shard);
                }
            }
        }
    }

    fn devices_changed(&mut self) {
        assert_eq!(self.matchmaker.machine().devices() as usize, self.devices.len());
        for kind in (0..KINDS).map(DeviceKind) {
            let devices = self.devices.values().filter(|(k, _)| *k == kind).count() as u32;
            for shard in 0..self.shards.len() {
                self.shards[shard].apply(self.now, Input::SetDevices(kind, devices));
                self.collect(shard);
            }
        }
    }

    fn deliver_grant(&mut self, shard: usize) {
        if let Some(grant) = self.grants[shard].pop_front() {
            self.shards[shard].handle_grant(self.now, grant);
            self.collect(shard);
        }
    }

    fn deliver(&mut self, messages: usize) {
        for _ in 0..messages {
            match self.to_matchmaker.pop_front() {
                None => break,
                Some(ToMatchmaker::Changed(model)) => self.inform(model),
                Some(ToMatchmaker::Answer(answer)) => {
                    let (Answer::Started { grant, .. } | Answer::Declined { grant }) = answer;
                    self.inform(grant.model);
                    self.matchmaker.handle_answer(answer);
                }
                Some(ToMatchmaker::Completed(device, batch)) => {
                    let known = self.matchmaker.completed(self.now, device, batch).is_some();
                    assert_eq!(
                        known,
                        self.devices.contains_key(&device),
                        "a batch is a stranger's where its device is gone"
                    );
                }
                Some(ToMatchmaker::Removed(model)) => {
                    self.matchmaker.apply(self.now, Input::RemoveModel(model));
                }
            }
        }
        self.matchmaker.handle_timeout(self.now);
        while let Some(grant) = self.matchmaker.poll_grant() {
            self.grants[shard_of(grant.model)].push_back(grant);
        }
    }

    /// The matchmaker looks at the newest candidate.
    fn inform(&mut self, model: ModelId) {
        for kind in (0..KINDS).map(DeviceKind) {
            let newest = self.newest.get(&(model, kind)).copied().flatten();
            self.matchmaker.inform_candidate(model, kind, newest);
        }
    }

    fn collect(&mut self, at: usize) {
        while let Some((model, kind, candidate)) = self.shards[at].poll_candidate() {
            self.newest.insert((model, kind), candidate);
            self.to_matchmaker.push_back(ToMatchmaker::Changed(model));
        }
        while let Some(answer) = self.shards[at].poll_answer() {
            self.to_matchmaker.push_back(ToMatchmaker::Answer(answer));
        }
        while let Some(output) = self.shards[at].poll_output() {
            match output {
                Output::Drop { request, .. } => {
                    assert!(self.waiting.remove(&request).is_some(), "{request} left twice")
                }
                Output::Dispatch { batch, device, model, members, size, start, expected, .. } => {
                    assert!(self.batches.insert(batch), "{batch} is named twice");
                    if let Some((_, sent)) = self.devices.get_mut(&device) {
                        assert!(sent.len() < 2, "{device} is given {batch} while it has {sent:?}");
                        sent.push((batch, model));
                    }
                    let of_first = self.devices.values().flat_map(|(_, sent)| sent).filter(|(_, m)| m.0 == 0).count();
                    assert!(of_first <= 1, "m0 may have one batch in flight");
                    let mut items = 0;
                    for id in members {
                        let (request, _) = self.waiting.remove(&id).unwrap_or_else(|| panic!("{id} left twice"));
                        assert_eq!(request.model, model);
                        assert!(start + expected <= request.deadline, "{id} is sent to miss its deadline");
                        items += request.size;
                    }
                    assert_eq!(items, size);
                    assert!((1..=MAX_BATCH).contains(&size));
                }
            }
        }
    }

    /// In the end every message arrives, batches complete and timers ring: every waiting request is
    /// answered.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            while !self.to_matchmaker.is_empty() || self.grants.iter().any(|grants| !grants.is_empty()) {
                self.deliver(usize::MAX);
                for shard in 0..self.shards.len() {
                    self.deliver_grant(shard);
                }
            }
            self.apply(&Step::Complete(0));
            if self.to_matchmaker.is_empty() {
                let due = self.shards.iter().filter_map(|shard| shard.machine().poll_timeout()).map(|(at, _)| at).min();
                let due = [due, self.matchmaker.machine().poll_timeout().map(|(at, _)| at)].into_iter().flatten().min();
                let Some(due) = due else { break };
                self.now = self.now.max(due);
                for shard in 0..self.shards.len() {
                    self.shards[shard].apply(self.now, Input::Timeout);
                    self.collect(shard);
                }
                self.deliver(usize::MAX);
            }
        }
        assert!(self.waiting.is_empty(), "never answered: {:?}", self.waiting);
        assert_eq!(self.matchmaker.machine().free_devices() as usize, self.devices.len(), "a device is lost");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// For every order of messages: each request is answered once, no device runs two batches, no
    /// batch is planned to be late, and no grant and no device is lost. The logs of each shard and
    /// of the matchmaker agree with the run.
    #[test]
    fn messages_may_take_any_time(steps in prop::collection::vec(steps(), 0..250)) {
        let mut world = World::new();
        for step in &steps {
            world.apply(step);
        }
        world.settle();
        for (index, shard) in world.shards.into_iter().enumerate() {
            check(Shard::new(index as u32, SHARDS), &taken(shard));
        }
        check(Matchmaker::new(), &taken(world.matchmaker));
    }
}
