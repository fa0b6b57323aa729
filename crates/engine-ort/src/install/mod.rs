//! `downbeat engine install`: fetches onnxruntime as a Python wheel. It uses the installed `pip`
//! with its configuration, and unpacks only the libraries. For GPUs it fetches NVIDIA's libraries,
//! too.

pub(crate) mod cache;
mod pin;
mod pip;
mod wheel;

use std::io;
use std::path::{Path, PathBuf};

use crate::cuda::Provider;
pub use crate::library::version_of;
use crate::library::version_text;
use crate::search::Search;
use cache::{GPU_FOLDER, NVIDIA_FOLDER};
pub use cache::{cache_folder, installed, installed_gpu};

/// The default version to install.
pub const VERSION: &str = "1.31.1";

/// The parts to install, and the place.
#[derive(Clone, Debug)]
pub struct Install {
    /// The version, as pip names it.
    pub version: String,
    /// The folder that libraries are unpacked to, one folder for each version.
    pub cache: PathBuf,
    /// The Python whose pip fetches the wheel.
    pub python: PathBuf,
    /// A wheel to unpack instead of a download.
    pub wheel: Option<PathBuf>,
    /// Whether wheels are accepted whose hashes were not pinned when this program was built.
    pub unverified: bool,
    /// The GPU libraries to install; `None`: onnxruntime for the CPU.
    pub gpu: Option<GpuInstall>,
}

/// The libraries that come with onnxruntime for GPUs.
#[derive(Clone, Debug)]
pub struct GpuInstall {
    /// Whether NVIDIA's libraries (CUDA, cuDNN) are fetched.
    pub libraries: NvidiaLibraries,
    /// The places where they may be already.
    pub search: Search,
}

/// Whether NVIDIA's libraries are fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NvidiaLibraries {
    /// If one of them is not found.
    #[default]
    Missing,
    /// Even if all of them are found.
    Always,
    /// Never.
    Never,
}

/// The result of an installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The library.
    pub library: PathBuf,
    /// The library's version, from its file name.
    pub version: String,
    /// The folder of NVIDIA's libraries, if they were fetched.
    pub nvidia: Option<PathBuf>,
}

/// The reason why nothing was installed, and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InstallError(String);

impl InstallError {
    /// A file cannot be written.
    fn write(path: &Path, reason: &io::Error) -> InstallError {
        InstallError(format!("{}: {reason}", path.display()))
    }

    /// This version has no hashes for `what`.
    fn not_pinned(what: &str, known: &str) -> InstallError {
        InstallError(format!(
            "this version of downbeat knows no hash of {what} (it knows {known}). To install it without a check, add --unverified"
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

    /// Fetches the wheel, unless one is given, and unpacks its libraries. Other processes see
    /// either the old state or the new one as a whole. `say` is called with each slow step before
    /// it begins.
    ///
    /// # Errors
    /// In words, with the remedy.
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
        // NVIDIA's libraries come into their place before onnxruntime's, which searches find first.
        let nvidia = match &self.gpu {
            Some(gpu) => self.nvidia(gpu, &mut wheel, &folder, &cache, say)?,
            None => None,
        };
        let version = version_text(&library.name).unwrap_or_else(|| self.version.clone());
        let place = cache.join(&version);
        folder.publish(&files, &place)?;
        Ok(Installed { library: place.join(&library.name), version, nvidia })
    }

    /// Fetches NVIDIA's libraries that `wheel` requires, if necessary.
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
            // Keeping the wheels would take twice the disk space.
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

/// A folder inside the cache, from which a finished folder moves to its place in one step. It is
/// removed when it is dropped.
struct Temporary {
    /// Stands for a cache: the files for GPUs are one folder deeper.
    outer: tempfile::TempDir,
}

impl Temporary {
    fn inside(cache: &Path) -> Result<Temporary, InstallError> {
        let error = |reason| InstallError::write(cache, &reason);
        std::fs::create_dir_all(cache).map_err(error)?;
        let outer = tempfile::Builder::new().prefix(".installing-").tempdir_in(cache).map_err(error)?;
        Ok(Temporary { outer })
    }

    /// This folder as a cache that has the GPU libraries made here.
    fn as_cache(&self) -> PathBuf {
        self.outer.path().to_owned()
    }

    fn make(&self, name: &str) -> Result<PathBuf, InstallError> {
        let path = self.outer.path().join(GPU_FOLDER).join(name);
        std::fs::create_dir_all(&path).map_err(|reason| InstallError::write(&path, &reason))?;
        Ok(path)
    }

    /// Moves a folder to its place in one step. An old folder there comes here in exchange, and is
    /// removed with this one.
    fn publish(&self, folder: &Path, place: &Path) -> Result<(), InstallError> {
        let error = |reason| InstallError::write(place, &reason);
        if std::fs::rename(folder, place).is_ok() {
            return Ok(());
        }
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        if renameat_with(CWD, folder, CWD, place, RenameFlags::EXCHANGE).is_ok() {
            return Ok(());
        }
        // Not every file system can exchange folders; then the place is empty for a moment.
        std::fs::rename(place, self.outer.path().join("replaced")).map_err(error)?;
        std::fs::rename(folder, place).map_err(error)
    }
}
