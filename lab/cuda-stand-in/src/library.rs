//! Finds the built library and loads it in place of the driver.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

const FILE: &str = "libcuda_stand_in.so";

/// Returns the library's file, beside the running test or in the folders around it.
///
/// # Errors
/// If the library was not built: a test that needs it has this crate as a dev-dependency, for which
/// Cargo builds it.
pub fn library() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| format!("the path of this program: {error}"))?;
    let here = program.parent().unwrap_or(Path::new("."));
    let above = here.parent().unwrap_or(here);
    // `deps` first: Cargo keeps the file there up to date even if the library is only a dependency.
    [above.join("deps"), here.join("deps"), here.to_owned(), above.to_owned()]
        .into_iter()
        .map(|folder| folder.join(FILE))
        .find(|path| path.is_file())
        .ok_or_else(|| format!("{FILE} is not near {}; `cargo build -p cuda-stand-in` makes it", program.display()))
}

/// Returns a folder for `LD_LIBRARY_PATH` of another process, in which the stand-in has the names
/// of the driver and of NVML.
///
/// # Errors
/// If the library is not found or the folder cannot be made.
pub fn folder() -> Result<PathBuf, String> {
    let library = library()?;
    let folder = library.with_file_name("cuda-stand-in");
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    std::fs::create_dir_all(&folder).map_err(failed)?;
    for name in ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"] {
        match std::os::unix::fs::symlink(Path::new("..").join(FILE), folder.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
    }
    Ok(folder)
}

/// Starts this program anew, with the same arguments and with the stand-in before the machine's
/// driver: the loader reads the path only at the start. Returns the reason if that is not possible.
fn run_again() -> Result<String, String> {
    const AGAIN: &str = "CUDA_STAND_IN_RUN_AGAIN";
    let folder = folder()?;
    if std::env::var_os(AGAIN).is_some() {
        return Ok(format!("{} comes first in LD_LIBRARY_PATH, and it was not taken from there", folder.display()));
    }
    let program = std::env::current_exe().map_err(|error| format!("the path of this program: {error}"))?;
    let mut path = folder.into_os_string();
    if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(rest);
    }
    let arguments = std::env::args_os().skip(1);
    let error = Command::new(program).args(arguments).env("LD_LIBRARY_PATH", path).env(AGAIN, "1").exec();
    Ok(format!("this program could not be started anew: {error}"))
}

/// Loads the stand-in under the driver's name, and keeps it for the life of the process.
pub fn load() -> Result<Library, String> {
    let path = library()?;
    // SAFETY: the library's initialisers are those of the Rust standard library, which may run at
    // any time.
    let loaded = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|error| error.to_string())?;
    for name in ["libcuda.so", "libcuda.so.1"] {
        // SAFETY: this finds the library above, or a driver, which is made to be loaded.
        let Ok(found) = (unsafe { Library::open(Some(name), RTLD_NOW) }) else { continue };
        // SAFETY: only its presence is asked for.
        if unsafe { found.get::<unsafe extern "C" fn()>(b"stand_in_reset\0") }.is_err() {
            return Err(format!("{name} is a real driver here, and is used instead: {}", run_again()?));
        }
    }
    Ok(loaded)
}
