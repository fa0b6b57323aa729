//! Networks drawn from a seed, with faults.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy};
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_roles::{MoveLimit, SubClusterCount, SubClusterOptions};
use rand::RngExt;
use rand_pcg::Pcg64;

use super::scenario::{Fault, Host, NetworkModel, NetworkScenario, Pauses, Preparation, Roles, Timing, Wires};
use super::streams::Streaming;
use super::sub_clusters::{MODEL_BYTES, SubClusters};
use downbeat_sim::random;

/// The longest time in which clients send, in seconds.
const LONGEST_S: f64 = 4.0;
/// The shortest such time.
const SHORTEST_S: f64 = 0.3;

fn micros(rng: &mut Pcg64, range: std::ops::Range<u64>) -> Duration {
    Duration::from_micros(rng.random_range(range))
}

/// True in this share of the cases.
fn chance(rng: &mut Pcg64, share: f64) -> bool {
    rng.random::<f64>() < share
}

impl NetworkScenario {
    /// The same network, whose backends make the batches by device policies: their slots are seats.
    #[must_use]
    pub fn seated(mut self) -> Self {
        self.roles.seats = true;
        self.models.iter_mut().for_each(|model| model.dispatch = DispatchPolicy::Route);
        self
    }

    /// Draws a network with faults from the seed, with about this many requests.
    pub fn random(seed: u64, requests: u64) -> Self {
        let mut rng = random(seed, 3);
        let rng = &mut rng;
        let roles = Roles {
            frontends: rng.random_range(1..=3),
            schedulers: rng.random_range(1..=3),
            backends: rng.random_range(1..=5),
            slots: rng.random_range(1..=3),
            seats: false,
        };
        let mut models: Vec<NetworkModel> = (0..rng.random_range(1..=4)).map(|_| model(rng)).collect();
        let slots = f64::from(roles.backends * roles.slots);
        let share = rng.random_range(0.1..1.2) / models.len() as f64;
        for model in &mut models {
            let most = model.profile.max_batch();
            model.rate = share * slots * f64::from(most) / model.profile.latency(most).as_secs_f64();
        }
        let rate: f64 = models.iter().map(|model| model.rate).sum();
        let span = (requests as f64 / rate).clamp(SHORTEST_S, LONGEST_S);
        let scale = (requests as f64 / (rate * span)).min(1.0);
        models.iter_mut().for_each(|model| model.rate *= scale);
        let span = Duration::from_secs_f64(span);
        let is_harsh = chance(rng, 0.5);
        let wires = Wires {
            delay: micros(rng, 5..200),
            spread: rng.random_range(1.0..12.0),
            jitter: Duration::ZERO,
            loss: if is_harsh { rng.random_range(0.0..0.05) } else { 0.0 },
            doubled: if is_harsh { rng.random_range(0.0..0.05) } else { 0.0 },
            in_order: !is_harsh || chance(rng, 0.3),
            redial: micros(rng, 5_000..30_000),
        };
        let timing = Timing {
            lost_after: micros(rng, 20_000..100_000),
            fetch_within: micros(rng, 2_000..20_000),
            tries: rng.random_range(0..4),
            wakes_late: micros(rng, 0..200),
            ..Timing::default()
        };
        let mut scenario = NetworkScenario {
            seed,
            roles,
            models,
            wires,
            timing,
            has_store: chance(rng, 0.3),
            sub_clusters: None,
            rehearsed: false,
            pauses: None,
            cancelled: if chance(rng, 0.5) { rng.random_range(0.0..0.2) } else { 0.0 },
            failed: if chance(rng, 0.3) { 0.01 } else { 0.0 },
            noise: rng.random_range(0.0..0.3),
            span,
            faults: Vec::new(),
            absent: Vec::new(),
        };
        let faults = rng.random_range(0..=10);
        scenario.faults = (0..faults).map(|_| (instant(rng, span), fault(rng, &scenario))).collect();
        scenario.faults.sort_by_key(|(at, _)| *at);
        if roles.backends > 1 && chance(rng, 0.2) {
            scenario.absent = vec![roles.backends - 1];
            scenario.faults.push((instant(rng, span), Fault::Join { backend: roles.backends - 1 }));
        }
        scenario.divide(&mut random(seed, 4));
        scenario.delay(&mut random(seed, 5));
        scenario.prepare(&mut random(seed, 6));
        scenario.rehearsed = chance(&mut random(seed, 7), 0.25);
        scenario.stream(&mut random(seed, 8));
        scenario
    }
}

impl NetworkScenario {
    /// Adds jitter in a third of the cases, pauses of all processes in a sixth, and stalls of all
    /// wires in a fifth.
    fn delay(&mut self, rng: &mut Pcg64) {
        if chance(rng, 0.33) {
            self.wires.jitter = micros(rng, 100..10_000);
        }
        if chance(rng, 0.17) {
            self.pauses = Some(Pauses { every: micros(rng, 10_000..500_000), longest: micros(rng, 1_000..100_000) });
        }
        if chance(rng, 0.2) {
            self.faults.push((instant(rng, self.span), Fault::Stall { lasts: micros(rng, 1_000..500_000) }));
            self.faults.sort_by_key(|(at, _)| *at);
        }
    }
}

impl NetworkScenario {
    /// Has frontends make the inputs of some models in a quarter of the cases.
    fn prepare(&mut self, rng: &mut Pcg64) {
        if !chance(rng, 0.25) {
            return;
        }
        let fails = if chance(rng, 0.5) { 0.1 } else { 0.0 };
        for model in &mut self.models {
            model.prepares = chance(rng, 0.7).then(|| Preparation { expected: micros(rng, 100..20_000), fails });
        }
    }
}

impl NetworkScenario {
    /// Has some models give any number of answers in a quarter of the cases.
    fn stream(&mut self, rng: &mut Pcg64) {
        if !chance(rng, 0.25) {
            return;
        }
        for model in &mut self.models {
            let streaming = Streaming { most: rng.random_range(1..=200), every: micros(rng, 50..2_000) };
            model.streams = chance(rng, 0.6).then_some(streaming);
        }
    }
}

impl NetworkScenario {
    /// Adds sub-clusters in a third of the cases. In some of these cases the only faults are joins
    /// and drains of backends.
    fn divide(&mut self, rng: &mut Pcg64) {
        if !chance(rng, 0.33) {
            return;
        }
        let options = SubClusterOptions {
            count: SubClusterCount::Fixed(rng.random_range(1..=4)),
            plan_every: micros(rng, 30_000..1_000_000),
            moves: if chance(rng, 0.3) { MoveLimit::Models(rng.random_range(0..3)) } else { MoveLimit::Any },
            most_requests: None,
        };
        self.sub_clusters = Some(SubClusters {
            options,
            load_time: micros(rng, 500..100_000),
            load_fails: if chance(rng, 0.3) { rng.random_range(0.0..0.5) } else { 0.0 },
            memory: None,
            begins_loaded: chance(rng, 0.3),
        });
        if chance(rng, 0.4) {
            self.faults.retain(|(_, fault)| matches!(fault, Fault::Drain { .. } | Fault::Join { .. }));
            for _ in 0..rng.random_range(0..3) {
                let restart_after = Some(micros(rng, 100..300_000));
                let drain = Fault::Drain { backend: rng.random_range(0..self.roles.backends), restart_after };
                self.faults.push((instant(rng, self.span), drain));
            }
        }
        for _ in 0..rng.random_range(0..4) {
            let model = rng.random_range(0..self.models.len());
            let fault = match chance(rng, 0.5) {
                true => Fault::Divide,
                false => Fault::Rate { model, rate: self.models[model].rate * rng.random_range(0.2..3.0) },
            };
            self.faults.push((instant(rng, self.span), fault));
        }
        self.faults.sort_by_key(|(at, _)| *at);
        // Devices whose memory is full, or nearly so: a model comes only once another has gone.
        if chance(rng, 0.4)
            && let Some(clusters) = &mut self.sub_clusters
        {
            let SubClusterCount::Fixed(count) = clusters.options.count else { return };
            let least = self.models.len().div_ceil(count as usize) as u64;
            clusters.memory = Some(MODEL_BYTES * rng.random_range(least..=least + 2));
            // A model whose load fails goes to another sub-cluster, which may then be too full.
            clusters.load_fails = 0.0;
            // Without plans by time, no later plan lets a failed load begin again.
            if chance(rng, 0.7) {
                clusters.options.plan_every = Duration::MAX;
            }
        }
    }
}

fn instant(rng: &mut Pcg64, span: Duration) -> Time {
    Time::from_nanos(rng.random_range(0..span.as_nanos().max(1)))
}

fn model(rng: &mut Pcg64) -> NetworkModel {
    let (alpha, beta) = (micros(rng, 50..1_000), micros(rng, 200..4_000));
    let profile = LatencyProfile::linear(alpha, beta, rng.random_range(1..=32))
        .unwrap_or_else(|error| panic!("{alpha:?} and {beta:?} are a profile: {error}"));
    let slo = (!chance(rng, 0.15)).then(|| profile.latency(1).saturating_mul(2) + micros(rng, 2_000..60_000));
    let dispatch = match rng.random_range(0..4) {
        0 => DispatchPolicy::Eager,
        1 => DispatchPolicy::Adaptive { consolidate: false },
        2 => DispatchPolicy::Timeout { delay: micros(rng, 0..5_000), preferred: Vec::new() },
        _ => DispatchPolicy::Deferred,
    };
    let drop = match rng.random_range(0..3) {
        0 => DropPolicy::HeadDrop,
        1 => DropPolicy::Adaptive,
        _ => DropPolicy::WindowDrop,
    };
    NetworkModel {
        profile,
        rate: 0.0,
        slo,
        dispatch,
        drop,
        may_repeat: chance(rng, 0.6),
        prepares: None,
        streams: None,
    }
}

fn fault(rng: &mut Pcg64, scenario: &NetworkScenario) -> Fault {
    let hosts = scenario.hosts();
    let Roles { schedulers, backends, .. } = scenario.roles;
    let host = match rng.random_range(0..3) {
        // Faults hit schedulers and backends more often, because the rules are about them.
        0 => Host::Scheduler(rng.random_range(0..schedulers)),
        1 => Host::Backend(rng.random_range(0..backends)),
        _ => hosts[rng.random_range(0..hosts.len())],
    };
    let lasts = match chance(rng, 0.5) {
        true => micros(rng, 1_000..20_000),
        false => micros(rng, 20_000..400_000),
    };
    let restart_after = chance(rng, 0.7).then(|| micros(rng, 100..300_000));
    match rng.random_range(0..10) {
        0 | 1 => Fault::Kill { host, restart_after, silently: chance(rng, 0.3) },
        2 | 3 => Fault::Pause { host, lasts },
        4 => Fault::Slow { host, lasts, by: micros(rng, 100..20_000) },
        5 | 6 => {
            let hosts = hosts.into_iter().filter(|_| chance(rng, 0.4)).collect();
            Fault::Cut { hosts, lasts, one_way: chance(rng, 0.3) }
        }
        7 => Fault::Lossy { loss: rng.random_range(0.0..0.7), lasts },
        8 => Fault::Drain { backend: rng.random_range(0..backends), restart_after },
        _ => Fault::StoreAway { lasts },
    }
}
