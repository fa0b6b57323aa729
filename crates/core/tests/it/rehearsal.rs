//! The rehearsal: its findings, and that only its inputs decide.

use downbeat_core::cluster::*;
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use proptest::prelude::*;

const ADAPTIVE: DispatchPolicy = DispatchPolicy::Adaptive { consolidate: false };

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn options(alpha_us: u64, beta_us: u64) -> ModelOptions {
    let (alpha, beta) = (Duration::from_micros(alpha_us), Duration::from_micros(beta_us));
    ModelOptions::new(LatencyProfile::linear(alpha, beta, 64).unwrap(), ADAPTIVE, DropPolicy::Adaptive)
}

/// A rehearsal of `models` models with these options, on so many devices.
fn rehearsal(consolidate: bool, models: u32, options: &ModelOptions, devices: u32) -> Rehearsal {
    let mut rehearsal = Rehearsal::new(consolidate, 7);
    rehearsal.set_devices(DeviceKind(0), devices);
    for model in 0..models {
        rehearsal.set_model(ModelId(model), Some(options.clone()));
    }
    rehearsal
}

/// `count` requests of the models in turn, `gap_us` apart in the mean: of four one comes early.
fn feed(rehearsal: &mut Rehearsal, models: u32, slo: Duration, gap_us: u64, count: u64) {
    for number in 0..count {
        let early = if number % 4 == 3 { gap_us / 2 } else { 0 };
        let at = Time::ZERO + Duration::from_micros(number * gap_us - early);
        let model = ModelId((number % u64::from(models)) as u32);
        rehearsal.arrival(PastArrival { at, budget: slo, model, size: 1, level: 0 });
    }
}

fn decision(rehearsal: &mut Rehearsal) -> RehearsalDecision {
    rehearsal.step(u64::MAX);
    rehearsal.poll_decision().expect("enough has come for a trial")
}

/// ResNet50 of Symphony's table 2 at 97% of the staggered bound: eager dispatch holds far less.
#[test]
fn a_model_that_fills_its_devices_waits_for_its_window() {
    let mut rehearsal = rehearsal(false, 1, &options(1_053, 5_072), 8);
    feed(&mut rehearsal, 1, ms(25), 176, 12_000);
    let decision = decision(&mut rehearsal);
    let found = decision.behaviours[0].expect("something better than the rule");
    assert!(found.wait == 100 && found.throughput > 80, "{found:?}");
    let eager = Behaviour { wait: 0, throughput: 0, size: 100, ..Behaviour::default() };
    let [of_found, of_eager] = [found, eager].map(|behaviour| {
        let tried = decision.tried.iter().find(|tried| tried.behaviours[0] == Some(behaviour));
        tried.map(|tried| (tried.bad[0].1, tried.bad[1].1))
    });
    assert!(of_found.is_some_and(|(bad, _)| bad < 0.02), "{decision:?}");
    assert!(of_eager.is_some_and(|(_, more)| more > 0.5), "who has left is told, too: {decision:?}");
    assert!(matches!(decision.why, Some(Ground::WorstModel { .. })), "{decision:?}");
    let parts: Vec<u32> = decision.tried.iter().map(|tried| tried.parts).collect();
    assert!(
        parts.is_sorted_by(|a, b| a >= b) && parts[0] == 3 && parts.last().is_some_and(|least| *least <= 1),
        "{parts:?}"
    );
}

/// Bursts of 20 on 12 devices, of a model that gains nothing by batching and takes 5% more or less.
/// Of the 8 requests that find no device at once, two would just fit into one batch. Every other
/// such batch would be late. Enough devices exist to run each alone, or in a batch with a margin.
#[test]
fn what_varies_is_planned_with_a_margin_or_in_small_batches() {
    let mut rehearsal = rehearsal(false, 1, &options(7_000, 280), 12);
    for number in 0..200 {
        rehearsal.execution(ModelId(0), if number % 2 == 0 { 1.05 } else { 0.95 });
    }
    for number in 0..3_000 {
        let at = Time::ZERO + ms(40 * (number / 20));
        rehearsal.arrival(PastArrival {
            at,
            budget: Duration::from_micros(21_600),
            model: ModelId(0),
            size: 1,
            level: 0,
        });
    }
    let decision = decision(&mut rehearsal);
    let found = decision.behaviours[0].expect("something better than the rule");
    assert!(found.limit > 0 || found.margin > 0, "{found:?}");
    let bad = |tried: Option<&Tried>| tried.expect("both stay to the end").bad[0].1;
    let of_found = bad(decision.tried.iter().find(|tried| tried.behaviours == decision.behaviours));
    assert!(of_found == 0.0 && bad(decision.tried.first()) > 0.05, "{decision:?}");
}

/// One second has 4,000 requests, more than the device can serve, and the time after it nearly
/// none. A behaviour that is tried in the quiet time is tried on the rush, too.
#[test]
fn what_a_rush_needs_is_tried_in_the_quiet_time_too() {
    let options = options(100, 10_000);
    let decided = |rushes: u64| {
        let mut rehearsal = rehearsal(false, 1, &options, 1);
        let arrival = |at| PastArrival { at, budget: ms(50), model: ModelId(0), size: 1, level: 0 };
        for second in 0..40 {
            let gap = if second == 0 && rushes > 0 { 250 } else { 5_000 };
            let times = (0..1_000_000 / gap).map(|number| second * 1_000_000 + number * gap);
            times.for_each(|us| rehearsal.arrival(arrival(Time::ZERO + Duration::from_micros(us))));
        }
        decision(&mut rehearsal)
    };
    let (with, without) = (decided(1), decided(0));
    assert_eq!([&with, &without].map(|decision| decision.tried[0].parts), [4, 3], "the rush is a part of its own");
    let lost =
        |decision: &RehearsalDecision| decision.tried.iter().any(|tried| tried.bad.iter().any(|bad| bad.1 > 0.0));
    assert!(lost(&with) && !lost(&without));
}

/// Random bursts within 4 s. A lone request 10 s before makes them rare. Then less certainty is enough
/// to leave the rule of the load, so that more of the seeds leave it.
#[test]
fn rare_requests_leave_the_rule_of_the_load_sooner() {
    let changes = |begin: u64| {
        let changed = |seed: &u64| {
            let mut rehearsal = rehearsal(false, 2, &options(1_000, 4_000), 2);
            let mut state = *seed;
            let mut draw = |most: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % most
            };
            let arrival = |at, model| PastArrival { at, budget: ms(15), model: ModelId(model), size: 1, level: 0 };
            rehearsal.arrival(arrival(Time::ZERO, 0));
            let mut at = begin;
            while at < begin + 4_000 {
                at += 20 + draw(200);
                let model = draw(2) as u32;
                (0..1 + draw(16)).for_each(|_| rehearsal.arrival(arrival(Time::ZERO + ms(at), model)));
            }
            decision(&mut rehearsal).changed
        };
        (1..=30).filter(changed).count()
    };
    let (frequent, rare) = (changes(0), changes(10_000));
    assert!(rare > frequent, "{rare} rare and {frequent} frequent ones of seeds 1 to 30");
}

/// Devices are idle: no request waits, unless the user wants few devices to be busy.
#[test]
fn at_low_load_nobody_waits_unless_that_is_wished() {
    for (consolidate, wait) in [(false, 0), (true, 100)] {
        let mut rehearsal = rehearsal(consolidate, 2, &options(1_000, 5_000), 8);
        rehearsal.set_model(ModelId(1), None);
        feed(&mut rehearsal, 1, ms(50), 1_500, 1_500);
        let decision = decision(&mut rehearsal);
        // The start rule may have this behaviour already.
        let rule = if consolidate { 100 } else { 0 };
        let found = decision.behaviours[0].map_or(rule, |behaviour| behaviour.wait);
        assert_eq!(found, wait, "{decision:?}");
        assert_eq!(decision.behaviours[1], None, "a model that is gone is told nothing");
    }
}

#[test]
fn no_trial_before_the_first_request_and_none_without_new_requests() {
    let mut rehearsal = rehearsal(false, 1, &options(1_000, 5_000), 2);
    assert_eq!(rehearsal.step(u64::MAX), 0);
    feed(&mut rehearsal, 1, ms(25), 500, 2_000);
    assert!(rehearsal.step(u64::MAX) > 2_000);
    assert!(rehearsal.poll_decision().is_some() && rehearsal.poll_decision().is_none());
    assert_eq!((rehearsal.step(u64::MAX), rehearsal.trials()), (0, 1));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    /// The size of the steps changes neither the time that the rehearsal uses nor its result. All
    /// inputs lead to some result.
    #[test]
    fn steps_are_kept_and_change_nothing(
        step in 1..5_000u64,
        seed in any::<u64>(),
        noise in prop_oneof![Just(0.0), 0.0..0.5],
        arrivals in prop::collection::vec((0..9_000u64, 0..3u32, prop_oneof![Just(None), (0..40_000u64).prop_map(Some)], 0..4u32), 200..400),
        network in prop_oneof![Just(0), 0..900u64],
    ) {
        let run = |step: u64| {
            let mut rehearsal = Rehearsal::new(false, seed);
            rehearsal.set_devices(DeviceKind(0), 2);
            let control = Duration::from_micros(network);
            rehearsal.set_delays(NetworkBudget { control, ..NetworkBudget::default() }, Duration::from_micros(100));
            for model in [0, 2] {
                rehearsal.set_model(ModelId(model), Some(options(500 + u64::from(model), 2_000)));
            }
            [1.0 - noise, 1.0, 1.0 + 3.0 * noise].into_iter().for_each(|share| rehearsal.execution(ModelId(0), share));
            let mut at = Time::ZERO;
            for (gap_us, model, budget_us, size) in &arrivals {
                at += Duration::from_micros(*gap_us);
                let budget = budget_us.map_or(Duration::MAX, Duration::from_micros);
                rehearsal.arrival(PastArrival { at, budget, model: ModelId(*model), size: *size, level: 0 });
            }
            let mut all = 0;
            loop {
                let used = rehearsal.step(step);
                assert!(used <= step, "{used} of {step}");
                all += used;
                if used < step {
                    return (all, rehearsal.poll_decision());
                }
            }
        };
        let whole = run(u64::MAX);
        prop_assert!(whole.1.is_some());
        prop_assert_eq!(whole, run(step));
    }
}

/// No request can be late, so all behaviours are equal: the rehearsal spends no time.
#[test]
fn without_a_deadline_nothing_is_tried() {
    let mut rehearsal = rehearsal(false, 2, &options(1_000, 2_000), 2);
    feed(&mut rehearsal, 2, Duration::MAX, 500, 5_000);
    assert_eq!(rehearsal.step(u64::MAX), 0);
    feed(&mut rehearsal, 2, ms(50), 500, 5_000);
    assert!(rehearsal.step(u64::MAX) > 0);
}

/// `clients` of a model on one device. Each asks again 0.3 ms after its answer (`slowed`: or up to
/// 4 ms after it, while the device computes). Returns the requests a second over the last second of
/// five, with a rehearsal or by the start rule.
fn closed_loop(clients: u64, max_batch: u32, slowed: bool, rehearse: bool) -> f64 {
    let (alpha, beta, slo, pause) = (Duration::from_micros(110), ms(3), ms(50), Duration::from_micros(300));
    let options =
        ModelOptions::new(LatencyProfile::linear(alpha, beta, max_batch).unwrap(), ADAPTIVE, DropPolicy::Adaptive);
    let mut rehearsal = rehearsal(false, 1, &options, 1);
    let mut scheduler = Scheduler::new();
    scheduler.add_device(Time::ZERO, DeviceKind(0));
    let model = scheduler.add_model(Time::ZERO, options);
    let mut coming: std::collections::VecDeque<Time> =
        (0..clients).map(|client| Time::from_nanos(client * 20_000)).collect();
    let mut running: Option<(Time, DeviceId, BatchId, Vec<RequestId>)> = None;
    let (mut id, mut served, mut told, mut answered) = (0, 0, Time::ZERO, None);
    loop {
        let arrival = coming.front().copied().unwrap_or(Time::MAX);
        let end = running.as_ref().map_or(Time::MAX, |(end, ..)| *end);
        let timeout = scheduler.poll_timeout().map_or(Time::MAX, |(at, _)| at);
        let now = arrival.min(end).min(timeout);
        if now > Time::ZERO + ms(5_000) {
            return served as f64;
        }
        if end == now
            && let Some((_, device, batch, members)) = running.take()
        {
            scheduler.handle_completion(now, device, batch);
            rehearsal.answered(now, model, members.len() as u32, false);
            served += if now > Time::ZERO + ms(4_000) { members.len() } else { 0 };
            answered = Some((now, members.len() as u64));
        } else if arrival == now {
            coming.pop_front();
            id += 1;
            let request =
                Request { id: RequestId(id), model, deadline: now + slo, queue_expiry: Time::MAX, level: 0, size: 1 };
            scheduler.handle_request(now, request).unwrap();
            rehearsal.arrival(PastArrival { at: now, budget: slo, model, size: 1, level: 0 });
        } else {
            scheduler.handle_timeout(now);
        }
        while let Some(output) = scheduler.poll_output() {
            let Output::Dispatch { batch, device, members, expected, .. } = output else { panic!("{output:?}") };
            running = Some((now + expected, device, batch, members));
        }
        if let Some((at, members)) = answered.take() {
            let apart = Duration::from_micros(if slowed && running.is_some() { 3_700 / members } else { 10 });
            coming.extend((0..members).map(|member| at + pause + apart.saturating_mul(member)));
            coming.make_contiguous().sort_unstable();
        }
        if rehearse && now.since(told) > ms(20) {
            told = now;
            rehearsal.step(20_000);
            while let Some(decision) = rehearsal.poll_decision() {
                scheduler.set_behaviour(now, model, decision.behaviours[0]);
            }
        }
    }
}

/// Half of the clients would always wait while the others' batch runs: batches of half the size.
#[test]
fn clients_that_wait_for_answers_are_served_together() {
    for (clients, max_batch, slowed) in [(32, 32, false), (24, 32, false), (32, 32, true)] {
        let [rule, rehearsed] = [false, true].map(|rehearse| closed_loop(clients, max_batch, slowed, rehearse));
        assert!(rehearsed > 1.15 * rule, "{clients} clients: {rehearsed}/s with a rehearsal, {rule}/s without");
    }
}

/// If all models wait alike, the large model for its batches, a quick one waits as long for
/// nothing.
#[test]
fn a_quick_model_does_not_wait_because_a_slow_one_has_to() {
    let mut rehearsal = rehearsal(false, 1, &options(1_053, 5_072), 8);
    rehearsal.set_model(ModelId(1), Some(options(20, 60)));
    let mut found = None;
    for number in 0..60_000 {
        // 5,400 requests a second of the first model, as above. For each twenty comes one of the
        // second.
        let (model, slo) = if number % 21 == 20 { (1, 250) } else { (0, 25) };
        let at = Time::ZERO + Duration::from_micros(number * 176 - if number % 4 == 3 { 88 } else { 0 });
        rehearsal.arrival(PastArrival { at, budget: ms(slo), model: ModelId(model), size: 1, level: 0 });
        if number % 100 == 99 {
            rehearsal.step(100_000);
            found = rehearsal.poll_decision().or(found);
        }
    }
    let found = found.expect("there were trials").behaviours;
    assert!(found[0].is_some_and(|large| large.wait > 0), "{found:?}");
    assert!(found[1].is_none_or(|quick| quick.wait == 0), "{found:?}");
}

/// Twenty requests of 25 ms in 10 ms, on devices that a batch reaches after 18 ms: none can run in
/// time.
#[test]
fn a_models_network_counts_as_the_network_of_all_does() {
    let network = NetworkBudget { control: ms(18), data: Duration::ZERO, reply: ms(2) };
    let tried = |set: &dyn Fn(&mut Rehearsal)| {
        let mut rehearsal = rehearsal(false, 1, &options(1_053, 5_072), 8);
        set(&mut rehearsal);
        feed(&mut rehearsal, 1, ms(25), 500, 4_000);
        decision(&mut rehearsal)
    };
    let near = tried(&|_| {});
    let all = tried(&|rehearsal| rehearsal.set_delays(network, Duration::ZERO));
    let own = tried(&|rehearsal| rehearsal.set_network(ModelId(0), vec![(DeviceKind(0), network)]));
    assert_eq!(own, all);
    assert!(near.tried[0].bad[0].1 < 0.1 && own.tried[0].bad[0].1 > 0.9, "{near:?}, {own:?}");
}

/// The order after `count` requests, one in `of` for the second model, every `gap_us`.
fn order_found(policy: OrderPolicy, models: [(ModelOptions, Duration); 2], of: u64, gap_us: u64, count: u64) -> Order {
    let mut rehearsal = Rehearsal::new(false, 7);
    rehearsal.set_order(policy);
    rehearsal.set_devices(DeviceKind(0), 1);
    for (model, (options, _)) in (0..).zip(&models) {
        rehearsal.set_model(ModelId(model), Some(options.clone()));
    }
    let mut order = policy.first();
    for number in 0..count {
        let model = usize::from(number % of == of - 1);
        let at = Time::ZERO + Duration::from_micros(number * gap_us - if number % 4 == 3 { gap_us / 2 } else { 0 });
        let model_id = ModelId(model as u32);
        rehearsal.arrival(PastArrival { at, budget: models[model].1, model: model_id, size: 1, level: 0 });
        if number % 100 == 99 {
            rehearsal.step(50_000);
            while let Some(decision) = rehearsal.poll_decision() {
                order = decision.order;
            }
        }
    }
    order
}

/// A model keeps the device busy with batches of 8 ms. Each must start within 4 ms of the end of
/// the last one. A second model could wait for 99 ms. By urgency it is passed over until its last 4
/// ms, and every other time its last moment is while a batch runs. The models have fixed policies:
/// adaptive models would adapt and lose nothing in this order, too.
#[test]
fn an_order_that_loses_less_is_found() {
    let eager = |options| ModelOptions { dispatch: DispatchPolicy::Eager, drop: DropPolicy::HeadDrop, ..options };
    let busy = || [(eager(options(1, 8_000)), ms(20)), (eager(options(1, 1_000)), ms(100))];
    assert_eq!(order_found(OrderPolicy::Rehearsed, busy(), 50, 1_000, 30_000), Order::Fair);
    let fixed = OrderPolicy::Fixed(Order::Urgency);
    assert_eq!(order_found(fixed, busy(), 50, 1_000, 10_000), Order::Urgency, "what is fixed is not tried");
}

#[test]
fn where_no_order_gains_anything_it_stays() {
    let quiet = [(options(100, 1_000), ms(50)), (options(100, 1_000), ms(100))];
    assert_eq!(order_found(OrderPolicy::Rehearsed, quiet, 3, 5_000, 6_000), Order::default());
}
