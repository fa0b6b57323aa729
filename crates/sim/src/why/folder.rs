//! A folder of logs, by their blocks.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use downbeat_core::Time;
use downbeat_core::journal::{BlockHead, Entry, LogError, MachineKind, Record, Records, machine_of, read_blocks};

/// No head of a log is longer.
const MOST_HEAD: u64 = 64;

/// The logs of one run of a server, in a folder. The server may write them meanwhile.
#[derive(Debug)]
pub struct LogFolder {
    /// The folder.
    pub path: PathBuf,
    /// The logs, in order of their names.
    pub files: Vec<LogFile>,
}

/// A log, of which the heads of the blocks were read.
#[derive(Debug)]
pub struct LogFile {
    /// The file.
    pub path: PathBuf,
    /// The machine of the log.
    pub machine: MachineKind,
    file: File,
    blocks: Vec<Place>,
}

/// The place of a block in a file.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The begin of the block's head.
    begin: u64,
    /// The end of the block, or of the file if that comes first.
    end: u64,
    head: BlockHead,
}

/// A span of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// The begin.
    pub from: Time,
    /// The end.
    pub until: Time,
}

impl Span {
    /// Whether an instant is in the span. The end is not.
    pub fn has(&self, at: Time) -> bool {
        at >= self.from && at < self.until
    }
}

/// The reason why a folder has no log that can be read.
#[derive(Debug, thiserror::Error)]
pub enum BadFolder {
    /// A file or the folder cannot be read.
    #[error("cannot read {}: {}", .0.display(), .1)]
    Read(PathBuf, io::Error),
    /// The folder has no log.
    #[error(
        "there is no decision log in {}: give the folder that `downbeat serve --decision-log FOLDER` writes", .0.display()
    )]
    Empty(PathBuf),
    /// A file is no log, or damaged.
    #[error("{}: {}", .0.display(), .1)]
    Log(PathBuf, LogError),
}

impl LogFolder {
    /// Opens the logs of a folder.
    ///
    /// # Errors
    /// If a file cannot be read or is no log, or there is none.
    pub fn open(path: &Path) -> Result<LogFolder, BadFolder> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => BadFolder::Empty(path.to_owned()),
            _ => BadFolder::Read(path.to_owned(), error),
        };
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(path).map_err(failed)? {
            let entry = entry.map_err(failed)?.path();
            if entry.extension().is_some_and(|extension| extension == "log") {
                paths.push(entry);
            }
        }
        paths.sort();
        let files = paths.iter().filter_map(|path| LogFile::open(path).transpose()).collect::<Result<Vec<_>, _>>()?;
        if files.is_empty() {
            Err(BadFolder::Empty(path.to_owned()))
        } else {
            Ok(LogFolder { path: path.to_owned(), files })
        }
    }

    /// The span of the logs: from the first input that is known to the last.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged.
    pub fn span(&self) -> Result<Span, BadFolder> {
        let mut span = Span { from: Time::MAX, until: Time::ZERO };
        for file in &self.files {
            let Some(first) = file.blocks.first() else { continue };
            span = Span { from: span.from.min(first.head.now), until: span.until.max(file.last_input()?) };
        }
        Ok(Span { from: span.from.min(span.until), ..span })
    }

    /// The time zero of the logs in nanoseconds since the Unix epoch, as the newest block has it; 0:
    /// unknown.
    pub fn zero_unix_ns(&self) -> u64 {
        let newest = self.files.iter().filter_map(|file| file.blocks.last()).max_by_key(|place| place.head.now);
        newest.map_or(0, |place| place.head.zero_unix_ns)
    }

    /// An instant of the logs in nanoseconds since the Unix epoch; `None`: the logs have no wall clock.
    pub(super) fn unix_ns(&self, at: Time) -> Option<u64> {
        let zero = self.zero_unix_ns();
        (zero > 0).then(|| zero.saturating_add(at.as_nanos()))
    }

    /// The instant of the logs at this time of the wall clock; `None`: the logs have no wall clock, or
    /// began later.
    pub fn instant(&self, unix_ns: u64) -> Option<Time> {
        let zero = self.zero_unix_ns();
        (zero > 0).then(|| unix_ns.checked_sub(zero).map(Time::from_nanos))?
    }
}

impl LogFile {
    /// Opens a log and reads the heads of its blocks. `None`: nothing was written yet.
    ///
    /// # Errors
    /// If the file cannot be read or is no log.
    pub fn open(path: &Path) -> Result<Option<LogFile>, BadFolder> {
        let failed = |error| BadFolder::Read(path.to_owned(), error);
        let mut file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut begin = Vec::new();
        (&file).take(MOST_HEAD).read_to_end(&mut begin).map_err(failed)?;
        if begin.is_empty() {
            return Ok(None);
        }
        let (machine, first) = machine_of(&begin).map_err(|error| BadFolder::Log(path.to_owned(), error))?;
        let mut blocks: Vec<Place> = Vec::new();
        let mut place = first as u64;
        while place + BlockHead::LENGTH as u64 <= length {
            let mut head = [0; BlockHead::LENGTH];
            file.seek(SeekFrom::Start(place)).and_then(|_| file.read_exact(&mut head)).map_err(failed)?;
            let head = BlockHead::read(&head).ok_or_else(|| {
                let why = format!("at byte {place} a block should begin");
                BadFolder::Log(path.to_owned(), LogError::Damaged { after: 0, why })
            })?;
            let end = place + BlockHead::LENGTH as u64 + u64::from(head.length);
            blocks.push(Place { begin: place, end: end.min(length), head });
            place = end;
        }
        Ok(Some(LogFile { path: path.to_owned(), machine, file, blocks }))
    }

    /// The blocks that may have inputs of a span.
    fn blocks_of(&self, span: Span) -> &[Place] {
        // A block has the inputs after its own time, up to the time of the next.
        let first = self.blocks.partition_point(|place| place.head.now < span.from).saturating_sub(1);
        let behind = self.blocks.partition_point(|place| place.head.now <= span.until);
        self.blocks.get(first..behind.max(first)).unwrap_or(&[])
    }

    /// The bytes of blocks that follow each other.
    fn bytes(&self, blocks: &[Place]) -> Result<Vec<u8>, BadFolder> {
        let (Some(first), Some(last)) = (blocks.first(), blocks.last()) else { return Ok(Vec::new()) };
        let failed = |error| BadFolder::Read(self.path.clone(), error);
        let mut bytes = Vec::new();
        (&self.file).seek(SeekFrom::Start(first.begin)).map_err(failed)?;
        (&self.file).take(last.end - first.begin).read_to_end(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    /// The time of the last input that was written.
    fn last_input(&self) -> Result<Time, BadFolder> {
        let Some(last) = self.blocks.last() else { return Ok(Time::ZERO) };
        let bytes = self.bytes(std::slice::from_ref(last))?;
        let of = |machine| match machine {
            MachineKind::Device(_) => last_of::<downbeat_core::journal::device::DeviceRecords>(&bytes),
            MachineKind::Pipelines => last_of::<downbeat_core::journal::pipelines::PipelineRecords>(&bytes),
            MachineKind::Requests => last_of::<downbeat_core::journal::requests::RequestRecords>(&bytes),
            _ => last_of::<downbeat_core::journal::cluster::ClusterRecords>(&bytes),
        };
        Ok(of(self.machine).unwrap_or(last.head.now))
    }

    /// A log with the blocks of a span, and before them the blocks that have setup.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn log_of(&self, span: Span) -> Result<Vec<u8>, BadFolder> {
        let failed = |error| BadFolder::Read(self.path.clone(), error);
        let wanted = self.blocks_of(span);
        let header = self.blocks.first().map_or(MOST_HEAD, |place| place.begin);
        let mut bytes = Vec::new();
        (&self.file).seek(SeekFrom::Start(0)).map_err(failed)?;
        (&self.file).take(header).read_to_end(&mut bytes).map_err(failed)?;
        let first = wanted.first().map_or(u64::MAX, |place| place.begin);
        for place in self.blocks.iter().filter(|place| place.head.has_setup() && place.begin < first) {
            bytes.append(&mut self.bytes(std::slice::from_ref(place))?);
        }
        bytes.append(&mut self.bytes(wanted)?);
        Ok(bytes)
    }

    /// Calls `each` with the entries of a span, and before with the entries of earlier blocks that
    /// have setup (`true`). Entries shortly before and behind the span may come too.
    ///
    /// # Errors
    /// If the file cannot be read or is damaged.
    pub fn read<R: Records>(&self, span: Span, mut each: impl FnMut(bool, Entry<R>)) -> Result<(), BadFolder> {
        let wanted = self.blocks_of(span);
        let first = wanted.first().map_or(u64::MAX, |place| place.begin);
        for place in self.blocks.iter().filter(|place| place.head.has_setup() && place.begin < first) {
            self.entries::<R>(std::slice::from_ref(place), |entry| each(true, entry))?;
        }
        self.entries::<R>(wanted, |entry| each(false, entry))
    }

    fn entries<R: Records>(&self, blocks: &[Place], mut each: impl FnMut(Entry<R>)) -> Result<(), BadFolder> {
        for entry in read_blocks::<R>(&self.bytes(blocks)?) {
            each(entry.map_err(|error| BadFolder::Log(self.path.clone(), error))?);
        }
        Ok(())
    }

    /// Calls `each` with the entries of each block whose bytes have a `needle`, with their times.
    ///
    /// # Errors
    /// As [`LogFile::read`].
    pub fn search<R: Records>(&self, needle: &[u8], mut each: impl FnMut(Time, Entry<R>)) -> Result<(), BadFolder> {
        /// Bytes that are read at once.
        const AT_ONCE: u64 = 8 << 20;
        let finder = memchr::memmem::Finder::new(needle);
        let mut rest = self.blocks.as_slice();
        while let Some(first) = rest.first() {
            let many = rest.partition_point(|place| place.end <= first.begin + AT_ONCE).max(1);
            let (now, later) = rest.split_at(many);
            rest = later;
            let bytes = self.bytes(now)?;
            for place in now {
                let range = (place.begin - first.begin) as usize..(place.end - first.begin) as usize;
                let block = bytes.get(range).unwrap_or(&[]);
                if finder.find(block).is_some() {
                    let mut at = place.head.now;
                    for entry in read_blocks::<R>(block) {
                        let entry = entry.map_err(|error| BadFolder::Log(self.path.clone(), error))?;
                        if let Record::Input(now, _) = &entry.record {
                            at = *now;
                        }
                        each(at, entry);
                    }
                }
            }
        }
        Ok(())
    }
}

/// The time of the last input in some blocks.
fn last_of<R: Records>(bytes: &[u8]) -> Option<Time> {
    let inputs = read_blocks::<R>(bytes).map_while(Result::ok).filter_map(|entry| match entry.record {
        Record::Input(at, _) => Some(at),
        _ => None,
    });
    inputs.last()
}
