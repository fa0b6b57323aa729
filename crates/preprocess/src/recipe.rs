//! The steps of a model, together with the content of the `tokenizer.json` that they name. A
//! frontend of a cluster uses them without the model's folder.

use std::path::{Path, PathBuf};

use downbeat_core::file_content;

use crate::step::Step;

/// Largest `tokenizer.json`, bytes. Large vocabularies take some tens of MiB.
pub const MAX_FILE_BYTES: u64 = 128 << 20;

/// The steps of a model, with the file that they read.
#[derive(Clone, PartialEq, Debug)]
pub struct Recipe {
    /// The steps.
    pub steps: Vec<Step>,
    /// The content of the `tokenizer.json` that the first step names. `None`: the step names none,
    /// or the file is missing.
    pub tokenizer: Option<Vec<u8>>,
}

impl Recipe {
    /// Reads the file that the steps name. `find` gives the path of a file that is written relative
    /// to the model's folder.
    ///
    /// # Errors
    /// In words, if the file may not or cannot be read, has more than [`MAX_FILE_BYTES`], or is not
    /// text.
    pub fn read(steps: Vec<Step>, find: impl FnOnce(&Path) -> Result<PathBuf, String>) -> Result<Self, String> {
        let tokenizer = match steps.first() {
            Some(Step::Tokenize { file, .. }) => {
                let read = find(file).and_then(|path| read_file(&path));
                Some(read.map_err(|reason| format!("step 1, 'tokenize': {reason}"))?)
            }
            _ => None,
        };
        Ok(Recipe { steps, tokenizer })
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let cannot = |error: std::io::Error| format!("cannot read {shown}: {error}");
    let metadata = std::fs::metadata(path).map_err(cannot)?;
    if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
        return Err(format!("{shown} is not a file of at most {MAX_FILE_BYTES} bytes"));
    }
    let mut bytes = std::fs::read(path).map_err(cannot)?;
    let text = file_content::text(&bytes).map_err(|error| format!("{shown} {error}"))?;
    let mark = bytes.len() - text.len();
    bytes.drain(..mark);
    Ok(bytes)
}
