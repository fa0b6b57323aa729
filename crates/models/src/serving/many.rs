//! Requests to models that may give any number of answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_core::{Duration, Time};
use downbeat_engine::{Answered, RunError, TakesAnswers};
use downbeat_host::request::batch_codec::{Admitted, BatchCodec, Outputs};
use downbeat_protocol::{InferRequest, InferResponse, Parameters};
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

/// Begins a request with any number of answers. `work` sends the answers, or one error before the
/// first answer. Dropping the answers ends the work.
///
/// # Errors
/// The error before the first answer.
pub async fn begin_many<W: Future<Output = ()> + Send + 'static>(
    work: impl FnOnce(AnswerSender, oneshot::Sender<ServiceError>) -> W,
) -> Result<Answers, ServiceError> {
    let (sender, answers) = channel(PATIENCE);
    let (early, failed) = oneshot::channel();
    let work = tokio::spawn(work(sender, early));
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
