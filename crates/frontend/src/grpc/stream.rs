//! The answers of one `ModelStreamInfer` stream.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use downbeat_protocol::grpc::response_to_message;
use downbeat_protocol::inference::InferParameter;
use downbeat_protocol::inference::infer_parameter::ParameterChoice;
use downbeat_service::client::Client;
use downbeat_service::error::ServiceError;
use downbeat_service::service::Service;
use futures_core::Stream;
use futures_core::future::BoxFuture;
use futures_util::stream::{FuturesOrdered, StreamExt};
use http_body::Body;
use tonic::Status;

use super::answer::{AnswerBody, Pieces, error_pieces, pieces, response};
use super::call::{Answer, Codings, Inference};
use super::message::{MessageReader, RawMessage, Received, read_request};
use crate::extension;

/// Marks the last answer of a request in a stream.
const FINAL: &str = "triton_final_response";

/// Runs a stream's requests side by side and gives their answers in the order of the requests.
/// Triton does the same for models that give one answer to each request. A request that fails is
/// answered with its error, and the stream goes on.
///
/// At most `bound` requests are under way; further ones stay unread. If the client has gone,
/// dropping the stream drops their futures, which cancels them.
pub(super) struct AnswerStream<S, B> {
    inference: Arc<Inference<S>>,
    client: Client,
    codings: Codings,
    /// `None`: nothing more is read. The client is done, the stream is broken, or the server
    /// drains.
    requests: Option<MessageReader<B>>,
    running: FuturesOrdered<BoxFuture<'static, Result<Pieces, Status>>>,
    bound: usize,
    /// The error that ends the stream, after the answers.
    failure: Option<Status>,
    drain: BoxFuture<'static, ()>,
}

impl<S: Service> Inference<S> {
    /// Answers `ModelStreamInfer`.
    pub fn stream<B>(self: Arc<Self>, client: Client, call: http::Request<B>) -> Result<Answer, Status>
    where
        B: Body<Data = Bytes> + Unpin + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (head, body) = call.into_parts();
        let codings = Codings::of(&head.headers)?;
        let reader = self.reader(body, codings);
        let answers = AnswerStream {
            client,
            codings,
            requests: Some(reader),
            running: FuturesOrdered::new(),
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
        self.running.push_back(Box::pin(async move {
            let (message, held) = match message.inference(client, codings.requests, inference.limit).await {
                Ok(read) => read,
                Err(status) => return error_pieces(status.message().to_owned(), String::new(), String::new()),
            };
            let (model_name, id) = (message.model_name.clone(), message.id.clone());
            let answer = async {
                let (request, mut held) = read_request(client, message, held).await?;
                extension::infer(&*inference.service, &inference.memory, client, request, &mut held).await
            };
            match answer.await {
                Ok(response) => {
                    let mut response = response_to_message(response);
                    let yes = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(true)) };
                    response.parameters.insert(FINAL.into(), yes);
                    pieces(client, response, true, codings.answers, &inference.budget).await
                }
                Err(error) => error_pieces(error.to_string(), model_name, id),
            }
        }));
    }

    fn refuse(&mut self, error: ServiceError) {
        let refused = error_pieces(error.to_string(), String::new(), String::new());
        self.running.push_back(Box::pin(std::future::ready(refused)));
    }

    fn end(&mut self, failure: Option<Status>) {
        self.requests = None;
        self.failure = failure;
    }

    fn read(&mut self, context: &mut Context<'_>) {
        if self.requests.is_some() && self.drain.as_mut().poll(context).is_ready() {
            self.end(Some(Status::unavailable("the server is shutting down")));
        }
        while self.running.len() < self.bound
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
        self.read(context);
        match self.running.poll_next_unpin(context) {
            Poll::Ready(Some(answer)) => Poll::Ready(Some(answer)),
            Poll::Ready(None) if self.requests.is_none() => Poll::Ready(self.failure.take().map(Err)),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}
