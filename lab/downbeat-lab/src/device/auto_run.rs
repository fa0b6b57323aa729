//! Models on a few devices. The policies are fixed, or chosen by `auto` when the models are loaded.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use downbeat_core::cluster::NetworkBudget;
use downbeat_core::device::{AutoGuard, DeviceUse, GuardEnd, GuardOptions, Launch, Layout, SegmentRange};
use downbeat_core::{DeviceKind, Duration, ModelId, RequestId, Time};
use downbeat_sim::device_replay::Candidate;
use downbeat_sim::{ArrivalStream, Network};

use super::auto_measured::MeasuredForAuto;
use super::failure::DeviceFailure;
use super::random::RandomDeviceWorkload;
use crate::world::{self, Ask, Ending, Fault, Order, Outside, World};

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
    /// The policies that lost against `exclusive`, by the guard.
    pub lost_policies: u64,
    /// By model: the candidate that served it at the end.
    pub last: Vec<Candidate>,
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
    open: BTreeMap<RequestId, Open>,
    faults: VecDeque<Fault>,
    outcome: AutoOutcome,
}

impl<'a> Watch<'a> {
    fn new(run: &'a AutoRun<'a>, measured: &'a [MeasuredForAuto], played: Played, streams: Vec<ArrivalStream>) -> Self {
        let (mut models, mut first) = (Vec::new(), 0);
        for ((measured, mut stream), model) in measured.iter().zip(streams).zip(&run.workload.models) {
            let count = measured.candidates.len();
            let current = match played {
                Played::Fixed(candidate) => candidate.min(count - 1),
                Played::Auto => measured.start,
            };
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
        let mut watch = Watch {
            run,
            models,
            uses: (0..run.workload.devices).map(|_| DeviceUse::default()).collect(),
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
        let measured = &served.measured.model;
        let options = || GuardOptions {
            profile: measured.model.profile.clone(),
            max_batch: measured.model.max_batch,
            launch: measured.launch,
            at_once: self.run.workload.devices as u32,
            drop: measured.model.drop,
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

    /// Tells the guard of a model how a request ended.
    fn tell_end(&mut self, now: Time, request: RequestId, model: usize, end: GuardEnd) {
        let Watch { models, uses, .. } = self;
        let served = &mut models[model];
        let number = served.number();
        let lost = |guard: &mut AutoGuard| guard.handle_end(now, request, end, || others(uses, now, number));
        if served.guard.as_mut().is_some_and(lost) {
            served.guard = None;
            served.coming = Some((now + LOADING, 0));
            self.outcome.lost_policies += 1;
        }
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
        Ask { model: served.first + served.current, size: 1, length: 0, level: 0, deadline }
    }

    fn arrived(&mut self, now: Time, request: RequestId, accepted: bool) -> Option<Time> {
        if !accepted && let Some(open) = self.open.remove(&request) {
            self.over(open.model, open.candidate);
            self.tell_end(now, request, open.model, GuardEnd::Dropped);
        }
        None
    }

    fn ended(&mut self, now: Time, request: RequestId, ending: Ending) {
        let Some(open) = self.open.remove(&request) else { return };
        let Open { model, arrival, deadline, .. } = open;
        self.over(model, open.candidate);
        let end = if ending == Ending::Replied { GuardEnd::Answered } else { GuardEnd::Dropped };
        self.tell_end(now, request, model, end);
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
