//! The engines on the CPU beside the engine of most models. Each is made when the first model needs
//! it.

use std::sync::{Arc, OnceLock};

use downbeat_engine::{
    Engine, EngineInfo, ExecutorProgram, Isolated, LoadError, LoadOptions, Model, TrialLimits, at_normal_priority,
};
use downbeat_engine_ort::{CudaOptions, Preference, Search, choose};
use downbeat_python::{OnCall, OnMetering, PythonEngine};

/// How models of a server have processes of their own.
#[derive(Clone)]
pub struct Processes {
    /// Threads of the pools in each process.
    pub threads: usize,
    pub program: ExecutorProgram,
    /// The limits of a file's trial; `None`: no process tries files.
    pub limits: Option<TrialLimits>,
}

/// An engine in this process and, from the first model on that needs it, in processes.
pub struct Made {
    pub plain: Arc<dyn Engine>,
    processes: Processes,
    isolated: OnceLock<Result<Arc<dyn Engine>, String>>,
    trial: OnceLock<Result<Arc<dyn Engine>, String>>,
}

impl Made {
    /// The engine, whose processes are made like this.
    pub fn new(plain: Arc<dyn Engine>, processes: Processes) -> Made {
        Made { plain, processes, isolated: OnceLock::new(), trial: OnceLock::new() }
    }

    /// The engine where each model has a process of its own.
    ///
    /// # Errors
    /// A text, if the operating system has no thread left.
    pub fn isolated(&self) -> Result<&Arc<dyn Engine>, String> {
        self.isolated.get_or_init(|| self.in_processes(None)).as_ref().map_err(Clone::clone)
    }

    /// The limits of a trial; `None`: there are no trials.
    pub fn limits(&self) -> Option<TrialLimits> {
        self.processes.limits
    }

    /// The engine that a trial process loads; `None`: files have no trial.
    ///
    /// # Errors
    /// The errors of [`Made::isolated`].
    pub fn trial(&self) -> Result<Option<&Arc<dyn Engine>>, String> {
        let Some(limits) = self.processes.limits else { return Ok(None) };
        self.trial.get_or_init(|| self.in_processes(Some(limits))).as_ref().map(Some).map_err(Clone::clone)
    }

    fn in_processes(&self, limits: Option<TrialLimits>) -> Result<Arc<dyn Engine>, String> {
        let info = self.plain.info();
        let plain: Arc<dyn Engine> = match info.name {
            "cuda" | "tensorrt" => {
                Arc::new(OnCpu(EngineInfo { name: "onnxruntime", device: "cpu".to_owned(), ..info }))
            }
            _ => self.plain.clone(),
        };
        let Processes { threads, program, .. } = self.processes.clone();
        // The thread that starts the processes keeps the priority of the thread that makes it.
        let made = at_normal_priority(move || Isolated::new(plain, threads, program));
        let made = made.map_err(|error| format!("no thread to start processes: {error}"))?;
        Ok(match limits {
            Some(limits) => Arc::new(made.for_trials(limits)),
            None => Arc::new(made),
        })
    }
}

/// The library of an engine on GPUs, for processes that use it on the CPU.
struct OnCpu(EngineInfo);

impl Engine for OnCpu {
    fn info(&self) -> EngineInfo {
        self.0.clone()
    }

    fn load(&self, options: &LoadOptions) -> Result<Arc<dyn Model>, LoadError> {
        let reason = "the server runs no model on the CPU".to_owned();
        Err(LoadError::Model { path: options.path.clone(), engine: self.0.name, reason })
    }
}

/// The engine of Python models. The first such model makes the engine.
pub struct Python {
    on_metering: OnMetering,
    on_call: OnCall,
    engine: OnceLock<Result<Arc<dyn Engine>, String>>,
}

impl Python {
    /// The engine, not made yet. `on_metering` hears of the metrics that models keep, and
    /// `on_call` of their requests to other models.
    pub fn new(on_metering: OnMetering, on_call: OnCall) -> Python {
        Python { on_metering, on_call, engine: OnceLock::new() }
    }

    /// The engine.
    ///
    /// # Errors
    /// A text, if the operating system has no thread left.
    pub fn get(&self) -> Result<&Arc<dyn Engine>, String> {
        let make = || {
            let cache = downbeat_engine::user_cache(|name| std::env::var_os(name)).map(|cache| cache.join("downbeat"));
            let engine = PythonEngine::new(cache, self.on_metering.clone(), self.on_call.clone());
            let engine = engine.map_err(|error| format!("no thread to start processes: {error}"))?;
            Ok(Arc::new(engine) as Arc<dyn Engine>)
        };
        self.engine.get_or_init(make).as_ref().map_err(Clone::clone)
    }
}

/// Makes engines at the priority of the server. Threads of an engine inherit the priority of the
/// thread that makes the engine, and loads have a low priority.
pub struct OtherEngines {
    search: Search,
    processes: Processes,
    rten: OnceLock<Result<Made, String>>,
    onnxruntime: OnceLock<Result<Made, String>>,
}

impl OtherEngines {
    /// Makes the table, without engines yet.
    pub fn new(search: Search, processes: Processes) -> Self {
        OtherEngines { search, processes, rten: OnceLock::new(), onnxruntime: OnceLock::new() }
    }

    /// An engine that [`OtherEngines::get`] has made before.
    pub fn made(&self, preference: Preference) -> Option<&Made> {
        let place = if preference == Preference::Rten { &self.rten } else { &self.onnxruntime };
        place.get()?.as_ref().ok()
    }

    /// An engine on the CPU. Slow the first time.
    ///
    /// # Errors
    /// A text, if the engine cannot be used on this machine.
    pub fn get(&self, preference: Preference) -> Result<&Made, String> {
        let place = match preference {
            Preference::Rten => &self.rten,
            Preference::Onnxruntime => &self.onnxruntime,
            _ => return Err("no single model chooses this engine".to_owned()),
        };
        let make = || {
            let (search, processes) = (self.search.clone(), self.processes.clone());
            at_normal_priority(move || {
                let engine = choose(preference, &search, &CudaOptions::default()).map_err(|e| e.to_string())?.engine;
                Ok(Made::new(engine, processes))
            })
        };
        place.get_or_init(make).as_ref().map_err(Clone::clone)
    }
}
