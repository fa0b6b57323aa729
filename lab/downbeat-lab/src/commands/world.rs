//! `downbeat-lab world`: devices, models, clients and failures from a file.

use std::path::PathBuf;

use anyhow::Error;
use clap::Args;
use downbeat_report::Json;
use downbeat_sim::check_seeds;

use crate::world::WorldFile;

/// Run a world from a file: devices with partitions, models with any policy, clients, and failures.
///
/// The production scheduler and device policies decide, on emulated devices. A judge checks every
/// decision: a run that ends has broken no rule. A run follows from its seed.
///
/// Examples:
///   downbeat-lab world lab/experiments/worlds/three_models_two_devices.toml
///   downbeat-lab world lab/experiments/worlds/device_lost.toml --seed 1,2,3 --json
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct WorldArgs {
    /// World: a TOML file, such as the files in lab/experiments/worlds/.
    #[arg(value_name = "WORLD.toml")]
    file: PathBuf,

    /// Seed of all random numbers instead of the file's. Repeatable, or separated by commas.
    #[arg(long = "seed", value_name = "N", value_delimiter = ',')]
    seeds: Vec<u64>,

    #[command(flatten)]
    json: Json,
}

/// Runs the world and prints the results.
///
/// # Errors
/// If the file is wrong, or a result cannot be written.
pub fn run(args: &WorldArgs) -> anyhow::Result<()> {
    check_seeds(&args.seeds).map_err(Error::msg)?;
    let results = WorldFile::read(&args.file)?.run(&args.seeds)?;
    args.json.print(&results)
}
