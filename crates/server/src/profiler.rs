//! Measures how long a model's batches take, and remembers it for the next start.

use std::path::{Path, PathBuf};

use downbeat_core::profile::ProfileError;
use downbeat_core::{Duration, LatencyProfile};
use downbeat_engine::{EngineInfo, Lane, Model, RunError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::clock::Clock;
use crate::plan::{Admitted, BatchPlan, LARGEST_TRIAL};

/// Largest inputs of a batch that is timed, bytes. Larger batches are taken to go on as the measured ones.
pub(crate) const MOST_BYTES: usize = LARGEST_TRIAL;
/// Most runs that are timed for one batch size.
const MOST_RUNS: usize = 200;

/// How long one batch size took.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Measurement {
    /// Items in the batch.
    pub batch: u32,
    /// Timed runs.
    pub runs: u32,
    /// The fastest run, nanoseconds.
    pub min_ns: u64,
    /// Half of the runs took at most this, nanoseconds.
    pub median_ns: u64,
    /// 95 of 100 runs took at most this, nanoseconds.
    pub p95_ns: u64,
}

impl Measurement {
    /// The median.
    pub fn median(&self) -> Duration {
        Duration::from_nanos(self.median_ns)
    }
}

/// Powers of two up to `max_batch`, and `max_batch`: enough to draw a profile through.
pub fn default_sizes(max_batch: u32) -> Vec<u32> {
    let mut sizes: Vec<u32> = (0..32).map(|exponent| 1u32 << exponent).take_while(|size| *size < max_batch).collect();
    sizes.push(max_batch.max(1));
    sizes
}

/// A model to be timed.
pub struct Subject<'a> {
    /// The model.
    pub model: &'a dyn Model,
    /// How its batches are made.
    pub plan: &'a BatchPlan,
    /// The length of dimensions that vary.
    pub varying: i64,
    /// What times it.
    pub clock: Clock,
}

impl Subject<'_> {
    /// Runs a batch of copies of `item`, of one row each, from joining the requests to separating the outputs; gives how long it took. `rows` has a
    /// 1 for each copy.
    pub(crate) fn run(&self, lane: &mut dyn Lane, item: &Admitted, rows: &[u32]) -> Result<Duration, RunError> {
        let begin = self.clock.now();
        let state = self.plan.assemble(std::iter::repeat_n(item, rows.len()));
        let mut state = state.map_err(|reason| RunError::new("batch plan", reason))?;
        lane.run(0..self.model.segments(), &mut state)?;
        self.plan.separate(state, rows).map_err(|reason| RunError::new("batch plan", reason))?;
        Ok(self.clock.now().since(begin))
    }

    /// Times the batches of `sizes` on a lane, spending about `budget` in all, in the order given: from joining the
    /// requests to separating the outputs, as in service. `progress` hears of each size when it is done.
    ///
    /// # Errors
    /// What the engine says, if it cannot run a batch of zeros.
    pub fn measure(
        &self,
        lane: &mut dyn Lane,
        sizes: &[u32],
        budget: Duration,
        mut progress: impl FnMut(Measurement),
    ) -> Result<Vec<Measurement>, RunError> {
        let item = self.plan.zeros(self.varying).map_err(|reason| RunError::new("batch plan", reason))?;
        let largest = MOST_BYTES / self.plan.item_bytes(self.varying).unwrap_or(usize::MAX).max(1);
        let sizes: Vec<u32> = sizes.iter().copied().filter(|size| *size as usize <= largest).collect();
        let mut measurements: Vec<Measurement> = Vec::with_capacity(sizes.len());
        let end = self.clock.now() + budget;
        for (done, &batch) in sizes.iter().enumerate() {
            // A batch is of single items: that is the most there is to join and to separate.
            let rows = vec![1; batch as usize];
            let mut once = || self.run(lane, &item, &rows);
            let share = end.since(self.clock.now()).as_nanos() / (sizes.len() - done) as u64;
            let until = self.clock.now() + Duration::from_nanos(share);
            // The first run of a size allocates and plans.
            let first = once()?;
            let mut times = Vec::new();
            while times.len() < MOST_RUNS && self.clock.now() < until {
                times.push(once()?);
            }
            if times.is_empty() {
                // No time for another: a run that took this long has little to gain from a warm-up.
                times.push(first);
            }
            times.sort_unstable();
            let at = |quantile: f64| times[((times.len() - 1) as f64 * quantile).round() as usize].as_nanos();
            let measurement = Measurement {
                batch,
                runs: times.len() as u32,
                min_ns: times[0].as_nanos(),
                median_ns: at(0.5),
                p95_ns: at(0.95),
            };
            progress(measurement);
            measurements.push(measurement);
        }
        Ok(measurements)
    }
}

/// The profile through the medians.
///
/// # Errors
/// If there is no measurement.
pub fn profile(measurements: &[Measurement]) -> Result<LatencyProfile, ProfileError> {
    let points: Vec<_> = measurements.iter().map(|m| (m.batch, Duration::from_nanos(m.median_ns.max(1)))).collect();
    LatencyProfile::from_points(&points)
}

/// What was found out about a model file on this machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoredProfile {
    /// Threads a run used.
    pub threads: usize,
    /// Latency by batch size.
    pub measurements: Vec<Measurement>,
}

/// A folder of measured profiles. Losing it costs time at the next start, nothing else.
#[derive(Clone, Debug)]
pub struct ProfileStore {
    folder: Option<PathBuf>,
}

impl ProfileStore {
    /// A store in `folder`, or in the user's cache folder; stores nothing if there is neither.
    pub fn new(folder: Option<PathBuf>) -> Self {
        let folder = folder.or_else(|| {
            let cache = std::env::var_os("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
            cache.map(|cache| cache.join("downbeat").join("profiles"))
        });
        ProfileStore { folder }
    }

    /// The key of a model file: what it holds and what runs it, on how many cores, in batches of up to how many.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn key(path: &Path, engine: &EngineInfo, threads: usize, max_batch: u32) -> std::io::Result<String> {
        let mut hasher = crc32fast::Hasher::new();
        let mut file = std::fs::File::open(path)?;
        let mut chunk = vec![0u8; 1 << 20];
        let mut length = 0u64;
        loop {
            let read = std::io::Read::read(&mut file, &mut chunk)?;
            if read == 0 {
                break;
            }
            hasher.update(&chunk[..read]);
            length += read as u64;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(format!(
            "{:08x}-{length}-{}-{}-{}-c{cores}-t{threads}-b{max_batch}",
            hasher.finalize(),
            engine.name,
            engine.version,
            engine.device,
        )
        .replace(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '.', "_"))
    }

    /// What is stored under a key. A file that cannot be read or understood is as good as none.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let text = std::fs::read(self.folder.as_ref()?.join(format!("{key}.json"))).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Stores a profile.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn put(&self, key: &str, profile: &impl Serialize) -> std::io::Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        std::fs::create_dir_all(folder)?;
        // Written aside and moved, so that a server that starts beside this one never reads half a file.
        let aside = folder.join(format!("{key}.json.{}", std::process::id()));
        std::fs::write(&aside, serde_json::to_vec_pretty(profile)?)?;
        std::fs::rename(aside, folder.join(format!("{key}.json")))
    }
}
