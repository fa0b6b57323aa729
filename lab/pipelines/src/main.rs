//! The command line of the pipeline lab: parse, play, print.

use anyhow::ensure;
use clap::Parser;
use downbeat_pipeline_lab::{Batches, Figures, PipelineWorkload, Row, Settings};
use downbeat_report::{note, say};
use downbeat_sim::parallel::map;
use downbeat_sim::pipelines::LoadSearch;

/// Compare divisions of a pipeline's deadline on random workloads.
///
/// Each rule plays the same arrivals, with deferred and with eager batches. A judge counts from the
/// log of ends alone. All numbers are ratios to an SLO for each step with equal shares.
#[derive(Parser, Debug)]
#[command(name = "downbeat-pipeline-lab", version, max_term_width = 120)]
struct Args {
    /// The seed of the workloads
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many workloads
    #[arg(long, default_value_t = 48)]
    workloads: u32,
    /// Only the workload of this number, with the numbers of each rule
    #[arg(long)]
    only: Option<u32>,
    /// Requests of a workload; the first quarter does not count
    #[arg(long, default_value_t = 8_000)]
    requests: usize,
    /// Fixed shares that the oracle tries for each number
    #[arg(long, default_value_t = 40)]
    tries: u32,
    /// Leave the search of capacities out
    #[arg(long)]
    no_capacity: bool,
    /// Only this kind of batches: deferred or eager
    #[arg(long, value_parser = ["deferred", "eager"])]
    batches: Option<String>,
    /// Threads
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    ensure!((100..=1_000_000).contains(&args.requests), "--requests must be from 100 to 1,000,000");
    ensure!((1..=10_000).contains(&args.workloads), "--workloads must be from 1 to 10,000");
    let search = LoadSearch { least: 0.02, most: 4.0, steps: 8, tolerated: 0.01 };
    let settings = Settings { requests: args.requests, tries: args.tries, search, capacity: !args.no_capacity };
    let numbers: Vec<u32> = args.only.map_or_else(|| (1..=args.workloads).collect(), |only| vec![only]);
    for (name, batches) in [("deferred", Batches::Deferred), ("eager", Batches::Eager)] {
        if args.batches.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        let play = |number: &u32| {
            let workload = PipelineWorkload::draw(args.seed, *number, args.requests);
            let row = Row::of(&workload, batches, &settings);
            note(format_args!("{workload}: {row:.3?}"));
            row
        };
        let figures = Figures(map(&numbers, args.threads, play, |_| ()));
        say(figures.table(name))?;
    }
    Ok(())
}
