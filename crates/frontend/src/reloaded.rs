//! A value that is read from files, and read anew when they change.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use parking_lot::{Mutex, RwLock};

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// A value that is read from files. A file that is wrong after a change is reported, and the value
/// before stays.
pub struct Reloaded<T> {
    /// The value's name in the log.
    what: &'static str,
    files: Vec<PathBuf>,
    read: Box<dyn Fn() -> anyhow::Result<T> + Send + Sync>,
    value: RwLock<Arc<T>>,
    seen: Mutex<Vec<Fingerprint>>,
}

/// Tells a changed file: device, inode, length, and the time of the last change, ns. `None`: there
/// is no file.
type Fingerprint = Option<(u64, u64, u64, i64, i64)>;

impl<T: Send + Sync + 'static> Reloaded<T> {
    /// Reads the value, and follows the files on the caller's runtime until nothing else holds the
    /// value.
    ///
    /// # Errors
    /// The errors of `read`.
    pub fn follow(
        what: &'static str,
        files: Vec<PathBuf>,
        read: impl Fn() -> anyhow::Result<T> + Send + Sync + 'static,
    ) -> anyhow::Result<Arc<Self>> {
        let reloaded = Arc::new(Reloaded::open(what, files, read)?);
        let followed = Arc::downgrade(&reloaded);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK_EVERY).await;
                let Some(followed) = followed.upgrade() else { return };
                followed.look();
            }
        });
        Ok(reloaded)
    }

    fn open(
        what: &'static str,
        files: Vec<PathBuf>,
        read: impl Fn() -> anyhow::Result<T> + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        // Before the value is read, so that a later change is noticed.
        let seen = fingerprints(&files);
        let value = RwLock::new(Arc::new(read()?));
        Ok(Reloaded { what, files, read: Box::new(read), value, seen: Mutex::new(seen) })
    }

    /// The value as it is now.
    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.value.read())
    }

    /// Reads the value again if a file has changed.
    fn look(&self) {
        let now = fingerprints(&self.files);
        let mut seen = self.seen.lock();
        if *seen == now {
            return;
        }
        *seen = now;
        match (self.read)() {
            Ok(value) => {
                *self.value.write() = Arc::new(value);
                tracing::info!("{} were read again", self.what);
            }
            Err(error) => tracing::error!("{} have changed and are wrong, so those before stay: {error:#}", self.what),
        }
    }
}

fn fingerprints(files: &[PathBuf]) -> Vec<Fingerprint> {
    let fingerprint = |file: &PathBuf| {
        let meta = fs::metadata(file).ok()?;
        Some((meta.dev(), meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec()))
    };
    files.iter().map(fingerprint).collect()
}

/// The bytes of a file of at most `most` bytes.
///
/// # Errors
/// If the file cannot be read, is no file or is longer.
pub fn read_bounded(file: &Path, most: u64) -> anyhow::Result<Vec<u8>> {
    let cannot = || format!("cannot read {}", file.display());
    let opened = fs::File::open(file).with_context(cannot)?;
    if !opened.metadata().with_context(cannot)?.is_file() {
        bail!("{} is no file", file.display());
    }
    let mut bytes = Vec::new();
    opened.take(most + 1).read_to_end(&mut bytes).with_context(cannot)?;
    if bytes.len() as u64 > most {
        bail!("{} is longer than {most} bytes", file.display());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(file: &Path) -> anyhow::Result<u32> {
        Ok(String::from_utf8(read_bounded(file, 8)?)?.trim().parse()?)
    }

    #[test]
    fn a_changed_file_is_read_again_and_a_wrong_one_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("number");
        fs::write(&file, "1").unwrap();
        let of_reader = file.clone();
        let value = Reloaded::open("numbers", vec![file.clone()], move || number(&of_reader)).unwrap();
        assert_eq!(*value.get(), 1);
        for (text, expected) in [("22", 22), ("nonsense", 22), ("far too long", 22), ("333", 333)] {
            fs::write(&file, text).unwrap();
            value.look();
            assert_eq!(*value.get(), expected, "{text}");
        }
        fs::remove_file(&file).unwrap();
        value.look();
        assert_eq!(*value.get(), 333, "a file that is gone changes nothing");
    }

    #[test]
    fn a_wrong_file_at_the_start_is_an_error_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let read = |path: PathBuf| Reloaded::open("numbers", vec![path.clone()], move || number(&path));
        let error = |path: &Path| format!("{:#}", read(path.to_owned()).err().unwrap());
        assert!(error(&folder.path().join("none")).contains("none"));
        assert!(error(folder.path()).contains("is no file"));
    }
}
