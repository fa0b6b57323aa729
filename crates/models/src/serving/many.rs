//! Requests to models that may give any number of answers.

use std::sync::Arc;

use downbeat_engine::{Answered, RunError, TakesAnswers};
use downbeat_host::request::batch_codec::{Admitted, Outputs};
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_service::answers::{AnswerSender, Answers, StreamAnswer};
use downbeat_service::error::ServiceError;
use tokio::runtime::Handle;

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
        begin_many(|sender| self.clone().answer_many(served, request, sender)).await
    }

    async fn answer_many(
        self: Arc<Self>,
        served: InFlight,
        request: InferRequest,
        sender: Arc<AnswerSender>,
    ) -> Result<(), ServiceError> {
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
        result?;
        // The code may go on: its answers are sent by the taker.
        sender.closed().await;
        Ok(())
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
    fn response(&self, outputs: Outputs, parameters: Option<String>) -> Result<InferResponse, ServiceError> {
        let parameters = parameters.as_deref().map(answer_parameters).transpose()?;
        Ok(self.form.answer((&self.loaded.codec, &self.loaded.version), outputs, parameters))
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
        let outputs = self.first.outputs(&self.loaded, answer);
        let answer = outputs.map(|outputs| outputs.and_then(|outputs| self.response(outputs, parameters)));
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
