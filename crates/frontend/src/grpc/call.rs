//! Calls for inferences: read, run and answered. tonic handles all other calls. Here it would copy
//! large tensors, which costs time and memory.

use std::sync::Arc;

use bytes::Bytes;
use downbeat_protocol::grpc::response_to_message;
use downbeat_service::budget::ByteBudget;
use downbeat_service::client::Client;
use downbeat_service::service::Service;
use downbeat_service::traces::Traces;
use downbeat_service::traces::open::OpenTrace;
use downbeat_service::traces::record::Wire;
use http::HeaderMap;
use http_body::Body;
use tokio::sync::watch;
use tonic::{Code, Status};

use super::answer::{self, AnswerBody};
use super::message::{self, Doorkeeper, MessageReader, Received, read_request};
use super::{GrpcOptions, timeout};
use crate::access::Caller;
use crate::compression::Coding;
use crate::extension;
use crate::shared_memory::SharedMemory;
use crate::{rollout, trace};

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
    pub traces: Arc<Traces>,
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
            traces: Arc::clone(&options.traces),
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
        let began = self.traces.began();
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
        let trace = trace::begin(&self.traces, (Wire::Grpc, client), &message.model_name, began, &head.headers);
        noted(&trace, caller.check_model(&message.model_name))?;
        let (mut request, mut held) = noted(&trace, read_request(client, message, held).await)?;
        timeout::bound(&mut request, timeout::call_timeout_us(&head.headers));
        caller.mark(&mut request);
        trace::mark(&*self.service, &head.headers, &mut request);
        rollout::mark(&*self.service, &head.headers, &mut request);
        trace::received(trace.as_ref(), began.is_some(), &mut request);
        let inferred = extension::infer(&*self.service, &self.memory, client, request, &mut held).await;
        let response = noted(&trace, inferred)?;
        if let Some(trace) = &trace {
            trace.answered();
        }
        let pieces = answer::pieces(client, response_to_message(response), false, codings.answers, &self.budget).await;
        let pieces = noted(&trace, pieces)?;
        let mut answer = answer::response(codings.answers, tonic::body::Body::new(AnswerBody::one(pieces)));
        if let Some(trace) = trace {
            trace::end(&trace, Code::Ok as u16, answer.headers_mut());
        }
        Ok(answer)
    }
}

/// Notes an error in the trace of its request.
pub(super) fn noted<T, E: Into<Status>>(trace: &Option<OpenTrace>, result: Result<T, E>) -> Result<T, Status> {
    result.map_err(|error| {
        let status = error.into();
        if let Some(trace) = trace {
            trace.outcome(status.code() as u16, Some(status.message()));
        }
        status
    })
}

pub(super) type Answer = http::Response<tonic::body::Body>;
