//! pip, which fetches wheels.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use super::InstallError;

/// What to do where onnxruntime cannot be fetched.
pub(super) const PASS_A_WHEEL: &str = "A wheel fetched elsewhere can be passed with --wheel FILE";
/// What to do where NVIDIA's libraries cannot be fetched.
pub(super) const WITHOUT_LIBRARIES: &str = "Libraries that are here already are used if their folder is in LD_LIBRARY_PATH; --cuda-libraries never installs without them";

/// A Python's pip, about to fetch something.
pub(super) struct Pip<'a> {
    /// The Python.
    pub(super) python: &'a Path,
    /// What is to be fetched, for messages.
    pub(super) what: String,
    /// What to do if it cannot be, for messages.
    pub(super) instead: &'static str,
}

impl Pip<'_> {
    /// Fetches wheels for these requirements into the empty `folder`, with what they need themselves if `with_needs`.
    pub(super) fn download(
        &self,
        requirements: &[String],
        with_needs: bool,
        folder: &Path,
    ) -> Result<Vec<PathBuf>, InstallError> {
        if !self.run(&["--version".as_ref()])?.status.success() {
            return Err(InstallError::NoPip { python: self.python.to_owned() });
        }
        let mut arguments = vec![OsStr::new("download")];
        arguments.extend(requirements.iter().map(OsStr::new));
        arguments.extend((!with_needs).then_some(OsStr::new("--no-deps")));
        let fixed = ["--only-binary=:all:", "--disable-pip-version-check", "--no-input", "-d"];
        arguments.extend(fixed.map(OsStr::new));
        arguments.push(folder.as_os_str());
        let output = self.run(&arguments)?;
        if !output.status.success() {
            let said = last_lines(&output.stderr);
            // pip ends in "no matching distribution" also if it reached no index; only then it warns of retries.
            let reached = !String::from_utf8_lossy(&output.stderr).contains("connection broken");
            return Err(if reached && said.contains("No matching distribution") {
                InstallError::NoWheel { what: self.what.clone(), said }
            } else {
                self.failed(said)
            });
        }
        let wheels =
            std::fs::read_dir(folder).map_err(|reason| InstallError::Write { path: folder.to_owned(), reason })?;
        let wheels = wheels.filter_map(Result::ok).map(|e| e.path());
        Ok(wheels.filter(|p| p.extension().is_some_and(|e| e == "whl")).collect())
    }

    /// The error of a pip that `said` this last.
    pub(super) fn failed(&self, said: String) -> InstallError {
        InstallError::Fetch { what: self.what.clone(), instead: self.instead, said }
    }

    fn run(&self, arguments: &[&OsStr]) -> Result<Output, InstallError> {
        let mut command = Command::new(self.python);
        let output = command.args(["-m", "pip"]).args(arguments).stdin(Stdio::null()).output();
        output.map_err(|reason| InstallError::NoPython { python: self.python.to_owned(), reason })
    }
}

/// The end of what a program said, on one line.
fn last_lines(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let lines: Vec<&str> =
        text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with("[notice]")).collect();
    let from = lines.len().saturating_sub(3);
    lines.get(from..).unwrap_or(&[]).join(" / ")
}
