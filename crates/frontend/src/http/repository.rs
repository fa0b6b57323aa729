//! The model repository: its index, loading, unloading.

use axum::extract::State;
use axum::http::StatusCode;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use downbeat_protocol::Parameter;
use downbeat_protocol::http::{IndexRequest, LoadRequest};
use downbeat_service::service::{LoadOverrides, Service, UNLOAD_DEPENDENTS};
use downbeat_service::work::offload;

use super::answer::{HandlerResult, HttpError, ok, parse_json, read_json};
use super::body::WholeBody;
use super::path::ModelPath;
use super::sender::Sender;
use super::state::HttpState;

/// Beside the event loop: folders are listed, and there may be thousands of models.
pub(super) async fn index<S: Service>(
    State(state): State<HttpState<S>>,
    Sender { client, caller }: Sender,
    body: WholeBody,
) -> HandlerResult {
    let work = move || {
        let request: IndexRequest = read_json(&body.bytes)?;
        let mut index = state.service().repository_index(request.ready);
        index.retain(|entry| caller.sees(&entry.name));
        ok(&index)
    };
    offload::run(client, 0, work).await?
}

pub(super) async fn load<S: Service>(
    State(state): State<HttpState<S>>,
    path: ModelPath,
    Sender { client, .. }: Sender,
    body: WholeBody,
) -> HandlerResult {
    // Files come in base64. Their bytes stay in the budget until the load is over.
    let WholeBody { bytes, held: _held } = body;
    let length = bytes.len();
    let heavy = length >= offload::PARSE_FROM;
    let overrides = offload::run_if(heavy, client, length, move || overrides(read_json(&bytes)?)).await??;
    state.service().load(&path.model, overrides).await?;
    ok(&serde_json::Map::new())
}

/// `file:PATH` is a file in base64, `config` a configuration in JSON.
fn overrides(request: LoadRequest) -> Result<LoadOverrides, HttpError> {
    let mut overrides = LoadOverrides::default();
    for (key, value) in request.parameters {
        let wrong = |what: &str| HttpError::new(StatusCode::BAD_REQUEST, format!("parameter '{key}': {what}"));
        match (key.as_str(), key.strip_prefix("file:"), value) {
            (_, Some(path), Parameter::String(text)) => {
                let file = BASE64_STANDARD
                    .decode(text)
                    .map_err(|e| wrong(&format!("expected the file's content in base64: {e}")))?;
                overrides.files.insert(path.to_owned(), Bytes::from(file));
            }
            (_, Some(_), _) => return Err(wrong("expected the file's content in base64")),
            ("config", None, Parameter::String(config)) => overrides.config = Some(config),
            ("config", None, _) => return Err(wrong("expected a model configuration as a string of JSON")),
            (_, None, value) => {
                overrides.parameters.insert(key, value);
            }
        }
    }
    Ok(overrides)
}

/// The body of a share that is set by hand.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ShareRequest {
    partition: u32,
}

pub(super) async fn set_share<S: Service>(
    State(state): State<HttpState<S>>,
    path: ModelPath,
    body: WholeBody,
) -> HandlerResult {
    let ShareRequest { partition } = parse_json(&body.bytes)?;
    state.service().set_partition(&path.model, Some(partition)).await?;
    ok(&serde_json::Map::new())
}

pub(super) async fn free_share<S: Service>(State(state): State<HttpState<S>>, path: ModelPath) -> HandlerResult {
    state.service().set_partition(&path.model, None).await?;
    ok(&serde_json::Map::new())
}

pub(super) async fn unload<S: Service>(
    State(state): State<HttpState<S>>,
    path: ModelPath,
    body: WholeBody,
) -> HandlerResult {
    let LoadRequest { parameters } = read_json(&body.bytes)?;
    match parameters.get(UNLOAD_DEPENDENTS) {
        Some(Parameter::Bool(true)) => state.service().unload_with_steps(&path.model).await?,
        _ => state.service().unload(&path.model).await?,
    }
    ok(&serde_json::Map::new())
}
