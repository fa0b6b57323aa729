//! What models take on a GPU, as rows of JSON: for `tools/gpu_run.py`, or by hand.
//!
//! ```text
//! cargo run --release -p downbeat-engine --example gpu_measure -- STEP MODEL [MODEL] [--zoo FOLDER] [--batches 1,8,64] [--segments 8] [--seconds 20] [--beside COMMAND]
//! ```
//!
//! STEP: `first` (what the design rests on: weights shared, partitions obeyed, the price of a segment), `throughput` (beside other runtimes), `shares` (latency over
//! batch and share of the GPU), `switch` (from one partition to another), `isolation` (a model beside a neighbour), `plain` (the other side of `throughput`:
//! onnxruntime as it comes). MODEL is the name of a model in FOLDER, as `tools/zoo.py` writes them.

#![expect(clippy::disallowed_methods, reason = "it measures, and decides nothing")]

mod arguments;
mod beside;
mod first;
mod partitions;
mod plain;
mod row;
mod subject;
mod throughput;

use std::error::Error;
use std::process::ExitCode;

use downbeat_engine::{Choice, CudaOptions, Preference, Search, choose};

use arguments::Arguments;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> ExitCode {
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
    match arguments.step.as_str() {
        "first" => first::measure(&*engine, &arguments),
        "throughput" => {
            let without = CudaOptions { graphs: false, ..options };
            let Choice { engine: without, .. } = choose(Preference::Cuda, &Search::from_env(), &without)?;
            throughput::measure(&*engine, &*without, &arguments)
        }
        "shares" => partitions::shares(&*engine, &arguments),
        "switch" => partitions::switch(&*engine, &arguments),
        "isolation" => partitions::isolation(&*engine, &arguments),
        other => Err(format!("there is no step '{other}': first, throughput, shares, switch, isolation, plain").into()),
    }
}
