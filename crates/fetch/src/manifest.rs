//! The list of a source's files in the cache.

use std::fs;
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::digest;
use crate::failure::FetchError;
use crate::listing::{RemoteFile, check_path};

/// Largest list that is read, bytes.
const MOST_BYTES: u64 = 32 << 20;

/// The files of a source in the cache, as of its last look.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// The address, for people who read the cache.
    pub(crate) address: String,
    /// The commit, if the source has revisions.
    pub(crate) revision: Option<String>,
    /// The folder of the snapshot.
    pub(crate) snapshot: String,
    /// The files.
    pub(crate) files: Vec<CachedFile>,
}

/// A file in the cache.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct CachedFile {
    /// The path in the snapshot.
    pub(crate) path: String,
    /// The file's name for its server.
    pub(crate) locator: String,
    /// The validator of the content.
    pub(crate) tag: Option<String>,
    /// The SHA-256, under which the cache has the file.
    pub(crate) sha256: String,
    /// Bytes.
    pub(crate) size: u64,
    /// When the file was last found right: its time of change, in nanoseconds.
    pub(crate) modified: u64,
}

impl Manifest {
    /// Reads a list; `None` if there is none, or it is none that this program wrote.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        let size = fs::metadata(path).ok()?.len();
        let text = (size <= MOST_BYTES).then(|| fs::read(path).ok()).flatten()?;
        let manifest: Manifest = serde_json::from_slice(&text).ok()?;
        let is_sound = |file: &CachedFile| check_path(&file.path).is_ok() && digest::is_digest(&file.sha256);
        (check_path(&manifest.snapshot).is_ok() && manifest.files.iter().all(is_sound)).then_some(manifest)
    }

    /// Writes the list in one step: a reader finds either the old list or the new list.
    ///
    /// # Errors
    /// If the list cannot be written.
    pub(crate) fn write(&self, path: &Path) -> Result<(), FetchError> {
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        let new = path.with_extension("new");
        let write = || {
            let mut file = fs::File::create(&new)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&new, path)
        };
        write().map_err(FetchError::cache(path))
    }

    /// The cached file that a listed file is, if its validator and size say so.
    pub(crate) fn same(&self, file: &RemoteFile) -> Option<&CachedFile> {
        let is_same = |cached: &&CachedFile| {
            cached.locator == file.locator
                && file.tag.is_some()
                && cached.tag == file.tag
                && file.size.is_none_or(|size| size == cached.size)
        };
        self.files.iter().find(is_same)
    }

    /// The name of a snapshot of these files. Equal files have equal names.
    pub(crate) fn snapshot_name(files: &[CachedFile]) -> String {
        let lines: Vec<String> = files.iter().map(|file| format!("{} {}\n", file.sha256, file.path)).collect();
        digest::of_text(&lines.concat())[..16].to_owned()
    }
}
