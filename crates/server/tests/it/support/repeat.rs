//! `repeat`, a decoupled model without an engine: one answer for each element of its input.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_protocol::inference::{ModelConfig, ModelTransactionPolicy};
use downbeat_protocol::{InferRequest, InferResponse, InferTensor, Parameter};
use downbeat_service::answers::{self, AnswerSender, Answers, PATIENCE, StreamAnswer};
use downbeat_service::error::ServiceError;
use tokio::sync::watch;

pub const REPEAT: &str = "repeat";

/// The model. Each answer has the output `OUT`, one element of the input `IN`. Parameters of a request
/// steer the model:
///
/// | parameter | effect |
/// |---|---|
/// | `delay_ms` | waits before each answer |
/// | `fail_at` | makes the answer of this index an error |
/// | `bytes` | adds an output `FILLER` of this size |
/// | `patience_ms` | the sender's patience |
/// | `end` | `alone`: the end is a step of its own; `with_last`; `never` |
pub struct Repeat {
    /// Answers that the model has sent.
    pub sent: Arc<watch::Sender<usize>>,
    /// Requests that ended because their client had left or did not read.
    pub left: Arc<watch::Sender<usize>>,
}

impl Default for Repeat {
    fn default() -> Self {
        Repeat { sent: Arc::new(watch::Sender::new(0)), left: Arc::new(watch::Sender::new(0)) }
    }
}

fn integer(request: &InferRequest, name: &str) -> Option<u64> {
    match request.parameters.get(name) {
        Some(Parameter::Int64(value)) => Some(value.unsigned_abs()),
        _ => None,
    }
}

fn output(name: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> InferTensor {
    let (name, shape, parameters) = (name.to_owned(), shape.to_vec(), Default::default());
    InferTensor { name, datatype, shape, parameters, data: Bytes::from(data) }
}

impl Repeat {
    pub fn signature() -> Signature {
        let spec = |name: &str, dims: &[i64]| TensorSpec {
            name: name.to_owned(),
            datatype: DataType::Int32,
            dims: dims.to_vec(),
        };
        Signature { inputs: vec![spec("IN", &[-1])], outputs: vec![spec("OUT", &[1])] }
    }

    pub fn config() -> ModelConfig {
        let policy = ModelTransactionPolicy { decoupled: true };
        ModelConfig { name: REPEAT.to_owned(), model_transaction_policy: Some(policy), ..Default::default() }
    }

    pub async fn wait_for_sent(&self, count: usize) {
        self.sent.subscribe().wait_for(|now| *now >= count).await.expect("the sender is a field");
    }

    pub async fn wait_for_left(&self, count: usize) {
        self.left.subscribe().wait_for(|now| *now >= count).await.expect("the sender is a field");
    }

    pub fn infer_stream(&self, request: InferRequest) -> Result<Answers, ServiceError> {
        let [input] = request.inputs.as_slice() else {
            return Err(ServiceError::InvalidArgument("model 'repeat' has one input, 'IN'".to_owned()));
        };
        if input.datatype != DataType::Int32 {
            return Err(ServiceError::InvalidArgument("input 'IN' of model 'repeat' is INT32".to_owned()));
        }
        let patience = integer(&request, "patience_ms").map_or(PATIENCE, Duration::from_millis);
        let (sender, answers) = answers::channel(patience);
        let (sent, left) = (Arc::clone(&self.sent), Arc::clone(&self.left));
        tokio::spawn(async move {
            tokio::select! {
                done = work(&request, &sender, &sent) => {
                    if done.is_err() {
                        left.send_modify(|count| *count += 1);
                    }
                }
                () = sender.closed() => left.send_modify(|count| *count += 1),
            }
        });
        Ok(answers)
    }
}

async fn work(
    request: &InferRequest,
    sender: &AnswerSender,
    sent: &watch::Sender<usize>,
) -> Result<(), answers::NoReader> {
    let end = match request.parameters.get("end") {
        Some(Parameter::String(end)) => end.as_str(),
        _ => "alone",
    };
    let elements = request.inputs[0].data.as_chunks::<4>().0;
    for (i, element) in elements.iter().enumerate() {
        if let Some(delay) = integer(request, "delay_ms") {
            tokio::time::sleep(Duration::from_millis(delay)).await;
        }
        let mut outputs = vec![output("OUT", DataType::Int32, &[1], element.to_vec())];
        if let Some(bytes) = integer(request, "bytes") {
            outputs.push(output("FILLER", DataType::Uint8, &[bytes as i64], vec![7; bytes as usize]));
        }
        let answer = match integer(request, "fail_at") {
            Some(at) if at == i as u64 => Err(ServiceError::Internal(format!("answer {i} was asked to fail"))),
            _ => Ok(InferResponse {
                model_name: REPEAT.to_owned(),
                model_version: "1".to_owned(),
                id: request.id.clone(),
                parameters: Default::default(),
                outputs,
            }),
        };
        let is_final = end == "with_last" && i + 1 == elements.len();
        sender.send(StreamAnswer { answer: Some(answer), is_final }).await?;
        sent.send_modify(|count| *count += 1);
    }
    match end {
        "alone" => sender.send(StreamAnswer::end()).await,
        _ => Ok(()),
    }
}
