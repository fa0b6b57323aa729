//! Requests at a frontend to models that give any number of answers. The answers come from the backend
//! one by one, while the request runs and after its run.

use std::sync::Arc;

use downbeat_core::RequestId;
use downbeat_models::serving::{AnswerForm, FirstAnswer, begin_many};
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_roles::MOST_STREAMED;
use downbeat_service::answers::{AnswerSender, Answers, MOST_BYTES, NoReader, StreamAnswer};
use downbeat_service::error::ServiceError;
use tokio::sync::mpsc;

use super::frontend_role::{FrontendEvent, StreamedAnswer};
use super::remote_models::RemoteVersion;
use super::remote_serving::{Asking, RemoteServing};
use crate::wire::about::take_parameters;
use crate::wire::tensors::Tensors;

/// After so many answers, or bytes of them, the backend hears that the client has taken them. These are
/// quarters of its limits, so that the model's code does not wait for a client that reads.
const ROOM_AFTER: u32 = MOST_STREAMED as u32 / 4;
const ROOM_AFTER_BYTES: u64 = MOST_BYTES as u64 / 4;

/// Runs an inference of a decoupled model. The model's deadline and the request's timeout hold until the
/// run is over. Dropping the answers cancels the request.
///
/// # Errors
/// Any [`ServiceError`], if the request ends before its first answer without the model's doing.
pub(super) async fn infer_many(serving: Arc<RemoteServing>, request: InferRequest) -> Result<Answers, ServiceError> {
    begin_many(|sender| async move { run(&serving, request, &sender).await }).await
}

/// Runs a request until its last answer, or until no reader is left.
async fn run(serving: &RemoteServing, request: InferRequest, sender: &AnswerSender) -> Result<(), ServiceError> {
    let _in_flight = serving.enter_long();
    let (model, arrival, number) = (serving.model(&request)?, serving.clock().now(), serving.number());
    let version = model.version(&request.model_name, &request.model_version)?;
    let (stream, answers) = mpsc::channel(MOST_STREAMED);
    let first = FirstAnswer::of(serving.clock(), arrival);
    let passing = Passing { serving, number, version, form: AnswerForm::of(&request), first, has_ended: false };
    let log = serving.log();
    let trail = log.map(|log| log.begin(RequestId(number), &request));
    let asking = Asking { number, trail: trail.as_ref(), stream: Some(stream) };
    let (result, passed) = {
        let mut runs = std::pin::pin!(serving.infer_of(&model, (arrival, None), request, asking));
        let mut passes = std::pin::pin!(passing.pass_on(answers, sender));
        tokio::select! {
            biased;
            passed = &mut passes => match passed {
                // The client has left.
                Err(NoReader) => return Ok(()),
                Ok(has_ended) => (runs.await, Ok(has_ended)),
            },
            result = &mut runs => (result, passes.await),
        }
    };
    if let Some(trail) = trail {
        trail.ended(&result);
    }
    result?;
    match passed {
        Ok(true) | Err(NoReader) => Ok(()),
        Ok(false) => Err(ServiceError::Unavailable(format!(
            "the backend sent more answers to this request of model '{}' than the client had room for",
            version.name
        ))),
    }
}

/// Passes on the answers to a request. Cancels the request if it is dropped before the last answer.
struct Passing<'a> {
    serving: &'a RemoteServing,
    number: u64,
    version: &'a RemoteVersion,
    form: AnswerForm,
    first: FirstAnswer,
    /// The last answer has come, or the request has failed.
    has_ended: bool,
}

impl Passing<'_> {
    /// Passes on all answers. Returns false if the last answer is missing.
    async fn pass_on(
        mut self,
        mut answers: mpsc::Receiver<StreamedAnswer>,
        sender: &AnswerSender,
    ) -> Result<bool, NoReader> {
        let (mut taken, mut bytes) = (0, 0);
        while let Some(StreamedAnswer { answer, is_last }) = answers.recv().await {
            bytes += answer.as_ref().and_then(|answer| answer.as_ref().ok()).map_or(0, Tensors::bytes);
            if let Some(after) = answer.as_ref().and_then(|_| self.first.came()) {
                self.version.record_first_answer(after);
            }
            let answer = answer.map(|answer| answer.and_then(|outputs| self.response(outputs)));
            self.has_ended |= is_last;
            sender.send(StreamAnswer { answer, is_final: is_last }).await?;
            if is_last {
                return Ok(true);
            }
            taken += 1;
            if taken >= ROOM_AFTER || bytes >= ROOM_AFTER_BYTES {
                self.serving.hand_over(FrontendEvent::Room(self.number, taken));
                (taken, bytes) = (0, 0);
            }
        }
        Ok(false)
    }

    fn response(&self, outputs: Tensors) -> Result<InferResponse, ServiceError> {
        let codec = &self.version.definition.codec;
        let mut outputs = outputs.into_iter().collect();
        let parameters = take_parameters(codec, &mut outputs)?;
        Ok(self.form.answer((codec, &self.version.version), outputs, parameters))
    }
}

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.serving.cancel(self.number);
        }
    }
}
