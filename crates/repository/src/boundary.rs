//! The boundary of a model repository. Symbolic links cross it only if an option allows that.

use std::io;
use std::path::{Component, Path, PathBuf};

/// The folder of a repository, and whether symbolic links may lead to files outside that folder.
#[derive(Clone, Debug, Default)]
pub(crate) struct Boundary {
    /// The folder with symbolic links resolved.
    root: PathBuf,
    /// Whether to follow symbolic links that lead out of the folder.
    follows_symlinks: bool,
}

impl Boundary {
    /// The boundary of `folder`, which no symbolic link may cross.
    ///
    /// # Errors
    /// If the folder cannot be found.
    pub(crate) fn of(folder: &Path) -> io::Result<Self> {
        Ok(Boundary { root: folder.canonicalize()?, follows_symlinks: false })
    }

    /// The same boundary. With `follows_symlinks`, symbolic links may cross it.
    pub(crate) fn with_follow_symlinks(self, follows_symlinks: bool) -> Self {
        Boundary { follows_symlinks, ..self }
    }

    /// Whether symbolic links that lead out of the folder are followed.
    pub(crate) fn follows_symlinks(&self) -> bool {
        self.follows_symlinks
    }

    /// The folder with symbolic links resolved.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Checks that `path`, which begins with [`Boundary::root`], leads to a file or folder that may
    /// be read.
    ///
    /// # Errors
    /// If there is no file or folder, or a symbolic link leads out of the repository and such links
    /// are not followed.
    pub(crate) fn check(&self, path: &Path) -> Result<(), String> {
        match path.canonicalize() {
            Ok(real) if self.follows_symlinks || real.starts_with(&self.root) => Ok(()),
            Ok(real) => Err(format!(
                "the path is a symbolic link to {}, outside the repository; --follow-symlinks (follow_symlinks = true \
                 in downbeat.toml) lets the server read the target",
                real.display()
            )),
            Err(error) => Err(reason(path, &error)),
        }
    }

    /// The path of `file`, which is written relative to `folder`, a folder of the repository. The
    /// path may climb into other folders of the repository (`../shared/tokenizer.json`).
    ///
    /// # Errors
    /// As [`Boundary::check`]; if the file is written as an absolute path, or climbs out of the
    /// repository.
    pub(crate) fn resolve(&self, folder: &Path, file: &Path) -> Result<PathBuf, String> {
        let depth = folder.strip_prefix(&self.root).map_or(0, |inside| inside.components().count());
        let climbed = file.components().try_fold(depth, |depth, component| match component {
            Component::Normal(_) => Some(depth + 1),
            Component::CurDir => Some(depth),
            Component::ParentDir => depth.checked_sub(1),
            Component::RootDir | Component::Prefix(_) => None,
        });
        if climbed.is_none() {
            return Err(format!("'{}' does not name a file inside the model repository", file.display()));
        }
        let path = folder.join(file);
        self.check(&path).map_err(|reason| format!("{}: {reason}", path.display()))?;
        Ok(path)
    }
}

/// The reason why nothing can be read at `path`, after `error`. For a symbolic link, it names the
/// target.
pub(crate) fn reason(path: &Path, error: &io::Error) -> String {
    let target = path.read_link().ok();
    let leads =
        |how: &str| target.as_ref().map(|target| format!("the path is a symbolic link to {}, {how}", target.display()));
    match error.kind() {
        io::ErrorKind::NotFound => {
            leads("which leads to no file that exists").unwrap_or_else(|| "no such file or folder".to_owned())
        }
        io::ErrorKind::NotADirectory => "the path or a part of it is not a folder".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        // The standard library has no stable kind for this error.
        _ if error.raw_os_error() == Some(LOOP) => leads("which leads back to itself")
            .unwrap_or_else(|| "the path leads through a circle of symbolic links".to_owned()),
        _ => error.to_string(),
    }
}

/// The number of the error `ELOOP`.
const LOOP: i32 = if cfg!(target_os = "linux") { 40 } else { 62 };

/// Whether there is an entry at `path`, even a symbolic link that leads nowhere.
pub(crate) fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}
