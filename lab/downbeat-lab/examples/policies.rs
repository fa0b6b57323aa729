//! Dispatch and drop policies on one device: capacity, and goodput under overload, in virtual time.
//!
//! ```text
//! cargo run --release -p downbeat-lab --example policies
//! ```

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::{Duration, LatencyProfile};
use downbeat_sim::{Arrivals, BadArrivals, Load, Pace, Simulation, capacity};

const SEED: u64 = 7;
/// The simulated time, in seconds.
const SPAN: f64 = 8.0;
const LARGEST_BATCH: u32 = 32;

/// Name, `alpha` and `beta` in milliseconds, SLO in milliseconds.
const MODELS: [(&str, f64, f64, u64); 3] = [
    ("widemlp, 2 cores", 0.15, 1.6, 50),
    ("ResNet-50, 2 cores", 24.0, 6.0, 500),
    ("ResNet-50, Symphony", 1.053, 5.072, 25),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("seed {SEED}, Poisson, one device; rates per second; execution times exact, and varying by 10%");
    println!(
        "{:20} {:9} {:11} {:>6} {:>9} {:>9} {:>9}",
        "model", "dispatch", "drop", "varies", "capacity", "at 1.5x", "at 3x"
    );
    for (name, alpha, beta, slo) in MODELS {
        let profile =
            LatencyProfile::linear(Duration::from_millis_f64(alpha), Duration::from_millis_f64(beta), LARGEST_BATCH)?;
        let peak = f64::from(LARGEST_BATCH) / profile.latency(LARGEST_BATCH).as_secs_f64();
        for (dispatch, drop, noise) in choices() {
            let simulation = |rate: f64| Simulation {
                loads: vec![Load {
                    options: ModelOptions::new(profile.clone(), dispatch.clone(), drop),
                    slo: Duration::from_millis(slo),
                    arrivals: Arrivals::Poisson,
                    rate,
                    pace: Pace::steady(),
                }],
                devices: 1,
                warm_up: Duration::from_millis(1_000),
                span: Duration::from_secs_f64(SPAN),
                noise,
                seed: SEED,
                ..Simulation::default()
            };
            let goodput =
                |share: f64| -> Result<f64, BadArrivals> { Ok(simulation(peak * share).run()?.good() as f64 / SPAN) };
            let found = capacity(&simulation(1.0), peak * 0.02, peak * 1.2, 0.01)?.map_or(0.0, |c| c.rate);
            println!(
                "{name:20} {:9} {:11} {noise:6} {found:9.0} {:9.0} {:9.0}",
                format!("{dispatch:?}").split(' ').next().unwrap_or_default(),
                format!("{drop:?}"),
                goodput(1.5)?,
                goodput(3.0)?
            );
        }
    }
    Ok(())
}

/// Every dispatch policy with every drop policy, and the adaptive one, without and with noise.
fn choices() -> Vec<(DispatchPolicy, DropPolicy, f64)> {
    let mut choices = Vec::new();
    for dispatch in [DispatchPolicy::Eager, DispatchPolicy::Deferred] {
        for drop in [DropPolicy::WindowDrop, DropPolicy::HeadDrop, DropPolicy::None] {
            choices.extend([0.0, 0.1].map(|noise| (dispatch.clone(), drop, noise)));
        }
    }
    let adaptive = DispatchPolicy::Adaptive { consolidate: false };
    choices.extend([0.0, 0.1].map(|noise| (adaptive.clone(), DropPolicy::Adaptive, noise)));
    choices
}
