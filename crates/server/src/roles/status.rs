//! What a process knows of its cluster: `GET /v2/cluster`, and the metrics `downbeat_cluster_*`.

use std::collections::BTreeMap;
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::cluster::NetworkBudget;
use downbeat_core::roles::{Epoch, Hello, Links, ModelBudget, NodeId, Role, SubCluster};
use parking_lot::Mutex;
use serde::Serialize;

use super::peer_memory::Transport;
use crate::metric_table::metric_table;

metric_table! {
    /// What a process says of its cluster.
    struct Table {
        peers: IntGaugeVec["role"], "downbeat_cluster_peers", "Processes that this one is connected to, by role";
        epoch: IntGaugeVec[], "downbeat_cluster_epoch", "Number of the epoch that this process follows; 0: nobody has led yet";
        leads: IntGaugeVec[], "downbeat_cluster_leads", "1 while this scheduler leads";
        leaders: IntCounter[], "downbeat_cluster_leaders_total", "Times that somebody else has led from then on";
        etcd: IntGaugeVec[], "downbeat_cluster_etcd_answers", "Whether etcd answered this process last; none: it asks none";
        missing: IntGaugeVec[], "downbeat_cluster_models_missing",
            "Models that backends of their sub-cluster do not have, yet or because they could not be loaded; counted by the scheduler that leads, and none elsewhere";
        handed_in: IntCounter[], "downbeat_cluster_handed_in_again_total", "Requests that were handed in to a scheduler that has begun to lead";
        run_again: IntCounter[], "downbeat_cluster_run_again_total", "Requests that were handed in again because the backend that had them was lost";
        round_trip: GaugeVec["role"], "downbeat_cluster_round_trip_seconds",
            "What a message to a process of a role and its answer take, as measured lately: of the slowest a high percentile; 0: not known";
        budget: GaugeVec["model", "version", "part"], "downbeat_cluster_budget_seconds",
            "What the scheduler that leads plans with for messages of a model, of its slowest backend: control (a batch to it), data (fetching an item's inputs), reply";
        tensors: IntCounterVec["transport"], "downbeat_cluster_tensor_bytes_total", "Bytes of tensors sent to other processes: over TCP, in shared memory, or by UCX";
        lost: IntCounter[], "downbeat_cluster_peers_lost_total", "Times that a process this one was connected to was lost";
    }
}

/// Somebody that the process is connected to.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PeerStatus {
    /// Its number, drawn when it started.
    pub node: String,
    /// What people call it.
    pub name: String,
    /// `frontend`, `scheduler` or `backend`.
    pub role: &'static str,
    /// Place in the list of schedulers, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Where others connect to it; empty: nowhere.
    pub address: String,
    /// How its large tensors get here and mine there: `tcp`, `ucx`, or `shared_memory`.
    pub transport: &'static str,
    /// What a message to it and its answer take, as measured lately: a high percentile, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub round_trip_us: Option<f64>,
    /// The most that a message to it or from it takes, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub one_way_us: Option<f64>,
}

/// What a model is planned with for messages.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BudgetStatus {
    /// Name of the model.
    pub model: String,
    /// Its version.
    pub version: String,
    /// Names of the backends that it holds for.
    pub backends: Vec<String>,
    /// A batch's way to them without its inputs, microseconds.
    pub control_us: f64,
    /// Fetching an item's inputs, microseconds.
    pub data_us: f64,
    /// From the end of a batch to the client's answer, microseconds.
    pub reply_us: f64,
}

/// What a process knows of its cluster.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct ClusterStatus {
    /// The process's own number.
    pub node: String,
    /// What people call it.
    pub name: String,
    /// `frontend`, `scheduler` or `backend`.
    pub role: &'static str,
    /// Number of the epoch that it follows; 0: nobody has led yet.
    pub epoch: u64,
    /// Place of the scheduler that leads in the list of schedulers, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader: Option<u32>,
    /// Whether it is this one.
    pub leads: bool,
    /// Whether etcd answered it last, if it asks one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etcd_answers: Option<bool>,
    /// Whom it is connected to, by number.
    pub peers: Vec<PeerStatus>,
    /// Of a scheduler that leads and divides models: the sub-clusters, from 0.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sub_clusters: Vec<SubClusterStatus>,
    /// What each model is planned with for messages, by the backends that have it, if it leads.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub budgets: Vec<BudgetStatus>,
}

/// A sub-cluster as it is.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SubClusterStatus {
    /// Its models, by name.
    pub models: Vec<String>,
    /// Its backends.
    pub backends: Vec<MemberStatus>,
}

/// A backend of a sub-cluster.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MemberStatus {
    /// Its number.
    pub node: String,
    /// What people call it.
    pub name: String,
    /// Models of the sub-cluster that it does not have, yet or because they could not be loaded.
    pub missing: Vec<String>,
}

/// Where a node's thread says what others read.
#[derive(Clone)]
pub struct StatusBoard {
    status: Arc<Mutex<Known>>,
    table: Arc<Table>,
}

#[derive(Default)]
struct Known {
    status: ClusterStatus,
    peers: BTreeMap<NodeId, PeerStatus>,
    /// By model and version: what metrics say.
    budgets: BTreeMap<(String, String), NetworkBudget>,
}

/// What a role is called.
pub fn role_name(role: Role) -> &'static str {
    match role {
        Role::Frontend => "frontend",
        Role::Scheduler { .. } => "scheduler",
        Role::Backend => "backend",
    }
}

/// A node's number, as it is shown.
pub fn shown(node: NodeId) -> String {
    format!("{:016x}", node.0)
}

/// The parts of a budget by name.
fn parts(network: &NetworkBudget) -> [(&'static str, Duration); 3] {
    [("control", network.control), ("data", network.data), ("reply", network.reply)]
}

impl StatusBoard {
    /// That of a process which knows nobody yet; its metrics are among those of `registry`.
    ///
    /// # Errors
    /// If it has such metrics already: a defect.
    pub fn new(
        node: NodeId,
        name: &str,
        role: Role,
        registry: &prometheus::Registry,
    ) -> Result<Self, prometheus::Error> {
        let status =
            ClusterStatus { node: shown(node), name: name.to_owned(), role: role_name(role), ..Default::default() };
        let table = Arc::new(Table::register(registry)?);
        Ok(StatusBoard { status: Arc::new(Mutex::new(Known { status, ..Known::default() })), table })
    }

    /// What is known now.
    pub fn status(&self) -> ClusterStatus {
        let known = self.status.lock();
        ClusterStatus { peers: known.peers.values().cloned().collect(), ..known.status.clone() }
    }

    /// Whether it is connected to anybody of this role.
    pub fn has(&self, role: &str) -> bool {
        self.status.lock().peers.values().any(|peer| peer.role == role)
    }

    /// Somebody is connected.
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

    /// Somebody is not connected any more.
    pub fn disconnected(&self, peer: NodeId) {
        if let Some(gone) = self.status.lock().peers.remove(&peer) {
            tracing::info!(peer = %gone.name, role = gone.role, node = %gone.node, "lost");
            self.table.peers.with_label_values(&[gone.role]).dec();
            self.table.lost.inc();
        }
    }

    /// This is how tensors go between it and this process.
    pub fn goes(&self, peer: NodeId, transport: Transport) {
        if let Some(known) = self.status.lock().peers.get_mut(&peer) {
            known.transport = transport.name();
        }
    }

    /// So many bytes of tensors were sent in a frame, and so many where the peer reads them by this way.
    pub fn sent(&self, transport: Transport, [in_frame, elsewhere]: [u64; 2]) {
        let sent = [(Transport::Tcp, in_frame), (transport, elsewhere)];
        for (transport, bytes) in sent.into_iter().filter(|(_, bytes)| *bytes > 0) {
            self.table.tensors.with_label_values(&[transport.name()]).inc_by(bytes);
        }
    }

    /// What messages to those that are connected take.
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

    /// The sub-clusters are so now.
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
        let group = |SubCluster { backends, models }| SubClusterStatus {
            models,
            backends: backends.into_iter().map(member).collect(),
        };
        known.status.sub_clusters = sub_clusters.into_iter().map(group).collect();
    }

    /// What the scheduler plans with for messages: all of it, of a scheduler that leads.
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
                // It is there: it was set.
                let _ = self.table.budget.remove_label_values(&[model, version, part]);
            }
        }
    }

    /// This epoch is followed from now on; `leads`: it is this process's.
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

    /// Etcd has answered, or has not.
    pub fn etcd_answers(&self, answers: bool) {
        self.status.lock().status.etcd_answers = Some(answers);
        self.table.etcd.with_label_values::<&str>(&[]).set(answers.into());
    }

    /// So many requests were handed in to a scheduler that has begun to lead.
    pub fn handed_in(&self, requests: u64) {
        self.table.handed_in.inc_by(requests);
    }

    /// So many requests so far were handed in again because their backend was lost.
    pub fn run_again(&self, requests: u64) {
        self.table.run_again.inc_by(requests.saturating_sub(self.table.run_again.get()));
    }
}
