//! Calls for inferences: read, run and answered. tonic handles all other calls. Here it would copy
//! large tensors, which costs time and memory.

use std::sync::Arc;

use bytes::Bytes;
use downbeat_protocol::grpc::response_to_message;
use downbeat_service::budget::ByteBudget;
use downbeat_service::client::Client;
use downbeat_service::service::Service;
use http::HeaderMap;
use http_body::Body;
use tokio::sync::watch;
use tonic::Status;

use super::answer::{self, AnswerBody};
use super::message::{self, Doorkeeper, MessageReader, Received, read_request};
use super::{GrpcOptions, timeout};
use crate::access::Caller;
use crate::compression::Coding;
use crate::extension;
use crate::shared_memory::SharedMemory;
use crate::trace;

/// The codings of a call.
#[derive(Clone, Copy)]
pub(super) struct Codings {
    pub requests: Option<Coding>,
    pub answers: Option<Coding>,
}

impl Codings {
    pub fn of(headers: &HeaderMap) -> Result<Self, Status> {
        let requests = message::coding(headers)?;
        Ok(Codings { requests, answers: answer::coding_of_answers(headers, requests) })
    }
}

/// Answers inferences.
pub(super) struct Inference<S> {
    pub service: Arc<S>,
    pub memory: Arc<SharedMemory>,
    pub budget: Arc<ByteBudget>,
    /// Largest message, bytes.
    pub limit: usize,
    /// Most requests of one stream at once.
    pub max_stream_requests: usize,
    doorkeeper: Doorkeeper,
    pub draining: watch::Receiver<bool>,
}

impl<S: Service> Inference<S> {
    pub fn new(
        service: Arc<S>,
        memory: Arc<SharedMemory>,
        options: &GrpcOptions,
        draining: watch::Receiver<bool>,
    ) -> Self {
        let of_doorkeeper = Arc::clone(&service);
        Inference {
            doorkeeper: Arc::new(move |name| of_doorkeeper.check_model(name, "")),
            service,
            memory,
            budget: Arc::clone(&options.budget),
            limit: options.max_message_bytes,
            max_stream_requests: options.max_stream_requests,
            draining,
        }
    }

    /// The messages of a call.
    pub fn reader<B>(&self, caller: &Caller, body: B, codings: Codings) -> MessageReader<B>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let coded = codings.requests.is_some();
        // A caller of some models must not learn which others there are.
        let doorkeeper = (!caller.is_limited()).then(|| Arc::clone(&self.doorkeeper));
        MessageReader::new(body, self.limit, coded, Arc::clone(caller.budget(&self.budget)), doorkeeper)
    }

    /// Answers `ModelInfer`. Dropping the future cancels the request.
    pub async fn call<B>(
        self: Arc<Self>,
        (client, caller): (Client, Caller),
        call: http::Request<B>,
    ) -> Result<Answer, Status>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (head, body) = call.into_parts();
        let codings = Codings::of(&head.headers)?;
        // The reader is kept until the answer is ready: bytes that the client sends behind its
        // message are not an error.
        let mut reader = self.reader(&caller, body, codings);
        let message = match reader.next().await {
            Some(Ok(Received::Message(message))) => message,
            Some(Ok(Received::Refused(error))) => return Err(error.into()),
            Some(Err(status)) => return Err(status),
            None => return Err(Status::internal("the call ended without a message; expected a ModelInferRequest")),
        };
        let (message, held) = message.inference(client, codings.requests, self.limit).await?;
        caller.check_model(&message.model_name)?;
        let (mut request, mut held) = read_request(client, message, held).await?;
        timeout::bound(&mut request, timeout::call_timeout_us(&head.headers));
        caller.mark(&mut request);
        trace::mark(&*self.service, &head.headers, &mut request);
        let response = extension::infer(&*self.service, &self.memory, client, request, &mut held).await?;
        let pieces =
            answer::pieces(client, response_to_message(response), false, codings.answers, &self.budget).await?;
        Ok(answer::response(codings.answers, tonic::body::Body::new(AnswerBody::one(pieces))))
    }
}

pub(super) type Answer = http::Response<tonic::body::Body>;
