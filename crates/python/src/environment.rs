//! The Python that runs a model: the server's choice, or an environment that the model's
//! configuration names. Example: `EXECUTION_ENV_PATH` is `/envs/nlp.tar.gz`, which conda-pack made.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use downbeat_engine::PythonOptions;
use flate2::read::GzDecoder;
use tar::Archive;

/// The name of Triton for the model's folder in `EXECUTION_ENV_PATH`.
const MODEL_FOLDER: &str = "$$TRITON_MODEL_DIRECTORY";
/// Most files of an archive.
const MOST_FILES: u64 = 1_000_000;
/// Most bytes that an archive unpacks to.
const MOST_BYTES: u64 = 64 << 30;

/// A Python, and the variables that its processes get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interpreter {
    pub program: PathBuf,
    pub environment: Vec<(OsString, OsString)>,
}

impl Interpreter {
    /// The Python for a model. An archive is unpacked into a folder of `cache`, once.
    ///
    /// # Errors
    /// A text, if the environment cannot be used.
    pub fn of(options: &PythonOptions, cache: Option<&Path>) -> Result<Interpreter, String> {
        let Some(written) = options.environment.as_deref().filter(|written| !written.is_empty()) else {
            return Ok(Interpreter { program: options.interpreter.clone(), environment: Vec::new() });
        };
        let path = PathBuf::from(written.replace(MODEL_FOLDER, &options.folder.to_string_lossy()));
        let path = options.folder.join(path);
        let wrong = |reason: String| format!("parameter EXECUTION_ENV_PATH is '{written}': {reason}");
        let metadata = fs::metadata(&path).map_err(|error| wrong(error.to_string()))?;
        let folder = if metadata.is_dir() {
            path
        } else {
            let cache = cache.ok_or_else(|| {
                wrong(
                    "there is no folder for caches to unpack it to; set HOME, or name a folder of an environment"
                        .into(),
                )
            })?;
            unpacked(&path, &metadata, &cache.join("python-environments")).map_err(wrong)?
        };
        Interpreter::in_folder(&folder).map_err(wrong)
    }

    /// The Python of an environment: a venv, or an environment of conda.
    fn in_folder(folder: &Path) -> Result<Interpreter, String> {
        let bin = folder.join("bin");
        let mut programs = ["python3", "python"].iter().map(|name| bin.join(name));
        let program = programs.find(|program| program.is_file()).ok_or_else(|| {
            format!("{} has no Python; expected a venv, or an archive that conda-pack made", bin.display())
        })?;
        let mut path = bin.into_os_string();
        if let Some(before) = std::env::var_os("PATH").filter(|before| !before.is_empty()) {
            path.push(":");
            path.push(before);
        }
        let name = if folder.join("pyvenv.cfg").is_file() { "VIRTUAL_ENV" } else { "CONDA_PREFIX" };
        let environment = vec![("PATH".into(), path), (name.into(), folder.as_os_str().to_owned())];
        Ok(Interpreter { program, environment })
    }
}

/// The folder with the content of an archive. Archives of equal names, sizes and times share it.
fn unpacked(archive: &Path, metadata: &fs::Metadata, cache: &Path) -> Result<PathBuf, String> {
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    let stem: String = archive.file_name().unwrap_or_default().to_string_lossy().chars().take(64).collect();
    let key = format!("{stem}-{}-{}", metadata.len(), modified.as_nanos());
    let folder = cache.join(key);
    if folder.is_dir() {
        return Ok(folder);
    }
    let failed = |error: io::Error| format!("it cannot be unpacked to {}: {error}", cache.display());
    fs::create_dir_all(cache).map_err(failed)?;
    let fresh = tempfile::Builder::new().prefix(".unpacking-").tempdir_in(cache).map_err(failed)?;
    let file = BufReader::new(File::open(archive).map_err(failed)?);
    unpack(GzDecoder::new(file), fresh.path()).map_err(|reason| match reason.kind() {
        io::ErrorKind::InvalidInput => {
            format!("it is no archive of an environment (tar.gz), as conda-pack makes it: {reason}")
        }
        _ => failed(reason),
    })?;
    let fresh = fresh.keep();
    if let Err(error) = fs::rename(&fresh, &folder) {
        let _ = fs::remove_dir_all(&fresh);
        // Another load may have unpacked the same archive meanwhile.
        return if folder.is_dir() { Ok(folder) } else { Err(failed(error)) };
    }
    Ok(folder)
}

/// Unpacks an archive. No file leaves the folder, and a link leads no file out of it.
fn unpack(archive: impl io::Read, folder: &Path) -> io::Result<()> {
    let refused = |reason: String| io::Error::new(io::ErrorKind::InvalidInput, reason);
    let mut archive = Archive::new(archive);
    archive.set_preserve_permissions(true);
    archive.set_overwrite(false);
    let (mut files, mut bytes) = (0u64, 0u64);
    for entry in archive.entries()? {
        let mut entry = entry.map_err(|error| refused(error.to_string()))?;
        files += 1;
        bytes = bytes.saturating_add(entry.size());
        if files > MOST_FILES || bytes > MOST_BYTES {
            return Err(refused(format!(
                "it has more than {MOST_FILES} files or {MOST_BYTES} bytes, the most that are unpacked"
            )));
        }
        let path = entry.path()?.into_owned();
        let kind = entry.header().entry_type();
        if !(kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_hard_link()) {
            return Err(refused(format!("{} is no file, folder or link", path.display())));
        }
        if !entry.unpack_in(folder)? {
            return Err(refused(format!("{} lies outside the archive's own folder", path.display())));
        }
    }
    if files == 0 {
        return Err(refused("it is empty".to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn options(environment: Option<&str>, folder: &Path) -> PythonOptions {
        PythonOptions {
            folder: folder.to_owned(),
            interpreter: "python3".into(),
            environment: environment.map(str::to_owned),
            ..PythonOptions::default()
        }
    }

    /// An archive of an executable file with this path.
    fn archive(at: &Path, path: &str) {
        let mut builder = tar::Builder::new(GzEncoder::new(File::create(at).unwrap(), Compression::fast()));
        let mut header = tar::Header::new_gnu();
        header.set_size(2);
        header.set_mode(0o755);
        // `set_path` refuses the paths that the test needs.
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.set_cksum();
        builder.append(&header, &b"#!"[..]).unwrap();
        builder.into_inner().unwrap().finish().unwrap().flush().unwrap();
    }

    #[test]
    fn an_archive_is_unpacked_once_and_its_python_is_found() {
        let folder = tempfile::tempdir().unwrap();
        archive(&folder.path().join("env.tar.gz"), "bin/python3");
        let named = options(Some("$$TRITON_MODEL_DIRECTORY/env.tar.gz"), folder.path());
        let cache = folder.path().join("cache");
        let found = Interpreter::of(&named, Some(&cache)).unwrap();
        assert!(found.program.starts_with(&cache) && found.program.ends_with("bin/python3"));
        assert_eq!(fs::metadata(&found.program).unwrap().permissions().mode() & 0o777, 0o755);
        fs::write(&found.program, "kept").unwrap();
        assert_eq!(Interpreter::of(&named, Some(&cache)).unwrap(), found);
        assert_eq!(fs::read(&found.program).unwrap(), b"kept", "it is not unpacked again");
        let unnamed = Interpreter::of(&options(None, folder.path()), None).unwrap();
        assert_eq!(unnamed, Interpreter { program: "python3".into(), environment: Vec::new() });
    }

    #[test]
    fn an_archive_that_reaches_out_of_its_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        for path in ["../outside", "bin/../../outside"] {
            archive(&folder.path().join("env.tar.gz"), path);
            let refused = Interpreter::of(&options(Some("env.tar.gz"), folder.path()), Some(&cache)).unwrap_err();
            assert!(refused.contains("lies outside the archive's own folder"), "{refused}");
        }
        assert!(!folder.path().join("outside").exists() && !cache.join("outside").exists());
        assert_eq!(fs::read_dir(cache.join("python-environments")).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn what_is_no_environment_is_refused_with_the_parameter() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("text"), "no archive").unwrap();
        fs::create_dir(folder.path().join("empty")).unwrap();
        let refused =
            |name: &str, cache: Option<&Path>| Interpreter::of(&options(Some(name), folder.path()), cache).unwrap_err();
        let cache = folder.path().join("cache");
        let text = refused("text", Some(&cache));
        assert!(text.starts_with("parameter EXECUTION_ENV_PATH is 'text': it is no archive"), "{text}");
        assert!(refused("empty", None).contains("has no Python; expected a venv"));
        assert!(refused("missing", None).contains("No such file"));
        assert!(refused("text", None).contains("set HOME"));
    }
}
