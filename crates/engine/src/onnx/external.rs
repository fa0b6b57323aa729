//! External data: tensors that a model keeps in other files, which must be in the model's own
//! folder.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use super::file::External;
use crate::scratch;

/// The name of a link beside a model file that was made from another file. The link leads to that
/// other file, which has the external data beside it. The link counts only in a temporary folder
/// of this user.
pub const ORIGINAL: &str = ".original";

/// The folder of a model's external data: its own, or that of the file that it was made from.
pub fn data_folder(model: &Path) -> PathBuf {
    let original = original(model);
    match original.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// The file that the model was made from. `model` itself, if no repair made the model.
pub(crate) fn original(model: &Path) -> PathBuf {
    let link = std::fs::read_link(model.with_file_name(ORIGINAL));
    link.ok().filter(|_| scratch::holds(model)).unwrap_or_else(|| model.to_owned())
}

/// Checks that each location is a relative path inside of the folder, with symbolic links resolved.
/// The file must have the bytes of the tensor.
pub(super) fn check(model: &Path, external: &[External]) -> Result<(), String> {
    if external.is_empty() {
        return Ok(());
    }
    let (folder, model) = (&data_folder(model), &original(model));
    // The model itself may be a link to the folder of all of its files (Kubernetes mounts, download
    // caches).
    let canonical =
        |path: &Path| path.canonicalize().map_err(|e| format!("the folder of the model cannot be read: {e}"));
    let target = canonical(model)?;
    let roots = [canonical(folder)?, target.parent().map_or_else(|| target.clone(), Path::to_owned)];
    let mut sizes = BTreeMap::<&str, u64>::new();
    for External { tensor, location, offset, length } in external {
        let error = |what: &str| format!("tensor '{tensor}' is kept in the external file '{location}', {what}");
        let size = match sizes.get(location.as_str()) {
            Some(size) => *size,
            None => {
                let size = size(folder, location, &roots).map_err(|what| error(&what))?;
                sizes.insert(location, size);
                size
            }
        };
        let end = offset.checked_add(length.unwrap_or(0));
        if end.is_none_or(|end| end > size) {
            return Err(error(&format!(
                "which has {size} bytes, but the tensor is at {offset} and takes {}: the file is truncated or of another model. Copy it again",
                length.unwrap_or(0)
            )));
        }
    }
    Ok(())
}

/// The size of the file at `location`, if it may be read.
fn size(folder: &Path, location: &str, roots: &[std::path::PathBuf]) -> Result<u64, String> {
    const REMEDY: &str = "Put it beside the model and save the model with that location";
    const BESIDE: &str = "It has to lie beside the model; copy it there, or link it where the model is a link";
    let relative = Path::new(location);
    let stays = relative.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    if location.is_empty() || !stays {
        return Err(format!("but a location must be a relative path without '..'. {REMEDY}"));
    }
    let path = folder.join(relative).canonicalize().map_err(|e| format!("which cannot be read: {e}. {BESIDE}"))?;
    if !roots.iter().any(|root| path.starts_with(root)) {
        return Err(format!(
            "which is a link to {}, outside of the model's folder. Copy it beside the model, or make the model a link into the folder of \
             that file, too, as Hugging Face's caches do",
            path.display()
        ));
    }
    match std::fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() => {
            let size = metadata.len();
            super::refuse_lfs_pointer(&path, size).map_err(|e| format!("which {e}"))?;
            Ok(size)
        }
        Ok(_) => Err(format!("which is not a regular file. {REMEDY}")),
        Err(e) => Err(format!("which cannot be read: {e}. {BESIDE}")),
    }
}
