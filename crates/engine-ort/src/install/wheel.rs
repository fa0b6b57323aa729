//! Python wheels, and the libraries in them.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use zip::ZipArchive;

use super::InstallError;
use crate::cuda::Provider;
use crate::library::library_version;

/// The largest library that is unpacked, bytes; the CUDA provider of version 1.31.1 has 284
/// million, cuBLAS 552 million.
const LIBRARY_LIMIT: u64 = 2 << 30;
/// The largest list of requirements that is read, bytes.
const METADATA_LIMIT: u64 = 1 << 20;
/// The major version of CUDA whose libraries [`crate::cuda::libraries`] knows.
const CUDA: u32 = 13;

/// A wheel.
pub(super) struct Wheel {
    path: PathBuf,
    /// The package that the wheel should have.
    package: &'static str,
    archive: ZipArchive<BufReader<File>>,
}

/// A file in a wheel.
#[derive(Clone, Debug)]
pub(super) struct WheelEntry {
    path: String,
    /// The file's name, without folders.
    pub(super) name: String,
}

impl Wheel {
    pub(super) fn open(path: &Path, package: &'static str) -> Result<Wheel, InstallError> {
        let error = |reason: String| no_wheel(path, package, &reason);
        let file = File::open(path).map_err(|e| error(e.to_string()))?;
        let archive = ZipArchive::new(BufReader::new(file)).map_err(|e| error(format!("not a wheel: {e}")))?;
        Ok(Wheel { path: path.to_owned(), package, archive })
    }

    fn error(&self, reason: impl Into<String>) -> InstallError {
        no_wheel(&self.path, self.package, &reason.into())
    }

    /// Library files directly in a folder whose path `wanted` accepts. The file name tells a
    /// library.
    fn libraries(&self, wanted: impl Fn(&str) -> bool) -> Vec<WheelEntry> {
        let paths = self.archive.file_names().filter_map(|path| Some(path.ok()?.into_owned()));
        let entries = paths.filter_map(|path| {
            let (folder, name) = path.rsplit_once('/')?;
            let is_library = name.ends_with(".so") || name.contains(".so.") || name.ends_with(".dylib");
            (wanted(folder) && is_library).then(|| WheelEntry { name: name.to_owned(), path: path.clone() })
        });
        entries.collect()
    }

    /// The newest onnxruntime library.
    pub(super) fn library(&self) -> Result<WheelEntry, InstallError> {
        let libraries = self.libraries(|folder| folder == CAPI);
        let versions = libraries.into_iter().filter_map(|entry| Some((library_version(&entry.name)?, entry)));
        let newest = versions.max_by(|(a, _), (b, _)| a.cmp(b));
        newest.map(|(_, entry)| entry).ok_or_else(|| self.error("it holds no onnxruntime library"))
    }

    /// onnxruntime's libraries, without those that only Python uses.
    pub(super) fn capi_libraries(&self) -> Vec<WheelEntry> {
        let mut entries = self.libraries(|folder| folder == CAPI);
        entries.retain(|entry| entry.name.starts_with("libonnxruntime"));
        entries
    }

    /// NVIDIA's libraries.
    pub(super) fn nvidia_libraries(&self) -> Vec<WheelEntry> {
        self.libraries(|folder| folder.starts_with("nvidia/") && folder.ends_with("/lib") && !folder.contains(".."))
    }

    /// Checks that the wheel is for GPUs (`gpu`), or for the CPU.
    pub(super) fn check_provider(&self, gpu: bool) -> Result<(), InstallError> {
        let provider = Provider::Cuda.library_file();
        match (self.capi_libraries().iter().any(|entry| entry.name == provider), gpu) {
            (true, true) | (false, false) => Ok(()),
            (false, true) => Err(self.error(format!("it is for the CPU: it holds no {provider}"))),
            (true, false) => Err(self.error("it is for GPUs; install it with --cuda")),
        }
    }

    /// NVIDIA's packages among the wheel's requirements, in pip's format.
    pub(super) fn nvidia_requirements(&mut self) -> Result<Vec<String>, InstallError> {
        let metadata = self.archive.file_names().filter_map(Result::ok).map(|name| name.into_owned());
        let metadata = { metadata }.find(|name| name.ends_with(".dist-info/METADATA"));
        let metadata = metadata.ok_or_else(|| self.error("it has no METADATA"))?;
        let mut text = String::new();
        let read = match self.archive.by_name(&metadata) {
            Ok(entry) => entry.take(METADATA_LIMIT).read_to_string(&mut text).map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        };
        read.map_err(|e| self.error(format!("cannot read its METADATA: {e}")))?;
        let requirements: Vec<String> = text.lines().filter_map(nvidia_requirement).collect();
        if requirements.is_empty() {
            return Err(self.error("it does not say which of NVIDIA's libraries it needs"));
        }
        if let Some(other) = requirements.iter().find(|r| cuda_of(r).is_some_and(|cuda| cuda != CUDA)) {
            return Err(self.error(format!("it is for another CUDA than {CUDA}: it needs {other}")));
        }
        Ok(requirements)
    }

    /// Unpacks files into `folder`. The files are on the disk when this returns.
    pub(super) fn unpack(&mut self, entries: &[WheelEntry], folder: &Path) -> Result<(), InstallError> {
        for WheelEntry { path, name } in entries {
            let (wheel, package) = (self.path.clone(), self.package);
            let error = |reason: String| no_wheel(&wheel, package, &reason);
            let mut packed = self.archive.by_name(path).map_err(|e| error(e.to_string()))?;
            if packed.size() > LIBRARY_LIMIT {
                return Err(error(format!("its library {name} has {} bytes", packed.size())));
            }
            let place = folder.join(name);
            let write = |reason| InstallError::write(&place, &reason);
            let mut to = File::create(&place).map_err(write)?;
            // Reads to the end, where the checksum is compared.
            io::copy(&mut packed, &mut to).map_err(|e| error(format!("cannot unpack the library {name}: {e}")))?;
            to.sync_all().map_err(write)?;
        }
        Ok(())
    }
}

fn no_wheel(wheel: &Path, package: &str, reason: &str) -> InstallError {
    let wheel = wheel.display();
    InstallError(format!("{wheel}: {reason}. Expected a wheel of the Python package {package} for this platform"))
}

/// The folder of onnxruntime's libraries in its wheels.
const CAPI: &str = "onnxruntime/capi";

/// The major version of CUDA in the name of a package, such as `nvidia-cudnn-cu13`.
fn cuda_of(requirement: &str) -> Option<u32> {
    requirement.split("-cu").skip(1).find_map(|rest| {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        rest.get(..digits)?.parse().ok()
    })
}

/// The requirement in a line of METADATA that is one of the extras `cuda` and `cudnn`.
fn nvidia_requirement(line: &str) -> Option<String> {
    let (requirement, marker) = line.strip_prefix("Requires-Dist:")?.split_once(';')?;
    let extra = marker.split_once("extra")?.1.trim_start_matches([' ', '=']);
    let extra = extra.trim().trim_matches(['"', '\'']);
    let requirement: String = requirement.chars().filter(|c| !c.is_whitespace()).collect();
    // A requirement with words of pip's options is ignored.
    (matches!(extra, "cuda" | "cudnn") && requirement.starts_with("nvidia-")).then_some(requirement)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_of_the_two_extras() {
        let requirement = |line: &str| nvidia_requirement(line);
        let said = requirement(r#"Requires-Dist: nvidia-cufft~=12.0; extra == "cuda""#);
        assert_eq!(said.as_deref(), Some("nvidia-cufft~=12.0"));
        let said = requirement("Requires-Dist: nvidia-cudnn-cu13 (~=9.0) ; extra == 'cudnn'");
        assert_eq!(said.as_deref(), Some("nvidia-cudnn-cu13(~=9.0)"));
        for other in [
            "Requires-Dist: numpy>=1.21.6",
            r#"Requires-Dist: sympy; extra == "symbolic""#,
            r#"Requires-Dist: --index-url=x; extra == "cuda""#,
            "nvidia-cufft~=12.0; extra == \"cuda\"",
        ] {
            assert_eq!(requirement(other), None, "{other}");
        }
    }
}
