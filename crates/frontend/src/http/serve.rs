//! A port over which HTTP is spoken.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::Router;
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Request, Response};
use bytes::Bytes;
use downbeat_service::client::Client;
use downbeat_service::service::Service;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{HttpService, service_fn};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tower_service::Service as _;

use super::body::{self, ReceivedBody};
use super::host_names::HostNames;
use super::path::ModelPath;
use super::router::router_with_page;
use super::state::HttpState;
use super::{encoding, infer, needs};
use crate::connections::{self, Answering, Connections, Driven, Framing, Protocol, Stages, WatchedBody, WatchedStream};
use crate::trace;

/// Answers HTTP requests on `listener`, with connections among `connections`, until `stages` end
/// it. From [`Stage::Leaving`](connections::Stage::Leaving) on, each answer is the last of its
/// connection.
pub async fn serve<S: Service>(listener: TcpListener, connections: Connections, state: HttpState<S>, stages: Stages) {
    let names = state.options().allow_host.clone();
    serve_answers(listener, connections, Frontend { router: router_with_page(state.clone()), state }, &names, stages)
        .await;
}

/// Answers the requests of a port.
pub trait Answers: Send + Sync + 'static {
    type Body: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + Unpin;

    fn answer(
        &self,
        client: Client,
        request: Request<WatchedBody>,
    ) -> impl Future<Output = Response<Self::Body>> + Send;

    /// The body of an answer to a request that is not taken.
    fn whole(body: Bytes) -> Self::Body;
}

/// As [`serve`], with any answers, to requests for these `names` of the port.
pub async fn serve_answers<A: Answers>(
    listener: TcpListener,
    connections: Connections,
    answers: A,
    names: &[String],
    stages: Stages,
) {
    let answers = Arc::new((HostNames::of(&listener, names), answers));
    let options = connections.options().clone();
    connections::serve(listener, Protocol::Http, connections, stages, move |stream, watched, peer| {
        let (answers, options) = (Arc::clone(&answers), options.clone());
        let client = Client::at(peer);
        let of_requests = Arc::clone(&watched);
        let service = move |request: Request<Incoming>| {
            let in_request = of_requests.request();
            let watched = Arc::clone(&of_requests);
            let request = request.map(|body| WatchedBody::new(body, Framing::Whole, &options, watched));
            let answers = Arc::clone(&answers);
            async move {
                let (names, answers) = &*answers;
                let mut response = match names.check(&request) {
                    Ok(()) => answers.answer(client, request).await,
                    Err(refused) => refused.answer().map(A::whole),
                };
                in_request.traffic().count_http(response.status());
                if in_request.is_leaving() {
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(response.map(|body| Answering::new(body, in_request)))
            }
        };
        connections::keep(stream, watched, move |stream| {
            Box::new(http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(service.clone())))
        })
    })
    .await;
}

impl<S, B> Driven for http1::Connection<TokioIo<WatchedStream>, S>
where
    S: HttpService<Incoming, ResBody = B, Error = Infallible>,
    B: Body<Error: Into<Box<dyn std::error::Error + Send + Sync>>> + 'static,
{
    fn finish(&mut self) {
        Pin::new(self).graceful_shutdown();
    }

    fn rest(self: Box<Self>) -> Result<WatchedStream, Box<Self>> {
        let parts = (*self).into_parts();
        let mut stream = parts.io.into_inner();
        stream.read_again(parts.read_buf);
        Ok(stream)
    }
}

/// Answers requests: inference itself, everything else through the router.
struct Frontend<S> {
    state: HttpState<S>,
    router: Router,
}

impl<S: Service> Answers for Frontend<S> {
    type Body = AnswerBody;

    async fn answer(&self, client: Client, request: Request<WatchedBody>) -> Response<AnswerBody> {
        let (mut parts, incoming) = request.into_parts();
        let limit = self.state.options().max_body_bytes;
        let body = ReceivedBody::new(incoming, &parts.headers, limit);
        if let Some(path) = ModelPath::of_inference(&parts.method, parts.uri.path()) {
            let coding = encoding::of_answer(&parts.headers);
            let trace = self.state.begin_trace(client, &path.model, &parts.headers);
            let inferred = match needs::admit_inference(&self.state, client, &path.model, &parts.headers) {
                Ok(caller) => {
                    infer::infer(&self.state, (client, &caller), path, &parts.headers, body, trace.as_ref()).await
                }
                Err(denied) => Err(body::unread(denied, &parts.headers, &body, limit)),
            };
            let answer = infer::answer(inferred, parts.headers, trace.as_ref());
            let mut answer = match coding {
                Some(coding) => encoding::encode(coding, client, answer).await,
                None => answer,
            };
            if let Some(trace) = trace {
                trace::end(&trace, answer.status().as_u16(), answer.headers_mut());
            }
            return answer.map(Self::whole);
        }
        parts.extensions.insert(client);
        let request = Request::from_parts(parts, axum::body::Body::new(body));
        match connections::beside(self.router.clone().call(request)).await {
            Ok(response) => response.map(AnswerBody::Routed),
            Err(never) => match never {},
        }
    }

    fn whole(body: Bytes) -> AnswerBody {
        AnswerBody::Whole(Some(body))
    }
}

/// Answers every request by a router, on the thread of its connection: the router's handlers are
/// brief.
pub struct Routed(pub Router);

impl Answers for Routed {
    type Body = axum::body::Body;

    async fn answer(&self, client: Client, mut request: Request<WatchedBody>) -> Response<axum::body::Body> {
        request.extensions_mut().insert(client);
        match self.0.clone().call(request.map(axum::body::Body::new)).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }

    fn whole(body: Bytes) -> axum::body::Body {
        axum::body::Body::from(body)
    }
}

/// The body of an answer: bytes, or the router's body.
pub enum AnswerBody {
    Whole(Option<Bytes>),
    Routed(axum::body::Body),
}

impl http_body::Body for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match self.get_mut() {
            AnswerBody::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            AnswerBody::Routed(body) => Poll::Ready(ready!(Pin::new(body).poll_frame(cx))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            AnswerBody::Whole(bytes) => bytes.is_none(),
            AnswerBody::Routed(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            AnswerBody::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            AnswerBody::Routed(body) => body.size_hint(),
        }
    }
}
