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
        // Clients of Triton may begin a path with the model's folder: `/1/model.py`.
        let path = path.strip_prefix('/').unwrap_or(path);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn written(path: &str) -> Result<bool, String> {
        let files = BTreeMap::from([(path.to_owned(), bytes::Bytes::from_static(b"code"))]);
        let overlay = write_overlay("m", &files).map_err(|error| error.to_string())?;
        Ok(overlay.path().join("m/1/model.py").exists())
    }

    #[test]
    fn a_path_may_begin_with_the_models_folder() {
        assert_eq!(written("1/model.py"), Ok(true));
        assert_eq!(written("/1/model.py"), Ok(true));
    }

    #[test]
    fn a_path_that_leads_elsewhere_is_refused() {
        for path in ["", "/", "//1/model.py", "../1/model.py", "/../../m/1/model.py", "1/./../../model.py"] {
            let reason = written(path).unwrap_err();
            assert!(reason.contains("must have a path inside the model's folder"), "{path}: {reason}");
        }
    }
}
