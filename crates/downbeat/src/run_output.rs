//! The common part of commands that simulate: threads, the files of the result, and the progress
//! bar.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use downbeat_bench::interrupt;
use downbeat_report::{Html, Json, note};
use downbeat_sim::parallel;
use indicatif::{ProgressBar, ProgressStyle};

/// Flags for the runs and their output.
#[derive(Args, Debug)]
pub struct RunOutput {
    /// Threads, each with a run of its own [default: one a core].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,

    /// The report as JSON.
    #[command(flatten)]
    pub json: Json,

    /// The report as a page.
    #[command(flatten)]
    pub html: Html,

    /// Nothing on standard error during the runs. Without a terminal there is no progress bar
    /// anyway.
    #[arg(short, long)]
    pub quiet: bool,
}

impl RunOutput {
    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.threads.map_or_else(parallel::cores, usize::from)
    }

    /// The display of the runs' progress.
    ///
    /// # Errors
    /// As [`Progress::new`].
    pub fn progress(&self) -> anyhow::Result<Progress> {
        Progress::new(self.quiet)
    }
}

/// Does a piece of work whose length is unknown. On a terminal, a line on standard error names the work
/// and the time so far, unless `quiet`.
pub fn waiting<T>(quiet: bool, what: &str, work: impl FnOnce() -> T) -> T {
    if quiet || !std::io::stderr().is_terminal() {
        return work();
    }
    let style =
        ProgressStyle::with_template("{spinner} {msg}, {elapsed}").unwrap_or_else(|_| ProgressStyle::default_spinner());
    let spinner = ProgressBar::new_spinner().with_style(style).with_message(what.to_owned());
    spinner.enable_steady_tick(TICK);
    let done = work();
    spinner.finish_and_clear();
    done
}

/// How often the line of [`waiting`] changes.
const TICK: Duration = Duration::from_millis(200);

/// Shows the progress of runs, and watches for Ctrl-C. The first Ctrl-C ends the runs with the
/// results so far, a second one ends the process.
pub struct Progress {
    bar: ProgressBar,
    interrupted: Arc<AtomicBool>,
}

impl Progress {
    /// A bar on a terminal, unless `quiet`.
    ///
    /// # Errors
    /// If Ctrl-C cannot be watched.
    pub fn new(quiet: bool) -> anyhow::Result<Progress> {
        let hidden = quiet || !std::io::stderr().is_terminal();
        let bar = if hidden { ProgressBar::hidden() } else { ProgressBar::no_length() };
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} runs, {elapsed}, {eta} left")?;
        let progress = Progress { bar: bar.with_style(style), interrupted: Arc::default() };
        interrupt::watch(progress.interrupted.clone())?;
        Ok(progress)
    }

    /// Shows that `done` of `total` runs are done. Returns `false` if no other run may begin.
    pub fn goes_on(&self, done: usize, total: usize) -> bool {
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
        !self.is_interrupted()
    }

    /// Whether the user wants the results so far.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Prints a line on standard error, above the bar.
    pub fn say(&self, line: &str) {
        self.bar.suspend(|| note(line));
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}
