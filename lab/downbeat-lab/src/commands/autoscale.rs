//! `downbeat-lab autoscale`: devices that come and go as Kubernetes' autoscaler says.

use std::io::Write;
use std::num::NonZeroU32;

use clap::Args;
use downbeat_core::Duration;
use downbeat_report::{Table, out};
use downbeat_sim::parallel;

use crate::autoscaling::{BadScaling, Change, HpaOptions, LoopOptions, Scaled};
use crate::policy::POLICIES;

/// Close the loop of autoscaling in virtual time: a load that doubles, one that halves, and an hour of noise.
///
/// The scheduler, its advisor, Prometheus, the rule of deploy/helm, Kubernetes'
/// autoscaler and the start of pods each take their time.
///
/// Example:
///   downbeat-lab autoscale --seed 1 --seeds 10 --policy deferred --policy adaptive
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct AutoscaleArgs {
    /// The first seed.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// So many seeds from the first one on.
    #[arg(long, value_name = "N", default_value = "10")]
    seeds: NonZeroU32,

    /// How the scheduler dispatches, such as deferred or adaptive. Repeatable.
    #[arg(long = "policy", value_name = "POLICY", default_values = ["deferred", "adaptive"])]
    policies: Vec<String>,

    /// Seconds from the decision for a pod until its device serves.
    #[arg(long, value_name = "S", default_value_t = LoopOptions::default().start_s)]
    start_s: u64,

    /// Seconds between two scrapes of Prometheus.
    #[arg(long, value_name = "S", default_value_t = LoopOptions::default().scrape_s, value_parser = clap::value_parser!(u64).range(1..=3600))]
    scrape_s: u64,

    /// Kubernetes' stabilizationWindowSeconds for fewer pods.
    #[arg(long, value_name = "S", default_value_t = 120)]
    down_window_s: u64,
}

/// Plays all scenarios and prints a table for each policy.
///
/// # Errors
/// If a policy is unknown, or the table cannot be written.
pub fn run(args: &AutoscaleArgs) -> anyhow::Result<()> {
    let down_window = Duration::from_millis(args.down_window_s.saturating_mul(1000));
    let hpa = HpaOptions { down_window, ..HpaOptions::default() };
    let options = LoopOptions { start_s: args.start_s, scrape_s: args.scrape_s, hpa, ..LoopOptions::default() };
    let seeds: Vec<u64> = (args.seed..).take(args.seeds.get() as usize).collect();
    let mut rows: Vec<Row> = Vec::new();
    for name in &args.policies {
        let policy = POLICIES.parse(name)?;
        for change in Change::ALL {
            let play = |seed: &u64| change.scenario(&policy, options.clone(), *seed).run();
            let runs = parallel::map(&seeds, parallel::cores(), play, |_| ());
            let runs: Vec<Scaled> = runs.into_iter().collect::<Result<_, BadScaling>>()?;
            for (what, of) in judged(change) {
                let mut values: Vec<f64> = runs.iter().map(of).collect();
                values.sort_by(f64::total_cmp);
                rows.push(Row { policy: name.clone(), change, what, values });
            }
        }
    }
    let table = Table::of(&rows)
        .text("policy", |row| row.policy.clone())
        .text("load", |row| row.change.name())
        .text("judged", |row| row.what)
        .number("least", |row| row.at(0.0))
        .number("median", |row| row.at(0.5))
        .number("most", |row| row.at(1.0));
    Ok(writeln!(out(), "{table}")?)
}

/// What was judged of all runs of a load, in order of size.
struct Row {
    policy: String,
    change: Change,
    what: &'static str,
    values: Vec<f64>,
}

impl Row {
    /// The value at this share of the runs.
    fn at(&self, share: f64) -> String {
        let last = self.values.len().saturating_sub(1) as f64;
        let value = self.values.get((share * last).round() as usize).copied().unwrap_or(f64::NAN);
        if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.4}") }
    }
}

type Judged = (&'static str, fn(&Scaled) -> f64);

/// What is judged of a load.
fn judged(change: Change) -> Vec<Judged> {
    const AT: usize = Change::AT_S;
    match change {
        Change::Doubles => vec![
            ("attainment before", |run| run.attainment(60, AT)),
            ("attainment in the first 60 s", |run| run.attainment(AT, AT + 60)),
            ("attainment from 60 s on", |run| run.attainment(AT + 60, usize::MAX)),
            ("seconds until 10 s have 99%", |run| {
                (AT..run.seconds.len())
                    .find(|at| run.attainment(*at, at + 10) >= 0.99)
                    .map_or(f64::INFINITY, |at| (at - AT) as f64)
            }),
            ("devices at the end", |run| f64::from(run.devices(AT + 590))),
        ],
        Change::Halves => vec![
            ("devices before", |run| f64::from(run.devices(AT - 1))),
            ("devices 300 s later", |run| f64::from(run.devices(AT + 300))),
            ("attainment from then on", |run| run.attainment(AT, usize::MAX)),
        ],
        Change::Noise => vec![
            ("changes in the hour", |run| run.changes(1).len() as f64),
            ("turns after 15 minutes", |run| run.turns(Change::SETTLES_S) as f64),
            ("attainment after 15 minutes", |run| run.attainment(Change::SETTLES_S, usize::MAX)),
            ("devices at the end", |run| f64::from(run.devices(3590))),
        ],
    }
}
