//! The pages in the repository must equal the pages that the keys produce.
//! `UPDATE_GOLDEN=1 cargo test -p downbeat keys` writes them anew; read the difference.

use std::fmt::Write as _;
use std::path::Path;

use super::*;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The page of all options.
const REFERENCE: &str = "docs/reference/options.md";

const REFERENCE_HEAD: &str = "\
<!-- made of crates/downbeat/src/options/keys: UPDATE_GOLDEN=1 cargo test -p downbeat keys -->

# Options

Every option of `downbeat serve`, with its default. [Configure a server](../guide/configure.md) tells where options are
set, and which source wins. [examples/downbeat.toml](../../examples/downbeat.toml) has the same options as a file.

- A dot in a key is a table in `downbeat.toml`. The key `cuda.tf32` is `tf32` in the table `[cuda]`.
- The environment variable of a flag is its name in capitals after `DOWNBEAT_`. The variable of `--http-port` is
  `DOWNBEAT_HTTP_PORT`. Flags without a value have no variable.
- Two tables of the file are not in this list: [`[[device.groups]]`](../guide/device_policies.md#device-policies) and
  [`[placement]`](../guide/devices.md#placement).
";

const HEAD: &str = "\
# Every option of `downbeat serve`, with its default; what is commented out has none. A file of this kind is used if it is named with
# --config, or else lies in the current folder, or else in the model repository. The environment (DOWNBEAT_HTTP_PORT, ...) wins over it, and
# flags (--http-port, ...) over both. Paths are relative to this file. A section that is named in quotation marks is in docs/guide.
#
# This file is made of crates/downbeat/src/options/keys.
";

/// The settings belong to the policies. `docs/guide/device_policies.md` has a table of them by policy.
const GROUPS: &str = r#"
# Models with a policy and settings of their own (see "Device policies"); "*": all that no other group names.
# [[device.groups]]
#   models = ["encoder"]
#   policy = "windowed"
# All policies: requests of different lengths share batches, padded with zeros (checked at load: the answers must not change).
#   pad = true
#   max_length = 256
# windowed: how long the oldest request waits for others; fill: every batch is filled up to the largest with dummies; ahead: batches that are made
# while another runs, which nobody joins any more.
#   window_ms = 2
#   fill = false
#   ahead = 0
# elastic: the lanes ("naive", a table by load, or a file with one), the most items that run at once, and slots of the input ring.
#   mixes = { 4 = "4", 16 = "4,4,8" }
#   max_running = 16
#   ring_slots = 64
# staged, overlap: where the model is cut (stages of about equal time, or cut_at: names of tensors), pairs of buffers, how old a batch may be that
# others join, when they join ("if-sooner" or "always"), and policies I, II and III: true, false or "auto".
#   stages = 4
#   buffer_pairs = 2
#   comp_wait_ms = 5
#   joining = "if-sooner"
#   lengths = "auto"
#   operators = "auto"
#   load = "auto"
# staged, for models with several exits: a request is answered after `output` if some value in each of its vectors is at least `confidence`;
# the outputs in `answers`, which have no value then, are answered with it.
#   exits = [{ output = "early", confidence = 0.9, answers = ["late"] }]

# The devices of models that are not on all of them, by their numbers from 0 (see "Placement").
[placement]
# digits = [0, 1]

# One model. This wins over its config.pbtxt.
[models.digits]
"#;

/// Adds a comment in lines of at most 140 characters, and the key with its default, or with an
/// example if it has no default.
fn example<D>(page: &mut String, key: &Key<D>) {
    let without = if key.without.is_empty() { String::new() } else { format!(" Left out: {}.", key.without) };
    let mut line = "#".to_owned();
    for word in format!("{}.{without}", key.help).split(' ') {
        if line.len() + word.len() > 139 {
            writeln!(page, "{line}").unwrap();
            "#".clone_into(&mut line);
        }
        write!(line, " {word}").unwrap();
    }
    writeln!(page, "{line}").unwrap();
    let name = key.path.rsplit('.').next().unwrap();
    match key.example {
        example if key.path == "repository" => writeln!(page, "{name} = {example}").unwrap(),
        "" => writeln!(page, "{name} = {}", key.default).unwrap(),
        example => writeln!(page, "# {name} = {example}").unwrap(),
    }
}

fn example_file() -> String {
    let mut page = HEAD.to_owned();
    let table = |key: &Key<Draft>| key.path.rsplit_once('.').map_or("", |(table, _)| table);
    let mut keys: Vec<_> = KEYS.iter().filter(|key| !key.path.is_empty() && !key.is_hidden).collect();
    // Keys outside of all tables come first. Device groups are a table inside a table and come
    // last.
    keys.sort_by_key(|key| (!table(key).is_empty(), table(key) == "device"));
    let mut before = "";
    for key in keys {
        if table(key) == before {
            page.push('\n');
        } else {
            before = table(key);
            writeln!(page, "\n[{before}]").unwrap();
        }
        example(&mut page, key);
    }
    page.push_str(GROUPS);
    MODEL_KEYS.iter().for_each(|key| example(&mut page, key));
    page
}

/// The first section that a help text names, with the text before and after it.
fn section_of(help: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = help.split_once("see \"")?;
    let (section, after) = rest.split_once('"')?;
    Some((before, section, after))
}

/// The page of `docs/guide` that has a section. Exactly one page must have it, so that the help
/// text of an option can name the section alone.
fn page_of(section: &str) -> String {
    let has_section = |text: &str| text.lines().any(|line| line.trim_start_matches('#') == format!(" {section}"));
    let pages = std::fs::read_dir(Path::new(ROOT).join("docs/guide")).unwrap().map(|page| page.unwrap().path());
    let mut with_section: Vec<_> = pages.filter(|page| has_section(&std::fs::read_to_string(page).unwrap())).collect();
    let page = with_section.pop().unwrap_or_else(|| panic!("no page of docs/guide has the section '{section}'"));
    assert!(with_section.is_empty(), "two pages of docs/guide have the section '{section}'");
    page.file_name().unwrap().to_str().unwrap().to_owned()
}

fn row<D>(page: &mut String, prefix: &str, key: &Key<D>) {
    let code = |text: String| if text.is_empty() { text } else { format!("`{text}`") };
    let path = if key.path.is_empty() { String::new() } else { format!("{prefix}{}", key.path) };
    let flag = if key.flag.is_empty() { String::new() } else { format!("--{}", key.flag) };
    let values = if key.arity == Arity::Bare { "" } else { &key.values };
    let default = if key.without.is_empty() { code(key.default.clone()) } else { key.without.to_owned() };
    let mut what = key.help.clone();
    while let Some((before, section, after)) = section_of(&what) {
        let (guide, anchor) = (page_of(section), section.to_lowercase().replace(' ', "-"));
        what = format!("{before}see [{section}](../guide/{guide}#{anchor}){after}");
    }
    writeln!(page, "| {} | {} | {values} | {default} | {what} |", code(path), code(flag)).unwrap();
}

const COLUMNS: &str = "\n| key | flag | values | default | meaning |\n|---|---|---|---|---|\n";

fn reference() -> String {
    let mut page = REFERENCE_HEAD.to_owned();
    let mut before = "none yet";
    for key in KEYS.iter().filter(|key| !key.is_hidden) {
        if key.heading != before {
            before = key.heading;
            let title = if before.is_empty() { "Repository" } else { before };
            write!(page, "\n## {title}\n{COLUMNS}").unwrap();
        }
        row(&mut page, "", key);
    }
    let of_one_model = "An option of one model wins over its [config.pbtxt](config_pbtxt.md).";
    write!(page, "\n## One model\n\n{of_one_model}\n{COLUMNS}").unwrap();
    MODEL_KEYS.iter().for_each(|key| row(&mut page, "models.NAME.", key));
    page
}

fn is_in_the_repository(file: &str, made: String) {
    let path = Path::new(ROOT).join(file);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(path, made).unwrap();
    } else {
        let there = std::fs::read_to_string(&path).unwrap();
        assert!(there == made, "{file} is not what the keys say: UPDATE_GOLDEN=1 cargo test -p downbeat keys");
    }
}

#[test]
fn the_example_file_is_made_of_the_keys() {
    is_in_the_repository("examples/downbeat.toml", example_file());
}

#[test]
fn the_reference_is_made_of_the_keys() {
    is_in_the_repository(REFERENCE, reference());
}

fn guide(page: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join("docs/guide").join(page)).unwrap()
}

#[test]
fn the_guide_names_all_flags_of_triton() {
    let page = guide("triton.md");
    let flags = KEYS.iter().filter(|key| key.is_hidden && !key.flag.is_empty()).map(|key| key.flag);
    for flag in flags.chain(KEYS.iter().map(|key| key.alias).filter(|alias| !alias.is_empty())) {
        assert!(page.contains(&format!("`--{flag}")), "{flag}");
    }
}

#[test]
fn the_guide_names_all_settings_of_policies() {
    let page = guide("device_policies.md");
    for policy in PolicyName::all() {
        for setting in policy.keys() {
            let mut rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
            let row = rows.find(|(names, _)| names.contains(&format!("`{setting}`"))).map(|(_, rest)| rest);
            let policies = row.and_then(|rest| rest.split(" | ").next()).unwrap_or_default();
            let is_said = match policies.strip_prefix("all but ") {
                Some(others) => !others.contains(policy.name()),
                None => policies.contains(policy.name()),
            };
            assert!(is_said, "{setting} of {policy}: '{policies}'");
        }
    }
}

#[test]
fn no_two_options_have_one_name() {
    // A key and its flag may have the same name, and so may keys of different tables.
    let names = KEYS.iter().flat_map(|key| [key.path, if key.path == key.flag { "" } else { key.flag }, key.alias]);
    let mut names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    let twice: Vec<_> = names.windows(2).filter(|pair| pair[0] == pair[1]).collect();
    assert!(twice.is_empty(), "{twice:?}");
}

#[test]
fn an_example_is_a_value() {
    let text: String = KEYS
        .iter()
        .filter(|key| !key.example.is_empty())
        .map(|key| format!("{} = {}\n", key.path, key.example))
        .collect();
    let models: String = MODEL_KEYS.iter().map(|key| format!("models.m.{} = {}\n", key.path, key.example)).collect();
    crate::options::options_file::apply_text(&(text + &models), Path::new(""), &mut Draft::default()).unwrap();
}
