//! The last requests of a running server, replayed with the settings that its rehearsal has found.

use downbeat_core::cluster::{ModelOptions, OrderPolicy, PastArrival, Rehearsal, Reject, Request, Scheduler};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_sim::what_if::{Found, Served, ServedQueue, Setting};
use downbeat_sim::{Arrivals, ClusterScheduler, Decision, Load, Pace, Policy, Simulation};

/// How many events the rehearsal replays in each 20 ms.
const EVENTS: u64 = 5_000;
/// The requests that are replayed come after this time, and the run ends after twice the time.
const HALF: Duration = Duration::from_millis(6_000);

/// The memory of a server: its requests, and the settings that its rehearsal has found.
#[derive(Default)]
struct Memory {
    arrivals: Vec<PastArrival>,
    found: Found,
}

/// The scheduler of a server with its rehearsal.
struct Server<'a> {
    scheduler: Scheduler,
    rehearsal: Rehearsal,
    ticked: Time,
    devices: u32,
    memory: &'a mut Memory,
}

impl ClusterScheduler for Server<'_> {
    fn add_model(&mut self, now: Time, options: ModelOptions, _slo: Duration, _rate: f64) -> ModelId {
        let model = self.scheduler.add_model(now, options.clone());
        self.rehearsal.set_model(model, Some(options));
        model
    }

    fn add_device(&mut self, now: Time, kind: DeviceKind) -> DeviceId {
        self.devices += 1;
        self.rehearsal.set_devices(kind, self.devices);
        self.scheduler.add_device(now, kind)
    }

    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject> {
        let Request { model, deadline, size, level, .. } = request;
        let arrival = PastArrival { at: now, budget: deadline.since(now), model, size, level };
        self.memory.arrivals.push(arrival);
        self.rehearsal.arrival(arrival);
        if now.since(self.ticked) >= Duration::from_millis(20) {
            self.ticked = now;
            self.rehearsal.step(EVENTS);
        }
        while let Some(decision) = self.rehearsal.poll_decision() {
            for (model, behaviour) in (0..).map(ModelId).zip(&decision.behaviours).filter(|_| decision.changed) {
                self.scheduler.set_behaviour(now, model, *behaviour);
                self.memory.found.behaviours.remove(&model);
                self.memory.found.behaviours.extend(behaviour.map(|behaviour| (model, behaviour)));
            }
            self.scheduler.set_order(now, decision.order);
            self.memory.found.order = Some(decision.order);
        }
        self.scheduler.handle_request(now, request).map(drop)
    }

    fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        self.scheduler.handle_completion(now, device, batch);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.scheduler.handle_timeout(now);
    }

    fn poll_decision(&mut self) -> Option<Decision> {
        self.scheduler.poll_output().map(Decision::from)
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.scheduler.poll_timeout().map(|(at, _)| at)
    }

    fn recycle(&mut self, members: Vec<RequestId>) {
        self.scheduler.recycle(members);
    }
}

/// Two models under more load than three devices hold.
fn simulation(seed: u64) -> Simulation {
    let policy: Policy = "adaptive".parse().unwrap();
    let load = |alpha, beta, slo_ms, rate| {
        let slo = Duration::from_millis(slo_ms);
        let profile = LatencyProfile::linear_ms(alpha, beta, 32).unwrap();
        let options = ModelOptions::new(profile, policy.dispatch(slo), policy.drop());
        Load { options, slo, arrivals: Arrivals::Poisson, rate, pace: Pace::default() }
    };
    Simulation {
        loads: vec![load(1.053, 5.072, 25, 1_750.0), load(2.0, 9.0, 60, 300.0)],
        devices: 3,
        warm_up: Duration::ZERO,
        span: HALF + HALF,
        window: Duration::from_millis(1_000),
        seed,
        ..Simulation::default()
    }
}

/// The share in time as measured, in a replay with the found settings, and in a replay by the rule.
fn shares(seed: u64) -> [f64; 3] {
    let (simulation, mut memory) = (simulation(seed), Memory::default());
    let server = Server {
        scheduler: Scheduler::new(),
        rehearsal: Rehearsal::new(false, seed),
        ticked: Time::ZERO,
        devices: 0,
        memory: &mut memory,
    };
    let report = simulation.run_on(server).unwrap();
    let middle = Time::ZERO + HALF;
    let windows = || report.windows.iter().filter(|window| window.start >= middle);
    let offered: u32 = windows().flat_map(|window| &window.offered).sum();
    let good: u32 = windows().flat_map(|window| &window.good).sum();

    let queue = |options: &ModelOptions, model: &str| ServedQueue {
        model: model.to_owned(),
        options: options.clone(),
        runs: Vec::new(),
    };
    let queues = (0..).map(ModelId).zip(simulation.loads.iter().zip(["a", "b"]));
    let served = Served {
        queues: queues.map(|(id, (load, name))| (id, queue(&load.options, name))).collect(),
        devices: vec![simulation.devices],
        order: OrderPolicy::default(),
        wake_margin: Duration::ZERO,
    };
    let last = memory.arrivals.partition_point(|arrival| arrival.at < middle);
    let recorded = served.recorded(&memory.arrivals[last..]).unwrap();
    let replay = |found: Found| {
        let setting = Setting { rehearse: false, found, ..Setting::of(&recorded) };
        recorded.curve(&setting, &[1.0], || true).unwrap()[0].all.attainment
    };
    [f64::from(good) / f64::from(offered), replay(memory.found), replay(Found::default())]
}

#[test]
fn a_replay_with_the_found_settings_predicts_what_the_server_did() {
    for seed in [1, 2] {
        let [measured, found, by_rule] = shares(seed);
        assert!((found - measured).abs() < 0.02, "seed {seed}: {found} for {measured}, by the rule {by_rule}");
    }
}
