//! Triton's generate extension: inferences as flat JSON objects, answered by one object
//! (`generate`) or by server-sent events (`generate_stream`).

use axum::body::Body;
use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use bytes::Bytes;
use downbeat_protocol::InferResponse;
use downbeat_protocol::http::{parse_generate, write_generate};
use downbeat_service::answers::StreamAnswer;
use downbeat_service::client::Client;
use downbeat_service::error::ServiceError;
use downbeat_service::service::Service;
use downbeat_service::traces::open::OpenTrace;
use downbeat_service::work::offload;
use futures_core::stream::BoxStream;
use futures_util::stream::{StreamExt, unfold};
use http_body::Frame;
use http_body_util::StreamBody;

use super::answer::{HandlerResult, HttpError, JSON};
use super::body::{self, WholeBody};
use super::encoding;
use super::path::ModelPath;
use super::sender::Sender;
use super::state::HttpState;
use crate::access::Caller;
use crate::{extension, rollout, trace};

const EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");
/// A field of JSON is two characters or more, and a key and a value of some tens of bytes.
const MOST_GROWTH: u64 = 8;

/// Answers with the model's only answer.
pub(super) async fn one<S: Service>(
    State(state): State<HttpState<S>>,
    path: ModelPath,
    Sender { client, caller }: Sender,
    headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    let trace = state.begin_trace(client, &path.model, &headers);
    let answered = only(&state, (client, &caller), path, &headers, body, trace.as_ref()).await;
    let mut answered = answered.inspect_err(|error| error.tell(trace.as_ref()))?;
    if let Some(trace) = trace {
        trace::end(&trace, answered.status().as_u16(), answered.headers_mut());
    }
    Ok(answered)
}

async fn only<S: Service>(
    state: &HttpState<S>,
    sender: (Client, &Caller),
    path: ModelPath,
    headers: &HeaderMap,
    body: Body,
    trace: Option<&OpenTrace>,
) -> HandlerResult {
    let mut answers = begin(state, sender, path, headers, body, trace).await?;
    let mut only = None;
    while let Some(StreamAnswer { answer, is_final }) = answers.next().await {
        if let Some(answer) = answer
            && only.replace(answer?).is_some()
        {
            return Err(not_one("more than 1"));
        }
        if is_final {
            break;
        }
    }
    let response = only.ok_or_else(|| not_one("none"))?;
    trace.iter().for_each(|trace| trace.answered());
    let text = write(sender.0, response).await?;
    let mut answer = Response::new(Body::from(text));
    answer.headers_mut().insert(CONTENT_TYPE, JSON);
    Ok(answer)
}

/// Answers with one event for each answer of the model. The status is that of the first answer.
pub(super) async fn stream<S: Service>(
    State(state): State<HttpState<S>>,
    path: ModelPath,
    Sender { client, caller }: Sender,
    headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    let trace = state.begin_trace(client, &path.model, &headers);
    let begun = begin(&state, (client, &caller), path, &headers, body, trace.as_ref()).await;
    let mut answers = begun.inspect_err(|error| error.tell(trace.as_ref()))?;
    let mut status = StatusCode::OK;
    let mut first = None;
    while let Some(StreamAnswer { answer, is_final }) = answers.next().await {
        if let Some(answer) = answer {
            let (event, its_status) = event(client, answer).await;
            (first, status) = (Some(event), its_status);
        }
        if is_final {
            answers = futures_util::stream::empty().boxed();
        }
        if first.is_some() {
            break;
        }
    }
    trace.iter().for_each(|trace| trace.answered());
    let events = futures_util::stream::iter(first).chain(events(client, answers, trace));
    let frames = events.map(|event| Ok::<_, std::convert::Infallible>(Frame::data(event)));
    let mut answer = Response::new(Body::new(StreamBody::new(frames)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, EVENTS);
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(answer)
}

/// Reads a request, whose `trace` is open, and begins its work. Dropping the answers cancels the work.
async fn begin<S: Service>(
    state: &HttpState<S>,
    (client, caller): (Client, &Caller),
    path: ModelPath,
    headers: &HeaderMap,
    body: Body,
    trace: Option<&OpenTrace>,
) -> Result<BoxStream<'static, StreamAnswer>, HttpError> {
    let limit = state.options().max_body_bytes;
    let head = state.service().model_metadata(&path.model, &path.version).map_err(HttpError::from).and_then(|model| {
        state.service().check_model(&path.model, &path.version)?;
        Ok((model.signature.inputs, encoding::of_request(headers)?))
    });
    let (inputs, coding) = head.map_err(|error| body::unread(error, headers, &body, limit))?;
    let WholeBody { bytes, mut held } = WholeBody::of(state, (client, caller), headers, coding, body).await?;
    let length = bytes.len();
    let heavy = length >= offload::PARSE_FROM;
    let read = move || {
        if heavy {
            held.grow(MOST_GROWTH * length as u64)?;
        }
        let request = parse_generate(path.model, path.version, &bytes, &inputs, limit)?;
        held.shrink_to(request.inputs.iter().map(|input| input.data.len() as u64).sum());
        Ok::<_, HttpError>((request, held))
    };
    let (mut request, held) = offload::run_if(heavy, client, length, read).await??;
    caller.mark(&mut request);
    trace::mark(state.service(), headers, &mut request);
    rollout::mark(state.service(), headers, &mut request);
    trace::received(trace, state.options().traces.is_on(), &mut request);
    Ok(extension::infer_many(state.service(), state.memory(), client, request, held).await?)
}

/// The error of `generate` for a model that did not give exactly one answer. The words are Triton's.
fn not_one(given: &str) -> HttpError {
    HttpError::new(
        StatusCode::BAD_REQUEST,
        format!(
            "generate expects model to produce exactly 1 response, use generate stream for model that generates \
             various number of responses; the model gave {given}"
        ),
    )
}

async fn write(client: Client, response: InferResponse) -> Result<Bytes, HttpError> {
    let cost = response.outputs.iter().map(|output| output.data.len()).sum();
    let written = offload::run_if(cost >= offload::PARSE_FROM, client, cost, move || write_generate(&response)).await?;
    Ok(Bytes::from(written?))
}

/// The events after the first. The trace of the request ends with them.
fn events(
    client: Client,
    answers: BoxStream<'static, StreamAnswer>,
    trace: Option<OpenTrace>,
) -> BoxStream<'static, Bytes> {
    unfold(Some((answers, trace)), move |state| async move {
        let (mut answers, trace) = state?;
        let end = |trace: &Option<OpenTrace>| {
            trace.iter().for_each(|trace| trace.outcome(StatusCode::OK.as_u16(), None));
        };
        loop {
            let Some(StreamAnswer { answer, is_final }) = answers.next().await else {
                end(&trace);
                return None;
            };
            if is_final {
                end(&trace);
            }
            if let Some(answer) = answer {
                let (event, _) = event(client, answer).await;
                return Some((event, (!is_final).then_some((answers, trace))));
            }
            if is_final {
                return None;
            }
        }
    })
    .boxed()
}

/// The event with an answer or an error, and its status.
async fn event(client: Client, answer: Result<InferResponse, ServiceError>) -> (Bytes, StatusCode) {
    let written = match answer {
        Ok(response) => write(client, response).await,
        Err(error) => Err(HttpError::from(error)),
    };
    let (json, status) = match written {
        Ok(json) => (json, StatusCode::OK),
        Err(error) => {
            let answer = error.answer();
            let status = answer.status();
            (answer.into_body(), status)
        }
    };
    (Bytes::from([&b"data: "[..], &json, &b"\n\n"[..]].concat()), status)
}
