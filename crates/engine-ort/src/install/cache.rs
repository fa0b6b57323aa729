//! The folder of installed libraries.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use downbeat_engine::user_cache;

use crate::library::{NAME, library_version, newest_in};

/// The folder in the cache for GPU libraries.
pub(super) const GPU_FOLDER: &str = "cuda";
/// The folder with NVIDIA's libraries, beside the versions of onnxruntime for GPUs. All versions
/// share it.
pub(super) const NVIDIA_FOLDER: &str = "nvidia";

/// The folder in which `downbeat engine install` puts libraries:
/// `$XDG_CACHE_HOME/downbeat/engines/onnxruntime`, with `~/.cache` if the variable is not set.
pub fn cache_folder() -> Option<PathBuf> {
    Some(user_cache(|name| std::env::var_os(name))?.join("downbeat").join("engines").join(NAME))
}

/// The newest library for the CPU that is installed in `cache`.
pub fn installed(cache: &Path) -> Option<PathBuf> {
    newest(cache)
}

/// The newest library for GPUs that is installed in `cache`, with its providers beside it.
pub fn installed_gpu(cache: &Path) -> Option<PathBuf> {
    newest(&cache.join(GPU_FOLDER))
}

/// The folder of NVIDIA's libraries that were installed in `cache`.
pub(crate) fn nvidia_folder(cache: &Path) -> PathBuf {
    cache.join(GPU_FOLDER).join(NVIDIA_FOLDER)
}

fn newest(cache: &Path) -> Option<PathBuf> {
    let folders = std::fs::read_dir(cache).ok()?.filter_map(Result::ok).map(|e| e.path());
    let versions = folders.filter(|p| p.file_name().and_then(OsStr::to_str).is_some_and(|n| !n.starts_with('.')));
    let libraries = versions.filter_map(|folder| newest_in(&folder));
    libraries.max_by_key(|path| path.file_name().and_then(OsStr::to_str).and_then(library_version))
}
