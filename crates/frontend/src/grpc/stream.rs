//! The answers of one `ModelStreamInfer` stream.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use downbeat_protocol::grpc::response_to_message;
use downbeat_protocol::{InferRequest, InferResponse, Parameter, inference as pb};
use downbeat_service::budget::{ByteBudget, Reservation};
use downbeat_service::client::Client;
use downbeat_service::error::ServiceError;
use downbeat_service::service::Service;
use downbeat_service::traces::open::OpenTrace;
use downbeat_service::traces::record::Wire;
use futures_core::Stream;
use futures_core::future::BoxFuture;
use futures_core::stream::BoxStream;
use futures_util::stream::{FuturesOrdered, SelectAll, StreamExt, select_all, unfold};
use http::HeaderMap;
use http_body::Body;
use pb::infer_parameter::ParameterChoice;
use tokio::sync::mpsc;
use tonic::{Code, Status};

use super::answer::{AnswerBody, Pieces, error_pieces, pieces, response, stream_error_pieces};
use super::call::{Answer, Codings, Inference, noted};
use super::message::{MessageReader, RawMessage, Received, read_request};
use crate::access::Caller;
use crate::compression::Coding;
use crate::{extension, rollout, trace};

/// Marks the last answer of a request in a stream.
const FINAL: &str = "triton_final_response";
/// Asks for an answer without tensors where a model tells the end apart from its last answer.
const EMPTY_FINAL: &str = "triton_enable_empty_final_response";

/// Runs a stream's requests side by side. Models with one answer to each request give their answers
/// in the order of the requests. The answers of a decoupled model come as it gives them: in the
/// model's order for each request, and between the answers to other requests. Triton does the same.
/// A request that fails is answered with its error, and the stream goes on.
///
/// At most `bound` requests are under way; further ones stay unread. If the client has gone,
/// dropping the stream drops their futures and answers, which cancels them.
pub(super) struct AnswerStream<S, B> {
    inference: Arc<Inference<S>>,
    client: Client,
    caller: Caller,
    codings: Codings,
    /// The headers of the call.
    headers: Arc<HeaderMap>,
    /// `None`: nothing more is read. The client is done, the stream is broken, or the server
    /// drains.
    requests: Option<MessageReader<B>>,
    /// `None`: the request's answers are a stream of their own.
    running: FuturesOrdered<BoxFuture<'static, Result<Option<Pieces>, Status>>>,
    /// The answers of requests to decoupled models.
    many: SelectAll<ManyPieces>,
    /// Brings answers to `many`.
    begun: (mpsc::UnboundedSender<ManyPieces>, mpsc::UnboundedReceiver<ManyPieces>),
    bound: usize,
    /// The error that ends the stream, after the answers.
    failure: Option<Status>,
    drain: BoxFuture<'static, ()>,
}

type ManyPieces = BoxStream<'static, Result<Pieces, Status>>;

impl<S: Service> Inference<S> {
    /// Answers `ModelStreamInfer`.
    pub fn stream<B>(
        self: Arc<Self>,
        (client, caller): (Client, Caller),
        call: http::Request<B>,
    ) -> Result<Answer, Status>
    where
        B: Body<Data = Bytes> + Unpin + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (head, body) = call.into_parts();
        let codings = Codings::of(&head.headers)?;
        let reader = self.reader(&caller, body, codings);
        let answers = AnswerStream {
            client,
            caller,
            codings,
            headers: Arc::new(head.headers),
            requests: Some(reader),
            running: FuturesOrdered::new(),
            many: select_all([]),
            begun: mpsc::unbounded_channel(),
            bound: self.max_stream_requests.max(1),
            failure: None,
            drain: Box::pin(super::drained(self.draining.clone())),
            inference: self,
        };
        Ok(response(codings.answers, tonic::body::Body::new(AnswerBody::many(answers))))
    }
}

impl<S: Service, B> AnswerStream<S, B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    fn start(&mut self, message: RawMessage) {
        let (inference, client, codings) = (Arc::clone(&self.inference), self.client, self.codings);
        let (begun, caller, headers) = (self.begun.0.clone(), self.caller.clone(), Arc::clone(&self.headers));
        let began = self.inference.traces.began();
        self.running.push_back(Box::pin(async move {
            let (message, held) = match message.inference(client, codings.requests, inference.limit).await {
                Ok(read) => read,
                Err(status) => {
                    return error_pieces(status.message().to_owned(), String::new(), String::new()).map(Some);
                }
            };
            let (model_name, id) = (message.model_name.clone(), message.id.clone());
            let trace = trace::begin(&inference.traces, (Wire::Grpc, client), &model_name, began, &headers);
            if let Err(denied) = caller.check_model(&model_name) {
                return error_pieces(denied.to_string(), model_name, id).map(Some);
            }
            let answer = async {
                let (mut request, mut held) = read_request(client, message, held).await?;
                let empty_final = take_empty_final(&mut request)?;
                caller.mark(&mut request);
                rollout::mark(&*inference.service, &headers, &mut request);
                trace::received(trace.as_ref(), began.is_some(), &mut request);
                if inference.service.is_decoupled(&request.model_name, &request.model_version) {
                    let many = inference.many((client, codings.answers), request, held, empty_final, trace).await?;
                    // An error: the stream has ended, and this future with it.
                    let _ = begun.send(many);
                    return Ok::<_, ServiceError>(None);
                }
                let inferred =
                    extension::infer(&*inference.service, &inference.memory, client, request, &mut held).await;
                let response = tell(&trace, inferred)?;
                Ok(Some((response, trace)))
            };
            match answer.await {
                Ok(Some((response, trace))) => {
                    let message = marked(response, true);
                    let written = pieces(client, message, true, codings.answers, &inference.budget).await;
                    noted(&trace, written).inspect(|_| sent(&trace)).map(Some)
                }
                Ok(None) => Ok(None),
                Err(error) => error_pieces(error.to_string(), model_name, id).map(Some),
            }
        }));
    }

    fn refuse(&mut self, error: ServiceError) {
        let refused = error_pieces(error.to_string(), String::new(), String::new());
        self.running.push_back(Box::pin(std::future::ready(refused.map(Some))));
    }

    fn end(&mut self, failure: Option<Status>) {
        self.requests = None;
        self.failure = failure;
    }

    fn read(&mut self, context: &mut Context<'_>) {
        if self.requests.is_some() && self.drain.as_mut().poll(context).is_ready() {
            self.end(Some(Status::unavailable("the server is shutting down")));
        }
        while self.running.len() + self.many.len() < self.bound
            && let Some(requests) = &mut self.requests
        {
            match requests.poll_next(context) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok(Received::Message(message)))) => self.start(message),
                Poll::Ready(Some(Ok(Received::Refused(error)))) => self.refuse(error),
                Poll::Ready(Some(Err(status))) => self.end(Some(status)),
                Poll::Ready(None) => self.end(None),
            }
        }
    }
}

impl<S: Service, B> Stream for AnswerStream<S, B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Item = Result<Pieces, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            while let Poll::Ready(Some(many)) = self.begun.1.poll_recv(context) {
                self.many.push(many);
            }
            self.read(context);
            if let Poll::Ready(Some(answer)) = self.running.poll_next_unpin(context) {
                match answer.transpose() {
                    Some(answer) => return Poll::Ready(Some(answer)),
                    None => continue,
                }
            }
            let before = self.many.len();
            if let Poll::Ready(Some(answer)) = self.many.poll_next_unpin(context) {
                return Poll::Ready(Some(answer));
            }
            if self.requests.is_none() && self.running.is_empty() && self.many.is_empty() {
                return Poll::Ready(self.failure.take().map(Err));
            }
            // Answers that have ended make room for requests.
            if self.many.len() == before {
                return Poll::Pending;
            }
        }
    }
}

/// Whether the client asks for an answer that only tells the end. The model does not see the
/// parameter.
fn take_empty_final(request: &mut InferRequest) -> Result<bool, ServiceError> {
    match request.parameters.remove(EMPTY_FINAL) {
        None => Ok(false),
        Some(Parameter::Bool(wanted)) => Ok(wanted),
        Some(_) => Err(ServiceError::InvalidArgument(format!(
            "invalid value type for '{EMPTY_FINAL}' parameter, expected bool_param."
        ))),
    }
}

/// Notes the service's answer to a request in the request's trace.
fn tell<T>(trace: &Option<OpenTrace>, answer: Result<T, ServiceError>) -> Result<T, ServiceError> {
    if let Some(trace) = trace {
        trace.answered();
        if let Err(error) = &answer {
            let status = Status::from(error.clone());
            trace.outcome(status.code() as u16, Some(status.message()));
        }
    }
    answer
}

/// The last answer to a request is with the connection.
fn sent(trace: &Option<OpenTrace>) {
    trace.iter().for_each(|trace| trace.outcome(Code::Ok as u16, None));
}

/// The message of a response, with the mark of a request's last answer.
fn marked(response: InferResponse, is_final: bool) -> pb::ModelInferResponse {
    let mut message = response_to_message(response);
    let mark = pb::InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(is_final)) };
    message.parameters.insert(FINAL.into(), mark);
    message
}

impl<S: Service> Inference<S> {
    /// Begins a request to a decoupled model. `held` and `trace` stay until the answers end.
    async fn many(
        &self,
        (client, coding): (Client, Option<Coding>),
        request: InferRequest,
        held: Reservation,
        empty_final: bool,
        trace: Option<OpenTrace>,
    ) -> Result<ManyPieces, ServiceError> {
        let end = InferResponse {
            model_name: request.model_name.clone(),
            model_version: request.model_version.clone(),
            id: request.id.clone(),
            ..InferResponse::default()
        };
        let begun = extension::infer_many(&*self.service, &self.memory, client, request, held).await;
        let answers = tell(&trace, begun)?;
        let writer = Writer { client, coding, budget: Arc::clone(&self.budget), end, empty_final, trace };
        Ok(unfold(Some((answers, writer)), |state| async {
            let (mut answers, writer) = state?;
            loop {
                let step = answers.next().await?;
                if let Some(written) = writer.write(step.answer, step.is_final).await {
                    let rest = (!step.is_final).then_some((answers, writer));
                    return Some((written, rest));
                }
                if step.is_final {
                    return None;
                }
            }
        })
        .boxed())
    }
}

/// Writes the answers to one request.
struct Writer {
    client: Client,
    coding: Option<Coding>,
    budget: Arc<ByteBudget>,
    /// The answer that only tells the end.
    end: InferResponse,
    empty_final: bool,
    /// Ends with the answers.
    trace: Option<OpenTrace>,
}

impl Writer {
    /// The message of a step; `None` if the client does not want to be told.
    async fn write(
        &self,
        answer: Option<Result<InferResponse, ServiceError>>,
        is_final: bool,
    ) -> Option<Result<Pieces, Status>> {
        let answer = answer.map(|answer| tell(&self.trace, answer));
        if is_final {
            sent(&self.trace);
        }
        let response = match answer {
            Some(Ok(response)) => response,
            Some(Err(error)) => {
                let about = marked(self.end.clone(), is_final);
                return Some(stream_error_pieces(error.to_string(), about));
            }
            None if is_final && self.empty_final => self.end.clone(),
            None => return None,
        };
        Some(pieces(self.client, marked(response, is_final), true, self.coding, &self.budget).await)
    }
}
