//! A process's view of its cluster.

use axum::extract::State;
use axum::http::StatusCode;
use downbeat_protocol::http::statistics_to_json;
use downbeat_service::report::cluster_report::{ClusterStatistics, ClusterView};
use downbeat_service::report::live::LiveProcess;
use downbeat_service::service::Service;
use downbeat_service::work::offload;
use serde::Serialize;
use serde_json::value::RawValue;

use super::answer::{HandlerResult, HttpError, ok};
use super::sender::Sender;
use super::state::HttpState;

/// The answer of `GET /v2/cluster/stats`.
#[derive(Serialize)]
struct Statistics {
    /// The sums over all frontends.
    cluster: Box<RawValue>,
    processes: Vec<ProcessStatistics>,
}

/// The counts of one process.
#[derive(Serialize)]
struct ProcessStatistics {
    #[serde(flatten)]
    process: LiveProcess,
    statistics: Box<RawValue>,
}

fn view<S: Service>(state: &HttpState<S>) -> Result<&dyn ClusterView, HttpError> {
    let none = || HttpError::new(StatusCode::NOT_FOUND, "this server is not part of a cluster".to_owned());
    state.service().cluster().ok_or_else(none)
}

pub(super) async fn status<S: Service>(State(state): State<HttpState<S>>) -> HandlerResult {
    ok(&view(&state)?.report())
}

/// The statistics of all models, summed over the frontends and by process.
pub(super) async fn statistics<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
) -> HandlerResult {
    let ClusterStatistics { models, processes } = view(&state)?.statistics().await;
    let work = move || {
        let defect = |error: serde_json::Error| HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
        let text = |models| RawValue::from_string(statistics_to_json(models)).map_err(defect);
        let process = |(process, models)| Ok(ProcessStatistics { process, statistics: text(models)? });
        let processes = processes.into_iter().map(process).collect::<Result<_, HttpError>>()?;
        ok(&Statistics { cluster: text(models)?, processes })
    };
    offload::run(client, 0, work).await?
}

pub(super) async fn plan<S: Service>(State(state): State<HttpState<S>>) -> HandlerResult {
    state.service().plan_cluster().await?;
    ok(&serde_json::json!({}))
}
