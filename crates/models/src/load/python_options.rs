//! The options of a Python model's load.

use std::sync::Arc;

use downbeat_engine::PythonOptions;
use downbeat_protocol::http::config_to_json;
use downbeat_repository::ModelDefinition;
use downbeat_service::options::ServerOptions;

use crate::load::load_context::VersionFile;
use crate::load::model_source::is_python;

/// The parameter of Triton's configurations that names a model's environment.
pub const ENVIRONMENT: &str = "EXECUTION_ENV_PATH";

/// The options of a version of a Python model; `None`: the model is no Python model.
pub fn python_options(
    options: &ServerOptions,
    definition: &ModelDefinition,
    file: &VersionFile<'_>,
) -> Option<Arc<PythonOptions>> {
    let python = || PythonOptions {
        model: definition.name.clone(),
        version: file.version,
        folder: std::path::absolute(&definition.dir).unwrap_or_else(|_| definition.dir.clone()),
        config: config_to_json(&definition.written()),
        interpreter: options.python.clone(),
        environment: definition.parameter(ENVIRONMENT).map(str::to_owned),
        memory: options.python_memory_bytes.map(|bytes| bytes as u64).filter(|bytes| *bytes > 0),
        completes: definition.may_be_completed(),
    };
    is_python(definition).then(|| Arc::new(python()))
}
