//! Asks the server about its models: metadata and statistics. It sends one request at a time, and
//! no measurement counts these requests.

use std::net::SocketAddr;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use downbeat_core::tensor::TensorSpec;
use downbeat_protocol::http::{ModelMetadataBody, TensorMetadataBody, statistics_from_json};
use downbeat_protocol::inference as proto;
use downbeat_protocol::inference::grpc_inference_service_client::GrpcInferenceServiceClient;

use futures_util::future::BoxFuture;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tower_service::Service;

use crate::args::Protocol;
use crate::client::Client;
use crate::client::request::Envelope;
use crate::client::tls::Tls;
use crate::results::statistics::ModelStatistics;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of an answer over gRPC.
const MOST_BODY: usize = 16 << 20;

/// The server's protocol and address.
#[derive(Clone, Debug)]
pub struct Target {
    /// Protocol.
    pub protocol: Protocol,
    /// The first address of the host.
    pub address: SocketAddr,
    /// The host as the user wrote it, with the port.
    pub host: String,
    /// `None`: without TLS.
    pub tls: Option<Tls>,
}

impl Target {
    /// The target as a URL.
    pub fn url(&self) -> String {
        let secure = if self.tls.is_some() { "s" } else { "" };
        format!("{}{secure}://{}", self.protocol.name(), self.host)
    }
}

/// A client of the server's other endpoints.
pub struct Control {
    target: Target,
    runtime: tokio::runtime::Runtime,
}

impl Control {
    /// Makes a client.
    ///
    /// # Errors
    /// If the system has no room for another event loop.
    pub fn new(target: Target) -> Result<Self> {
        Ok(Control { target, runtime: tokio::runtime::Builder::new_current_thread().enable_all().build()? })
    }

    /// The inputs of a model.
    ///
    /// # Errors
    /// If the server does not answer, or does not have the model.
    pub fn inputs(&self, model: &Envelope) -> Result<Vec<TensorSpec>> {
        let inputs: Vec<TensorMetadataBody> = self.runtime.block_on(async {
            if self.target.protocol == Protocol::Http {
                return Ok(self.http().await?.get::<ModelMetadataBody>(&model.path("")).await?.inputs);
            }
            let request = proto::ModelMetadataRequest { name: model.model.clone(), version: model.version.clone() };
            let answer = self.grpc().await?.model_metadata(with_headers(model, request)?).await.map_err(said)?;
            let tensor = |t: proto::model_metadata_response::TensorMetadata| TensorMetadataBody {
                name: t.name,
                datatype: t.datatype,
                shape: t.shape,
            };
            anyhow::Ok(answer.into_inner().inputs.into_iter().map(tensor).collect())
        })?;
        let spec = |t: TensorMetadataBody| {
            let datatype = t.datatype.parse().with_context(|| format!("input '{}'", t.name))?;
            Ok(TensorSpec { name: t.name, datatype, dims: t.shape })
        };
        inputs.into_iter().map(spec).collect()
    }

    /// The server's counters of a model so far, all its versions together.
    ///
    /// # Errors
    /// If the server does not answer or keeps no statistics.
    pub fn statistics(&self, model: &Envelope) -> Result<ModelStatistics> {
        let versions: Vec<proto::ModelStatistics> = self.runtime.block_on(async {
            if self.target.protocol == Protocol::Http {
                return Ok(statistics_from_json(&self.http().await?.get_bytes(&model.path("/stats")).await?)?);
            }
            let request = proto::ModelStatisticsRequest { name: model.model.clone(), version: model.version.clone() };
            let answer = self.grpc().await?.model_statistics(with_headers(model, request)?).await.map_err(said)?;
            anyhow::Ok(answer.into_inner().model_stats)
        })?;
        let mut sum = ModelStatistics::default();
        for version in versions {
            let phases = version.inference_stats.unwrap_or_default();
            sum.requests_executed += version.inference_count;
            sum.executions += version.execution_count;
            sum.queue += phases.queue.into();
            sum.compute_input += phases.compute_input.into();
            sum.compute_infer += phases.compute_infer.into();
            sum.compute_output += phases.compute_output.into();
            for batch in version.batch_stats {
                let (entry, phase) = (sum.batches.entry(batch.batch_size).or_default(), batch.compute_infer);
                entry.executions += phase.map_or(0, |phase| phase.count);
                entry.compute_infer_ns += phase.map_or(0, |phase| phase.ns);
            }
        }
        Ok(sum)
    }

    async fn http(&self) -> Result<Client> {
        Client::connect(&self.target.url(), PATIENCE).await
    }

    async fn grpc(&self) -> Result<GrpcInferenceServiceClient<tonic::transport::Channel>> {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", self.target.address))?
            .connect_timeout(PATIENCE)
            .timeout(PATIENCE);
        let (url, address) = (self.target.url(), self.target.address);
        let channel = match self.target.tls.clone() {
            None => endpoint.connect().await,
            Some(tls) => endpoint.connect_with_connector(Dial { address, tls }).await,
        };
        let channel = channel.with_context(|| format!("no server at {url} ({address})"))?;
        Ok(GrpcInferenceServiceClient::new(channel).max_decoding_message_size(MOST_BODY))
    }
}

/// Connects over TLS.
struct Dial {
    address: SocketAddr,
    tls: Tls,
}

impl Service<http::Uri> for Dial {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = std::io::Error;
    type Future = BoxFuture<'static, std::io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Uri) -> Self::Future {
        let (address, tls) = (self.address, self.tls.clone());
        Box::pin(async move { Ok(TokioIo::new(tls.connect(TcpStream::connect(address).await?).await?)) })
    }
}

fn with_headers<T>(model: &Envelope, message: T) -> Result<tonic::Request<T>> {
    let mut request = tonic::Request::new(message);
    for (name, value) in &model.headers {
        let name: tonic::metadata::AsciiMetadataKey =
            name.to_lowercase().parse().with_context(|| format!("--header {name}: not a metadata name"))?;
        request.metadata_mut().insert(name, value.parse().with_context(|| format!("--header {value}"))?);
    }
    Ok(request)
}

fn said(status: tonic::Status) -> anyhow::Error {
    anyhow!("{:?}: {}", status.code(), status.message())
}
