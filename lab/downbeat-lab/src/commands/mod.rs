//! The commands of `downbeat-lab`: parse, call, print.

mod auto;
mod autoscale;
mod calibration;
mod device;
mod experiment;
mod loading;
mod network;
mod pairs;
mod predictors;
mod random;
mod share_profile;
mod slice;
mod slice_report;
mod slot_report;
mod slots;
mod world;

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use downbeat::commands::simulate::CapacityArgs;
use downbeat_report::note;
use downbeat_scheduler_bench::SchedulerArgs;

use crate::policy::POLICIES;

/// Judge Downbeat: papers' figures, published systems, emulated GPUs, random workloads.
#[derive(Parser, Debug)]
#[command(name = "downbeat-lab", version, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Experiment(experiment::ExperimentArgs),
    /// Search capacities like `downbeat simulate capacity`, also with clockwork, nexus,
    /// nexus:FRONTENDS and shepherd
    Capacity(Box<CapacityArgs>),
    Random(random::RandomArgs),
    Scheduler(Box<SchedulerArgs>),
    Device(Box<device::DeviceArgs>),
    Figure(device::FigureArgs),
    Slice(slice::SliceArgs),
    Pairs(pairs::PairArgs),
    Calibrate(calibration::CalibrateArgs),
    Predictors(predictors::PredictorsArgs),
    Auto(auto::AutoArgs),
    Slots(Box<slots::SlotArgs>),
    World(world::WorldArgs),
    Network(network::NetworkArgs),
    Autoscale(autoscale::AutoscaleArgs),
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    downbeat_engine::process::begin(downbeat_engine_ort::VARIABLES);
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(format_args!("downbeat-lab: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Experiment(args) => experiment::run(args),
        Command::Capacity(args) => downbeat::commands::simulate::capacity(&args, &POLICIES),
        Command::Random(args) => random::run(&args),
        Command::Scheduler(args) => downbeat_scheduler_bench::run(&args),
        Command::Device(args) => device::run(&args),
        Command::Figure(args) => device::figure(&args),
        Command::Slice(args) => slice::run(&args),
        Command::Pairs(args) => pairs::run(&args),
        Command::Calibrate(args) => calibration::run(&args),
        Command::Predictors(args) => predictors::run(&args),
        Command::Auto(args) => auto::run(&args),
        Command::Slots(args) => slots::run(&args),
        Command::World(args) => world::run(&args),
        Command::Network(args) => network::run(&args),
        Command::Autoscale(args) => autoscale::run(&args),
    }
}

/// Reads the text of a file.
fn read_text(file: &Path) -> anyhow::Result<String> {
    downbeat::read_text(file).with_context(|| format!("cannot read {}", file.display()))
}
