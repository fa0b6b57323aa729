//! Requests of models' code to other models of this server. Such a request goes the way of all
//! requests, with the rest of the caller's time.

mod waits;

use std::sync::{Arc, OnceLock, Weak};

use downbeat_core::{Duration, Time};
use downbeat_engine::{Buffer, ErrorCode, Tensor};
use downbeat_protocol::{InferRequest, InferResponse, InferTensor, Parameter, Parameters, RequestedOutput};
use downbeat_python::{CallAnswer, Fault, ModelCall, Named, OnAnswer, OnCall, OpenCall};
use downbeat_service::answers::{Answers, StreamAnswer};
use downbeat_service::error::ServiceError;
use downbeat_service::unanswered::Unanswered;
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::serving::{Callers, InFlight, InPipeline, Serving, Within, unknown_model};
use waits::Waits;

/// Answers the calls of models' code.
pub struct Calls {
    /// Set once the server has one.
    serving: OnceLock<Weak<Serving>>,
    /// `None`: the process only looks at models.
    runtime: Option<Handle>,
    waits: Mutex<Waits>,
    callers: Callers,
}

/// A call that is under way.
struct Open {
    task: JoinHandle<()>,
    /// One permit for each answer that the code wants.
    wanted: Arc<Semaphore>,
}

impl OpenCall for Open {
    fn pull(&self) {
        self.wanted.add_permits(1);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A call without a server.
struct NoCall;

impl OpenCall for NoCall {
    fn pull(&self) {}
}

/// An instance that waits, until this is dropped.
struct Waiting {
    calls: Arc<Calls>,
    instance: u64,
    targets: Vec<String>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.calls.waits.lock().end(self.instance, &self.targets);
    }
}

impl Calls {
    /// Answers calls on the runtime of this thread.
    pub fn new() -> Arc<Calls> {
        Arc::new(Calls {
            serving: OnceLock::new(),
            runtime: Handle::try_current().ok(),
            waits: Mutex::default(),
            callers: Callers::default(),
        })
    }

    /// Sends the calls to these models from now on.
    pub fn serve(&self, serving: &Arc<Serving>) {
        let _ = self.serving.set(Arc::downgrade(serving));
    }

    /// Begins calls.
    pub fn on_call(self: &Arc<Self>) -> OnCall {
        let calls = self.clone();
        Arc::new(move |call, on_answer| calls.begin(call, on_answer))
    }

    fn begin(self: &Arc<Self>, call: ModelCall, mut on_answer: OnAnswer) -> Box<dyn OpenCall> {
        let Some(runtime) = &self.runtime else {
            let refused =
                ServiceError::Unavailable("no model is in service: calls are for models that serve".to_owned());
            // The caller may hold a lock that the answer takes.
            std::thread::spawn(move || on_answer(Some(Err(fault(&refused))), true));
            return Box::new(NoCall);
        };
        let wanted = Arc::new(Semaphore::new(1));
        let task = runtime.spawn(self.clone().run(call, on_answer, wanted.clone()));
        Box::new(Open { task, wanted })
    }

    async fn run(self: Arc<Self>, call: ModelCall, mut on_answer: OnAnswer, wanted: Arc<Semaphore>) {
        let waiting = if call.blocks { self.wait(&call).map(Some) } else { Ok(None) };
        let answers = match waiting {
            Ok(waiting) => self.ask(call).await.map(|answers| answers.holding(waiting)),
            Err(error) => Err(error),
        };
        let mut answers = match answers {
            Ok(answers) => answers,
            Err(error) => return on_answer(Some(Err(fault(&error))), true),
        };
        while let Some(StreamAnswer { answer, is_final }) = answers.next().await {
            // The semaphore is never closed.
            if let Ok(permit) = wanted.acquire().await {
                permit.forget();
            }
            let answer = answer.map(|answer| answer.and_then(answer_of).map_err(|error| fault(&error)));
            on_answer(answer, is_final);
            if is_final {
                return;
            }
        }
    }

    fn serving(&self) -> Result<Arc<Serving>, ServiceError> {
        let serving = self.serving.get().and_then(Weak::upgrade);
        serving.ok_or_else(|| ServiceError::Unavailable("the server is starting or stopping".to_owned()))
    }

    /// Notes that the caller's instance waits for the called model.
    fn wait(self: &Arc<Self>, call: &ModelCall) -> Result<Waiting, ServiceError> {
        let serving = self.serving()?;
        let instances =
            |model: &str| serving.get(model).map_or(usize::MAX, |model| model.definition.instances.max(1) as usize);
        let ModelCall { caller, model, instance, .. } = call;
        let targets = serving.models_behind(model);
        if self.waits.lock().begin(*instance, caller, &targets, instances) {
            return Ok(Waiting { calls: self.clone(), instance: *instance, targets });
        }
        Err(ServiceError::InvalidArgument(format!(
            "model '{caller}' would wait for itself: every instance of model '{model}' waits for an answer that depends \
             on this call; give the models more instances (instance_group count), or let no called model call back"
        )))
    }

    async fn ask(&self, call: ModelCall) -> Result<Answers, ServiceError> {
        let serving = self.serving()?;
        let (decoupled, caller, budget) = (call.decoupled, call.caller.clone(), call.budget_us);
        let request = request(call)?;
        let name = &request.model_name;
        let callee = match serving.enter(name) {
            Some(served) => Callee::Model(served),
            None => match serving.enter_pipeline(name) {
                Some(pipeline) => Callee::Ensemble(pipeline),
                None => {
                    let known: Vec<String> = serving.all().iter().map(|model| model.definition.name.clone()).collect();
                    return Err(ServiceError::NotFound(unknown_model(name, &known)));
                }
            },
        };
        let deadline = budget.map_or(Time::MAX, |us| serving.now() + Duration::from_micros(us));
        match (callee, decoupled) {
            (Callee::Model(served), true) if served.definition.config.is_decoupled() => {
                serving.infer_many(served, request).await
            }
            (Callee::Model(served), false) if served.definition.config.is_decoupled() => {
                Err(ServiceError::InvalidArgument(format!(
                    "model '{name}' is decoupled and may give any number of answers; call exec(decoupled=True), and \
                     iterate over the answers"
                )))
            }
            (callee, _) => self.infer(&serving, &callee, &caller, request, deadline).await.map(Answers::one),
        }
    }

    /// Asks a model for the code of `caller`. The call leaves a trail.
    async fn infer(
        &self,
        serving: &Serving,
        callee: &Callee,
        caller: &str,
        request: InferRequest,
        deadline: Time,
    ) -> Result<InferResponse, ServiceError> {
        let (mut trail, step) = serving.trail_of_call(&self.callers, (caller, &request.model_name), deadline);
        let (mark, of) = (trail.mark(step, serving.now()), (trail.number(), step));
        let within = Within {
            deadline,
            last: None,
            deadline_is_slo: false,
            is_alone: true,
            plan: None,
            mark,
            of,
            is_call: true,
        };
        let mut step = trail.reached(step, &within.mark, deadline);
        let result = match callee {
            Callee::Model(served) => serving.infer(served, request, Some(&within)).await,
            Callee::Ensemble(pipeline) => Box::pin(serving.infer_pipeline(pipeline, request, Some(&within))).await,
        };
        step.ended(&result);
        drop(step);
        match &result {
            Ok(_) => trail.answered(false),
            Err(error) => trail.failed(Unanswered::of(error)),
        }
        result
    }
}

/// The model that code calls.
enum Callee {
    Model(InFlight),
    Ensemble(InPipeline),
}

/// The request of a call.
fn request(call: ModelCall) -> Result<InferRequest, ServiceError> {
    let invalid = ServiceError::InvalidArgument;
    let mut parameters: Parameters = serde_json::from_str(&call.parameters).map_err(|error| {
        invalid(format!("the parameters of the request are no parameters of an inference: {error}"))
    })?;
    if let Some(budget) = call.budget_us {
        parameters.insert("timeout".to_owned(), Parameter::Uint64(budget.max(1)));
    }
    let input = |(name, tensor): Named| InferTensor {
        name,
        datatype: tensor.datatype,
        shape: tensor.shape.iter().map(|size| *size as i64).collect(),
        parameters: Parameters::default(),
        data: tensor.data.into_bytes(),
    };
    let output = |name| RequestedOutput { name, parameters: Parameters::default() };
    Ok(InferRequest {
        model_name: call.model,
        model_version: call.version,
        id: call.id,
        parameters,
        inputs: call.inputs.into_iter().map(input).collect(),
        outputs: call.outputs.into_iter().map(output).collect(),
    })
}

/// A response as the code of the caller gets it.
fn answer_of(response: InferResponse) -> Result<CallAnswer, ServiceError> {
    let parameters = (!response.parameters.is_empty()).then(|| serde_json::to_string(&response.parameters));
    let output = |output: InferTensor| {
        let shape: Option<Vec<usize>> = output.shape.iter().map(|size| usize::try_from(*size).ok()).collect();
        let lost = || ServiceError::Internal(format!("output '{}' has the shape {:?}", output.name, output.shape));
        let (datatype, shape) = (output.datatype, shape.ok_or_else(lost)?);
        Ok((output.name, Tensor { datatype, shape, data: Buffer::from_bytes(output.data) }))
    };
    let outputs = response.outputs.into_iter().map(output).collect::<Result<_, _>>()?;
    Ok(CallAnswer { outputs, parameters: parameters.and_then(Result::ok) })
}

/// An error in the form of `TritonError`.
fn fault(error: &ServiceError) -> Fault {
    let code = match error {
        ServiceError::InvalidArgument(_) | ServiceError::TooLarge(_) => ErrorCode::InvalidArgument,
        ServiceError::NotFound(_) => ErrorCode::NotFound,
        ServiceError::AlreadyExists(_) => ErrorCode::AlreadyExists,
        ServiceError::QueueFull { .. }
        | ServiceError::TooMany { .. }
        | ServiceError::DeadlineExceeded(_)
        | ServiceError::Unavailable(_) => ErrorCode::Unavailable,
        ServiceError::Unimplemented(_) | ServiceError::Decoupled(_) => ErrorCode::Unsupported,
        ServiceError::Internal(_) => ErrorCode::Internal,
    };
    Fault { reason: error.to_string(), code: code as u32 }
}
