//! Folders that live as long as this process: files that came with a load request, parts of a model
//! that was cut.
//!
//! All processes of a user share one folder that no other user may read: `downbeat-UID` among the
//! temporary files. Each process keeps a locked folder in it. A free lock means that the owner is
//! gone, killed perhaps. The next process then removes the folder.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

/// The folder of this process.
static OURS: Mutex<Option<Ours>> = Mutex::new(None);

struct Ours {
    folder: TempDir,
    /// Locked until the process ends, in any way.
    _lock: File,
}

/// A new folder, which is removed when it is dropped.
///
/// # Errors
/// If the folder cannot be made.
pub fn folder() -> io::Result<TempDir> {
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    let ours = match &mut *ours {
        Some(ours) => ours,
        none => none.insert(Ours::in_folder(&std::env::temp_dir())?),
    };
    private("").tempdir_in(ours.folder.path())
}

/// Whether a file lies in a folder that a process of this user made by [`folder`].
pub(crate) fn holds(file: &Path) -> bool {
    let folder = file.parent().and_then(|folder| folder.canonicalize().ok());
    let (Some(folder), Ok(temporary)) = (folder, std::env::temp_dir().canonicalize()) else { return false };
    let Some(first) = folder.strip_prefix(&temporary).ok().and_then(|inside| inside.components().next()) else {
        return false;
    };
    let is_ours = first.as_os_str().to_string_lossy().starts_with("downbeat-");
    let user = rustix::process::geteuid().as_raw();
    let is_private = |found: std::fs::Metadata| found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0;
    is_ours && std::fs::symlink_metadata(temporary.join(first)).is_ok_and(is_private)
}

/// Removes the folders of processes that are gone.
pub fn clean() {
    if let Ok(parent) = parent(&std::env::temp_dir()) {
        let _ = with_lock(&parent, || clean_in(&parent));
    }
}

/// Removes this process's folder, at its end.
pub fn close() {
    drop(OURS.lock().unwrap_or_else(PoisonError::into_inner).take());
}

impl Ours {
    fn in_folder(temporary: &Path) -> io::Result<Ours> {
        // Another user's folder of that name must not receive models.
        let Ok(parent) = parent(temporary) else {
            let folder = private("downbeat-").tempdir_in(temporary)?;
            return Ok(Ours { _lock: locked(folder.path())?, folder });
        };
        with_lock(&parent, || {
            clean_in(&parent)?;
            let folder = private("").tempdir_in(&parent)?;
            Ok(Ours { _lock: locked(folder.path())?, folder })
        })?
    }
}

fn private(prefix: &str) -> tempfile::Builder<'_, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(prefix).permissions(std::fs::Permissions::from_mode(0o700));
    builder
}

/// This user's folder, shared by all processes.
fn parent(temporary: &Path) -> io::Result<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let parent = temporary.join(format!("downbeat-{user}"));
    private_folder(&parent)?;
    Ok(parent)
}

/// Makes a folder that no other user may read, unless it exists.
///
/// # Errors
/// If the folder cannot be made, or the existing one belongs to another user or is open to others.
pub fn private_folder(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // A link is not followed.
    let found = std::fs::symlink_metadata(path)?;
    let user = rustix::process::geteuid().as_raw();
    if found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!("{} is not a folder of this user alone", path.display())))
}

/// Does `work` while no other process makes or removes folders in `parent`.
fn with_lock<T>(parent: &Path, work: impl FnOnce() -> T) -> io::Result<T> {
    let lock = File::open(parent)?;
    flock(&lock, FlockOperation::LockExclusive)?;
    Ok(work())
}

/// Takes the lock of a folder, if it is free.
fn locked(folder: &Path) -> io::Result<File> {
    let lock = File::open(folder)?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    Ok(lock)
}

fn clean_in(parent: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(parent)?.filter_map(Result::ok) {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) && locked(&entry.path()).is_ok() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_left_is_removed_by_the_next_and_what_is_in_use_is_not() {
        let temporary = tempfile::tempdir().unwrap();
        let parent = parent(temporary.path()).unwrap();
        let first = Ours::in_folder(temporary.path()).unwrap();
        std::fs::write(first.folder.path().join("model"), "a model").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&parent), mode(first.folder.path())), (0o700, 0o700));
        // A killed process leaves this behind: the folder without the lock.
        let Ours { folder, _lock } = Ours::in_folder(temporary.path()).unwrap();
        let left = folder.keep();
        drop(_lock);
        std::fs::write(left.join("model"), "a model").unwrap();
        let _third = Ours::in_folder(temporary.path()).unwrap();
        assert!(!left.exists(), "nobody uses it");
        assert!(first.folder.path().join("model").exists(), "its owner lives");
    }

    #[test]
    fn a_folder_that_others_may_write_is_not_used() {
        let temporary = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().as_raw();
        let planted = temporary.path().join(format!("downbeat-{user}"));
        std::fs::create_dir(&planted).unwrap();
        std::fs::set_permissions(&planted, std::fs::Permissions::from_mode(0o777)).unwrap();
        let ours = Ours::in_folder(temporary.path()).unwrap();
        assert!(!ours.folder.path().starts_with(&planted));
        assert_eq!(std::fs::metadata(ours.folder.path()).unwrap().mode() & 0o777, 0o700);
    }
}
