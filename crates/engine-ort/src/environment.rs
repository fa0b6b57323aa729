//! The Python environment that the program is installed in: the wheel `downbeat-server` puts the
//! program into the environment's `bin`, and onnxruntime into its packages. Reading the folders
//! takes some tens of microseconds, and starting Python a tenth of a second.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The largest part of a `pyvenv.cfg` that is read; the file has some hundred bytes.
const MOST_SETTINGS: u64 = 1 << 16;

/// The folders of Python packages that belong to the environment of `executable`, in the order of
/// the search. None, if the executable is not in a folder `bin`.
///
/// The function knows virtual environments (pipx and uv make such), `pip install --user`, `--target`
/// and `--prefix`, conda, and the packages of the system (`dist-packages` on Debian). `home` is the
/// user's home folder, whose packages an environment may share.
pub(crate) fn package_folders(executable: &Path, home: Option<&Path>) -> Vec<PathBuf> {
    let Some(bin) = executable.parent().filter(|folder| folder.file_name() == Some(OsStr::new("bin"))) else {
        return Vec::new();
    };
    let Some(environment) = bin.parent() else { return Vec::new() };
    let mut prefixes = vec![environment.to_owned()];
    if let Some(base) = shared_python(environment) {
        prefixes.extend(home.map(|home| home.join(".local")));
        prefixes.push(base);
    }
    // Debian's pip installs for all users there, with the system's Python.
    if prefixes.iter().any(|prefix| prefix == Path::new("/usr")) {
        prefixes.push("/usr/local".into());
    }
    let mut found: Vec<PathBuf> = prefixes.iter().flat_map(|prefix| in_prefix(prefix)).collect();
    // `pip install --target` puts packages beside `bin`.
    if environment.join("onnxruntime").is_dir() {
        found.push(environment.to_owned());
    }
    found
}

/// The folders of packages below a prefix; the newest Python comes first.
fn in_prefix(prefix: &Path) -> Vec<PathBuf> {
    // In a virtual environment `lib64` is a link to `lib`. Fedora's Python has packages with
    // libraries in `lib64` alone.
    let libraries = ["lib", "lib64"].map(|name| prefix.join(name)).into_iter().filter(|folder| !folder.is_symlink());
    let pythons = libraries.flat_map(|library| {
        let entries = std::fs::read_dir(library).into_iter().flatten().filter_map(Result::ok);
        entries.filter_map(|entry| Some((python_minor(entry.file_name().to_str()?)?, entry.path())))
    });
    let mut pythons: Vec<(u32, PathBuf)> = pythons.collect();
    pythons.sort_by(|(a, path), (b, other)| b.cmp(a).then_with(|| path.cmp(other)));
    let kinds = ["site-packages", "dist-packages"];
    let packages = pythons.into_iter().flat_map(|(_, python)| kinds.map(|kind| python.join(kind)));
    packages.filter(|folder| folder.is_dir()).collect()
}

/// The minor version in the name of a folder of Python 3, such as 13 for `python3.13`. A `t` at the
/// end is a Python without a global lock. `python3`, which Debian's packages share, counts as 0.
fn python_minor(name: &str) -> Option<u32> {
    match name.strip_prefix("python3")? {
        "" => Some(0),
        minor => minor.strip_prefix('.')?.trim_end_matches('t').parse().ok(),
    }
}

/// The prefix of the Python whose packages a virtual environment shares, by its `pyvenv.cfg`. Most
/// environments share none.
fn shared_python(environment: &Path) -> Option<PathBuf> {
    let mut text = String::new();
    File::open(environment.join("pyvenv.cfg")).ok()?.take(MOST_SETTINGS).read_to_string(&mut text).ok()?;
    let setting = |name: &str| {
        let mut pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs.find(|(key, _)| key.trim().eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    };
    setting("include-system-site-packages").filter(|value| value.eq_ignore_ascii_case("true"))?;
    Path::new(setting("home")?).parent().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes an environment of these folders. Returns the folders of packages that its
    /// `bin/downbeat` has, as relative paths.
    fn found(folders: &[&str], settings: &str) -> Vec<String> {
        let environment = tempfile::tempdir().expect("creates");
        for folder in folders {
            std::fs::create_dir_all(environment.path().join(folder)).expect("creates");
        }
        std::os::unix::fs::symlink("lib", environment.path().join("lib64")).expect("links");
        if !settings.is_empty() {
            std::fs::write(environment.path().join("pyvenv.cfg"), settings).expect("writes");
        }
        let home = environment.path().join("home");
        let found = package_folders(&environment.path().join("bin/downbeat"), Some(&home));
        let shorter = |path: PathBuf| path.strip_prefix(environment.path()).unwrap_or(&path).display().to_string();
        found.into_iter().map(shorter).collect()
    }

    #[test]
    fn the_newest_python_comes_first() {
        let folders = [
            "lib/python3.9/site-packages",
            "lib/python3.13t/site-packages",
            "lib/python3/dist-packages",
            "lib/python3.12/dist-packages",
            "lib/python3.11",
            "lib/python2.7/site-packages",
            "lib/python3.x/site-packages",
            "lib/perl/site-packages",
        ];
        let expected = [
            "lib/python3.13t/site-packages",
            "lib/python3.12/dist-packages",
            "lib/python3.9/site-packages",
            "lib/python3/dist-packages",
        ];
        assert_eq!(found(&folders, ""), expected);
    }

    #[test]
    fn packages_beside_bin_are_those_of_pip_with_a_target() {
        assert_eq!(found(&["onnxruntime/capi"], ""), [""]);
        assert!(found(&["lib"], "").is_empty());
    }

    #[test]
    fn an_environment_that_shares_packages_adds_the_users_and_the_systems() {
        let base = tempfile::tempdir().expect("creates");
        let shared = base.path().join("lib/python3.12/dist-packages");
        std::fs::create_dir_all(&shared).expect("creates");
        let folders = ["lib/python3.12/site-packages", "home/.local/lib/python3.12/site-packages"];
        let home = base.path().join("bin");
        let settings = |share: &str| {
            format!("home = {}\nInclude-System-Site-Packages = {share}\nversion = 3.12.1\n", home.display())
        };
        let all = [folders[0].to_owned(), folders[1].to_owned(), shared.display().to_string()];
        assert_eq!(found(&folders, &settings("true")), all);
        assert_eq!(found(&folders, &settings("false")), [folders[0]]);
        assert_eq!(found(&folders, "include-system-site-packages = true"), [folders[0]], "without a home");
    }

    #[test]
    fn a_program_of_a_build_folder_is_in_no_environment() {
        let build = tempfile::tempdir().expect("creates");
        std::fs::create_dir_all(build.path().join("lib/python3.12/site-packages")).expect("creates");
        for executable in [build.path().join("release/downbeat"), "downbeat".into(), "/".into(), "bin".into()] {
            assert!(package_folders(&executable, None).is_empty(), "{}", executable.display());
        }
    }
}
