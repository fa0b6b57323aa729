//! `downbeat log changes`: the figures of each model before and after an instant.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use downbeat_core::Duration;
use downbeat_report::{Table, say};
use downbeat_sim::why::{Changes, LogFolder, ModelChange};

use super::time::{LogTime, told};
use crate::run_output::waiting;

/// The shortest part of a log that is compared.
const LEAST: Duration = Duration::from_millis(1_000);

/// Compare the minute before an instant with the minute after it, for each model. Names the changes of
/// rates, of the speed of batches, and of shares in time
#[derive(Args, Debug)]
pub struct ChangesArgs {
    /// The instant, such as 14:05 or 2026-11-28T14:05:03Z (UTC). An age such as 5m counts back from the
    /// end of the log
    #[arg(value_name = "TIME")]
    at: LogTime,

    /// The folder that `downbeat serve --decision-log` writes
    #[arg(default_value = "decisions")]
    folder: PathBuf,

    /// How much of the log counts before the instant, and as much from then on
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = humantime::parse_duration)]
    span: std::time::Duration,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// If the log cannot be read, or has less than a second before the instant or from then on.
pub fn run(args: &ChangesArgs) -> anyhow::Result<()> {
    let folder = LogFolder::open(&args.folder)?;
    let whole = folder.span()?;
    let at = args.at.in_log(&folder, whole)?;
    ensure!(
        at >= whole.from + LEAST && at + LEAST <= whole.until,
        "the log goes {}: give an instant at least a second after its begin and before its end",
        told(&folder, whole)
    );
    let length = Duration::from(args.span);
    ensure!(length >= LEAST, "--span is at least 1s");
    let changes = waiting(false, "reading the log", || folder.changes(at, length))?;
    if args.json {
        return Ok(say(serde_json::to_string(&changes)?)?);
    }
    say(format_args!("{:.0} s before the instant, and {:.0} s from then on:", changes.before_s, changes.after_s))?;
    say(table(&changes))?;
    Ok(say(&changes)?)
}

/// The figures of each model, each before and after the instant.
fn table(changes: &Changes) -> Table<&ModelChange> {
    let pair = |before: Option<f64>, after: Option<f64>, digits: usize| {
        let told = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"));
        format!("{} → {}", told(before), told(after))
    };
    let percent = |share: Option<f64>| share.map(|share| 100.0 * share);
    Table::of(&changes.models)
        .text("model", |change| change.model.clone())
        .number("requests/s", move |ModelChange { before, after, .. }| {
            pair(Some(before.offered_per_s), Some(after.offered_per_s), 1)
        })
        .number("in time, %", move |ModelChange { before, after, .. }| {
            pair(percent(before.in_time), percent(after.in_time), 1)
        })
        .number("mean batch", move |ModelChange { before, after, .. }| pair(before.batch, after.batch, 1))
        .number("devices busy", move |ModelChange { before, after, .. }| {
            pair(Some(before.devices), Some(after.devices), 2)
        })
        .number("time to profile", move |ModelChange { before, after, .. }| {
            pair(before.to_profile, after.to_profile, 2)
        })
}
