//! The answers of one `ModelStreamInfer` stream.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use downbeat_protocol::grpc::{request_from_message, response_to_message};
use downbeat_protocol::inference::infer_parameter::ParameterChoice;
use downbeat_protocol::inference::{InferParameter, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse};
use futures_core::Stream;
use futures_core::future::BoxFuture;
use futures_util::stream::{FuturesOrdered, StreamExt};
use tokio::sync::watch;
use tonic::{Code, Status, Streaming};

use super::frontend::too_large;
use crate::budget::ByteBudget;
use crate::error::ServiceError;
use crate::extension;
use crate::service::Service;
use crate::shared_memory::{Client, SharedMemory};

/// Says of an answer in a stream that no other follows for the same request.
const FINAL: &str = "triton_final_response";

/// Runs a stream's requests side by side and gives their answers in the order of the requests (as Triton does for
/// models that give one answer a request). A request that fails is answered with its error, and the stream goes on.
///
/// At most `bound` requests are under way; further ones stay unread. Dropping this (the client has gone) drops their
/// futures, which cancels them.
pub(super) struct AnswerStream<S> {
    service: Arc<S>,
    memory: Arc<SharedMemory>,
    client: Client,
    budget: Arc<ByteBudget>,
    requests: Streaming<ModelInferRequest>,
    running: FuturesOrdered<BoxFuture<'static, ModelStreamInferResponse>>,
    bound: usize,
    /// Largest message, bytes.
    limit: usize,
    /// Nothing more is read: the client is done, the stream is broken, or the server drains.
    ended: bool,
    /// What the stream ends with, after the answers.
    failure: Option<Status>,
    drain: BoxFuture<'static, ()>,
}

impl<S: Service> AnswerStream<S> {
    pub(super) fn new(
        service: Arc<S>,
        memory: Arc<SharedMemory>,
        client: Client,
        budget: Arc<ByteBudget>,
        requests: Streaming<ModelInferRequest>,
        bound: usize,
        limit: usize,
        draining: watch::Receiver<bool>,
    ) -> Self {
        AnswerStream {
            service,
            memory,
            client,
            budget,
            requests,
            running: FuturesOrdered::new(),
            bound: bound.max(1),
            limit,
            ended: false,
            failure: None,
            drain: Box::pin(super::drained(draining)),
        }
    }

    fn start(&mut self, message: ModelInferRequest) {
        let service = Arc::clone(&self.service);
        let memory = Arc::clone(&self.memory);
        let client = self.client;
        let mut held = self.budget.reservation();
        self.running.push_back(Box::pin(async move {
            let (model_name, id) = (message.model_name.clone(), message.id.clone());
            let answer = async {
                let request =
                    request_from_message(message).map_err(|error| ServiceError::InvalidArgument(error.to_string()))?;
                extension::infer(&*service, &memory, client, request, &mut held).await
            };
            match answer.await {
                Ok(response) => {
                    let mut response = response_to_message(response);
                    let yes = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(true)) };
                    response.parameters.insert(FINAL.into(), yes);
                    ModelStreamInferResponse { error_message: String::new(), infer_response: Some(response) }
                }
                // The id tells the client which request it was.
                Err(error) => ModelStreamInferResponse {
                    error_message: error.to_string(),
                    infer_response: Some(ModelInferResponse { model_name, id, ..Default::default() }),
                },
            }
        }));
    }

    fn end(&mut self, failure: Option<Status>) {
        self.ended = true;
        self.failure = failure;
    }

    fn read(&mut self, context: &mut Context<'_>) {
        if !self.ended && self.drain.as_mut().poll(context).is_ready() {
            self.end(Some(Status::unavailable("the server is shutting down")));
        }
        while !self.ended && self.running.len() < self.bound {
            match Pin::new(&mut self.requests).poll_next(context) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok(message))) => self.start(message),
                Poll::Ready(None) => self.end(None),
                Poll::Ready(Some(Err(status))) if status.code() == Code::OutOfRange => {
                    self.end(Some(too_large(self.limit)));
                }
                Poll::Ready(Some(Err(status))) => self.end(Some(status)),
            }
        }
    }
}

impl<S: Service> Stream for AnswerStream<S> {
    type Item = Result<ModelStreamInferResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.read(context);
        match self.running.poll_next_unpin(context) {
            Poll::Ready(Some(answer)) => Poll::Ready(Some(Ok(answer))),
            Poll::Ready(None) if self.ended => Poll::Ready(self.failure.take().map(Err)),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}
