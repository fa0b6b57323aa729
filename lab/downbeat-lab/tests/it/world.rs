//! The whole world under virtual time: both kinds of models on the same devices, clients and
//! faults. Checkers judge every decision, so a run that ends has kept the rules.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions, NetworkBudget, PriorityLevel, TimeoutAction};
use downbeat_core::device::{
    ElasticOptions, Joining, Layout, MixTable, ModelSpec, PartitionId, SegmentProfile, StagedOptions, WindowedOptions,
};
use downbeat_core::{DeviceKind, Duration, LatencyProfile, Time};
use downbeat_lab::device::{DeviceLimits, EmulatedModel};
use downbeat_lab::world::{
    Client, Fault, ModelOutcome, Order, Pattern, Serving, WorldDevice, WorldModel, WorldReport, WorldScenario,
};
use downbeat_sim::{Arrivals, Delay, Network};
use proptest::prelude::*;

const UNITS: u32 = 100;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn at(time: u64) -> Time {
    Time::ZERO + ms(time)
}

/// 4 ms, and 1 ms an item, in this many equal segments.
fn profile(segments: usize) -> SegmentProfile {
    SegmentProfile::even(&LatencyProfile::linear(ms(1), ms(4), 8).unwrap(), segments)
}

fn windowed(partition: u32, segments: usize) -> ModelSpec {
    let options = WindowedOptions {
        profile: profile(segments),
        max_batch: 8,
        window: Duration::ZERO,
        fill: false,
        drop: false,
        queue_bound: 64,
        ahead: 0,
    };
    ModelSpec::new(&options, PartitionId(partition))
}

fn elastic(partition: u32, segments: usize) -> ModelSpec {
    let options = ElasticOptions {
        profile: profile(segments),
        mixes: MixTable::naive(8),
        max_running: 8,
        ring_slots: 16,
        drop: true,
        queue_bound: 64,
        cores: None,
    };
    ModelSpec::new(&options, PartitionId(partition))
}

fn staged(partition: u32, segments: usize, ring: bool) -> ModelSpec {
    let options = StagedOptions {
        profile: profile(segments),
        pairs: 2,
        max_batch: 8,
        by_length: false,
        by_operator: true,
        by_load: true,
        window: None,
        comp_wait: None,
        joining: Joining::default(),
        ring_slots: if ring { 32 } else { 0 },
        drop: true,
        queue_bound: 64,
    };
    ModelSpec::new(&options, PartitionId(partition))
}

fn cluster(dispatch: DispatchPolicy, drop: DropPolicy) -> Serving {
    let level = |max_queue| PriorityLevel { max_queue, timeout_action: TimeoutAction::Reject };
    let profile = LatencyProfile::linear(ms(1), ms(4), 8).unwrap();
    let levels = vec![level(32), level(64)];
    Serving::Cluster(ModelOptions { levels, max_wait: ms(400), ..ModelOptions::new(profile, dispatch, drop) })
}

fn eager() -> Serving {
    cluster(DispatchPolicy::Eager, DropPolicy::HeadDrop)
}

fn device(shared_lanes: &[u32]) -> WorldDevice {
    let layout = Layout { shared_lanes: shared_lanes.to_vec() };
    WorldDevice { limits: DeviceLimits::plain(UNITS), layout, kind: DeviceKind(0) }
}

/// A model of one segment that keeps the whole device.
fn model(serving: Serving) -> WorldModel {
    WorldModel { emulated: EmulatedModel::plain(profile(1), UNITS), serving: Some(serving) }
}

fn run(scenario: &WorldScenario) -> WorldReport {
    scenario.run().unwrap()
}

/// Returns the sum of the counts: each request is in exactly one.
fn ended(outcome: &ModelOutcome) -> u64 {
    let ModelOutcome { rejected, good, late, dropped, cancelled, failed, .. } = outcome;
    rejected + good + late + dropped + cancelled + failed
}

/// Two devices, with one model on each of them or in the cluster. Each model has a client in a
/// closed loop.
fn one_client_each(servings: Vec<Serving>, requests: u64) -> WorldScenario {
    WorldScenario {
        devices: vec![device(&[1]), device(&[1])],
        clients: (0..servings.len()).map(|model| Client::closed(model, requests)).collect(),
        models: servings.into_iter().map(model).collect(),
        seed: 1,
        ..WorldScenario::default()
    }
}

/// If policies on each device make a model's batches, both devices work. Requests go to the device
/// that is free first, with all its work counted.
#[test]
fn two_windowed_models_and_two_clients_keep_two_devices_equally_busy() {
    let both = || Serving::Devices(windowed(0, 1), vec![0, 1]);
    let report = run(&one_client_each(vec![both(), both()], 500));
    let [first, second] = [0, 1].map(|device| report.busy[device].as_secs_f64());
    assert!((first - second).abs() < 0.1 * first, "{first:.3} and {second:.3} s");
    let alone = ms(5);
    assert!(report.models.iter().all(|model| model.latencies.iter().all(|took| *took == alone)), "nobody waits");
}

/// Two `windowed` models and an `exclusive` one, a client each, on two devices. A request always
/// goes to the device with less work.
#[test]
fn two_windowed_models_and_an_exclusive_one_keep_two_devices_equally_busy() {
    let both = || Serving::Devices(windowed(0, 1), vec![0, 1]);
    let mut scenario = one_client_each(vec![both(), both(), eager()], u64::MAX);
    scenario.clients.iter_mut().for_each(|client| client.until = at(2_500));
    for noise in [0.0, 0.2] {
        let report = run(&WorldScenario { noise, ..scenario.clone() });
        let [first, second] = [0, 1].map(|device| report.busy[device].as_secs_f64());
        assert!((first - second).abs() < 0.1 * first.max(second), "{first:.3} and {second:.3} s");
        assert!(report.models.iter().all(|model| model.good == model.offered && model.good > 240), "{report:?}");
    }
}

/// The cluster's scheduler hears of the work of the devices' policies, and takes the slot with the
/// least other work, or with none.
#[test]
fn an_exclusive_model_goes_where_no_windowed_one_is() {
    let on = |devices| Serving::Devices(windowed(0, 1), devices);
    let mut scenario = one_client_each(vec![on(vec![0]), eager()], u64::MAX);
    scenario.clients.iter_mut().for_each(|client| client.until = at(1_000));
    for shards in [1, 3] {
        let report = run(&WorldScenario { shards, ..scenario.clone() });
        assert!(report.models.iter().all(|model| model.latencies.iter().all(|took| *took == ms(5))), "each is alone");
        assert_eq!(report.launches, [report.models[0].good, report.models[1].good], "with a device to itself");
    }
    // If both devices have other work, the model waits for neither.
    let mut scenario = one_client_each(vec![on(vec![0]), on(vec![1]), eager()], 100);
    scenario.clients[2].pattern = Pattern::Closed(ms(3));
    let report = run(&scenario);
    assert!(report.models[2].latencies.iter().all(|took| *took <= ms(10)), "{:?}", report.models[2].latencies);
}

/// Without other models, the cluster's scheduler spreads its batches over the slots, and partitions
/// run side by side.
#[test]
fn slots_in_two_partitions_run_two_batches_side_by_side() {
    let scenario = |shared: &[u32], units| WorldScenario {
        devices: vec![device(shared)],
        models: vec![WorldModel { emulated: EmulatedModel::plain(profile(1), units), serving: Some(eager()) }],
        clients: vec![Client::closed(0, 100), Client::closed(0, 100)],
        seed: 1,
        ..WorldScenario::default()
    };
    let two = run(&scenario(&[1, 1], UNITS / 2));
    assert!(two.models[0].latencies.iter().all(|took| *took == ms(5)), "half of the device is enough for each");
    let slow = run(&scenario(&[1, 1], UNITS));
    assert!(slow.models[0].latencies.iter().all(|took| *took == ms(10)), "a model that wants all units gets half");
    let one = run(&scenario(&[1], UNITS / 2));
    assert!(one.end > two.end, "one slot runs one batch after another");
}

/// A model in another partition is not disturbed, a model in the same partition is.
#[test]
fn partitions_keep_models_apart() {
    let latency = |partition| {
        let mut scenario = one_client_each(
            vec![Serving::Devices(windowed(0, 1), vec![0]), Serving::Devices(windowed(partition, 1), vec![0])],
            50,
        );
        scenario.devices = vec![device(&[0, 0])];
        run(&scenario).models[0].latencies.iter().max().copied().unwrap()
    };
    assert_eq!(latency(1), ms(10), "half of the units take twice as long, whoever is in the other half");
    assert!(latency(0) > ms(15), "{}", latency(0));
}

#[test]
fn a_lost_device_fails_what_is_there_and_the_other_one_takes_over() {
    let both = || Serving::Devices(windowed(0, 1), vec![0, 1]);
    let mut scenario = one_client_each(vec![both(), both(), eager()], 200);
    scenario.faults = vec![(at(101), Fault::Lost(0)), (at(301), Fault::Back(0))];
    let report = run(&scenario);
    let failed: u64 = report.models.iter().map(|model| model.failed).sum();
    assert!((1..=3).contains(&failed), "what ran on it at that moment: {failed}");
    assert!(report.models.iter().all(|model| model.good + model.failed == 200), "{report:?}");
    let sound = run(&WorldScenario { faults: Vec::new(), ..scenario });
    assert!(sound.models.iter().all(|model| model.failed == 0 && model.good == 200));
    assert!(sound.busy[1] < report.busy[1], "the other device did more");
}

#[test]
fn a_request_for_a_model_whose_only_device_is_lost_is_refused() {
    let mut scenario = one_client_each(vec![Serving::Devices(windowed(0, 1), vec![0])], 100);
    scenario.faults = vec![(at(100), Fault::Lost(0)), (at(120), Fault::Back(0))];
    let outcome = &run(&scenario).models[0];
    assert!(outcome.rejected > 5 && outcome.failed <= 1 && outcome.good > 50, "{outcome:?}");
}

#[test]
fn a_late_completion_delays_and_loses_nothing() {
    let mut scenario = one_client_each(vec![Serving::Devices(windowed(0, 1), vec![0]), eager()], 50);
    scenario.faults = vec![(at(20), Fault::Late(0, ms(300))), (at(21), Fault::Late(1, ms(300)))];
    let report = run(&scenario);
    assert!(report.models.iter().all(|model| model.good == 50), "{report:?}");
    let longest = report.models.iter().flat_map(|model| &model.latencies).max().copied().unwrap();
    assert!(longest > ms(300) && longest < ms(330), "{longest}");
}

#[test]
fn a_model_that_goes_drops_what_waits_and_refuses_what_comes() {
    for serving in [eager(), Serving::Devices(windowed(0, 1), vec![0, 1])] {
        let mut scenario = one_client_each(vec![serving.clone()], 100);
        scenario.clients =
            vec![Client { pattern: Pattern::Open(Arrivals::Constant, 4000.0), ..Client::closed(0, 400) }];
        scenario.faults = vec![(at(50), Fault::Remove(0)), (at(60), Fault::Load(0, serving))];
        let outcome = &run(&scenario).models[0];
        assert!(outcome.dropped > 0 && outcome.rejected >= 39 && outcome.failed == 0, "{outcome:?}");
    }
}

/// The former policy finishes the requests that it has taken in, so that clients notice no change.
#[test]
fn a_model_switched_between_policies_of_its_devices_loses_nothing() {
    let on = |spec| Serving::Devices(spec, vec![0, 1]);
    let mut scenario = one_client_each(vec![on(windowed(0, 1))], 100);
    scenario.clients = vec![Client { pattern: Pattern::Open(Arrivals::Constant, 1000.0), ..Client::closed(0, 200) }];
    scenario.faults = vec![
        (at(40), Fault::Load(0, on(elastic(0, 1)))),
        (at(80), Fault::Load(0, on(staged(0, 1, true)))),
        (at(120), Fault::Load(0, on(windowed(0, 1)))),
    ];
    let outcome = &run(&scenario).models[0];
    assert_eq!(outcome.good, 200, "{outcome:?}");
}

/// Batches on their way to removed slots are answered with an error.
#[test]
fn a_layout_that_takes_slots_fails_only_what_is_on_its_way() {
    let mut scenario = one_client_each(vec![eager()], 100);
    scenario.clients = vec![Client { pattern: Pattern::Open(Arrivals::Constant, 500.0), ..Client::closed(0, 200) }];
    scenario.network.budget = NetworkBudget { control: ms(1), data: Duration::ZERO, reply: Duration::ZERO };
    let layout = |lanes: &[u32]| Layout { shared_lanes: lanes.to_vec() };
    let change = |time, lanes| (at(time), Fault::Layout(0, layout(lanes)));
    scenario.faults = vec![change(100, &[2, 1]), change(200, &[0]), change(300, &[1])];
    let outcome = &run(&scenario).models[0];
    assert!(outcome.failed <= 16, "at most a batch for each of two slots that go: {outcome:?}");
    assert_eq!(outcome.good + outcome.failed, 200, "{outcome:?}");
}

/// Two models of the cluster's scheduler in two shards. One of them is reloaded all the time, while
/// the work of shards and matchmaker is late: grants meet queues that have gone or changed.
fn hectic(delay: Duration, order: Order) -> WorldScenario {
    let mut scenario = one_client_each(vec![eager(), eager()], 2_000);
    for client in &mut scenario.clients {
        client.pattern = Pattern::Open(Arrivals::Poisson, 1000.0);
        client.leaves = 0.3;
    }
    (scenario.shards, scenario.order) = (2, order);
    scenario.faults = (0..200).map(|n| (at(n * 10), Fault::Load(0, eager()))).collect();
    scenario.faults.push((Time::ZERO, Fault::Delay(delay)));
    scenario
}

/// The checkers assert that no device is lost and that each request is answered once.
#[test]
fn messages_that_are_late_between_shards_and_matchmaker_lose_nothing() {
    for order in [Order::InTurn, Order::Seeded] {
        let prompt = run(&hectic(Duration::ZERO, order));
        let late = run(&hectic(ms(5), order));
        for report in [&prompt, &late] {
            assert!(report.models.iter().all(|model| ended(model) == model.offered && model.good > 100), "{report:?}");
        }
        assert!(late.launches < prompt.launches, "devices wait for what is late: {:?}", late.launches);
    }
}

/// For each order of the mailboxes, a seed gives one report.
#[test]
fn the_order_of_the_mailboxes_follows_from_the_seed() {
    let report = |seed, order| run(&WorldScenario { seed, ..hectic(ms(1), order) });
    assert_eq!(report(1, Order::Seeded), report(1, Order::Seeded));
    assert_ne!(report(1, Order::Seeded), report(1, Order::InTurn));
}

#[test]
fn equal_seeds_give_equal_worlds_and_others_do_not() {
    let report = |seed| {
        let mut scenario = one_client_each(vec![Serving::Devices(staged(0, 1, false), vec![0, 1]), eager()], 100);
        scenario.clients[0].pattern = Pattern::Open(Arrivals::Poisson, 300.0);
        run(&WorldScenario { seed, noise: 0.1, ..scenario })
    };
    assert_eq!(report(1), report(1));
    assert_ne!(report(1), report(2));
}

fn serving() -> impl Strategy<Value = Serving> {
    let on = prop::sample::select(vec![vec![0], vec![1], vec![0, 1], vec![2, 0], vec![0, 1, 2]]);
    let spec = prop_oneof![
        Just(windowed(0, 2)),
        Just(windowed(1, 2)),
        Just(elastic(0, 2)),
        Just(staged(0, 2, true)),
        Just(staged(0, 2, false)),
        Just(staged(1, 2, true)),
    ];
    let drops = prop::sample::select(vec![DropPolicy::HeadDrop, DropPolicy::WindowDrop, DropPolicy::None]);
    let dispatches = prop::sample::select(vec![
        DispatchPolicy::Eager,
        DispatchPolicy::Deferred,
        DispatchPolicy::Adaptive { consolidate: false },
        DispatchPolicy::Timeout { delay: ms(5), preferred: vec![4] },
    ]);
    prop_oneof![
        2 => (dispatches, drops).prop_map(|(dispatch, drop)| cluster(dispatch, drop)),
        3 => (spec, on).prop_map(|(spec, on)| Serving::Devices(spec, on)),
    ]
}

fn layout() -> impl Strategy<Value = Layout> {
    let lanes = prop::sample::select(vec![vec![1], vec![2], vec![1, 1], vec![0, 1], vec![1, 2, 1], vec![0]]);
    lanes.prop_map(|shared_lanes| Layout { shared_lanes })
}

fn fault() -> impl Strategy<Value = (Time, Fault)> {
    let fault = prop_oneof![
        (0..3usize).prop_map(Fault::Lost),
        (0..3usize).prop_map(Fault::Back),
        (0..3usize, 1..200u64).prop_map(|(device, by)| Fault::Late(device, ms(by))),
        (0..3usize, layout()).prop_map(|(device, layout)| Fault::Layout(device, layout)),
        (0..4usize, serving()).prop_map(|(model, serving)| Fault::Load(model, serving)),
        (0..4usize).prop_map(Fault::Remove),
        (0..4usize).prop_map(Fault::Leave),
        (0..40_000u64).prop_map(|us| Fault::Delay(Duration::from_micros(us))),
    ];
    // Some faults come at the same instant.
    (prop_oneof![0..300u64, Just(50u64)], fault).prop_map(|(time, fault)| (at(time), fault))
}

fn client() -> impl Strategy<Value = Client> {
    let pattern = prop_oneof![
        (10.0..2000.0f64).prop_map(|rate| Pattern::Open(Arrivals::Poisson, rate)),
        (0..20u64).prop_map(|think| Pattern::Closed(ms(think))),
    ];
    let slo = prop_oneof![Just(None), (5..200u64).prop_map(|slo| Some(ms(slo)))];
    let leaves = prop::sample::select(vec![0.0, 0.3]);
    (0..4usize, pattern, 1..60u64, 1..5u32, slo, leaves, 0..3u32).prop_map(
        |(model, pattern, requests, most_items, slo, leaves, lowest_level)| Client {
            most_items,
            most_length: 10,
            lowest_level,
            slo,
            leaves,
            pattern,
            ..Client::closed(model, requests)
        },
    )
}

fn scenario() -> impl Strategy<Value = WorldScenario> {
    let models = prop::collection::vec(prop::option::weighted(0.8, serving()), 4);
    let remote = any::<bool>().prop_map(|remote| Network {
        budget: NetworkBudget {
            control: Duration::from_micros(if remote { 700 } else { 0 }),
            data: Duration::ZERO,
            reply: Duration::ZERO,
        },
        delay: Delay::Lognormal(3.0),
    });
    let noise = prop::sample::select(vec![0.0, 0.3]);
    let faults = prop::collection::vec(fault(), 0..12);
    let clients = prop::collection::vec(client(), 1..6);
    let delay = prop_oneof![Just(0), 1..20_000u64].prop_map(|us| (Time::ZERO, Fault::Delay(Duration::from_micros(us))));
    let mailboxes = (1..=4u32, prop::sample::select(vec![Order::InTurn, Order::Seeded]), delay);
    (prop::collection::vec(layout(), 3), models, clients, faults, remote, noise, mailboxes, any::<u64>()).prop_map(
        |(layouts, models, clients, mut faults, network, noise, (shards, order, delay), seed)| {
            faults.push(delay);
            // Each device is present at the end, with a slot, so that no request waits for ever.
            for device in 0..3 {
                let layout = Layout { shared_lanes: vec![1] };
                faults.extend([(at(400), Fault::Back(device)), (at(400), Fault::Layout(device, layout))]);
            }
            let kinds = layouts.into_iter().zip([0, 0, 1]);
            let device = |(layout, kind)| WorldDevice { layout, kind: DeviceKind(kind), ..device(&[1]) };
            let emulated = |units| EmulatedModel::plain(profile(2), units);
            let models = models.into_iter().zip([UNITS, UNITS / 2, 10, UNITS]);
            WorldScenario {
                devices: kinds.map(device).collect(),
                models: models.map(|(serving, units)| WorldModel { emulated: emulated(units), serving }).collect(),
                clients,
                faults,
                network,
                noise,
                seed,
                shards,
                order,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Under all faults and policies, each request ends once, and no state is left. The checkers
    /// assert the other rules.
    #[test]
    fn random_worlds_keep_every_rule(scenario in scenario()) {
        let report = run(&scenario);
        for (model, outcome) in report.models.iter().enumerate() {
            prop_assert_eq!(ended(outcome), outcome.offered, "model {}: {:?}", model, outcome);
            let sent = scenario.clients.iter().filter(|client| client.model == model).map(|client| client.requests);
            prop_assert_eq!(sent.sum::<u64>(), outcome.offered, "model {}", model);
        }
        let sound = scenario.faults.iter().all(|(_, fault)| !matches!(fault, Fault::Lost(_) | Fault::Layout(..) | Fault::Remove(_) | Fault::Load(..)));
        prop_assert!(!sound || report.models.iter().all(|model| model.failed == 0));
        prop_assert!(report.busy.iter().all(|busy| *busy <= report.end.since(Time::ZERO)));
    }
}
