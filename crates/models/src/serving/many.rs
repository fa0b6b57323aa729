//! Requests to models that may give any number of answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_core::Time;
use downbeat_engine::{Answered, RunError, TakesAnswers};
use downbeat_host::request::batch_codec::Admitted;
use downbeat_protocol::{InferRequest, InferResponse};
use downbeat_service::answers::{AnswerSender, Answers, PATIENCE, StreamAnswer, channel};
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{InFlight, Origin, Serving, answer_parameters, response};
use crate::loaded_version::LoadedVersion;

/// Ends a request when its answers are dropped.
struct EndOnDrop(JoinHandle<()>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

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
        let (sender, answers) = channel(PATIENCE);
        let (early, failed) = oneshot::channel();
        let work = tokio::spawn(self.clone().answer_many(served, request, Arc::new(sender), early));
        let mut answers = answers.holding(EndOnDrop(work));
        tokio::select! {
            biased;
            Ok(error) = failed => return Err(error),
            () = answers.begun() => {}
        }
        Ok(answers)
    }

    async fn answer_many(
        self: Arc<Self>,
        served: InFlight,
        request: InferRequest,
        sender: Arc<AnswerSender>,
        early: oneshot::Sender<ServiceError>,
    ) {
        let wanted = request.outputs.iter().map(|output| output.name.clone()).collect();
        let (model, id) = (request.model_name.clone(), request.id.clone());
        let (clock, arrival) = (self.driver.clock(), self.now());
        let taker = |admitted: &Admitted, loaded: &Arc<LoadedVersion>| {
            let (sender, runtime) = (sender.clone(), Handle::current());
            let first = FirstAnswer { clock, arrival, has_come: AtomicBool::new(false) };
            let taker = Taker { sender, runtime, loaded: loaded.clone(), model, id, wanted, first };
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
    model: String,
    id: String,
    /// The names of the wanted outputs; empty: all.
    wanted: Vec<String>,
    first: FirstAnswer,
}

/// Measures the time until the first answer to a request.
struct FirstAnswer {
    clock: Clock,
    arrival: Time,
    has_come: AtomicBool,
}

impl FirstAnswer {
    /// An answer has come.
    fn came(&self, loaded: &LoadedVersion) {
        if !self.has_come.swap(true, Ordering::Relaxed) {
            loaded.record_first_answer(self.clock.now().since(self.arrival));
        }
    }
}

impl Taker {
    fn response(&self, answered: Answered, parameters: Option<String>) -> Result<InferResponse, ServiceError> {
        let codec = &self.loaded.codec;
        let outputs = codec.answered(answered).map_err(ServiceError::Internal)?;
        let request = InferRequest { model_name: self.model.clone(), id: self.id.clone(), ..InferRequest::default() };
        let mut response = response(request, codec, &self.loaded.version, None, outputs);
        if let Some(parameters) = parameters {
            response.parameters = answer_parameters(&parameters)?;
        }
        if !self.wanted.is_empty() {
            response.outputs.retain(|output| self.wanted.contains(&output.name));
        }
        Ok(response)
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
        if answer.is_some() {
            self.first.came(&self.loaded);
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
