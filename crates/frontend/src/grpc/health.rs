//! `grpc.health.v1`, as Kubernetes and load balancers ask it.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use downbeat_service::service::Service;
use futures_core::Stream;
use futures_util::stream::unfold;
use tokio::sync::watch;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// How soon a watching client learns of a change.
const WATCH_PERIOD: Duration = Duration::from_secs(1);

/// The names that stand for the server's readiness.
const NAMES: [&str; 2] = ["", "inference.GRPCInferenceService"];

/// Answers with the server's readiness.
pub(super) struct HealthService<S> {
    service: Arc<S>,
    draining: watch::Receiver<bool>,
}

impl<S: Service> HealthService<S> {
    pub(super) fn new(service: Arc<S>, draining: watch::Receiver<bool>) -> Self {
        HealthService { service, draining }
    }
}

fn status<S: Service>(service: &S, draining: &watch::Receiver<bool>) -> ServingStatus {
    if service.is_ready() && !*draining.borrow() { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl<S: Service> Health for HealthService<S> {
    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let name = &request.get_ref().service;
        if NAMES.contains(&name.as_str()) {
            return Ok(Response::new(response(status(&*self.service, &self.draining))));
        }
        let name: String = name.chars().take(64).collect();
        Err(Status::not_found(format!("unknown service '{name}'; expected '' or '{}'", NAMES[1])))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    /// Sends the status, then each change of the status. Ends when the server drains.
    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let known = NAMES.contains(&request.get_ref().service.as_str());
        let watcher = (Arc::clone(&self.service), self.draining.clone(), None);
        let changes = unfold(watcher, move |(service, mut draining, mut last)| async move {
            loop {
                if last.is_some() {
                    if *draining.borrow() {
                        return None;
                    }
                    // Either way there is something to look at.
                    let _ = tokio::time::timeout(WATCH_PERIOD, draining.changed()).await;
                }
                let now = if known { status(&*service, &draining) } else { ServingStatus::ServiceUnknown };
                if last != Some(now) {
                    last = Some(now);
                    return Some((Ok(response(now)), (service, draining, last)));
                }
            }
        });
        Ok(Response::new(Box::pin(changes)))
    }
}
