//! The JSON bodies of all endpoints but inference: health, metadata, configuration, statistics,
//! repository, shared memory.

use prost::Message;
use prost_reflect::{DeserializeOptions, DynamicMessage, SerializeOptions};
use serde::{Deserialize, Serialize};

use crate::descriptor;
use crate::infer::{CodecError, Parameters};
use crate::inference::{InferBatchStatistics, InferStatistics, ModelConfig, ModelStatistics, ModelStatisticsResponse};

/// The answer for any error.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct ErrorBody {
    /// The error, and the expected content.
    pub error: String,
}

/// Answer of `GET /v2`.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct ServerMetadataBody {
    /// Name of the server.
    pub name: String,
    /// Version of the server.
    pub version: String,
    /// Names of the protocol's extensions that the server has.
    pub extensions: Vec<String>,
}

/// Answer of `GET /v2/models/{model}`. A client uses defaults for fields that a server leaves out.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug, Default)]
#[serde(default)]
pub struct ModelMetadataBody {
    /// Model name.
    pub name: String,
    /// Ready versions.
    pub versions: Vec<String>,
    /// Framework and format, `onnxruntime_onnx`.
    pub platform: String,
    /// Inputs.
    pub inputs: Vec<TensorMetadataBody>,
    /// Outputs.
    pub outputs: Vec<TensorMetadataBody>,
}

/// An input or output in [`ModelMetadataBody`].
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct TensorMetadataBody {
    /// Name.
    pub name: String,
    /// Name of the datatype, `FP32`.
    pub datatype: String,
    /// Sizes, the batch dimension included; -1 where the size varies.
    pub shape: Vec<i64>,
}

/// Body of `POST /v2/repository/index`.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug, Default)]
#[serde(expecting = "an object, {\"ready\": true} for the ready models only")]
pub struct IndexRequest {
    /// Only the models that are ready.
    #[serde(default)]
    pub ready: bool,
}

/// Body of `POST /v2/repository/models/{model}/load` and of `.../unload`, whose only parameter is
/// `unload_dependents`.
#[derive(Serialize, Deserialize, Clone, PartialEq, Debug, Default)]
#[serde(expecting = "an object, optionally with `parameters`")]
pub struct LoadRequest {
    /// `config` (a configuration in JSON), `file:1/model.onnx` (a file in base64).
    #[serde(default)]
    pub parameters: Parameters,
}

/// Body of `POST /v2/systemsharedmemory/region/{region}/register`.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
#[serde(expecting = "an object with `key` and `byte_size`")]
pub struct RegisterRegionRequest {
    /// Name of the shared memory object, as `shm_open` takes it.
    pub key: String,
    /// The region's start in the object, in bytes.
    #[serde(default)]
    pub offset: u64,
    /// Size of the region in bytes.
    pub byte_size: u64,
}

/// Body of `POST /v2/cudasharedmemory/region/{region}/register`.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
#[serde(expecting = "an object with `raw_handle`, `device_id` and `byte_size`")]
pub struct RegisterCudaRegionRequest {
    /// The `cudaIpcMemHandle_t` of the memory.
    pub raw_handle: RawHandle,
    /// The GPU's ordinal.
    pub device_id: u64,
    /// Size of the region in bytes.
    pub byte_size: u64,
}

/// Bytes in a [`RegisterCudaRegionRequest`].
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
#[serde(expecting = "an object with `b64`")]
pub struct RawHandle {
    /// The bytes in base64.
    pub b64: String,
}

/// A model's configuration in JSON, as Triton writes it: field names of the `.proto`, names of enum
/// values, 64-bit integers as numbers, fields with their default value included.
pub fn config_to_json(config: &ModelConfig) -> String {
    to_json("inference.ModelConfig", config)
}

/// Statistics in JSON, as Triton writes them: `{"model_stats": [...]}`. Durations that were never
/// set are written as zero, because clients read them without a check.
pub fn statistics_to_json(statistics: Vec<ModelStatistics>) -> String {
    let mut response = ModelStatisticsResponse { model_stats: statistics };
    for model in &mut response.model_stats {
        complete(model);
    }
    to_json("inference.ModelStatisticsResponse", &response)
}

fn complete(model: &mut ModelStatistics) {
    let InferStatistics { success, fail, queue, compute_input, compute_infer, compute_output, cache_hit, cache_miss } =
        model.inference_stats.get_or_insert_default();
    for duration in [success, fail, queue, compute_input, compute_infer, compute_output, cache_hit, cache_miss] {
        duration.get_or_insert_default();
    }
    for InferBatchStatistics { batch_size: _, compute_input, compute_infer, compute_output } in &mut model.batch_stats {
        for duration in [compute_input, compute_infer, compute_output] {
            duration.get_or_insert_default();
        }
    }
}

/// Reads statistics as [`statistics_to_json`] and Triton write them. Unknown fields of other
/// servers are skipped.
///
/// # Errors
/// If the text is no JSON of statistics.
pub fn statistics_from_json(json: &[u8]) -> Result<Vec<ModelStatistics>, CodecError> {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let message = DynamicMessage::deserialize_with_options(
        descriptor("inference.ModelStatisticsResponse"),
        &mut deserializer,
        &DeserializeOptions::new().deny_unknown_fields(false),
    )
    .map_err(|e| CodecError(format!("the response is not the JSON of statistics: {e}")))?;
    let response: ModelStatisticsResponse =
        message.transcode_to().map_err(|e| CodecError(format!("the response is not the JSON of statistics: {e}")))?;
    Ok(response.model_stats)
}

fn to_json<M: Message>(name: &str, message: &M) -> String {
    let mut dynamic = DynamicMessage::new(descriptor(name));
    dynamic.transcode_from(message).expect("a message has the fields of its own descriptor");
    let mut out = Vec::new();
    let options =
        SerializeOptions::new().stringify_64_bit_integers(false).use_proto_field_name(true).skip_default_fields(false);
    dynamic
        .serialize_with_options(&mut serde_json::Serializer::new(&mut out), &options)
        .expect("memory takes every write, and every map key is written as a string");
    String::from_utf8(out).expect("serde_json writes UTF-8")
}
