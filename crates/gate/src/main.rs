//! The gate: what a request costs, counted where no clock blurs it, and held to the numbers in `counts.toml`.
//!
//! ```text
//! downbeat-gate                      # counts every way, and compares with counts.toml
//! downbeat-gate --write              # writes what it counted there
//! downbeat-gate features http-json   # instructions a request, by our functions
//! ```
//!
//! For each [way](ways::Way) this program starts itself under valgrind's callgrind. A run has a part with so many requests and a part with twice as many; the difference,
//! divided by that number, is what a request costs, and what begins and ends falls out. Time stands still meanwhile (`still.rs`), and seeds are the same each time.
//!
//! Callgrind is driven here and not by way of `gungraun`: that needs a runner installed beside it, keeps its numbers outside the tree, and knows neither both processes of a way,
//! nor a thread that stands for the client.
//!
//! | count | by |
//! |---|---|
//! | instructions | callgrind: all threads but the client's |
//! | allocations, and their bytes | this program's allocator, which is `downbeat`'s |
//! | locks; atomics | instructions that ran, read in the program itself (`locks.rs`) |
//! | system calls, futex calls | valgrind's trace of them |
//! | context switches of ways from process to process | the operating system, in a run without valgrind on one core |
//! | clock reads | `clock_gettime` in `still.rs`: outside valgrind it is no system call |

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

use crate::counters::CountedAllocator;
use crate::counts::CountsFile;
use crate::measurement::measure;
use crate::part::Plan;
use crate::ways::Way;

#[global_allocator]
static ALLOCATOR: CountedAllocator = CountedAllocator(mimalloc::MiMalloc);

/// Counts what a request costs, and compares with the numbers in the tree.
#[derive(Parser)]
#[command(name = "downbeat-gate")]
struct Arguments {
    #[command(subcommand)]
    command: Option<Task>,
    /// The ways to count; all of them by default.
    #[arg(value_enum)]
    ways: Vec<Way>,
    /// Write what was counted to the file, instead of comparing.
    #[arg(long)]
    write: bool,
    /// The numbers.
    #[arg(long, default_value = "crates/gate/counts.toml")]
    file: PathBuf,
}

#[derive(Subcommand)]
enum Task {
    /// Print the instructions of a request by function, with what each calls.
    Features {
        /// The way.
        #[arg(value_enum)]
        way: Way,
        /// Leave out functions with fewer instructions a request.
        #[arg(long, default_value_t = 50.0)]
        least: f64,
        /// Only functions whose names have this in them.
        #[arg(long, default_value = "downbeat")]
        only: String,
    },
    /// Have requests go a way: what is run under valgrind.
    #[command(hide = true)]
    Run {
        #[arg(value_enum)]
        way: Way,
    },
    /// Be an executor process.
    #[command(hide = true)]
    Executor,
}

fn main() -> ExitCode {
    match work(Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all is as it should be.
fn work(Arguments { command, ways, write, file }: Arguments) -> Result<bool> {
    match command {
        Some(Task::Run { way }) => way.run(&Plan::of_environment()?)?,
        Some(Task::Executor) => {
            part::count_by_launch()?;
            downbeat_engine::isolation::serve()?;
        }
        Some(Task::Features { way, least, only }) => features::print(&measure(way)?, least, &only),
        None => return count(if ways.is_empty() { Way::all() } else { &ways }, write, &file),
    }
    Ok(true)
}

/// Counts, and writes or compares; whether all is as it is written.
fn count(ways: &[Way], write: bool, file: &Path) -> Result<bool> {
    let mut written = CountsFile::read(file)?;
    let mut differences = Vec::new();
    for way in ways {
        let counts = measure(*way)?.counts;
        println!("{:15}{counts}", way.name());
        if !write {
            differences.extend(comparison::compare(*way, written.of(*way), &counts));
        }
        written.set(*way, counts);
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
    }
    Ok(differences.is_empty())
}
