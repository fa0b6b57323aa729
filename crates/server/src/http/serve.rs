//! Connections: accepted, answered, drained.

use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::http::{Request, Response};
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tower_service::Service as _;

use super::answer::{Answer, HttpError};
use super::body::ReceivedBody;
use super::connection::{Activity, CountedStream, InRequest};
use super::path::ModelPath;
use super::{HttpState, encoding, infer, router};
use crate::service::Service;
use crate::shared_memory::Client;

/// How long accepting pauses when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What connections are told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Serving,
    /// Answer what is there, then close.
    Draining,
    /// Close.
    Stopping,
}

/// Answers HTTP requests on `listener` until `shutdown` is ready. Then no connection is accepted any more, requests in
/// flight are answered for at most [`drain_timeout`](super::HttpOptions::drain_timeout), and the connections closed.
pub async fn serve<S: Service>(listener: TcpListener, state: HttpState<S>, shutdown: impl Future<Output = ()>) {
    let (phase, watched) = watch::channel(Phase::Serving);
    // Every connection holds a sender; all are done when the receiver has none left.
    let (alive, mut all_done) = mpsc::channel::<Infallible>(1);
    let frontend = Arc::new(Frontend { router: router(state.clone()), state });
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                let client = Client::at(peer.ip());
                let connection = drive(stream, client, Arc::clone(&frontend), watched.clone());
                let alive = alive.clone();
                tokio::spawn(async move {
                    connection.await;
                    drop(alive);
                });
            }
            // The client gave up, or there are no descriptors; neither is a reason to stop serving.
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::select! {
                    () = tokio::time::sleep(ACCEPT_PAUSE) => {}
                    () = &mut shutdown => break,
                }
            }
        }
    }
    drop(listener);
    drop(alive);
    phase.send_replace(Phase::Draining);
    if tokio::time::timeout(frontend.state.options().drain_timeout, all_done.recv()).await.is_err() {
        tracing::warn!("requests were still in flight at the end of the drain timeout; their connections are closed");
        phase.send_replace(Phase::Stopping);
        all_done.recv().await;
    }
}

/// Serves one connection to its end.
async fn drive<S: Service>(
    stream: TcpStream,
    client: Client,
    frontend: Arc<Frontend<S>>,
    mut phase: watch::Receiver<Phase>,
) {
    // An answer is written whole; waiting to fill a segment only delays it.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY could not be set");
    }
    let receive_timeout = frontend.state.options().receive_timeout;
    let activity = Arc::new(Activity::default());
    let io = TokioIo::new(CountedStream::new(stream, Arc::clone(&activity)));
    let of_requests = Arc::clone(&activity);
    let service = service_fn(move |request| {
        let in_request = of_requests.head_received();
        let frontend = Arc::clone(&frontend);
        async move { Ok::<_, Infallible>(frontend.answer(request, in_request, client).await) }
    });
    let mut connection = pin!(http1::Builder::new().pipeline_flush(true).serve_connection(io, service));

    // Unregistered, and so free, until it is first polled.
    let mut timer = pin!(tokio::time::sleep(receive_timeout));
    let mut timed_since = None;
    loop {
        let event = {
            let mut changed = pin!(phase.changed());
            std::future::poll_fn(|cx| {
                if connection.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Event::Closed);
                }
                if timed_since.is_none() && activity.is_receiving() {
                    timed_since = Some(activity.progress());
                    timer.as_mut().reset(Instant::now() + receive_timeout);
                }
                if timed_since.is_some() && timer.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Event::TimerFired);
                }
                changed.as_mut().poll(cx).map(|_| Event::PhaseChanged)
            })
            .await
        };
        match event {
            Event::Closed => return,
            Event::TimerFired => {
                if timed_since.take().is_some_and(|since| activity.is_stalled(since)) {
                    tracing::debug!("a connection is closed: its request did not arrive in time");
                    return;
                }
            }
            Event::PhaseChanged => {
                let phase = *phase.borrow_and_update();
                match phase {
                    Phase::Serving => {}
                    Phase::Draining => connection.as_mut().graceful_shutdown(),
                    Phase::Stopping => return,
                }
            }
        }
    }
}

enum Event {
    Closed,
    TimerFired,
    PhaseChanged,
}

/// Answers requests: inference itself, everything else through the router.
struct Frontend<S> {
    state: HttpState<S>,
    router: Router,
}

impl<S: Service> Frontend<S> {
    async fn answer(&self, request: Request<Incoming>, in_request: InRequest, client: Client) -> Response<AnswerBody> {
        let (mut parts, incoming) = request.into_parts();
        let limit = self.state.options().max_body_bytes;
        let body = ReceivedBody::new(incoming, &parts.headers, limit, in_request.receipt());
        if let Some(path) = ModelPath::of_inference(&parts.method, parts.uri.path()) {
            let answer = infer::infer(&self.state, client, path, &parts.headers, body).await;
            let answer = encoding::encode(&parts.headers, answer.unwrap_or_else(HttpError::answer)).await;
            return whole(answer);
        }
        parts.extensions.insert(client);
        let request = Request::from_parts(parts, axum::body::Body::new(body));
        match self.router.clone().call(request).await {
            Ok(response) => response.map(AnswerBody::Routed),
            Err(never) => match never {},
        }
    }
}

fn whole(answer: Answer) -> Response<AnswerBody> {
    answer.map(|bytes| AnswerBody::Whole(Some(bytes)))
}

/// The body of an answer: bytes, or what the router made.
enum AnswerBody {
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
