//! The search for the ONNX Runtime library.

use std::path::{Path, PathBuf};

use crate::cuda::libraries::Places;
use crate::cuda::{CudaUnavailable, Provider};
use crate::install::cache::{cache_folder, installed, installed_gpu, nvidia_folder};
use crate::library::{FindError, IN_CACHE, IN_ENVIRONMENT, LibraryPlace, NAME, newest_in};
use crate::{elf, environment, python};

/// The places to search for the ONNX Runtime library: none by default, the usual ones by
/// [`Search::from_env`]. Their order is `asked`, beside the executable, the Python environment that
/// the executable is installed in, `cache`, the system's library path, the packages of `python3`.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// A library named by the user, with the name's source (`ORT_DYLIB_PATH`): no other library is
    /// tried.
    pub asked: Option<(String, PathBuf)>,
    /// The program's file. Libraries are looked for beside the file, and if its folder is the `bin`
    /// of a Python environment, in the packages of this environment.
    pub executable: Option<PathBuf>,
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
    /// The usual places, by this program's file, `ORT_DYLIB_PATH`, `DOWNBEAT_ONNXRUNTIME`,
    /// `XDG_CACHE_HOME` and `HOME`. Python is started only for GPUs.
    pub fn from_env() -> Search {
        let asked = ["ORT_DYLIB_PATH", "DOWNBEAT_ONNXRUNTIME"].into_iter().find_map(|name| {
            let path = std::env::var_os(name).filter(|v| !v.is_empty())?;
            Some((name.to_owned(), PathBuf::from(path)))
        });
        Search {
            asked,
            executable: std::env::current_exe().ok(),
            cache: cache_folder(),
            system: true,
            python_gpu: true,
            ..Search::default()
        }
    }

    /// The candidates, in order. A library for GPUs also serves the CPU.
    pub(crate) fn candidates(&self) -> Vec<(LibraryPlace, PathBuf)> {
        if let Some((who, path)) = &self.asked {
            return vec![(LibraryPlace::Asked(who.clone()), path.clone())];
        }
        let mut found = Vec::new();
        found.extend(
            self.beside_executable().iter().filter_map(|f| newest_in(f)).map(|p| (LibraryPlace::Executable, p)),
        );
        found.extend(self.environment_libraries().map(|p| (LibraryPlace::Environment, p)));
        if let Some(cache) = &self.cache {
            found.extend(installed(cache).map(|p| (LibraryPlace::Cache, p)));
            found.extend(installed_gpu(cache).map(|p| (LibraryPlace::Cache, p)));
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
        let folder = self.executable.as_deref().and_then(Path::parent);
        folder.map(|folder| vec![folder.to_owned(), folder.join("lib")]).unwrap_or_default()
    }

    /// The folders of packages of the Python environment that the executable is installed in.
    fn environment(&self) -> Vec<PathBuf> {
        let home = std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        self.executable
            .as_deref()
            .map(|executable| environment::package_folders(executable, home.as_deref()))
            .unwrap_or_default()
    }

    /// The libraries in the Python environment that the executable is installed in: one, unless the
    /// environment has packages of several Pythons.
    pub fn environment_libraries(&self) -> impl Iterator<Item = PathBuf> {
        self.environment().into_iter().filter_map(|packages| newest_in(&in_packages(&packages)))
    }

    /// The onnxruntime library that has `provider` beside it.
    pub(crate) fn gpu_library(&self, provider: Provider) -> Result<PathBuf, CudaUnavailable> {
        let file = provider.library_file();
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
        places.add(IN_ENVIRONMENT, self.environment().iter().map(|packages| in_packages(packages)).collect());
        if let Some(cache) = &self.cache {
            let installed = installed_gpu(cache).and_then(|path| Some(path.parent()?.to_owned()));
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
        places.add_packages(IN_ENVIRONMENT, &self.environment());
        places.add(IN_CACHE, self.cache.iter().map(|cache| nvidia_folder(cache)).collect());
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

/// The file beside the library that all providers need.
const SHARED: &str = "libonnxruntime_providers_shared.so";

#[cfg(target_os = "macos")]
const SYSTEM_NAMES: [&str; 2] = ["libonnxruntime.1.dylib", "libonnxruntime.dylib"];
#[cfg(not(target_os = "macos"))]
const SYSTEM_NAMES: [&str; 2] = ["libonnxruntime.so.1", "libonnxruntime.so"];

/// The folder of onnxruntime's library in a folder of packages.
fn in_packages(packages: &Path) -> PathBuf {
    packages.join(NAME).join("capi")
}

/// Asks Python for the folder of its package, without importing it.
fn in_python() -> Option<PathBuf> {
    const ASK: &str = "import importlib.util as u; s = u.find_spec('onnxruntime'); print(s.submodule_search_locations[0] if s else '')";
    let output = python::command(python::NAME.as_ref(), ASK).ok()?.output().ok().filter(|o| o.status.success())?;
    let folder = String::from_utf8(output.stdout).ok()?;
    let folder = folder.trim();
    if folder.is_empty() { None } else { newest_in(&Path::new(folder).join("capi")) }
}
