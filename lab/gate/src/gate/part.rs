//! The counted parts of a run: the first has N requests, the second 2N.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result};

use crate::gate::counters::{self, KINDS};
use crate::gate::{still, valgrind};

/// Requests before the first part, in a world that stands still.
pub const WARM_UP: u64 = 200;

/// The task of a process, from its environment variables.
pub struct Plan {
    /// The folder for its counts.
    folder: PathBuf,
    /// The number of requests of the first part.
    requests: u64,
}

/// The variables with the folder and the number of requests of the first part.
pub const VARIABLES: [&str; 2] = ["DOWNBEAT_GATE_FOLDER", "DOWNBEAT_GATE_REQUESTS"];

/// The plan of a process that sees only launches: an executor.
static BY_LAUNCH: OnceLock<Plan> = OnceLock::new();
static LAUNCHES: AtomicU64 = AtomicU64::new(0);

impl Plan {
    /// # Errors
    /// If the variables are not set.
    pub fn of_environment() -> Result<Plan> {
        let variable = |name: &str| std::env::var(name).with_context(|| format!("{name} is not set"));
        let [folder, requests] = VARIABLES;
        Ok(Plan { folder: variable(folder)?.into(), requests: variable(requests)?.parse()? })
    }

    /// Returns a folder for the way's files, which is removed after the run.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Runs both parts of a way, and ends the process: threads that stand still cannot be joined.
    /// `requests` runs this many requests.
    pub fn run(&self, requests: impl FnMut(u64) -> Result<()>) -> ! {
        let status = match self.run_parts(requests) {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("{error:#}");
                1
            }
        };
        downbeat_engine::process::end(status)
    }

    fn run_parts(&self, mut requests: impl FnMut(u64) -> Result<()>) -> Result<()> {
        requests(WARM_UP)?;
        still::stand_still();
        valgrind::start();
        requests(WARM_UP)?;
        for part in [1, 2] {
            let before = begin();
            requests(part * self.requests)?;
            self.end(before);
        }
        Ok(())
    }

    fn end(&self, before: [u64; KINDS]) {
        let counted = counters::counted();
        mark();
        valgrind::dump();
        let counted = counted.iter().zip(before).map(|(now, then)| (now - then).to_string());
        let line = counted.collect::<Vec<_>>().join(" ") + "\n";
        let path = self.folder.join(format!("counters.{}", std::process::id()));
        let written = OpenOptions::new().append(true).create(true).open(&path);
        let written = written.and_then(|mut file| file.write_all(line.as_bytes()));
        written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

fn begin() -> [u64; KINDS] {
    valgrind::zero();
    mark();
    counters::counted()
}

/// Makes a system call that no other code makes, so that it marks the begin and the end of a part
/// in a trace.
fn mark() {
    // SAFETY: it has no arguments.
    unsafe { libc::getppid() };
}

/// From now on launches end the parts of this process.
///
/// # Errors
/// If the process was not started for counting.
pub fn count_by_launch() -> Result<()> {
    let plan = Plan::of_environment()?;
    anyhow::ensure!(BY_LAUNCH.set(plan).is_ok(), "once");
    still::stand_still();
    valgrind::start();
    Ok(())
}

/// Counts a launch.
pub fn launched() {
    let Some(plan) = BY_LAUNCH.get() else { return };
    static BEFORE: [AtomicU64; KINDS] = [const { AtomicU64::new(0) }; KINDS];
    let launch = LAUNCHES.fetch_add(1, Ordering::Relaxed) + 1;
    let ends = [0, 1, 3].map(|parts| 2 * WARM_UP + parts * plan.requests);
    if launch == ends[1] || launch == ends[2] {
        plan.end(BEFORE.each_ref().map(|before| before.load(Ordering::Relaxed)));
    }
    if launch == ends[0] || launch == ends[1] {
        for (before, now) in BEFORE.iter().zip(begin()) {
            before.store(now, Ordering::Relaxed);
        }
    }
}
