//! A scheduler as the [`Service`] behind its probes: it reports the state of the cluster, and
//! nothing else.

use std::sync::Arc;

use downbeat_host::scheduler::Rehearser;
use downbeat_protocol::{InferRequest, InferResponse, inference as pb};
use downbeat_service::error::ServiceError;
use downbeat_service::report::autoscale::{AutoscaleStatus, AutoscaleWatch};
use downbeat_service::report::cluster_report::ClusterView;
use downbeat_service::report::policy_report::PolicyReport;
use downbeat_service::report::scheduler_status::SchedulerStatus;
use downbeat_service::service::{LoadOverrides, ModelIndexEntry, ModelMetadata, Service};
use tokio::sync::oneshot;

use super::rehearsing::Findings;
use super::scheduler_role::{SchedulerEvent, SchedulerRole};
use crate::node::Events;
use crate::node::status::StatusBoard;
use crate::view::View;

/// Reports the state of the cluster.
pub struct SchedulerService {
    pub name: String,
    pub board: StatusBoard,
    /// Advice on the cluster's number of devices, while this scheduler leads.
    pub autoscale: Option<Arc<AutoscaleWatch>>,
    /// Events to the node's thread.
    pub node: Events<SchedulerRole>,
    pub view: View,
    /// The rehearsal of this scheduler's leads, if it is on.
    pub rehearsal: Option<(Arc<Rehearser>, Findings)>,
}

/// Refers the client to a frontend.
fn elsewhere<T>() -> Result<T, ServiceError> {
    Err(ServiceError::Unimplemented("this is a scheduler: ask a frontend".to_owned()))
}

impl Service for SchedulerService {
    fn name(&self) -> &str {
        &self.name
    }

    fn is_ready(&self) -> bool {
        // A scheduler is ready when it leads, or stands by for a leader that it hears.
        self.board.is_led()
    }

    fn is_model_ready(&self, _name: &str, _version: &str) -> bool {
        false
    }

    fn model_metadata(&self, _name: &str, _version: &str) -> Result<ModelMetadata, ServiceError> {
        elsewhere()
    }

    fn model_config(&self, _name: &str, _version: &str) -> Result<pb::ModelConfig, ServiceError> {
        elsewhere()
    }

    fn policy(&self, _name: &str, _version: &str) -> Result<PolicyReport, ServiceError> {
        elsewhere()
    }

    fn statistics(&self, _name: &str, _version: &str) -> Result<Vec<pb::ModelStatistics>, ServiceError> {
        elsewhere()
    }

    fn repository_index(&self, _ready_only: bool) -> Vec<ModelIndexEntry> {
        Vec::new()
    }

    async fn load(&self, _name: &str, _overrides: LoadOverrides) -> Result<(), ServiceError> {
        elsewhere()
    }

    async fn unload(&self, _name: &str) -> Result<(), ServiceError> {
        elsewhere()
    }

    fn cluster(&self) -> Option<&dyn ClusterView> {
        Some(&self.view)
    }

    async fn plan_cluster(&self) -> Result<(), ServiceError> {
        let (answer, answered) = oneshot::channel();
        let is_told = self.node.send(SchedulerEvent::Plan(answer)).is_ok();
        match is_told && answered.await.unwrap_or(false) {
            true => Ok(()),
            false => Err(ServiceError::Unavailable(
                "this scheduler does not divide the models: ask the leading scheduler (GET /v2/cluster names it), started with --sub-clusters".to_owned(),
            )),
        }
    }

    fn scheduler(&self) -> Option<SchedulerStatus> {
        self.rehearsal.as_ref().map(|(rehearser, findings)| rehearser.status(findings))
    }

    fn autoscale(&self) -> Option<AutoscaleStatus> {
        self.autoscale.as_ref().map(|watch| watch.status())
    }

    async fn infer(&self, _request: InferRequest) -> Result<InferResponse, ServiceError> {
        elsewhere()
    }

    fn labels(&self, _name: &str, _version: &str, _output: &str) -> Vec<String> {
        Vec::new()
    }
}
