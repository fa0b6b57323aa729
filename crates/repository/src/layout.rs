//! The layouts in which people keep models. Example: in `models/` with `a.onnx` and `b/1/model.onnx`,
//! the models are `a` and `b`; a folder with `model.onnx` in it is one model.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::boundary::is_there;
use crate::version_folder::{
    CONFIG_FILE, has_misplaced_model, has_model_file, has_standard_file, is_onnx_name, onnx_files, version_number,
};

/// The layout of the path that a server was given.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Layout {
    /// The path is a model file of this name.
    File(OsString),
    /// The path is the folder of one model: its files are in this folder.
    One(PathBuf),
    /// The path is a folder of models: each is a folder or a file.
    Several,
}

impl Layout {
    /// Finds out how models lie in a folder. A folder of models stays one if its owner adds a file
    /// such as `model.onnx` to it.
    pub(crate) fn of_folder(root: &Path) -> Self {
        let mut version = false;
        let mut only = None;
        for entry in fs::read_dir(root).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) else { continue };
            // A file is no folder of a model. A link may lead to a folder.
            if entry.file_type().is_ok_and(|kind| kind.is_file()) || !path.is_dir() {
                continue;
            }
            if version_number(name).is_some() && (has_model_file(&path) || onnx_files(&path).len() == 1) {
                version = true;
            } else if looks_like_model(&path) || has_misplaced_model(&path) {
                // As exporters for the hub write it: `onnx/model.onnx` beside `config.json`.
                if name != EXPORTED || only.is_some() || !has_standard_file(&path) {
                    return Layout::Several;
                }
                only = Some(path);
            }
        }
        let has_file = has_standard_file(root);
        match only {
            Some(exported) if !has_file && !version && onnx_files(root).is_empty() => Layout::One(exported),
            Some(_) => Layout::Several,
            None if has_file || version || root.join(CONFIG_FILE).is_file() => Layout::One(root.to_owned()),
            None => Layout::Several,
        }
    }
}

/// The folder that exporters for the hub write a model to.
const EXPORTED: &str = "onnx";

/// Whether a folder has a configuration or a version.
pub(crate) fn looks_like_model(dir: &Path) -> bool {
    is_there(&dir.join(CONFIG_FILE))
        || fs::read_dir(dir).is_ok_and(|entries| {
            entries.flatten().any(|e| e.file_name().to_str().and_then(version_number).is_some() && e.path().is_dir())
        })
}

/// The name of a model from the name of its file or folder. Characters other than letters, digits,
/// `.`, `_` and `-` become `_`: clients write the name into addresses.
///
/// ```
/// use downbeat_repository::derived_name;
/// assert_eq!(derived_name("my model (1)"), "my_model__1_");
/// assert_eq!(derived_name("resnet50-v1.5"), "resnet50-v1.5");
/// ```
pub fn derived_name(text: &str) -> String {
    let usable = |(at, c): (usize, char)| c.is_alphanumeric() || matches!(c, '_' | '-') || c == '.' && at > 0;
    let name: String = text.chars().take(64).enumerate().map(|at| if usable(at) { at.1 } else { '_' }).collect();
    if name.is_empty() { "model".to_owned() } else { name }
}

/// The name of a model from a path: from the stem of a model file, or from the whole name of a
/// folder.
pub(crate) fn name_of_path(path: &Path) -> String {
    // `.` and `models/..` have names only after they are resolved.
    let resolved = || path.canonicalize().ok().and_then(|path| path.file_name().map(OsString::from));
    let name = path.file_name().map(OsString::from).or_else(resolved).unwrap_or_default();
    derived_name(stem(&name.to_string_lossy()))
}

/// The name of a file without `.onnx`.
pub fn stem(name: &str) -> &str {
    if is_onnx_name(name) { &name[..name.len() - ".onnx".len()] } else { name }
}
