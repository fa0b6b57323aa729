//! Models on a few devices. The policies are fixed, chosen by `auto` when the models are loaded, or
//! rehearsed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use downbeat_core::cluster::{NetworkBudget, PastArrival};
use downbeat_core::device::{
    AutoGuard, Candidate, DeviceDecision, DeviceRehearsal, DeviceUse, GuardEnd, GuardOptions, Launch, Layout,
    SegmentRange,
};
use downbeat_core::{DeviceKind, Duration, ModelId, RequestId, Time};

use super::auto_measured::{MeasuredForAuto, noise};
use super::failure::DeviceFailure;
use super::random::RandomDeviceWorkload;
use crate::world::{self, Ask, Ending, Fault, Order, Outside, World};
use downbeat_sim::ArrivalStream;
use downbeat_sim::EVENTS_PER_SECOND;
use downbeat_sim::Network;

/// The least time between two steps of the rehearsal, each with its share of replayed events.
const TICK: Duration = Duration::from_millis(20);
/// The time to load a model anew under another policy. Until then requests go to the former policy.
const LOADING: Duration = Duration::from_millis(1_000);

/// The source of the models' policies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Played {
    /// Each model has the candidate of this number for the whole run, or its last candidate if it
    /// has fewer.
    Fixed(usize),
    /// The choice of `auto` when models are loaded, until its guard goes back to `exclusive`.
    Auto,
    /// The choice of `auto` at the start, and then the decisions of the rehearsal.
    Rehearsed,
}

/// The outcome of a run, over the requests that came once [`AutoRun::settled`] had passed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct AutoOutcome {
    /// By model: its requests, and the requests that were answered by their deadlines.
    pub models: Vec<(u64, u64)>,
    /// The mean time from arrival to answer of the requests answered in time, in seconds.
    pub latency: f64,
    /// Requests of the whole run that were neither answered, nor dropped or refused by a policy.
    pub lost: u64,
    /// The rehearsal's decisions that changed a policy, each with its instant.
    pub changes: Vec<(Time, DeviceDecision)>,
    /// The policies that lost against `exclusive`, by the guard.
    pub lost_policies: u64,
    /// Trials that did not faithfully replay the models' current policies.
    pub unfaithful: u64,
    /// By model: the candidate that served it at the end.
    pub last: Vec<Candidate>,
    /// The replayed events.
    pub events: u64,
    sum: f64,
    answered: u64,
}

impl AutoOutcome {
    /// Returns the share of all requests that were answered in time.
    pub fn good(&self) -> f64 {
        let (offered, good) = self.models.iter().fold((0, 0), |sum, model| (sum.0 + model.0, sum.1 + model.1));
        good as f64 / offered.max(1) as f64
    }
}

/// A run of a workload for a given time.
#[derive(Clone, Copy, Debug)]
pub struct AutoRun<'a> {
    /// The workload: models, devices and arrivals.
    pub workload: &'a RandomDeviceWorkload,
    /// The time during which requests come.
    pub span: Duration,
    /// Requests that come before this time do not count.
    pub settled: Duration,
    /// Chooses the arrivals and the noise.
    pub seed: u64,
}

impl AutoRun<'_> {
    /// Runs the workload. Panics, with the seed, if a scheduler breaks a rule.
    ///
    /// # Errors
    /// If an arrival process has no positive, finite rate.
    pub fn run(&self, measured: &[MeasuredForAuto], played: Played) -> Result<AutoOutcome, DeviceFailure> {
        let RandomDeviceWorkload { limits, devices, noise, .. } = self.workload;
        let cluster = world::cluster(1, 1, NetworkBudget::default());
        let mut world = World::new(self.seed, Network::default(), &cluster, Order::InTurn);
        for number in 0..*devices {
            world.add_device(*limits, DeviceKind(0), *noise);
            world.divide(number, &Layout { shared_lanes: vec![1] });
        }
        let mut streams = Vec::new();
        for (model, stream) in self.workload.models.iter().zip(16..) {
            let stream = self.workload.arrivals.stream(model.rate, self.seed, stream);
            streams.push(stream.map_err(|bad| DeviceFailure(bad.to_string()))?);
        }
        let mut watch = Watch::new(self, measured, played, streams);
        for (model, measured) in measured.iter().enumerate() {
            for (candidate, cut) in measured.cut.iter().enumerate() {
                let number = world.add_model(cut.clone());
                if candidate == watch.models[model].current {
                    world.load(number, &measured.serving(candidate, *devices));
                }
            }
        }
        world.run(&mut watch);
        world.finish(&mut watch);
        Ok(watch.finish())
    }
}

/// A model as its requests see it. Each of its candidates is a model of the world, and one of them
/// takes new requests.
struct ServedModel<'a> {
    measured: &'a MeasuredForAuto,
    stream: ArrivalStream,
    next: Time,
    slo: Duration,
    /// The number in the world of the first candidate.
    first: usize,
    current: usize,
    /// The candidate that is being loaded, and the instant at which it takes over.
    coming: Option<(Time, usize)>,
    /// Former candidates that still have requests.
    leaving: BTreeSet<usize>,
    /// By candidate: the requests that have not ended.
    open: Vec<u64>,
    /// The guard of a policy that was chosen.
    guard: Option<AutoGuard>,
}

impl ServedModel<'_> {
    /// Returns the model of the world that takes requests now.
    fn number(&self) -> ModelId {
        ModelId((self.first + self.current) as u32)
    }
}

/// Returns how long devices have been busy for other models by now, on average.
fn others(uses: &mut [DeviceUse], now: Time, model: ModelId) -> Duration {
    let sum = uses.iter_mut().fold(Duration::ZERO, |sum, device| sum + device.others(now, model));
    Duration::from_nanos(sum.as_nanos() / (uses.len() as u64).max(1))
}

struct Open {
    model: usize,
    candidate: usize,
    arrival: Time,
    deadline: Time,
}

struct Watch<'a> {
    run: &'a AutoRun<'a>,
    models: Vec<ServedModel<'a>>,
    /// By device.
    uses: Vec<DeviceUse>,
    rehearsal: Option<DeviceRehearsal>,
    ticked: Time,
    open: BTreeMap<RequestId, Open>,
    faults: VecDeque<Fault>,
    outcome: AutoOutcome,
}

impl<'a> Watch<'a> {
    fn new(run: &'a AutoRun<'a>, measured: &'a [MeasuredForAuto], played: Played, streams: Vec<ArrivalStream>) -> Self {
        let mut rehearsal = DeviceRehearsal::new(run.seed);
        rehearsal.set_devices(run.workload.devices as u32, 1);
        let (mut models, mut first) = (Vec::new(), 0);
        for ((measured, mut stream), model) in measured.iter().zip(streams).zip(&run.workload.models) {
            let count = measured.candidates.len();
            let current = match played {
                Played::Fixed(candidate) => candidate.min(count - 1),
                Played::Auto | Played::Rehearsed => measured.start,
            };
            let id = ModelId(models.len() as u32);
            rehearsal.set_model(id, Some(measured.rehearsed.clone()));
            rehearsal.set_current(id, &measured.candidates[current].candidate);
            for share in noise(run.workload.noise, run.seed) {
                rehearsal.ran(id, share);
            }
            models.push(ServedModel {
                measured,
                next: stream.next_arrival(),
                stream,
                slo: model.slo,
                first,
                current,
                coming: None,
                leaving: BTreeSet::new(),
                open: vec![0; count],
                guard: None,
            });
            first += count;
        }
        let outcome = AutoOutcome { models: vec![(0, 0); models.len()], ..AutoOutcome::default() };
        let rehearsal = (played == Played::Rehearsed).then_some(rehearsal);
        let mut watch = Watch {
            run,
            models,
            uses: (0..run.workload.devices).map(|_| DeviceUse::default()).collect(),
            rehearsal,
            ticked: Time::ZERO,
            open: BTreeMap::new(),
            faults: VecDeque::new(),
            outcome,
        };
        if !matches!(played, Played::Fixed(_)) {
            (0..watch.models.len()).for_each(|model| watch.guard(model));
        }
        watch
    }

    /// Watches the policy that a model has, if it is not `exclusive`.
    fn guard(&mut self, model: usize) {
        let served = &mut self.models[model];
        let rehearsed = &served.measured.rehearsed;
        let options = || GuardOptions {
            profile: rehearsed.model.profile.clone(),
            max_batch: rehearsed.model.max_batch,
            launch: rehearsed.launch,
            at_once: self.run.workload.devices as u32,
            drop: rehearsed.model.drop,
        };
        served.guard = (served.current > 0).then(|| AutoGuard::new(options()));
    }

    fn counts(&self, arrival: Time) -> bool {
        arrival >= Time::ZERO + self.run.settled
    }

    /// Counts a request as over. A former candidate is removed with its last request.
    fn over(&mut self, model: usize, candidate: usize) {
        let served = &mut self.models[model];
        served.open[candidate] -= 1;
        if served.open[candidate] == 0 && served.leaving.remove(&candidate) {
            self.faults.push_back(Fault::Remove(served.first + candidate));
        }
    }

    /// Tells the guard and the rehearsal how a request ended. The rehearsal only hears of requests
    /// of the current policy.
    fn tell_end(&mut self, now: Time, request: RequestId, open: &Open, took: Option<Duration>) {
        let Open { model, candidate, deadline, .. } = *open;
        let good = took.is_some() && now <= deadline;
        let Watch { models, uses, .. } = self;
        let served = &mut models[model];
        let end = if took.is_some() { GuardEnd::Answered } else { GuardEnd::Dropped };
        let number = served.number();
        let lost = |guard: &mut AutoGuard| guard.handle_end(now, request, end, || others(uses, now, number));
        if served.guard.as_mut().is_some_and(lost) {
            served.guard = None;
            served.coming = Some((now + LOADING, 0));
            self.outcome.lost_policies += 1;
            if let Some(rehearsal) = &mut self.rehearsal {
                rehearsal.set_lost(now, ModelId(model as u32));
            }
        }
        if let Some(rehearsal) = &mut self.rehearsal
            && self.models[model].current == candidate
        {
            rehearsal.ended(took, good);
        }
    }

    /// Lends the rehearsal the time that has passed, and carries out its decision.
    fn rehearse(&mut self, now: Time) {
        let passed = now.since(self.ticked);
        let Some(rehearsal) = self.rehearsal.as_mut().filter(|_| passed >= TICK) else { return };
        self.ticked = now;
        if self.models.iter().any(|model| model.coming.is_some()) {
            return;
        }
        self.outcome.events += rehearsal.step((EVENTS_PER_SECOND as f64 * passed.as_secs_f64().min(1.0)) as u64);
        let Some(decision) = rehearsal.poll_decision() else { return };
        if !decision.changed {
            self.outcome.unfaithful += u64::from(!decision.faithful);
            return;
        }
        let served = &mut self.models[decision.model.0 as usize];
        let found = served.measured.candidates.iter().position(|one| one.candidate == decision.best);
        served.coming = found.map(|candidate| (now + LOADING, candidate));
        self.outcome.changes.push((now, decision));
    }

    /// Brings candidates into service whose loading has ended.
    fn switch(&mut self, now: Time) {
        let mut switched = Vec::new();
        for (model, served) in self.models.iter_mut().enumerate() {
            let Some((_, candidate)) = served.coming.take_if(|(at, _)| *at <= now) else { continue };
            let former = std::mem::replace(&mut served.current, candidate);
            // A candidate that is still leaving takes requests again.
            if !served.leaving.remove(&candidate) {
                let serving = served.measured.serving(candidate, self.run.workload.devices);
                self.faults.push_back(Fault::Load(served.first + candidate, serving));
            }
            match served.open[former] {
                0 => self.faults.push_back(Fault::Remove(served.first + former)),
                _ => drop(served.leaving.insert(former)),
            }
            if let Some(rehearsal) = &mut self.rehearsal {
                rehearsal.set_current(ModelId(model as u32), &served.measured.candidates[candidate].candidate);
            }
            switched.push(model);
        }
        for model in switched {
            self.guard(model);
        }
    }

    fn finish(mut self) -> AutoOutcome {
        self.outcome.latency = self.outcome.sum / self.outcome.answered.max(1) as f64;
        let last = |served: &ServedModel<'_>| served.measured.candidates[served.current].candidate.clone();
        self.outcome.last = self.models.iter().map(last).collect();
        self.outcome
    }
}

impl Outside for Watch<'_> {
    fn next_arrival(&self) -> Option<Time> {
        self.models.iter().map(|served| served.next).min().filter(|at| at.since(Time::ZERO) <= self.run.span)
    }

    fn arrive(&mut self, now: Time, request: RequestId) -> Ask {
        let model = (0..self.models.len()).min_by_key(|model| self.models[*model].next).unwrap_or(0);
        let counts = self.counts(now);
        let served = &mut self.models[model];
        served.next = served.stream.next_arrival();
        served.open[served.current] += 1;
        let deadline = now + served.slo;
        self.outcome.models[model].0 += u64::from(counts);
        let number = served.number();
        if let Some(guard) = &mut served.guard {
            guard.handle_request(now, request, 1, deadline, || others(&mut self.uses, now, number));
        }
        self.open.insert(request, Open { model, candidate: served.current, arrival: now, deadline });
        let ask = Ask { model: served.first + served.current, size: 1, length: 0, level: 0, deadline };
        if let Some(rehearsal) = &mut self.rehearsal {
            let (model, budget) = (ModelId(model as u32), served.slo);
            rehearsal.arrival(PastArrival { at: now, budget, model, size: 1, level: 0 });
        }
        self.rehearse(now);
        ask
    }

    fn arrived(&mut self, now: Time, request: RequestId, accepted: bool) -> Option<Time> {
        if !accepted && let Some(open) = self.open.remove(&request) {
            self.over(open.model, open.candidate);
            self.tell_end(now, request, &open, None);
        }
        None
    }

    fn ended(&mut self, now: Time, request: RequestId, ending: Ending) {
        let Some(open) = self.open.remove(&request) else { return };
        let Open { model, arrival, deadline, .. } = open;
        self.over(model, open.candidate);
        self.tell_end(now, request, &open, (ending == Ending::Replied).then(|| now.since(arrival)));
        match ending {
            Ending::Replied if self.counts(arrival) && now <= deadline => {
                self.outcome.models[model].1 += 1;
                self.outcome.sum += now.since(arrival).as_secs_f64();
                self.outcome.answered += 1;
            }
            Ending::Replied | Ending::Dropped => {}
            Ending::Cancelled | Ending::Failed(_) => self.outcome.lost += 1,
        }
    }

    fn began(&mut self, now: Time, device: usize, launch: &Launch) {
        self.uses[device].begin(now, launch.model);
    }

    fn completed(&mut self, now: Time, _: Time, device: usize, launch: &Launch, _: SegmentRange) -> Vec<RequestId> {
        self.uses[device].end(now, launch.model);
        Vec::new()
    }

    fn change(&mut self, now: Time) -> Option<Fault> {
        self.switch(now);
        self.faults.pop_front()
    }
}
