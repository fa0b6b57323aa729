//! `downbeat plan`: decides which models share a sub-cluster.

use std::path::PathBuf;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use downbeat_core::{Duration, Time};
use downbeat_plan::workload::MAX_BYTES;
use downbeat_plan::{HAS_SOLVER, Method, Options, PlanError, Workload, plan};
use downbeat_report::{Json, note};
use downbeat_service::clock::Clock;

use crate::commands::plan_report::{PlanReport, read_plan, set_running};
use crate::options::options_file::text;
use crate::options::units;
use crate::run_output::waiting;

/// The way to get the solver, in one sentence.
const NO_SOLVER: &str = "this build plans by local search alone; `cargo build --release --features highs` adds the MILP solver HiGHS, which improves a plan and can prove the best one (the build then needs cmake and libclang)";

/// Divide models among sub-clusters of devices: even request rates and memory, within limits.
///
/// Reads a workload file: examples/workload.toml shows every key.
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// The workload file
    #[arg(value_name = "WORKLOAD")]
    workload: PathBuf,
    /// The number of sub-clusters, in place of the workload's
    #[arg(long, value_name = "L", value_parser = clap::value_parser!(u32).range(1..))]
    sub_clusters: Option<u32>,
    /// Most time to look for a partition; explaining why there is none may take up to twice as much
    /// again
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = units::parse_seconds)]
    time_limit: Duration,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// The method: auto (a local search, then HiGHS unless the problem is large), search, or highs.
    /// If there are few partitions, auto and search try all of them
    #[arg(long, value_name = "METHOD", default_value = "auto")]
    method: Chosen,
    /// A running plan that this command has printed with --json, instead of the workload's
    /// running_on
    #[arg(long, value_name = "FILE")]
    running: Option<PathBuf>,
    #[command(flatten)]
    json: Json,
}

/// `--method`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Chosen {
    Auto,
    Search,
    Highs,
}

/// Runs the command.
///
/// # Errors
/// If a file is wrong, or there is no partition.
pub fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let path = &args.workload;
    let shown = path.display();
    let mut workload = Workload::parse(&text(path, MAX_BYTES)?).map_err(|e| anyhow!("{shown}:{e}"))?;
    if let Some(sub_clusters) = args.sub_clusters {
        workload.sub_clusters = sub_clusters as usize;
    }
    if let Some(running) = &args.running {
        set_running(&read_plan(running)?, &mut workload);
    }
    let method = match args.method {
        Chosen::Auto => Method::SearchThenSolver,
        Chosen::Search => Method::Search,
        Chosen::Highs if !HAS_SOLVER => bail!("{NO_SOLVER}"),
        Chosen::Highs => Method::Solver,
    };
    let options = Options { time_limit: args.time_limit, seed: args.seed, method };
    let problem = workload.problem();
    let clock = Clock::start();
    let elapsed = || clock.now().since(Time::ZERO);
    let found = waiting(false, "looking for a plan", || plan(&problem, &options, &elapsed));
    let is_open = match &found {
        Ok(plan) => !plan.proved,
        Err(error) => matches!(error, PlanError::NotFound { .. }),
    };
    if is_open && args.method == Chosen::Auto && !HAS_SOLVER {
        note(NO_SOLVER);
    }
    let found = found.with_context(|| format!("{shown}"))?;
    let report = PlanReport::new(&workload, &problem, &found, elapsed())?;
    args.json.print(&report)
}
