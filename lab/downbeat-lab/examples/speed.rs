//! Measures the number of simulated requests in a second of CPU time, checkers included.
//!
//! ```text
//! cargo run --release -p downbeat-lab --example speed
//! ```
//!
//! Each row is measured three times and the fastest printed: a busy neighbour can only make it
//! slower.

use downbeat_core::cluster::{DispatchPolicy, DropPolicy, ModelOptions};
use downbeat_core::{Duration, LatencyProfile};
use downbeat_sim::{Arrivals, Load, Pace, Simulation};
use rustix::time::{ClockId, clock_gettime};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{:44} {:>10} {:>12} {:>10} {:>10}", "cluster", "requests", "requests/s", "ns each", "mean batch");
    // Name, models, devices, requests per second in all, dispatch policy, drop policy.
    let cases = [
        ("1 model, 8 devices, deferred, window drop", 1, 8, 5_000.0, DispatchPolicy::Deferred, DropPolicy::WindowDrop),
        ("1 model, 8 devices, deferred, head drop", 1, 8, 4_700.0, DispatchPolicy::Deferred, DropPolicy::HeadDrop),
        ("1 model, 8 devices, eager, head drop", 1, 8, 4_700.0, DispatchPolicy::Eager, DropPolicy::HeadDrop),
        (
            "20 models, 64 devices, deferred, window drop",
            20,
            64,
            30e3,
            DispatchPolicy::Deferred,
            DropPolicy::WindowDrop,
        ),
        ("20 models, 64 devices, deferred, head drop", 20, 64, 30e3, DispatchPolicy::Deferred, DropPolicy::HeadDrop),
        (
            "20 models, 1,024 devices, deferred, head drop",
            20,
            1024,
            600e3,
            DispatchPolicy::Deferred,
            DropPolicy::HeadDrop,
        ),
        (
            "1,000 models, 1,024 devices, deferred, window",
            1000,
            1024,
            400e3,
            DispatchPolicy::Deferred,
            DropPolicy::WindowDrop,
        ),
    ];
    for (name, models, devices, rate, dispatch, drop) in cases {
        let profile = LatencyProfile::linear(Duration::from_millis_f64(1.053), Duration::from_millis_f64(5.072), 64)?;
        let options = ModelOptions::new(profile, dispatch, drop);
        let load = Load {
            options,
            slo: Duration::from_millis(25),
            arrivals: Arrivals::Poisson,
            rate: rate / f64::from(models),
            pace: Pace::steady(),
        };
        let simulation = Simulation {
            loads: vec![load; models as usize],
            devices,
            warm_up: Duration::ZERO,
            span: Duration::from_secs_f64(2e6 / rate),
            ..Simulation::default()
        };
        let mut best = f64::INFINITY;
        let mut report = simulation.run()?;
        for _ in 0..3 {
            let before = clock_gettime(ClockId::ProcessCPUTime);
            report = simulation.run()?;
            let after = clock_gettime(ClockId::ProcessCPUTime);
            best = best.min((after.tv_sec - before.tv_sec) as f64 + (after.tv_nsec - before.tv_nsec) as f64 * 1e-9);
        }
        let requests: u64 = report.models.iter().map(|model| model.offered).sum();
        println!(
            "{name:44} {requests:10} {:12.0} {:10.1} {:10.1}",
            requests as f64 / best,
            best / requests as f64 * 1e9,
            report.models[0].mean_batch()
        );
    }
    Ok(())
}
