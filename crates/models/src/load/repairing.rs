//! The repair of a model file before its load, where no engine would load the file as it is.

use std::sync::Arc;

use anyhow::anyhow;
use downbeat_repair::RepairedFile;
use downbeat_repository::{ModelDefinition, ModelFormat};

use crate::load::load_context::VersionFile;

/// Repairs a version's file if engines would refuse the file, and logs the repairs. The definition
/// gets the labels of the outputs that the repair has changed.
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

/// Says that requests of a loaded version share no batches because its file fixes the number of
/// rows.
pub fn say_fixed_rows(definition: &ModelDefinition, file: &VersionFile<'_>) {
    let is_chosen = definition.format == ModelFormat::Onnx && !definition.writes_batch_size();
    if !is_chosen || definition.batching.max_batch_size > 0 {
        return;
    }
    let rows = |dims: &[i64]| dims.first().copied().filter(|rows| *rows > 0);
    let fixed = definition.inputs.iter().find_map(|input| Some((&input.client.name, rows(&input.client.dims)?)));
    if let Some((input, rows)) = fixed {
        tracing::info!(
            model = %definition.name, version = file.version,
            "requests run alone, not in batches: the file fixes the first dimension of input '{input}' at {rows}. An \
             export with a dynamic batch dimension would share batches"
        );
    }
}

/// The error of a load, in which the version's own file stands for the repaired file.
pub fn of_original(error: anyhow::Error, repaired: Option<&RepairedFile>, file: &VersionFile<'_>) -> anyhow::Error {
    let Some(repaired) = repaired else { return error };
    let (made, own) = (repaired.path().display().to_string(), file.path.display().to_string());
    anyhow!(format!("{error:#}").replace(&made, &own))
}
