//! What the names of dimensions tell about the rows. Example: the first dimensions of two inputs
//! are `batch` and `tokens`. A request may then have more rows in one of them. Names prove nothing:
//! many exporters make them up.

use super::Rows;
use super::cause::Cause;
use super::inputs::{Declaration, Dim};

/// The verdict, changed if the names show more. A graph that proves its rows independent needs no
/// names, with one exception. If two inputs have first dimensions of different names, a request may
/// have more rows in one of them.
pub(super) fn weighed(rows: Rows, inputs: &[Declaration], outputs: &[Declaration]) -> Rows {
    let is_proven = matches!(rows, Rows::Independent);
    if matches!(rows, Rows::Mixed(_)) {
        return rows;
    }
    if let Some(cause) = different(inputs, outputs) {
        return Rows::Mixed(cause);
    }
    match elsewhere(inputs, outputs) {
        Some(cause) if !is_proven => Rows::Mixed(cause),
        _ => rows,
    }
}

/// Two inputs whose first dimensions have different names that a person chose.
fn different(inputs: &[Declaration], outputs: &[Declaration]) -> Option<Cause> {
    let mut named = inputs.iter().filter_map(|input| Some((input, input.first_name()?)));
    let (first, name) = named.next()?;
    let (other, other_name) = named.find(|(_, other)| *other != name)?;
    let both_chosen = [name, other_name].iter().all(|name| !is_generated(name, inputs, outputs));
    let reason = format!(
        "the first dimensions of '{}' and '{}' have different names, '{name}' and '{other_name}', so a request may have \
         more rows in one of them",
        first.name, other.name
    );
    both_chosen.then(|| Cause { operator: "input".into(), node: other.name.clone(), reason })
}

/// An input whose first dimension has a name that occurs at another axis.
fn elsewhere(inputs: &[Declaration], outputs: &[Declaration]) -> Option<Cause> {
    for input in inputs {
        let Some(name) = input.first_name() else { continue };
        let is_named = |dim: &Dim| matches!(dim, Dim::Open(Some(other)) if other == name);
        for value in inputs.iter().chain(outputs) {
            if let Some(at) = value.rest().position(is_named) {
                let reason = format!(
                    "the name of its first dimension, '{name}', stands at axis {} of '{}' too, so that axis has as many elements as \
                     there are rows",
                    at + 1,
                    value.name
                );
                return Some(Cause { operator: "input".into(), node: input.name.clone(), reason });
            }
        }
    }
    None
}

/// Whether an exporter made the name up for one dimension: it ends in a number or means "unknown",
/// and occurs once.
fn is_generated(name: &str, inputs: &[Declaration], outputs: &[Declaration]) -> bool {
    let all = inputs.iter().chain(outputs).filter_map(|value| value.dims.as_ref()).flatten();
    let count = all.filter(|dim| matches!(dim, Dim::Open(Some(other)) if other == name)).count();
    let is_numbered = name.ends_with(|last: char| last.is_ascii_digit());
    let says_nothing = name.starts_with("unk") || name == "None" || name == "?" || name == "-1";
    (count == 1 && is_numbered) || says_nothing
}
