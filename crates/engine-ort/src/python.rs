//! Runs the installed Python, for its pip and its packages, without running files of the working
//! folder.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The name of the Python, unless the user names another.
pub(crate) const NAME: &str = "python3";

/// A command that runs `script`. The script sees the packages of the system, of a virtual
/// environment and of the user. It sees no module of the working folder, and ignores `PYTHON*`
/// variables.
pub(crate) fn command(python: &Path, script: &str) -> io::Result<Command> {
    let mut command = Command::new(interpreter(python)?);
    let with_user_packages = format!("import site, sys; sys.path.append(site.getusersitepackages())\n{script}");
    command.args(["-I", "-c", &with_user_packages]).current_dir("/").stdin(Stdio::null());
    Ok(command)
}

/// The absolute path of a Python. A path counts from the working folder. A bare name is looked up
/// in `PATH`, without its relative folders.
fn interpreter(python: &Path) -> io::Result<PathBuf> {
    if python.as_os_str().to_string_lossy().contains('/') {
        return std::path::absolute(python);
    }
    in_path(python.as_os_str(), &std::env::var_os("PATH").unwrap_or_default())
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "not in an absolute folder of PATH"))
}

fn in_path(name: &OsStr, path: &OsStr) -> Option<PathBuf> {
    let is_program = |file: &PathBuf| {
        std::fs::metadata(file).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(path).filter(|folder| folder.is_absolute()).map(|folder| folder.join(name)).find(is_program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_in_absolute_folders_only() {
        let found = |path: &str| in_path("sh".as_ref(), path.as_ref());
        assert_eq!(found(".:bin::/nonexistent:/bin"), Some(PathBuf::from("/bin/sh")));
        assert_eq!(found("../../../../../../bin:bin"), None);
        assert_eq!(in_path("etc".as_ref(), "/".as_ref()), None, "a folder is no program");
    }
}
