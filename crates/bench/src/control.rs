//! Asks the server about its models: metadata and statistics. One request at a time, outside the load.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use downbeat_core::tensor::TensorSpec;
use downbeat_protocol::inference as proto;
use downbeat_protocol::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use serde::Deserialize;

use crate::args::Protocol;
use crate::request::Envelope;
use crate::response::{Keep, ResponseReader};
use crate::statistics::{BatchStatistics, ModelStatistics, Phase};

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of an answer.
const MOST_BODY: usize = 16 << 20;

/// Where the server is.
#[derive(Clone, Debug)]
pub struct Target {
    /// Protocol.
    pub protocol: Protocol,
    /// The first address that the name stands for.
    pub address: SocketAddr,
    /// As the user wrote it, with the port.
    pub host: String,
}

impl Target {
    /// As a URL.
    pub fn url(&self) -> String {
        format!("{}://{}", self.protocol.name(), self.host)
    }
}

/// The answer to a metadata request.
#[derive(Deserialize)]
struct Metadata {
    #[serde(default)]
    inputs: Vec<MetadataTensor>,
}

#[derive(Deserialize)]
struct MetadataTensor {
    name: String,
    datatype: String,
    shape: Vec<i64>,
}

/// The answer to a statistics request.
#[derive(Deserialize)]
struct Statistics {
    #[serde(default)]
    model_stats: Vec<StatisticsOfModel>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct StatisticsOfModel {
    inference_count: u64,
    execution_count: u64,
    inference_stats: Phases,
    batch_stats: Vec<StatisticsOfBatch>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Phases {
    queue: Phase,
    compute_input: Phase,
    compute_infer: Phase,
    compute_output: Phase,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct StatisticsOfBatch {
    batch_size: u64,
    compute_infer: Phase,
}

/// A client of the server's other endpoints.
pub struct Control {
    target: Target,
    /// Drives the gRPC client; `None` for HTTP.
    runtime: Option<tokio::runtime::Runtime>,
}

impl Control {
    /// # Errors
    /// If the system has no room for another event loop.
    pub fn new(target: Target) -> Result<Self> {
        let runtime = match target.protocol {
            Protocol::Http => None,
            Protocol::Grpc => Some(tokio::runtime::Builder::new_current_thread().enable_all().build()?),
        };
        Ok(Control { target, runtime })
    }

    /// The inputs of a model.
    ///
    /// # Errors
    /// If the server does not answer, or does not have the model.
    pub fn inputs(&self, model: &Envelope) -> Result<Vec<TensorSpec>> {
        let metadata = match &self.runtime {
            None => serde_json::from_slice::<Metadata>(&self.get(&model.path(""))?).context("not model metadata")?,
            Some(runtime) => {
                let request = proto::ModelMetadataRequest { name: model.model.clone(), version: model.version.clone() };
                let response = runtime.block_on(async {
                    let mut client = self.client().await?;
                    client.model_metadata(self.request(model, request)?).await.map_err(said)
                })?;
                Metadata {
                    inputs: response
                        .into_inner()
                        .inputs
                        .into_iter()
                        .map(|t| MetadataTensor { name: t.name, datatype: t.datatype, shape: t.shape })
                        .collect(),
                }
            }
        };
        metadata
            .inputs
            .into_iter()
            .map(|t| {
                let datatype = t.datatype.parse().with_context(|| format!("input '{}'", t.name))?;
                Ok(TensorSpec { name: t.name, datatype, dims: t.shape })
            })
            .collect()
    }

    /// What the server has counted for a model so far, all its versions together.
    ///
    /// # Errors
    /// If the server does not answer or keeps no statistics.
    pub fn statistics(&self, model: &Envelope) -> Result<ModelStatistics> {
        let answer = match &self.runtime {
            None => serde_json::from_slice::<Statistics>(&self.get(&model.path("/stats"))?)
                .context("not model statistics")?,
            Some(runtime) => {
                let request =
                    proto::ModelStatisticsRequest { name: model.model.clone(), version: model.version.clone() };
                let response = runtime.block_on(async {
                    let mut client = self.client().await?;
                    client.model_statistics(self.request(model, request)?).await.map_err(said)
                })?;
                Statistics { model_stats: response.into_inner().model_stats.into_iter().map(from_proto).collect() }
            }
        };
        let mut sum = ModelStatistics::default();
        for version in answer.model_stats {
            sum.requests_executed += version.inference_count;
            sum.executions += version.execution_count;
            sum.queue += version.inference_stats.queue;
            sum.compute_input += version.inference_stats.compute_input;
            sum.compute_infer += version.inference_stats.compute_infer;
            sum.compute_output += version.inference_stats.compute_output;
            for batch in version.batch_stats {
                let entry = sum.batches.entry(batch.batch_size).or_insert_with(BatchStatistics::default);
                entry.executions += batch.compute_infer.count;
                entry.compute_infer_ns += batch.compute_infer.ns;
            }
        }
        Ok(sum)
    }

    async fn client(&self) -> Result<GrpcInferenceServiceClient<tonic::transport::Channel>> {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", self.target.address))?
            .connect_timeout(PATIENCE)
            .timeout(PATIENCE);
        let channel = endpoint.connect().await.with_context(|| unreachable(&self.target))?;
        Ok(GrpcInferenceServiceClient::new(channel).max_decoding_message_size(MOST_BODY))
    }

    fn request<T>(&self, model: &Envelope, message: T) -> Result<tonic::Request<T>> {
        let mut request = tonic::Request::new(message);
        for (name, value) in &model.headers {
            let name: tonic::metadata::AsciiMetadataKey =
                name.to_lowercase().parse().with_context(|| format!("--header {name}: not a metadata name"))?;
            request.metadata_mut().insert(name, value.parse().with_context(|| format!("--header {value}"))?);
        }
        Ok(request)
    }

    /// The body of a GET.
    fn get(&self, path: &str) -> Result<Vec<u8>> {
        let mut stream =
            TcpStream::connect_timeout(&self.target.address, PATIENCE).with_context(|| unreachable(&self.target))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\nUser-Agent: downbeat-bench\r\nConnection: close\r\n\r\n",
            self.target.host
        );
        stream.write_all(request.as_bytes())?;
        let mut reader = ResponseReader::new(Keep { good: MOST_BODY, bad: 4096 });
        let mut buffer = vec![0; 64 * 1024];
        let finished = loop {
            let read = stream.read(&mut buffer).with_context(|| format!("GET {path}"))?;
            if read == 0 {
                break reader.closed().with_context(|| format!("GET {path}: the server closed the connection"))?;
            }
            let pushed = reader.push(buffer.get(..read).unwrap_or_default());
            if let Some(finished) = pushed.map_err(|e| anyhow!("GET {path}: {}", e.0))? {
                break finished;
            }
        };
        if finished.status != 200 {
            let said = String::from_utf8_lossy(reader.body()).into_owned();
            bail!("GET {path}: status {}: {}", finished.status, said.trim());
        }
        Ok(reader.body().to_vec())
    }
}

fn unreachable(target: &Target) -> String {
    format!("no server at {} ({})", target.url(), target.address)
}

fn said(status: tonic::Status) -> anyhow::Error {
    anyhow!("{:?}: {}", status.code(), status.message())
}

fn from_proto(model: proto::ModelStatistics) -> StatisticsOfModel {
    let phase =
        |d: Option<proto::StatisticDuration>| d.map_or(Phase::default(), |d| Phase { count: d.count, ns: d.ns });
    let phases = model.inference_stats.unwrap_or_default();
    StatisticsOfModel {
        inference_count: model.inference_count,
        execution_count: model.execution_count,
        inference_stats: Phases {
            queue: phase(phases.queue),
            compute_input: phase(phases.compute_input),
            compute_infer: phase(phases.compute_infer),
            compute_output: phase(phases.compute_output),
        },
        batch_stats: model
            .batch_stats
            .into_iter()
            .map(|b| StatisticsOfBatch { batch_size: b.batch_size, compute_infer: phase(b.compute_infer) })
            .collect(),
    }
}
