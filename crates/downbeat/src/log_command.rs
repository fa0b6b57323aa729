//! `downbeat log`: reading a decision log, and playing it again.

use std::fmt::Display;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use downbeat_core::cluster::journal::{MachineKind, Record, read, replay};
use downbeat_core::device::journal::{DeviceLogError, DeviceRecord, DeviceReplay};
use downbeat_core::{Time, device};
use downbeat_report::{out, say};

/// Read a decision log, or play it again.
#[derive(Subcommand, Debug)]
pub enum LogCommand {
    /// Print what came in and what was decided, with the reasons, a line each
    Show(LogArgs),
    /// Feed what came in to a fresh scheduler and compare its decisions with the log's; fails if one differs
    Replay(LogArgs),
}

/// Arguments of `downbeat log show` and `downbeat log replay`.
#[derive(Args, Debug)]
pub struct LogArgs {
    /// The log
    file: PathBuf,
}

/// Runs the command; `false` if the log does not play again.
///
/// # Errors
/// If the file cannot be read or is damaged. What comes before the damage is shown all the same.
pub fn run(command: &LogCommand) -> anyhow::Result<bool> {
    match command {
        LogCommand::Show(args) => show(&args.file).map(|()| true),
        LogCommand::Replay(args) => play(&args.file),
    }
}

fn bytes(file: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(file).with_context(|| file.display().to_string())
}

fn show(file: &Path) -> anyhow::Result<()> {
    let bytes = bytes(file)?;
    let mut out = BufWriter::new(out());
    let written = write_log(file, &bytes, &mut out);
    out.flush()?;
    written
}

/// Writes the decision log in `bytes`, which are those of `file`, a line for each entry, up to the first that cannot be read.
///
/// # Errors
/// If `bytes` are no decision log or a damaged one, or `out` takes no more.
pub fn write_log(file: &Path, bytes: &[u8], out: &mut impl Write) -> anyhow::Result<()> {
    if bytes.starts_with(b"{") {
        return write_device_log(file, bytes, out);
    }
    let (machine, entries) = read(bytes).with_context(|| file.display().to_string())?;
    let name = match machine {
        MachineKind::Scheduler => "scheduler".to_owned(),
        MachineKind::Shard { index, shards } => format!("shard {index} of {shards}"),
        MachineKind::Matchmaker => "matchmaker".to_owned(),
    };
    let head = format!("decision log of a {name}: entry, milliseconds, what came in, -> what was decided");
    let mut now = Time::ZERO;
    let lines = entries.map(|entry| {
        let entry = entry.with_context(|| file.display().to_string())?;
        if let Record::Input(at, _) = entry.record {
            now = at;
        }
        Ok(entry.line(now))
    });
    print(std::iter::once(Ok(head)).chain(lines), out)
}

/// The log of a device: a line of JSON for each event.
fn write_device_log(file: &Path, bytes: &[u8], out: &mut impl Write) -> anyhow::Result<()> {
    let shown = |record: Result<(usize, DeviceRecord), DeviceLogError>| {
        let (_, record) = record.with_context(|| file.display().to_string())?;
        Ok(record.to_string())
    };
    print(device::journal::read(bytes).map(shown), out)
}

fn print(mut lines: impl Iterator<Item = anyhow::Result<String>>, out: &mut impl Write) -> anyhow::Result<()> {
    lines.try_for_each(|line| Ok(writeln!(out, "{}", line?)?))
}

fn play(file: &Path) -> anyhow::Result<bool> {
    let bytes = bytes(file)?;
    let name = || file.display().to_string();
    if bytes.starts_with(b"{") {
        let DeviceReplay { inputs, decisions, divergence } = device::journal::replay(&bytes).with_context(name)?;
        return said(inputs, decisions, divergence);
    }
    let replayed = replay(&bytes).with_context(name)?;
    said(replayed.inputs, replayed.decisions, replayed.divergence)
}

/// Says what came of playing a log again; `false` if it and its replay part.
fn said(inputs: u64, decisions: u64, divergence: Option<impl Display>) -> anyhow::Result<bool> {
    match &divergence {
        None => say(format_args!("{inputs} inputs give the same {decisions} decisions again"))?,
        Some(divergence) => {
            say(format_args!("after {inputs} inputs and {decisions} decisions the log and its replay part"))?;
            say(divergence)?;
        }
    }
    Ok(divergence.is_none())
}
