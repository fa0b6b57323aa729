//! Judges tenants' shares: what a burst of one tenant costs the others.
//!
//! `cargo run --release -p downbeat-lab --example tenants -- SEED...` prints a row for each seed
//! and case. `POLICIES` and `DEPTH_MS` choose the policies, and the time that a tenant may save up.
#![allow(clippy::print_stdout, missing_docs, reason = "a tool that prints a table")]

use downbeat_core::tenants::TenantPart;
use downbeat_core::{Duration, Time};
use downbeat_lab::tenants::{Cluster, TenantJudge, TenantLoad, TenantVerdict, arrivals_of, play};
use downbeat_sim::{Arrivals, ModelProfile, Pace, parallel};

/// The shares of the tenants; the first one bursts. The rest is the part of keys without a tenant.
const SHARES: [f64; 3] = [0.3, 0.3, 0.2];
/// The tenants, with the keys that have none.
const TENANTS: u32 = 4;
const WARM_UP: u64 = 1_000;
const SPAN: u64 = 20_000;
/// The model of all tenants.
const SHARED: u32 = 4;
/// The burst's part in its tenant's share.
const BURST: f64 = 10.0;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Pattern {
    None,
    Steady,
    OnOff,
    Spike,
}

#[derive(Clone, Debug)]
struct Case {
    policy: &'static str,
    devices: u32,
    /// The part of their shares that all tenants offer.
    offered: f64,
    pattern: Pattern,
    /// Whether the burst goes to the shared model.
    shared: bool,
    tenants: bool,
    seed: u64,
}

/// Linear profiles of Symphony's appendix, for each tenant one model, and one for all.
fn models() -> Vec<ModelProfile> {
    let model = |(name, alpha_ms, beta_ms, slo_ms): (&str, f64, f64, f64)| ModelProfile {
        name: name.to_owned(),
        alpha_ms,
        beta_ms,
        slo_ms,
    };
    [
        ("own-0", 1.053, 5.072, 25.0),
        ("own-1", 1.964, 8.771, 50.0),
        ("own-2", 1.053, 5.072, 25.0),
        ("own-3", 7.008, 0.159, 56.0),
        ("shared", 2.05, 5.378, 40.0),
    ]
    .map(model)
    .to_vec()
}

/// Seconds of device time of an item, in the batch that is staggered without coordination.
fn cost(model: &ModelProfile) -> f64 {
    let latency = |batch: f64| model.alpha_ms * batch + model.beta_ms;
    let batch = ((model.slo_ms / 2.0 - model.beta_ms) / model.alpha_ms).floor().max(1.0);
    latency(batch) / batch / 1e3
}

fn pace(pattern: Pattern) -> Pace {
    let ms = Duration::from_millis;
    let stretches = match pattern {
        Pattern::None | Pattern::Steady => return Pace::steady(),
        Pattern::OnOff => vec![(ms(700), 0.0), (ms(500), 1.0)],
        Pattern::Spike => vec![(ms(WARM_UP + 8_000), 0.0), (ms(2_000), 1.0), (ms(1_000_000), 0.0)],
    };
    Pace::new(stretches).expect("the stretches are sound")
}

fn loads(case: &Case) -> Vec<TenantLoad> {
    let models = models();
    let others = 1.0 - SHARES.iter().sum::<f64>();
    let load = |tenant: u32, model: u32, part: f64, pace: Pace| TenantLoad {
        tenant,
        model,
        rate: part * f64::from(case.devices) / cost(&models[model as usize]),
        pace,
        arrivals: Arrivals::Poisson,
    };
    let mut loads = Vec::new();
    for (tenant, share) in (0..).zip(SHARES.into_iter().chain([others])) {
        let half = case.offered * share / 2.0;
        loads.push(load(tenant, tenant, half, Pace::steady()));
        loads.push(load(tenant, SHARED, half, Pace::steady()));
    }
    if case.pattern != Pattern::None {
        let model = if case.shared { SHARED } else { 0 };
        loads.push(load(0, model, BURST * SHARES[0], pace(case.pattern)));
    }
    loads
}

fn cluster(case: &Case) -> Cluster {
    let mut parts = SHARES.map(|share| TenantPart { share, quota: None }).to_vec();
    parts.push(TenantPart { share: 1.0 - SHARES.iter().sum::<f64>(), quota: None });
    Cluster {
        models: models(),
        devices: case.devices,
        policy: case.policy.parse().expect("a policy"),
        tenants: case.tenants.then_some(parts),
        depth: depth(),
        noise: 0.02,
        seed: case.seed,
    }
}

fn depth() -> Duration {
    let set = std::env::var("DEPTH_MS").ok().and_then(|text| text.parse().ok());
    Duration::from_millis(set.unwrap_or(50))
}

fn judge(case: &Case) -> TenantVerdict {
    judge_loads(case, &loads(case))
}

fn judge_loads(case: &Case, loads: &[TenantLoad]) -> TenantVerdict {
    let end = Duration::from_millis(WARM_UP + SPAN);
    let arrivals = arrivals_of(loads, end, case.seed).expect("the rates are sound");
    let slos: Vec<Duration> = models().iter().map(ModelProfile::slo).collect();
    let log = play(&cluster(case), &arrivals);
    let judge = TenantJudge {
        arrivals: &arrivals,
        slos: &slos,
        devices: case.devices,
        tenants: TENANTS,
        begin: Time::ZERO + Duration::from_millis(WARM_UP),
        end: Time::ZERO + end,
    };
    judge.judge(&log).unwrap_or_else(|broken| panic!("{case:?}: {broken}"))
}

/// The largest loss of attainment of a tenant that does not burst, in points.
fn loss(with: &TenantVerdict, without: &TenantVerdict) -> f64 {
    (1..TENANTS as usize)
        .map(|tenant| 100.0 * (without.attainment(tenant) - with.attainment(tenant)))
        .fold(0.0, f64::max)
}

fn least(verdict: &TenantVerdict) -> f64 {
    (1..TENANTS as usize).map(|tenant| 100.0 * verdict.attainment(tenant)).fold(100.0, f64::min)
}

/// Prints the parts of the device time when all tenants offer ten times their shares.
fn print_parts(seeds: &[u64]) {
    println!("policy devices seed | part of the device time of each tenant, percent (shares: 30 30 20 20) | busy");
    for policy in ["adaptive", "deferred", "eager"] {
        for devices in [1, 2, 4, 8] {
            for seed in seeds {
                let case = Case {
                    policy,
                    devices,
                    offered: BURST,
                    pattern: Pattern::None,
                    shared: false,
                    tenants: true,
                    seed: *seed,
                };
                let verdict = judge(&case);
                let parts = (0..TENANTS as usize).map(|tenant| format!("{:.1}", 100.0 * verdict.part(tenant)));
                println!("{policy:9} {devices} {seed} | {} | {:.3}", parts.collect::<Vec<_>>().join(" "), verdict.busy);
            }
        }
    }
}

fn main() {
    let seeds: Vec<u64> = std::env::args().skip(1).filter_map(|text| text.parse().ok()).collect();
    assert!(!seeds.is_empty(), "give the seeds");
    print_parts(&seeds);
    let mut cases = Vec::new();
    let picked = |name: &str, all: &'static str| std::env::var(name).unwrap_or_else(|_| all.to_owned());
    for policy in ["adaptive", "deferred", "eager"] {
        if !picked("POLICIES", "adaptive deferred eager").contains(policy) {
            continue;
        }
        for devices in [1, 2, 4, 8] {
            for offered in [0.5, 0.7, 0.9] {
                for (pattern, shared) in [
                    (Pattern::Steady, false),
                    (Pattern::Steady, true),
                    (Pattern::OnOff, false),
                    (Pattern::OnOff, true),
                    (Pattern::Spike, false),
                    (Pattern::Spike, true),
                ] {
                    for seed in &seeds {
                        cases.push(Case { policy, devices, offered, pattern, shared, tenants: true, seed: *seed });
                    }
                }
            }
        }
    }
    println!(
        "policy devices offered burst model seed | calm least, loss, loss without shares | good with/without shares | idle while lost"
    );
    let rows = parallel::map(
        &cases,
        1,
        |case: &Case| {
            let calm = Case { pattern: Pattern::None, ..case.clone() };
            let (with, without) = (judge(case), judge(&calm));
            let (equal, equal_calm) = (Case { tenants: false, ..case.clone() }, Case { tenants: false, ..calm });
            let (equal, equal_calm) = (judge(&equal), judge(&equal_calm));
            (
                least(&without),
                loss(&with, &equal_calm),
                loss(&equal, &equal_calm),
                with.all_good() as f64 / equal.all_good() as f64,
                with.idle_while_lost,
                equal.idle_while_lost,
            )
        },
        |_| (),
    );
    let mut worst: f64 = 0.0;
    for (case, (least, loss, unshared, good, idle, idle_equal)) in cases.iter().zip(rows) {
        worst = worst.max(loss);
        println!(
            "{:9} {} {} {:?} {} {} | {least:.2} {loss:.2} {unshared:.2} | {good:.3} | {idle:.3} {idle_equal:.3}",
            case.policy,
            case.devices,
            case.offered,
            case.pattern,
            if case.shared { "shared" } else { "own" },
            case.seed
        );
    }
    println!("worst loss {worst:.2} points");
}
