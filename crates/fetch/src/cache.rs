//! The cache on the disk: files by their SHA-256, and snapshots of sources.
//!
//! ```text
//! CACHE/lock                     shared while a source is brought, exclusive while files are removed
//! CACHE/blobs/SHA256             the files
//! CACHE/sources/KEY/lock         held while the source is brought
//! CACHE/sources/KEY/source.json  the list of the files
//! CACHE/sources/KEY/partial/     downloads under way
//! CACHE/sources/KEY/SNAPSHOT/    NAME/..., and a lock that servers hold while they use it
//! ```

use std::fs::{self, File, FileTimes, OpenOptions, Permissions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::digest::{self, Digests};
use crate::failure::FetchError;
use crate::manifest::{CachedFile, Manifest};

/// Bytes that stay free on the disk of the cache.
const SPARE: u64 = 16 << 20;

/// The cache of one source.
#[derive(Debug)]
pub(crate) struct Cache {
    root: PathBuf,
    source: PathBuf,
}

/// A lock on a file; it ends with the value, or with the process.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

fn lock_file(path: &Path) -> Result<File, FetchError> {
    let opened = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
    opened.map_err(FetchError::cache(path))
}

impl Cache {
    /// The cache of the source at `address` in the folder `root`.
    pub(crate) fn new(root: PathBuf, address: &str) -> Self {
        let source = root.join("sources").join(&digest::of_text(address)[..24]);
        Cache { root, source }
    }

    /// Makes the folders, and waits until no other process brings this source.
    ///
    /// # Errors
    /// If the folders cannot be made.
    pub(crate) fn lock(&self, address: &str) -> Result<[Lock; 2], FetchError> {
        for folder in [self.root.join("blobs"), self.partial()] {
            fs::create_dir_all(&folder).map_err(FetchError::cache(&folder))?;
        }
        let (all, one) = (self.root.join("lock"), self.source.join("lock"));
        let shared = lock_file(&all)?;
        shared.lock_shared().map_err(FetchError::cache(&all))?;
        let own = lock_file(&one)?;
        if own.try_lock().is_err() {
            tracing::info!(%address, "another process brings these models; waiting for it");
            own.lock().map_err(FetchError::cache(&one))?;
        }
        Ok([Lock { _file: own }, Lock { _file: shared }])
    }

    pub(crate) fn manifest(&self) -> PathBuf {
        self.source.join("source.json")
    }

    pub(crate) fn partial(&self) -> PathBuf {
        self.source.join("partial")
    }

    /// The place of the file with this SHA-256.
    pub(crate) fn blob(&self, sha256: &str) -> PathBuf {
        self.root.join("blobs").join(sha256)
    }

    /// Checks that the disk has space for downloads of this size.
    ///
    /// # Errors
    /// If the space is missing.
    pub(crate) fn check_space(&self, needed: u64) -> Result<(), FetchError> {
        // A file system that cannot tell is tried.
        let Ok(disk) = rustix::fs::statvfs(&self.root) else { return Ok(()) };
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if needed == 0 || needed.saturating_add(SPARE) <= free {
            return Ok(());
        }
        Err(FetchError::NoSpace { folder: self.root.clone(), needed, free })
    }

    /// Whether the cache has a file, and the file is right. A file that changed since it was last
    /// found right is read; a wrong one is removed.
    pub(crate) fn has(&self, file: &mut CachedFile) -> bool {
        let path = self.blob(&file.sha256);
        let Ok(metadata) = fs::metadata(&path) else { return false };
        let modified = nanoseconds(&metadata);
        if metadata.len() == file.size && modified == file.modified {
            return true;
        }
        if metadata.len() == file.size && sha256_of(&path).is_ok_and(|sha256| sha256 == file.sha256) {
            file.modified = modified;
            return true;
        }
        tracing::warn!(file = %path.display(), "a file of the model cache was changed; it is brought again");
        // If it stays, the next download replaces it.
        let _ = fs::remove_file(&path);
        false
    }

    /// The file with this SHA-256, if the cache has it from another source.
    pub(crate) fn find(&self, sha256: &str, size: Option<u64>) -> Option<CachedFile> {
        let metadata = fs::metadata(self.blob(sha256)).ok()?;
        let size = size.unwrap_or(metadata.len());
        let (path, locator) = (String::new(), String::new());
        // Nobody remembers when it was right: it is read.
        let mut file = CachedFile { path, locator, tag: None, sha256: sha256.to_owned(), size, modified: 0 };
        self.has(&mut file).then_some(file)
    }

    /// Takes a complete download into the cache. Returns its size and time of change.
    ///
    /// # Errors
    /// If the file cannot be moved.
    pub(crate) fn keep(&self, partial: &Path, sha256: &str) -> Result<(u64, u64), FetchError> {
        let blob = self.blob(sha256);
        let keep = || {
            // Snapshots are links to this file.
            fs::set_permissions(partial, Permissions::from_mode(0o444))?;
            File::open(partial)?.sync_all()?;
            fs::rename(partial, &blob)?;
            let metadata = fs::metadata(&blob)?;
            Ok((metadata.len(), nanoseconds(&metadata)))
        };
        keep().map_err(FetchError::cache(&blob))
    }

    /// Makes a snapshot: a folder `name` with links to the files. Returns the folder, with a lock
    /// that keeps the snapshot while it is used.
    ///
    /// # Errors
    /// If a file cannot be linked.
    pub(crate) fn snapshot(&self, manifest: &Manifest, name: &str) -> Result<(PathBuf, Lock), FetchError> {
        let folder = self.source.join(&manifest.snapshot);
        let is_whole = || {
            let links = |file: &CachedFile| {
                let (link, blob) = (folder.join(name).join(&file.path), self.blob(&file.sha256));
                let (Ok(linked), Ok(blob)) = (fs::metadata(&link), fs::metadata(blob)) else { return false };
                // Without links, the file in the snapshot is a copy.
                linked.ino() == blob.ino() || sha256_of(&link).is_ok_and(|sha256| sha256 == file.sha256)
            };
            manifest.files.iter().all(links)
        };
        if !is_whole() {
            let new = self.source.join("new");
            self.build(manifest, &new, name).map_err(FetchError::cache(&new))?;
            if folder.exists() {
                fs::remove_dir_all(&folder).map_err(FetchError::cache(&folder))?;
            }
            fs::rename(&new, &folder).map_err(FetchError::cache(&folder))?;
        }
        let lock = lock_file(&folder.join("lock"))?;
        lock.lock_shared().map_err(FetchError::cache(&folder))?;
        Ok((folder.join(name), Lock { _file: lock }))
    }

    fn build(&self, manifest: &Manifest, new: &Path, name: &str) -> std::io::Result<()> {
        if new.exists() {
            fs::remove_dir_all(new)?;
        }
        let mut folders = vec![new.join(name)];
        for file in &manifest.files {
            let path = new.join(name).join(&file.path);
            let parent = path.parent().unwrap_or(new);
            fs::create_dir_all(parent)?;
            folders.push(parent.to_owned());
            let blob = self.blob(&file.sha256);
            // Some file systems have no links.
            fs::hard_link(&blob, &path).or_else(|_| fs::copy(&blob, &path).map(|_| ()))?;
        }
        // Folders that look the same make the same fingerprint: models without a change stay.
        let time = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
        for folder in folders.iter().flat_map(|folder| folder.ancestors().take_while(|above| *above != new)) {
            File::open(folder)?.set_times(time)?;
        }
        Ok(())
    }

    /// Removes snapshots that no server uses, except `keep`. Also removes unfinished downloads, and
    /// files without a snapshot.
    pub(crate) fn prune(&self, keep: &str, locks: [Lock; 2]) {
        let _ = fs::remove_dir_all(self.partial());
        for entry in fs::read_dir(&self.source).into_iter().flatten().flatten() {
            let path = entry.path();
            let is_other = entry.file_name() != keep && path.is_dir();
            let lock = File::open(path.join("lock")).ok().filter(|_| is_other);
            if lock.is_some_and(|lock| lock.try_lock().is_ok()) {
                let _ = fs::remove_dir_all(&path);
            }
        }
        drop(locks);
        let all = lock_file(&self.root.join("lock")).ok();
        // A process that brings a source may have a file without a snapshot.
        if all.as_ref().is_some_and(|all| all.try_lock().is_ok()) {
            for blob in fs::read_dir(self.root.join("blobs")).into_iter().flatten().flatten() {
                if blob.metadata().is_ok_and(|metadata| metadata.nlink() == 1) && links_work(&self.root) {
                    let _ = fs::remove_file(blob.path());
                }
            }
        }
    }
}

/// Whether the file system has links: without them, every file is without a second name.
fn links_work(root: &Path) -> bool {
    let (lock, link) = (root.join("lock"), root.join("link"));
    let works = fs::hard_link(lock, &link).is_ok();
    let _ = fs::remove_file(link);
    works
}

/// The time of change of a file, in nanoseconds.
fn nanoseconds(metadata: &fs::Metadata) -> u64 {
    let seconds = u64::try_from(metadata.mtime()).unwrap_or(0);
    seconds.wrapping_mul(1_000_000_000).wrapping_add(u64::try_from(metadata.mtime_nsec()).unwrap_or(0))
}

/// The SHA-256 of a file.
///
/// # Errors
/// If the file cannot be read.
fn sha256_of(path: &Path) -> std::io::Result<String> {
    let mut digests = Digests::new(None, None);
    read_into(&mut File::open(path)?, &mut digests)?;
    Ok(digests.finish().unwrap_or_default())
}

/// Adds the rest of a file to its digests. Returns the bytes that were read.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn read_into(file: &mut File, digests: &mut Digests) -> std::io::Result<u64> {
    let (mut buffer, mut sum) = (vec![0; 1 << 18], 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(sum),
            read => {
                digests.update(&buffer[..read]);
                sum += read as u64;
            }
        }
    }
}
