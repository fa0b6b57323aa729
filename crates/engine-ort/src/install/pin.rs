//! The packages that may be fetched, with their hashes, written by `tools/pin_wheels.py`. The
//! hashes keep the operator of the package index from slipping in other libraries.

/// Lines of `NAME==VERSION --hash=sha256:HEX...`, as pip takes them, and comments.
const WHEELS: &str = include_str!("wheels.txt");
const NVIDIA: &str = "nvidia-";

/// Name, version and text of each line.
fn lines() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    WHEELS.lines().filter_map(|line| {
        let (name, version) = line.split_whitespace().next()?.split_once("==")?;
        Some((name, version, line))
    })
}

/// The requirements file for a version of a package; `None` if it is not known.
pub(super) fn package(name: &str, version: &str) -> Option<String> {
    let (_, _, line) = lines().find(|(its_name, its_version, _)| (*its_name, *its_version) == (name, version))?;
    Some(format!("{line}\n"))
}

/// The known versions of a package, in words.
pub(super) fn versions(name: &str) -> String {
    let versions: Vec<&str> =
        lines().filter(|(its_name, ..)| *its_name == name).map(|(_, version, _)| version).collect();
    versions.join(", ")
}

/// The requirements file for the packages of NVIDIA in `requirements`, and for their own
/// requirements.
///
/// # Errors
/// The first unknown package.
pub(super) fn nvidia(requirements: &[String]) -> Result<String, String> {
    for requirement in requirements {
        let end = requirement.find(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '.' && c != '_');
        let name = requirement.get(..end.unwrap_or(requirement.len())).unwrap_or_default();
        if !lines().any(|(known, ..)| known == name) {
            return Err(requirement.clone());
        }
    }
    Ok(lines().filter(|(name, ..)| name.starts_with(NVIDIA)).map(|(_, _, line)| format!("{line}\n")).collect())
}

/// The known packages of NVIDIA's, in words.
pub(super) fn nvidia_names() -> String {
    let names: Vec<&str> = lines().filter(|(name, ..)| name.starts_with(NVIDIA)).map(|(name, ..)| name).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_that_is_installed_is_known_with_all_that_it_needs() {
        for name in ["onnxruntime", "onnxruntime-gpu"] {
            let pinned = package(name, crate::install::VERSION).unwrap();
            let hashes: Vec<&str> = pinned.split_whitespace().skip(1).collect();
            assert!(hashes.len() >= 4, "a wheel for each Python: {pinned}");
            assert!(
                hashes.iter().all(|hash| hash.strip_prefix("--hash=sha256:").is_some_and(|hex| hex.len() == 64)),
                "{pinned}"
            );
        }
        assert_eq!(package("onnxruntime", "1.0.0"), None);
        let needs = ["nvidia-cublas~=13.0", "nvidia-cuda-runtime~=13.0", "nvidia-cudnn-cu13~=9.0"].map(str::to_owned);
        assert!(nvidia(&needs).unwrap().lines().count() >= 6);
        assert_eq!(nvidia(&["nvidia-cuddn~=9.0".to_owned()]), Err("nvidia-cuddn~=9.0".to_owned()));
    }
}
