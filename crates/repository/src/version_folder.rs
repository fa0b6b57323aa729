//! Version folders. Example: `1` is a version; `01`, `0`, `v1` and `latest` are not. A message
//! tells the user how to name such a folder.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use crate::boundary::reason;
use crate::definition::ModelFormat;

/// Name of a model's configuration file.
pub const CONFIG_FILE: &str = "config.pbtxt";

/// Most folders that one message names.
const MOST_NAMED: usize = 4;

/// The first names of a list, for a message.
pub fn few<S: AsRef<str>>(names: &[S]) -> String {
    let more = if names.len() > 8 { ", ..." } else { "" };
    format!("{}{more}", names.iter().take(8).map(AsRef::as_ref).collect::<Vec<_>>().join(", "))
}

/// The versions in a model's folder, and other entries that probably should be versions.
#[derive(Debug, Default)]
pub(crate) struct VersionFolders {
    /// The versions.
    pub(crate) present: BTreeSet<u64>,
    /// A message for each entry whose name resembles a version, sorted.
    pub(crate) near_by_name: Vec<String>,
    /// A message for each other folder with a model file, sorted.
    pub(crate) near_by_content: Vec<String>,
    /// Whether a folder that is not a version holds a model file.
    has_misnamed: bool,
}

impl VersionFolders {
    /// Looks into the folder of a model.
    pub(crate) fn read(dir: &Path) -> Self {
        let mut folders = VersionFolders::default();
        let mut others = Vec::new();
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let Ok(name) = entry.file_name().into_string() else { continue };
            match (version_number(&name), fs::metadata(&path)) {
                (Some(version), Ok(metadata)) if metadata.is_dir() => {
                    folders.present.insert(version);
                }
                (version, metadata) => others.push((name, version, metadata, path)),
            }
        }
        others.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        for (name, version, metadata, path) in others {
            match metadata {
                Err(error) if version.is_some() => {
                    folders.near_by_name.push(format!("{name} cannot be read: {}", reason(&path, &error)));
                }
                Ok(metadata) if version.is_some() && !metadata.is_dir() => {
                    folders
                        .near_by_name
                        .push(format!("{name} is a file; a version is a folder with a model file in it"));
                }
                Ok(metadata) if metadata.is_dir() && resembles_version(&name) => {
                    folders.has_misnamed |= has_model_file(&path);
                    let why = folders.why_not(&name);
                    folders.near_by_name.push(why);
                }
                Ok(metadata) if metadata.is_dir() && has_model_file(&path) => {
                    folders.has_misnamed = true;
                    let why = folders.why_not(&name);
                    folders.near_by_content.push(why);
                }
                _ => {}
            }
        }
        folders
    }

    /// The reason why the folder `name` is not a version, and a better name.
    fn why_not(&self, name: &str) -> String {
        let digits: String =
            name.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
        let number = digits.trim_start_matches('0');
        let free = || self.present.last().map_or(1, |last| last.saturating_add(1));
        let meant = number.parse::<u64>().ok().filter(|version| !self.present.contains(version)).unwrap_or_else(free);
        let why = match (digits.len() == name.len(), number) {
            (true, "") => "versions start at 1".to_owned(),
            (true, _) if name.starts_with('0') => "the number begins with 0".to_owned(),
            (true, _) => format!("the largest is {}", u64::MAX),
            (false, _) => "the name must be a whole number".to_owned(),
        };
        format!("{name} is not a version: {why}; rename the folder to {meant}")
    }

    /// The way to give the model folder `dir` a version: a rename, or a move. `None` if no entry
    /// looks like a version. Messages call the folder `shown`. `file` is the configuration's name
    /// of model files, or empty.
    pub(crate) fn remedy(&self, dir: &Path, shown: &str, file: &str) -> Option<String> {
        let near: Vec<&str> = [&self.near_by_name[..], &self.near_by_content[..]]
            .into_iter()
            .flatten()
            .map(String::as_str)
            .take(MOST_NAMED)
            .collect();
        if !near.is_empty() {
            return Some(near.join("; "));
        }
        let found = loose_model_file(dir)?;
        let keeps_name = file.is_empty() && standard_names().any(|name| name == found);
        let file =
            if keeps_name { found.as_str() } else { Some(file).filter(|f| !f.is_empty()).unwrap_or("model.onnx") };
        Some(format!("move {found} to {shown}/1/{file}"))
    }
}

/// Whether a folder without versions and configuration should be a model: it has a model file in
/// the wrong place.
pub(crate) fn has_misplaced_model(dir: &Path) -> bool {
    VersionFolders::read(dir).has_misnamed || loose_model_file(dir).is_some()
}

/// The version number of a folder's name. As in Triton, a name with a leading zero is no version.
pub(crate) fn version_number(name: &str) -> Option<u64> {
    let digits = name.bytes().all(|b| b.is_ascii_digit()) && !name.starts_with('0');
    digits.then(|| name.parse().ok()).flatten()
}

/// Whether a version's folder has a model file of a standard name.
pub(crate) fn has_model_file(dir: &Path) -> bool {
    standard_names().chain(ModelFormat::Python.file_names().iter().copied()).any(|name| dir.join(name).exists())
}

/// The names of model files that may lie anywhere. A `model.py` is a model only in the folder of a
/// version, or if a configuration names Python.
fn standard_names() -> impl Iterator<Item = &'static str> {
    [ModelFormat::Onnx, ModelFormat::Emulated].into_iter().flat_map(|format| format.file_names().iter().copied())
}

/// Whether a name is a number apart from some letters and signs: `01`, `v1`, `1.0`, `version_2`.
fn resembles_version(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let letters = name.trim_start_matches("version").trim_start_matches(['v', 'r']);
    letters.bytes().any(|b| b.is_ascii_digit())
        && letters.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'_' | b'-' | b' '))
}

/// Whether a file's name ends in `.onnx`, in upper or lower case.
pub fn is_onnx_name(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("onnx"))
}

/// Whether a folder has a file (no folder) of a standard name.
pub(crate) fn has_standard_file(dir: &Path) -> bool {
    standard_names().any(|name| dir.join(name).is_file())
}

/// The names of the ONNX files in a folder that are not hidden, sorted.
pub(crate) fn onnx_files(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut files: Vec<String> =
        names.filter(|name| is_onnx_name(name) && !name.starts_with('.') && dir.join(name).is_file()).collect();
    files.sort_unstable();
    files
}

/// The name of a model file that lies in a model's folder beside the versions.
fn loose_model_file(dir: &Path) -> Option<String> {
    let standard = standard_names().find(|name| dir.join(name).is_file()).map(str::to_owned);
    standard.or_else(|| onnx_files(dir).into_iter().next())
}

/// The names of a folder's entries, sorted; and a message that shows at most eight of the names.
///
/// # Errors
/// If the folder cannot be read.
pub(crate) fn contents(dir: &Path) -> io::Result<(Vec<String>, String)> {
    let entries = fs::read_dir(dir)?;
    let mut files: Vec<String> = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    files.sort_unstable();
    let shown: Vec<&str> = files.iter().map(String::as_str).take(8).collect();
    let words =
        if shown.is_empty() { "the folder is empty".to_owned() } else { format!("found: {}", shown.join(", ")) };
    Ok((files, words))
}
