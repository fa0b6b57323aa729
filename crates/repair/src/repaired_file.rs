//! A repaired file in a temporary folder of this process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use downbeat_engine::onnx::ORIGINAL;
use downbeat_engine::scratch;
use tempfile::TempDir;

use crate::{Repair, RepairError, repair, summary};

/// A repaired file in a temporary folder that no other user can read. The folder lives as long as
/// this value. Engines find the external data beside the original file.
#[derive(Debug)]
pub struct RepairedFile {
    folder: TempDir,
    /// The repairs, one sentence each.
    pub done: Vec<String>,
    /// The class names of outputs, in class order.
    pub labels: BTreeMap<String, Vec<String>>,
}

impl RepairedFile {
    /// Repairs the file at `path`. `None`: the file needs no repair.
    ///
    /// # Errors
    /// If the file needs a repair that would not be exact, or the repaired file cannot be written.
    pub fn of(path: &Path) -> Result<Option<RepairedFile>, RepairError> {
        let Some(repair) = repair(path)? else { return Ok(None) };
        let place = |error: &io::Error| {
            format!(
                "the repaired model cannot be written to the folder of temporary files: {error}. Free the space that the model takes, \
                 let TMPDIR name another folder, or repair the model once: `downbeat import {}`",
                path.display()
            )
        };
        let written = write(&repair, path).map_err(|error| RepairError::new(path, place(&error)))?;
        Ok(Some(RepairedFile { folder: written, done: repair.done, labels: repair.labels }))
    }

    /// The repaired file.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("model.onnx")
    }

    /// The repairs, in a line for people.
    pub fn summary(&self) -> String {
        summary(&self.done)
    }
}

fn write(repair: &Repair, original: &Path) -> io::Result<TempDir> {
    let folder = scratch::folder()?;
    let mut file = File::create(folder.path().join("model.onnx"))?;
    repair.write(&mut file)?;
    file.flush()?;
    symlink(std::path::absolute(original)?, folder.path().join(ORIGINAL))?;
    Ok(folder)
}
