//! A process's view of its cluster: `GET /v2/cluster`, and the metrics `downbeat_cluster_*`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_core::Duration;
use downbeat_core::cluster::NetworkBudget;
use downbeat_roles::{Epoch, Hello, Links, ModelBudget, NodeId, Role, SubCluster};
use downbeat_service::metric_table;
use downbeat_service::report::cluster_report::{
    BudgetStatus, ClusterReport, MemberStatus, PeerStatus, SubClusterReport,
};
use parking_lot::Mutex;

use crate::wire::peer_memory::Transport;

metric_table! {
    /// The metrics of a process about its cluster.
    struct Table {
        peers: IntGaugeVec["role"], "downbeat_cluster_peers", "Processes that this one is connected to, by role";
        epoch: IntGaugeVec[], "downbeat_cluster_epoch", "Number of the epoch that this process follows; 0: no scheduler has led yet";
        leads: IntGaugeVec[], "downbeat_cluster_leads", "1 while this scheduler leads";
        leaders: IntCounter[], "downbeat_cluster_leaders_total", "Changes of the leading scheduler that this process has seen";
        etcd: IntGaugeVec[], "downbeat_cluster_etcd_answers", "Whether etcd answered this process's last question; none: the process asks no etcd";
        missing: IntGaugeVec[], "downbeat_cluster_models_missing",
            "Models that backends of their sub-cluster do not have, yet or because they could not be loaded; counted by the scheduler that leads, and none elsewhere";
        handed_in: IntCounter[], "downbeat_cluster_handed_in_again_total", "Requests that were given to a scheduler that has begun to lead";
        late_answers: IntCounter[], "downbeat_cluster_late_answers_total", "Answers of backends that reached no client: the request had ended, or another backend had it";
        run_again: IntCounter[], "downbeat_cluster_run_again_total", "Requests that were given again because their backend was lost";
        round_trip: GaugeVec["role"], "downbeat_cluster_round_trip_seconds",
            "Round trip of a message to a process of a role, measured lately: a high percentile of the slowest process; 0: not known";
        budget: GaugeVec["model", "version", "part"], "downbeat_cluster_budget_seconds",
            "What the scheduler that leads plans with for messages of a model, of its slowest backend: control (a batch to it), data (fetching an item's inputs), reply";
        tensors: IntCounterVec["transport"], "downbeat_cluster_tensor_bytes_total", "Bytes of tensors sent to other processes: over TCP, in shared memory, or by UCX";
        lost: IntCounter[], "downbeat_cluster_peers_lost_total", "Losses of processes that this process was connected to";
    }
}

/// The status that a node's thread writes and other threads read.
#[derive(Clone)]
pub struct StatusBoard {
    status: Arc<Mutex<Known>>,
    /// Whether this process leads, or is connected to the scheduler that leads.
    is_led: Arc<AtomicBool>,
    table: Arc<Table>,
}

#[derive(Default)]
struct Known {
    status: ClusterReport,
    peers: BTreeMap<NodeId, PeerStatus>,
    /// By model and version: the budgets in the metrics.
    budgets: BTreeMap<(String, String), NetworkBudget>,
}

/// The name of a role.
pub fn role_name(role: Role) -> &'static str {
    match role {
        Role::Frontend => "frontend",
        Role::Scheduler { .. } => "scheduler",
        Role::Backend => "backend",
    }
}

/// A node's number in the form for people.
pub fn shown(node: NodeId) -> String {
    format!("{:016x}", node.0)
}

/// The parts of a budget by name.
fn parts(network: &NetworkBudget) -> [(&'static str, Duration); 3] {
    [("control", network.control), ("data", network.data), ("reply", network.reply)]
}

impl StatusBoard {
    /// The board of a process without peers. Its metrics join `registry`.
    ///
    /// # Errors
    /// If the registry has such metrics already: a defect.
    pub fn new(
        node: NodeId,
        name: &str,
        role: Role,
        registry: &prometheus::Registry,
    ) -> Result<Self, prometheus::Error> {
        let status =
            ClusterReport { node: shown(node), name: name.to_owned(), role: role_name(role), ..Default::default() };
        let table = Arc::new(Table::register(registry)?);
        let (status, is_led) = (Arc::new(Mutex::new(Known { status, ..Known::default() })), Arc::default());
        Ok(StatusBoard { status, is_led, table })
    }

    /// The present status.
    pub fn status(&self) -> ClusterReport {
        let known = self.status.lock();
        ClusterReport { peers: known.peers.values().cloned().collect(), ..known.status.clone() }
    }

    /// Whether this process leads, or is connected to the scheduler that leads.
    pub fn is_led(&self) -> bool {
        self.is_led.load(Ordering::Relaxed)
    }

    /// Records whether this process leads, or is connected to the scheduler that leads.
    pub fn led(&self, is_led: bool) {
        self.is_led.store(is_led, Ordering::Relaxed);
    }

    /// Records that a peer is connected.
    pub fn connected(&self, peer: &Hello) {
        let rank = match peer.role {
            Role::Scheduler { rank } => Some(rank),
            Role::Frontend | Role::Backend => None,
        };
        let (node, role) = (shown(peer.node), role_name(peer.role));
        tracing::info!(peer = %peer.name, role, %node, "connected");
        let status = PeerStatus {
            node,
            name: peer.name.clone(),
            role,
            rank,
            address: peer.address.clone(),
            transport: "tcp",
            round_trip_us: None,
            one_way_us: None,
        };
        if self.status.lock().peers.insert(peer.node, status).is_none() {
            self.table.peers.with_label_values(&[role]).inc();
        }
    }

    /// Records that a peer is no longer connected.
    pub fn disconnected(&self, peer: NodeId) {
        if let Some(gone) = self.status.lock().peers.remove(&peer) {
            tracing::info!(peer = %gone.name, role = gone.role, node = %gone.node, "lost");
            self.table.peers.with_label_values(&[gone.role]).dec();
            self.table.lost.inc();
        }
    }

    /// Records how tensors go between a peer and this process.
    pub fn goes(&self, peer: NodeId, transport: Transport) {
        if let Some(known) = self.status.lock().peers.get_mut(&peer) {
            known.transport = transport.name();
        }
    }

    /// Counts the bytes of tensors sent in a frame, and the bytes that the peer reads by
    /// `transport`.
    pub fn sent(&self, transport: Transport, [in_frame, elsewhere]: [u64; 2]) {
        let sent = [(Transport::Tcp, in_frame), (transport, elsewhere)];
        for (transport, bytes) in sent.into_iter().filter(|(_, bytes)| *bytes > 0) {
            self.table.tensors.with_label_values(&[transport.name()]).inc_by(bytes);
        }
    }

    /// Records the measured times of messages to connected peers.
    pub fn measured<P: Clone>(&self, links: &Links<P>) {
        let us = |duration: Option<Duration>| Some(duration?.as_secs_f64() * 1e6);
        let known = &mut *self.status.lock();
        for (node, peer) in &mut known.peers {
            (peer.round_trip_us, peer.one_way_us) = (us(links.round_trip(*node)), us(links.one_way(*node)));
        }
        for role in ["frontend", "scheduler", "backend"] {
            let its = known.peers.values().filter(|peer| peer.role == role).filter_map(|peer| peer.round_trip_us);
            let longest = its.reduce(f64::max);
            self.table.round_trip.with_label_values(&[role]).set(longest.map_or(0.0, |us| us / 1e6));
        }
    }

    /// Records the present sub-clusters.
    pub fn divided(&self, sub_clusters: Vec<SubCluster>) {
        let known = &mut *self.status.lock();
        let missing: usize =
            sub_clusters.iter().flat_map(|group| &group.backends).map(|(_, models)| models.len()).sum();
        self.table.missing.with_label_values::<&str>(&[]).set(i64::try_from(missing).unwrap_or(i64::MAX));
        let member = |(node, missing): (NodeId, Vec<String>)| MemberStatus {
            node: shown(node),
            name: known.peers.get(&node).map(|peer| peer.name.clone()).unwrap_or_default(),
            missing,
        };
        let group = |SubCluster { backends, models, requests, busy, memory }| SubClusterReport {
            models,
            requests_per_s: requests,
            busy_devices: busy,
            memory_bytes: memory,
            backends: backends.into_iter().map(member).collect(),
        };
        known.status.sub_clusters = sub_clusters.into_iter().map(group).collect();
    }

    /// Records all network budgets of a leading scheduler.
    pub fn plans_with(&self, budgets: impl Iterator<Item = ModelBudget>) {
        let mut worst = BTreeMap::<(String, String), NetworkBudget>::new();
        let status = |ModelBudget { model, version, backends, network }: ModelBudget| {
            let version = version.to_string();
            let known = worst.entry((model.clone(), version.clone())).or_default();
            *known = known.worse(network);
            let [control_us, data_us, reply_us] = parts(&network).map(|(_, part)| part.as_secs_f64() * 1e6);
            BudgetStatus { model, version, backends, control_us, data_us, reply_us }
        };
        let status = budgets.map(status).collect();
        let known = &mut *self.status.lock();
        known.status.budgets = status;
        for ((model, version), network) in &worst {
            for (part, takes) in parts(network) {
                self.table.budget.with_label_values(&[model, version, part]).set(takes.as_secs_f64());
            }
        }
        let before = std::mem::replace(&mut known.budgets, worst);
        for (model, version) in before.keys().filter(|key| !known.budgets.contains_key(*key)) {
            for (part, _) in parts(&NetworkBudget::default()) {
                // The metric exists, because it was set.
                let _ = self.table.budget.remove_label_values(&[model, version, part]);
            }
        }
    }

    /// Records the epoch that the process follows. `leads`: whether this process is the leader.
    pub fn follows(&self, epoch: Epoch, leads: bool) {
        let mut known = self.status.lock();
        if known.status.epoch != epoch.number || known.status.leads != leads {
            tracing::info!(epoch = epoch.number, rank = epoch.rank, leads, "who leads");
        }
        (known.status.epoch, known.status.leads) = (epoch.number, leads);
        known.status.leader = (epoch.number > 0).then_some(epoch.rank);
        self.table.epoch.with_label_values::<&str>(&[]).set(i64::try_from(epoch.number).unwrap_or(i64::MAX));
        self.table.leads.with_label_values::<&str>(&[]).set(leads.into());
        self.table.leaders.inc();
    }

    /// Records whether etcd has answered.
    pub fn etcd_answers(&self, answers: bool) {
        self.status.lock().status.etcd_answers = Some(answers);
        self.table.etcd.with_label_values::<&str>(&[]).set(answers.into());
    }

    /// Counts requests that were handed in to a new leader.
    pub fn handed_in(&self, requests: u64) {
        self.table.handed_in.inc_by(requests);
    }

    /// Sets the number of answers so far that reached no client.
    pub fn late_answers(&self, answers: u64) {
        self.table.late_answers.inc_by(answers.saturating_sub(self.table.late_answers.get()));
    }

    /// Sets the number of requests so far that were handed in again because their backend was lost.
    pub fn run_again(&self, requests: u64) {
        self.table.run_again.inc_by(requests.saturating_sub(self.table.run_again.get()));
    }
}
