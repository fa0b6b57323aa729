//! How long a model's batches take on each kind of device.

use super::messages::Candidate;
use super::network::NetworkBudget;
use crate::device_profiles::DeviceProfiles;
use crate::ids::DeviceKind;
use crate::probes::Doubt;
use crate::profile::LatencyProfile;
use crate::time::Duration;

/// The plan for one kind of device, or for all kinds if the model has one profile for all.
#[derive(Debug)]
pub(super) struct KindPlan {
    /// `None`: all kinds.
    kind: Option<DeviceKind>,
    /// The expected time of a batch, measured or known.
    pub measured: LatencyProfile,
    /// `l(b)`, from the start of a batch, with the planning margin.
    pub profile: LatencyProfile,
    /// `l(b) + delay(b)`, from the decision to send the batch.
    pub sent: LatencyProfile,
    /// Whether the cluster has a device for this plan, or no device for any plan.
    pub in_use: bool,
    /// The time of messages to and from the plan's devices.
    pub network: NetworkBudget,
    /// `l(max_batch)` without the margin.
    pub pace: Duration,
    pub devices: u32,
    /// The batch size that drops aim at.
    pub target: u32,
    /// The largest batch.
    pub limit: u32,
    /// The size from which a batch leaves early ([`super::DispatchPolicy::EarlyLeave`]).
    pub enough: u32,
    pub candidate: Option<Candidate>,
}

/// The plans of one model: one for each kind that has a profile.
#[derive(Debug)]
#[repr(C)]
pub(super) struct KindPlans {
    /// [`KindPlans::needed`] for one item, which nearly every request is.
    pub needed_alone: Duration,
    /// The network budget of kinds that `networks` does not name: the worst in `networks`, if it
    /// names any.
    pub network: NetworkBudget,
    /// In order of kinds, at least one.
    pub plans: Vec<KindPlan>,
    /// The plan in use with the least `l(max_batch)`. Only this plan sacrifices requests.
    pub fastest: usize,
    pub max_batch: u32,
    networks: Vec<(DeviceKind, NetworkBudget)>,
    /// How much longer than measured executions are planned, percent.
    margin: u8,
    /// By kind: the number of the cluster's devices.
    devices: Vec<u32>,
}

impl KindPlans {
    /// Plans for a cluster without devices and without a network.
    pub fn new(profiles: &DeviceProfiles, max_batch: u32) -> Self {
        let (network, needed_alone) = (NetworkBudget::default(), Duration::ZERO);
        let mut kinds = KindPlans {
            plans: Vec::new(),
            fastest: 0,
            needed_alone,
            max_batch,
            network,
            networks: Vec::new(),
            margin: 0,
            devices: Vec::new(),
        };
        kinds.set_profiles(profiles);
        kinds
    }

    /// The plan for the fastest kind.
    pub fn fastest(&self) -> &KindPlan {
        &self.plans[self.fastest]
    }

    /// The plan that gives a kind of device its batches.
    pub fn of(&self, kind: DeviceKind) -> Option<usize> {
        self.plans.iter().position(|plan| plan.kind.is_none_or(|k| k == kind))
    }

    /// Devices of the cluster, of all kinds.
    pub fn devices(&self) -> u32 {
        self.devices.iter().fold(0u32, |all, devices| all.saturating_add(*devices))
    }

    /// The least time from the decision to send a request alone until the request is done.
    pub fn needed(&self, size: u32) -> Duration {
        if size == 1 { self.needed_alone } else { self.look_up_needed(size) }
    }

    fn look_up_needed(&self, size: u32) -> Duration {
        let in_use = self.plans.iter().filter(|plan| plan.in_use);
        in_use.map(|plan| plan.sent.latency(size)).min().unwrap_or(Duration::MAX)
    }

    /// Why "a request alone needs longer than `allowed`" may be wrong; `None`: it is certain.
    #[cold]
    pub fn doubt(&self, size: u32, allowed: Duration) -> Option<Doubt> {
        let in_use = self.plans.iter().filter(|plan| plan.in_use);
        let doubts = in_use.filter_map(|plan| plan.sent.doubt(size, allowed));
        doubts.reduce(|one, other| if one == Doubt::Guess { one } else { other })
    }

    pub fn clear_candidates(&mut self) {
        for plan in &mut self.plans {
            plan.candidate = None;
        }
    }

    pub fn set_profiles(&mut self, profiles: &DeviceProfiles) {
        let former = std::mem::take(&mut self.plans);
        self.plans.extend(profiles.iter().map(|(kind, profile)| {
            // The candidate stays until the next update, which checks whether it has expired.
            let candidate = former.iter().find(|plan| plan.kind == kind).and_then(|plan| plan.candidate);
            let pace = profile.latency(self.max_batch);
            let [measured, planned, sent] = [profile.clone(), profile.clone(), profile.clone()];
            let (devices, target, limit, enough) = (0, 1, self.max_batch, u32::MAX);
            let (in_use, network) = (true, self.network);
            KindPlan {
                kind,
                measured,
                profile: planned,
                sent,
                in_use,
                network,
                pace,
                devices,
                target,
                limit,
                enough,
                candidate,
            }
        }));
        self.plan();
    }

    /// Executions are planned to take this percentage longer than measured.
    pub fn set_margin(&mut self, percent: u8) {
        self.margin = percent;
        self.plan();
    }

    pub fn margin(&self) -> u8 {
        self.margin
    }

    pub fn set_network(&mut self, network: NetworkBudget) {
        (self.network, self.networks) = (network, Vec::new());
        self.plan();
    }

    pub fn set_networks(&mut self, networks: &[(DeviceKind, NetworkBudget)]) {
        let all = networks.iter().map(|(_, network)| *network);
        self.network = all.fold(NetworkBudget::default(), NetworkBudget::worse);
        self.networks = networks.to_vec();
        self.plan();
    }

    fn plan(&mut self) {
        for plan in &mut self.plans {
            plan.profile = plan.measured.with_margin(self.margin);
            let of_kind = self.networks.iter().find(|(kind, _)| plan.kind == Some(*kind));
            plan.network = of_kind.map_or(self.network, |(_, network)| *network);
            plan.sent = plan.profile.with_overhead(plan.network.control, plan.network.data);
        }
        self.changed();
    }

    /// Returns whether the plans in use have changed.
    pub fn set_devices(&mut self, kind: DeviceKind, devices: u32) -> bool {
        let kind = kind.0 as usize;
        if self.devices.len() <= kind {
            self.devices.resize(kind + 1, 0);
        }
        self.devices[kind] = devices;
        self.changed()
    }

    /// Works out which plans are in use and which of them is the fastest. Returns whether the plans
    /// in use have changed.
    fn changed(&mut self) -> bool {
        let all = self.devices();
        for plan in &mut self.plans {
            plan.devices = match plan.kind {
                None => all,
                Some(kind) => self.devices.get(kind.0 as usize).copied().unwrap_or(0),
            };
        }
        let none = self.plans.iter().all(|plan| plan.devices == 0);
        let mut others = false;
        for plan in &mut self.plans {
            let in_use = none || plan.devices > 0;
            others |= std::mem::replace(&mut plan.in_use, in_use) != in_use;
        }
        let in_use = (0..self.plans.len()).filter(|plan| self.plans[*plan].in_use);
        self.fastest = in_use.min_by_key(|plan| self.plans[*plan].pace).unwrap_or(0);
        self.needed_alone = self.look_up_needed(1);
        others
    }
}
