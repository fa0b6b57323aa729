//! Shows the progress of measuring: a bar if it takes long, and a line for each measured case, such
//! as a batch size. Ctrl-C ends measuring early with the results so far.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::ensure;
use downbeat_bench::interrupt;
use downbeat_models::measure::sampler::Watch;
use indicatif::{ProgressBar, ProgressStyle};

/// Shorter measurements have no bar.
const BRIEF: std::time::Duration = std::time::Duration::from_secs(2);
/// Steps of the bar.
const STEPS: u64 = 1000;

struct Watched<'a, L> {
    out: &'a mut (dyn Write + Sync),
    bar: ProgressBar,
    interrupted: Arc<AtomicBool>,
    line: L,
}

impl<M, L: Fn(&M) -> String + Sync> Watch<M> for Watched<'_, L> {
    fn goes_on(&self, fraction: f64) -> bool {
        if self.bar.elapsed() > BRIEF {
            self.bar.set_position((fraction * STEPS as f64) as u64);
        }
        !self.interrupted.load(Ordering::Relaxed)
    }

    fn measured(&mut self, case: &M, _fraction: f64) {
        // Large batches of large models take long, so each case gets its line at once. If this
        // write fails, the end of the table fails too and reports it.
        let _ = self.bar.suspend(|| write!(self.out, "{}", (self.line)(case)).and_then(|()| self.out.flush()));
    }
}

/// Runs `measure` and shows its progress, with a `line` for each case. Ctrl-C ends measuring with
/// the cases so far; a second Ctrl-C ends the process.
///
/// # Errors
/// The error of `measure`, or if Ctrl-C came before the first case.
pub fn watched<M, E: Into<anyhow::Error>>(
    out: &mut (dyn Write + Sync),
    line: impl Fn(&M) -> String + Sync,
    measure: impl FnOnce(&mut dyn Watch<M>) -> Result<Vec<M>, E>,
) -> anyhow::Result<Vec<M>> {
    let style = ProgressStyle::with_template("{bar:40} {percent:>3}% of the measuring, for {elapsed}")?;
    let mut watch = Watched { out, bar: ProgressBar::new(STEPS).with_style(style), interrupted: Arc::default(), line };
    interrupt::watch(watch.interrupted.clone())?;
    let found = measure(&mut watch);
    watch.bar.finish_and_clear();
    let found = found.map_err(Into::into)?;
    let is_early = found.is_empty() && watch.interrupted.load(Ordering::Relaxed);
    ensure!(!is_early, "the command was interrupted before the first measurement");
    Ok(found)
}

/// As [`watched`], without a line for each case.
///
/// # Errors
/// As [`watched`].
pub fn watched_quietly<M, E: Into<anyhow::Error>>(
    measure: impl FnOnce(&mut dyn Watch<M>) -> Result<Vec<M>, E>,
) -> anyhow::Result<Vec<M>> {
    watched(&mut std::io::sink(), |_| String::new(), measure)
}
