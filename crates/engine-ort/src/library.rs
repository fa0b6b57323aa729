//! The ONNX Runtime library: its file, its version, and the check that it can be used.

use std::ffi::CStr;
use std::path::{Path, PathBuf};

use crate::elf;
use crate::loader::loader_words;

/// The name of the library and of the engine on the CPU.
pub(crate) const NAME: &str = "onnxruntime";
/// The oldest minor version of the library that has every function used by this crate.
pub const OLDEST_MINOR: u32 = 24;
/// The cache, as a place for people.
pub(crate) const IN_CACHE: &str = "in the cache of `downbeat engine install`";

/// The Python environment of this program, as a place for people.
pub(crate) const IN_ENVIRONMENT: &str = "in the Python environment that this program is installed in";

/// The place where a library was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LibraryPlace {
    /// Named by the user, in this variable or flag.
    Asked(String),
    Executable,
    Environment,
    Cache,
    System,
    Python,
    /// Found by the search for GPUs.
    Gpu,
}

impl std::fmt::Display for LibraryPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LibraryPlace::Asked(who) => write!(f, "named by {who}"),
            LibraryPlace::Executable => f.write_str("beside the executable"),
            LibraryPlace::Environment => f.write_str(IN_ENVIRONMENT),
            LibraryPlace::Cache => f.write_str(IN_CACHE),
            LibraryPlace::System => f.write_str("on the system's library path"),
            LibraryPlace::Python => f.write_str("in Python's packages"),
            LibraryPlace::Gpu => f.write_str("with the CUDA provider"),
        }
    }
}

impl LibraryPlace {
    /// The way to a library that can be used.
    fn remedy(&self) -> String {
        match self {
            LibraryPlace::Environment => {
                format!("`pip install --upgrade 'onnxruntime>=1.{OLDEST_MINOR}'` there mends it")
            }
            _ => "`downbeat engine install` fetches one".to_owned(),
        }
    }
}

/// The reason why a library that was found or named is not used.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{words}")]
pub struct FindError {
    words: String,
    /// Whether the file is missing.
    pub(crate) is_missing: bool,
}

impl FindError {
    /// The library is not in its `place`.
    pub(crate) fn missing(path: &Path, place: &str, reason: &str) -> FindError {
        let path = path.display();
        let words = format!(
            "no onnxruntime library at {path} ({place}): {reason}. Correct the path, or run `downbeat engine install` and leave it out"
        );
        FindError { words, is_missing: true }
    }

    fn too_old(path: &Path, place: &LibraryPlace, version: &str) -> FindError {
        let (path, remedy) = (path.display(), place.remedy());
        FindError::new(format!(
            "the onnxruntime library at {path} ({place}) is version {version}; 1.{OLDEST_MINOR} or newer is needed. {remedy}"
        ))
    }

    /// The process already runs on another library.
    pub(crate) fn another(loaded: &Path, path: &Path) -> FindError {
        let (loaded, path) = (loaded.display(), path.display());
        FindError::new(format!(
            "this process runs on the onnxruntime library at {loaded} already, and cannot load the one at {path} beside it"
        ))
    }

    /// The file is no onnxruntime library, or does not start.
    fn unusable(path: &Path, place: &LibraryPlace, reason: &str) -> FindError {
        let (path, remedy) = (path.display(), place.remedy());
        FindError::new(format!("the library at {path} ({place}) cannot be used as onnxruntime: {reason}. {remedy}"))
    }

    fn new(words: String) -> FindError {
        FindError { words, is_missing: false }
    }
}

/// A library that opens and has the right version.
pub(crate) struct Library {
    pub(crate) path: PathBuf,
    pub(crate) version: String,
    place: LibraryPlace,
}

impl Library {
    /// Opens the library and asks for its version. It comes before `ort`, which panics on some
    /// failures.
    pub(crate) fn check(path: &Path, place: &LibraryPlace) -> Result<Library, FindError> {
        let bare = *place == LibraryPlace::System;
        // `ort` takes a relative path as relative to the executable; a user means the working
        // directory.
        let path = if bare { path.to_owned() } else { std::path::absolute(path).unwrap_or_else(|_| path.to_owned()) };
        let unusable = |reason: String| FindError::unusable(&path, place, &reason);
        if !bare && let Err(e) = std::fs::metadata(&path) {
            return Err(FindError::missing(&path, &place.to_string(), &e.to_string()));
        }
        if !bare {
            elf::check_whole(&path).map_err(unusable)?;
        }
        // SAFETY: runs the initialisers of a library that the user of this process installed or
        // named.
        let library = unsafe { libloading::Library::new(&path) };
        let library = match library {
            Ok(library) => library,
            Err(e) if bare => return Err(FindError::missing(&path, &place.to_string(), &loader_words(&e))),
            Err(e) => return Err(unusable(format!("it does not load: {}", loader_words(&e)))),
        };
        type GetApiBase = unsafe extern "C" fn() -> *const ort::sys::OrtApiBase;
        // SAFETY: the symbol has this signature in every version of onnxruntime.
        let version = unsafe {
            let Ok(get) = library.get::<GetApiBase>(b"OrtGetApiBase\0") else {
                return Err(unusable("it has no symbol OrtGetApiBase".into()));
            };
            let Some(base) = get().as_ref() else {
                return Err(unusable("it gives no interface".into()));
            };
            let version = CStr::from_ptr((base.GetVersionString)()).to_string_lossy().into_owned();
            if (base.GetApi)(OLDEST_MINOR).is_null() {
                return Err(FindError::too_old(&path, place, &version));
            }
            version
        };
        let minor = version.split('.').nth(1).and_then(|m| m.parse::<u32>().ok());
        if minor.is_none_or(|minor| minor < OLDEST_MINOR) {
            return Err(FindError::too_old(&path, place, &version));
        }
        let path = if bare { mapped(&path).unwrap_or(path) } else { path };
        // The library stays loaded until `ort` has opened it too: closing it in between would only
        // load it again.
        std::mem::forget(library);
        Ok(Library { path, version, place: place.clone() })
    }

    pub(crate) fn unusable(&self, reason: String) -> FindError {
        FindError::unusable(&self.path, &self.place, &reason)
    }
}

/// The newest library in a folder, by the version in its name.
pub(crate) fn newest_in(folder: &Path) -> Option<PathBuf> {
    let names = std::fs::read_dir(folder).ok()?.filter_map(|entry| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        let version = library_version(&name)?;
        Some((version, name))
    });
    names.max().map(|(_, name)| folder.join(name))
}

/// The path of a library that was opened by its bare name.
fn mapped(name: &Path) -> Option<PathBuf> {
    let stem = name.file_stem()?.to_str()?.split('.').next()?.to_owned();
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])).find(|path| {
        Path::new(path).file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(&format!("{stem}.")))
    })?;
    Some(PathBuf::from(path))
}

/// The version in the file name of an onnxruntime library, as numbers (none for a bare name);
/// `None` for other files.
pub(crate) fn library_version(name: &str) -> Option<Vec<u32>> {
    let version = version_part(name)?;
    version.split('.').filter(|part| !part.is_empty()).map(|part| part.parse().ok()).collect()
}

/// The version in the file name of a library.
pub fn version_of(library: &Path) -> Option<String> {
    version_text(library.file_name()?.to_str()?)
}

pub(crate) fn version_text(name: &str) -> Option<String> {
    version_part(name).map(|v| v.trim_matches('.').to_owned()).filter(|v| !v.is_empty())
}

#[cfg(target_os = "macos")]
fn version_part(name: &str) -> Option<&str> {
    name.strip_prefix("libonnxruntime")?.strip_suffix(".dylib").filter(|v| v.is_empty() || v.starts_with('.'))
}

#[cfg(not(target_os = "macos"))]
fn version_part(name: &str) -> Option<&str> {
    name.strip_prefix("libonnxruntime.so").filter(|v| v.is_empty() || v.starts_with('.'))
}
