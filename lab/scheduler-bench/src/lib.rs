//! Load on the cluster's scheduler alone: generated requests in, emulated devices out, no server
//! and no network.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod allocations;
mod args;
mod counted;
mod multi_thread;
mod posting;
mod report;
mod single_thread;
mod workload;

use anyhow::{Result, ensure};
use downbeat_core::Duration;
use downbeat_driver::MAX_SHARDS;
use downbeat_report::note;

pub use args::SchedulerArgs;
pub use counted::CountedScheduler;
pub use report::{Latency, Measurement};
pub use workload::{Requests, Workload};

use report::Sweep;

/// Numbers of models and of devices in a sweep.
const SWEEP: [u32; 6] = [16, 64, 256, 1024, 4096, 16384];

/// Measures as the command line says, and prints a table or JSON.
///
/// # Errors
/// If the command line is wrong, the report cannot be written, or the scheduler loses a request.
pub fn run(args: &SchedulerArgs) -> Result<()> {
    if args.sweep {
        let mut runs = Vec::new();
        for models in SWEEP {
            for devices in SWEEP {
                runs.push(measure(&SchedulerArgs { models, devices, ..args.clone() })?);
                let ns = runs[runs.len() - 1].cpu_ns_per_event;
                note(format_args!("{models} models, {devices} devices: {ns:.1} ns/event"));
            }
        }
        return args.json.print(&Sweep(runs));
    }
    args.json.print(&measure(args)?)
}

/// The workload that the arguments describe.
///
/// # Errors
/// If the load or the rate is out of bounds.
pub fn workload(args: &SchedulerArgs) -> Result<Workload> {
    ensure!(args.load > 0.0 && args.load <= 10.0, "--load must be more than 0 and at most 10");
    let dispatch = args.policy.clone().with_delay(Duration::from_millis(5), &[]);
    let mut workload = Workload::new(args.models, args.devices, args.max_batch, dispatch, args.drop, args.seed);
    let capacity = workload.capacity();
    workload.rate = args.rate.unwrap_or(args.load * capacity);
    ensure!(workload.rate > 0.0 && workload.rate <= 1e9, "--rate must be more than 0 and at most 1e9");
    ensure!(
        args.rate.is_none() || workload.rate <= capacity,
        "--rate: {} devices serve at most {capacity:.0} requests a second; offer less, or have more --devices",
        args.devices
    );
    Ok(workload)
}

/// Measures one number of models and devices.
///
/// # Errors
/// If the arguments contradict each other, or the scheduler loses a request.
pub fn measure(args: &SchedulerArgs) -> Result<Measurement> {
    ensure!(args.seconds > 0.0 && args.seconds <= 3600.0, "--seconds must be more than 0 and at most 3600");
    let length = Duration::from_secs_f64(args.seconds);
    let workload = workload(args)?;
    if let Some(threads) = args.posting_threads {
        let cores = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_SHARDS) as u32;
        let shards = if args.shards == 0 { cores.min(args.models) } else { args.shards };
        return posting::run(&workload, threads, shards, length);
    }
    match args.threads {
        1 if !args.matchmaker_thread && args.rate.is_some() => single_thread::run_paced(&workload, length),
        1 if !args.matchmaker_thread => single_thread::run(&workload, length),
        threads => multi_thread::run(&workload, threads, length, args.rate.is_some()),
    }
}
