//! The cost and the gain of moving between partitions on real cores: `cargo bench -p
//! downbeat-server --bench shares`, on two cores or more, in the folder of the workspace.
//!
//! First come 200 switches of a model (`mlp`, rten, one thread) between two cores, under eight
//! clients that wait for answers. The bench measures the time without service, from the last launch
//! on the former core to the first on the new core. The time between any two launches stands beside
//! this time.
//!
//! Then a small model (`digits`, a request of one item every 5 ms) runs alone, and beside a large
//! one (`mlp`, requests of 128 items, four clients, two threads). The large one shares both cores
//! with it freely, or with `shares = "auto"`. Rounds alternate, medians are printed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use downbeat_core::tensor::DataType;
use downbeat_engine::Topology;
use downbeat_models::registry::Registry;
use downbeat_protocol::{InferRequest, InferTensor};
use downbeat_service::clock::Clock;
use downbeat_service::options::{EngineChoice, ModelControl, ModelOptions, ServerOptions, SharesBy};
use downbeat_service::service::{LoadOverrides, Service};

const SWITCHES: u32 = 200;
const ROUNDS: usize = 5;
/// How long each round measures.
const ROUND: Duration = Duration::from_secs(4);

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(switches())?;
    runtime.block_on(isolation())
}

async fn serve(models: &[&str], change: impl FnOnce(&mut ServerOptions)) -> anyhow::Result<Registry> {
    let mut options = ServerOptions::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models").into());
    options.engine = EngineChoice::Rten;
    options.threads = 1;
    options.profiling.enabled = false;
    options.device.policy = "windowed".parse().map_err(anyhow::Error::msg)?;
    options.model_control = ModelControl::Explicit { load: models.iter().map(|name| (*name).to_owned()).collect() };
    for name in models {
        // The SLO is so long that every request is answered.
        let slo = Some(downbeat_core::Duration::from_millis(600_000));
        options.models.insert((*name).to_owned(), ModelOptions { slo, ..ModelOptions::default() });
    }
    change(&mut options);
    let registry = Registry::open(Arc::new(options))?;
    for name in models {
        registry.load_model(name, LoadOverrides::default(), Arc::new(())).await.map_err(anyhow::Error::msg)?;
    }
    Ok(registry)
}

fn request(model: &str, rows: i64) -> InferRequest {
    let (name, dims) = if model == "mlp" { ("input", vec![rows, 784]) } else { ("image", vec![rows, 8, 8]) };
    let bytes = dims.iter().product::<i64>() as usize * 4;
    let input = InferTensor {
        name: name.to_owned(),
        datatype: DataType::Fp32,
        shape: dims,
        parameters: Default::default(),
        data: vec![0; bytes].into(),
    };
    InferRequest { model_name: model.to_owned(), inputs: vec![input], ..Default::default() }
}

/// Clients that ask again as soon as they have an answer. Counts the answers.
fn closed(
    registry: &Registry,
    model: &'static str,
    rows: i64,
    clients: usize,
    stopped: &Arc<AtomicBool>,
) -> Arc<AtomicU64> {
    let answers = Arc::new(AtomicU64::new(0));
    for _ in 0..clients {
        let (registry, stopped, answers) = (registry.clone(), stopped.clone(), answers.clone());
        tokio::spawn(async move {
            while !stopped.load(Ordering::Relaxed) && registry.infer(request(model, rows)).await.is_ok() {
                answers.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    answers
}

async fn switches() -> anyhow::Result<()> {
    let topology = Topology::here();
    let cores: Vec<String> = topology.cores_of(topology.usable()).take(2).map(|core| core.to_string()).collect();
    anyhow::ensure!(cores.len() == 2, "this machine has one core");
    let registry = serve(&["mlp"], |options| options.device.partitions = cores).await?;
    let stopped = Arc::new(AtomicBool::new(false));
    let answers = closed(&registry, "mlp", 1, 8, &stopped);
    let (mut at_switch, mut between, mut takes) = (Vec::new(), Vec::new(), Vec::new());
    for switch in 0..SWITCHES {
        tokio::time::sleep(Duration::from_millis(40)).await;
        let clock = Clock::start();
        registry.set_partition("mlp", Some((switch + 1) % 2)).await.map_err(anyhow::Error::msg)?;
        takes.push(clock.now().as_nanos() as f64 / 1e3);
        tokio::time::sleep(Duration::from_millis(20)).await;
        let past = registry.timeline(Duration::from_millis(50)).context("there is a timeline")?;
        let mut launches = past.devices.into_iter().flat_map(|device| device.launches).collect::<Vec<_>>();
        launches.sort_by_key(|launch| launch.begin_ns);
        let mut last_end = None;
        for pair in launches.windows(2) {
            let end = pair[0].end_ns.max(last_end.unwrap_or(0));
            last_end = Some(end);
            let gap = pair[1].begin_ns.saturating_sub(end) as f64 / 1e3;
            if pair[0].partition == pair[1].partition { &mut between } else { &mut at_switch }.push(gap);
        }
    }
    stopped.store(true, Ordering::Relaxed);
    println!("{} switches seen of {SWITCHES}, {} answers", at_switch.len(), answers.load(Ordering::Relaxed));
    for (what, gaps) in [
        ("without service at a switch", &mut at_switch),
        ("between other launches", &mut between),
        ("from PUT to its answer", &mut takes),
    ] {
        println!("{what:<28} median {:>9.1} us, 99% {:>9.1} us", quantile(gaps, 0.5), quantile(gaps, 0.99));
    }
    Ok(())
}

/// Milliseconds of the small model, median and 99%; items a second of the large one and of both.
type Row = [Vec<f64>; 4];

async fn isolation() -> anyhow::Result<()> {
    let modes = [
        ("alone", false, SharesBy::Fixed),
        ("free sharing", true, SharesBy::Fixed),
        ("shares = \"auto\"", true, SharesBy::Auto),
    ];
    let mut rows: Vec<Row> = modes.iter().map(|_| Row::default()).collect();
    for _ in 0..ROUNDS {
        for ((_, beside, shares), row) in modes.iter().zip(&mut rows) {
            round(*beside, *shares, row).await?;
        }
    }
    println!("\nsmall model         median ms    99% ms   large items/s   both items/s");
    for ((mode, ..), row) in modes.iter().zip(&mut rows) {
        let [median, p99, large, both] = row.each_mut().map(|values| quantile(values, 0.5));
        println!("{mode:<18} {median:>10.3} {p99:>9.3} {large:>15.0} {both:>14.0}");
    }
    Ok(())
}

async fn round(beside: bool, shares: SharesBy, row: &mut Row) -> anyhow::Result<()> {
    let models: &[&str] = if beside { &["digits", "mlp"] } else { &["digits"] };
    let registry = serve(models, |options| {
        options.device.shares = shares;
        options.models.entry("mlp".to_owned()).or_default().threads = Some(2);
    })
    .await?;
    let stopped = Arc::new(AtomicBool::new(false));
    let large = if beside { closed(&registry, "mlp", 128, 4, &stopped) } else { Arc::default() };
    // Shares are given out.
    for _ in 0..20 {
        registry.divide_devices();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (clock, before) = (Clock::start(), large.load(Ordering::Relaxed));
    let (mut answers, mut ticks) = (Vec::new(), tokio::time::interval(Duration::from_millis(5)));
    while clock.now().as_nanos() < ROUND.as_nanos() as u64 {
        ticks.tick().await;
        let registry = registry.clone();
        answers.push(tokio::spawn(async move {
            let begin = Clock::start();
            let answer = registry.infer(request("digits", 1)).await;
            answer.map(|_| begin.now().as_nanos() as f64 / 1e6)
        }));
    }
    let seconds = clock.now().as_nanos() as f64 / 1e9;
    let large = (large.load(Ordering::Relaxed) - before) as f64 * 128.0 / seconds;
    stopped.store(true, Ordering::Relaxed);
    let mut latencies = Vec::new();
    for answer in answers {
        latencies.push(answer.await?.map_err(anyhow::Error::msg)?);
    }
    let small = latencies.len() as f64 / seconds;
    let values = [quantile(&mut latencies, 0.5), quantile(&mut latencies, 0.99), large, large + small];
    row.iter_mut().zip(values).for_each(|(row, value)| row.push(value));
    Ok(())
}

fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get((values.len() as f64 * part) as usize).or(values.last()).copied().unwrap_or(f64::NAN)
}
