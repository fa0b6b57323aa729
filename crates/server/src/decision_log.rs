//! The decision log on disk: what the scheduler's parts were told and decided, a file each, for `downbeat log show` and `downbeat log replay`.

use std::fs::{File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use anyhow::Context;
use downbeat_core::cluster::journal::MachineKind;
use downbeat_driver::LogSink;
use parking_lot::Mutex;
use prometheus::IntCounter;

use crate::metrics::Metrics;

/// Bytes that may wait for the disk: some seconds of a scheduler at its limit. A part's log ends where it would be more.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// Where a run's logs are moved when the next begins.
const PREVIOUS: &str = "previous";

/// What all file names of logs end with.
const EXTENSION: &str = "log";

/// What the file names of devices' logs begin with.
const DEVICE: &str = "device-";

/// Bytes of a device's log that are gathered before they are passed on.
const DEVICE_BUFFER_BYTES: usize = 64 << 10;

/// The logs of one server, in a folder: `shard-0.log` and so on, `matchmaker.log`, and for each device
/// `device-0.log` and so on. A thread writes them, so that no request waits for the disk.
///
/// **Bound.** 64 MiB wait for the disk, all logs together. If it is slower than that, or takes no more, the log of the part that
/// had something to write ends, with a warning and in the metrics; serving goes on. What was written by then plays again.
#[derive(Debug)]
pub struct DecisionLog {
    shared: Arc<Shared>,
    /// The shards', then the matchmaker's.
    machines: Vec<Arc<LogFile>>,
    devices: Mutex<Vec<Arc<LogFile>>>,
    writer: Mutex<Option<JoinHandle<()>>>,
    /// `None`: without a folder there are no logs of devices.
    folder: Option<PathBuf>,
    /// Held, so that no other server writes here.
    _lock: Option<File>,
}

#[derive(Debug)]
struct Shared {
    /// What is to be written where; `None`: nothing comes after this.
    to_writer: Sender<Option<(Arc<LogFile>, Vec<u8>)>>,
    waiting_bytes: AtomicUsize,
    most_waiting_bytes: usize,
    written_bytes: IntCounter,
    closed: AtomicBool,
}

/// The log of a part of the scheduler or of a device: lines of JSON.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: Mutex<File>,
    /// What is gathered before it is passed on.
    buffer: Mutex<Vec<u8>>,
    ended: AtomicBool,
    /// 1 once it has ended before the server did.
    lost: IntCounter,
    shared: Arc<Shared>,
}

impl LogFile {
    fn new(path: PathBuf, file: File, shared: &Arc<Shared>, metrics: &Metrics) -> Arc<Self> {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Arc::new(LogFile {
            path,
            file: Mutex::new(file),
            buffer: Mutex::default(),
            ended: AtomicBool::new(false),
            lost: metrics.decision_log_ended(&name),
            shared: shared.clone(),
        })
    }

    /// Writes lines. They are passed on with others, at the latest with the next [`DecisionLog::flush_devices`].
    pub fn append(self: &Arc<Self>, lines: &[u8]) {
        let mut buffer = self.buffer.lock();
        buffer.extend_from_slice(lines);
        if buffer.len() >= DEVICE_BUFFER_BYTES {
            self.pass_on(std::mem::take(&mut *buffer));
        }
    }

    /// Has the thread write this; says whether it will.
    fn pass_on(self: &Arc<Self>, bytes: Vec<u8>) -> bool {
        let (shared, length) = (&self.shared, bytes.len());
        if shared.closed.load(Ordering::SeqCst) || self.ended.load(Ordering::Relaxed) {
            return false;
        }
        if shared.waiting_bytes.fetch_add(length, Ordering::Relaxed) + length > shared.most_waiting_bytes {
            shared.waiting_bytes.fetch_sub(length, Ordering::Relaxed);
            self.end("the disk is too slow: too much waits to be written");
            return false;
        }
        // A writer that is gone was closed.
        shared.to_writer.send(Some((self.clone(), bytes))).is_ok()
    }

    fn write(&self, bytes: &[u8]) {
        // What comes after a gap would not play again.
        if !self.ended.load(Ordering::Relaxed) {
            match self.file.lock().write_all(bytes) {
                Ok(()) => self.shared.written_bytes.inc_by(bytes.len() as u64),
                Err(error) => self.end(&error.to_string()),
            }
        }
        self.shared.waiting_bytes.fetch_sub(bytes.len(), Ordering::Relaxed);
    }

    /// Nothing more is written to it.
    fn end(&self, why: &str) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            self.lost.inc();
            let file = self.path.display();
            tracing::warn!(%file, why, "a decision log ends here; serving goes on. What was written can be replayed");
        }
    }
}

impl DecisionLog {
    /// Begins the logs of a scheduler of so many shards. The logs of the run before are moved to the folder `previous` inside, over what is there.
    ///
    /// # Errors
    /// If the folder cannot be written, or another server writes there.
    pub fn open(folder: &Path, shards: usize, metrics: &Metrics) -> anyhow::Result<Self> {
        let (files, lock) = create(folder, shards).with_context(|| {
            format!(
                "cannot write the decision log in {}: give a folder that can be written with --decision-log or `decision_log` in downbeat.toml",
                folder.display()
            )
        })?;
        let mut log = Self::start(files, MAX_WAITING_BYTES, metrics)?;
        (log.folder, log._lock) = (Some(folder.to_owned()), Some(lock));
        Ok(log)
    }

    /// The log of a device; `None` if there is none, or it cannot be made, which is said.
    pub fn device(&self, device: usize, metrics: &Metrics) -> Option<Arc<LogFile>> {
        let path = self.folder.as_ref()?.join(format!("{DEVICE}{device}.{EXTENSION}"));
        let file = File::create(&path).inspect_err(|error| {
            tracing::warn!(file = %path.display(), %error, "there will be no decision log of this device");
        });
        let log = LogFile::new(path.clone(), file.ok()?, &self.shared, metrics);
        self.devices.lock().push(log.clone());
        Some(log)
    }

    /// Passes on what has not been written of the devices' logs.
    pub fn flush_devices(&self) {
        for file in self.devices.lock().iter() {
            let mut buffer = file.buffer.lock();
            if !buffer.is_empty() {
                file.pass_on(std::mem::take(&mut *buffer));
            }
        }
    }

    fn start(files: Vec<(PathBuf, File)>, most_waiting_bytes: usize, metrics: &Metrics) -> anyhow::Result<Self> {
        let (to_writer, messages) = channel::<Option<(Arc<LogFile>, Vec<u8>)>>();
        let shared = Arc::new(Shared {
            to_writer,
            waiting_bytes: AtomicUsize::new(0),
            most_waiting_bytes,
            written_bytes: metrics.decision_log_bytes(),
            closed: AtomicBool::new(false),
        });
        let write = move || {
            while let Ok(Some((file, bytes))) = messages.recv() {
                file.write(&bytes);
            }
        };
        let writer = std::thread::Builder::new().name("decision-log".to_owned()).spawn(write)?;
        let machines = files.into_iter().map(|(path, file)| LogFile::new(path, file, &shared, metrics)).collect();
        let (devices, writer) = (Mutex::default(), Mutex::new(Some(writer)));
        Ok(DecisionLog { shared, machines, devices, writer, folder: None, _lock: None })
    }

    /// Writes what has been appended, and ends. Nothing is written after it.
    pub fn close(&self) {
        self.flush_devices();
        self.shared.closed.store(true, Ordering::SeqCst);
        if let Some(writer) = self.writer.lock().take() {
            // It is there to take this: it ends by nothing else. If it has panicked, that was said already.
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
        let index = match machine {
            MachineKind::Shard { index, .. } => index as usize,
            MachineKind::Matchmaker | MachineKind::Scheduler => self.machines.len() - 1,
        };
        self.machines[index].pass_on(bytes)
    }
}

/// Makes the folder and its files; what is held as long as they are written.
fn create(folder: &Path, shards: usize) -> anyhow::Result<(Vec<(PathBuf, File)>, File)> {
    std::fs::create_dir_all(folder)?;
    let lock = File::create(folder.join("lock"))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => anyhow::bail!("another server writes its own there"),
        // A file system without locks.
        Err(TryLockError::Error(_)) => {}
    }
    put_away(folder)?;
    let names = (0..shards).map(|index| format!("shard-{index}")).chain(["matchmaker".to_owned()]);
    let files = names.map(|name| {
        let path = folder.join(name).with_extension(EXTENSION);
        let file = File::create(&path)?;
        Ok((path, file))
    });
    Ok((files.collect::<io::Result<_>>()?, lock))
}

/// Moves the logs of the run before to a folder of their own, in place of those that are there.
fn put_away(folder: &Path) -> io::Result<()> {
    let previous = folder.join(PREVIOUS);
    let logs = |folder: &Path| -> io::Result<Vec<PathBuf>> {
        let paths = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
        let is_log = |path: &PathBuf| {
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            let is_ours = stem == "matchmaker" || stem.starts_with("shard-") || stem.starts_with(DEVICE);
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
        let files = [shard, folder.join("matchmaker.log")].map(|path| {
            let file = File::options().write(true).create(true).truncate(false).open(&path).unwrap();
            (path, file)
        });
        DecisionLog::start(files.into(), most_waiting_bytes, metrics).unwrap()
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
    fn a_run_puts_the_logs_of_the_one_before_away_and_nobody_else_writes_meanwhile() {
        let (folder, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
        let open = |shards| DecisionLog::open(folder.path(), shards, &metrics);
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
