//! The server and its models: metadata, configuration, policies, statistics.

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use downbeat_core::tensor::TensorSpec;
use downbeat_protocol::http::{
    ModelMetadataBody, ServerMetadataBody, TensorMetadataBody, config_to_json, statistics_to_json,
};
use downbeat_service::service::Service;
use downbeat_service::work::offload;

use super::answer::{HandlerResult, json_text, ok};
use super::path::ModelPath;
use super::sender::Sender;
use super::state::HttpState;
use crate::extension::extensions;

pub(super) async fn server<S: Service>(State(state): State<HttpState<S>>) -> HandlerResult {
    ok(&ServerMetadataBody {
        name: state.service().name().to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        extensions: extensions(state.memory()),
    })
}

fn tensors(specs: Vec<TensorSpec>) -> Vec<TensorMetadataBody> {
    specs
        .into_iter()
        .map(|spec| TensorMetadataBody { name: spec.name, datatype: spec.datatype.name().to_owned(), shape: spec.dims })
        .collect()
}

pub(super) async fn model<S: Service>(State(state): State<HttpState<S>>, path: ModelPath) -> HandlerResult {
    let metadata = state.service().model_metadata(&path.model, &path.version)?;
    ok(&ModelMetadataBody {
        name: metadata.name,
        versions: metadata.versions,
        platform: metadata.platform,
        inputs: tensors(metadata.signature.inputs),
        outputs: tensors(metadata.signature.outputs),
    })
}

/// Beside the event loop: a configuration has as many lines as its author likes.
pub(super) async fn config<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, .. }: Sender,
    path: ModelPath,
) -> HandlerResult {
    let work = move || {
        let config = state.service().model_config(&path.model, &path.version)?;
        Ok(json_text(StatusCode::OK, config_to_json(&config)).map(Body::from))
    };
    offload::run(client, 0, work).await?
}

pub(super) async fn policy<S: Service>(State(state): State<HttpState<S>>, path: ModelPath) -> HandlerResult {
    if let Some(view) = state.service().cluster()
        && let Some(report) = view.policy(&path.model, &path.version).await
    {
        return ok(&report?);
    }
    ok(&state.service().policy(&path.model, &path.version)?)
}

pub(super) async fn missed<S: Service>(State(state): State<HttpState<S>>, path: ModelPath) -> HandlerResult {
    ok(&state.service().missed(&path.model, &path.version)?)
}

/// The statistics of all models if the path names none.
pub(super) async fn statistics<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, caller }: Sender,
    path: ModelPath,
) -> HandlerResult {
    let work = move || {
        let mut statistics = state.service().statistics(&path.model, &path.version)?;
        statistics.retain(|statistics| caller.sees(&statistics.name));
        Ok(json_text(StatusCode::OK, statistics_to_json(statistics)).map(Body::from))
    };
    offload::run(client, 0, work).await?
}
