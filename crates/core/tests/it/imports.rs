//! Reads the `use` lines of all crates: `core` and `roles` are pure, and files import each other in
//! small circles only.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// By path without the suffix (`mod.rs` by its folder, `lib.rs` by nothing): the code without comments and unit tests.
type Files = BTreeMap<String, String>;

fn read(folder: &Path, below: &str, files: &mut Files) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if entry.path().is_dir() {
            read(&entry.path(), &format!("{below}{name}/"), files);
        } else if let Some(stem) = name.strip_suffix(".rs") {
            let is_folder = matches!(stem, "mod" | "lib");
            let name = if is_folder { below.trim_end_matches('/').to_owned() } else { format!("{below}{stem}") };
            let text = fs::read_to_string(entry.path()).unwrap();
            let tests = ["\n#[cfg(test)]\nmod tests {", "\n#[cfg(all(test"].map(|begin| text.find(begin));
            let code = &text[..tests.into_iter().flatten().min().unwrap_or(text.len())];
            let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
            files.insert(name, code.collect::<Vec<_>>().join("\n"));
        }
    }
}

fn files_of(name: &str) -> Files {
    let mut files = Files::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src"), "", &mut files);
    assert!(!files.is_empty(), "{name} has files");
    files
}

/// The paths of a `use` tree.
fn paths(tree: &str, before: &str, found: &mut Vec<String>) {
    let Some((path, list)) = tree.split_once('{') else {
        found.push(format!("{before}{}", tree.trim()));
        return;
    };
    let before = format!("{before}{}", path.trim());
    let (mut depth, mut start) = (0, 0);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                if !list[start..at].trim().is_empty() {
                    paths(&list[start..at], &before, found);
                }
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// All paths that a file uses, as they are written.
fn uses(code: &str) -> Vec<String> {
    let (mut found, mut rest) = (Vec::new(), code);
    while let Some((before, after)) = rest.split_once("use ") {
        let line = before.rsplit('\n').next().unwrap().trim();
        rest = after;
        // The word, and not the end of one such as `Cause`.
        let is_word = before.chars().next_back().is_none_or(char::is_whitespace);
        if line.is_empty() || (is_word && line.starts_with("pub")) {
            let (tree, left) = after.split_once(';').unwrap();
            paths(tree, "", &mut found);
            rest = left;
        }
    }
    found
}

/// The paths that begin with `crate::` and stand elsewhere than in a `use` line.
fn inline_paths(code: &str) -> Vec<String> {
    let path = |at: usize| {
        let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        code[at..].split(|c| !is_part(c)).next().unwrap().trim_end_matches(':').to_owned()
    };
    let starts = code.match_indices("crate::").filter(|(at, _)| !code[..*at].ends_with('$'));
    starts.map(|(at, _)| path(at)).filter(|path| path.matches("::").count() > 1).collect()
}

/// The file that a path leads to, if it is one of these. A name that another file re-exports leads
/// to the file that has it.
fn target(file: &str, path: &str, files: &Files) -> Option<String> {
    resolve(file, path, files, 4)
}

/// `hops`: how many re-exports are followed.
fn resolve(file: &str, path: &str, files: &Files, hops: u32) -> Option<String> {
    let mut at: Vec<&str> = file.split('/').filter(|part| !part.is_empty()).collect();
    let is_known = |at: &[&str], part: &str| files.contains_key(&[at, &[part]].concat().join("/"));
    for (number, part) in path.split("::").enumerate() {
        match part {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()),
            part if is_known(&at, part) => at.push(part),
            _ if number == 0 => return None,
            part => {
                let here = at.join("/");
                let exported = files.get(&here).and_then(|code| re_export(code, part)).filter(|_| hops > 0);
                return exported.and_then(|path| resolve(&here, &path, files, hops - 1)).or(Some(here));
            }
        }
    }
    Some(at.join("/"))
}

/// The path behind a name that a file re-exports.
fn re_export(code: &str, name: &str) -> Option<String> {
    let lines = code.match_indices("pub use ").chain(code.match_indices("pub(crate) use "));
    lines.into_iter().find_map(|(at, word)| {
        let mut found = Vec::new();
        paths(code[at + word.len()..].split(';').next().unwrap(), "", &mut found);
        found.into_iter().find(|path| path.rsplit("::").next() == Some(name))
    })
}

/// The circles of imports: in each, every file leads to every other file.
fn circles(files: &Files) -> BTreeSet<BTreeSet<String>> {
    let imports = |(file, code): (&String, &String)| {
        let paths = uses(code).into_iter().chain(inline_paths(code));
        let to: BTreeSet<_> = paths.filter_map(|path| target(file, &path, files)).filter(|to| to != file).collect();
        (file.clone(), to)
    };
    let imports: BTreeMap<String, BTreeSet<String>> = files.iter().map(imports).collect();
    let reached = |from: &String| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(file) = open.pop() {
            for to in imports.get(&file).into_iter().flatten() {
                if seen.insert(to.clone()) {
                    open.push(to.clone());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&String, BTreeSet<String>> = imports.keys().map(|file| (file, reached(file))).collect();
    let circle = |file: &String| -> BTreeSet<String> {
        reached[file].iter().filter(|other| reached[*other].contains(file)).cloned().collect()
    };
    imports.keys().map(circle).filter(|circle| !circle.is_empty()).collect()
}

/// No circle has more than three files.
#[test]
fn files_import_each_other_in_small_circles_only() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut crates: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    crates.sort();
    assert!(crates.len() > 10, "{crates:?}");
    for name in crates {
        for circle in circles(&files_of(&name)) {
            assert!(circle.len() <= 3, "{name}: {} files import each other: {circle:?}", circle.len());
        }
    }
}

#[test]
fn no_files_import_each_other() {
    for name in ["core", "driver", "roles"] {
        assert_eq!(circles(&files_of(name)), BTreeSet::new(), "{name}");
    }
}

#[test]
fn a_circle_is_found() {
    let file = |name: &str, code: &str| (name.to_owned(), code.to_owned());
    let files = Files::from([
        file("", "mod a;\npub use a::{A, sub::Sub};"),
        file("a", "use super::b::{self, B};\nuse std::fmt;"),
        file("a/sub", "use super::A;"),
        file("b", "use crate::{\n    a::{\n        sub::Sub,\n    },\n    c::C,\n};"),
        file("c", ""),
    ]);
    assert_eq!(circles(&files), [["a", "a/sub", "b"].map(str::to_owned).into()].into());
    let re_exported = Files::from([
        file("", "mod a;\nmod b;\npub use a::A;"),
        file("a", "use crate::b::B;"),
        file("b", "use crate::A;"),
    ]);
    assert_eq!(circles(&re_exported), [["a", "b"].map(str::to_owned).into()].into(), "by the root's re-export");
}

/// ARCHITECTURE.md: no clock, thread, lock, async, socket, file or random source; no hash map whose order shows.
#[test]
fn core_and_roles_import_nothing_impure() {
    let pure =
        ["borrow", "cmp", "collections", "error", "fmt", "iter", "marker", "mem", "ops", "ptr", "str", "sync::Arc"];
    let crates = ["crate", "super", "self", "std", "serde", "serde_json", "postcard", "thiserror"];
    imports_nothing_impure("core", &pure, &crates);
    // Keyed hashes of claims, whose keys come from outside.
    let pure = [&pure[..], &["hash::Hasher"]].concat();
    let crates = ["crate", "super", "self", "std", "serde", "siphasher", "downbeat_core"];
    imports_nothing_impure("roles", &pure, &crates);
}

fn imports_nothing_impure(name: &str, pure: &[&str], crates: &[&str]) {
    let files = files_of(name);
    for (file, code) in &files {
        for path in uses(code) {
            let (first, rest) = path.split_once("::").unwrap_or((&path, ""));
            let is_known = crates.contains(&first) || target(file, &path, &files).is_some();
            assert!(is_known, "{name}/{file} uses {path}: a crate that may not be pure");
            let is_pure = first != "std" || pure.iter().any(|pure| rest.starts_with(pure));
            let has_order = !["HashMap", "HashSet"].iter().any(|unordered| rest.contains(unordered));
            assert!(is_pure && has_order, "{name}/{file} uses {path}: {name} is pure");
        }
        for (at, _) in code.match_indices("std::") {
            let word = code[at + 5..].split(|c: char| !c.is_alphanumeric()).next().unwrap();
            let impure = ["env", "fs", "io", "net", "process", "thread", "time"];
            // A length of time, not a clock.
            let is_pure = !impure.contains(&word) || code[at..].starts_with("std::time::Duration");
            assert!(is_pure, "{name}/{file} names std::{word}: {name} is pure");
        }
    }
}

/// A new device policy is a file and a line in the table: no other crate matches on its name.
/// `exclusive` and `auto` are the two names with a meaning of their own.
#[test]
fn other_crates_know_device_policies_only_by_the_table() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for entry in fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name == "core" {
            continue;
        }
        for (file, code) in files_of(&name) {
            for (at, _) in code.match_indices("PolicyName::") {
                let constant = code[at + 12..].split(|c: char| !c.is_alphanumeric()).next().unwrap();
                let is_constant = constant.chars().all(char::is_uppercase);
                // The offline advice knows which settings of three policies are worth a try.
                let may = ["EXCLUSIVE", "AUTO"].contains(&constant) || file == "device_replay/candidate";
                assert!(may || !is_constant, "{name}: {file} knows the policy {constant}");
            }
        }
    }
}
