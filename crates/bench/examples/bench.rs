//! The load generator alone, without the rest of the `downbeat` command.

use std::process::ExitCode;

use clap::Parser;

/// Measure an inference server.
#[derive(Parser, Debug)]
struct Command {
    #[command(flatten)]
    args: downbeat_bench::Args,
}

fn main() -> anyhow::Result<ExitCode> {
    downbeat_bench::run(Command::parse().args)
}
