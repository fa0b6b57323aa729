//! pip, which fetches wheels.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Output;

use super::InstallError;
use crate::python;

/// Runs pip with the arguments after the script.
const PIP: &str = "import runpy; sys.argv[0] = 'pip'; runpy.run_module('pip', run_name='__main__', alter_sys=True)";

/// The remedy where onnxruntime cannot be fetched.
pub(super) const PASS_A_WHEEL: &str = "A wheel fetched elsewhere can be passed with --wheel FILE";
/// The remedy where NVIDIA's libraries cannot be fetched.
pub(super) const WITHOUT_LIBRARIES: &str = "Libraries that are here already are used if their folder is in LD_LIBRARY_PATH; --cuda-libraries never installs without them";

/// Wheels to fetch.
pub(super) enum Wanted {
    /// These, in the format of a requirements file, with their required hashes.
    Pinned(String),
    /// These, in any file that the index has.
    Unverified {
        /// The requirements in pip's format.
        requirements: Vec<String>,
        /// Whether their own requirements are fetched, too.
        with_needs: bool,
    },
}

/// A Python's pip, about to fetch something.
pub(super) struct Pip<'a> {
    /// The Python.
    pub(super) python: &'a Path,
    /// The name of the wanted wheels, for messages.
    pub(super) what: String,
    /// The remedy if pip fails, for messages.
    pub(super) instead: &'static str,
}

impl Pip<'_> {
    /// Fetches `wanted` into the empty `folder`.
    pub(super) fn download(&self, wanted: &Wanted, folder: &Path) -> Result<Vec<PathBuf>, InstallError> {
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        let pinned = folder.join("requirements.txt");
        if !self.run(&["--version".as_ref()])?.status.success() {
            return Err(InstallError(format!(
                "{} has no pip. Install it (python3-pip, or python3 -m ensurepip), or pass a wheel with --wheel FILE",
                self.python.display()
            )));
        }
        let mut arguments = vec![OsStr::new("download")];
        match wanted {
            Wanted::Pinned(requirements) => {
                std::fs::write(&pinned, requirements).map_err(|reason| InstallError::write(&pinned, &reason))?;
                arguments.extend(["--require-hashes", "--no-deps", "-r"].map(OsStr::new));
                arguments.push(pinned.as_os_str());
            }
            Wanted::Unverified { requirements, with_needs } => {
                arguments.extend(requirements.iter().map(OsStr::new));
                arguments.extend((!with_needs).then_some(OsStr::new("--no-deps")));
            }
        }
        let fixed = ["--only-binary=:all:", "--disable-pip-version-check", "--no-input", "-d"];
        arguments.extend(fixed.map(OsStr::new));
        arguments.push(folder.as_os_str());
        let output = self.run(&arguments)?;
        if !output.status.success() {
            let said = last_lines(&output.stderr);
            // pip ends in "no matching distribution" even if it reached no index. It warns of
            // retries only in that case.
            let reached = !String::from_utf8_lossy(&output.stderr).contains("connection broken");
            let all = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(if all.contains("DO NOT MATCH THE HASHES") {
                InstallError(format!(
                    "the hash of pip's download of {} is wrong, and the download was deleted: {}. Check that the package index can be trusted",
                    self.what,
                    hashes(&all)
                ))
            } else if reached && said.contains("No matching distribution") {
                InstallError(format!(
                    "pip has no wheel of {} for this platform and Python. Try another --version, or a newer Python with --python. pip said: {said}",
                    self.what
                ))
            } else {
                self.failed(&said)
            });
        }
        let wheels = std::fs::read_dir(&folder).map_err(|reason| InstallError::write(&folder, &reason))?;
        let wheels = wheels.filter_map(Result::ok).map(|e| e.path());
        Ok(wheels.filter(|p| p.extension().is_some_and(|e| e == "whl")).collect())
    }

    /// The error of a pip that printed `said` last.
    pub(super) fn failed(&self, said: &str) -> InstallError {
        let Pip { what, instead, .. } = self;
        InstallError(format!(
            "pip could not fetch {what}: is there a network, and pip configured for it? {instead}. pip said: {said}"
        ))
    }

    fn run(&self, arguments: &[&OsStr]) -> Result<Output, InstallError> {
        let output = python::command(self.python, PIP).and_then(|mut pip| pip.args(arguments).output());
        output.map_err(|reason| {
            InstallError(format!(
                "cannot run {}: {reason}. Install Python 3 with pip, or fetch a wheel of onnxruntime elsewhere and pass it with --wheel FILE",
                self.python.display()
            ))
        })
    }
}

/// The part of pip's output about a file with a wrong hash: the file's origin and its hash.
fn hashes(said: &str) -> String {
    let mut lines = said.lines().map(str::trim).skip_while(|line| !line.contains("DO NOT MATCH")).skip(1);
    let file = lines.next().unwrap_or_default();
    let file = file.split(" (from -r").next().unwrap_or(file);
    format!("{file} {}", lines.find(|line| line.starts_with("Got")).unwrap_or_default())
}

/// The last lines of a program's output, joined into one.
fn last_lines(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let lines: Vec<&str> =
        text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with("[notice]")).collect();
    let from = lines.len().saturating_sub(3);
    lines.get(from..).unwrap_or(&[]).join(" / ")
}
