//! Nexus: a plan for each epoch that gives each device its models and batch sizes; frontends that
//! route by the plan; early drop.

use downbeat_core::cluster::{DropReason, ModelOptions, Reject, Request};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};

use super::backlog::{Backlog, Profile, Waiting};
use super::fleet::Fleet;
use downbeat_sim::{ClusterScheduler, Decision};

/// The options of Nexus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NexusOptions {
    /// Time between two plans.
    pub epoch: Duration,
    /// Frontends that route requests, each on its own. Symphony §5.1 measures 1 and 8.
    pub frontends: u32,
}

impl Default for NexusOptions {
    fn default() -> Self {
        NexusOptions { epoch: Duration::from_millis(10_000), frontends: 1 }
    }
}

/// Nexus (Shen et al., SOSP '19; Symphony §2.2).
///
/// | rule | source |
/// |---|---|
/// | a plan every 10 s, from the rates of the last epoch | SOSP '19 §5; Symphony §2.2 |
/// | *saturated* devices: a model at `B = max b: 2 * l(b) <= SLO` gets `floor(rate * l(B) / B)` devices of its own | SOSP '19 §6.1, *squishy bin packing* |
/// | *residual* load `r`: a batch of `max b: l(b) + b/r <= SLO` every duty cycle of `b/r` | SOSP '19 §6.1 |
/// | two residuals share a device if, in the shorter of their duty cycles `d`, the batches `ceil(r * d)` fit one after another; by descending occupancy, each to where it leaves the least room (best fit) | SOSP '19 §6.1 |
/// | a frontend sends a request to one of the devices of its model, in proportion to their shares; frontends know nothing of each other | SOSP '19 §5; Symphony §2.2 |
/// | a device runs its models in turn, at most the planned batch; fewer if fewer wait; it never waits | SOSP '19 §6.3; Symphony §2.2 |
/// | early drop: the batch starts at the first request whose deadline leaves time for a batch of the planned size (or of what is left of the queue); those before it are dropped | SOSP '19 §4.3, §6.3 |
///
/// Left open, and decided in favour of Nexus:
/// - *A cluster of a given size*: the plan is for the largest multiple of all rates that the
///   devices can hold, above or below one. So no device is left without work, and room for bursts
///   is spread evenly. The original takes as many devices as the rates ask for.
/// - *More models than can be packed at any multiple*: the remaining models share the least
///   occupied devices, beyond the duty cycle.
/// - *The first plan*: from the declared rates, as if an epoch had been seen.
/// - *Requests that wait when the plan changes*: the new plan routes them again. Loading a model
///   takes no time.
/// - *What a frontend does*: smooth weighted round robin, the most even kind, from a device of its
///   own to begin with. A request's frontend is random (its number mixed); with one frontend, the
///   routing is deterministic.
/// - *An SLO below `2 * l(1)`*: `B = 1`. *A rate so low that no batch gathers*: a batch of one in a
///   duty cycle of `SLO - l(1)`. *A residual load beyond the capacity of its batches*: a device of
///   its own, with `B`.
#[derive(Debug)]
pub struct Nexus {
    options: NexusOptions,
    models: Vec<RoutedModel>,
    /// The backend of each device.
    backends: Vec<Backend>,
    fleet: Fleet,
    /// The time of the plan; `None`: a plan is due at once.
    planned_at: Option<Time>,
}

#[derive(Debug)]
struct RoutedModel {
    profile: Profile,
    slo: Duration,
    /// Requests per second that the plan is for.
    rate: f64,
    /// Arrivals since the plan.
    arrivals: u64,
    routes: Vec<Route>,
    /// By frontend, by route: the credit of the round robin.
    credits: Vec<Vec<f64>>,
}

/// A route from a frontend to a device.
#[derive(Clone, Copy, Debug)]
struct Route {
    device: u32,
    /// The index in [`Backend::sessions`].
    session: usize,
    /// Requests per second.
    share: f64,
}

#[derive(Debug, Default)]
struct Backend {
    sessions: Vec<Session>,
    /// The session that is next.
    turn: usize,
}

/// A model on a device.
#[derive(Debug)]
struct Session {
    model: u32,
    planned: u32,
    backlog: Backlog,
}

/// One device of a plan.
#[derive(Clone, PartialEq, Debug, Default)]
struct Node {
    parts: Vec<Part>,
    /// The duty cycle in seconds; for saturated nodes `l(B)`.
    duty: f64,
    /// The share of the duty cycle in which the device is busy.
    occupancy: f64,
}

/// A model's part of a node.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Part {
    model: u32,
    batch: u32,
    /// Requests per second.
    rate: f64,
}

impl Nexus {
    /// Makes a scheduler without models and devices.
    pub fn new(options: NexusOptions) -> Self {
        Nexus { options, models: Vec::new(), backends: Vec::new(), fleet: Fleet::default(), planned_at: None }
    }

    /// Makes the plan if it is time.
    fn plan(&mut self, now: Time) {
        match self.planned_at {
            Some(at) if now < at + self.options.epoch => return,
            Some(at) => {
                for model in &mut self.models {
                    // At least one, so that a model without requests still has a device.
                    model.rate = model.arrivals.max(1) as f64 / now.since(at).as_secs_f64();
                }
            }
            None => {}
        }
        self.planned_at = Some(now);
        let mut moved = Vec::new();
        for backend in &mut self.backends {
            for session in &mut backend.sessions {
                while let Some(waiting) = session.backlog.pop() {
                    moved.push((waiting, session.model));
                }
            }
            *backend = Backend::default();
        }
        for model in &mut self.models {
            model.arrivals = 0;
            model.routes.clear();
        }
        for (node, device) in pack_on(&self.models, self.backends.len()).iter().zip(0..) {
            for part in &node.parts {
                let sessions = &mut self.backends[device as usize].sessions;
                let share = part.rate.max(f64::MIN_POSITIVE);
                self.models[part.model as usize].routes.push(Route { device, session: sessions.len(), share });
                sessions.push(Session { model: part.model, planned: part.batch, backlog: Backlog::default() });
            }
        }
        for model in &mut self.models {
            let (routes, frontends) = (model.routes.len(), self.options.frontends.max(1) as usize);
            model.credits = vec![vec![0.0; routes]; frontends];
            for (credits, frontend) in model.credits.iter_mut().zip(0..) {
                // Frontends that began at the same device would stay in step.
                if frontend > 0 && routes > 0 {
                    credits[frontend % routes] += model.routes[frontend % routes].share;
                }
            }
        }
        moved.sort_unstable();
        for (waiting, model) in moved {
            self.route(now, model, waiting);
        }
    }

    /// Sends a request to a device.
    fn route(&mut self, now: Time, index: u32, request: Waiting) {
        let model = &mut self.models[index as usize];
        let frontend = (mix(request.id.0) % model.credits.len() as u64) as usize;
        let credits = &mut model.credits[frontend];
        let (mut best, mut total) = (0, 0.0);
        for (at, route) in model.routes.iter().enumerate() {
            credits[at] += route.share;
            total += route.share;
            if credits[at] > credits[best] {
                best = at;
            }
        }
        credits[best] -= total;
        let Route { device, session, .. } = model.routes[best];
        self.backends[device as usize].sessions[session].backlog.push(request);
        self.execute(now, DeviceId(device));
    }

    /// Runs the next batch of a device, if it is free.
    fn execute(&mut self, now: Time, device: DeviceId) {
        let Backend { sessions, turn } = &mut self.backends[device.0 as usize];
        if !self.fleet.is_free(device) {
            return;
        }
        let count = sessions.len();
        for _ in 0..count {
            let Session { model, planned, backlog } = &mut sessions[*turn];
            *turn = (*turn + 1) % count;
            let profile = &self.models[*model as usize].profile;
            while let Some(head) = backlog.head() {
                let size = (*planned).min(backlog.len() as u32);
                if now + profile.latency.latency(size) <= head.deadline {
                    let members = backlog.take(0, size).map(|member| member.id);
                    self.fleet.dispatch(now, device, ModelId(*model), members, profile.latency.latency(size));
                    return;
                }
                let hopeless = now + profile.latency.latency(1) > head.deadline;
                let reason = if hopeless { DropReason::Hopeless } else { DropReason::Sacrificed };
                backlog.pop();
                self.fleet.drop(head.id, ModelId(*model), reason);
            }
        }
    }
}

/// Makes the plan for `devices` devices, for the largest multiple of the rates that they hold.
fn pack_on(models: &[RoutedModel], devices: usize) -> Vec<Node> {
    if models.is_empty() || devices == 0 {
        return Vec::new();
    }
    let saturated: f64 = models.iter().map(|model| model.rate / model.saturated().1).sum();
    let (mut low, mut high) = (0.0, (devices as f64 + 1.0) / saturated);
    let mut best = None;
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        let nodes = pack(models, middle);
        if nodes.len() <= devices {
            (low, best) = (middle, Some(nodes));
        } else {
            high = middle;
        }
    }
    let mut nodes = best.unwrap_or_else(|| pack(models, low));
    let spare = nodes.split_off(devices.min(nodes.len()));
    for part in spare.into_iter().flat_map(|node| node.parts) {
        let Some(node) = nodes.iter_mut().min_by(|a, b| a.occupancy.total_cmp(&b.occupancy)) else { break };
        node.occupancy += models[part.model as usize].seconds(part.batch) / node.duty.max(f64::MIN_POSITIVE);
        node.parts.push(part);
    }
    nodes
}

/// Squishy bin packing (SOSP '19 §6.1, algorithm 1) of `factor` times the rates.
fn pack(models: &[RoutedModel], factor: f64) -> Vec<Node> {
    let mut nodes = Vec::new();
    let mut residuals = Vec::new();
    for (model, index) in models.iter().zip(0..) {
        let rate = model.rate * factor;
        let (batch, throughput) = model.saturated();
        let whole = (rate / throughput).floor();
        for _ in 0..whole as usize {
            let parts = vec![Part { model: index, batch, rate: throughput }];
            nodes.push(Node { parts, duty: model.seconds(batch), occupancy: 1.0 });
        }
        let residual = rate - whole * throughput;
        if residual > 0.0 || whole == 0.0 {
            residuals.push(model.residual(index, residual));
        }
    }
    residuals.sort_by(|a, b| b.occupancy.total_cmp(&a.occupancy));
    let first = nodes.len();
    for residual in residuals {
        let merged =
            nodes[first..].iter().enumerate().filter_map(|(at, node)| Some((at, merge(models, node, &residual)?)));
        match merged.max_by(|(_, a), (_, b)| a.occupancy.total_cmp(&b.occupancy)) {
            Some((at, node)) => nodes[first + at] = node,
            None => nodes.push(residual),
        }
    }
    nodes
}

/// Merges two nodes into one, if their batches fit into the shorter duty cycle.
fn merge(models: &[RoutedModel], a: &Node, b: &Node) -> Option<Node> {
    let duty = a.duty.min(b.duty);
    let mut busy = 0.0;
    let parts = a.parts.iter().chain(&b.parts).map(|part| {
        // Rounding may leave a whole number slightly off.
        let batch =
            ((part.rate * duty - 1e-9).ceil().max(1.0) as u32).min(models[part.model as usize].profile.max_batch);
        busy += models[part.model as usize].seconds(batch);
        Part { batch, ..*part }
    });
    let parts = parts.collect();
    (busy <= duty).then(|| Node { parts, duty, occupancy: busy / duty })
}

impl RoutedModel {
    fn seconds(&self, batch: u32) -> f64 {
        self.profile.latency.latency(batch).as_secs_f64()
    }

    /// Returns the batch size of a saturated device, and its requests per second.
    fn saturated(&self) -> (u32, f64) {
        let batch = self.profile.largest_within(Duration::from_nanos(self.slo.as_nanos() / 2)).max(1);
        (batch, f64::from(batch) / self.seconds(batch))
    }

    /// Returns a node for `rate` requests per second alone.
    fn residual(&self, model: u32, rate: f64) -> Node {
        let slo = self.slo.as_secs_f64();
        let fits = |batch: &u32| self.seconds(*batch) + f64::from(*batch) / rate <= slo;
        let batch = (1..=self.profile.max_batch).take_while(fits).last().unwrap_or(1);
        let duty = (f64::from(batch) / rate).min(slo - self.seconds(batch));
        if self.seconds(batch) > duty {
            // The batch that gathers in time is too small for the rate, or the SLO is short.
            let (batch, _) = self.saturated();
            return Node { parts: vec![Part { model, batch, rate }], duty: self.seconds(batch), occupancy: 1.0 };
        }
        Node { parts: vec![Part { model, batch, rate }], duty, occupancy: self.seconds(batch) / duty }
    }
}

/// SplitMix64's finaliser: every bit of the result depends on every bit of the input.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl ClusterScheduler for Nexus {
    fn add_model(&mut self, _now: Time, options: ModelOptions, slo: Duration, rate: f64) -> ModelId {
        let profile = Profile::new(&options);
        let rate = if rate.is_finite() { rate.max(1e-3) } else { 1e-3 };
        self.models.push(RoutedModel { profile, slo, rate, arrivals: 0, routes: Vec::new(), credits: Vec::new() });
        self.planned_at = None;
        ModelId(self.models.len() as u32 - 1)
    }

    fn add_device(&mut self, _now: Time, _kind: DeviceKind) -> DeviceId {
        self.backends.push(Backend::default());
        self.planned_at = None;
        self.fleet.add()
    }

    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject> {
        let model = self.models.get_mut(request.model.0 as usize).ok_or(Reject::UnknownModel)?;
        model.arrivals += 1;
        model.profile.admit(now, now, &request)?;
        if self.backends.is_empty() {
            return Err(Reject::QueueFull { bound: 0 });
        }
        self.plan(now);
        self.route(now, request.model.0, Waiting { deadline: request.deadline, id: request.id });
        Ok(())
    }

    fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        if self.fleet.completed(device, batch) {
            self.execute(now, device);
        }
    }

    fn handle_timeout(&mut self, _now: Time) {}

    fn poll_decision(&mut self) -> Option<Decision> {
        self.fleet.poll_decision()
    }

    fn poll_timeout(&self) -> Option<Time> {
        // Plans are made when a request comes: without requests, a plan has no effect.
        None
    }

    fn recycle(&mut self, members: Vec<RequestId>) {
        self.fleet.recycle(members);
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::LatencyProfile;
    use downbeat_core::cluster::{DispatchPolicy, DropPolicy};

    use super::*;

    /// A model with latencies at batch sizes 4, 8 and 16.
    fn model(latencies: [u64; 3], slo: u64, rate: f64) -> RoutedModel {
        let points = [4, 8, 16].into_iter().zip(latencies.map(Duration::from_millis)).collect::<Vec<_>>();
        let options = ModelOptions::new(
            LatencyProfile::from_points(&points).unwrap(),
            DispatchPolicy::Eager,
            DropPolicy::HeadDrop,
        );
        let (profile, slo) = (Profile::new(&options), Duration::from_millis(slo));
        RoutedModel { profile, slo, rate, arrivals: 0, routes: Vec::new(), credits: Vec::new() }
    }

    /// By node: model and batch.
    fn batches(nodes: &[Node]) -> Vec<Vec<(u32, u32)>> {
        nodes.iter().map(|node| node.parts.iter().map(|part| (part.model, part.batch)).collect()).collect()
    }

    /// The example of SOSP '19 §4.1. Model A alone gathers a batch of 8 in 125 ms, and takes 75 of
    /// the 200 ms SLO. In that cycle B's 32 r/s are a batch of 4, which takes 50 ms: exactly the
    /// rest. C's batch would take 60 ms, so C gets a device of its own, with a batch of 5 in 156
    /// ms.
    #[test]
    fn two_residuals_share_a_duty_cycle_and_the_third_does_not_fit() {
        let models =
            [model([50, 75, 100], 200, 64.0), model([50, 90, 125], 250, 32.0), model([60, 95, 125], 250, 32.0)];
        let nodes = pack(&models, 1.0);
        assert_eq!(batches(&nodes), [vec![(0, 8), (1, 4)], vec![(2, 5)]]);
        assert_eq!((nodes[0].duty, nodes[0].occupancy), (0.125, 1.0));
        assert_eq!(pack_on(&models, 2).len(), 2);
        assert_eq!(batches(&pack_on(&models, 1)).len(), 1, "at lower rates all share one device");
    }

    /// `2 * l(16) = 200` means 160 r/s a device. Of 400 r/s, two devices are filled. A batch of 8
    /// of the remaining 80 r/s gathers in 100 ms.
    #[test]
    fn whole_devices_are_saturated_and_the_rest_is_residual() {
        let models = [model([50, 75, 100], 200, 400.0)];
        let nodes = pack(&models, 1.0);
        assert_eq!(batches(&nodes), [[(0, 16)], [(0, 16)], [(0, 9)]]);
        assert_eq!(nodes[0].parts[0].rate, 160.0);
        assert!((nodes[2].parts[0].rate - 80.0).abs() < 1e-9);
        assert_eq!(batches(&pack_on(&models, 3)), [[(0, 16)], [(0, 16)], [(0, 16)]], "three devices hold 480 r/s");
    }

    #[test]
    fn a_cluster_too_small_for_its_models_is_shared() {
        let models: Vec<RoutedModel> = (0..9).map(|_| model([50, 75, 100], 110, 10.0)).collect();
        let nodes = pack_on(&models, 2);
        assert_eq!(nodes.iter().map(|node| node.parts.len()).sum::<usize>(), 9);
        assert_eq!(nodes.len(), 2);
    }
}
