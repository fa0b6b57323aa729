//! `downbeat engine install`: fetches the onnxruntime library as a Python wheel, with the `pip` that is here and as it is
//! configured, and unpacks nothing but the library.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::onnxruntime;

/// The version that is installed unless another is asked for.
pub const VERSION: &str = "1.31.1";
/// The largest library that is unpacked, bytes; that of version 1.31.1 has 24 million.
const LIBRARY_LIMIT: u64 = 2 << 30;

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
}

/// What was installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The library.
    pub library: PathBuf,
    /// Its version, by its file name.
    pub version: String,
}

/// Why nothing was installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// Neither `XDG_CACHE_HOME` nor `HOME` is set.
    #[error("no folder to install to: set XDG_CACHE_HOME or HOME")]
    NoCache,
    /// There is no Python.
    #[error("cannot run {python}: {reason}. Install Python 3 with pip, or fetch a wheel of onnxruntime elsewhere and pass it with --wheel FILE", python = python.display())]
    NoPython {
        /// What was tried.
        python: PathBuf,
        /// The system's words.
        reason: io::Error,
    },
    /// Python has no pip.
    #[error("{python} has no pip. Install it (python3-pip, or python3 -m ensurepip), or pass a wheel with --wheel FILE", python = python.display())]
    NoPip {
        /// The Python.
        python: PathBuf,
    },
    /// pip found no wheel.
    #[error(
        "pip has no wheel of onnxruntime {version} for this platform and Python. Try another --version, or a newer Python with --python. pip said: {said}"
    )]
    NoWheel {
        /// The version.
        version: String,
        /// The end of what pip said.
        said: String,
    },
    /// pip failed otherwise.
    #[error(
        "pip could not fetch onnxruntime {version}: is there a network, and pip configured for it? A wheel fetched elsewhere can be passed with --wheel FILE. pip said: {said}"
    )]
    Fetch {
        /// The version.
        version: String,
        /// The end of what pip said.
        said: String,
    },
    /// The wheel is none, or has no library.
    #[error("{wheel}: {reason}. Expected a wheel of the Python package onnxruntime for this platform", wheel = wheel.display())]
    Wheel {
        /// The wheel.
        wheel: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A file cannot be written.
    #[error("{path}: {reason}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's words.
        reason: io::Error,
    },
}

impl Install {
    /// The pinned version, with the `python3` on the path, to [`cache_folder`].
    ///
    /// # Errors
    /// If there is no such folder.
    pub fn new() -> Result<Install, InstallError> {
        let cache = cache_folder().ok_or(InstallError::NoCache)?;
        Ok(Install { version: VERSION.into(), cache, python: "python3".into(), wheel: None })
    }

    /// Fetches the wheel, unless one is given, and unpacks its library. Whoever looks meanwhile sees the library whole or
    /// not at all.
    ///
    /// # Errors
    /// See [`InstallError`].
    pub fn run(&self) -> Result<Installed, InstallError> {
        if let Some(wheel) = &self.wheel {
            return self.unpack(wheel);
        }
        let folder = self.temporary()?;
        let wheel = self.fetch(folder.path())?;
        self.unpack(&wheel)
    }

    /// A folder inside the cache, so that what is made in it can be moved to its place in one step.
    fn temporary(&self) -> Result<tempfile::TempDir, InstallError> {
        let error = |reason| InstallError::Write { path: self.cache.clone(), reason };
        std::fs::create_dir_all(&self.cache).map_err(error)?;
        tempfile::Builder::new().prefix(".installing-").tempdir_in(&self.cache).map_err(error)
    }

    fn fetch(&self, folder: &Path) -> Result<PathBuf, InstallError> {
        let no_python = |reason| InstallError::NoPython { python: self.python.clone(), reason };
        let pip = |arguments: &[&OsStr]| {
            let mut command = Command::new(&self.python);
            command.args(["-m", "pip"]).args(arguments).stdin(Stdio::null()).output().map_err(no_python)
        };
        if !pip(&["--version".as_ref()])?.status.success() {
            return Err(InstallError::NoPip { python: self.python.clone() });
        }
        let requirement = format!("onnxruntime=={}", self.version);
        let fixed =
            ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "-d"].map(OsStr::new);
        let mut arguments = vec![OsStr::new("download"), OsStr::new(&requirement)];
        arguments.extend(fixed);
        arguments.push(folder.as_os_str());
        let output = pip(&arguments)?;
        let said = last_lines(&output.stderr);
        let version = self.version.clone();
        if !output.status.success() {
            // pip ends in "no matching distribution" also if it reached no index; only then it warns of retries.
            let reached = !String::from_utf8_lossy(&output.stderr).contains("connection broken");
            return Err(if reached && said.contains("No matching distribution") {
                InstallError::NoWheel { version, said }
            } else {
                InstallError::Fetch { version, said }
            });
        }
        let wheels =
            std::fs::read_dir(folder).map_err(|reason| InstallError::Write { path: folder.to_owned(), reason })?;
        let wheel = wheels.filter_map(Result::ok).map(|e| e.path()).find(|p| p.extension().is_some_and(|e| e == "whl"));
        wheel.ok_or(InstallError::Fetch { version, said: "nothing, and left no wheel".into() })
    }

    fn unpack(&self, wheel: &Path) -> Result<Installed, InstallError> {
        let error = |reason: String| InstallError::Wheel { wheel: wheel.to_owned(), reason };
        let file = File::open(wheel).map_err(|e| error(e.to_string()))?;
        let mut archive = zip::ZipArchive::new(BufReader::new(file)).map_err(|e| error(format!("not a wheel: {e}")))?;
        let library = archive
            .file_names()
            .filter_map(|path| {
                let path = path.ok()?.into_owned();
                let name = path.strip_prefix("onnxruntime/capi/")?.to_owned();
                Some((library_version(&name)?, path, name))
            })
            .max();
        let Some((_, entry, name)) = library else {
            return Err(error("it holds no onnxruntime library".into()));
        };
        let mut packed = archive.by_name(&entry).map_err(|e| error(e.to_string()))?;
        if packed.size() > LIBRARY_LIMIT {
            return Err(error(format!("its library has {} bytes", packed.size())));
        }
        let version = version_text(&name).unwrap_or_else(|| self.version.clone());
        let folder = self.temporary()?;
        let unpacked = folder.path().join(&name);
        let write = |path: &Path| {
            let path = path.to_owned();
            move |reason| InstallError::Write { path, reason }
        };
        let mut to = File::create(&unpacked).map_err(write(&unpacked))?;
        // Reads to the end, where the checksum is compared.
        io::copy(&mut packed, &mut to).map_err(|e| error(format!("cannot unpack the library: {e}")))?;
        to.sync_all().map_err(write(&unpacked))?;
        let place = self.cache.join(&version);
        std::fs::create_dir_all(&place).map_err(write(&place))?;
        let library = place.join(&name);
        std::fs::rename(&unpacked, &library).map_err(write(&library))?;
        Ok(Installed { library, version })
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

/// The newest library that is installed in `cache`.
pub fn installed(cache: &Path) -> Option<PathBuf> {
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

/// The end of what a program said, on one line.
fn last_lines(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let lines: Vec<&str> =
        text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with("[notice]")).collect();
    let from = lines.len().saturating_sub(3);
    lines.get(from..).unwrap_or(&[]).join(" / ")
}
