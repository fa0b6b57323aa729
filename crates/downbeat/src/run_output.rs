//! What commands that simulate have in common: on how many threads they run, where what comes of it goes, and what is seen meanwhile.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use downbeat_bench::interrupt;
use downbeat_report::{Html, Json, note};
use downbeat_sim::parallel;
use indicatif::{ProgressBar, ProgressStyle};

/// How runs are made and shown.
#[derive(Args, Debug)]
pub struct RunOutput {
    /// Threads, each with a run of its own [default: as many as there are cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,

    /// The report as JSON.
    #[command(flatten)]
    pub json: Json,

    /// The report as a page.
    #[command(flatten)]
    pub html: Html,

    /// Nothing on standard error while it goes on. Without a terminal there is no progress bar anyway.
    #[arg(short, long)]
    pub quiet: bool,
}

impl RunOutput {
    /// On how many threads to run.
    pub fn threads(&self) -> usize {
        self.threads.map_or_else(parallel::cores, usize::from)
    }

    /// What is seen of the runs.
    ///
    /// # Errors
    /// As [`Progress::new`].
    pub fn progress(&self) -> anyhow::Result<Progress> {
        Progress::new(self.quiet)
    }
}

/// What is seen of runs while they go on, and whether they shall: Ctrl-C ends them with what there is, a second one the process.
pub struct Progress {
    bar: ProgressBar,
    interrupted: Arc<AtomicBool>,
}

impl Progress {
    /// A bar on a terminal, unless it is to be `quiet`.
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

    /// So many of so many runs are done; `false` if no other one is to begin.
    pub fn goes_on(&self, done: usize, total: usize) -> bool {
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
        !self.is_interrupted()
    }

    /// Whether somebody wants to see what there is.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// A line on standard error, above the bar.
    pub fn say(&self, line: &str) {
        self.bar.suspend(|| note(line));
    }

    /// Takes the bar away.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}
