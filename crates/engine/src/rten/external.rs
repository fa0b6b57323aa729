//! External data under names that RTen does not open.

use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use prost::Message;

use crate::onnx::Checked;
use crate::onnx::message::edited;
use crate::onnx::proto::{ModelProto, StringEntry};
use crate::onnx::wire::WireError;

/// New names for locations in a model.
pub(super) type Renamed = BTreeMap<String, String>;

/// Whether RTen opens external data at this location. RTen has a rule of its own, beyond that of
/// ONNX.
fn opens(location: &str) -> bool {
    let extension = Path::new(location).extension().and_then(|e| e.to_str());
    Path::new(location).components().count() == 1
        && extension.is_some_and(|e| e.starts_with("data") || e.starts_with("onnx_data"))
}

/// Gives the files that RTen does not open other names in the model. Returns the new names, by
/// location.
///
/// # Errors
/// In words, if a tensor inside an operator is in such a file.
pub(super) fn rename(model: &mut ModelProto, file: &Checked<'_>) -> Result<Renamed, String> {
    let mut renamed = Renamed::new();
    let mut tensors = 0;
    for location in file.external_locations().filter(|location| !opens(location)) {
        tensors += 1;
        let next = renamed.len();
        renamed.entry(location.to_owned()).or_insert_with(|| format!("renamed-{next}.data"));
    }
    if renamed.is_empty() {
        return Ok(renamed);
    }
    let mut moved = 0;
    for bytes in model.graph.iter_mut().flat_map(|graph| &mut graph.initializer) {
        let made = edited(bytes, |field| {
            let entry = (field.number == 13).then(|| StringEntry::decode(field.content)).and_then(Result::ok);
            let name = entry.filter(|entry| entry.key == "location").and_then(|entry| renamed.get(&entry.value));
            let entry = |name: &String| StringEntry { key: "location".to_owned(), value: name.clone() };
            Ok::<_, WireError>(name.map(|name| entry(name).encode_to_vec()))
        });
        if let Some(made) = made.map_err(|e| format!("a weight cannot be read: {e}"))? {
            moved += 1;
            *bytes = Bytes::from(made);
        }
    }
    if moved < tensors {
        let location = renamed.keys().next().cloned().unwrap_or_default();
        return Err(format!(
            "a constant inside an operator is kept in '{location}'; of such constants it opens only files beside the model with an \
             extension like .data or .onnx_data. Save the model with such a location"
        ));
    }
    Ok(renamed)
}
