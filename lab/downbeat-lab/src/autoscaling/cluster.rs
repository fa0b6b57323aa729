//! A cluster whose devices come and go as an autoscaler says.

use std::collections::HashMap;

use downbeat_core::cluster::{Autoscale, AutoscaleOptions, AutoscaleSample, BadAutoscaleOptions, ModelOptions};
use downbeat_core::cluster::{Reject, Request, Scheduler};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};
use downbeat_sim::{ClusterScheduler, Decision, random};
use rand::RngExt;

use super::hpa::{Hpa, HpaOptions};

const SECOND: Duration = Duration::from_millis(1_000);

/// The parts of the loop from the scheduler's counters to new pods.
#[derive(Clone, PartialEq, Debug)]
pub struct LoopOptions {
    /// The scheduler's advisor.
    pub advisor: AutoscaleOptions,
    /// Kubernetes' autoscaler.
    pub hpa: HpaOptions,
    /// Seconds between two scrapes of the scheduler by Prometheus, and between two evaluations of its
    /// rules. Default: 15.
    pub scrape_s: u64,
    /// Seconds between two looks of the autoscaler. Default: 15
    /// (`--horizontal-pod-autoscaler-sync-period`).
    pub sync_s: u64,
    /// Seconds from the decision for a pod until its device serves. Default: 20.
    pub start_s: u64,
}

impl Default for LoopOptions {
    fn default() -> Self {
        LoopOptions {
            advisor: AutoscaleOptions::default(),
            hpa: HpaOptions::default(),
            scrape_s: 15,
            sync_s: 15,
            start_s: 20,
        }
    }
}

/// A pod with one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pod {
    /// There is none.
    Absent,
    /// The device serves from this second on.
    Starting(u64),
    /// The device serves, under this name of the scheduler's.
    Serving(DeviceId),
}

/// A second of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Second {
    /// Requests that finished by their deadline.
    pub good: u64,
    /// Requests that were rejected, dropped or late.
    pub bad: u64,
    /// Devices that serve at its end.
    pub devices: u32,
    /// Pods at its end: devices that serve, and those on their way.
    pub pods: u32,
    /// The devices that the advisor wants; 0: unknown.
    pub wanted: u32,
}

/// The running batch of a device.
#[derive(Debug)]
struct Running {
    start: Time,
    /// The part of its time that was needed.
    needed: f64,
    members: Vec<RequestId>,
}

/// Downbeat's scheduler, its advisor, Prometheus and the autoscaler. The simulation's devices are
/// places for pods.
#[derive(Debug)]
pub struct ScaledCluster {
    scheduler: Scheduler,
    advisor: Autoscale,
    hpa: Hpa,
    options: LoopOptions,
    /// The number of pods at the start.
    at_start: u32,
    /// By place.
    pods: Vec<Pod>,
    running: Vec<Option<Running>>,
    /// By the scheduler's name of a device: its place.
    places: Vec<usize>,
    deadlines: HashMap<RequestId, Time>,
    sample: AutoscaleSample,
    /// When the three periodic parts begin: scrape, rule, autoscaler. They do not know of each other.
    phases: [u64; 3],
    /// The metric as scraped last, and as the rule has it: see [`published`].
    scraped: Option<f64>,
    ruled: Option<f64>,
    /// The next second, and the one after the last.
    next: u64,
    end: u64,
    seconds: Vec<Second>,
}

/// The number of pods that deploy/helm asks for, by the number of devices now and
/// the number that the advisor wants.
///
/// Kubernetes leaves the number of pods alone while the two differ by at most a tenth. If more
/// devices are wanted, the rule therefore asks for more than a tenth more.
pub fn published(devices: u32, wanted: u32) -> f64 {
    let least = (f64::from(devices) * 1.1 + 1e-9).floor() + 1.0;
    if wanted > devices { f64::from(wanted).max(least) } else { f64::from(wanted) }
}

impl ScaledCluster {
    /// A cluster with so many pods at the start, all of which serve. It scales for `span`.
    ///
    /// # Errors
    /// If the advisor's options contradict themselves.
    pub fn new(options: LoopOptions, at_start: u32, span: Duration, seed: u64) -> Result<Self, BadAutoscaleOptions> {
        let mut rng = random(seed, u64::MAX - 1);
        let mut phase = |period: u64| rng.random_range(0..period.max(1));
        Ok(ScaledCluster {
            scheduler: Scheduler::new(),
            advisor: Autoscale::new(options.advisor.clone())?,
            hpa: Hpa::new(options.hpa.clone()),
            phases: [phase(options.scrape_s), phase(options.scrape_s), phase(options.sync_s)],
            options,
            at_start,
            pods: Vec::new(),
            running: Vec::new(),
            places: Vec::new(),
            deadlines: HashMap::new(),
            sample: AutoscaleSample::default(),
            scraped: None,
            ruled: None,
            next: 1,
            // The load may end within a second.
            end: (span.as_secs_f64().ceil() as u64) + 1,
            seconds: vec![Second::default()],
        })
    }

    /// What happened, second by second.
    pub fn seconds(&self) -> &[Second] {
        &self.seconds
    }

    fn serving(&self) -> u32 {
        self.pods.iter().filter(|pod| matches!(pod, Pod::Serving(_))).count() as u32
    }

    fn pods(&self) -> u32 {
        self.pods.iter().filter(|pod| **pod != Pod::Absent).count() as u32
    }

    /// A device begins to serve.
    fn begin(&mut self, now: Time, place: usize) {
        let device = self.scheduler.add_device(now, DeviceKind(0));
        debug_assert_eq!(device.0 as usize, self.places.len(), "names are given out in order");
        self.places.push(place);
        self.pods[place] = Pod::Serving(device);
    }

    /// The end of a second: pods get ready, the advisor looks, and each part of the loop has its turn.
    fn tick(&mut self, now: Time) {
        let second = self.next;
        self.next += 1;
        for place in 0..self.pods.len() {
            if self.pods[place] == Pod::Starting(second) {
                self.begin(now, place);
            }
        }
        self.sample.devices = self.serving();
        // Time and counts only grow, so that no sample is refused.
        let _ = self.advisor.handle_sample(now, self.sample);
        let its_turn = |phase: u64, period: u64| second % period.max(1) == phase;
        let [scrape, rule, sync] = self.phases;
        if its_turn(scrape, self.options.scrape_s) {
            self.scraped = self.advisor.wanted().map(|wanted| published(self.sample.devices, wanted));
        }
        if its_turn(rule, self.options.scrape_s) {
            self.ruled = self.scraped;
        }
        if its_turn(sync, self.options.sync_s) {
            let next = self.hpa.sync(now, self.pods(), self.ruled);
            self.scale(now, second, next);
        }
        let (devices, pods, wanted) = (self.serving(), self.pods(), self.advisor.wanted().unwrap_or(0));
        if let Some(last) = self.seconds.last_mut() {
            (last.devices, last.pods, last.wanted) = (devices, pods, wanted);
        }
        self.seconds.push(Second::default());
    }

    /// Starts or ends pods until there are so many.
    fn scale(&mut self, now: Time, second: u64, pods: u32) {
        for _ in self.pods()..pods {
            // A pod that drains keeps its place until its batch is done.
            let free = (0..self.pods.len()).find(|at| self.pods[*at] == Pod::Absent && self.running[*at].is_none());
            let Some(place) = free else { return };
            self.pods[place] = Pod::Starting(second + self.options.start_s.max(1));
        }
        for _ in pods..self.pods() {
            // Kubernetes ends pods first that are not ready, and then those that are ready for the
            // shortest time.
            let age = |pod: &Pod| match pod {
                Pod::Absent => None,
                Pod::Starting(at) => Some((1, *at)),
                Pod::Serving(device) => Some((0, u64::from(device.0))),
            };
            let youngest = (0..self.pods.len()).max_by_key(|at| age(&self.pods[*at]));
            let Some(place) = youngest else { return };
            if let Pod::Serving(device) = self.pods[place] {
                self.scheduler.remove_device(now, device);
            }
            self.pods[place] = Pod::Absent;
        }
    }

    fn ended(&mut self, request: RequestId, at: Option<Time>) {
        let Some(deadline) = self.deadlines.remove(&request) else { return };
        let is_good = at.is_some_and(|at| at <= deadline);
        let count = |good: &mut u64, bad: &mut u64| if is_good { *good += 1 } else { *bad += 1 };
        count(&mut self.sample.good, &mut self.sample.bad);
        if let Some(last) = self.seconds.last_mut() {
            count(&mut last.good, &mut last.bad);
        }
    }
}

impl ClusterScheduler for &mut ScaledCluster {
    fn add_model(&mut self, now: Time, options: ModelOptions, _slo: Duration, _rate: f64) -> ModelId {
        self.scheduler.add_model(now, options)
    }

    /// A place for a pod.
    fn add_device(&mut self, now: Time, _kind: DeviceKind) -> DeviceId {
        let place = self.pods.len();
        self.pods.push(Pod::Absent);
        self.running.push(None);
        if (place as u32) < self.at_start {
            self.begin(now, place);
        }
        DeviceId(place as u32)
    }

    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject> {
        self.deadlines.insert(request.id, request.deadline);
        let taken = self.scheduler.handle_request(now, request).map(drop);
        if taken.is_err() {
            self.ended(request.id, None);
        }
        taken
    }

    fn handle_completion(&mut self, now: Time, place: DeviceId, batch: BatchId) {
        let at = place.0 as usize;
        let Some(run) = self.running.get_mut(at).and_then(Option::take) else { return };
        self.sample.busy += Duration::from_secs_f64(now.since(run.start).as_secs_f64() * run.needed);
        run.members.iter().for_each(|request| self.ended(*request, Some(now)));
        // The batch of a pod that has ended is drained: the scheduler no longer waits for it.
        if let Some(Pod::Serving(device)) = self.pods.get(at) {
            self.scheduler.handle_completion(now, *device, batch);
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        if self.next < self.end && now >= Time::ZERO + SECOND.saturating_mul(self.next) {
            self.tick(now);
        }
        self.scheduler.handle_timeout(now);
    }

    fn poll_decision(&mut self) -> Option<Decision> {
        let decision = self.scheduler.poll_output().map(Decision::from)?;
        Some(match decision {
            Decision::Dispatch { batch, device, model, members, size, start, expected } => {
                let place = self.places[device.0 as usize];
                let needed = self.scheduler.item_cost(model).map_or(1.0, |cost| cost.needed_part(size, expected));
                self.running[place] = Some(Running { start, needed, members: members.clone() });
                Decision::Dispatch { batch, device: DeviceId(place as u32), model, members, size, start, expected }
            }
            Decision::Drop { request, .. } => {
                self.ended(request, None);
                decision
            }
            Decision::Preempt { .. } => decision,
        })
    }

    fn poll_timeout(&self) -> Option<Time> {
        let tick = (self.next < self.end).then(|| Time::ZERO + SECOND.saturating_mul(self.next));
        let timer = self.scheduler.poll_timeout().map(|(at, _)| at);
        tick.into_iter().chain(timer).min()
    }

    fn recycle(&mut self, members: Vec<RequestId>) {
        self.scheduler.recycle(members);
    }
}
