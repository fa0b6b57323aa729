//! What a model's batches take on each kind of device.

use super::messages::Candidate;
use super::network::NetworkBudget;
use crate::device_profiles::DeviceProfiles;
use crate::ids::DeviceKind;
use crate::probes::Doubt;
use crate::profile::LatencyProfile;
use crate::time::Duration;

/// What is planned for one kind of device, or for all kinds if they are the same to the model.
#[derive(Debug)]
pub(super) struct KindPlan {
    /// `None`: all kinds.
    kind: Option<DeviceKind>,
    /// What was measured, or is known: what a batch will probably take.
    pub measured: LatencyProfile,
    /// `l(b)`: from the start of a batch, with the margin that it is planned with.
    pub profile: LatencyProfile,
    /// `l(b) + delay(b)`: from the decision to send it.
    pub sent: LatencyProfile,
    /// Whether the cluster has a device for it, or for none of the plans.
    pub in_use: bool,
    /// What messages to and from its devices take.
    pub network: NetworkBudget,
    /// `l(max_batch)`.
    pub pace: Duration,
    pub devices: u32,
    /// The batch size that drops aim at.
    pub target: u32,
    /// The largest batch.
    pub limit: u32,
    pub candidate: Option<Candidate>,
}

/// The plans of one model: one for each kind that it has a profile for.
#[derive(Debug)]
#[repr(C)]
pub(super) struct KindPlans {
    /// [`KindPlans::needed`] for one item, which nearly every request is.
    pub needed_alone: Duration,
    /// What messages take where `networks` says nothing: its worst, if it says anything.
    pub network: NetworkBudget,
    /// In order of kinds, at least one.
    pub plans: Vec<KindPlan>,
    /// The plan in use with the least `l(max_batch)`: it alone sacrifices requests.
    pub fastest: usize,
    pub max_batch: u32,
    networks: Vec<(DeviceKind, NetworkBudget)>,
    /// By how much executions are planned longer than measured, percent.
    margin: u8,
    /// By kind: devices of the cluster.
    devices: Vec<u32>,
}

impl KindPlans {
    /// For a cluster without devices and without a network.
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

    /// The plan that a kind of device takes its batches from.
    pub fn of(&self, kind: DeviceKind) -> Option<usize> {
        self.plans.iter().position(|plan| plan.kind.is_none_or(|k| k == kind))
    }

    /// Devices of the cluster, of all kinds.
    pub fn devices(&self) -> u32 {
        self.devices.iter().fold(0u32, |all, devices| all.saturating_add(*devices))
    }

    /// The least time from the decision to send a request alone until it is done.
    pub fn needed(&self, size: u32) -> Duration {
        if size == 1 { self.needed_alone } else { self.look_up_needed(size) }
    }

    fn look_up_needed(&self, size: u32) -> Duration {
        let in_use = self.plans.iter().filter(|plan| plan.in_use);
        in_use.map(|plan| plan.sent.latency(size)).min().unwrap_or(Duration::MAX)
    }

    /// Why it may be wrong that a request alone needs longer than `allowed`; `None`: it is certain.
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
            // The candidate stays until the next update, which looks whether it has expired.
            let candidate = former.iter().find(|plan| plan.kind == kind).and_then(|plan| plan.candidate);
            let pace = profile.latency(self.max_batch);
            let [measured, planned, sent] = [profile.clone(), profile.clone(), profile.clone()];
            let (devices, target, limit) = (0, 1, self.max_batch);
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
                candidate,
            }
        }));
        self.plan();
    }

    /// Executions are planned to take so many percent more than was measured.
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

    /// Whether other plans are in use than before.
    pub fn set_devices(&mut self, kind: DeviceKind, devices: u32) -> bool {
        let kind = kind.0 as usize;
        if self.devices.len() <= kind {
            self.devices.resize(kind + 1, 0);
        }
        self.devices[kind] = devices;
        self.changed()
    }

    /// Works out which plans are in use and which is the fastest; whether others are in use than before.
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
