//! Keeps the bytes of a model file while a version of it is loaded. A load checks, divides and
//! measures the file in ten places. Each place decodes other parts of the file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;

/// A larger file is read anew in each place: beside the engine's own copy, it would take too much
/// memory.
const LARGEST: u64 = 512 << 20;

/// The files that loads hold.
static HELD: Mutex<BTreeMap<PathBuf, Entry>> = Mutex::new(BTreeMap::new());

#[derive(Default)]
struct Entry {
    holders: usize,
    content: Option<(Identity, Bytes)>,
}

/// The state of a file: a file that was replaced or written to has another.
type Identity = (u64, Option<SystemTime>);

fn held() -> MutexGuard<'static, BTreeMap<PathBuf, Entry>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the bytes of a model file from their first use until it is dropped.
#[derive(Debug)]
pub struct HeldFile(Arc<Path>);

impl HeldFile {
    /// Reads nothing yet.
    pub fn new(path: &Path) -> Self {
        held().entry(path.to_owned()).or_default().holders += 1;
        HeldFile(path.into())
    }
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        let mut held = held();
        if let Some(entry) = held.get_mut(&*self.0) {
            entry.holders -= 1;
            if entry.holders == 0 {
                held.remove(&*self.0);
            }
        }
    }
}

/// The bytes of a model file, without its external data. A file that a [`HeldFile`] keeps is read
/// once, as long as it stays the same file.
///
/// # Errors
/// If the file cannot be read.
pub fn model_bytes(path: &Path) -> io::Result<Bytes> {
    let mut file = File::open(path)?;
    let metadata = file.metadata()?;
    let identity = (metadata.len(), metadata.modified().ok());
    if let Some((known, bytes)) = held().get(path).and_then(|entry| entry.content.as_ref())
        && *known == identity
    {
        return Ok(bytes.clone());
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(metadata.len()).unwrap_or(usize::MAX))?;
    file.read_to_end(&mut bytes)?;
    let bytes = Bytes::from(bytes);
    if bytes.len() as u64 <= LARGEST
        && let Some(entry) = held().get_mut(path)
    {
        entry.content = Some((identity, bytes.clone()));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_file_is_read_once_until_it_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        std::fs::write(&path, b"one").unwrap();
        let held = HeldFile::new(&path);
        let first = model_bytes(&path).unwrap();
        assert_eq!(first.as_ptr(), model_bytes(&path).unwrap().as_ptr());
        std::fs::write(&path, b"three").unwrap();
        assert_eq!(model_bytes(&path).unwrap(), "three");
        assert_eq!(first, "one");
        drop(held);
        assert_ne!(model_bytes(&path).unwrap().as_ptr(), model_bytes(&path).unwrap().as_ptr());
        assert!(!super::held().contains_key(&path));
    }

    #[test]
    fn a_file_is_kept_until_its_last_holder_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        std::fs::write(&path, b"one").unwrap();
        let (one, other) = (HeldFile::new(&path), HeldFile::new(&path));
        let first = model_bytes(&path).unwrap();
        drop(one);
        assert_eq!(first.as_ptr(), model_bytes(&path).unwrap().as_ptr());
        drop(other);
        assert!(!super::held().contains_key(&path));
    }
}
