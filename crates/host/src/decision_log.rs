//! The decision log on disk: a file for each part of the scheduler, for each device and for the
//! pipelines, for `downbeat log`.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use anyhow::Context;
use downbeat_core::journal::MachineKind;
use downbeat_core::{Duration, Time};
use downbeat_driver::LogSink;
use downbeat_service::clock::Clock;
use downbeat_service::metrics::Metrics;
use parking_lot::Mutex;
use prometheus::IntCounter;

/// Bytes that may wait for the disk: some seconds of a scheduler at its limit. The log of a machine
/// that has more ends.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// The folder for the logs of the run before.
const PREVIOUS: &str = "previous";

/// The end of the names of all logs.
const EXTENSION: &str = "log";

/// The logs of one server, in a folder: `shard-0.log` and so on, `matchmaker.log`,
/// `device-0.log` and so on, `pipelines.log` and `requests.log`. A thread writes them, so that no request waits for the disk.
///
/// A log of some size or age goes on in a further file: the file `shard-0.log` gets the name
/// `shard-0.000001.log`. Each file begins with the names of models and other setup. The oldest files are
/// removed.
///
/// **Bound.** [`LogBounds`] on disk. 64 MiB wait for the disk, all logs together. Beyond it, or if the disk takes no more,
/// the log of the machine ends with a warning and is counted. Serving goes on. The written part can
/// be replayed.
#[derive(Debug)]
pub struct DecisionLog {
    shared: Arc<Shared>,
    files: BTreeMap<MachineKind, Arc<LogFile>>,
    writer: Mutex<Option<JoinHandle<()>>>,
    clock: Clock,
    /// A lock, so that no other server writes to the folder.
    _lock: Option<File>,
}

/// The bytes to write, their file, and whether they begin a further file.
type ToWrite = (Arc<LogFile>, Vec<u8>, bool);

#[derive(Debug)]
struct Shared {
    /// `None`: the end.
    to_writer: Sender<Option<ToWrite>>,
    bounds: LogBounds,
    waiting_bytes: AtomicUsize,
    most_waiting_bytes: usize,
    written_bytes: IntCounter,
    closed: AtomicBool,
}

/// The log of a machine.
#[derive(Debug)]
struct LogFile {
    /// The newest file.
    path: PathBuf,
    file: Mutex<File>,
    ended: AtomicBool,
    /// 1 once it has ended before the server did.
    lost: IntCounter,
    /// Bytes for the newest file, and when it began.
    bytes: AtomicU64,
    began: AtomicU64,
}

/// The bounds of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogBounds {
    /// The most bytes of all files together. The newest file of each machine stays, whatever its size.
    pub bytes: u64,
    /// How long a file is kept after its last entry.
    pub age: Duration,
}

impl LogBounds {
    /// A log has about so many files of each machine, so that little is removed at once.
    const FILES: u64 = 16;
    /// Smaller files would be many.
    const LEAST_BYTES: u64 = 64 << 10;

    /// The size at which a machine begins a further file.
    fn file_bytes(&self, machines: u64) -> u64 {
        (self.bytes / (Self::FILES * machines.max(1))).max(Self::LEAST_BYTES)
    }

    /// The age at which a machine begins a further file.
    fn file_age(&self) -> u64 {
        self.age.as_nanos() / Self::FILES
    }
}

/// A file that is complete.
#[derive(Debug)]
struct OldFile {
    path: PathBuf,
    bytes: u64,
    /// The time of its end.
    ended: Time,
}

/// The files that are complete, in order of their ends. The thread that writes has them.
///
/// **Bound.** The bounds of the log: a file has some tens of thousands of bytes or more.
#[derive(Debug, Default)]
struct OldFiles {
    files: VecDeque<OldFile>,
    bytes: u64,
    next: u64,
}

impl OldFiles {
    /// Puts the newest file of a log aside.
    fn put_aside(&mut self, file: &LogFile, bytes: u64, now: Time) -> io::Result<()> {
        self.next += 1;
        let path = file.path.with_extension(format!("{:06}.{EXTENSION}", self.next));
        std::fs::rename(&file.path, &path)?;
        *file.file.lock() = File::create(&file.path)?;
        self.bytes += bytes;
        self.files.push_back(OldFile { path, bytes, ended: now });
        Ok(())
    }

    /// Removes the oldest files as the bounds say. `newest`: the bytes of the files that are written.
    fn remove(&mut self, bounds: LogBounds, newest: u64, now: Time) {
        while let Some(oldest) = self.files.front() {
            let is_old = now.since(oldest.ended) > bounds.age;
            if !is_old && self.bytes + newest <= bounds.bytes {
                return;
            }
            if let Err(error) = std::fs::remove_file(&oldest.path) {
                let file = oldest.path.display();
                tracing::warn!(%file, %error, "an old file of the decision log cannot be removed");
            }
            self.bytes = self.bytes.saturating_sub(oldest.bytes);
            self.files.pop_front();
        }
    }
}

/// The name of a machine's log, without the extension.
fn stem(machine: MachineKind) -> String {
    match machine {
        MachineKind::Scheduler => "scheduler".to_owned(),
        MachineKind::Shard { index, .. } => format!("shard-{index}"),
        MachineKind::Matchmaker => "matchmaker".to_owned(),
        MachineKind::Device(number) => format!("device-{number}"),
        MachineKind::Pipelines => "pipelines".to_owned(),
        MachineKind::Requests => "requests".to_owned(),
    }
}

/// Whether a file of this name, without the extension, is the log of a machine.
fn is_stem(name: &str) -> bool {
    ["shard-", "matchmaker", "device-", "pipelines", "requests"].iter().any(|start| name.starts_with(start))
}

impl LogFile {
    /// The log that is written to a file from `now` on.
    fn new(path: PathBuf, file: File, lost: IntCounter, now: Time) -> LogFile {
        let (ended, bytes) = Default::default();
        LogFile { path, file: Mutex::new(file), ended, lost, bytes, began: AtomicU64::new(now.as_nanos()) }
    }

    /// Whether the next bytes should be in a further file.
    fn is_full(&self, bounds: LogBounds, machines: u64, now: Time) -> bool {
        let age = now.as_nanos().saturating_sub(self.began.load(Ordering::Relaxed));
        let bytes = self.bytes.load(Ordering::Relaxed);
        bytes >= bounds.file_bytes(machines) || age >= bounds.file_age().max(1)
    }

    /// Writes the next bytes.
    fn write(&self, bytes: &[u8], shared: &Shared) {
        // Bytes behind a gap could not be replayed.
        if !self.ended.load(Ordering::Relaxed) {
            match self.file.lock().write_all(bytes) {
                Ok(()) => shared.written_bytes.inc_by(bytes.len() as u64),
                Err(error) => self.end(&error.to_string()),
            }
        }
        shared.waiting_bytes.fetch_sub(bytes.len(), Ordering::Relaxed);
    }

    /// Ends the file: no more is written.
    fn end(&self, why: &str) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            self.lost.inc();
            let file = self.path.display();
            tracing::warn!(%file, why, "a decision log ends here; serving goes on. What was written can be replayed");
        }
    }
}

impl DecisionLog {
    /// Begins the logs of a scheduler with so many shards and this clock, and of so many devices. The
    /// logs of the run before replace the ones in the inner folder `previous`.
    ///
    /// # Errors
    /// If the folder cannot be written, or another server writes to it.
    pub fn open(
        folder: &Path,
        (shards, devices): (usize, usize),
        bounds: LogBounds,
        clock: Clock,
        metrics: &Metrics,
    ) -> anyhow::Result<Self> {
        let machines = (0..shards as u32).map(|index| MachineKind::Shard { index, shards: shards as u32 });
        let devices = (0..devices as u32).map(MachineKind::Device);
        let machines =
            machines.chain([MachineKind::Matchmaker, MachineKind::Pipelines, MachineKind::Requests]).chain(devices);
        let (files, lock) = create(folder, machines).with_context(|| {
            format!(
                "cannot write the decision log in {}: give a folder that can be written with --decision-log or `decision_log` in downbeat.toml",
                folder.display()
            )
        })?;
        Self::start(files, Some(lock), (MAX_WAITING_BYTES, bounds), clock, metrics)
    }

    fn start(
        files: Files,
        lock: Option<File>,
        (most_waiting_bytes, bounds): (usize, LogBounds),
        clock: Clock,
        metrics: &Metrics,
    ) -> anyhow::Result<Self> {
        let (to_writer, messages) = channel::<Option<ToWrite>>();
        let shared = Arc::new(Shared {
            to_writer,
            bounds,
            waiting_bytes: AtomicUsize::new(0),
            most_waiting_bytes,
            written_bytes: metrics.decision_log_bytes(),
            closed: AtomicBool::new(false),
        });
        let now = clock.now();
        let files = files.into_iter().map(|(machine, path, file)| {
            let lost = metrics.decision_log_ended(&path.file_stem().unwrap_or_default().to_string_lossy());
            (machine, Arc::new(LogFile::new(path, file, lost, now)))
        });
        let files: BTreeMap<MachineKind, Arc<LogFile>> = files.collect();
        let (its, newest) = (shared.clone(), files.values().cloned().collect::<Vec<_>>());
        let write = move || {
            let mut old = OldFiles::default();
            while let Ok(Some((file, bytes, begins))) = messages.recv() {
                if begins && !file.ended.load(Ordering::Relaxed) {
                    let now = clock.now();
                    let length = file.file.lock().metadata().map_or(0, |metadata| metadata.len());
                    if let Err(error) = old.put_aside(&file, length, now) {
                        file.end(&error.to_string());
                    }
                    old.remove(its.bounds, newest.iter().map(|file| file.bytes.load(Ordering::Relaxed)).sum(), now);
                }
                file.write(&bytes, &its);
            }
        };
        let writer = std::thread::Builder::new().name("decision-log".to_owned()).spawn(write)?;
        Ok(DecisionLog { shared, files, writer: Mutex::new(Some(writer)), clock, _lock: lock })
    }

    /// Writes the appended bytes, and ends the log.
    pub fn close(&self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        if let Some(writer) = self.writer.lock().take() {
            // The thread ends by this message alone. If it has panicked, the panic was reported.
            let _ = self.shared.to_writer.send(None);
            let _ = writer.join();
        }
    }
}

impl DecisionLog {
    /// Gives the thread the next bytes of a machine's log, which may begin a further file.
    fn send(&self, machine: MachineKind, bytes: Vec<u8>, begins: bool) -> bool {
        let (shared, length) = (&self.shared, bytes.len());
        let Some(file) = self.files.get(&machine) else { return false };
        if shared.closed.load(Ordering::SeqCst) || file.ended.load(Ordering::Relaxed) {
            return false;
        }
        if shared.waiting_bytes.fetch_add(length, Ordering::Relaxed) + length > shared.most_waiting_bytes {
            shared.waiting_bytes.fetch_sub(length, Ordering::Relaxed);
            file.end("the disk is too slow: too much waits to be written");
            return false;
        }
        file.bytes.fetch_add(length as u64, Ordering::Relaxed);
        // The thread ends only after `closed` is set.
        shared.to_writer.send(Some((file.clone(), bytes, begins))).is_ok()
    }
}

impl Drop for DecisionLog {
    fn drop(&mut self) {
        self.close();
    }
}

impl LogSink for DecisionLog {
    fn append(&self, machine: MachineKind, bytes: Vec<u8>) -> bool {
        self.send(machine, bytes, false)
    }

    fn wants_file(&self, machine: MachineKind) -> bool {
        let machines = self.files.len() as u64;
        self.files.get(&machine).is_some_and(|file| file.is_full(self.shared.bounds, machines, self.clock.now()))
    }

    fn begin_file(&self, machine: MachineKind, bytes: Vec<u8>) -> bool {
        if let Some(file) = self.files.get(&machine) {
            file.bytes.store(0, Ordering::Relaxed);
            file.began.store(self.clock.now().as_nanos(), Ordering::Relaxed);
        }
        self.send(machine, bytes, true)
    }

    fn zero_unix_ns(&self) -> u64 {
        self.clock.zero_unix_ns()
    }
}

/// Machines, and the path and the file of the log of each.
type Files = Vec<(MachineKind, PathBuf, File)>;

/// Makes the folder and its files. Returns the lock too, which is held as long as they are written.
fn create(folder: &Path, machines: impl Iterator<Item = MachineKind>) -> anyhow::Result<(Files, File)> {
    std::fs::create_dir_all(folder)?;
    let lock = File::create(folder.join("lock"))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => anyhow::bail!("another server writes its own there"),
        // A file system without locks.
        Err(TryLockError::Error(_)) => {}
    }
    put_away(folder)?;
    let files = machines.map(|machine| {
        let path = folder.join(stem(machine)).with_extension(EXTENSION);
        let file = File::create(&path)?;
        Ok((machine, path, file))
    });
    Ok((files.collect::<io::Result<_>>()?, lock))
}

/// Moves the logs of the run before to a folder of their own, where they replace older ones.
fn put_away(folder: &Path) -> io::Result<()> {
    let previous = folder.join(PREVIOUS);
    let logs = |folder: &Path| -> io::Result<Vec<PathBuf>> {
        let paths = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
        let is_log = |path: &PathBuf| {
            let is_ours = is_stem(&path.file_stem().unwrap_or_default().to_string_lossy());
            is_ours && path.extension().is_some_and(|extension| extension == EXTENSION)
        };
        paths.filter(|path| path.as_ref().map_or(true, is_log)).collect()
    };
    let old = logs(folder)?;
    if old.is_empty() {
        return Ok(());
    }
    std::fs::create_dir_all(&previous)?;
    for path in logs(&previous)? {
        std::fs::remove_file(path)?;
    }
    for path in old {
        if let Some(name) = path.file_name() {
            std::fs::rename(&path, previous.join(name))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDE: LogBounds = LogBounds { bytes: u64::MAX, age: Duration::MAX };
    const SHARD: MachineKind = MachineKind::Shard { index: 0, shards: 1 };

    fn start(shard: PathBuf, folder: &Path, most_waiting_bytes: usize, metrics: &Metrics) -> DecisionLog {
        let paths = [(SHARD, shard), (MachineKind::Matchmaker, folder.join("matchmaker.log"))];
        let files = paths.map(|(machine, path)| {
            let file = File::options().write(true).create(true).truncate(false).open(&path).unwrap();
            (machine, path, file)
        });
        DecisionLog::start(files.into(), None, (most_waiting_bytes, WIDE), Clock::start(), metrics).unwrap()
    }

    fn lost(metrics: &Metrics, name: &str) -> u64 {
        metrics.decision_log_ended(name).get()
    }

    #[test]
    fn beyond_the_bound_a_log_ends_and_says_so_once() {
        let (folder, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
        let log = start(folder.path().join("shard-0.log"), folder.path(), 10, &metrics);
        assert!(!log.append(SHARD, vec![1; 11]), "more than may wait");
        assert!(!log.append(SHARD, vec![2; 1]), "there would be a gap");
        assert!(log.append(MachineKind::Matchmaker, vec![3; 10]), "the others go on");
        log.close();
        assert!(!log.append(MachineKind::Matchmaker, vec![4; 1]), "closed");
        assert_eq!(std::fs::read(folder.path().join("shard-0.log")).unwrap(), Vec::<u8>::new());
        assert_eq!(std::fs::read(folder.path().join("matchmaker.log")).unwrap(), [3; 10]);
        assert_eq!((lost(&metrics, "shard-0"), lost(&metrics, "matchmaker")), (1, 0));
        assert_eq!(metrics.decision_log_bytes().get(), 10);
    }

    #[test]
    fn a_full_disk_ends_the_log() {
        let (folder, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
        let log = start("/dev/full".into(), folder.path(), 10, &metrics);
        assert!(log.append(SHARD, vec![1; 5]), "nobody waits for the disk to say so");
        log.close();
        assert_eq!(lost(&metrics, "full"), 1);
        assert_eq!(log.shared.waiting_bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_run_puts_former_logs_away_and_is_the_only_writer() {
        let (folder, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
        let open = |shards| DecisionLog::open(folder.path(), (shards, 1), WIDE, Clock::start(), &metrics);
        let first = open(2).unwrap();
        assert!(first.append(MachineKind::Shard { index: 1, shards: 2 }, vec![1]));
        let error = format!("{:#}", open(1).unwrap_err());
        assert!(
            error.contains("with --decision-log") && error.ends_with("another server writes its own there"),
            "{error}"
        );
        drop(first);
        drop(open(1).unwrap());
        let read = |name: &str| std::fs::read(folder.path().join(name)).ok();
        assert_eq!(read("previous/shard-1.log"), Some(vec![1]));
        assert_eq!((read("shard-0.log"), read("shard-1.log")), (Some(vec![]), None));
        drop(open(1).unwrap());
        assert_eq!(read("previous/shard-1.log"), None, "only of the run before");
    }

    #[test]
    fn a_log_goes_on_in_further_files_and_the_oldest_are_removed() {
        let (folder, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
        // Four machines: a file has 64 KiB, the least, and all files 320 KiB.
        let bounds = LogBounds { bytes: 5 * LogBounds::LEAST_BYTES, age: Duration::MAX };
        let log = DecisionLog::open(folder.path(), (1, 1), bounds, Clock::start(), &metrics).unwrap();
        for number in 1..=20u8 {
            assert!(log.append(SHARD, vec![number; LogBounds::LEAST_BYTES as usize]));
            assert!(log.wants_file(SHARD) && !log.wants_file(MachineKind::Matchmaker));
            assert!(log.begin_file(SHARD, vec![0; 10]));
            assert!(!log.wants_file(SHARD), "the further file is empty but for its setup");
        }
        log.close();
        let names =
            std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| name.starts_with("shard-")).collect();
        names.sort();
        assert_eq!(names.last().map(String::as_str), Some("shard-0.log"));
        assert_eq!(names[names.len() - 2], "shard-0.000020.log");
        let bytes: u64 = names.iter().map(|name| folder.path().join(name).metadata().unwrap().len()).sum();
        assert!(bytes <= bounds.bytes && bytes > bounds.bytes / 2, "{bytes} bytes in {names:?}");
        drop(log);
        drop(DecisionLog::open(folder.path(), (1, 1), bounds, Clock::start(), &metrics).unwrap());
        assert!(folder.path().join("previous/shard-0.000020.log").exists(), "a new run puts all files away");
        assert!(!folder.path().join("shard-0.000020.log").exists());
    }

    #[test]
    fn a_file_that_is_old_goes_on_in_a_further_file() {
        let (folder, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
        let bounds = LogBounds { bytes: u64::MAX, age: Duration::ZERO };
        let log = DecisionLog::open(folder.path(), (1, 1), bounds, Clock::start(), &metrics).unwrap();
        assert!(log.append(SHARD, vec![1]) && log.wants_file(SHARD));
        assert!(log.begin_file(SHARD, vec![2]));
        log.close();
        assert_eq!(std::fs::read(folder.path().join("shard-0.log")).unwrap(), [2]);
    }
}
