//! Shares of tenants: the ledger's promise, and lent queues beside own queues.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ItemCost, ModelOptions, Order, Output, Request, Scheduler};
use downbeat_core::journal::Journal;
use downbeat_core::journal::cluster::Input;
use downbeat_core::tenants::{Ledger, OverQuota, Standing, TenantId, TenantPart};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use proptest::prelude::*;

use crate::journal_checks::check;

const FIRST: TenantId = TenantId(0);

fn at(ms: u64) -> Time {
    Time::ZERO + ms_of(ms)
}

fn ms_of(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn part(share: f64, quota: Option<f64>) -> TenantPart {
    TenantPart { share, quota }
}

fn request(id: u64, model: ModelId, due: Time) -> Request {
    Request { id: RequestId(id), model, deadline: due, queue_expiry: Time::MAX, level: 0, size: 1 }
}

/// A model with `l(b) = 5 + 5 b` ms, whose batches leave as soon as a device is free.
fn options(dispatch: DispatchPolicy) -> ModelOptions {
    ModelOptions::new(LatencyProfile::linear_ms(5.0, 5.0, 8).unwrap(), dispatch, DropPolicy::HeadDrop)
}

/// The models of the next dispatches.
fn dispatched(scheduler: &mut Scheduler) -> Vec<(ModelId, DeviceId, BatchId)> {
    let mut all = Vec::new();
    while let Some(output) = scheduler.poll_output() {
        if let Output::Dispatch { model, device, batch, .. } = output {
            all.push((model, device, batch));
        }
    }
    all
}

#[test]
fn a_tenant_is_within_its_share_until_its_time_is_used_up() {
    let mut ledger = Ledger::new(&[part(0.5, None)], 2, ms_of(10));
    let mut arrive = |now| ledger.arrive(at(now), FIRST, ms_of(4)).unwrap().unwrap();
    // The bucket has 0.5 * 2 devices * 10 ms.
    let standings: Vec<Standing> = (0..4).map(|_| arrive(0)).collect();
    assert_eq!(standings, [Standing::Within, Standing::Within, Standing::Within, Standing::Beyond]);
    assert_eq!((arrive(2), arrive(3)), (Standing::Beyond, Standing::Within));
    assert_eq!(ledger.balance(FIRST), -3_000_000);
    assert_eq!(ledger.next_within(at(3), FIRST), Some(Duration::from_nanos(3_000_001)));
    ledger.settle(FIRST, Standing::Within, ms_of(4), Duration::ZERO);
    assert_eq!(ledger.next_within(at(3), FIRST), Some(Duration::ZERO), "a request that did not run costs nothing");
    assert!(ledger.arrive(at(3), TenantId(1), ms_of(1)).is_none());
}

#[test]
fn lent_time_costs_nothing_and_a_quota_counts_it() {
    let mut ledger = Ledger::new(&[part(0.0, Some(0.5))], 1, ms_of(10));
    let mut arrive = |now| ledger.arrive(at(now), FIRST, ms_of(4)).unwrap();
    assert_eq!((arrive(0), arrive(0)), (Ok(Standing::Beyond), Ok(Standing::Beyond)));
    assert_eq!(arrive(1), Err(OverQuota { retry_after: Duration::from_nanos(5_000_001) }));
    assert_eq!(arrive(7), Ok(Standing::Beyond));
    assert_eq!(ledger.next_within(at(9), FIRST), None, "without a share no request is ever within");
}

#[test]
fn an_item_is_charged_a_part_of_a_typical_batch() {
    let profile = LatencyProfile::linear_ms(5.0, 5.0, 8).unwrap();
    // l(4) = 25 ms is half of the SLO.
    let cost = ItemCost::new(&profile, 8, ms_of(50), 1);
    assert_eq!(cost.of(4), ms_of(25));
    assert_eq!(cost.corrected(4, ms_of(12), ms_of(10)), ms_of(30));
    assert_eq!(ItemCost::new(&profile, 8, Duration::MAX, 1).of(8), ms_of(45));
}

#[test]
fn a_lent_batch_waits_for_all_others() {
    for order in Order::ALL {
        let mut scheduler = Scheduler::new();
        scheduler.set_order(at(0), order);
        scheduler.add_device(at(0), DeviceKind(0));
        let lent = scheduler.add_model(at(0), options(DispatchPolicy::Eager));
        let [own, other] = [0, 1].map(|_| scheduler.add_model(at(0), options(DispatchPolicy::Eager)));
        scheduler.set_lent(at(0), lent);
        scheduler.handle_request(at(0), request(0, own, at(100))).unwrap();
        let (_, device, first) = dispatched(&mut scheduler)[0];
        scheduler.handle_request(at(1), request(1, lent, at(60))).unwrap();
        scheduler.handle_request(at(2), request(2, own, at(90))).unwrap();
        scheduler.handle_request(at(3), request(3, other, at(95))).unwrap();
        let mut models = Vec::new();
        let (mut now, mut batch) = (at(10), first);
        while scheduler.queued(lent) > 0 {
            scheduler.handle_completion(now, device, batch);
            let (model, _, next) = dispatched(&mut scheduler)[0];
            models.push(model);
            (now, batch) = (now + ms_of(10), next);
        }
        models.sort_by_key(|model| *model == lent);
        assert_eq!(models.last(), Some(&lent), "{order}");
        assert_eq!(models.len(), 3, "{order}: a device that is free is lent");
    }
}

/// A deferred batch of one starts at `deadline - l(2)`, and may start at `deadline - 2 l(1)` if it
/// grows. A lent batch of 10 ms that would still run then does not begin.
#[test]
fn a_lent_batch_leaves_time_for_a_deferred_one() {
    for (due, lends) in [(28, false), (30, true)] {
        let mut scheduler = Scheduler::new();
        scheduler.add_device(at(0), DeviceKind(0));
        let own = scheduler.add_model(at(0), options(DispatchPolicy::Deferred));
        let lent = scheduler.add_model(at(0), options(DispatchPolicy::Eager));
        scheduler.set_lent(at(0), lent);
        scheduler.handle_request(at(0), request(0, own, at(due))).unwrap();
        scheduler.handle_request(at(0), request(1, lent, at(100))).unwrap();
        let begun: Vec<ModelId> = dispatched(&mut scheduler).iter().map(|(model, ..)| *model).collect();
        assert_eq!(begun, if lends { vec![lent] } else { vec![] }, "the deferred batch starts at {} ms", due - 15);
        if !lends {
            let first = std::iter::from_fn(|| {
                let (wake, _) = scheduler.poll_timeout().unwrap();
                scheduler.handle_timeout(wake);
                Some((wake, dispatched(&mut scheduler)))
            });
            let (wake, begun) = first.into_iter().find(|(_, begun)| !begun.is_empty()).unwrap();
            assert_eq!((wake, begun[0].0), (at(due - 15), own));
        }
    }
}

/// What a cluster decides on random requests.
fn run(seed: u64, has_lent: bool) -> Vec<Output> {
    let mut state = seed;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut scheduler = Scheduler::new();
    for _ in 0..2 {
        scheduler.add_device(at(0), DeviceKind(0));
    }
    let dispatches = [DispatchPolicy::Deferred, DispatchPolicy::Eager, DispatchPolicy::Adaptive { consolidate: false }];
    let models = dispatches.map(|dispatch| scheduler.add_model(at(0), options(dispatch)));
    if has_lent {
        let lent = scheduler.add_model(at(0), options(DispatchPolicy::Eager));
        scheduler.set_lent(at(0), lent);
    }
    let (mut outputs, mut running, mut now): (_, Vec<(Time, DeviceId, BatchId)>, _) = (Vec::new(), Vec::new(), at(0));
    for id in 0..400 {
        let next = now + ms_of(random(9));
        loop {
            running.sort();
            let end = running.first().map_or(Time::MAX, |(end, ..)| *end);
            let wake = scheduler.poll_timeout().map_or(Time::MAX, |(at, _)| at);
            if end.min(wake) > next {
                break;
            }
            now = now.max(end.min(wake));
            match end <= wake {
                true => {
                    let (_, device, batch) = running.remove(0);
                    scheduler.handle_completion(now, device, batch);
                }
                false => scheduler.handle_timeout(now),
            }
            while let Some(output) = scheduler.poll_output() {
                if let Output::Dispatch { device, batch, start, expected, .. } = &output {
                    running.push((*start + *expected, *device, *batch));
                }
                outputs.push(output);
            }
        }
        now = next;
        let model = models[random(3) as usize];
        let _ = scheduler.handle_request(now, request(id, model, now + ms_of(20 + random(40))));
    }
    outputs
}

proptest! {
    /// A failure prints the seed.
    #[test]
    fn a_lent_queue_without_requests_changes_no_decision(seed in any::<u64>()) {
        prop_assert_eq!(run(seed, false), run(seed, true));
    }

    /// The promise of the ledger's documentation, for requests that take what was estimated.
    #[test]
    fn no_more_time_is_promised_than_there_is(
        shares in prop::collection::vec(0.0..1.0f64, 1..5),
        devices in 1..9u32,
        steps in prop::collection::vec((0..5u64, 0..4_000u64, 1..3_000u64, any::<bool>()), 1..300),
    ) {
        let all: f64 = shares.iter().sum::<f64>().max(1.0);
        let parts: Vec<TenantPart> = shares.iter().map(|share| part(share / all, None)).collect();
        let depth = ms_of(5);
        let mut ledger = Ledger::new(&parts, devices, depth);
        let (mut now, mut taken) = (Time::ZERO, vec![0u64; parts.len()]);
        for (tenant, gap, cost, runs) in steps {
            let tenant = tenant as usize % parts.len();
            let (id, estimate) = (TenantId(tenant as u32), Duration::from_micros(cost));
            now += Duration::from_micros(gap);
            if ledger.arrive(now, id, estimate).unwrap() == Ok(Standing::Within) {
                if runs {
                    taken[tenant] += estimate.as_nanos();
                } else {
                    ledger.settle(id, Standing::Within, estimate, Duration::ZERO);
                }
            }
            prop_assert!(ledger.balance(id) >= -3_000_000, "not below zero by more than one request");
            let promised = parts[tenant].share * f64::from(devices) * (now.since(Time::ZERO) + depth).as_nanos() as f64;
            // Parts are counted in millionths.
            prop_assert!((taken[tenant] as f64) <= promised * 1.00001 + 3_000_000.0 + 1e6);
        }
        let most = f64::from(devices) * (now.since(Time::ZERO) + depth).as_nanos() as f64;
        let slack = 3_000_000.0 * parts.len() as f64;
        prop_assert!((taken.iter().sum::<u64>() as f64) <= most * 1.00001 + slack + 1e6);
    }
}

#[test]
fn a_log_with_a_lent_queue_replays() {
    let mut journal = Journal::on(Scheduler::new());
    journal.apply(at(0), Input::AddDevice(DeviceKind(0)));
    for model in 0..2 {
        journal.apply(at(0), Input::AddModel(ModelId(model), Box::new(options(DispatchPolicy::Eager))));
    }
    journal.apply(at(0), Input::SetLent(ModelId(1)));
    for id in 0..6 {
        journal.handle_request(at(id), request(id, ModelId(id as u32 % 2), at(id + 60))).unwrap();
        while journal.poll_output().is_some() {}
    }
    let mut log = Vec::new();
    journal.take_log(&mut log);
    check(Scheduler::new(), &log);
}
