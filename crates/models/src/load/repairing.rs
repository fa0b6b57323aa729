//! The repair of a model file before its load, where no engine would load the file as it is.

use std::sync::Arc;

use anyhow::anyhow;
use downbeat_repair::RepairedFile;
use downbeat_repository::{ModelDefinition, ModelFormat};

use crate::load::load_context::VersionFile;

/// Repairs a version's file if it needs that, and says so. The definition gets the labels of the
/// outputs that the repair has changed.
///
/// # Errors
/// If the file needs a repair that would not be exact.
pub fn repaired(definition: &mut ModelDefinition, file: &VersionFile<'_>) -> anyhow::Result<Option<Arc<RepairedFile>>> {
    if definition.format != ModelFormat::Onnx {
        return Ok(None);
    }
    let Some(repaired) = RepairedFile::of(file.path)? else { return Ok(None) };
    tracing::info!(model = %definition.name, version = file.version, "{}", repaired.summary());
    for (output, labels) in &repaired.labels {
        definition.add_labels(output, labels);
    }
    Ok(Some(Arc::new(repaired)))
}

/// The error of a load, with the name of the version's own file in place of the repaired one.
pub fn of_original(error: anyhow::Error, repaired: Option<&RepairedFile>, file: &VersionFile<'_>) -> anyhow::Error {
    let Some(repaired) = repaired else { return error };
    let (made, own) = (repaired.path().display().to_string(), file.path.display().to_string());
    anyhow!(format!("{error:#}").replace(&made, &own))
}
