//! The decision log: it holds the run as it happened, it can be replayed, and a damaged file does
//! no harm.

use downbeat_core::cluster::*;
use downbeat_core::journal::Names;
use downbeat_core::journal::cluster::*;
use downbeat_core::journal::*;
use downbeat_core::{
    BatchId, DeviceId, DeviceKind, DeviceProfiles, Duration, LatencyProfile, ModelId, RequestId, Time,
};
use proptest::prelude::*;

use crate::journal_checks::{check, does_no_harm, taken};
use crate::random_events::{behaviours, orders};

fn at(us: u64) -> Time {
    Time::ZERO + Duration::from_micros(us)
}

fn options(alpha_us: u64, kinds: bool, dispatch: DispatchPolicy) -> ModelOptions {
    let profile = |factor: u64| {
        LatencyProfile::linear(Duration::from_micros(alpha_us * factor), Duration::from_micros(100 * factor), 8)
            .unwrap()
    };
    let profiles = match kinds {
        false => profile(1).into(),
        true => DeviceProfiles::by_kind([(DeviceKind(0), profile(1)), (DeviceKind(1), profile(3))]).unwrap(),
    };
    ModelOptions {
        profiles,
        max_batch: 6,
        drop: DropPolicy::WindowDrop,
        dispatch,
        max_in_flight: u32::MAX,
        shares_limit: None,
        max_wait: Duration::MAX,
        levels: vec![PriorityLevel { max_queue: 9, timeout_action: TimeoutAction::Delay }; 2],
    }
}

/// The record of a trial.
fn trial(changed: bool, behaviour: Option<Behaviour>) -> TrialRecord {
    let tried = |behaviours: Vec<Option<Behaviour>>, bad: f64| Tried {
        behaviours,
        order: Order::Fair,
        parts: 4,
        bad: vec![(2.0 * bad, bad), (2.0 * bad, bad), (1.0, 0.5)],
        devices: 1.25,
        delay: 0.0125,
    };
    let tried = vec![tried(vec![None; 3], 0.01), tried(vec![behaviour; 3], 0.0), tried(vec![None, behaviour], 0.02)];
    let decision = RehearsalDecision {
        behaviours: tried[usize::from(changed)].behaviours.clone(),
        order: Order::Fair,
        changed,
        why: changed.then_some(Ground::WorstModel { rate: 110 }),
        tried,
    };
    TrialRecord::new(7, &decision)
}

/// A step of a run. Its numbers choose among the devices, models and requests of the moment.
#[derive(Clone, Debug)]
enum Step {
    Request { us: u64, id: u64, model: u32, slo_us: Option<u64>, expiry_us: Option<u64>, level: u32, size: u32 },
    Cancel(usize),
    Complete(usize),
    Timeout(u64),
    Back,
    Other(Input),
}

fn steps() -> impl Strategy<Value = Step> {
    let maybe = |most: u64| prop_oneof![1 => Just(None), 5 => (0..most).prop_map(Some)];
    let size = prop_oneof![4 => Just(1u32), 1 => 0..8u32];
    let dispatch = prop_oneof![
        Just(DispatchPolicy::Deferred),
        Just(DispatchPolicy::Eager),
        Just(DispatchPolicy::Adaptive { consolidate: true }),
        (0..300u64).prop_map(|us| DispatchPolicy::Timeout { delay: Duration::from_micros(us), preferred: vec![2, 4] }),
    ];
    let add = (10..90u64, any::<bool>(), dispatch.clone())
        .prop_map(|(us, kinds, dispatch)| Input::AddModel(ModelId(0), Box::new(options(us, kinds, dispatch))));
    let network = (0..90u64, 0..30u64, 0..90u64).prop_map(|(c, d, r)| {
        let [control, data, reply] = [c, d, r].map(Duration::from_micros);
        NetworkBudget { control, data, reply }
    });
    let other = prop_oneof![
        add,
        network.clone().prop_map(Input::SetNetwork),
        (0..4u32, prop::collection::btree_map((0..3u32).prop_map(DeviceKind), network, 0..3))
            .prop_map(|(model, networks)| Input::SetModelNetwork(ModelId(model), networks.into_iter().collect())),
        (0..4u32).prop_map(|model| Input::RemoveModel(ModelId(model))),
        (0..4u32, 10..90u64).prop_map(|(model, us)| {
            Input::SetProfile(ModelId(model), Box::new(options(us, false, DispatchPolicy::Eager).profiles))
        }),
        (0..4u32, dispatch).prop_map(|(model, dispatch)| Input::SetDispatch(ModelId(model), dispatch)),
        (0..4u32, behaviours()).prop_map(|(model, behaviour)| Input::SetBehaviour(ModelId(model), behaviour)),
        (0..4u32).prop_map(|model| Input::Flush(ModelId(model))),
        orders().prop_map(Input::SetOrder),
        (any::<bool>(), behaviours())
            .prop_map(|(changes, behaviour)| Input::Trial(Box::new(trial(changes, behaviour)))),
        (0..50u64).prop_map(|us| Input::SetWakeMargin(Duration::from_micros(us))),
        (0..3u32).prop_map(|kind| Input::AddDevice(DeviceKind(kind))),
        (0..4u32).prop_map(|device| Input::RemoveDevice(DeviceId(device))),
        (0..4u32, 0..3u64).prop_map(|(device, ms)| Input::SetLoad(DeviceId(device), at(ms * 1_000))),
    ];
    prop_oneof![
        12 => (0..200u64, any::<u64>(), 0..3u32, maybe(2_000), maybe(900), 0..3u32, size).prop_map(
            |(us, id, model, slo_us, expiry_us, level, size)| {
                // Mostly small numbers, as a driver counts; now and then any number.
                let id = if id % 9 == 0 { id } else { id % 100 };
                Step::Request { us, id, model, slo_us, expiry_us: expiry_us.filter(|us| us % 3 == 0), level: level / 2, size }
            }),
        1 => any::<usize>().prop_map(Step::Cancel),
        5 => any::<usize>().prop_map(Step::Complete),
        3 => (0..300u64).prop_map(Step::Timeout),
        1 => Just(Step::Back),
        2 => other.prop_map(Step::Other),
    ]
}

/// Runs the steps. Returns the log and the records of all inputs and outputs.
fn record(steps: &[Step]) -> (Vec<u8>, Vec<Record<ClusterRecords>>) {
    let mut journal = Journal::on(Scheduler::new());
    let (mut log, mut records, mut tickets, mut running) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut now = Time::ZERO;
    let first = [
        Input::AddModel(ModelId(0), Box::new(options(40, true, DispatchPolicy::Deferred))),
        Input::AddModel(ModelId(1), Box::new(options(20, false, DispatchPolicy::Eager))),
        Input::AddDevice(DeviceKind(0)),
        Input::AddDevice(DeviceKind(1)),
    ];
    for step in first.into_iter().map(Step::Other).chain(steps.iter().cloned()) {
        let input = match step {
            Step::Request { us, id, model, slo_us, expiry_us, level, size } => {
                now += Duration::from_micros(us);
                let after = |us: Option<u64>| us.map_or(Time::MAX, |us| now + Duration::from_micros(us));
                let (id, model) = (RequestId(id), ModelId(model));
                let (deadline, queue_expiry) = (after(slo_us), after(expiry_us));
                Input::Request(Request { id, model, deadline, queue_expiry, level, size })
            }
            Step::Cancel(n) if !tickets.is_empty() => {
                let (model, ticket) = tickets[n % tickets.len()];
                Input::Cancel { model, ticket }
            }
            Step::Complete(n) if !running.is_empty() => {
                let (device, batch) = running.swap_remove(n % running.len());
                Input::Completion { device, batch }
            }
            Step::Cancel(_) | Step::Complete(_) | Step::Timeout(0) => Input::Timeout,
            Step::Timeout(us) => {
                now += Duration::from_micros(us);
                Input::Timeout
            }
            Step::Back => {
                records.push(Record::Input(Time::ZERO, Input::Timeout));
                journal.apply(Time::ZERO, Input::Timeout);
                continue;
            }
            Step::Other(input) => input,
        };
        records.push(Record::Input(now, input.clone()));
        match (journal.apply(now, input.clone()), input) {
            (Reply::Request(Ok(ticket)), Input::Request(request)) => tickets.push((request.model, ticket)),
            (Reply::Request(Err(reject)), _) => records.push(Record::Refused(reject)),
            _ => {}
        }
        while let Some(decision) = journal.poll() {
            if let Decision::Output(Output::Dispatch { device, batch, .. }) = &decision {
                running.push((*device, *batch));
            }
            records.push(Record::Decision(decision));
        }
        if journal.pending() > 100 {
            journal.take_log(&mut log);
        }
    }
    journal.take_log(&mut log);
    (log, records)
}

fn entries(log: &[u8]) -> Vec<Record<ClusterRecords>> {
    let (kind, entries) = read(log).unwrap();
    assert_eq!(kind, MachineKind::Scheduler);
    entries.map(|entry| entry.unwrap().record).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// A log has all inputs and decisions, and replays alike. A log that was cut off ends earlier.
    #[test]
    fn a_log_says_what_happened_and_plays_again(steps in prop::collection::vec(steps(), 0..100)) {
        let (log, records) = record(&steps);
        prop_assert_eq!(entries(&log), records);
        check(Scheduler::new(), &log);
    }

    /// A damaged log is read and replayed without a panic, for each machine that its header may
    /// name.
    #[test]
    fn a_damaged_log_does_no_harm(
        steps in prop::collection::vec(steps(), 0..40),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        machine in 0..4u8,
    ) {
        let (mut log, _) = record(&steps);
        for (place, byte) in damage {
            let place = place.index(log.len());
            log[place] = byte;
        }
        log[6] = machine;
        does_no_harm(&log);
    }
}

#[test]
fn what_is_no_log_is_an_error_in_words() {
    let error = |bytes: &[u8]| replay(bytes).unwrap_err().to_string();
    assert_eq!(error(b""), "not a decision log: it does not begin with 'DBLOG'");
    assert_eq!(error(b"DBLOG"), "not a decision log: it does not begin with 'DBLOG'");
    assert_eq!(error(b"model = \"mlp\"\n"), "not a decision log: it does not begin with 'DBLOG'");
    assert_eq!(error(b"DBLOG\x05"), "the log is damaged after entry 0: it names no machine");
    assert_eq!(error(b"DBLOG\x05\x09"), "the log is damaged after entry 0: it names no machine");
    assert_eq!(error(b"DBLOG\x05\x01\x02\x02"), "the log is damaged after entry 0: shards are counted from zero");
    let damaged = error(&[b"DBLOG\x05\0\x63".as_slice(), &[0; 30]].concat());
    assert!(damaged.starts_with("the log is damaged after entry 0: "), "{damaged}");
}

#[test]
fn a_log_of_another_version_is_refused_with_its_version() {
    let error = |bytes: &[u8]| replay(bytes).unwrap_err().to_string();
    let cannot = "which this program cannot read: it reads version 5; use the downbeat that wrote the log";
    assert_eq!(error(b"DBLOG\x03\0\0"), format!("a decision log of version 3, {cannot}"));
    assert_eq!(error(b"DBLOG\x07\0"), format!("a decision log of version 7, {cannot}"));
    // Before version 4 a device had lines of JSON.
    let lines = b"{\"at\":0,\"begin\":\"device 0\"}\n{\"at\":5,\"told\":\"timeout\"}\n";
    let form = "the decision log of a device as lines of JSON, the form before version 4";
    assert_eq!(error(lines), format!("{form}, {cannot}"));
}

#[test]
fn the_log_of_another_machine_is_named() {
    let error = read::<device::DeviceRecords>(b"DBLOG\x05\x01\x02\x03").err().unwrap().to_string();
    assert_eq!(error, "this is the decision log of shard 2 of 3: this command needs a log of the other kind");
    let error = read::<ClusterRecords>(b"DBLOG\x05\x03\x02").err().unwrap().to_string();
    assert!(error.starts_with("this is the decision log of device 2: "), "{error}");
}

/// A scheduler that takes a millisecond off the third request's deadline.
struct Impatient(Scheduler, u32);

impl Machine for Impatient {
    type Records = ClusterRecords;

    fn kind(&self) -> MachineKind {
        self.0.kind()
    }

    fn apply(&mut self, now: Time, mut input: Input) -> Reply {
        if let Input::Request(request) = &mut input {
            self.1 += 1;
            if self.1 == 3 {
                request.deadline = request.deadline - Duration::from_millis(1);
            }
        }
        self.0.apply(now, input)
    }

    fn poll(&mut self) -> Option<Decision> {
        self.0.poll()
    }

    fn is_polled_after(&self, input: &Input) -> bool {
        self.0.is_polled_after(input)
    }
}

/// Replaying the log of another scheduler or another version reports where this scheduler decides
/// otherwise.
#[test]
fn a_replay_says_where_the_decisions_part() {
    let mut journal = Journal::on(Impatient(Scheduler::new(), 0));
    let mut options = options(100, false, DispatchPolicy::Deferred);
    options.levels.clear();
    journal.apply(at(0), Input::AddModel(ModelId(0), Box::new(options)));
    journal.apply(at(0), Input::AddDevice(DeviceKind(0)));
    for n in 0..5 {
        let (id, model, deadline) = (RequestId(n), ModelId(0), at(5_000 * n + 4_000));
        let request = Request { id, model, deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
        journal.apply(at(5_000 * n), Input::Request(request));
        let (due, _) = journal.machine().0.poll_timeout().unwrap();
        journal.apply(due, Input::Timeout);
        let Some(Decision::Output(Output::Dispatch { batch, device, expected, .. })) = journal.poll() else { panic!() };
        journal.apply(due + expected, Input::Completion { device, batch });
    }
    let log = taken(journal);
    let divergence = replay(&log).unwrap().divergence.unwrap();
    assert_eq!((divergence.entry, divergence.at), (13, at(12_700)));
    let text = "entry 13, at 12.7 ms: the log says 'send b2 of m0 to d0: 1 items for 200 us, because one more item would be \
                late from 12.7 ms on (latest start 12.8 ms, earliest deadline 13 ms); 0 items stay; members r2', but now it is \
                nothing";
    assert_eq!(divergence.to_string(), text);
}

/// A driver that runs queues and matchmaker apart writes a log for each. Each log replays alone.
#[test]
fn a_shard_and_the_matchmaker_have_logs_of_their_own() {
    let (mut shard, mut matchmaker) = (Journal::on(Shard::new(1, 3)), Journal::on(Matchmaker::new()));
    matchmaker.apply(at(0), Input::AddLimit(2));
    shard.apply(at(0), Input::AddModel(ModelId(0), Box::new(options(40, false, DispatchPolicy::Deferred))));
    for _ in 0..2 {
        matchmaker.apply(at(0), Input::AddDevice(DeviceKind(0)));
    }
    shard.apply(at(0), Input::SetDevices(DeviceKind(0), 2));
    let mut running = Vec::new();
    for n in 0..40 {
        let now = at(n * 70);
        let (id, deadline) = (RequestId(n), now + Duration::from_micros(600));
        let request = Request { id, model: ModelId(0), deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
        shard.apply(now, Input::Request(request));
        if let Some((device, batch)) = running.pop() {
            matchmaker.apply(now, Input::Completion { device, batch });
        }
        loop {
            while let Some(decision) = shard.poll() {
                match decision {
                    Decision::Candidate(model, kind, candidate) => {
                        matchmaker.apply(now, Input::Candidate(model, kind, candidate));
                    }
                    Decision::Answer(answer) => {
                        matchmaker.apply(now, Input::Answer(answer));
                    }
                    Decision::Output(Output::Dispatch { device, batch, .. }) => running.push((device, batch)),
                    _ => {}
                }
            }
            matchmaker.apply(now, Input::Timeout);
            let grants: Vec<_> = std::iter::from_fn(|| matchmaker.poll()).collect();
            if grants.is_empty() {
                break;
            }
            for grant in grants {
                let Decision::Grant(grant) = grant else { panic!("a matchmaker grants: {grant:?}") };
                shard.apply(now, Input::Grant(grant));
            }
        }
    }
    assert!(shard.machine().started().0 > 5, "the run is real");
    let (shards, matches) = (taken(shard), taken(matchmaker));
    assert_eq!(read::<ClusterRecords>(&shards).unwrap().0, MachineKind::Shard { index: 1, shards: 3 });
    for log in [shards, matches] {
        let replayed = replay(&log).unwrap();
        assert_eq!(replayed.divergence, None);
        assert!(replayed.decisions > 5, "{replayed:?}");
    }
}

/// An event that changes the candidates of several models reports them in the same order when it is
/// replayed. No log has polls that gave nothing.
#[test]
fn candidates_that_change_together_play_again() {
    let mut shard = Journal::on(Shard::new(0, 1));
    shard.apply(at(0), Input::SetDevices(DeviceKind(0), 1));
    for model in 0..3 {
        shard.apply(at(0), Input::AddModel(ModelId(model), Box::new(options(40, false, DispatchPolicy::Deferred))));
    }
    let mut changed = Vec::new();
    for model in 0..3 {
        let id = RequestId(u64::from(model));
        // The later ones become hopeless earlier.
        let deadline = at(900 - 100 * id.0);
        let request = Request { id, model: ModelId(model), deadline, queue_expiry: Time::MAX, level: 0, size: 1 };
        shard.apply(at(id.0), Input::Request(request));
        changed.extend(std::iter::from_fn(|| shard.poll_candidate()));
    }
    let before = changed.len();
    shard.apply(at(5_000), Input::Timeout);
    changed.extend(std::iter::from_fn(|| shard.poll_candidate()));
    assert_eq!(changed.len(), before + 3, "all are gone at once: {changed:?}");
    let log = taken(shard);
    assert_eq!(replay(&log).unwrap().divergence, None);
}

/// In every order, a completion names its batch by the batch's own number.
#[test]
fn a_journal_that_is_off_writes_nothing() {
    let mut journal = Journal::off(Scheduler::new());
    journal.handle_completion(at(3), DeviceId(0), BatchId(0));
    let mut log = Vec::new();
    journal.take_log(&mut log);
    assert!(log.is_empty());
    assert_eq!(journal.machine().stats().stray_completions, 1);
}

/// A trial that changes something has a line for each candidate. A trial that changes nothing has
/// only the numbers of the behaviour that stays.
#[test]
fn a_trial_is_told_and_takes_few_bytes() {
    let aim = Some(Behaviour { wait: 50, throughput: 94, size: 75, limit: 90, margin: 5 });
    let mut journal = Journal::on(Scheduler::new());
    let (mut sizes, mut log) = (Vec::new(), Vec::new());
    for changed in [false, true] {
        journal.take_log(&mut log);
        journal.apply(at(1_000), Input::Trial(Box::new(trial(changed, aim))));
        sizes.push(journal.pending());
    }
    journal.take_log(&mut log);
    let lines: Vec<String> = read::<ClusterRecords>(&log)
        .unwrap()
        .1
        .map(|entry| entry.unwrap().text(at(1_000), &Names::default()))
        .collect();
    let before = "before{*} bad (worst model), 1% (2%) at 100%, 1% (2%) at 110%, 50% (100%) at 125%; 1.25 devices, 12.5 ms, 4 parts, order fair: m0 to m2 as follows from the load";
    let expected = [
        format!("trial 7 of 3 candidates: what is done goes on\n{:>27}{}", "", before.replace("{*}", "*")),
        format!(
            "trial 7 of 3 candidates: candidate 1 from now on, by what the worst model loses at 110% of the rate\n\
             {0:>27}{1}\n{0:>32}1* bad (worst model), 0% (0%) at 100%, 0% (0%) at 110%, 50% (100%) at 125%; 1.25 devices, 12.5 ms, 4 parts, order fair: m0 to m2 wait 50, aim 94/75, limit 90, margin 5\n\
             {0:>32}2  bad (worst model), 2% (4%) at 100%, 2% (4%) at 110%, 50% (100%) at 125%; 1.25 devices, 12.5 ms, 4 parts, order fair: m0 as follows from the load m1 wait 50, aim 94/75, limit 90, margin 5",
            "",
            before.replace("{*}", " ")
        ),
    ];
    for (line, expected) in lines.iter().zip(&expected) {
        assert!(line.ends_with(expected.as_str()), "{line}\n\n{expected}");
    }
    assert_eq!(lines.len(), 2);
    assert!(sizes[0] < 40 + BlockHead::LENGTH && sizes[1] < 120 + BlockHead::LENGTH, "{sizes:?} bytes");
}
