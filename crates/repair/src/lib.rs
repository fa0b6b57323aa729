//! Exact repairs of ONNX files that engines would refuse.
//!
//! ```text
//! IR version 14, opset 28, ZipMap    becomes    IR version 10, opset 26, a tensor
//! ```
//!
//! [`repair`] first reads the outline of a file: the fields of the model and of its graph, without
//! operators and weights. A file that needs no repair costs only that. Otherwise the crate reads
//! the operators, one by one, and plans a new file as pieces: ranges of the old file, and new
//! bytes. Weights are never in memory, and external data stays in its files.
//!
//! A repair is exact: the repaired model gives the answers that the file describes. Other faults
//! stay in the file, or the file is refused with the operator's name.

mod classifier;
mod editor;
mod opset;
mod outline;
mod pieces;
mod repaired_file;
mod texts;
mod value;
mod zip_map;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use pieces::Pieces;
pub use repaired_file::RepairedFile;

/// The newest version of the format that all engines read.
const NEWEST_IR: i64 = 13;
/// The version of the format that repaired files get: the oldest with all fields that newer files
/// use.
const REPAIRED_IR: i64 = 10;
/// The newest version of the format that this crate knows.
const KNOWN_IR: i64 = 14;

/// The reason why a file cannot be repaired, with a remedy.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason}", path = path.display())]
pub struct RepairError {
    /// The file.
    pub path: PathBuf,
    /// The fault and its remedy.
    pub reason: String,
}

impl RepairError {
    fn new(path: &Path, reason: impl Into<String>) -> Self {
        RepairError { path: path.to_owned(), reason: reason.into() }
    }
}

/// The planned repair of a file.
#[derive(Debug)]
pub struct Repair {
    path: PathBuf,
    pieces: Pieces,
    /// The repairs, one sentence each.
    pub done: Vec<String>,
    /// The class names of outputs that were sequences of maps, in class order.
    pub labels: BTreeMap<String, Vec<String>>,
}

impl Repair {
    /// Writes the repaired file. External data stays where it is.
    ///
    /// # Errors
    /// If the old file cannot be read any more, or `to` fails.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        self.pieces.write(&mut File::open(&self.path)?, to)
    }

    /// The repairs, in a line for people.
    pub fn summary(&self) -> String {
        summary(&self.done)
    }
}

fn summary(done: &[String]) -> String {
    format!("repaired before loading: {}", done.join("; "))
}

/// Plans the repair of the file at `path`. `None`: the file needs none, or is not an ONNX model,
/// and its engine says why.
///
/// # Errors
/// If the file needs a repair that would not be exact.
pub fn repair(path: &Path) -> Result<Option<Repair>, RepairError> {
    let Some(outline) = outline::Outline::read(path) else { return Ok(None) };
    if !outline.may_need_repair() {
        return Ok(None);
    }
    editor::Editor::new(path, &outline).run().map_err(|reason| RepairError::new(path, reason))
}
