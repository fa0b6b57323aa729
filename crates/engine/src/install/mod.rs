//! `downbeat engine install`: fetches onnxruntime as a Python wheel, with the `pip` that is here and as it is configured, and
//! unpacks nothing but the libraries; for GPUs NVIDIA's, too.

mod pin;
mod pip;
mod wheel;

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use crate::cuda::Provider;
use crate::onnxruntime::{self, Search};

/// The version that is installed unless another is asked for.
pub const VERSION: &str = "1.31.1";
/// The folder in the cache of what is for GPUs.
const GPU_FOLDER: &str = "cuda";
/// The folder beside the versions of onnxruntime for GPUs that has NVIDIA's libraries, for all of them.
const NVIDIA_FOLDER: &str = "nvidia";

/// What to install.
#[derive(Clone, Debug)]
pub struct Install {
    /// The version, as pip names it.
    pub version: String,
    /// The folder that libraries are unpacked to, one folder a version.
    pub cache: PathBuf,
    /// The Python whose pip fetches it.
    pub python: PathBuf,
    /// A wheel to unpack in place of fetching one.
    pub wheel: Option<PathBuf>,
    /// Whether what is fetched may be other than what was pinned with its hash when this program was built.
    pub unverified: bool,
    /// Whether it is for GPUs, and then what comes with it.
    pub gpu: Option<GpuInstall>,
}

/// What comes with onnxruntime for GPUs.
#[derive(Clone, Debug)]
pub struct GpuInstall {
    /// Whether NVIDIA's libraries (CUDA, cuDNN) are fetched.
    pub libraries: NvidiaLibraries,
    /// Where they may be already.
    pub search: Search,
}

/// Whether NVIDIA's libraries are fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NvidiaLibraries {
    /// Where one of them is not found.
    #[default]
    Missing,
    /// Also if they are there.
    Always,
    /// Not at all.
    Never,
}

/// What was installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The library.
    pub library: PathBuf,
    /// Its version, by its file name.
    pub version: String,
    /// Where NVIDIA's libraries were unpacked to, if they were fetched.
    pub nvidia: Option<PathBuf>,
}

/// Why nothing was installed, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InstallError(String);

impl InstallError {
    /// A file cannot be written.
    fn write(path: &Path, reason: &io::Error) -> InstallError {
        InstallError(format!("{}: {reason}", path.display()))
    }

    /// Nobody has pinned the hashes of these.
    fn not_pinned(what: &str, known: &str) -> InstallError {
        InstallError(format!(
            "{what} is not among what this version of downbeat knows the hashes of ({known}). To take what pip's index has, unseen, add --unverified"
        ))
    }
}

impl Install {
    /// The pinned version for the CPU, with the `python3` on the path, to [`cache_folder`].
    ///
    /// # Errors
    /// If there is no such folder.
    pub fn new() -> Result<Install, InstallError> {
        let no_cache = || InstallError("no folder to install to: set XDG_CACHE_HOME or HOME".into());
        let cache = cache_folder().ok_or_else(no_cache)?;
        Ok(Install {
            version: VERSION.into(),
            cache,
            python: crate::python::NAME.into(),
            wheel: None,
            unverified: false,
            gpu: None,
        })
    }

    /// The Python package that has the library.
    fn package(&self) -> &'static str {
        if self.gpu.is_some() { "onnxruntime-gpu" } else { "onnxruntime" }
    }

    /// Fetches the wheel, unless one is given, and unpacks its libraries. Whoever looks meanwhile sees all that was there before
    /// or all that is there afterwards. `say` is told what takes long, before it does.
    ///
    /// # Errors
    /// In words, with what to do.
    pub fn run(&self, say: &mut dyn FnMut(&str)) -> Result<Installed, InstallError> {
        let cache = if self.gpu.is_some() { self.cache.join(GPU_FOLDER) } else { self.cache.clone() };
        let folder = Temporary::inside(&cache)?;
        let package = self.package();
        let fetched;
        let wheel = match &self.wheel {
            Some(wheel) => wheel,
            None => {
                let requirement = format!("{package}=={}", self.version);
                let what = format!("{package} {}", self.version);
                let wanted = match pin::package(package, &self.version) {
                    Some(pinned) => pip::Wanted::Pinned(pinned),
                    None if self.unverified => {
                        pip::Wanted::Unverified { requirements: vec![requirement.clone()], with_needs: false }
                    }
                    None => return Err(InstallError::not_pinned(&what, &pin::versions(package))),
                };
                say(&format!("fetching {requirement} with pip"));
                let pip = pip::Pip { python: &self.python, what, instead: pip::PASS_A_WHEEL };
                let into = folder.make("wheel")?;
                let wheels = pip.download(&wanted, &into)?;
                fetched = wheels.into_iter().next().ok_or_else(|| pip.failed("nothing, and left no wheel"))?;
                &fetched
            }
        };
        let mut wheel = wheel::Wheel::open(wheel, package)?;
        let library = wheel.library()?;
        wheel.check_provider(self.gpu.is_some())?;
        let files = folder.make("files")?;
        let entries = if self.gpu.is_some() { wheel.capi_libraries() } else { vec![library.clone()] };
        wheel.unpack(&entries, &files)?;
        // NVIDIA's libraries come into their place before the one that is found first.
        let nvidia = match &self.gpu {
            Some(gpu) => self.nvidia(gpu, &mut wheel, &folder, &cache, say)?,
            None => None,
        };
        let version = version_text(&library.name).unwrap_or_else(|| self.version.clone());
        let place = cache.join(&version);
        folder.publish(&files, &place)?;
        Ok(Installed { library: place.join(&library.name), version, nvidia })
    }

    /// Fetches what `wheel` says it needs of NVIDIA's, if it has to be.
    fn nvidia(
        &self,
        gpu: &GpuInstall,
        wheel: &mut wheel::Wheel,
        folder: &Temporary,
        cache: &Path,
        say: &mut dyn FnMut(&str),
    ) -> Result<Option<PathBuf>, InstallError> {
        let there = |search: &Search| search.nvidia_places(None).libraries(Provider::Cuda);
        let search = Search { cache: Some(self.cache.clone()), ..gpu.search.clone() };
        match (gpu.libraries, there(&search)) {
            (NvidiaLibraries::Never, _) | (NvidiaLibraries::Missing, Ok(_)) => return Ok(None),
            (NvidiaLibraries::Missing, Err(missing)) => say(missing.what()),
            (NvidiaLibraries::Always, _) => {}
        }
        let requirements = wheel.nvidia_requirements()?;
        let wanted = match pin::nvidia(&requirements) {
            Ok(pinned) => pip::Wanted::Pinned(pinned),
            Err(_) if self.unverified => {
                pip::Wanted::Unverified { requirements: requirements.clone(), with_needs: true }
            }
            Err(what) => return Err(InstallError::not_pinned(&what, &pin::nvidia_names())),
        };
        say(&format!("fetching NVIDIA's libraries with pip, more than 1 GB: {}", requirements.join(", ")));
        let what = "NVIDIA's libraries".to_owned();
        let pip = pip::Pip { python: &self.python, what, instead: pip::WITHOUT_LIBRARIES };
        let into = folder.make("nvidia-wheels")?;
        let files = folder.make(NVIDIA_FOLDER)?;
        for path in pip.download(&wanted, &into)? {
            let mut wheel = wheel::Wheel::open(&path, "NVIDIA's")?;
            let entries = wheel.nvidia_libraries();
            wheel.unpack(&entries, &files)?;
            // Two copies of them all would be twice the disk.
            let _ = std::fs::remove_file(&path);
        }
        let unpacked = Search { cache: Some(folder.as_cache()), ..Search::default() };
        if let Err(error) = there(&unpacked) {
            return Err(InstallError(format!("NVIDIA's packages were fetched, and {}", error.what())));
        }
        let place = cache.join(NVIDIA_FOLDER);
        folder.publish(&files, &place)?;
        Ok(Some(place))
    }
}

/// A folder inside the cache, so that what is made in it can be moved to its place in one step. It goes when it is dropped.
struct Temporary {
    /// Stands for a cache: what is for GPUs is one folder deeper.
    outer: tempfile::TempDir,
}

impl Temporary {
    fn inside(cache: &Path) -> Result<Temporary, InstallError> {
        let error = |reason| InstallError::write(cache, &reason);
        std::fs::create_dir_all(cache).map_err(error)?;
        let outer = tempfile::Builder::new().prefix(".installing-").tempdir_in(cache).map_err(error)?;
        Ok(Temporary { outer })
    }

    /// A folder that would be the cache of what is made here for GPUs.
    fn as_cache(&self) -> PathBuf {
        self.outer.path().to_owned()
    }

    fn make(&self, name: &str) -> Result<PathBuf, InstallError> {
        let path = self.outer.path().join(GPU_FOLDER).join(name);
        std::fs::create_dir_all(&path).map_err(|reason| InstallError::write(&path, &reason))?;
        Ok(path)
    }

    /// Moves a folder to its place, in one step also if there is one: that comes here, and goes with this.
    fn publish(&self, folder: &Path, place: &Path) -> Result<(), InstallError> {
        let error = |reason| InstallError::write(place, &reason);
        if std::fs::rename(folder, place).is_ok() {
            return Ok(());
        }
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        if renameat_with(CWD, folder, CWD, place, RenameFlags::EXCHANGE).is_ok() {
            return Ok(());
        }
        // Not every file system can exchange; then there is nothing in between for a moment.
        std::fs::rename(place, self.outer.path().join("replaced")).map_err(error)?;
        std::fs::rename(folder, place).map_err(error)
    }
}

/// Where `downbeat engine install` puts libraries: `$XDG_CACHE_HOME/downbeat/engines/onnxruntime`, with `~/.cache` if the
/// variable is not set.
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    // A relative path in the variable is to be ignored (XDG Base Directory Specification).
    let base = set("XDG_CACHE_HOME").filter(|p| p.is_absolute()).or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(base.join("downbeat").join("engines").join(onnxruntime::NAME))
}

/// The newest library for the CPU that is installed in `cache`.
pub fn installed(cache: &Path) -> Option<PathBuf> {
    newest(cache)
}

/// The newest library for GPUs that is installed in `cache`, with its providers beside it.
pub fn installed_gpu(cache: &Path) -> Option<PathBuf> {
    newest(&cache.join(GPU_FOLDER))
}

/// Where NVIDIA's libraries are that were installed in `cache`.
pub(crate) fn nvidia_folder(cache: &Path) -> PathBuf {
    cache.join(GPU_FOLDER).join(NVIDIA_FOLDER)
}

fn newest(cache: &Path) -> Option<PathBuf> {
    let folders = std::fs::read_dir(cache).ok()?.filter_map(Result::ok).map(|e| e.path());
    let versions = folders.filter(|p| p.file_name().and_then(OsStr::to_str).is_some_and(|n| !n.starts_with('.')));
    let libraries = versions.filter_map(|folder| onnxruntime::newest_in(&folder));
    libraries.max_by_key(|path| path.file_name().and_then(OsStr::to_str).and_then(library_version))
}

/// The version in the file name of an onnxruntime library, as numbers (none for a bare name); `None` for other files.
pub(crate) fn library_version(name: &str) -> Option<Vec<u32>> {
    let version = version_part(name)?;
    version.split('.').filter(|part| !part.is_empty()).map(|part| part.parse().ok()).collect()
}

/// The version in the file name of a library.
pub fn version_of(library: &Path) -> Option<String> {
    version_text(library.file_name()?.to_str()?)
}

fn version_text(name: &str) -> Option<String> {
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
