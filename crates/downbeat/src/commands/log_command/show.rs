//! `downbeat log show`: entries of a log, or its requests.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use downbeat_core::journal::{Form, LogError, MachineKind, Shown, ShownEntries, heading, show_entries};
use downbeat_core::{Duration, Time};
use downbeat_report::out;
use downbeat_sim::why::{LogFile, LogFolder, LoggedRequest, Outcome, Span, Window};

use super::steps;
use super::time::LogTime;

/// Print inputs and decisions with the reasons, a line each; or with `--reason` the requests that
/// ended so, a line each.
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// The log of a part of the scheduler or of a device, or the folder with all logs. The entries of a
    /// folder are printed in order of time
    path: PathBuf,

    /// Print JSON, an object a line, with times in nanoseconds
    #[arg(long)]
    json: bool,

    /// Only entries about this model, by its name
    #[arg(long, value_name = "NAME")]
    model: Option<String>,

    /// Only entries from this time on, such as 14:05 or 2026-11-28T14:05:03Z (UTC). An age such as 5m
    /// counts back from the end of the log
    #[arg(long, value_name = "TIME")]
    since: Option<LogTime>,

    /// Only entries up to this time, in the same forms
    #[arg(long, value_name = "TIME")]
    until: Option<LogTime>,

    /// Only the last entries, so many
    #[arg(long, value_name = "N")]
    last: Option<usize>,

    /// Print requests in place of entries: those that ended so. The word is a `reason` of
    /// `downbeat_requests_not_answered_total`, or `late`, `in_time`, `open`, or `bad` for all that got
    /// no answer in time. Needs a folder
    #[arg(long, value_name = "WORD")]
    reason: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// If the path cannot be read or a file is damaged. The entries before the damage are shown all the
/// same.
pub fn run(args: &ShowArgs) -> anyhow::Result<()> {
    let mut out = BufWriter::new(out());
    let shown = if args.path.is_dir() {
        show_folder(args, &mut out)
    } else {
        ensure!(args.reason.is_none(), "--reason needs all files of the log: give their folder, not one file");
        show_file(args, &mut out)
    };
    out.flush()?;
    shown
}

fn show_file(args: &ShowArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let form = form(args);
    let name = || args.path.display().to_string();
    if args.since.is_none() && args.until.is_none() {
        let bytes = std::fs::read(&args.path).with_context(name)?;
        let (machine, _) = downbeat_core::journal::machine_of(&bytes).with_context(name)?;
        writeln!(out, "{}", heading(machine, form))?;
        let entries = show_entries(&bytes, form, steps(&args.path)).with_context(name)?;
        return print(args, Span { from: Time::ZERO, until: Time::MAX }, entries, out).with_context(name);
    }
    let file = LogFile::open(&args.path)?.with_context(name)?;
    let folder = LogFolder { path: args.path.clone(), files: vec![file] };
    let span = span(args, &folder)?;
    for file in &folder.files {
        let bytes = file.log_of(span)?;
        writeln!(out, "{}", heading(file.machine, form))?;
        let entries = show_entries(&bytes, form, steps(&args.path)).with_context(name)?;
        print(args, span, entries, out).with_context(name)?;
    }
    Ok(())
}

fn form(args: &ShowArgs) -> Form {
    if args.json { Form::Json } else { Form::Text }
}

/// The span that the options name.
fn span(args: &ShowArgs, folder: &LogFolder) -> anyhow::Result<Span> {
    let whole = folder.span()?;
    let at = |time: &Option<LogTime>, other: Time| time.as_ref().map_or(Ok(other), |time| time.in_log(folder, whole));
    let (from, until) = (at(&args.since, Time::ZERO)?, at(&args.until, Time::MAX)?);
    ensure!(from <= until, "--since is later than --until");
    Ok(Span { from, until })
}

fn show_folder(args: &ShowArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let folder = LogFolder::open(&args.path)?;
    let span = span(args, &folder)?;
    if let Some(word) = &args.reason {
        return show_requests(args, &folder, span, &Outcome::of_word(word)?, out);
    }
    let form = form(args);
    let logs = folder.files.iter().map(|file| Ok((file, file.log_of(span)?)));
    let logs = logs.collect::<anyhow::Result<Vec<_>>>()?;
    let mut sources = Vec::new();
    for (file, bytes) in &logs {
        let name = || file.path.display().to_string();
        sources.push((short(file), show_entries(bytes, form, steps(&file.path)).with_context(name)?.peekable()));
    }
    // The entry that comes first; of several at one time that of the first file.
    let next = move || -> Option<Result<Shown, LogError>> {
        let first = sources.iter_mut().enumerate().filter_map(|(place, (_, entries))| {
            let at = entries.peek()?.as_ref().map_or(Time::ZERO, |shown| shown.at);
            Some((at, place))
        });
        let (_, place) = first.min()?;
        let (name, entries) = sources.get_mut(place)?;
        let entry = entries.next()?;
        Some(entry.map(|shown| Shown { line: in_file(name, &shown.line, form), ..shown }))
    };
    print(args, span, Box::new(std::iter::from_fn(next)), out)
}

/// The name of a log beside its entries.
fn short(file: &LogFile) -> String {
    file.path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// An entry with the name of its file.
fn in_file(name: &str, line: &str, form: Form) -> String {
    match form {
        Form::Text => format!("{name:<12}{line}"),
        Form::Json => {
            let name = serde_json::Value::from(name);
            line.strip_suffix('}').map_or_else(|| line.to_owned(), |line| format!(r#"{line},"log":{name}}}"#))
        }
    }
}

/// Lines for the output: all of them, or only the last.
struct Lines<'a, W> {
    out: &'a mut W,
    /// Print only so many, the last.
    most: Option<usize>,
    last: VecDeque<String>,
}

impl<'a, W: Write> Lines<'a, W> {
    fn new(args: &ShowArgs, out: &'a mut W) -> Self {
        Lines { out, most: args.last, last: VecDeque::new() }
    }

    fn push(&mut self, line: String) -> std::io::Result<()> {
        let Some(most) = self.most else { return writeln!(self.out, "{line}") };
        self.last.push_back(line);
        if self.last.len() > most {
            self.last.pop_front();
        }
        Ok(())
    }

    /// Prints the lines that were kept for the end.
    fn end(self) -> std::io::Result<()> {
        self.last.iter().try_for_each(|line| writeln!(self.out, "{line}"))
    }
}

/// Prints the entries that the options ask for.
fn print(args: &ShowArgs, span: Span, entries: ShownEntries<'_>, out: &mut impl Write) -> anyhow::Result<()> {
    let mut lines = Lines::new(args, out);
    let (mut known, mut is_known) = (BTreeSet::new(), args.model.is_none());
    for shown in entries {
        let shown = match shown {
            Ok(shown) => shown,
            Err(error) => {
                lines.end()?;
                return Err(error.into());
            }
        };
        known.extend(shown.name.as_ref().map(|name| name.model.clone()));
        if let Some(wanted) = &args.model {
            let is_it = shown.name.as_ref().is_some_and(|name| name.is_called(wanted))
                || shown.model.is_some_and(|model| model.to_string() == *wanted);
            is_known |= is_it;
            if !is_it {
                continue;
            }
        }
        if shown.at < span.from || shown.at > span.until {
            continue;
        }
        lines.push(shown.line)?;
    }
    lines.end()?;
    let known: Vec<String> = known.into_iter().collect();
    ensure!(
        is_known,
        "--model {}: no entry is about this model; the log names {}",
        args.model.as_deref().unwrap_or_default(),
        if known.is_empty() { "none".to_owned() } else { known.join(", ") }
    );
    Ok(())
}

/// Prints the requests that ended in one of these ways.
fn show_requests(
    args: &ShowArgs,
    folder: &LogFolder,
    span: Span,
    outcomes: &[Outcome],
    out: &mut impl Write,
) -> anyhow::Result<()> {
    ensure!(
        folder.files.iter().any(|file| file.machine != MachineKind::Requests),
        "--reason needs the logs of the scheduler or of a device"
    );
    let whole = folder.span()?;
    // The last instant counts too.
    let until = span.until.min(whole.until) + Duration::from_nanos(1);
    let mut lines = Lines::new(args, out);
    let mut models: BTreeMap<String, usize> = BTreeMap::new();
    for piece in Window::pieces(folder, Span { from: span.from.max(whole.from), until }) {
        let (piece, window) = piece?;
        for request in window.requests.iter().filter(|request| piece.has(request.at)) {
            *models.entry(request.model.clone()).or_default() += 1;
            let outcome = window.outcome_of(request);
            if !outcomes.contains(&outcome) || !args.model.as_ref().is_none_or(|wanted| request.is_for(wanted)) {
                continue;
            }
            lines.push(line_of(folder, &window, request, outcome, args.json)?)?;
        }
    }
    lines.end()?;
    if let Some(wanted) = &args.model {
        let is_known = models.keys().any(|model| model == wanted || wanted.starts_with(&format!("{model} ")));
        let known: Vec<&str> = models.keys().map(String::as_str).collect();
        ensure!(
            is_known,
            "--model {wanted}: no request in this span is for this model; there are {}",
            known.join(", ")
        );
    }
    Ok(())
}

/// A request as a line.
fn line_of(
    folder: &LogFolder,
    window: &Window,
    request: &LoggedRequest,
    outcome: Outcome,
    json: bool,
) -> anyhow::Result<String> {
    let story = folder.brief(window, request);
    if json {
        return Ok(serde_json::to_string(&story)?);
    }
    let arrival = &story.arrival;
    let name = arrival.id.as_deref().map_or_else(String::new, |id| format!("  id {id:?}"));
    let name =
        arrival.trace.as_deref().filter(|_| arrival.id.is_none()).map_or(name, |trace| format!("  trace {trace}"));
    let because = story.because.as_deref().map_or_else(String::new, |because| format!("  {because}"));
    let budget = arrival.budget_ms.map_or_else(|| "no deadline".to_owned(), |budget| format!("had {budget:.1} ms"));
    let took = story.took_ms.map_or_else(String::new, |took| format!(", ended after {took:.1} ms"));
    Ok(format!(
        "{}  {:<8} {:<18} {}, {} items, {budget}{took}{name}{because}",
        arrival.came(),
        arrival.request,
        outcome,
        arrival.model,
        arrival.items
    ))
}
