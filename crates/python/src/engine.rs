//! The engine of Python models.

use std::path::PathBuf;
use std::sync::Arc;

use downbeat_engine::{
    Engine, EngineInfo, InstanceStarter, LoadError, LoadOptions, Model, PythonOptions, at_normal_priority,
};

use crate::environment::Interpreter;
use crate::instances::{Instances, Start};
use crate::model::PythonModel;
use crate::side::OnCall;
use crate::worker::{NAME, program};

/// Hears about the changes of the metrics of a model: the model's name, and a JSON value for each
/// change.
pub type OnMetering = Arc<dyn Fn(&str, Vec<serde_json::Value>) + Send + Sync>;

/// Runs Python models in processes.
pub struct PythonEngine {
    starter: Arc<InstanceStarter>,
    on_metering: OnMetering,
    on_call: OnCall,
    /// The folder for unpacked environments.
    cache: Option<PathBuf>,
}

impl PythonEngine {
    /// Makes the engine. Environments are unpacked in the folder `cache`.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn new(cache: Option<PathBuf>, on_metering: OnMetering, on_call: OnCall) -> std::io::Result<PythonEngine> {
        // Processes inherit the priority of the thread that starts them. Threads of loads have a low one.
        let starter = Arc::new(at_normal_priority(InstanceStarter::new)?);
        Ok(PythonEngine { starter, on_metering, on_call, cache })
    }
}

impl Engine for PythonEngine {
    fn info(&self) -> EngineInfo {
        EngineInfo {
            name: NAME,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: "cpu in a process".to_owned(),
            library: None,
        }
    }

    fn load(&self, options: &LoadOptions) -> Result<Arc<dyn Model>, LoadError> {
        let refused = |reason| LoadError::Model { path: options.path.clone(), engine: NAME, reason };
        let python = options.python.clone().ok_or_else(|| refused("its configuration is missing".to_owned()))?;
        let interpreter = Interpreter::of(&python, self.cache.as_deref()).map_err(refused)?;
        let (on_metering, model) = (self.on_metering.clone(), python.model.clone());
        let start = Start {
            starter: self.starter.clone(),
            program: program(&interpreter, &python.model),
            options: options.clone(),
            on_metering: Arc::new(move |changes| on_metering(&model, changes)),
            on_call: self.on_call.clone(),
        };
        let (instances, loaded) =
            Instances::begin(start, &python).map_err(|error| explained(error, &interpreter, &python))?;
        Ok(Arc::new(PythonModel::new(instances, loaded)))
    }
}

/// The error of a Python that does not start, with the remedy.
fn explained(error: LoadError, interpreter: &Interpreter, python: &PythonOptions) -> LoadError {
    match error {
        LoadError::Model { path, engine, reason } if reason.contains("does not start") => {
            let program = interpreter.program.display();
            let remedy = match &python.environment {
                Some(_) => "the environment of EXECUTION_ENV_PATH may be of another machine",
                None => "install Python 3 with numpy, or name a Python with --python",
            };
            LoadError::Model {
                path,
                engine,
                reason: format!("{reason}; {program} is no Python that runs here: {remedy}"),
            }
        }
        error => error,
    }
}
