//! The search for the ONNX Runtime library.

use std::error::Error;
use std::ffi::CStr;
use std::path::{Path, PathBuf};

use super::OLDEST_MINOR;
use crate::cuda::libraries::Places;
use crate::cuda::{CudaUnavailable, Provider};
use crate::{elf, install, python};

/// The places to search for the ONNX Runtime library: none by default, the usual ones by
/// [`Search::from_env`]. Their order is `asked`, beside the executable, `cache`, the system's
/// library path, Python's packages.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// A library named by the user, with the name's source (`ORT_DYLIB_PATH`): no other library is
    /// tried.
    pub asked: Option<(String, PathBuf)>,
    /// Whether to look beside the executable.
    pub beside_executable: bool,
    /// The folder that `downbeat engine install` fills.
    pub cache: Option<PathBuf>,
    /// Whether to ask the system's loader.
    pub system: bool,
    /// Whether to ask the `python3` on the path for its `onnxruntime` package.
    pub python: bool,
    /// Whether to ask Python for the libraries of GPUs, onnxruntime-gpu and NVIDIA's, if no other
    /// place has them.
    pub python_gpu: bool,
    /// Threads of the pool that models share, the calling thread included; 0: one a core. Only the
    /// first load of the library uses it.
    pub threads: usize,
}

impl Search {
    /// The usual places, by `ORT_DYLIB_PATH`, `DOWNBEAT_ONNXRUNTIME`, `XDG_CACHE_HOME` and `HOME`;
    /// Python only for GPUs.
    pub fn from_env() -> Search {
        let asked = ["ORT_DYLIB_PATH", "DOWNBEAT_ONNXRUNTIME"].into_iter().find_map(|name| {
            let path = std::env::var_os(name).filter(|v| !v.is_empty())?;
            Some((name.to_owned(), PathBuf::from(path)))
        });
        Search {
            asked,
            beside_executable: true,
            cache: install::cache_folder(),
            system: true,
            python_gpu: true,
            ..Search::default()
        }
    }

    /// The candidates, in order. A library for GPUs also serves the CPU.
    pub(super) fn candidates(&self) -> Vec<(LibraryPlace, PathBuf)> {
        if let Some((who, path)) = &self.asked {
            return vec![(LibraryPlace::Asked(who.clone()), path.clone())];
        }
        let mut found = Vec::new();
        found.extend(
            self.beside_executable().iter().filter_map(|f| newest_in(f)).map(|p| (LibraryPlace::Executable, p)),
        );
        if let Some(cache) = &self.cache {
            found.extend(install::installed(cache).map(|p| (LibraryPlace::Cache, p)));
            found.extend(install::installed_gpu(cache).map(|p| (LibraryPlace::Cache, p)));
        }
        if self.system {
            found.extend(SYSTEM_NAMES.map(|name| (LibraryPlace::System, PathBuf::from(name))));
        }
        if self.python {
            found.extend(in_python().map(|p| (LibraryPlace::Python, p)));
        }
        found
    }

    fn beside_executable(&self) -> Vec<PathBuf> {
        let executable = self.beside_executable.then(|| std::env::current_exe().ok()).flatten();
        let folder = executable.as_deref().and_then(Path::parent);
        folder.map(|folder| vec![folder.to_owned(), folder.join("lib")]).unwrap_or_default()
    }

    /// The onnxruntime library that has `provider` beside it.
    pub(crate) fn gpu_library(&self, provider: Provider) -> Result<PathBuf, CudaUnavailable> {
        let file = provider_file(provider);
        // The library searches for its providers beside itself, by the path that it was loaded
        // from.
        let whole =
            |library: &Path| library.parent().is_some_and(|f| f.join(file).is_file() && f.join(SHARED).is_file());
        if let Some((who, path)) = &self.asked {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            if let Err(e) = std::fs::metadata(&path) {
                let place = LibraryPlace::Asked(who.clone()).to_string();
                return Err(FindError::missing(&path, &place, &e.to_string()).into());
            }
            return match whole(&path) {
                true => not_cut_short(path, file),
                false => Err(CudaUnavailable::new(
                    format!(
                        "the onnxruntime library at {} (named by {who}) is not for GPUs: there is no {file} beside it",
                        path.display()
                    ),
                    "Correct the path, or run `downbeat engine install --cuda` and leave it out",
                )),
            };
        }
        let mut places = Places::new(self.python_gpu);
        places.add("beside the executable", self.beside_executable());
        if let Some(cache) = &self.cache {
            let installed = install::installed_gpu(cache).and_then(|path| Some(path.parent()?.to_owned()));
            places.add(IN_CACHE, vec![installed.unwrap_or_else(|| cache.clone())]);
        }
        if self.system {
            places.add_loader_path();
            places.add_system();
        }
        let found = places.for_onnxruntime().filter_map(|folder| newest_in(folder)).find(|library| whole(library));
        let found = found.ok_or_else(|| {
            let what = format!("no onnxruntime with the CUDA provider found (looked {})", places.words());
            let advice =
                "Run `downbeat engine install --cuda`, or set ORT_DYLIB_PATH to the libonnxruntime.so of a CUDA build";
            CudaUnavailable::new(what, advice)
        })?;
        not_cut_short(found, file)
    }

    /// The places to search for NVIDIA's libraries. `library` is the onnxruntime that will use
    /// them.
    pub(crate) fn nvidia_places(&self, library: Option<&Path>) -> Places {
        let mut places = Places::new(self.python_gpu);
        if self.system {
            places.add_loader_path();
        }
        places.add("beside onnxruntime", library.and_then(Path::parent).map(Path::to_owned).into_iter().collect());
        places.add(IN_CACHE, self.cache.iter().map(|cache| install::nvidia_folder(cache)).collect());
        if self.system {
            places.add_system();
        }
        places
    }
}

/// Returns the library, if its file and those of the `provider` beside it are complete.
fn not_cut_short(library: PathBuf, provider: &'static str) -> Result<PathBuf, CudaUnavailable> {
    let beside = [provider, SHARED].map(|name| (name, library.with_file_name(name)));
    for (name, path) in beside.into_iter().chain([("onnxruntime", library.clone())]) {
        elf::check_whole(&path).map_err(|reason| {
            let what = format!("{name} does not load: {}: {reason}", path.display());
            CudaUnavailable::new(what, "Run `downbeat engine install --cuda`")
        })?;
    }
    Ok(library)
}

const IN_CACHE: &str = "in the cache of `downbeat engine install`";
/// The file beside the library that all providers need.
const SHARED: &str = "libonnxruntime_providers_shared.so";

/// The file name of a provider.
pub(crate) fn provider_file(provider: Provider) -> &'static str {
    match provider {
        Provider::Cuda => "libonnxruntime_providers_cuda.so",
        Provider::Tensorrt => "libonnxruntime_providers_tensorrt.so",
    }
}

#[cfg(target_os = "macos")]
const SYSTEM_NAMES: [&str; 2] = ["libonnxruntime.1.dylib", "libonnxruntime.dylib"];
#[cfg(not(target_os = "macos"))]
const SYSTEM_NAMES: [&str; 2] = ["libonnxruntime.so.1", "libonnxruntime.so"];

/// The place where a library was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LibraryPlace {
    /// Named by the user, in this variable or flag.
    Asked(String),
    Executable,
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
            LibraryPlace::Cache => f.write_str(IN_CACHE),
            LibraryPlace::System => f.write_str("on the system's library path"),
            LibraryPlace::Python => f.write_str("in Python's packages"),
            LibraryPlace::Gpu => f.write_str("with the CUDA provider"),
        }
    }
}

/// The reason why a library that was found or named is not used.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{words}")]
pub struct FindError {
    words: String,
    /// Whether the file is missing.
    pub(super) is_missing: bool,
}

impl FindError {
    /// The library is not in its `place`.
    fn missing(path: &Path, place: &str, reason: &str) -> FindError {
        let path = path.display();
        let words = format!(
            "no onnxruntime library at {path} ({place}): {reason}. Correct the path, or run `downbeat engine install` and leave it out"
        );
        FindError { words, is_missing: true }
    }

    fn too_old(path: &Path, place: &str, version: &str) -> FindError {
        let path = path.display();
        FindError::new(format!(
            "the onnxruntime library at {path} ({place}) is version {version}; 1.{OLDEST_MINOR} or newer is needed. `downbeat engine install` fetches one"
        ))
    }

    /// The process already runs on another library.
    pub(super) fn another(loaded: &Path, path: &Path) -> FindError {
        let (loaded, path) = (loaded.display(), path.display());
        FindError::new(format!(
            "this process runs on the onnxruntime library at {loaded} already, and cannot load the one at {path} beside it"
        ))
    }

    /// The file is no onnxruntime library, or does not start.
    fn unusable(path: &Path, place: &str, reason: &str) -> FindError {
        let path = path.display();
        FindError::new(format!(
            "the library at {path} ({place}) cannot be used as onnxruntime: {reason}. `downbeat engine install` fetches one that can"
        ))
    }

    fn new(words: String) -> FindError {
        FindError { words, is_missing: false }
    }
}

/// A library that opens and has the right version.
pub(super) struct Library {
    pub(super) path: PathBuf,
    pub(super) version: String,
    place: String,
}

impl Library {
    /// Opens the library and asks for its version. It comes before `ort`, which panics on some
    /// failures.
    pub(super) fn check(path: &Path, place: &LibraryPlace) -> Result<Library, FindError> {
        let (place, bare) = (place.to_string(), *place == LibraryPlace::System);
        // `ort` takes a relative path as relative to the executable; a user means the working
        // directory.
        let path = if bare { path.to_owned() } else { std::path::absolute(path).unwrap_or_else(|_| path.to_owned()) };
        let unusable = |reason: String| FindError::unusable(&path, &place, &reason);
        if !bare && let Err(e) = std::fs::metadata(&path) {
            return Err(FindError::missing(&path, &place, &e.to_string()));
        }
        if !bare {
            elf::check_whole(&path).map_err(unusable)?;
        }
        // SAFETY: runs the initialisers of a library that the user of this process installed or
        // named.
        let library = unsafe { libloading::Library::new(&path) };
        let library = match library {
            Ok(library) => library,
            Err(e) if bare => return Err(FindError::missing(&path, &place, &loader_words(&e))),
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
                return Err(FindError::too_old(&path, &place, &version));
            }
            version
        };
        let minor = version.split('.').nth(1).and_then(|m| m.parse::<u32>().ok());
        if minor.is_none_or(|minor| minor < OLDEST_MINOR) {
            return Err(FindError::too_old(&path, &place, &version));
        }
        let path = if bare { mapped(&path).unwrap_or(path) } else { path };
        // The library stays loaded until `ort` has opened it too: closing it in between would only
        // load it again.
        std::mem::forget(library);
        Ok(Library { path, version, place })
    }

    pub(super) fn unusable(&self, reason: String) -> FindError {
        FindError::unusable(&self.path, &self.place, &reason)
    }
}

/// The loader's reason for refusing a library. The error's own text lacks it.
pub(crate) fn loader_words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// The newest library in a folder, by the version in its name.
pub(crate) fn newest_in(folder: &Path) -> Option<PathBuf> {
    let names = std::fs::read_dir(folder).ok()?.filter_map(|entry| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        let version = install::library_version(&name)?;
        Some((version, name))
    });
    names.max().map(|(_, name)| folder.join(name))
}

/// Asks Python for the folder of its package, without importing it.
fn in_python() -> Option<PathBuf> {
    const ASK: &str = "import importlib.util as u; s = u.find_spec('onnxruntime'); print(s.submodule_search_locations[0] if s else '')";
    let output = python::command(python::NAME.as_ref(), ASK).ok()?.output().ok().filter(|o| o.status.success())?;
    let folder = String::from_utf8(output.stdout).ok()?;
    let folder = folder.trim();
    if folder.is_empty() { None } else { newest_in(&Path::new(folder).join("capi")) }
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
