//! A [`Service`] without engine and scheduler: its models compute in the call.
//!
//! | model | does |
//! |---|---|
//! | `simple` | `OUTPUT0 = INPUT0 + INPUT1`, `OUTPUT1 = INPUT0 - INPUT1`; INT32 [-1, 16] |
//! | `echo` | gives back every input under its name; inputs are called as their datatypes, all optional |
//! | `scores` | `scores[b, c] = sum of x[b, i] for i % 10 == c`; FP32 [-1, 784] to [-1, 10], with labels |
//! | `slow` | as `scores`, once [`MemoryService::release`] is called |
//! | `repeat` | is decoupled: one answer for each element of its input ([`Repeat`]) |
//! | `full`, `late` | answer every inference with `QueueFull`, `DeadlineExceeded` |

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use bytes::Bytes;
use downbeat_core::Duration;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_protocol::inference::{self, ModelConfig, ModelStatistics};
use downbeat_protocol::{InferRequest, InferResponse, InferTensor};
use downbeat_service::answers::Answers;
use downbeat_service::error::ServiceError;
use downbeat_service::report::policy_report::{AskedFor, PolicyReport};
use downbeat_service::service::{LoadOverrides, ModelIndexEntry, ModelMetadata, Service};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::repeat::{REPEAT, Repeat};

pub struct MemoryService {
    pub repeat: Repeat,
    models: BTreeMap<&'static str, Model>,
    pub ready: AtomicBool,
    /// Inferences of `slow` that wait.
    pub waiting: AtomicUsize,
    /// Inferences of `slow` that were given up.
    pub cancelled: AtomicUsize,
    released: Semaphore,
    /// Every load that was carried out, with its overrides.
    pub loads: Mutex<Vec<(String, LoadOverrides)>>,
    /// The last inference request, as the frontend understood it.
    pub last_request: Mutex<Option<InferRequest>>,
}

struct Model {
    signature: Signature,
    loaded: AtomicBool,
    count: AtomicUsize,
}

fn spec(name: &str, datatype: DataType, dims: &[i64]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), datatype, dims: dims.to_vec() }
}

impl Default for MemoryService {
    fn default() -> Self {
        let scores = Signature {
            inputs: vec![spec("x", DataType::Fp32, &[-1, 784])],
            outputs: vec![spec("scores", DataType::Fp32, &[-1, 10])],
        };
        let each: Vec<TensorSpec> = DataType::ALL.iter().map(|d| spec(d.name(), *d, &[-1, -1])).collect();
        let int32 = |name| spec(name, DataType::Int32, &[-1, 16]);
        let signatures = [
            (
                "simple",
                Signature {
                    inputs: vec![int32("INPUT0"), int32("INPUT1")],
                    outputs: vec![int32("OUTPUT0"), int32("OUTPUT1")],
                },
            ),
            ("echo", Signature { inputs: each.clone(), outputs: each }),
            ("scores", scores.clone()),
            ("slow", scores.clone()),
            ("full", scores.clone()),
            ("late", scores),
            (REPEAT, Repeat::signature()),
        ];
        let models = signatures.into_iter().map(|(name, signature)| {
            (name, Model { signature, loaded: AtomicBool::new(true), count: AtomicUsize::new(0) })
        });
        MemoryService {
            repeat: Repeat::default(),
            models: models.collect(),
            ready: AtomicBool::new(true),
            waiting: AtomicUsize::new(0),
            cancelled: AtomicUsize::new(0),
            released: Semaphore::new(0),
            loads: Mutex::default(),
            last_request: Mutex::default(),
        }
    }
}

impl MemoryService {
    /// Lets one waiting inference of `slow` go on.
    pub fn release(&self) {
        self.released.add_permits(1);
    }

    fn model(&self, name: &str, version: &str) -> Result<&Model, ServiceError> {
        let model = self.models.get(name).ok_or_else(|| {
            ServiceError::NotFound(format!("unknown model '{name}'; expected one of {:?}", self.models.keys()))
        })?;
        if !version.is_empty() && version != "1" {
            return Err(ServiceError::NotFound(format!("model '{name}' has no version '{version}'; it has 1")));
        }
        if !model.loaded.load(SeqCst) {
            return Err(ServiceError::Unavailable(format!("model '{name}' is not loaded")));
        }
        Ok(model)
    }
}

/// Counts an inference as cancelled unless it ended by itself.
struct Waiting<'a> {
    service: &'a MemoryService,
    finished: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.service.waiting.fetch_sub(1, SeqCst);
        if !self.finished {
            self.service.cancelled.fetch_add(1, SeqCst);
        }
    }
}

fn check(model: &str, signature: &Signature, input: &InferTensor) -> Result<(), ServiceError> {
    let wrong = |what: String| Err(ServiceError::InvalidArgument(format!("model '{model}': {what}")));
    let Some(spec) = signature.inputs.iter().find(|spec| spec.name == input.name) else {
        let names: Vec<_> = signature.inputs.iter().map(|spec| spec.name.as_str()).collect();
        return wrong(format!("unknown input '{}'; expected {names:?}", input.name));
    };
    if input.datatype != spec.datatype {
        return wrong(format!("input '{}' is {}; expected {}", input.name, input.datatype, spec.datatype));
    }
    let fits = input.shape.len() == spec.dims.len()
        && input.shape.iter().zip(&spec.dims).all(|(got, want)| *want == -1 || got == want);
    if !fits && model != "echo" {
        return wrong(format!("input '{}' has shape {:?}; expected {:?}", input.name, input.shape, spec.dims));
    }
    downbeat_protocol::infer::check_data(input.datatype, &input.shape, &input.data)
        .or_else(|e| wrong(format!("input '{}': {e}", input.name)))
}

fn output(name: &str, datatype: DataType, shape: &[i64], data: Bytes) -> InferTensor {
    InferTensor { name: name.to_owned(), datatype, shape: shape.to_vec(), parameters: Default::default(), data }
}

fn integers(data: &[u8]) -> impl Iterator<Item = i32> {
    data.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b))
}

fn scores(input: &InferTensor) -> InferTensor {
    let values: Vec<f32> = input.data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let mut sums = vec![0_f32; values.len() / 784 * 10];
    for (i, value) in values.iter().enumerate() {
        sums[i / 784 * 10 + i % 784 % 10] += value;
    }
    let data: Vec<u8> = sums.iter().flat_map(|v| v.to_le_bytes()).collect();
    output("scores", DataType::Fp32, &[input.shape[0], 10], Bytes::from(data))
}

impl Service for MemoryService {
    fn is_ready(&self) -> bool {
        self.ready.load(SeqCst)
    }

    fn is_model_ready(&self, name: &str, version: &str) -> bool {
        self.model(name, version).is_ok()
    }

    fn model_metadata(&self, name: &str, version: &str) -> Result<ModelMetadata, ServiceError> {
        let model = self.model(name, version)?;
        Ok(ModelMetadata {
            name: name.to_owned(),
            versions: vec!["1".to_owned()],
            platform: "onnxruntime_onnx".to_owned(),
            signature: model.signature.clone(),
        })
    }

    fn model_config(&self, name: &str, version: &str) -> Result<ModelConfig, ServiceError> {
        let model = self.model(name, version)?;
        if name == REPEAT {
            return Ok(Repeat::config());
        }
        let data_type = |datatype: DataType| match datatype {
            DataType::Bytes => inference::DataType::TypeString,
            other => inference::DataType::from_str_name(&format!("TYPE_{other}")).unwrap_or_default(),
        };
        let input = |spec: &TensorSpec| inference::ModelInput {
            name: spec.name.clone(),
            data_type: data_type(spec.datatype).into(),
            dims: spec.dims[1..].to_vec(),
            optional: name == "echo",
            ..Default::default()
        };
        let output = |spec: &TensorSpec| inference::ModelOutput {
            name: spec.name.clone(),
            data_type: data_type(spec.datatype).into(),
            dims: spec.dims[1..].to_vec(),
            ..Default::default()
        };
        Ok(ModelConfig {
            name: name.to_owned(),
            platform: "onnxruntime_onnx".to_owned(),
            backend: "onnxruntime".to_owned(),
            max_batch_size: 8,
            input: model.signature.inputs.iter().map(input).collect(),
            output: model.signature.outputs.iter().map(output).collect(),
            ..Default::default()
        })
    }

    fn policy(&self, name: &str, version: &str) -> Result<PolicyReport, ServiceError> {
        self.model(name, version)?;
        Ok(PolicyReport::asked("exclusive", AskedFor::All))
    }

    fn statistics(&self, name: &str, version: &str) -> Result<Vec<ModelStatistics>, ServiceError> {
        if !name.is_empty() {
            self.model(name, version)?;
        }
        let of = |(name, model): (&&str, &Model)| {
            let count = model.count.load(SeqCst) as u64;
            ModelStatistics {
                name: (*name).to_owned(),
                version: "1".to_owned(),
                inference_count: count,
                execution_count: count,
                inference_stats: Some(inference::InferStatistics {
                    success: Some(inference::StatisticDuration { count, ns: count * 1_000 }),
                    queue: Some(inference::StatisticDuration { count, ns: 0 }),
                    ..Default::default()
                }),
                ..Default::default()
            }
        };
        Ok(self.models.iter().filter(|(key, _)| name.is_empty() || **key == name).map(of).collect())
    }

    fn repository_index(&self, ready_only: bool) -> Vec<ModelIndexEntry> {
        let entry = |(name, model): (&&str, &Model)| {
            let loaded = model.loaded.load(SeqCst);
            ModelIndexEntry {
                name: (*name).to_owned(),
                version: "1".to_owned(),
                state: if loaded { "READY" } else { "UNAVAILABLE" }.to_owned(),
                reason: if loaded { "" } else { "unloaded" }.to_owned(),
            }
        };
        self.models.iter().map(entry).filter(|entry| !ready_only || entry.state == "READY").collect()
    }

    async fn load(&self, name: &str, overrides: LoadOverrides) -> Result<(), ServiceError> {
        let model = self.models.get(name).ok_or_else(|| ServiceError::NotFound(format!("no model '{name}'")))?;
        model.loaded.store(true, SeqCst);
        self.loads.lock().push((name.to_owned(), overrides));
        Ok(())
    }

    async fn unload(&self, name: &str) -> Result<(), ServiceError> {
        let model = self.models.get(name).ok_or_else(|| ServiceError::NotFound(format!("no model '{name}'")))?;
        model.loaded.store(false, SeqCst);
        Ok(())
    }

    async fn infer(&self, request: InferRequest) -> Result<InferResponse, ServiceError> {
        let name = request.model_name.clone();
        let model = self.model(&name, &request.model_version)?;
        if name == REPEAT {
            return Err(ServiceError::Decoupled(name));
        }
        for input in &request.inputs {
            check(&name, &model.signature, input)?;
        }
        if name != "echo"
            && let Some(missing) =
                model.signature.inputs.iter().find(|spec| request.inputs.iter().all(|input| input.name != spec.name))
        {
            return Err(ServiceError::InvalidArgument(format!("model '{name}': input '{}' is missing", missing.name)));
        }
        if let Some(unknown) =
            request.outputs.iter().find(|output| model.signature.outputs.iter().all(|spec| spec.name != output.name))
        {
            return Err(ServiceError::InvalidArgument(format!("model '{name}' has no output '{}'", unknown.name)));
        }
        let mut outputs = match name.as_str() {
            "simple" => {
                let [a, b] = request.inputs.as_slice() else {
                    return Err(ServiceError::InvalidArgument("simple takes two inputs".to_owned()));
                };
                let (a, b) = if a.name == "INPUT0" { (a, b) } else { (b, a) };
                let of = |name, f: fn(i32, i32) -> i32| {
                    let data: Vec<u8> =
                        integers(&a.data).zip(integers(&b.data)).flat_map(|(a, b)| f(a, b).to_le_bytes()).collect();
                    output(name, DataType::Int32, &a.shape, Bytes::from(data))
                };
                vec![of("OUTPUT0", i32::wrapping_add), of("OUTPUT1", i32::wrapping_sub)]
            }
            "full" => {
                return Err(ServiceError::QueueFull {
                    message: "the queue of model 'full' has its 4 requests".to_owned(),
                    retry_after: Duration::from_millis(1_500),
                });
            }
            "late" => return Err(ServiceError::DeadlineExceeded("the deadline cannot be met".to_owned())),
            "slow" => {
                self.waiting.fetch_add(1, SeqCst);
                let mut waiting = Waiting { service: self, finished: false };
                self.released.acquire().await.map_err(|e| ServiceError::Internal(e.to_string()))?.forget();
                waiting.finished = true;
                drop(waiting);
                vec![scores(&request.inputs[0])]
            }
            "scores" => vec![scores(&request.inputs[0])],
            _ => request
                .inputs
                .iter()
                .map(|input| output(&input.name, input.datatype, &input.shape, input.data.clone()))
                .collect(),
        };
        if !request.outputs.is_empty() {
            outputs.retain(|output| request.outputs.iter().any(|wanted| wanted.name == output.name));
        }
        model.count.fetch_add(1, SeqCst);
        let id = request.id.clone();
        *self.last_request.lock() = Some(request);
        Ok(InferResponse {
            model_name: name,
            model_version: "1".to_owned(),
            id,
            parameters: Default::default(),
            outputs,
        })
    }

    fn is_decoupled(&self, name: &str, _version: &str) -> bool {
        name == REPEAT
    }

    async fn infer_stream(&self, request: InferRequest) -> Result<Answers, ServiceError> {
        self.model(&request.model_name, &request.model_version)?;
        match request.model_name.as_str() {
            REPEAT => self.repeat.infer_stream(request),
            _ => self.infer(request).await.map(Answers::one),
        }
    }

    fn labels(&self, name: &str, _version: &str, _output: &str) -> Vec<String> {
        match name {
            "scores" => (0..10).map(|class| format!("digit {class}")).collect(),
            _ => Vec::new(),
        }
    }
}
