//! A process's view of its cluster, as `GET /v2/cluster` shows it.

use downbeat_core::Duration;
use downbeat_protocol::inference::ModelStatistics;
use futures_util::future::BoxFuture;
use serde::Serialize;

use crate::error::ServiceError;
use crate::report::live::{LiveProcess, LiveReport};
use crate::report::policy_report::PolicyReport;
use crate::report::timeline::Timeline;

/// A process's view of its whole cluster. The questions go to all frontends and backends, by the
/// scheduler that leads. A report comes in any case. The last counts of a process stand if the process
/// does not answer, and the report names the process.
pub trait ClusterView: Send + Sync {
    /// The processes that this one is connected to.
    fn report(&self) -> ClusterReport;

    /// The counts of all models and devices. `history`: with the last hour.
    fn live(&self, history: bool) -> BoxFuture<'_, LiveReport>;

    /// The last launches on the devices of all backends, in this process's clock.
    fn timeline(&self, last: Duration) -> BoxFuture<'_, Timeline>;

    /// The statistics of all models.
    fn statistics(&self) -> BoxFuture<'_, ClusterStatistics>;

    /// The device policy of a model, by the backends that have the model. `None`: this process is a
    /// backend, and has the policy itself.
    fn policy<'a>(
        &'a self,
        model: &'a str,
        version: &'a str,
    ) -> BoxFuture<'a, Option<Result<PolicyReport, ServiceError>>>;
}

/// The statistics of all models of a cluster.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ClusterStatistics {
    /// The sums over all frontends.
    pub models: Vec<ModelStatistics>,
    /// Each process's own counts. A backend counts the batches that it ran, and a frontend the
    /// requests that it answered.
    pub processes: Vec<(LiveProcess, Vec<ModelStatistics>)>,
}

/// A peer that the process is connected to.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PeerStatus {
    /// The peer's number, drawn when it started.
    pub node: String,
    /// The peer's name for people.
    pub name: String,
    /// `frontend`, `scheduler` or `backend`.
    pub role: &'static str,
    /// The scheduler's place in the list of schedulers, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The address for others' connections; empty: none.
    pub address: String,
    /// How large tensors go between the peer and this process: `tcp`, `ucx`, or `shared_memory`.
    pub transport: &'static str,
    /// The recent time of a message to the peer and its answer: a high percentile, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub round_trip_us: Option<f64>,
    /// A high percentile of the time of a message from the peer, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub one_way_us: Option<f64>,
}

/// The network budget of a model.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BudgetStatus {
    /// Name of the model.
    pub model: String,
    /// The model's version.
    pub version: String,
    /// Names of the backends that the budget holds for.
    pub backends: Vec<String>,
    /// The time for a batch to the backends without its inputs, microseconds.
    pub control_us: f64,
    /// The time for fetching an item's inputs, microseconds.
    pub data_us: f64,
    /// From the end of a batch to the client's answer, microseconds.
    pub reply_us: f64,
}

/// A process's view of its cluster.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct ClusterReport {
    /// The process's own number.
    pub node: String,
    /// The process's name for people.
    pub name: String,
    /// `frontend`, `scheduler` or `backend`.
    pub role: &'static str,
    /// Number of the epoch that the process follows; 0: no leader yet.
    pub epoch: u64,
    /// The leading scheduler's place in the list of schedulers, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader: Option<u32>,
    /// Whether this process leads.
    pub leads: bool,
    /// Whether etcd answered the process last, if the process asks etcd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etcd_answers: Option<bool>,
    /// The connected peers, by number.
    pub peers: Vec<PeerStatus>,
    /// The sub-clusters, from 0, if this process leads and divides models.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sub_clusters: Vec<SubClusterReport>,
    /// The network budget of each model, by the backends that have the model, if this process
    /// leads.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub budgets: Vec<BudgetStatus>,
}

/// The present state of a sub-cluster.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SubClusterReport {
    /// The sub-cluster's models, by name.
    pub models: Vec<String>,
    /// Requests a second of these models, about over the last minute (`--plan-rate` limits them).
    pub requests_per_s: f64,
    /// The number of devices that these requests keep busy, in full batches.
    pub busy_devices: f64,
    /// Bytes that the models take on each device, without their runs.
    pub memory_bytes: u64,
    /// The sub-cluster's backends.
    pub backends: Vec<MemberStatus>,
}

/// A backend of a sub-cluster.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MemberStatus {
    /// The backend's number.
    pub node: String,
    /// The backend's name for people.
    pub name: String,
    /// Models of the sub-cluster that the backend does not have, yet or because their load failed.
    pub missing: Vec<String>,
}
