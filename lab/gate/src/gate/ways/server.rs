//! The server way: frontend, `Serving`, driver, and the launch on the frontend's thread, with an
//! engine that computes nothing.
//!
//! The client has a thread of its own, and the server answers on the frontends' thread. One waits
//! while the other runs. The sockets are real, so that a request's system calls are counted.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use downbeat_frontend::connections::{ConnectionOptions, Connections, FrontendThreads, Stage, bind};
use downbeat_frontend::grpc::{self, GrpcOptions};
use downbeat_frontend::http::{self, HttpOptions, HttpState};
use downbeat_models::registry::Registry;
use downbeat_service::options::{EngineChoice, ServerOptions};
use downbeat_service::service::LoadOverrides;
use tokio::sync::watch;

use super::grpc_client::GrpcClient;
use super::http_client::HttpClient;
use crate::gate::part::Plan;
use crate::gate::still;

/// Values of a request's tensor: as many as `mlp` takes.
pub const INPUTS: usize = 784;
/// A batch takes 20 us and 1 us for each request, so that it is brief; its outputs are zeros.
pub const MODEL: &str = "alpha_ms = 0.001\nbeta_ms = 0.02\nmax_batch = 32\n\
                     [[inputs]]\nname = \"x\"\ndatatype = \"FP32\"\ndims = [-1, 784]\n\
                     [[outputs]]\nname = \"y\"\ndatatype = \"FP32\"\ndims = [-1, 10]\n";
/// Between two requests, nanoseconds.
const EVERY: u64 = 200_000;
/// Parts of the scheduler: those of a machine with two cores.
const SHARDS: usize = 2;

/// The values of a request's tensor: numbers of some digits, as pictures have.
pub fn input_values() -> impl Iterator<Item = f32> {
    (0..INPUTS).map(|index| ((index * 37) % 256) as f32 / 255.0)
}

/// What asks.
pub trait Client {
    /// Sends a request, and reads its answer.
    fn ask(&mut self) -> Result<()>;
}

/// Counts requests over HTTP.
pub fn run_http(plan: &Plan, request: &[u8]) -> Result<()> {
    serve(plan, |address| HttpClient::connect(address[0], request))
}

/// Counts requests over gRPC.
pub fn run_grpc(plan: &Plan) -> Result<()> {
    serve(plan, |address| GrpcClient::connect(address[1]))
}

fn serve<C: Client>(plan: &Plan, connect: impl FnOnce([SocketAddr; 2]) -> Result<C>) -> Result<()> {
    let repository = plan.folder().join("models");
    std::fs::create_dir_all(repository.join("m/1"))?;
    std::fs::write(repository.join("m/1/model.emulated.toml"), MODEL)?;
    let mut options = ServerOptions::new(repository);
    options.engine = EngineChoice::Emulated;
    options.scheduler_shards = SHARDS;
    options.profiling.cache_dir = Some(plan.folder().join("profiles"));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (_stage, stages) = watch::channel(Stage::Serving);
    let addresses = runtime.block_on(async {
        let registry = Registry::open(Arc::new(options))?;
        registry.load_model("m", LoadOverrides::default(), Arc::new(())).await.map_err(anyhow::Error::msg)?;
        let connections = Connections::on(ConnectionOptions::default(), FrontendThreads::start(1)?);
        let (service, memory) = (Arc::new(registry), Arc::default());
        let any = || bind(([127, 0, 0, 1], 0).into());
        let (for_http, for_grpc) = (any()?, any()?);
        let addresses = [for_http.local_addr()?, for_grpc.local_addr()?];
        let state = HttpState::new(service.clone(), Arc::clone(&memory), HttpOptions::default());
        tokio::spawn(http::serve(for_http, connections.clone(), state, stages.clone()));
        tokio::spawn(grpc::serve(for_grpc, connections, service, memory, GrpcOptions::default(), stages));
        anyhow::Ok(addresses)
    })?;
    let mut client = connect(addresses)?;
    still::be_client();
    plan.run(|requests| {
        for _ in 0..requests {
            ask_as_client(&mut client)?;
        }
        Ok(())
    })
}

/// Does the client's part of a request. Measurements leave this function out by its name.
#[inline(never)]
fn ask_as_client(client: &mut impl Client) -> Result<()> {
    still::pass(EVERY);
    client.ask()?;
    still::wait_until_idle();
    Ok(())
}
