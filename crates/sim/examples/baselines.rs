//! Capacities of the baselines and of Downbeat's policies, beside the bounds: Symphony's table 2 and figure 9.
//!
//! ```text
//! cargo run --release -p downbeat-sim --example baselines
//! ```

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::profile::ProfileError;
use downbeat_core::{Duration, LatencyProfile};
use downbeat_sim::{
    Arrivals, Gather, Load, NexusOptions, Pace, Search, Simulation, System, clairvoyant, fluid, staggered,
};

const SEED: u64 = 1;

/// Name, `alpha`, `beta` and SLO in milliseconds.
type Profile<'a> = (&'a str, f64, f64, f64);

const TABLE_2: [Profile<'static>; 2] = [("ResNet50", 1.053, 5.072, 25.0), ("InceptionResNetV2", 5.090, 18.368, 70.0)];
const PROFILES_1080TI: &str = include_str!("../../../experiments/profiles/profiles_1080ti.csv");
const PROFILES_A100: &str = include_str!("../../../experiments/profiles/profiles_a100.csv");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("Poisson, seed {SEED}; requests per second with at most 1% of each model's dropped or late");
    println!("{:24} {:28} {:>8} {:>7} {:>6}", "workload", "system", "capacity", "batch", "busy");
    for model in TABLE_2 {
        measure(model.0, &[model], 8)?;
    }
    for (cluster, profiles) in [("1080Ti", read(PROFILES_1080TI)?), ("A100", read(PROFILES_A100)?)] {
        let strong = |(_, alpha, beta, _): &Profile| beta / alpha > 2.0;
        let (strong, weak): (Vec<Profile>, Vec<Profile>) = profiles.iter().copied().partition(strong);
        for (kind, models) in [("mixed", profiles), ("strong", strong), ("weak", weak)] {
            measure(&format!("{cluster} {kind}, {} models", models.len()), &models, 64)?;
        }
    }
    Ok(())
}

fn read(csv: &str) -> Result<Vec<Profile<'_>>, Box<dyn std::error::Error>> {
    let mut profiles = Vec::new();
    for line in csv.lines().skip(1).filter(|line| !line.is_empty()) {
        let [name, alpha, beta, slo] = line.split(',').collect::<Vec<_>>()[..] else {
            return Err(format!("expected name,alpha_ms,beta_ms,slo_ms, got {line}").into());
        };
        profiles.push((name, alpha.parse()?, beta.parse()?, slo.parse()?));
    }
    Ok(profiles)
}

fn systems() -> Vec<(&'static str, System, DispatchPolicy, DropPolicy)> {
    use DispatchPolicy::{Deferred, Eager};
    use DropPolicy::{HeadDrop, WindowDrop};
    let timeout = || DispatchPolicy::Timeout { delay: Duration::from_millis(5), preferred: Vec::new() };
    let nexus = |frontends| System::Nexus(NexusOptions { frontends, ..NexusOptions::default() });
    vec![
        ("Clockwork", System::Clockwork, Eager, HeadDrop),
        ("Nexus, 1 frontend", nexus(1), Eager, HeadDrop),
        ("Nexus, 8 frontends", nexus(8), Eager, HeadDrop),
        ("Shepherd, prefix", System::Shepherd(Gather::Prefix), Eager, HeadDrop),
        ("Shepherd, largest", System::Shepherd(Gather::Largest), Eager, HeadDrop),
        ("eager, head drop", System::Downbeat, Eager, HeadDrop),
        ("eager, window drop", System::Downbeat, Eager, WindowDrop),
        ("timeout 5 ms, head drop", System::Downbeat, timeout(), HeadDrop),
        ("timeout 5 ms, window drop", System::Downbeat, timeout(), WindowDrop),
        ("deferred, head drop", System::Downbeat, Deferred, HeadDrop),
        ("deferred, window drop", System::Downbeat, Deferred, WindowDrop),
    ]
}

fn measure(name: &str, models: &[Profile], devices: u32) -> Result<(), Box<dyn std::error::Error>> {
    // What the devices could do with full batches, about.
    let work: f64 = models.iter().map(|(_, alpha, beta, slo)| alpha + beta / ((slo - beta) / alpha).max(1.0)).sum();
    let rate = 1_000.0 * f64::from(devices) / work;
    let loads_with = |dispatch: &DispatchPolicy, drop: DropPolicy| -> Result<Vec<Load>, ProfileError> {
        models
            .iter()
            .map(|(_, alpha, beta, slo)| {
                let (alpha, beta) = (Duration::from_millis_f64(*alpha), Duration::from_millis_f64(*beta));
                let max_batch = 512;
                let options = ModelOptions {
                    profiles: LatencyProfile::linear(alpha, beta, max_batch)?.into(),
                    max_batch,
                    drop,
                    dispatch: dispatch.clone(),
                    max_in_flight: u32::MAX,
                    levels: Vec::new(),
                };
                let (slo, arrivals) = (Duration::from_millis_f64(*slo), Arrivals::Poisson);
                Ok(Load { options, slo, arrivals, rate, pace: Pace::steady() })
            })
            .collect()
    };
    let simulation = Simulation {
        loads: loads_with(&DispatchPolicy::Eager, DropPolicy::HeadDrop)?,
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
        // A bound for this very trace needs no long one, and begins where the other is.
        let span = Duration::from_millis(5_000);
        let factor = rate / simulation.loads.iter().map(|load| load.rate).sum::<f64>();
        let short = Simulation { span, ..simulation.clone() };
        let search = Search { low: 0.95 * factor, high: factor, ..Search::default() };
        if let Some(rate) = clairvoyant(&short, &search)? {
            println!("{name:24} {:28} {rate:8.0}", "bound: clairvoyant");
        }
    }
    for (system_name, system, dispatch, drop) in systems() {
        let simulation = Simulation { system, loads: loads_with(&dispatch, drop)?, ..simulation.clone() };
        match Search::default().capacity(&simulation)? {
            None => println!("{name:24} {system_name:28} {:>8}", "none"),
            Some(found) => {
                let batches: u64 = found.report.models.iter().flat_map(|model| &model.batch_sizes).sum();
                let items: u64 = found
                    .report
                    .models
                    .iter()
                    .flat_map(|model| model.batch_sizes.iter().zip(0..).map(|(count, size)| count * size))
                    .sum();
                println!(
                    "{name:24} {system_name:28} {:8.0} {:7.1} {:5.0}%",
                    found.rate,
                    items as f64 / batches as f64,
                    100.0 * found.report.mean_busy()
                );
            }
        }
    }
    Ok(())
}
