//! Models whose files came with a load request.

use std::collections::BTreeMap;
use std::path::{Component, Path};

/// A folder of files that came with a load request; removed with the last user.
pub type Overlay = tempfile::TempDir;

/// Writes the files of a load request into a fresh folder, as the repository of one model.
///
/// # Errors
/// If a name or a path leads elsewhere, or a file cannot be written.
pub fn write_overlay(name: &str, files: &BTreeMap<String, bytes::Bytes>) -> anyhow::Result<Overlay> {
    let is_inside = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
    anyhow::ensure!(is_inside(Path::new(name)), "'{name}' cannot be the name of a model");
    let overlay = downbeat_engine::scratch::folder()?;
    let root = overlay.path().to_owned();
    for (path, bytes) in files {
        anyhow::ensure!(
            is_inside(Path::new(path)) && !path.is_empty(),
            "file '{path}' must have a path inside the model's folder, such as '1/model.onnx'"
        );
        let target = root.join(name).join(path);
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(target, bytes)?;
    }
    Ok(overlay)
}
