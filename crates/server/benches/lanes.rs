//! The cost of the device policies in the server: `cargo bench -p downbeat-server`.
//!
//! Serves a model that takes next to nothing (emulated, 20 us a batch) through each policy, with
//! many requests at once. Prints requests a second, and the microseconds of scheduling for a launch
//! and for a request, with the wait for another thread that decides. Rounds alternate between the
//! policies; medians are printed.

use std::sync::Arc;

use downbeat_core::tensor::DataType;
use downbeat_models::registry::Registry;
use downbeat_protocol::{InferRequest, InferTensor};
use downbeat_service::clock::Clock;
use downbeat_service::options::{DeviceGroup, EngineChoice, PolicyName, ServerOptions};
use downbeat_service::service::{LoadOverrides, Service};

const ROUNDS: usize = 5;
const CLIENTS: usize = 16;
const REQUESTS: usize = 2_000;
const MODEL: &str = "alpha_ms = 0.001\nbeta_ms = 0.02\nmax_batch = 16\n\
                     [[inputs]]\nname = \"x\"\ndatatype = \"FP32\"\ndims = [-1, 64]\n\
                     [[outputs]]\nname = \"y\"\ndatatype = \"FP32\"\ndims = [-1, 1]\n";

#[derive(Default)]
struct Row {
    rates: Vec<f64>,
    launch_us: Vec<f64>,
    request_us: Vec<f64>,
    batch: Vec<f64>,
}

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let folder = tempfile::tempdir()?;
    std::fs::create_dir_all(folder.path().join("m/1"))?;
    std::fs::write(folder.path().join("m/1/model.emulated.toml"), MODEL)?;
    let policies: Vec<_> = PolicyName::all().collect();
    let mut rows: Vec<Row> = policies.iter().map(|_| Row::default()).collect();
    for _ in 0..ROUNDS {
        for (policy, row) in policies.iter().zip(&mut rows) {
            runtime.block_on(round(folder.path(), *policy, row))?;
        }
    }
    println!(
        "policy        requests/s   items a launch   us a launch   us a request   (scheduling; {CLIENTS} clients)"
    );
    for (policy, row) in policies.iter().zip(&mut rows) {
        let [rate, batch, launch, request] =
            [&mut row.rates, &mut row.batch, &mut row.launch_us, &mut row.request_us].map(|values| median(values));
        println!("{:<12} {rate:>11.0} {batch:>16.1} {launch:>13.2} {request:>14.2}", policy.name());
    }
    Ok(())
}

async fn round(repository: &std::path::Path, policy: PolicyName, row: &mut Row) -> anyhow::Result<()> {
    let mut options = ServerOptions::new(repository.to_owned());
    options.engine = EngineChoice::Emulated;
    let settings = [("stages".to_owned(), 2.into())].into();
    options.device.groups = vec![DeviceGroup { models: vec!["m".to_owned()], policy: None, settings }];
    options.device.policy = policy;
    let registry = Registry::open(Arc::new(options))?;
    registry.load_model("m", LoadOverrides::default(), Arc::new(())).await.map_err(anyhow::Error::msg)?;
    let clock = Clock::start();
    let clients = (0..CLIENTS).map(|_| {
        let registry = registry.clone();
        tokio::spawn(async move {
            for _ in 0..REQUESTS {
                registry.infer(request()).await.map_err(anyhow::Error::msg)?;
            }
            anyhow::Ok(())
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await??;
    }
    let seconds = clock.now().as_nanos() as f64 / 1e9;
    let text = registry.metrics()?;
    let metric = |name: &str| -> f64 {
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    };
    let requests = (CLIENTS * REQUESTS) as f64;
    let (scheduling, launches) = (metric("downbeat_lane_scheduling_seconds_total"), metric("downbeat_launches_total"));
    row.rates.push(requests / seconds);
    row.batch.push(requests / metric("nv_inference_exec_count"));
    row.launch_us.push(if launches > 0.0 { scheduling * 1e6 / launches } else { f64::NAN });
    row.request_us.push(if launches > 0.0 { scheduling * 1e6 / requests } else { f64::NAN });
    Ok(())
}

fn request() -> InferRequest {
    let input = InferTensor {
        name: "x".to_owned(),
        datatype: DataType::Fp32,
        shape: vec![1, 64],
        parameters: Default::default(),
        data: vec![0; 256].into(),
    };
    InferRequest { model_name: "m".to_owned(), inputs: vec![input], ..Default::default() }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
