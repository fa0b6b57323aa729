//! The common part of a request's way, wherever its model runs: checks it, sets its limits, and
//! puts its answer together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_core::cluster::TimeoutAction;
use downbeat_core::tensor::DataType;
use downbeat_core::{Duration, Time};
use downbeat_host::request::batch_codec::{Admitted, BatchCodec, OutputPart, Outputs};
use downbeat_host::request::reply::Answered;
use downbeat_protocol::{InferRequest, InferResponse, InferTensor, Parameter};
use downbeat_repository::{Batching, TensorBinding};
use downbeat_service::budget::ByteBudget;
use downbeat_service::error::ServiceError;
use downbeat_service::tenants::TENANT;
use downbeat_service::work::offload;
use tokio::sync::oneshot;

/// When to try again after a model's share of the budget of bytes was used up.
pub const RETRY_AFTER: Duration = Duration::from_millis(1_000);

/// The demands of a model version on its requests.
pub struct Wishes<'a> {
    /// The tensors of its requests.
    pub codec: &'a Arc<BatchCodec>,
    /// The queueing of its requests.
    pub batching: &'a Batching,
    /// From arrival to answer.
    pub slo: Option<Duration>,
}

/// The demands of a request.
pub struct Looked {
    /// Positions of the wanted outputs, in the request's order; `None`: all.
    pub wanted: Option<Vec<usize>>,
    /// When it has to be answered.
    pub limits: Limits,
}

/// When a request has to be answered.
pub struct Limits {
    /// The model's SLO or the request's own timeout, the earlier of both; [`Time::MAX`]: at any
    /// time.
    /// time.
    pub deadline: Time,
    /// Whether that is the SLO.
    pub deadline_is_slo: bool,
    /// The client's own timeout, if it is a deadline; under `timeout_action: DELAY` it limits the
    /// time in the queue alone.
    pub timeout: Option<Duration>,
    /// When it has been in a queue for too long; [`Time::MAX`]: never.
    pub queue_expiry: Time,
    /// Index of its priority level, 0 the most urgent.
    pub level: u32,
    /// The tenant of its key; `None`: the server has no tenants.
    pub tenant: Option<Box<str>>,
}

/// The demands in a request's parameters.
#[derive(Default)]
struct Demands {
    priority: u64,
    timeout: Option<u64>,
    tenant: Option<Box<str>>,
}

impl Demands {
    fn of(request: &InferRequest) -> Result<Self, ServiceError> {
        if request.parameters.is_empty() {
            return Ok(Demands::default());
        }
        let tenant = match request.parameters.get(TENANT) {
            Some(Parameter::String(name)) => Some(name.as_str().into()),
            _ => None,
        };
        let priority = unsigned(request, "priority")?.unwrap_or(0);
        Ok(Demands { priority, timeout: unsigned(request, "timeout")?, tenant })
    }
}

impl Wishes<'_> {
    /// Reads the demands of a request that came at `arrival`.
    ///
    /// # Errors
    /// `InvalidArgument`, with the expected value.
    pub fn look(&self, request: &InferRequest, arrival: Time) -> Result<Looked, ServiceError> {
        Ok(Looked { wanted: wanted_outputs(self.codec, request)?, limits: self.limits(request, arrival)? })
    }

    /// Takes the inputs out of a request. Returns them and the rest of it.
    ///
    /// # Errors
    /// `InvalidArgument`, with the expected value.
    pub async fn admit(&self, mut request: InferRequest) -> Result<(Admitted, InferRequest), ServiceError> {
        // Counting the elements of BYTES inputs takes time for each element.
        let strings = request.inputs.iter().filter(|input| input.datatype == DataType::Bytes);
        let length = strings.map(|input| input.data.len()).sum::<usize>();
        if length >= offload::PARSE_FROM {
            let codec = Arc::clone(self.codec);
            let admit = move || codec.admit(&mut request).map(|admitted| (admitted, request));
            return offload::run(offload::sender(), length, admit).await?;
        }
        Ok((self.codec.admit(&mut request)?, request))
    }

    /// Sets deadline, queue timeout and priority of a request in one place, from the client's
    /// wishes, the model's queue policy and its SLO.
    fn limits(&self, request: &InferRequest, arrival: Time) -> Result<Limits, ServiceError> {
        let Demands { priority, timeout, tenant } = Demands::of(request)?;
        let level = self.batching.level_of(priority);
        let mut timeout = timeout.filter(|us| *us > 0).map(Duration::from_micros);
        let mut queue_timeout = Duration::ZERO;
        if let Some(policy) = self.batching.levels.get(level) {
            let delays = policy.timeout_action == TimeoutAction::Delay;
            queue_timeout = policy.default_timeout;
            // If requests are rejected and the policy has no timeout, a request's own timeout is
            // only its deadline.
            if let Some(own) = timeout.filter(|_| policy.allow_timeout_override)
                && (delays || queue_timeout > Duration::ZERO)
            {
                queue_timeout = if queue_timeout == Duration::ZERO { own } else { queue_timeout.min(own) };
            }
            // A request that is late in the queue goes behind the others, and is answered.
            timeout = timeout.filter(|_| !delays);
        }
        let queue_expiry = if queue_timeout == Duration::ZERO { Time::MAX } else { arrival + queue_timeout };
        let slo_deadline = self.slo.map_or(Time::MAX, |slo| arrival + slo);
        let timeout_deadline = timeout.map_or(Time::MAX, |timeout| arrival + timeout);
        Ok(Limits {
            deadline: slo_deadline.min(timeout_deadline),
            deadline_is_slo: slo_deadline <= timeout_deadline,
            timeout,
            queue_expiry,
            level: u32::try_from(level).unwrap_or(0),
            tenant,
        })
    }
}

impl Limits {
    /// Waits for the answer within the client's own timeout. `passed` is the time since the
    /// arrival, and is called only for a request with a timeout. The scheduler drops a request that
    /// cannot make its deadline. So this ends only the rare request that started and overran.
    /// `None`: the request overran.
    pub async fn wait(
        &self,
        answer: oneshot::Receiver<Answered>,
        passed: impl FnOnce() -> Duration,
    ) -> Option<Answered> {
        let answer = match self.timeout {
            None => answer.await,
            Some(timeout) => tokio::time::timeout(timeout.saturating_sub(passed()).into(), answer).await.ok()?,
        };
        let lost = || ServiceError::Internal("the request was lost: this is a defect".to_owned());
        Some(answer.unwrap_or_else(|_| Answered { answer: Err(lost()), miss: None }))
    }

    /// The error of a request that overran its timeout.
    pub fn overrun(&self, model: &str) -> ServiceError {
        let timeout = self.timeout.unwrap_or(Duration::ZERO);
        ServiceError::DeadlineExceeded(format!(
            "model '{model}' did not finish within the request's timeout of {timeout}"
        ))
    }
}

/// The bytes that a request's inputs take of its model's share, until it is answered.
pub struct InputBytes<'a>(&'a AtomicU64, u64);

impl Drop for InputBytes<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

/// Bounds the queue of a model by bytes. Its requests in flight, which `held` counts, hold at most
/// half of the budget, so that the other models always have room. A single request is always let
/// in.
///
/// # Errors
/// `QueueFull`.
pub fn hold_inputs<'a>(
    budget: &ByteBudget,
    held: &'a AtomicU64,
    model: &str,
    bytes: u64,
) -> Result<InputBytes<'a>, ServiceError> {
    let share = budget.limit() / 2;
    let before = held.fetch_add(bytes, Ordering::Relaxed);
    let inputs = InputBytes(held, bytes);
    if before == 0 || before.saturating_add(bytes) <= share {
        return Ok(inputs);
    }
    Err(ServiceError::QueueFull {
        message: format!(
            "Exceeds maximum queue size: the inputs of the requests of model '{model}' in flight are {before} bytes, and it may have {share}, half of \
             --max-in-flight-bytes; try again later"
        ),
        retry_after: RETRY_AFTER,
    })
}

/// Positions of the outputs that a request asks for, in its order; `None`: all.
fn wanted_outputs(codec: &BatchCodec, request: &InferRequest) -> Result<Option<Vec<usize>>, ServiceError> {
    if request.outputs.is_empty() {
        return Ok(None);
    }
    let outputs = &codec.outputs;
    let mut wanted = Vec::with_capacity(request.outputs.len());
    for output in &request.outputs {
        let Some(position) = outputs.iter().position(|o| o.client.name == output.name) else {
            let names: Vec<&str> = outputs.iter().map(|o| o.client.name.as_str()).collect();
            return Err(ServiceError::InvalidArgument(format!(
                "unexpected inference output '{}' for model '{}'; its outputs are {names:?}",
                output.name.chars().take(128).collect::<String>(),
                request.model_name
            )));
        };
        if wanted.contains(&position) {
            return Err(ServiceError::InvalidArgument(format!(
                "Duplicate output name '{}' is not allowed in a request",
                output.name
            )));
        }
        wanted.push(position);
    }
    Ok(Some(wanted))
}

/// An unsigned number among the request's parameters.
fn unsigned(request: &InferRequest, name: &str) -> Result<Option<u64>, ServiceError> {
    let value = match request.parameters.get(name) {
        None => return Ok(None),
        Some(Parameter::Uint64(value)) => Some(*value),
        Some(Parameter::Int64(value)) => u64::try_from(*value).ok(),
        // kserve's clients send every parameter as text.
        Some(Parameter::String(text)) => text.parse().ok(),
        Some(_) => None,
    };
    match value {
        Some(value) => Ok(Some(value)),
        None => Err(ServiceError::InvalidArgument(format!(
            "parameter '{name}' must be a whole number of at least 0{}",
            if name == "timeout" { " (microseconds)" } else { "" }
        ))),
    }
}

/// The answer to a request, from the outputs of a version.
pub fn response(
    request: InferRequest,
    codec: &BatchCodec,
    version: &str,
    wanted: Option<&[usize]>,
    outputs: Outputs,
) -> InferResponse {
    let bindings = &codec.outputs;
    let output = |(part, binding): (OutputPart, &TensorBinding)| InferTensor {
        name: binding.client.name.clone(),
        datatype: binding.datatype(),
        shape: part.shape,
        parameters: Default::default(),
        data: part.data,
    };
    let made = outputs.into_iter().zip(bindings);
    let outputs = match wanted {
        None => made.filter(|(part, _)| !part.is_absent()).map(output).collect(),
        Some(wanted) => {
            let given = |(part, binding): (OutputPart, _)| (!part.is_absent()).then(|| output((part, binding)));
            let mut made: Vec<Option<InferTensor>> = made.map(given).collect();
            wanted.iter().filter_map(|position| made.get_mut(*position)?.take()).collect()
        }
    };
    InferResponse {
        model_name: request.model_name,
        model_version: version.to_owned(),
        id: request.id,
        parameters: Default::default(),
        outputs,
    }
}
