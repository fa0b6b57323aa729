//! `downbeat-lab experiment`: workloads and schedulers from a file.

use std::path::PathBuf;

use clap::Args;
use downbeat::run_output::RunOutput;

use crate::experiment::{Experiment, Overrides};

/// Run an experiment of the cluster scheduler from a file, such as a figure of Symphony.
///
/// Examples:
///   downbeat-lab experiment lab/experiments/table_2.toml
///   downbeat-lab experiment lab/experiments/figure_11.toml --html figure_11.html
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct ExperimentArgs {
    /// Experiment: a TOML file, such as the files in lab/experiments/.
    #[arg(value_name = "EXPERIMENT.toml")]
    file: PathBuf,

    /// Policies instead of the file's. Repeatable, or separated by commas.
    #[arg(long = "policy", value_name = "NAME[+DROP][@ORDER]", value_delimiter = ',')]
    policies: Vec<String>,

    /// Run all cases, though the file asks for a sample.
    #[arg(long)]
    all: bool,

    /// Seeds instead of the file's. Repeatable, or separated by commas: the result is the median,
    /// with the smallest and largest beside it.
    #[arg(long = "seed", value_name = "N", value_delimiter = ',')]
    seeds: Vec<u64>,

    /// Simulated seconds in which arrivals count, instead of the file's.
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    span: Option<f64>,

    /// Lengthen each run of a search until the least popular model gets about this many requests.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    requests_per_model: Option<f64>,

    #[command(flatten)]
    output: RunOutput,
}

/// Runs the experiment and prints its results.
///
/// # Errors
/// If the file is wrong, or a result cannot be written.
pub fn run(args: ExperimentArgs) -> anyhow::Result<()> {
    let ExperimentArgs { file, policies, all, seeds, span, requests_per_model, output } = args;
    let overrides = Overrides {
        seeds: Some(seeds).filter(|seeds| !seeds.is_empty()),
        span_s: span,
        requests_per_model,
        all,
        policies: Some(policies).filter(|policies| !policies.is_empty()),
        tiny: false,
    };
    let experiment = Experiment::read(&file, &overrides)?;
    let progress = output.progress()?;
    let results = experiment.run(output.threads(), |done, total| progress.goes_on(done, total))?;
    progress.end();
    output.html.write(|| experiment.page(&results))?;
    output.json.print(&results)
}
