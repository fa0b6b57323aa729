//! The gate on platforms where it can count: Linux on x86-64.

mod comparison;
mod counters;
mod counts;
mod features;
mod locks;
mod measurement;
mod part;
mod profile;
mod still;
mod valgrind;
mod ways;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use downbeat_bench::allocator::Mimalloc;

use crate::gate::counters::CountedAllocator;
use crate::gate::counts::CountsFile;
use crate::gate::measurement::measure;
use crate::gate::part::Plan;
use crate::gate::ways::Way;

#[global_allocator]
static ALLOCATOR: CountedAllocator = CountedAllocator(Mimalloc);

/// Counts the cost of a request, and compares with the numbers in the tree.
#[derive(Parser)]
#[command(name = "downbeat-gate")]
struct Arguments {
    #[command(subcommand)]
    command: Option<Task>,
    /// The ways to count; all of them by default.
    #[arg(value_enum)]
    ways: Vec<Way>,
    /// Write the counts to the file, instead of comparing.
    #[arg(long)]
    write: bool,
    /// The numbers.
    #[arg(long, default_value = "lab/gate/counts.toml")]
    file: PathBuf,
}

#[derive(Subcommand)]
enum Task {
    /// Print the cost of a request by function: instructions, locks and other atomic instructions,
    /// and its system calls.
    Features {
        /// The way.
        #[arg(value_enum)]
        way: Way,
        #[command(flatten)]
        choice: features::Choice,
    },
    /// Run requests on a way: the command that runs under valgrind.
    #[command(hide = true)]
    Run {
        #[arg(value_enum)]
        way: Way,
    },
    /// Be an executor process.
    #[command(hide = true)]
    ExecutorProcess,
}

/// Carries out the command line.
pub fn main() -> ExitCode {
    match work(Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command. Returns true if all counts are as expected.
fn work(Arguments { command, ways, write, file }: Arguments) -> Result<bool> {
    match command {
        Some(Task::Run { way }) => way.run(&Plan::of_environment()?)?,
        Some(Task::ExecutorProcess) => {
            part::count_by_launch()?;
            downbeat_engine::isolation::serve(&downbeat_engine_ort::of_executor)?;
        }
        Some(Task::Features { way, choice }) => features::print(&measure(way)?, &choice),
        None => return count(if ways.is_empty() { Way::all() } else { &ways }, write, &file),
    }
    Ok(true)
}

/// Counts, and writes or compares. Returns true if all counts are as written.
fn count(ways: &[Way], write: bool, file: &Path) -> Result<bool> {
    let mut written = CountsFile::read(file)?;
    let mut differences = Vec::new();
    for way in ways {
        let counts = measure(*way)?.counts;
        println!("{:15}{counts}", way.name());
        if !write {
            differences.extend(comparison::compare(*way, written.of(*way), &counts));
        }
        if write {
            written.set(*way, counts);
        }
    }
    if write {
        written.write(file)?;
        println!("written to {}", file.display());
        return Ok(true);
    }
    for difference in &differences {
        println!("{difference}");
    }
    if differences.is_empty() {
        println!("as in {}", file.display());
    } else {
        println!("{}", comparison::ADVICE);
        if written.rustc != counts::RUSTC {
            println!(
                "The numbers are of {}, and this program of {}: some of it may be the compiler's.",
                written.rustc,
                counts::RUSTC
            );
        }
    }
    Ok(differences.is_empty())
}
