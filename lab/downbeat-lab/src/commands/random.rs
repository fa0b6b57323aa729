//! `downbeat-lab random`: a policy on random workloads, beside all others.

use anyhow::{Context, Error, ensure};
use clap::Args;
use downbeat_core::Duration;
use downbeat_report::show;
use downbeat_sim::check_seeds;

use crate::judgement::{Judge, Judged};
use crate::policy::POLICIES;
use crate::random_workloads::RandomWorkload;

use downbeat::run_output::RunOutput;

/// Judge a policy by random workloads: its capacity on each as a share of the best of all other policies.
///
/// 1 to 35 models with random profiles and SLOs run on 2 to 90 devices. Arrivals are Poisson, even
/// or bursty (Gamma), or their load comes and goes. Popularity is equal or Zipf. Execution times
/// have noise or none. A workload follows from --seed and its number. To run a bad workload alone,
/// give its number to --only, which shows every policy.
///
/// Examples:
///   downbeat-lab random --seed 1 --workloads 20
///   downbeat-lab random --seed 1 --only 7
///   downbeat-lab random --seed 1 --workloads 100 --policy consolidating --json random.json --html random.html
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct RandomArgs {
    /// Seed of the workloads.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// How many workloads to run.
    #[arg(long, default_value_t = 20, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    workloads: u32,

    /// Run only this workload, from 1, and show a line for each policy.
    #[arg(long, value_name = "I", conflicts_with = "workloads", value_parser = clap::value_parser!(u32).range(1..))]
    only: Option<u32>,

    /// The policy to judge.
    #[arg(long, default_value = "adaptive", value_name = "NAME[+DROP][@ORDER]")]
    policy: String,

    /// Policies to compare it with [default: all others, with window and head drop, and timeouts of
    /// 10, 25 and 50% of the SLO]. Repeatable, or separated by commas.
    #[arg(long, value_name = "NAME[+DROP][@ORDER]", value_delimiter = ',')]
    others: Vec<String>,

    /// Seeds of the arrivals, the same for all policies. Means over the seeds are compared, and the
    /// differences between seeds are the noise. Repeatable, or separated by commas.
    #[arg(long = "arrivals-seed", value_name = "N", value_delimiter = ',', default_value = "1,2")]
    arrival_seeds: Vec<u64>,

    /// Simulated seconds in which arrivals count, at least.
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS", allow_negative_numbers = true)]
    span: f64,

    /// Lengthen runs until about this many requests come in all, and a tenth of that number for the
    /// least popular model.
    #[arg(long, default_value_t = 20_000.0, value_name = "N", allow_negative_numbers = true)]
    requests: f64,

    /// Simulated seconds before the seconds that count.
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS", allow_negative_numbers = true)]
    warm_up: f64,

    /// Precision at which the search of a capacity ends, in percent.
    #[arg(long, default_value_t = 0.5, value_name = "PERCENT", allow_negative_numbers = true)]
    precision: f64,

    #[command(flatten)]
    output: RunOutput,
}

/// Runs the policies on the workloads and prints the judgement.
///
/// # Errors
/// If the command line is wrong, or a result cannot be written.
pub fn run(args: &RandomArgs) -> anyhow::Result<()> {
    check_seeds(&args.arrival_seeds).map_err(Error::msg)?;
    ensure!((1e-3..=1e4).contains(&args.span), "--span is {}; it has to be from 0.001 to 10000 seconds", args.span);
    ensure!((0.0..=1e4).contains(&args.warm_up), "--warm-up is {}; it has to be from 0 to 10000 seconds", args.warm_up);
    let precision = args.precision;
    ensure!(
        precision > 0.0 && precision < 100.0,
        "--precision is {precision}; it has to be above 0 and below 100 percent"
    );
    ensure!((0.0..=1e9).contains(&args.requests), "--requests is {}; it has to be from 0 to 1000000000", args.requests);
    let judge = Judge {
        policy: POLICIES.parse(&args.policy)?,
        others: match &args.others[..] {
            [] => POLICIES.all(&[]),
            others => others.iter().map(|other| POLICIES.parse(other)).collect::<Result<_, _>>()?,
        },
        seeds: args.arrival_seeds.clone(),
        precision: precision / 100.0,
        requests: args.requests,
    };
    let numbers: Vec<u32> = args.only.map_or_else(|| (1..=args.workloads).collect(), |only| vec![only]);
    let RunOutput { json, html, quiet, .. } = &args.output;
    let progress = args.output.progress()?;
    let mut workloads: Vec<Judged> = Vec::new();
    for (number, before) in numbers.iter().zip(0..) {
        let mut workload = RandomWorkload::draw(args.seed, *number);
        workload.scenario.span = Duration::from_secs_f64(args.span);
        workload.scenario.warm_up = Duration::from_secs_f64(args.warm_up);
        let results = judge
            .question(&workload)
            .answer(args.output.threads(), |done, each| progress.goes_on(before * each + done, numbers.len() * each))
            .with_context(|| workload.to_string())?;
        if args.only.is_some() {
            show(&mut json.text(), &results)?;
        }
        let Some(judged) = judge.judged(&workload, &results) else { break };
        if !quiet && args.only.is_none() {
            let ratio =
                judged.ratio.map_or("no load is held".to_owned(), |ratio| format!("{ratio:.3} of {}", judged.best));
            progress.say(&format!("{workload}: {ratio}"));
        }
        workloads.push(judged);
        if progress.is_interrupted() {
            break;
        }
    }
    progress.end();
    let unfinished = (numbers.len() - workloads.len()) as u32;
    let judgement = judge.judgement(args.seed, workloads, unfinished);
    html.write(|| judgement.page())?;
    json.print(&judgement)
}
