//! `downbeat-lab auto`: the device policy `auto` on random workloads, beside all fixed policies.

use std::fmt;

use crate::device::{AutoOutcome, AutoRun, MeasuredForAuto, Played, RandomDeviceWorkload};
use anyhow::ensure;
use clap::Args;
use downbeat_core::{Duration, quantiles};
use downbeat_report::{Page, Table};
use downbeat_sim::parallel;
use serde::Serialize;

use downbeat::run_output::RunOutput;

/// Judge the device policy auto by random workloads, beside every policy that its models could have.
///
/// 1 or 2 models with random times share 1 to 3 devices. Arrivals are even, Poisson or bursty.
/// Loads are 0.2 to 1.3 of the devices' throughput with one batch after another. Each workload runs
/// with each candidate for all its models, and with auto's choice when it loads the models. A
/// workload follows from --seed and its number.
///
/// Examples:
///   downbeat-lab auto --seed 1 --workloads 20
///   downbeat-lab auto --seed 1 --only 7
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct AutoArgs {
    /// Seed of the workloads, and of their arrivals.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// How many workloads to run.
    #[arg(long, default_value_t = 20, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    workloads: u32,

    /// Run only this workload, from 1, and show a line for each policy.
    #[arg(long, value_name = "I", conflicts_with = "workloads", value_parser = clap::value_parser!(u32).range(1..))]
    only: Option<u32>,

    /// Simulated seconds in which requests come.
    #[arg(long, default_value_t = 40.0, value_name = "SECONDS", allow_negative_numbers = true)]
    span: f64,

    /// Seconds at the begin of the span that do not count.
    #[arg(long, default_value_t = 20.0, value_name = "SECONDS", allow_negative_numbers = true)]
    warm_up: f64,

    #[command(flatten)]
    output: RunOutput,
}

/// A run of a workload.
#[derive(Serialize, Debug)]
struct Row {
    policy: String,
    /// The share of the requests that were answered in time.
    good: f64,
    /// The mean time to the answer of requests answered in time, milliseconds.
    latency_ms: f64,
    /// Policies that the guard gave up for exclusive.
    lost: u64,
    /// The candidates that the models had at the end.
    last: Vec<String>,
}

/// A workload under all policies.
#[derive(Serialize, Debug)]
struct Judged {
    number: u32,
    workload: String,
    /// Fixed policies, then `auto`.
    rows: Vec<Row>,
    /// The fixed policy with the most good requests. Of policies within half a percent it is the
    /// one with the lowest mean latency.
    best: String,
    /// Good requests of `auto`, as a share of the best fixed policy's.
    good: f64,
    /// The mean latency of `auto` as a share of that policy's, if as many requests are good to half
    /// a percent.
    latency: Option<f64>,
    lost: u64,
}

#[derive(Serialize, Debug)]
struct Judgement {
    seed: u64,
    workloads: Vec<Judged>,
}

/// Shares of good requests that differ by at most this much are equal.
const ALIKE: f64 = 0.005;

/// Runs all workloads and prints the judgement.
///
/// # Errors
/// If the command line is wrong, or a result cannot be written.
pub fn run(args: &AutoArgs) -> anyhow::Result<()> {
    ensure!((1.0..=1e4).contains(&args.span), "--span is {}; it has to be from 1 to 10000 seconds", args.span);
    let settled = 0.0..args.span;
    ensure!(settled.contains(&args.warm_up), "--warm-up is {}; it has to be from 0 to below --span", args.warm_up);
    let numbers: Vec<u32> = args.only.map_or_else(|| (1..=args.workloads).collect(), |only| vec![only]);
    let RunOutput { json, html, quiet, .. } = &args.output;
    let progress = args.output.progress()?;
    let mut workloads = Vec::new();
    for number in numbers {
        if progress.is_interrupted() {
            break;
        }
        let judged = judge(args, number, args.output.threads())?;
        if !quiet && args.only.is_none() {
            progress.say(&format!("{}: {:.3} of {}", judged.workload, judged.good, judged.best));
        }
        workloads.push(judged);
    }
    progress.end();
    let judgement = Judgement { seed: args.seed, workloads };
    html.write(|| judgement.page())?;
    json.print(&judgement)
}

fn judge(args: &AutoArgs, number: u32, threads: usize) -> anyhow::Result<Judged> {
    let workload = RandomDeviceWorkload::draw(args.seed, number);
    let measured = workload.models.iter().map(MeasuredForAuto::new).collect::<Result<Vec<_>, _>>()?;
    let longest = measured.iter().max_by_key(|measured| measured.candidates.len());
    let candidates = longest.map_or(&[][..], |measured| &measured.candidates);
    let fixed = (0..candidates.len()).map(Played::Fixed);
    let jobs: Vec<Played> = fixed.chain([Played::Auto]).collect();
    let run = AutoRun {
        workload: &workload,
        span: Duration::from_secs_f64(args.span),
        settled: Duration::from_secs_f64(args.warm_up),
        seed: args.seed,
    };
    let outcomes = parallel::map(&jobs, threads, |played| run.run(&measured, *played), |_| ());
    let outcomes = outcomes.into_iter().collect::<Result<Vec<AutoOutcome>, _>>()?;
    let names = candidates.iter().map(|one| one.candidate.to_string());
    let names = names.chain(["auto".to_owned()]);
    let row = |(policy, outcome): (String, &AutoOutcome)| Row {
        policy,
        good: outcome.good(),
        latency_ms: outcome.latency * 1e3,
        lost: outcome.lost_policies,
        last: outcome.last.iter().map(ToString::to_string).collect(),
    };
    let rows: Vec<Row> = names.zip(&outcomes).map(row).collect();
    let Some((auto, fixed)) = rows.split_last() else { anyhow::bail!("auto did not run") };
    let most = fixed.iter().map(|row| row.good).fold(0.0, f64::max);
    let good = fixed.iter().filter(|row| row.good >= most - ALIKE);
    let best = good.min_by(|a, b| a.latency_ms.total_cmp(&b.latency_ms));
    let ratio = |row: &Row| if most > 0.0 { row.good / most } else { 1.0 };
    let latency =
        |row: &Row| best.filter(|_| row.good >= most - ALIKE).map(|best| row.latency_ms / best.latency_ms.max(1e-9));
    Ok(Judged {
        number,
        workload: workload.to_string(),
        best: best.map_or(String::new(), |best| best.policy.clone()),
        good: ratio(auto),
        latency: latency(auto),
        lost: outcomes.iter().map(|outcome| outcome.lost).sum(),
        rows,
    })
}

impl Judgement {
    fn table(&self) -> Table<&Judged> {
        Table::of(&self.workloads)
            .number("workload", |judged| judged.number)
            .text("best fixed", |judged| &judged.best)
            .number("auto", |judged| format!("{:.3}", judged.good))
            .some("latency", |judged| Some(format!("{:.2}", judged.latency?)))
            .text("at the end", |judged| judged.rows.last().map_or(String::new(), |row| row.last.join(", ")))
    }

    /// Returns sentences about all workloads together.
    fn sentences(&self) -> String {
        let mut sentences = Vec::new();
        let latency = self.workloads.iter().filter_map(|judged| judged.latency);
        let alike = latency.clone().count();
        if let Some([least, tenth, median]) =
            quantiles(self.workloads.iter().map(|judged| judged.good), [0.0, 0.1, 0.5])
        {
            sentences.push(format!(
                "Good requests of the best fixed policy's: least {least:.3}, tenth percentile {tenth:.3}, median {median:.3}."
            ));
        }
        if let Some([middle, ninth, most]) = quantiles(latency, [0.5, 0.9, 1.0]) {
            sentences.push(format!(
                "Where as many are good ({alike}), their mean latency is {middle:.2} times its, ninth decile {ninth:.2}, at most {most:.2}."
            ));
        }
        sentences.join(" ")
    }

    /// Returns one HTML page without external parts.
    fn page(&self) -> String {
        let title = format!("auto on random workloads of seed {}", self.seed);
        Page::new(&title).note(&self.sentences()).table("Table", &self.table()).html()
    }
}

impl fmt::Display for Judgement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [only] = &self.workloads[..] {
            writeln!(f, "{}", only.workload)?;
            return Table::of(&only.rows)
                .text("policy", |row| &row.policy)
                .number("in time", |row| format!("{:.4}", row.good))
                .number("latency ms", |row| format!("{:.2}", row.latency_ms))
                .number("lost", |row| row.lost)
                .text("at the end", |row| row.last.join(", "))
                .fmt(f);
        }
        self.table().fmt(f)?;
        writeln!(f, "\n{}", self.sentences())
    }
}
