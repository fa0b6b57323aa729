//! Stores measurements of models for the next start.

use std::path::{Path, PathBuf};

use downbeat_engine::{EngineInfo, OperatorProfile, user_cache};
use downbeat_service::report::machine_load::processor;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::measure::profiler::{Measurement, Threads};
use crate::measure::share_profiler::ShareMeasurement;

/// Measurements of a model file on this machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoredProfile {
    /// The model's file.
    #[serde(default)]
    pub model: PathBuf,
    /// The engine that ran it.
    #[serde(default)]
    pub engine: String,
    /// Threads a run used.
    pub threads: usize,
    /// How many batches are worth running at the same time on the CPU; 0: not measured.
    #[serde(default)]
    pub at_once: u32,
    /// Whether the machine did little else meanwhile. Measurements beside other work are repeated.
    #[serde(default)]
    pub settled: bool,
    /// Latency by batch size.
    pub measurements: Vec<Measurement>,
}

/// Measurements of the operators of a model file, for cutting it on this machine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StoredOperators {
    /// The model's file.
    pub model: PathBuf,
    /// The engine that ran it.
    pub engine: String,
    /// Threads a run used.
    pub threads: usize,
    /// The operators' times and tensors.
    pub operators: OperatorProfile,
}

/// Measurements of a model file on shares of a device, by `downbeat profile --shares`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoredShares {
    /// The model's file.
    pub model: PathBuf,
    /// The engine that ran it.
    pub engine: String,
    /// By batch size, ascending: the compute units beyond which a batch is hardly faster.
    pub knees: Vec<(u32, u32)>,
    /// By share, then by batch size, both ascending.
    #[serde(default)]
    pub measurements: Vec<ShareMeasurement>,
}

/// A folder of measured profiles. Losing it costs time at the next start, nothing else.
#[derive(Clone, Debug)]
pub struct ProfileStore {
    /// The store's folder; `None`: no store.
    pub folder: Option<PathBuf>,
}

impl ProfileStore {
    /// A store in `folder`, or in the user's cache folder; stores nothing if there is neither.
    pub fn new(folder: Option<PathBuf>) -> Self {
        let of_user = || Some(user_cache(|name| std::env::var_os(name))?.join("downbeat").join("profiles"));
        let folder = folder.or_else(of_user);
        ProfileStore { folder }
    }

    /// The key of a model file's content.
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

    /// The key for a file's measurements on shares, by engine.
    pub fn shares_key(file: &str, engine: &EngineInfo) -> String {
        ProfileStore::engine_key(file, engine, "knees")
    }

    /// The key for the verdict on a file's rows, by the engine that ran the check. The number is
    /// the check's version.
    pub fn rows_key(file: &str, engine: &EngineInfo) -> String {
        ProfileStore::engine_key(file, engine, "rows1")
    }

    /// The key for the trial of a file in a process. The number is the trial's version.
    pub fn trial_key(file: &str, engine: &EngineInfo) -> String {
        ProfileStore::engine_key(file, engine, "trial1")
    }

    fn engine_key(file: &str, engine: &EngineInfo, what: &str) -> String {
        let key = format!("{file}-{}-{}-{}-{what}", engine.name, engine.version, engine.device);
        key.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '.', "_")
    }

    /// The common beginning of the keys of a file's measurements. It names the engine, the
    /// processor with its cores, the threads, the part of a divided device, and the kind of inputs.
    pub fn key(file: &str, engine: &EngineInfo, threads: Threads, part: Option<&str>) -> String {
        format!("{file}-{}", ProfileStore::place_key(engine, threads, part))
    }

    /// The part of such a key that names the place of the measurement.
    pub fn place_key(engine: &EngineInfo, threads: Threads, part: Option<&str>) -> String {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let processor = crc32fast::hash(processor().as_bytes());
        let part = part.map_or_else(String::new, |part| format!("-{part}"));
        // The word `random` makes the store forget older measurements with inputs of zeros.
        format!(
            "{}-{}-{}-random-p{processor:08x}-c{cores}{part}-t{threads}",
            engine.name, engine.version, engine.device,
        )
        .replace(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '.', "_")
    }

    /// The files of the store, in order of their names.
    ///
    /// # Errors
    /// If the folder exists and cannot be read.
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

    /// Everything stored of one kind: profiles of whole models, or of the operators of models that
    /// are cut.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn list<T: DeserializeOwned>(&self) -> std::io::Result<Vec<T>> {
        let read = |path: PathBuf| serde_json::from_slice(&std::fs::read(path).ok()?).ok();
        Ok(self.files()?.into_iter().filter_map(read).collect())
    }

    /// Forgets everything. Returns how many files there were.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn clear(&self) -> std::io::Result<usize> {
        let files = self.files()?;
        files.iter().try_for_each(std::fs::remove_file)?;
        Ok(files.len())
    }

    /// The value stored under a key; `None` also if the file cannot be read or understood.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let text = std::fs::read(self.folder.as_ref()?.join(format!("{key}.json"))).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Stores a measurement, which `what` names. If that fails the log says so, and the next start
    /// measures again.
    pub fn keep(&self, key: Result<String, String>, what: &str, profile: &impl Serialize) {
        if let Err(error) = key.and_then(|key| self.put(&key, profile).map_err(|error| error.to_string())) {
            tracing::warn!(%error, "cannot store {what}; the next start will not find this result");
        }
    }

    /// Stores a profile.
    ///
    /// # Errors
    /// If the folder cannot be written.
    fn put(&self, key: &str, profile: &impl Serialize) -> std::io::Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        std::fs::create_dir_all(folder)?;
        // The file is written aside and moved, so that no reader sees half of it: neither a server
        // that starts beside this one, nor another load of the same model.
        let mut aside = tempfile::NamedTempFile::new_in(folder)?;
        std::io::Write::write_all(&mut aside, &serde_json::to_vec_pretty(profile)?)?;
        aside.persist(folder.join(format!("{key}.json")))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_listed_and_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let store = ProfileStore::new(Some(folder.path().join("profiles")));
        assert_eq!((store.list::<StoredProfile>().unwrap(), store.clear().unwrap()), (Vec::new(), 0));
        let profile = StoredProfile {
            model: "m/1/model.onnx".into(),
            engine: "rten".to_owned(),
            threads: 2,
            at_once: 2,
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
}
