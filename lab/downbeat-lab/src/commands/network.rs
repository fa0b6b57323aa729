//! `downbeat-lab network`: frontends, schedulers and backends on a network that goes wrong.

use std::num::NonZeroU16;
use std::ops::Range;
use std::path::PathBuf;

use crate::network::{NetworkFile, NetworkScenario, SeedResults};
use anyhow::ensure;
use clap::Args;
use downbeat_report::Json;
use downbeat_sim::parallel;

use downbeat::run_output::Progress;

/// Run frontends, schedulers, spares and backends on a simulated network: one from a file, or many that are drawn from seeds.
///
/// The production state machines decide. Wires delay, lose, double, reorder and are cut. Processes
/// are killed, stopped, slowed and started anew. An outside judge checks every step. Each request
/// ends exactly once. No slot obeys two epochs. No request runs in two places at once. Budgets
/// never grow. Once everything is mended, nothing waits. The same seed and the same --requests
/// repeat a run.
///
/// Examples:
///   downbeat-lab network lab/experiments/networks/leader_killed.toml --seed 1,2,3
///   downbeat-lab network --seeds 0..1000
///   downbeat-lab network --seeds 17..18 --requests 10000 --json
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct NetworkArgs {
    /// Network: a TOML file, such as the files in lab/experiments/networks/.
    #[arg(value_name = "NETWORK.toml", required_unless_present = "seeds", conflicts_with_all = ["seeds", "requests"])]
    file: Option<PathBuf>,

    /// Seed of all random numbers instead of the file's. Repeatable, or separated by commas.
    #[arg(long = "seed", value_name = "N", value_delimiter = ',')]
    seed: Vec<u64>,

    /// Draw a network and its faults from each of these seeds, the last one excluded.
    #[arg(long, value_name = "A..B", value_parser = parse_seeds)]
    seeds: Option<Range<u64>>,

    /// Requests for each network, about.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    requests: u64,

    /// With --seeds: device policies make the batches, on seats of the backends.
    #[arg(long, requires = "seeds")]
    seats: bool,

    /// Runs at a time [default: one for each core]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroU16>,

    #[command(flatten)]
    json: Json,

    /// Print only broken rules on standard error while it goes on.
    #[arg(short, long)]
    quiet: bool,
}

fn parse_seeds(text: &str) -> Result<Range<u64>, String> {
    let ends = text.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
    ends.filter(|ends: &Range<u64>| !ends.is_empty())
        .ok_or_else(|| format!("'{text}' is no range of seeds such as 0..1000"))
}

/// The runs that begin between two checks for an interrupt.
const AT_ONCE: usize = 64;

/// Runs the networks and prints the results.
///
/// # Errors
/// If the file is no network, a rule was broken, or a result cannot be written.
pub fn run(args: &NetworkArgs) -> anyhow::Result<()> {
    if let Some(file) = &args.file {
        let results = NetworkFile::read(file)?.run(&args.seed);
        args.json.print(&results)?;
        ensure!(results.runs.iter().all(|run| run.broken.is_none()), "a rule was broken");
        return Ok(());
    }
    let Some(seeds) = args.seeds.clone() else { return Ok(()) };
    let progress = Progress::new(args.quiet)?;
    let threads = args.threads.map_or_else(parallel::cores, |threads| usize::from(threads.get()));
    let mut results = SeedResults::new(seeds.start, args.requests);
    let total = (seeds.end - seeds.start) as usize;
    let mut next = seeds;
    loop {
        let jobs: Vec<u64> = next.by_ref().take(AT_ONCE).collect();
        if jobs.is_empty() || !progress.goes_on(results.runs as usize, total) {
            break;
        }
        let run = |seed: &u64| {
            let scenario = NetworkScenario::random(*seed, args.requests);
            if args.seats { scenario.seated().run() } else { scenario.run() }
        };
        for outcome in parallel::map(&jobs, threads, run, |_| ()) {
            if let Some(rule) = &outcome.broken {
                progress.say(&format!("seed {}: {}: {}", outcome.seed, rule.rule, rule.what));
            }
            results.add(&outcome);
        }
    }
    progress.end();
    args.json.print(&results)?;
    ensure!(results.broken.is_empty(), "rules were broken with {} of {} seeds", results.broken.len(), results.runs);
    Ok(())
}
