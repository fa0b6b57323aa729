//! `downbeat log`: tells the story of a request, and the changes at an instant. It also prints or
//! replays a decision log, and shows where pipelines spend their time.

mod changes;
mod show;
mod time;
mod why;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use changes::ChangesArgs;
use clap::{Args, Subcommand};
use downbeat_core::RequestId;
use downbeat_core::journal::pipelines::{StepOf, steps_by_request};
use downbeat_core::journal::{Form, heading, machine_of, replay, show_entries};
use downbeat_report::{Html, Json, note, say};
use downbeat_sim::what_if::pipelines::PipelineViews;
use downbeat_sim::what_if::whole_log;
use show::ShowArgs;
use why::WhyArgs;

use crate::run_output::waiting;

/// Ask a decision log why a request was dropped or late, read the log, replay it, or see where
/// pipelines spend their time.
#[derive(Subcommand, Debug)]
pub enum LogCommand {
    Why(WhyArgs),
    Changes(ChangesArgs),
    Show(ShowArgs),
    /// Show where the time of pipelines' requests went: ensembles, and calls of models' code. For
    /// each step its waiting, its running, its share and its losses, and the step that is short of
    /// devices
    Pipelines {
        /// A folder that `downbeat serve --decision-log` has written
        folder: PathBuf,
        /// Only the pipeline of this name
        #[arg(long, value_name = "NAME")]
        pipeline: Option<String>,
        /// The report as JSON
        #[command(flatten)]
        json: Json,
        /// The report as a page
        #[command(flatten)]
        html: Html,
    },
    /// Feed the log's inputs to a fresh scheduler and compare its decisions with the log's; fails
    /// if one differs
    Replay(LogArgs),
}

/// Arguments of `downbeat log replay`.
#[derive(Args, Debug)]
pub struct LogArgs {
    /// The log of a part of the scheduler, or of a device
    file: PathBuf,
}

/// Runs the command; false if the replay differs from the log.
///
/// # Errors
/// If the file cannot be read or is damaged. The entries before the damage are shown all the same.
pub fn run(command: &LogCommand) -> anyhow::Result<bool> {
    match command {
        LogCommand::Why(args) => why::run(args).map(|()| true),
        LogCommand::Changes(args) => changes::run(args).map(|()| true),
        LogCommand::Show(args) => show::run(args).map(|()| true),
        LogCommand::Pipelines { folder, pipeline, json, html } => {
            let views = views(folder, pipeline.as_deref())?;
            html.write(|| views.page())?;
            json.print(&views)?;
            Ok(true)
        }
        LogCommand::Replay(args) => play(&args.file),
    }
}

/// The view of the pipelines of a log, or of the one with this name.
fn views(folder: &Path, pipeline: Option<&str>) -> anyhow::Result<PipelineViews> {
    let mut views = waiting(false, "reading the log", || PipelineViews::read(folder))?;
    if let Some(name) = pipeline {
        let known: Vec<String> = views.pipelines.iter().map(|view| format!("'{}'", view.pipeline)).collect();
        views.pipelines.retain(|view| view.pipeline == name);
        ensure!(
            !views.pipelines.is_empty(),
            "--pipeline {name}: the log has no request of a pipeline '{name}'; it has requests of {}",
            known.join(", ")
        );
    }
    Ok(views)
}

/// The steps of pipelines that requests of this file are, by the file of pipelines beside it.
fn steps(file: &Path) -> BTreeMap<RequestId, StepOf> {
    let beside = file.with_file_name("pipelines.log");
    // A server without requests of pipelines has a file without entries, or none.
    let Ok(bytes) = whole_log(&beside) else { return BTreeMap::new() };
    steps_by_request(&bytes).unwrap_or_else(|error| {
        note(format_args!("Requests are shown without their steps: {}: {error}", beside.display()));
        BTreeMap::new()
    })
}

/// Writes a decision log with the `steps` of pipelines that its requests are, entry by entry, up to
/// the first entry that cannot be read. `bytes` is the content of `file`.
///
/// # Errors
/// If `bytes` are no decision log or a damaged one, or `out` cannot be written.
pub fn write_log(
    file: &Path,
    bytes: &[u8],
    form: Form,
    steps: BTreeMap<RequestId, StepOf>,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let name = || file.display().to_string();
    writeln!(out, "{}", heading(machine_of(bytes).with_context(name)?.0, form))?;
    show_entries(bytes, form, steps)
        .with_context(name)?
        .try_for_each(|entry| Ok(writeln!(out, "{}", entry.with_context(name)?.line)?))
}

fn play(file: &Path) -> anyhow::Result<bool> {
    let log = whole_log(file)?;
    let replayed = waiting(false, "replaying the log", || replay(&log)).with_context(|| file.display().to_string())?;
    let (inputs, decisions) = (replayed.inputs, replayed.decisions);
    match &replayed.divergence {
        None => say(format_args!("the replay of {inputs} inputs gives the same {decisions} decisions as the log"))?,
        Some(divergence) => {
            say(format_args!("after {inputs} inputs and {decisions} decisions the replay differs from the log"))?;
            say(divergence)?;
        }
    }
    Ok(replayed.divergence.is_none())
}
