//! A bare echo server of the protocol's endpoints: what the HTTP and gRPC libraries cost without a server behind them.
//!
//! `cargo run --release -p downbeat-bench --example echo -- --port 8100 --grpc-port 8101`, then
//! `downbeat bench -m any --url 127.0.0.1:8100 --closed`.

use std::net::{Ipv4Addr, SocketAddr};

use axum::Router;
use axum::body::Bytes;
use axum::extract::Path;
use axum::routing::{get, post};
use clap::Parser;
use downbeat_protocol::inference as proto;
use downbeat_protocol::inference::grpc_inference_service_server::GrpcInferenceServiceServer;
use tonic::Status;

#[path = "support/service.rs"]
mod service;

use service::{Answers, Service};

/// Answers each inference with its own input.
#[derive(Parser, Debug)]
struct Options {
    /// Port of HTTP, on the loopback address.
    #[arg(long, default_value_t = 8100)]
    port: u16,
    /// Port of gRPC, on the loopback address.
    #[arg(long)]
    grpc_port: Option<u16>,
    /// Elements of the one FP32 input that every model has.
    #[arg(long, default_value_t = 784)]
    elements: i64,
    /// HTTP answers have this many bytes instead of the request's own.
    #[arg(long)]
    answer_bytes: Option<usize>,
}

struct Echo {
    elements: i64,
}

impl Answers for Echo {
    async fn infer(&self, request: proto::ModelInferRequest) -> Result<proto::ModelInferResponse, Status> {
        Ok(proto::ModelInferResponse {
            model_name: request.model_name,
            raw_output_contents: request.raw_input_contents,
            ..Default::default()
        })
    }

    fn elements(&self) -> i64 {
        self.elements
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let elements = options.elements;
    let answer = options.answer_bytes.map(|n| Bytes::from(vec![b'x'; n]));
    let infer = move |body: Bytes| {
        let answer = answer.clone().unwrap_or(body);
        async move { answer }
    };
    let metadata = move |Path(model): Path<String>| async move {
        serde_json::json!({
            "name": model,
            "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, elements]}],
        })
        .to_string()
    };
    let router =
        Router::new().route("/v2/models/{model}", get(metadata)).route("/v2/models/{model}/infer", post(infer));
    if let Some(port) = options.grpc_port {
        let service = GrpcInferenceServiceServer::new(Service(Echo { elements }));
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        tokio::spawn(async move {
            if let Err(e) = tonic::transport::Server::builder().add_service(service).serve(address).await {
                eprintln!("gRPC on {address}: {e}");
            }
        });
    }
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, options.port)).await?;
    eprintln!("echo on {}", listener.local_addr()?);
    Ok(axum::serve(axum::serve::ListenerExt::tap_io(listener, |s| drop(s.set_nodelay(true))), router).await?)
}
