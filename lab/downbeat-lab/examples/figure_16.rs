//! Figure 16: imbalance factors of partitions of 800 models on 20 sub-clusters, by the partitioner
//! and by chance.
//!
//! ```text
//! cargo run --release -p downbeat-lab --features highs --example figure_16 -- [CONFIGURATIONS] [SECONDS]
//! ```
//!
//! Each configuration is a workload of [`generate`] with a seed of its own. Every method has the
//! same time for each (default: 10 configurations of 10 s). Printed as a table in Markdown: the
//! factors of every method, sorted, which is the figure's CDF read at each configuration.

use std::time::Instant;

use downbeat_core::Duration;
use downbeat_lab::partitions::{generate, random_partition};
use downbeat_plan::{HAS_SOLVER, Method, Options, plan};

const MODELS: usize = 800;
const SUB_CLUSTERS: usize = 20;

/// Imbalance factors of the rate and of the static memory, and the objective.
type Factors = (f64, f64, f64);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let configurations: u64 = arguments.next().map_or(Ok(10), |a| a.parse())?;
    let seconds: f64 = arguments.next().map_or(Ok(10.0), |a| a.parse())?;
    let mut methods = vec![("search, 1 s", Method::Search, 1.0), ("search", Method::Search, seconds)];
    if HAS_SOLVER {
        methods.push(("HiGHS alone", Method::Solver, seconds));
    }
    println!("{MODELS} models, {SUB_CLUSTERS} sub-clusters, {seconds} s each, seeds 1 to {configurations}\n");
    let mut columns: Vec<(&str, Vec<Option<Factors>>)> = Vec::new();
    for (name, method, seconds) in methods {
        let mut column = Vec::new();
        for seed in 1..=configurations {
            let problem = generate(MODELS, SUB_CLUSTERS, seed).problem();
            let clock = start();
            let options = Options { time_limit: Duration::from_secs_f64(seconds), seed, method };
            let found = plan(&problem, &options, &|| clock.elapsed().into()).ok();
            if let Some(found) = &found {
                eprintln!(
                    "{name}, seed {seed}: {:.2} s, objective {:.3e}, by {}, bound {:?}",
                    clock.elapsed().as_secs_f64(),
                    found.evaluation.objective,
                    found.found_by,
                    found.bound
                );
            }
            column.push(found.map(|f| {
                let e = f.evaluation;
                (e.rate_imbalance(), e.memory_imbalance(), e.objective)
            }));
        }
        columns.push((name, column));
    }
    let mut column = Vec::new();
    for seed in 1..=configurations {
        let problem = generate(MODELS, SUB_CLUSTERS, seed).problem();
        let clock = start();
        let (found, trials) = random_partition(&problem, seed, u64::MAX, &|| clock.elapsed().as_secs_f64() >= seconds)?;
        eprintln!("random, seed {seed}: {trials} partitions, objective {:?}", found.as_ref().map(|f| f.objective));
        column.push(found.map(|e| (e.rate_imbalance(), e.memory_imbalance(), e.objective)));
    }
    columns.push(("random", column));
    for (what, of) in [("rate", 0), ("static memory", 1)] {
        print_table(what, &columns, |factors: &Factors| if of == 0 { factors.0 } else { factors.1 });
    }
    Ok(())
}

/// Prints a table of one factor: a column for each method, sorted, with the share of configurations
/// up to each row.
fn print_table(what: &str, columns: &[(&str, Vec<Option<Factors>>)], of: impl Fn(&Factors) -> f64) {
    println!("Imbalance of the {what}, (max - min) / average:\n");
    let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    println!("| configurations | {} |", names.join(" | "));
    println!("|---|{}", "---|".repeat(names.len()));
    let sorted: Vec<Vec<f64>> = columns
        .iter()
        .map(|(_, column)| {
            let mut values: Vec<f64> = column.iter().map(|f| f.as_ref().map_or(f64::INFINITY, &of)).collect();
            values.sort_by(f64::total_cmp);
            values
        })
        .collect();
    let count = sorted.first().map_or(0, Vec::len);
    for row in 0..count {
        let cells: Vec<String> = sorted.iter().map(|column| cell(column[row])).collect();
        println!("| {:.0}% | {} |", 100.0 * (row + 1) as f64 / count as f64, cells.join(" | "));
    }
    println!();
}

fn cell(value: f64) -> String {
    if value.is_finite() { format!("{value:.6}") } else { "none found".to_owned() }
}

#[expect(clippy::disallowed_methods, reason = "an experiment with a time limit reads the clock")]
fn start() -> Instant {
    Instant::now()
}
