//! The decision log on disk: a file for each part of the scheduler, for each device and for the
//! pipelines, for `downbeat log`.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use anyhow::Context;
use downbeat_core::journal::MachineKind;
use downbeat_driver::LogSink;
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
/// `device-0.log` and so on, and `pipelines.log`. A thread writes them, so that no request waits for the disk.
///
/// **Bound.** 64 MiB wait for the disk, all logs together. Beyond it, or if the disk takes no more,
/// the log of the machine ends with a warning and is counted. Serving goes on. The written part can
/// be replayed.
#[derive(Debug)]
pub struct DecisionLog {
    shared: Arc<Shared>,
    files: BTreeMap<MachineKind, Arc<LogFile>>,
    writer: Mutex<Option<JoinHandle<()>>>,
    /// A lock, so that no other server writes to the folder.
    _lock: Option<File>,
}

#[derive(Debug)]
struct Shared {
    /// The bytes to write and their file; `None`: the end.
    to_writer: Sender<Option<(Arc<LogFile>, Vec<u8>)>>,
    waiting_bytes: AtomicUsize,
    most_waiting_bytes: usize,
    written_bytes: IntCounter,
    closed: AtomicBool,
}

/// The log of a machine.
#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    file: Mutex<File>,
    ended: AtomicBool,
    /// 1 once it has ended before the server did.
    lost: IntCounter,
}

/// The name of a machine's log, without the extension.
fn stem(machine: MachineKind) -> String {
    match machine {
        MachineKind::Scheduler => "scheduler".to_owned(),
        MachineKind::Shard { index, .. } => format!("shard-{index}"),
        MachineKind::Matchmaker => "matchmaker".to_owned(),
        MachineKind::Device(number) => format!("device-{number}"),
        MachineKind::Pipelines => "pipelines".to_owned(),
    }
}

/// Whether a file of this name, without the extension, is the log of a machine.
fn is_stem(name: &str) -> bool {
    ["shard-", "matchmaker", "device-", "pipelines"].iter().any(|start| name.starts_with(start))
}

impl LogFile {
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
    /// Begins the logs of a scheduler with `shards` shards, and of `devices` devices. The logs of
    /// the run before replace the ones in the inner folder `previous`.
    ///
    /// # Errors
    /// If the folder cannot be written, or another server writes to it.
    pub fn open(folder: &Path, shards: usize, devices: usize, metrics: &Metrics) -> anyhow::Result<Self> {
        let machines = (0..shards as u32).map(|index| MachineKind::Shard { index, shards: shards as u32 });
        let devices = (0..devices as u32).map(MachineKind::Device);
        let machines = machines.chain([MachineKind::Matchmaker, MachineKind::Pipelines]).chain(devices);
        let (files, lock) = create(folder, machines).with_context(|| {
            format!(
                "cannot write the decision log in {}: give a folder that can be written with --decision-log or `decision_log` in downbeat.toml",
                folder.display()
            )
        })?;
        Self::start(files, Some(lock), MAX_WAITING_BYTES, metrics)
    }

    fn start(files: Files, lock: Option<File>, most_waiting_bytes: usize, metrics: &Metrics) -> anyhow::Result<Self> {
        let (to_writer, messages) = channel::<Option<(Arc<LogFile>, Vec<u8>)>>();
        let shared = Arc::new(Shared {
            to_writer,
            waiting_bytes: AtomicUsize::new(0),
            most_waiting_bytes,
            written_bytes: metrics.decision_log_bytes(),
            closed: AtomicBool::new(false),
        });
        let its = shared.clone();
        let write = move || {
            while let Ok(Some((file, bytes))) = messages.recv() {
                file.write(&bytes, &its);
            }
        };
        let writer = std::thread::Builder::new().name("decision-log".to_owned()).spawn(write)?;
        let files = files.into_iter().map(|(machine, path, file)| {
            let lost = metrics.decision_log_ended(&path.file_stem().unwrap_or_default().to_string_lossy());
            let ended = AtomicBool::new(false);
            (machine, Arc::new(LogFile { path, file: Mutex::new(file), ended, lost }))
        });
        Ok(DecisionLog { shared, files: files.collect(), writer: Mutex::new(Some(writer)), _lock: lock })
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

impl Drop for DecisionLog {
    fn drop(&mut self) {
        self.close();
    }
}

impl LogSink for DecisionLog {
    fn append(&self, machine: MachineKind, bytes: Vec<u8>) -> bool {
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
        // The thread ends only after `closed` is set.
        shared.to_writer.send(Some((file.clone(), bytes))).is_ok()
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

    const SHARD: MachineKind = MachineKind::Shard { index: 0, shards: 1 };

    fn start(shard: PathBuf, folder: &Path, most_waiting_bytes: usize, metrics: &Metrics) -> DecisionLog {
        let paths = [(SHARD, shard), (MachineKind::Matchmaker, folder.join("matchmaker.log"))];
        let files = paths.map(|(machine, path)| {
            let file = File::options().write(true).create(true).truncate(false).open(&path).unwrap();
            (machine, path, file)
        });
        DecisionLog::start(files.into(), None, most_waiting_bytes, metrics).unwrap()
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
        let open = |shards| DecisionLog::open(folder.path(), shards, 1, &metrics);
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
}
