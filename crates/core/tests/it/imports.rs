//! Checks the `use` lines of this crate and of `driver`: `core` is pure, and no files import each
//! other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// By path without the suffix (`mod.rs` by its folder, `lib.rs` by nothing): the code without
/// comments and unit tests.
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
            let code = text.split("#[cfg(test)]").flat_map(|part| part.split("#[cfg(all(test")).next().unwrap();
            let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
            files.insert(name, code.collect::<Vec<_>>().join("\n"));
        }
    }
}

fn files_of(name: &str) -> Files {
    let mut files = Files::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src"), "", &mut files);
    assert!(files.len() > 5, "{name} has files");
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

/// All paths that a file uses, in their written form.
fn uses(code: &str) -> Vec<String> {
    let (mut found, mut rest) = (Vec::new(), code);
    while let Some((before, after)) = rest.split_once("use ") {
        let line = before.rsplit('\n').next().unwrap().trim();
        rest = after;
        if line.is_empty() || line.starts_with("pub") {
            let (tree, left) = after.split_once(';').unwrap();
            paths(tree, "", &mut found);
            rest = left;
        }
    }
    found
}

/// The file that a path leads to, if it is one of these files.
fn target(file: &str, path: &str, files: &Files) -> Option<String> {
    let mut at: Vec<&str> = file.split('/').filter(|part| !part.is_empty()).collect();
    let is_known = |at: &[&str], part: &str| files.contains_key(&[at, &[part]].concat().join("/"));
    for (number, part) in path.split("::").enumerate() {
        match part {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()),
            part if is_known(&at, part) => at.push(part),
            _ if number == 0 => return None,
            _ => break,
        }
    }
    Some(at.join("/"))
}

/// The files that import each other, in circles.
fn circles(files: &Files) -> BTreeSet<String> {
    let imports = |(file, code): (&String, &String)| {
        let to: BTreeSet<_> = uses(code).iter().filter_map(|path| target(file, path, files)).collect();
        (file.clone(), to)
    };
    let mut left: BTreeMap<String, BTreeSet<String>> = files.iter().map(imports).collect();
    loop {
        let is_in_one = |file: &String| {
            let from = |(other, to): (&String, &BTreeSet<String>)| other != file && to.contains(file);
            left[file].iter().any(|to| to != file && left.contains_key(to)) && left.iter().any(from)
        };
        let rest: BTreeSet<_> = left.keys().filter(|file| is_in_one(file)).cloned().collect();
        if rest.len() == left.len() {
            return rest;
        }
        left.retain(|file, _| rest.contains(file));
    }
}

#[test]
fn no_files_import_each_other() {
    assert_eq!(circles(&files_of("driver")), BTreeSet::new());
    // The table of policies names each policy, and each describes itself in the table's words.
    let table = ["elastic", "granted", "overlapped", "settings", "staged", "table", "windowed"];
    assert_eq!(circles(&files_of("core")), table.map(|file| format!("device/{file}")).into());
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
    assert_eq!(circles(&files), ["a", "a/sub", "b"].map(str::to_owned).into());
}

/// ARCHITECTURE.md: no clock, thread, lock, async, socket, file or random source; no hash map whose
/// order shows.
#[test]
fn core_imports_nothing_impure() {
    let pure = ["borrow", "cmp", "collections", "error", "fmt", "iter", "mem", "ops", "ptr", "str", "sync::Arc"];
    let crates = ["crate", "super", "self", "std", "serde", "serde_json", "postcard", "thiserror"];
    let files = files_of("core");
    for (file, code) in &files {
        for path in uses(code) {
            let (first, rest) = path.split_once("::").unwrap_or((&path, ""));
            let is_known = crates.contains(&first) || target(file, &path, &files).is_some();
            assert!(is_known, "{file} uses {path}: a crate that may not be pure");
            let is_pure = first != "std" || pure.iter().any(|pure| rest.starts_with(pure));
            assert!(is_pure && !rest.contains("Hash"), "{file} uses {path}: core is pure");
        }
        for (at, _) in code.match_indices("std::") {
            let word = code[at + 5..].split(|c: char| !c.is_alphanumeric()).next().unwrap();
            let impure = ["env", "fs", "io", "net", "process", "thread", "time"];
            // A length of time, not a clock.
            let is_pure = !impure.contains(&word) || code[at..].starts_with("std::time::Duration");
            assert!(is_pure, "{file} names std::{word}: core is pure");
        }
    }
}
