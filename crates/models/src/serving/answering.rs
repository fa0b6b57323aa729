//! The answers of models that take requests: any number of them, and answers with parameters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_core::{Duration, Time};
use downbeat_engine::{Answered, RunError};
use downbeat_host::request::batch_codec::{BatchCodec, Outputs};
use downbeat_protocol::{InferRequest, InferResponse, Parameters};
use downbeat_service::answers::{AnswerSender, Answers, PATIENCE, StreamAnswer, channel};
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::intake::response;
use crate::loaded_version::LoadedVersion;

/// Ends a request when its answers are dropped.
struct EndOnDrop(JoinHandle<()>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Begins a request with any number of answers. `work` sends the answers. If `work` fails, the error
/// becomes the last answer. Dropping the answers ends the work.
///
/// # Errors
/// The error of `work`, if it has sent no answer.
pub async fn begin_many<W: Future<Output = Result<(), ServiceError>> + Send + 'static>(
    work: impl FnOnce(Arc<AnswerSender>) -> W,
) -> Result<Answers, ServiceError> {
    let (sender, answers) = channel(PATIENCE);
    let (early, failed) = oneshot::channel();
    let sender = Arc::new(sender);
    let work = work(sender.clone());
    let work = tokio::spawn(async move {
        match work.await {
            Ok(()) => {}
            Err(error) if sender.is_unused() => drop(early.send(error)),
            Err(error) => drop(sender.send(StreamAnswer::last(Err(error))).await),
        }
    });
    let mut answers = answers.holding(EndOnDrop(work));
    tokio::select! {
        biased;
        Ok(error) = failed => return Err(error),
        () = answers.begun() => {}
    }
    Ok(answers)
}

/// The form of the answers to a request of a decoupled model.
pub struct AnswerForm {
    model: String,
    id: String,
    /// The names of the wanted outputs; empty: all.
    wanted: Vec<String>,
}

impl AnswerForm {
    /// The form of the answers to this request.
    pub fn of(request: &InferRequest) -> Self {
        let wanted = request.outputs.iter().map(|output| output.name.clone()).collect();
        AnswerForm { model: request.model_name.clone(), id: request.id.clone(), wanted }
    }

    /// An answer with these outputs of a version, and with these parameters.
    pub fn answer(
        &self,
        (codec, version): (&BatchCodec, &str),
        outputs: Outputs,
        parameters: Option<Parameters>,
    ) -> InferResponse {
        let request = InferRequest { model_name: self.model.clone(), id: self.id.clone(), ..InferRequest::default() };
        let mut response = response(request, codec, version, None, outputs);
        response.parameters = parameters.unwrap_or_default();
        if !self.wanted.is_empty() {
            response.outputs.retain(|output| self.wanted.contains(&output.name));
        }
        response
    }
}

/// Measures the time until the first answer to a request.
pub struct FirstAnswer {
    clock: Clock,
    arrival: Time,
    has_come: AtomicBool,
}

impl FirstAnswer {
    /// The first answer to a request that came at `arrival`.
    pub fn of(clock: Clock, arrival: Time) -> Self {
        FirstAnswer { clock, arrival, has_come: AtomicBool::new(false) }
    }

    /// An answer has come. Returns the time since the request's arrival, if it is the first answer.
    pub fn came(&self) -> Option<Duration> {
        (!self.has_come.swap(true, Ordering::Relaxed)).then(|| self.clock.now().since(self.arrival))
    }

    /// The outputs of an answer of a loaded model, which counts its first answer.
    pub fn outputs(
        &self,
        loaded: &LoadedVersion,
        answer: Option<Result<Answered, RunError>>,
    ) -> Option<Result<Outputs, ServiceError>> {
        let answer = answer?;
        if let Some(after) = self.came() {
            loaded.record_first_answer(after);
        }
        Some(match answer {
            Ok(answered) => loaded.codec.answered(answered).map_err(ServiceError::Internal),
            Err(error) => Err(loaded.failed_answer(error)),
        })
    }
}

/// The parameters of a model's answer, which the model's code gives as a JSON object.
///
/// # Errors
/// If the text is no JSON object.
pub fn answer_parameters(json: &str) -> Result<Parameters, ServiceError> {
    serde_json::from_str(json)
        .map_err(|error| ServiceError::Internal(format!("the parameters of the model's answer are wrong: {error}")))
}
