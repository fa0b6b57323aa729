//! Scenario files: a script, a line of dashes, and the resulting timeline.

use std::path::PathBuf;

/// Runs the scenario of that name in a folder beside this file, and compares its timeline with the
/// file's. `UPDATE_SCENARIOS=1` writes the timeline anew.
#[track_caller]
pub fn check(folder: &str, name: &str, run: fn(&str) -> String) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/it/{folder}/{name}.txt"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (script, expected) = text.split_once("\n----\n").unwrap_or((text.trim_end(), ""));
    let actual = run(script);
    if std::env::var_os("UPDATE_SCENARIOS").is_some() {
        std::fs::write(&path, format!("{script}\n----\n{actual}")).unwrap();
        return;
    }
    if let Some((line, (e, a))) = expected.lines().zip(actual.lines()).enumerate().find(|(_, (e, a))| e != a) {
        panic!("{name}: line {} of the timeline\n  expected: {e}\n  actual:   {a}\n\nwhole:\n{actual}", line + 1);
    }
    assert_eq!(expected, actual, "{name}: length of the timeline\n\nwhole:\n{actual}");
}
