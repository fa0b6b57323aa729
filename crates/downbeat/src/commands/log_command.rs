//! `downbeat log`: prints or replays a decision log.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use downbeat_core::journal::{Form, replay, show};
use downbeat_report::{out, say};

/// Read a decision log, or replay it.
#[derive(Subcommand, Debug)]
pub enum LogCommand {
    /// Print inputs and decisions with the reasons, a line each
    Show {
        #[command(flatten)]
        log: LogArgs,
        /// Print JSON, an object a line, with times in nanoseconds
        #[arg(long)]
        json: bool,
    },
    /// Feed the log's inputs to a fresh scheduler and compare its decisions with the log's; fails
    /// if one differs
    Replay(LogArgs),
}

/// Arguments of `downbeat log show` and `downbeat log replay`.
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
        LogCommand::Show { log, json } => {
            let bytes = bytes(&log.file)?;
            let mut out = BufWriter::new(out());
            let form = if *json { Form::Json } else { Form::Text };
            let written = write_log(&log.file, &bytes, form, &mut out);
            out.flush()?;
            written.map(|()| true)
        }
        LogCommand::Replay(args) => play(&args.file),
    }
}

fn bytes(file: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(file).with_context(|| file.display().to_string())
}

/// Writes a decision log, entry by entry, up to the first entry that cannot be read. `bytes` is the
/// content of `file`.
///
/// # Errors
/// If `bytes` are no decision log or a damaged one, or `out` cannot be written.
pub fn write_log(file: &Path, bytes: &[u8], form: Form, out: &mut impl Write) -> anyhow::Result<()> {
    let name = || file.display().to_string();
    show(bytes, form).with_context(name)?.try_for_each(|line| Ok(writeln!(out, "{}", line.with_context(name)?)?))
}

fn play(file: &Path) -> anyhow::Result<bool> {
    let replayed = replay(&bytes(file)?).with_context(|| file.display().to_string())?;
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
