//! Measures how long a model's batches take, and remembers it for the next start.

use std::path::{Path, PathBuf};

use downbeat_core::profile::ProfileError;
use downbeat_core::{Duration, LatencyProfile};
use downbeat_engine::{EngineInfo, Lane, Model, OperatorProfile, RunError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::batch_codec::{Admitted, BatchCodec, LARGEST_TRIAL};
use crate::clock::Clock;
use crate::machine_load::processor;

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

/// How much faster on several threads a batch has to be to be worth them.
const WORTH_SPEEDUP: f64 = 1.25;
/// Rounds of a comparison, the least, the fewest that tell something, and the most. The first is for models so slow that the
/// second would take more than twice the time that there is.
const ROUNDS: [usize; 3] = [2, 5, 60];
/// A comparison is by batches that take at most this part of the time there is for it, so that there are some rounds.
const ROUND_SHARE: u64 = 16;
/// A machine on which others take more than this share of the processor time says little about a model.
pub const NOISE: f64 = 0.15;

/// On how many threads a model runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Threads {
    /// Somebody said so.
    Chosen(usize),
    /// On one, or on so many if that is faster.
    UpTo(usize),
}

impl Threads {
    /// The most that a run may use.
    pub fn most(self) -> usize {
        let (Threads::Chosen(most) | Threads::UpTo(most)) = self;
        most
    }
}

impl std::fmt::Display for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Threads::Chosen(threads) => write!(f, "{threads}"),
            Threads::UpTo(most) => write!(f, "1-{most}"),
        }
    }
}

/// Whether a model that takes `alone` on one thread is to run on several, on which it takes `together`. The fastest runs tell what threads can do;
/// all others tell what the neighbours did meanwhile.
fn is_worth_threads(alone: &[Duration], together: &[Duration]) -> bool {
    let fastest = |times: &[Duration]| times.iter().min().map_or(0.0, |time| time.as_secs_f64());
    fastest(alone) > fastest(together) * WORTH_SPEEDUP
}

/// Whether a batch is faster on the second of two subjects, of the same model on one thread and on several, by as much as is worth it. They are
/// timed in turns, so that both meet what the machine does besides.
///
/// # Errors
/// What the engine says, if it cannot run such a batch.
pub fn compare(subjects: [Subject<'_>; 2], max_batch: u32, budget: Duration) -> anyhow::Result<bool> {
    let [alone, together] = subjects;
    let (mut one, mut several) = (alone.model.lane()?, together.model.lane()?);
    let (one, several) = (&mut *one, &mut *several);
    let item = alone.item()?;
    let most = Duration::from_nanos(budget.as_nanos() / ROUND_SHARE);
    // The largest batch that leaves time for the rounds. A size that is run for the first time allocates and plans.
    let mut rows = vec![1];
    let mut took = (alone.run(one, &item, &rows)?, alone.run(one, &item, &rows)?).1;
    let largest = (max_batch as usize).min(alone.largest());
    while rows.len() < largest && took.saturating_mul(2) <= most {
        rows.resize((rows.len() * 2).min(largest), 1);
        took = (alone.run(one, &item, &rows)?, alone.run(one, &item, &rows)?).1;
    }
    together.run(several, &item, &rows)?;
    let begin = alone.clock.now();
    let mut times = [Vec::new(), Vec::new()];
    loop {
        let [least, few, most] = ROUNDS;
        let (rounds, took) = (times[0].len(), alone.clock.now().since(begin));
        let is_time = took < budget || rounds < few && took < budget.saturating_mul(2);
        if rounds >= most || rounds >= least && !is_time {
            break;
        }
        times[0].push(alone.run(one, &item, &rows)?);
        times[1].push(together.run(several, &item, &rows)?);
    }
    Ok(is_worth_threads(&times[0], &times[1]))
}

/// A model to be timed.
pub struct Subject<'a> {
    /// The model.
    pub model: &'a dyn Model,
    /// How its batches are made.
    pub plan: &'a BatchCodec,
    /// The length of dimensions that vary.
    pub varying: i64,
    /// What times it.
    pub clock: Clock,
}

/// The runs of a size that engines do more in than run: in the first one they allocate and plan, and on a GPU the second one may be tried as a graph.
pub(crate) const WARM_UP: usize = 2;

/// What runs of a size took, in their order, without those; where there was no time for more, the shortest of them: one that took this long has little to gain from a warm-up.
pub(crate) fn settled<T: Ord + Copy>(mut times: Vec<T>) -> Vec<T> {
    if times.len() > WARM_UP {
        times.drain(..WARM_UP);
        return times;
    }
    times.into_iter().min().into_iter().collect()
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

    /// The largest batch that is timed. Larger ones are taken to go on as the measured ones.
    fn largest(&self) -> usize {
        LARGEST_TRIAL / self.plan.item_bytes(self.varying).unwrap_or(usize::MAX).max(1)
    }

    /// Those of these batch sizes that are timed.
    pub(crate) fn timed(&self, sizes: &[u32]) -> Vec<u32> {
        let largest = self.largest();
        sizes.iter().copied().filter(|size| *size as usize <= largest).collect()
    }

    /// What batches are made of.
    pub(crate) fn item(&self) -> Result<Admitted, RunError> {
        self.plan.trial(self.varying).map_err(|reason| RunError::new("batch plan", reason))
    }

    /// Times the batches of `sizes` on a lane, spending about `budget` in all, in the order given: from joining the
    /// requests to separating the outputs, as in service. `progress` hears of each size when it is done.
    ///
    /// # Errors
    /// What the engine says, if it cannot run such a batch.
    pub fn measure(
        &self,
        lane: &mut dyn Lane,
        sizes: &[u32],
        budget: Duration,
        mut progress: impl FnMut(Measurement),
    ) -> Result<Vec<Measurement>, RunError> {
        let item = self.item()?;
        let sizes = self.timed(sizes);
        let mut measurements: Vec<Measurement> = Vec::with_capacity(sizes.len());
        let end = self.clock.now() + budget;
        for (done, &batch) in sizes.iter().enumerate() {
            // A batch is of single items: that is the most there is to join and to separate.
            let rows = vec![1; batch as usize];
            let mut once = || self.run(lane, &item, &rows);
            let share = end.since(self.clock.now()).as_nanos() / (sizes.len() - done) as u64;
            let until = self.clock.now() + Duration::from_nanos(share);
            let mut times = vec![once()?];
            while times.len() < MOST_RUNS + WARM_UP && self.clock.now() < until {
                times.push(once()?);
            }
            let mut times = settled(times);
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
    /// The model's file.
    #[serde(default)]
    pub model: PathBuf,
    /// What ran it.
    #[serde(default)]
    pub engine: String,
    /// Threads a run used.
    pub threads: usize,
    /// Whether the machine did little else meanwhile. What was measured beside others is measured again.
    #[serde(default)]
    pub settled: bool,
    /// Latency by batch size.
    pub measurements: Vec<Measurement>,
}

/// What was found out about the operators of a model file when it was cut on this machine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StoredOperators {
    /// The model's file.
    pub model: PathBuf,
    /// What ran it.
    pub engine: String,
    /// Threads a run used.
    pub threads: usize,
    /// What they take and give.
    pub operators: OperatorProfile,
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

    /// What tells a model file from another: what it holds.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn file_key(path: &Path) -> std::io::Result<String> {
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
        Ok(format!("{:08x}-{length}", hasher.finalize()))
    }

    /// What the keys of all begin with that is measured of a file: what runs it, on which processor with how many cores and threads, on which part of it if it is divided, and on what.
    pub fn key(file: &str, engine: &EngineInfo, threads: Threads, part: Option<&str>) -> String {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let processor = crc32fast::hash(processor().as_bytes());
        let part = part.map_or_else(String::new, |part| format!("-{part}"));
        // What was measured on zeros is not found again.
        format!(
            "{file}-{}-{}-{}-random-p{processor:08x}-c{cores}{part}-t{threads}",
            engine.name, engine.version, engine.device,
        )
        .replace(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '.', "_")
    }

    /// Where it is; `None`: nowhere.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The files of the store, in order of their names.
    ///
    /// # Errors
    /// If the folder is there and cannot be read.
    fn files(&self) -> std::io::Result<Vec<PathBuf>> {
        let Some(folder) = &self.folder else { return Ok(Vec::new()) };
        let entries = match std::fs::read_dir(folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut files = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                files.push(path);
            }
        }
        files.sort_unstable();
        Ok(files)
    }

    /// What is stored of one kind: profiles of whole models, or of the operators of those that are cut.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn list<T: DeserializeOwned>(&self) -> std::io::Result<Vec<T>> {
        let read = |path: PathBuf| serde_json::from_slice(&std::fs::read(path).ok()?).ok();
        Ok(self.files()?.into_iter().filter_map(read).collect())
    }

    /// Forgets everything; how many files there were.
    ///
    /// # Errors
    /// If one cannot be removed.
    pub fn clear(&self) -> std::io::Result<usize> {
        let files = self.files()?;
        files.iter().try_for_each(std::fs::remove_file)?;
        Ok(files.len())
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
        // Written aside and moved, so that nobody reads half a file: a server that starts beside this one, or another load of the same model.
        let mut aside = tempfile::NamedTempFile::new_in(folder)?;
        std::io::Write::write_all(&mut aside, &serde_json::to_vec_pretty(profile)?)?;
        aside.persist(folder.join(format!("{key}.json")))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::{Arc, Mutex};

    use downbeat_core::tensor::{DataType, Signature, TensorSpec};
    use downbeat_engine::{Fill, LoadError, Place, State};
    use downbeat_repository::TensorBinding;

    use crate::device_budget::DeviceBudget;
    use crate::segment_profiler::SegmentSubject;
    use crate::warm_up::WarmUp;
    use crate::{mix_profiler, pair_profiler};

    /// A model that remembers what it was run with.
    #[derive(Clone, Default)]
    struct Spy {
        signature: Signature,
        seen: Arc<Mutex<Vec<Vec<u8>>>>,
    }

    impl Model for Spy {
        fn signature(&self) -> &Signature {
            &self.signature
        }

        fn lane_at(&self, _place: Place) -> Result<Box<dyn Lane>, LoadError> {
            Ok(Box::new(self.clone()))
        }

        fn sizes_to_warm(&self, _most: usize) -> Vec<usize> {
            vec![2]
        }
    }

    impl Lane for Spy {
        fn run(&mut self, _range: std::ops::Range<usize>, state: &mut State) -> Result<(), RunError> {
            self.seen.lock().unwrap().extend(state.tensors.drain(..).map(|tensor| tensor.data.as_slice().to_vec()));
            Ok(())
        }
    }

    /// A GPU is faster on zeros than it will be in service.
    #[test]
    fn nothing_is_timed_or_warmed_up_with_zeros() {
        let model = Spy::default();
        let dims = vec![-1, 64];
        let client = TensorSpec { name: "x".into(), datatype: DataType::Fp32, dims: dims.clone() };
        let (labels, batched, optional) = ([].into(), true, false);
        let binding = TensorBinding { client, model_index: 0, model_dims: dims, labels, batched, optional };
        let plan = BatchCodec::new(vec![binding], vec![], 2);
        let clock = Clock::start();
        let subject = Subject { model: &model, plan: &plan, varying: 1, clock };
        let budget = Duration::from_millis(1);
        let mut lane = model.lane().unwrap();
        let engine = downbeat_engine::Emulated::new();
        let device_budget = DeviceBudget::before(&engine, &[0], None);
        let steps: [(&str, &mut dyn FnMut()); 6] = [
            ("batches", &mut || drop(subject.measure(&mut *model.lane().unwrap(), &[1, 2], budget, |_| {}).unwrap())),
            ("shares", &mut || {
                drop(subject.measure_shares(&[(None, Default::default())], &[2], budget, |_| {}).unwrap());
            }),
            ("mixes", &mut || drop(mix_profiler::measure(&subject, &[2], 2, budget, |_, _| {}).unwrap())),
            ("pairs", &mut || {
                drop(pair_profiler::measure([&subject, &subject], 0, &[[1, 2]], None, budget, |_| {}).unwrap());
            }),
            ("segments", &mut || {
                let segments = SegmentSubject { model: &model, plan: &plan, padding: None, clock, budget };
                segments.measured(&mut *model.lane().unwrap(), &ProfileStore::new(None), None).unwrap();
            }),
            ("warm-up", &mut || {
                let (name, model, plan, budget) = ("spy", &model as &dyn Model, &plan, &device_budget);
                let mut warm_up = WarmUp { name, model, plan, budget, wanted: Vec::new(), run: None };
                warm_up.whole(&[], 0, &mut *lane).unwrap();
            }),
        ];
        for (what, step) in steps {
            model.seen.lock().unwrap().clear();
            step();
            let seen = model.seen.lock().unwrap();
            assert!(!seen.is_empty(), "{what}");
            for batch in &*seen {
                let mut item: Vec<[u8; 4]> = batch[..256].as_chunks().0.to_vec();
                item.sort_unstable();
                item.dedup();
                assert!(item.len() > 60, "{what}: {} different numbers of 64", item.len());
            }
        }
        // Where a model takes nothing else.
        let zeros = plan.with_fill(Fill::Zeros).trial(1).unwrap();
        assert_eq!(zeros.input(0), [0; 256]);
    }

    fn ms(times: &[u64]) -> Vec<Duration> {
        times.iter().map(|ms| Duration::from_millis(*ms)).collect()
    }

    /// Timed in turns: of the runs in which a neighbour had a core some are left in which it had none.
    #[test]
    fn threads_are_judged_by_what_they_can_do() {
        assert!(is_worth_threads(&ms(&[10, 10, 10, 10]), &ms(&[20, 6, 25, 6])));
        assert!(!is_worth_threads(&ms(&[10, 30, 30, 30]), &ms(&[9, 9, 9, 9])));
        assert!(!is_worth_threads(&ms(&[10]), &ms(&[10])));
    }

    #[test]
    fn what_is_stored_is_listed_and_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let store = ProfileStore::new(Some(folder.path().join("profiles")));
        assert_eq!((store.list::<StoredProfile>().unwrap(), store.clear().unwrap()), (Vec::new(), 0));
        let profile = StoredProfile {
            model: "m/1/model.onnx".into(),
            engine: "rten".to_owned(),
            threads: 2,
            settled: true,
            measurements: Vec::new(),
        };
        store.put("a", &profile).unwrap();
        store.put("segments", &[1, 2]).unwrap();
        assert_eq!(store.list::<StoredProfile>().unwrap(), [profile]);
        assert_eq!(store.list::<StoredOperators>().unwrap(), []);
        assert_eq!((store.clear().unwrap(), store.list::<StoredProfile>().unwrap()), (2, Vec::new()));
    }

    #[test]
    fn threads_that_were_chosen_have_profiles_of_their_own() {
        let file = ProfileStore::file_key(tempfile::NamedTempFile::new().unwrap().path()).unwrap();
        let engine = downbeat_engine::Engine::info(&downbeat_engine::Emulated::new());
        let key = |threads| ProfileStore::key(&file, &engine, threads, None);
        let on = |part| ProfileStore::key(&file, &engine, Threads::Chosen(2), Some(part));
        assert_ne!(key(Threads::Chosen(2)), key(Threads::UpTo(2)));
        assert_eq!(key(Threads::UpTo(2)), key(Threads::UpTo(2)));
        assert!(on("CPUs 0-3") != on("CPUs 4-7") && on("CPUs 0-3") != key(Threads::Chosen(2)));
    }

    #[test]
    fn runs_in_which_engines_do_more_do_not_count() {
        assert_eq!(settled(vec![90, 400, 30, 31, 29]), [30, 31, 29]);
        assert_eq!(settled(vec![90, 400, 30]), [30]);
        assert_eq!((settled(vec![90, 400]), settled(vec![90])), (vec![90], vec![90]));
    }
}
