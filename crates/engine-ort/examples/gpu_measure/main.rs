//! Measurements of models on a GPU, as rows of JSON: for `tools/gpu_run.py`, or by hand.
//!
//! ```text
//! cargo run --release -p downbeat-engine-ort --example gpu_measure -- STEP [MODEL ...] [--zoo FOLDER] [--batches 1,8,64] [--segments 8] [--seconds 20] [--beside COMMAND]
//! ```
//!
//! STEP:
//! - `graphs`: which segments become CUDA graphs, and why not
//! - `sessions`: memory and time of sessions and partitions
//! - `grids`: grids of kernels in partitions
//! - `census`: which compute units kernels run on
//! - `cuts`: the cost of segments
//! - `launches`: gaps between launches, the input ring
//! - `throughput`: beside other runtimes
//! - `shares`: latency over batch and share of the GPU
//! - `switch`: from one partition to another
//! - `isolation`: a model beside a neighbour
//! - `abacus`: samples of operator groups, added to `--samples FILE`
//! - `plain`: the other side of `throughput`, onnxruntime as it comes
//!
//! MODEL is the name of a model in FOLDER, as `tools/zoo.py` writes them.

#![expect(clippy::disallowed_methods, reason = "it measures, and decides nothing")]

mod abacus;
mod arguments;
mod beside;
mod census;
mod cuts;
mod graphs;
mod kernels;
mod launches;
mod partitions;
mod plain;
mod row;
mod sessions;
mod subject;
mod throughput;

use std::error::Error;
use std::process::ExitCode;

use downbeat_engine_ort::{Choice, CudaOptions, Preference, Search, choose};

use arguments::Arguments;

/// The steps that measure.
const STEPS: &str = "graphs, sessions, grids, census, cuts, launches, throughput, shares, switch, isolation, abacus";

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> ExitCode {
    downbeat_engine::process::begin(downbeat_engine_ort::VARIABLES);
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu_measure: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Outcome<()> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    if arguments.step == "plain" {
        return plain::serve(&arguments);
    }
    let options = CudaOptions { devices: vec![0], ..CudaOptions::default() };
    let Choice { engine, .. } = choose(Preference::Cuda, &Search::from_env(), &options)?;
    let with = |options| -> Outcome<_> { Ok(choose(Preference::Cuda, &Search::from_env(), &options)?.engine) };
    let without = || with(CudaOptions { graphs: false, ..options.clone() });
    match arguments.step.as_str() {
        "graphs" => graphs::measure(&*engine, &*without()?, &arguments),
        "sessions" => sessions::measure(&*engine, &*without()?, &arguments),
        "grids" => graphs::grids(&*engine, &arguments),
        "census" => census::measure(),
        "cuts" => cuts::measure(&*engine, &arguments),
        "launches" => launches::measure(&*engine, &arguments),
        "throughput" => {
            let channels_last = with(CudaOptions { nhwc: true, ..options.clone() })?;
            throughput::measure(&*engine, &*without()?, &*channels_last, &arguments)
        }
        "shares" => partitions::shares(&*engine, &arguments),
        "switch" => partitions::switch(&*engine, &arguments),
        "isolation" => partitions::isolation(&*engine, &arguments),
        "abacus" => abacus::measure(&*engine, &arguments),
        other => Err(format!("there is no step '{other}': {STEPS}, plain").into()),
    }
}
