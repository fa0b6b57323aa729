//! Requests to models that may give any number of answers.

use std::sync::Arc;

use downbeat_engine::{Answered, RunError, TakesAnswers};
use downbeat_host::request::batch_codec::Admitted;
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_service::answers::{AnswerSender, Answers, StreamAnswer};
use downbeat_service::error::ServiceError;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::answering::{AnswerForm, FirstAnswer, answer_parameters, begin_many};
use super::{InFlight, Origin, Serving};
use crate::loaded_version::LoadedVersion;

impl Serving {
    /// Runs an inference of a decoupled model. The model's deadline and the request's timeout hold
    /// until `execute` returns. Dropping the answers cancels the request.
    ///
    /// # Errors
    /// Any [`ServiceError`], if the request ends before its first answer without the model's doing.
    pub async fn infer_many(
        self: &Arc<Self>,
        served: InFlight,
        request: InferRequest,
    ) -> Result<Answers, ServiceError> {
        begin_many(|sender, early| self.clone().answer_many(served, request, Arc::new(sender), early)).await
    }

    async fn answer_many(
        self: Arc<Self>,
        served: InFlight,
        request: InferRequest,
        sender: Arc<AnswerSender>,
        early: oneshot::Sender<ServiceError>,
    ) {
        let form = AnswerForm::of(&request);
        let arrival = self.now();
        let first = FirstAnswer::of(self.driver.clock(), arrival);
        let taker = |admitted: &Admitted, loaded: &Arc<LoadedVersion>| {
            let (sender, runtime) = (sender.clone(), Handle::current());
            let taker = Taker { sender, runtime, loaded: loaded.clone(), form, first };
            if let Some(about) = &admitted.about {
                let _ = about.answers.0.set(Arc::new(taker));
            }
        };
        let trail = self.request_trail(&request);
        let origin = Origin { arrival, within: None, trail: trail.clone(), is_copy: false };
        let result = self.infer_to(&served, request, origin, taker).await;
        if let Some(trail) = trail {
            trail.ended(&result);
        }
        match result {
            // The code may go on: its answers are sent by the taker.
            Ok(_) => sender.closed().await,
            Err(error) if sender.is_unused() => drop(early.send(error)),
            Err(error) => drop(sender.send(StreamAnswer::last(Err(error))).await),
        }
    }
}

/// Takes the answers to a request of a client.
struct Taker {
    sender: Arc<AnswerSender>,
    runtime: Handle,
    loaded: Arc<LoadedVersion>,
    form: AnswerForm,
    first: FirstAnswer,
}

impl Taker {
    fn response(&self, answered: Answered, parameters: Option<String>) -> Result<InferResponse, ServiceError> {
        let codec = &self.loaded.codec;
        let outputs = codec.answered(answered).map_err(ServiceError::Internal)?;
        let parameters = parameters.as_deref().map(answer_parameters).transpose()?;
        Ok(self.form.answer((codec, &self.loaded.version), outputs, parameters))
    }
}

impl TakesAnswers for Taker {
    fn take(
        &self,
        answer: Option<Result<Answered, RunError>>,
        parameters: Option<String>,
        is_final: bool,
        done: Box<dyn FnOnce(bool) + Send>,
    ) {
        if let Some(after) = answer.as_ref().and_then(|_| self.first.came()) {
            self.loaded.record_first_answer(after);
        }
        let answer = answer.map(|answer| match answer {
            Ok(answered) => self.response(answered, parameters),
            Err(error) => Err(self.loaded.failed_answer(error)),
        });
        let sender = self.sender.clone();
        self.runtime.spawn(async move {
            let sent = sender.send(StreamAnswer { answer, is_final }).await;
            done(sent.is_ok() && !is_final);
        });
    }

    fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }
}
