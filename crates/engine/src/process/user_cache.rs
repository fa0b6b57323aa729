//! The folder for caches of the user who runs the program.

use std::ffi::OsString;
use std::path::PathBuf;

/// The user's folder for caches: `XDG_CACHE_HOME`, or `.cache` in `HOME`. `variable` gives variables
/// of the environment. An empty variable counts as none, and a relative path in `XDG_CACHE_HOME` too
/// (XDG Base Directory Specification).
pub fn user_cache(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("XDG_CACHE_HOME").filter(|path| path.is_absolute()).or_else(|| Some(set("HOME")?.join(".cache")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_caches_is_that_of_the_specification() {
        let folder = |cache: Option<&str>, home: Option<&str>| {
            user_cache(|name| if name == "HOME" { home } else { cache }.map(OsString::from))
        };
        assert_eq!(folder(Some("/c"), Some("/h")), Some("/c".into()));
        for cache in [None, Some(""), Some("relative")] {
            assert_eq!(folder(cache, Some("/h")), Some("/h/.cache".into()), "{cache:?}");
            assert_eq!(folder(cache, None), None, "{cache:?}");
        }
    }
}
