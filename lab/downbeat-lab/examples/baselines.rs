//! Capacities of the baselines and of Downbeat's policies, beside the bounds: Symphony's table 2
//! and figure 9.
//!
//! ```text
//! cargo run --release -p downbeat-lab --example baselines
//! cargo run --release -p downbeat-lab --example baselines -- "A100 mixed" --clairvoyant
//! ```
//!
//! Arguments select the workloads whose names begin with them. The clairvoyant bound takes minutes
//! for a mix, and runs for mixes only with `--clairvoyant`.

use std::path::Path;
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_lab::baseline::{Gather, NexusOptions};
use downbeat_lab::bounds::{Trace, clairvoyant};
use downbeat_lab::policy::Baseline;
use downbeat_sim::profiles::{self, BadProfiles};
use downbeat_sim::{Arrivals, Downbeat, Load, ModelProfile, Pace, Search, Simulation, System, fluid, mean, staggered};

const SEED: u64 = 1;

const PROFILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../experiments/profiles");

/// Symphony table 2.
fn table_2() -> Result<[ModelProfile; 2], String> {
    Ok(["ResNet50,1.053,5.072,25".parse()?, "InceptionResNetV2,5.090,18.368,70".parse()?])
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("Poisson, seed {SEED}; requests per second with at most 1% of each model's dropped or late");
    println!("{:24} {:28} {:>8} {:>7} {:>6}", "workload", "system", "capacity", "batch", "busy");
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (flags, names): (Vec<&String>, Vec<&String>) = words.iter().partition(|word| word.starts_with("--"));
    if let Some(flag) = flags.iter().find(|flag| **flag != "--clairvoyant") {
        return Err(format!("unknown flag {flag}; --clairvoyant is the only one").into());
    }
    let asked = |name: &str| names.is_empty() || names.iter().any(|start| name.starts_with(*start));
    for model in table_2()?.iter().filter(|model| asked(&model.name)) {
        measure(&model.name, std::slice::from_ref(model), 8, true)?;
    }
    for (cluster, profiles) in [("1080Ti", read("profiles_1080ti.csv")?), ("A100", read("profiles_a100.csv")?)] {
        let strong = |model: &ModelProfile| model.batching_effect() > 2.0;
        let (strong, weak): (Vec<_>, Vec<_>) = profiles.iter().cloned().partition(strong);
        for (kind, models) in [("mixed", profiles), ("strong", strong), ("weak", weak)] {
            let name = format!("{cluster} {kind}, {} models", models.len());
            if asked(&name) {
                measure(&name, &models, 64, !flags.is_empty())?;
            }
        }
    }
    Ok(())
}

fn read(file: &str) -> Result<Vec<ModelProfile>, BadProfiles> {
    profiles::read(&Path::new(PROFILES).join(file))
}

fn systems() -> Vec<(&'static str, Arc<dyn System>, DispatchPolicy, DropPolicy)> {
    use DispatchPolicy::{Deferred, Eager};
    use DropPolicy::{HeadDrop, WindowDrop};
    let timeout = || DispatchPolicy::Timeout { delay: Duration::from_millis(5), preferred: Vec::new() };
    let nexus = |frontends| Arc::new(Baseline::Nexus(NexusOptions { frontends, ..NexusOptions::default() }));
    vec![
        ("Clockwork", Arc::new(Baseline::Clockwork), Eager, HeadDrop),
        ("Nexus, 1 frontend", nexus(1), Eager, HeadDrop),
        ("Nexus, 8 frontends", nexus(8), Eager, HeadDrop),
        ("Shepherd, prefix", Arc::new(Baseline::Shepherd(Gather::Prefix)), Eager, HeadDrop),
        ("Shepherd, largest", Arc::new(Baseline::Shepherd(Gather::Largest)), Eager, HeadDrop),
        ("eager, head drop", Arc::new(Downbeat), Eager, HeadDrop),
        ("eager, window drop", Arc::new(Downbeat), Eager, WindowDrop),
        ("timeout 5 ms, head drop", Arc::new(Downbeat), timeout(), HeadDrop),
        ("timeout 5 ms, window drop", Arc::new(Downbeat), timeout(), WindowDrop),
        ("deferred, head drop", Arc::new(Downbeat), Deferred, HeadDrop),
        ("deferred, window drop", Arc::new(Downbeat), Deferred, WindowDrop),
    ]
}

fn measure(name: &str, models: &[ModelProfile], devices: u32, foresee: bool) -> Result<(), Box<dyn std::error::Error>> {
    // The approximate rate of the devices with full batches.
    let each = |ModelProfile { alpha_ms, beta_ms, slo_ms, .. }: &ModelProfile| {
        alpha_ms + beta_ms / ((slo_ms - beta_ms) / alpha_ms).max(1.0)
    };
    let work: f64 = models.iter().map(each).sum();
    let rate = 1_000.0 * f64::from(devices) / work;
    let loads_with = |dispatch: &DispatchPolicy, drop: DropPolicy| -> Vec<Load> {
        let load = |model: &ModelProfile| Load {
            options: ModelOptions::new(model.latency(512), dispatch.clone(), drop),
            slo: model.slo(),
            arrivals: Arrivals::Poisson,
            rate,
            pace: Pace::steady(),
        };
        models.iter().map(load).collect()
    };
    let simulation = Simulation {
        loads: loads_with(&DispatchPolicy::Eager, DropPolicy::HeadDrop),
        devices,
        span: Duration::from_millis(20_000),
        seed: SEED,
        ..Simulation::default()
    };
    if let [load] = &simulation.loads[..]
        && let Some(best) = staggered(load.options.profiles.first(), load.options.max_batch, load.slo, devices)
    {
        println!("{name:24} {:28} {:8.0} {:7}", "bound: staggered", best.rate, best.batch);
    }
    if let Some(rate) = fluid(&simulation.loads, devices) {
        println!("{name:24} {:28} {rate:8.0}", "bound: fluid");
        // A mix runs for a shorter time, and less precisely.
        let (span_ms, precision) = if models.len() == 1 { (5_000, 0.005) } else { (2_000, 0.02) };
        let span = Duration::from_millis(span_ms);
        let factor = rate / simulation.loads.iter().map(|load| load.rate).sum::<f64>();
        let short = Simulation { span, ..simulation.clone() };
        let search = Search { low: 0.95 * factor, high: factor, precision, ..Search::default() };
        if foresee && let Some(rate) = clairvoyant(&short, &search)? {
            println!("{name:24} {:28} {rate:8.0}", "bound: clairvoyant");
        }
    }
    if let Some(most) = fluid(&simulation.loads, devices)
        && simulation.loads.len() == 1
        && foresee
    {
        let (mut good, mut bad) = (0.85 * most, 1.02 * most);
        for _ in 0..6 {
            let rate = (good + bad) / 2.0;
            let mut scaled = Simulation { span: Duration::from_millis(3_000), ..simulation.clone() };
            scaled.loads[0].rate = rate;
            let trace = Trace::of(&scaled)?;
            let tolerated = 0.01 * trace.models[0].arrivals.len() as f64;
            let held = trace.foreseen_bad(50).is_some_and(|lost| f64::from(lost) <= tolerated);
            if held { good = rate } else { bad = rate }
        }
        println!("{name:24} {:28} {good:8.0}", "achieved with foresight");
    }
    for (system_name, system, dispatch, drop) in systems() {
        let simulation = Simulation { system, loads: loads_with(&dispatch, drop), ..simulation.clone() };
        match Search::default().capacity(&simulation)? {
            Err(_) => println!("{name:24} {system_name:28} {:>8}", "none"),
            Ok(found) => {
                println!(
                    "{name:24} {system_name:28} {:8.0} {:7.1} {:5.0}%",
                    found.rate,
                    mean(&found.report.batch_sizes()),
                    100.0 * found.report.mean_busy()
                );
            }
        }
    }
    Ok(())
}
