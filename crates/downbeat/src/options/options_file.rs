//! Reads `downbeat.toml`: options by their keys.

use std::io::{Error, ErrorKind};
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use downbeat_core::file_content;
use downbeat_repository::did_you_mean;
use serde::Deserialize;
use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use crate::options::device_groups;
use crate::options::draft::Draft;
use crate::options::forms::{Given, Written, list, number};
use crate::options::key::Key;
use crate::options::keys::{KEYS, MODEL_KEYS};

/// Largest options file, bytes.
pub const MAX_BYTES: u64 = 1 << 20;

/// Tables whose entries have names that users choose, and not keys.
const GROUPS: &str = "device.groups";
const PLACEMENT: &str = "placement";
const MODELS: &str = "models";
/// The tables of such names. Each names models.
pub const TABLES: [&str; 3] = [GROUPS, PLACEMENT, MODELS];

/// The byte of an error in a file, and its message.
pub type Misplaced = (usize, String);

/// Sets the options of the file at `path`.
///
/// # Errors
/// If the file cannot be read or is wrong, with the place.
pub fn apply(path: &Path, draft: &mut Draft) -> anyhow::Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    apply_text(&text(path, MAX_BYTES)?, folder, draft).map_err(|error| anyhow!("{}:{error}", path.display()))
}

/// Sets the options of the text of a file in `folder`.
///
/// # Errors
/// `LINE:COLUMN: MESSAGE` if the text is wrong.
pub fn apply_text(text: &str, folder: &Path, draft: &mut Draft) -> Result<(), String> {
    let parsed = DeTable::parse(text);
    let parsed = parsed.map_err(|e| (e.span().map_or(0, |span| span.start), e.message().trim().replace('\n', " ")));
    let applied = parsed.and_then(|table| apply_table(table.get_ref(), folder, draft));
    applied.map_err(|(offset, message)| {
        let before = text.get(..offset).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        format!("{line}:{column}: {message}")
    })
}

/// Checks that an options file in the model repository only says how models are served. A person
/// who may write to the repository must not control the rest of the server.
///
/// # Errors
/// If the file sets another option; the error names the first one.
pub fn check_of_models(path: &Path) -> anyhow::Result<()> {
    let shown = path.display();
    let table: toml::Table = toml::from_str(&text(path, MAX_BYTES)?).with_context(|| shown.to_string())?;
    let of_models = KEYS.iter().filter(|key| key.is_of_models).map(|key| first(key.path));
    let mut of_models: Vec<&str> = of_models.chain([PLACEMENT, MODELS]).collect();
    of_models.dedup();
    let Some(other) = table.keys().find(|key| !of_models.contains(&key.as_str())) else { return Ok(()) };
    bail!(
        "{shown} lies in the model repository, where an options file may say only how models are served ({}); set \
         '{other}' in a downbeat.toml of the folder that the server starts in, in a file named with --config, or with \
         a flag",
        of_models.join(", ")
    );
}

fn first(path: &str) -> &str {
    path.split('.').next().unwrap_or(path)
}

/// The text of a small file.
///
/// # Errors
/// If the file cannot be read or is too large.
pub fn text(path: &Path, most_bytes: u64) -> anyhow::Result<String> {
    let shown = path.display();
    let metadata = std::fs::metadata(path).with_context(|| format!("cannot read {shown}"))?;
    if !metadata.is_file() || metadata.len() > most_bytes {
        bail!("{shown} is not a file of at most {most_bytes} bytes");
    }
    read_text(path).with_context(|| format!("cannot read {shown}"))
}

/// The text of a file.
///
/// # Errors
/// If the file cannot be read, or is not text.
pub fn read_text(path: &Path) -> std::io::Result<String> {
    let bytes = std::fs::read(path)?;
    let text =
        file_content::text(&bytes).map_err(|error| Error::new(ErrorKind::InvalidData, format!("the file {error}")))?;
    Ok(text.to_owned())
}

fn apply_table(table: &DeTable<'_>, folder: &Path, draft: &mut Draft) -> Result<(), Misplaced> {
    let mut given = Vec::new();
    collect(table, "", &KEYS, &TABLES, &mut given)?;
    set(&given, &KEYS, folder, draft)?;
    for (path, value) in &given {
        match path.as_str() {
            GROUPS => draft.options.device.groups = device_groups::read(value, folder)?,
            PLACEMENT => {
                for (model, devices) in named(value, PLACEMENT)? {
                    let read = (list(number(0..=u64::MAX)).read)(&written(&json(devices), folder));
                    let devices = read.map_err(|reason| (devices.span().start, reason))?;
                    draft.options.placement.insert(model.get_ref().to_string(), devices);
                }
            }
            MODELS => {
                for (model, options) in named(value, MODELS)? {
                    let mut given = Vec::new();
                    collect(as_table(options, "[models.NAME]")?, "", &MODEL_KEYS, &[], &mut given)?;
                    let of_it = draft.options.models.entry(model.get_ref().to_string()).or_default();
                    set(&given, &MODEL_KEYS, folder, of_it)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

type Entries<'a, 'i> = Vec<(String, &'a Spanned<DeValue<'i>>)>;

/// Adds the entries of a table to `given`, with their paths. The table is at `prefix`, which is
/// empty or ends in a dot.
fn collect<'a, 'i, D>(
    table: &'a DeTable<'i>,
    prefix: &str,
    keys: &[Key<D>],
    others: &[&str],
    given: &mut Entries<'a, 'i>,
) -> Result<(), Misplaced> {
    for (name, value) in table {
        let path = format!("{prefix}{}", name.get_ref());
        let inner = format!("{path}.");
        if keys.iter().any(|key| key.path == path) || others.contains(&path.as_str()) {
            given.push((path, value));
        } else if keys.iter().any(|key| key.path.starts_with(&inner)) {
            collect(as_table(value, &format!("[{path}]"))?, &inner, keys, others, given)?;
        } else {
            let known = keys.iter().filter(|key| !key.is_hidden).map(|key| key.path).chain(others.iter().copied());
            let mut known: Vec<&str> = known.filter_map(|path| path.strip_prefix(prefix)).map(first).collect();
            known.retain(|name| !name.is_empty());
            known.dedup();
            let unknown = name.get_ref();
            let hint = match did_you_mean(unknown, known.iter().copied()) {
                hint if hint.is_empty() => format!("; allowed here: {}", known.join(", ")),
                hint => hint,
            };
            return Err((name.span().start, format!("unknown option '{unknown}'{hint}")));
        }
    }
    Ok(())
}

fn set<D>(given: &Entries<'_, '_>, keys: &[Key<D>], folder: &Path, target: &mut D) -> Result<(), Misplaced> {
    for key in keys.iter().filter(|key| !key.path.is_empty()) {
        for (_, value) in given.iter().filter(|(path, _)| path == key.path) {
            (key.set)(target, &written(&json(value), folder)).map_err(|reason| (value.span().start, reason))?;
        }
    }
    Ok(())
}

fn written<'a>(value: &'a Value, folder: &'a Path) -> Given<'a> {
    Given { written: Written::Value(value), folder }
}

fn as_table<'a, 'i>(value: &'a Spanned<DeValue<'i>>, what: &str) -> Result<&'a DeTable<'i>, Misplaced> {
    value.get_ref().as_table().ok_or_else(|| (value.span().start, format!("{what} must be a table")))
}

fn named<'a, 'i>(value: &'a Spanned<DeValue<'i>>, what: &str) -> Result<&'a DeTable<'i>, Misplaced> {
    as_table(value, &format!("[{what}]"))
}

/// The JSON of a value. A number that JSON cannot hold becomes null.
pub fn json(value: &Spanned<DeValue<'_>>) -> Value {
    Value::deserialize(ValueDeserializer::from(value.clone())).unwrap_or(Value::Null)
}
