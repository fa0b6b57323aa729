//! A service in memory whose answers can be computed by hand.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use downbeat_core::Duration;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_protocol::inference::{InferStatistics, ModelConfig, ModelStatistics, StatisticDuration};
use downbeat_protocol::{InferRequest, InferResponse, InferTensor, Parameter};
use downbeat_service::answers::Answers;
use downbeat_service::error::ServiceError;
use downbeat_service::report::policy_report::{AskedFor, PolicyReport};
use downbeat_service::service::{LoadOverrides, ModelIndexEntry, ModelMetadata, Service};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::repeat::{REPEAT, Repeat};

/// A service without engines. Its models all have version 1:
/// - `simple` is Triton's example: OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, both INT32
///   `[-1, 16]`, batches up to 8;
/// - `echo` gives every input back under its name, without batches;
/// - `batch_echo` does the same, with batches;
/// - `repeat` is decoupled ([`Repeat`]).
///
/// Request parameters steer it: `delay_ms` (an integer) waits first, `fail` (a name in [`failure`])
/// fails, and `hold` waits until [`EchoService::release`]. The answer's parameters are the
/// request's.
pub struct EchoService {
    pub repeat: Repeat,
    ready: AtomicBool,
    loaded: Mutex<BTreeSet<String>>,
    loads: Mutex<Vec<(String, LoadOverrides)>>,
    answered: AtomicUsize,
    running: AtomicUsize,
    most_running: AtomicUsize,
    cancelled: watch::Sender<usize>,
    started: watch::Sender<usize>,
    released: watch::Sender<bool>,
}

const MODELS: [&str; 4] = ["simple", "echo", "batch_echo", REPEAT];

/// Labels of `echo`'s and `batch_echo`'s outputs with the name `LABELLED`. The third class has
/// none.
pub const LABELS: [&str; 4] = ["ant", "bee", "", "cat"];

impl Default for EchoService {
    fn default() -> Self {
        EchoService {
            repeat: Repeat::default(),
            ready: AtomicBool::new(true),
            loaded: Mutex::new(MODELS.map(str::to_owned).into()),
            loads: Mutex::default(),
            answered: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            cancelled: watch::Sender::new(0),
            started: watch::Sender::new(0),
            released: watch::Sender::new(false),
        }
    }
}

#[allow(dead_code, reason = "not every test needs every part")]
impl EchoService {
    /// Sets whether the server says it is ready.
    pub fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::SeqCst);
    }

    /// The number of requests answered, or failed.
    pub fn answered(&self) -> usize {
        self.answered.load(Ordering::SeqCst)
    }

    /// The most requests that ran at the same time.
    pub fn most_running(&self) -> usize {
        self.most_running.load(Ordering::SeqCst)
    }

    /// Completes once that many requests have been cancelled.
    pub async fn wait_for_cancelled(&self, count: usize) {
        self.cancelled.subscribe().wait_for(|now| *now >= count).await.unwrap();
    }

    /// Completes once that many requests have begun.
    pub async fn wait_for_started(&self, count: usize) {
        self.started.subscribe().wait_for(|now| *now >= count).await.unwrap();
    }

    /// Lets requests with the parameter `hold` go on, also later ones.
    pub fn release(&self) {
        self.released.send_replace(true);
    }

    /// The load requests so far.
    pub fn loads(&self) -> Vec<(String, LoadOverrides)> {
        self.loads.lock().clone()
    }

    fn check(&self, name: &str, version: &str) -> Result<(), ServiceError> {
        if !MODELS.contains(&name) {
            return Err(ServiceError::NotFound(format!("no model '{name}'; the repository has {}", MODELS.join(", "))));
        }
        if !matches!(version, "" | "1") {
            return Err(ServiceError::NotFound(format!("model '{name}' has no version '{version}'; it has 1")));
        }
        if !self.loaded.lock().contains(name) {
            return Err(ServiceError::Unavailable(format!("model '{name}' is not loaded")));
        }
        Ok(())
    }
}

/// The error that the parameter `fail` asks for.
pub fn failure(name: &str) -> ServiceError {
    let message = format!("asked to fail with {name}");
    match name {
        "queue_full" => ServiceError::QueueFull { message, retry_after: Duration::from_millis(1_500) },
        "deadline" => ServiceError::DeadlineExceeded(message),
        "unavailable" => ServiceError::Unavailable(message),
        "unimplemented" => ServiceError::Unimplemented(message),
        "too_large" => ServiceError::TooLarge(message),
        "exists" => ServiceError::AlreadyExists(message),
        "not_found" => ServiceError::NotFound(message),
        "invalid" => ServiceError::InvalidArgument(message),
        _ => ServiceError::Internal(message),
    }
}

fn spec(name: &str, dims: &[i64]) -> TensorSpec {
    TensorSpec { name: name.into(), datatype: DataType::Int32, dims: dims.to_vec() }
}

fn ints(data: &[u8]) -> Vec<i32> {
    data.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
}

fn simple(request: &InferRequest) -> Result<Vec<InferTensor>, ServiceError> {
    let input = |name: &str| {
        let input = request.inputs.iter().find(|input| input.name == name).ok_or_else(|| {
            ServiceError::InvalidArgument(format!("input '{name}' is missing; expected INPUT0, INPUT1"))
        })?;
        if input.datatype != DataType::Int32 {
            return Err(ServiceError::InvalidArgument(format!(
                "input '{name}': datatype is {}, expected INT32",
                input.datatype
            )));
        }
        if !matches!(input.shape[..], [1..=8, 16]) {
            return Err(ServiceError::InvalidArgument(format!(
                "input '{name}': shape is {:?}, expected [1 to 8, 16]",
                input.shape
            )));
        }
        Ok((input.shape.clone(), ints(&input.data)))
    };
    if let Some(other) = request.inputs.iter().find(|input| !matches!(&*input.name, "INPUT0" | "INPUT1")) {
        return Err(ServiceError::InvalidArgument(format!(
            "unexpected input '{}'; expected INPUT0, INPUT1",
            other.name
        )));
    }
    let ((shape, a), (_, b)) = (input("INPUT0")?, input("INPUT1")?);
    let output = |name: &str, operator: fn(i32, i32) -> i32| InferTensor {
        name: name.into(),
        datatype: DataType::Int32,
        shape: shape.clone(),
        parameters: BTreeMap::new(),
        data: a.iter().zip(&b).flat_map(|(a, b)| operator(*a, *b).to_le_bytes()).collect(),
    };
    Ok(vec![output("OUTPUT0", i32::wrapping_add), output("OUTPUT1", i32::wrapping_sub)])
}

/// Counts a request as cancelled unless its flag is set, which says that the request is done.
struct Running<'a>(&'a EchoService, bool);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
        if self.1 {
            self.0.answered.fetch_add(1, Ordering::SeqCst);
        } else {
            self.0.cancelled.send_modify(|count| *count += 1);
        }
    }
}

impl Service for EchoService {
    fn is_ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    fn is_model_ready(&self, name: &str, version: &str) -> bool {
        self.check(name, version).is_ok()
    }

    fn model_metadata(&self, name: &str, version: &str) -> Result<ModelMetadata, ServiceError> {
        self.check(name, version)?;
        let signature = match name {
            "simple" => Signature {
                inputs: vec![spec("INPUT0", &[-1, 16]), spec("INPUT1", &[-1, 16])],
                outputs: vec![spec("OUTPUT0", &[-1, 16]), spec("OUTPUT1", &[-1, 16])],
            },
            REPEAT => Repeat::signature(),
            _ => Signature { inputs: vec![spec("X", &[-1])], outputs: vec![spec("X", &[-1])] },
        };
        Ok(ModelMetadata { name: name.into(), versions: vec!["1".into()], platform: "echo".into(), signature })
    }

    fn model_config(&self, name: &str, version: &str) -> Result<ModelConfig, ServiceError> {
        self.check(name, version)?;
        if name == REPEAT {
            return Ok(Repeat::config());
        }
        let max_batch_size = if name == "echo" { 0 } else { 8 };
        Ok(ModelConfig { name: name.into(), platform: "echo".into(), max_batch_size, ..Default::default() })
    }

    fn policy(&self, name: &str, version: &str) -> Result<PolicyReport, ServiceError> {
        self.check(name, version)?;
        Ok(PolicyReport::asked("exclusive", AskedFor::All))
    }

    fn statistics(&self, name: &str, version: &str) -> Result<Vec<ModelStatistics>, ServiceError> {
        let count = self.answered() as u64;
        let tally = Some(StatisticDuration { count, ns: count });
        let of = |name: &str| ModelStatistics {
            name: name.into(),
            version: "1".into(),
            inference_count: count,
            execution_count: count,
            inference_stats: Some(InferStatistics {
                success: tally,
                queue: tally,
                compute_input: tally,
                compute_infer: tally,
                compute_output: tally,
                ..Default::default()
            }),
            ..Default::default()
        };
        if name.is_empty() {
            return Ok(MODELS.map(of).into());
        }
        self.check(name, version)?;
        Ok(vec![of(name)])
    }

    fn repository_index(&self, ready_only: bool) -> Vec<ModelIndexEntry> {
        let loaded = self.loaded.lock();
        let entry = |name: &str| {
            let ready = loaded.contains(name);
            ModelIndexEntry {
                name: name.into(),
                version: "1".into(),
                state: if ready { "READY" } else { "UNAVAILABLE" }.into(),
                reason: if ready { "" } else { "unloaded" }.into(),
            }
        };
        MODELS.map(entry).into_iter().filter(|entry| !ready_only || entry.state == "READY").collect()
    }

    async fn load(&self, name: &str, overrides: LoadOverrides) -> Result<(), ServiceError> {
        self.loads.lock().push((name.to_owned(), overrides));
        if !MODELS.contains(&name) {
            return Err(ServiceError::NotFound(format!("no model '{name}' in the repository")));
        }
        self.loaded.lock().insert(name.to_owned());
        Ok(())
    }

    async fn unload(&self, name: &str) -> Result<(), ServiceError> {
        if !MODELS.contains(&name) {
            return Err(ServiceError::NotFound(format!("no model '{name}' in the repository")));
        }
        self.loaded.lock().remove(name);
        Ok(())
    }

    async fn infer(&self, request: InferRequest) -> Result<InferResponse, ServiceError> {
        let now = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        let mut running = Running(self, false);
        self.most_running.fetch_max(now, Ordering::SeqCst);
        self.started.send_modify(|count| *count += 1);
        if let Some(Parameter::Int64(delay)) = request.parameters.get("delay_ms") {
            tokio::time::sleep(std::time::Duration::from_millis(delay.unsigned_abs())).await;
        }
        if request.parameters.contains_key("hold") {
            let _ = self.released.subscribe().wait_for(|released| *released).await;
        }
        running.1 = true;
        self.check(&request.model_name, &request.model_version)?;
        if request.model_name == REPEAT {
            return Err(ServiceError::Decoupled(request.model_name));
        }
        if let Some(Parameter::String(name)) = request.parameters.get("fail") {
            return Err(failure(name));
        }
        let mut outputs = match request.model_name.as_str() {
            "simple" => simple(&request)?,
            _ => request
                .inputs
                .into_iter()
                .map(|input| InferTensor {
                    name: input.name,
                    datatype: input.datatype,
                    shape: input.shape,
                    parameters: BTreeMap::new(),
                    data: input.data,
                })
                .collect(),
        };
        if !request.outputs.is_empty() {
            for wanted in &request.outputs {
                if !outputs.iter().any(|output| output.name == wanted.name) {
                    return Err(ServiceError::InvalidArgument(format!("unexpected output '{}'", wanted.name)));
                }
            }
            outputs.retain(|output| request.outputs.iter().any(|wanted| wanted.name == output.name));
        }
        Ok(InferResponse {
            model_name: request.model_name,
            model_version: "1".into(),
            id: request.id,
            parameters: request.parameters,
            outputs,
        })
    }

    fn is_decoupled(&self, name: &str, _version: &str) -> bool {
        name == REPEAT
    }

    async fn infer_stream(&self, request: InferRequest) -> Result<Answers, ServiceError> {
        self.check(&request.model_name, &request.model_version)?;
        match request.model_name.as_str() {
            REPEAT => self.repeat.infer_stream(request),
            _ => self.infer(request).await.map(Answers::one),
        }
    }

    fn labels(&self, _name: &str, _version: &str, output: &str) -> Vec<String> {
        if output == "LABELLED" { LABELS.map(str::to_owned).into() } else { Vec::new() }
    }
}
