//! A running frontend and its client.

use std::net::SocketAddr;
use std::sync::Arc;

use downbeat_frontend::connections::{ConnectionOptions, Connections, FrontendThreads, Stage, bind};
use downbeat_frontend::grpc::{self, GrpcOptions};
use downbeat_frontend::shared_memory::SharedMemory;
use downbeat_protocol::inference as pb;
use downbeat_protocol::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use crate::support::echo_service::EchoService;

pub type Client = GrpcInferenceServiceClient<Channel>;

/// A frontend on a port of its own. Dropping it stops it.
pub struct Server {
    pub service: Arc<EchoService>,
    pub address: SocketAddr,
    pub task: JoinHandle<()>,
    pub stage: watch::Sender<Stage>,
}

impl Server {
    pub async fn start() -> Self {
        Server::with_options(GrpcOptions::default()).await
    }

    pub async fn with_options(options: GrpcOptions) -> Self {
        Server::with_connections(options, ConnectionOptions::default()).await
    }

    pub async fn with_connections(options: GrpcOptions, connections: ConnectionOptions) -> Self {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let service = Arc::new(EchoService::default());
        let memory = Arc::new(SharedMemory::new());
        let (stage, stages) = watch::channel(Stage::Serving);
        let connections = Connections::on(connections, FrontendThreads::start(2).unwrap());
        let task = tokio::spawn(grpc::serve(listener, connections, Arc::clone(&service), memory, options, stages));
        Server { service, address, task, stage }
    }

    pub async fn channel(&self) -> Channel {
        Channel::from_shared(format!("http://{}", self.address)).unwrap().connect().await.unwrap()
    }

    pub async fn client(&self) -> Client {
        Client::new(self.channel().await)
    }
}

/// A request to `simple`, with the sums of the right answer.
pub fn simple(id: &str) -> (pb::ModelInferRequest, Vec<i32>) {
    let a: Vec<i32> = (0..16).collect();
    let b: Vec<i32> = (0..16).map(|i| 100 * i + id.len() as i32).collect();
    let sums = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    let request = pb::ModelInferRequest {
        model_name: "simple".into(),
        id: id.into(),
        inputs: vec![input("INPUT0", "INT32", &[1, 16]), input("INPUT1", "INT32", &[1, 16])],
        raw_input_contents: vec![bytes(&a).into(), bytes(&b).into()],
        ..Default::default()
    };
    (request, sums)
}

pub fn input(name: &str, datatype: &str, shape: &[i64]) -> pb::model_infer_request::InferInputTensor {
    pb::model_infer_request::InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
        ..Default::default()
    }
}

pub fn bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A parameter's value.
pub fn parameter(value: impl Into<pb::infer_parameter::ParameterChoice>) -> pb::InferParameter {
    pb::InferParameter { parameter_choice: Some(value.into()) }
}

pub fn int64(value: i64) -> pb::InferParameter {
    parameter(pb::infer_parameter::ParameterChoice::Int64Param(value))
}

pub fn string(value: &str) -> pb::InferParameter {
    parameter(pb::infer_parameter::ParameterChoice::StringParam(value.into()))
}

/// Sends a good request and checks its answer. Every test sends one after a bad request.
pub async fn check_good(client: &mut Client) {
    let (request, sums) = simple("good");
    let response = client.model_infer(request).await.expect("the good request is answered").into_inner();
    assert_eq!(response.id, "good");
    assert_eq!(response.model_version, "1");
    assert_eq!(response.raw_output_contents[0], bytes(&sums));
}
