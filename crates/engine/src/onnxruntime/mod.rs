//! ONNX Runtime, by a dynamic library found at run time.
//!
//! One environment a process, with one thread pool for all models: pools of their own spin against each other. A model
//! that is loaded with one thread uses none of it and runs on the thread that calls.

mod search;
mod session;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use downbeat_core::tensor::{DataType, TensorSpec};
use ort::environment::{Environment, GlobalThreadPoolOptions};
use ort::logging::LogLevel;
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};

use crate::onnx;
use crate::traits::{Engine, EngineInfo, LoadError, LoadOptions, Model};
pub(crate) use search::newest_in;
pub use search::{FindError, Search};
use search::{Library, Place};

pub(crate) const NAME: &str = "onnxruntime";
/// The oldest minor version of the library that has every function used here.
pub const OLDEST_MINOR: u32 = 24;

/// ONNX Runtime on the CPU. Clones share the process's one library and environment.
#[derive(Clone)]
pub struct Onnxruntime {
    runtime: Arc<Runtime>,
}

struct Runtime {
    environment: Environment,
    library: PathBuf,
    version: String,
    /// Threads of the environment's pool, the calling thread included.
    threads: usize,
}

/// The library and its environment; neither can be loaded twice in a process, nor taken out of it.
static RUNTIME: Mutex<Option<Arc<Runtime>>> = Mutex::new(None);

impl Onnxruntime {
    /// Looks for the library in the places of [`Search`], in order, and loads the first that is usable. If the process has
    /// loaded one already, that one, whatever the search says. `Ok(None)` if no place has one.
    ///
    /// # Errors
    /// If a library that was asked for by name cannot be used, or some place has a library but none can be used.
    pub fn find(search: &Search) -> Result<Option<Onnxruntime>, FindError> {
        let mut loaded = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = &*loaded {
            return Ok(Some(Onnxruntime { runtime: runtime.clone() }));
        }
        let mut unusable = None;
        for (place, path) in search.candidates() {
            match Library::check(&path, &place).and_then(|library| start(library, search.threads)) {
                Ok(runtime) => {
                    let runtime = Arc::new(runtime);
                    *loaded = Some(runtime.clone());
                    return Ok(Some(Onnxruntime { runtime }));
                }
                Err(FindError::Missing { .. }) if place == Place::System => {}
                Err(e) if matches!(place, Place::Asked(_)) => return Err(e),
                Err(e) => {
                    unusable.get_or_insert(e);
                }
            }
        }
        unusable.map_or(Ok(None), Err)
    }

    /// The library in use.
    pub fn library(&self) -> &Path {
        &self.runtime.library
    }

    fn session(&self, options: &LoadOptions, inputs: &[TensorSpec]) -> ort::Result<Session> {
        // A plan of the memory is kept for each combination of shapes, for good: only where no more than batch sizes vary.
        let few_shapes = inputs.iter().all(|i| i.dims.iter().skip(1).all(|d| *d >= 0));
        let builder = SessionBuilder::new(&self.runtime.environment)?
            .with_optimization_level(GraphOptimizationLevel::All)?
            .with_memory_pattern(few_shapes)?
            .with_log_level(LogLevel::Warning)?;
        let own = |threads| -> ort::Result<SessionBuilder> {
            Ok(builder
                .clone()
                .with_independent_thread_pool()?
                .with_intra_threads(threads)?
                .with_inter_threads(1)?
                .with_intra_op_spinning(false)?
                .with_inter_op_spinning(false)?)
        };
        let mut builder = match options.threads {
            // No pool at all: operators run on the calling thread, without a wake-up.
            1 => own(1)?,
            0 => builder,
            n if n == self.runtime.threads => builder,
            n => own(n)?,
        };
        builder.commit_from_file(&options.path)
    }
}

/// Loads the library for good and makes its environment.
fn start(library: Library, threads: usize) -> Result<Runtime, FindError> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = if threads == 0 { cores } else { threads };
    let unusable = |reason: String| library.unusable(reason);
    let builder = ort::init_from(&library.path).map_err(|e| unusable(e.to_string()))?;
    let pool = GlobalThreadPoolOptions::default()
        .with_intra_threads(threads)
        .and_then(|p| p.with_inter_threads(1))
        // An idle server uses no CPU.
        .and_then(|p| p.with_spin_control(false))
        .map_err(|e| unusable(e.to_string()))?;
    let environment = builder
        .with_name("downbeat")
        .with_telemetry(false)
        .with_global_thread_pool(pool)
        .with_logger(Arc::new(log))
        .build()
        .map_err(|e| unusable(e.to_string()))?;
    environment.set_log_level(LogLevel::Warning);
    Ok(Runtime { environment, library: library.path, version: library.version, threads })
}

/// Passes the library's own log on. What a caller gets as an error it repeats there, so its errors are no more than debug.
fn log(level: LogLevel, category: &str, _id: &str, location: &str, message: &str) {
    match level {
        LogLevel::Fatal => tracing::error!(target: "onnxruntime", category, location, "{message}"),
        LogLevel::Warning | LogLevel::Error => tracing::debug!(target: "onnxruntime", category, location, "{message}"),
        LogLevel::Verbose | LogLevel::Info => tracing::trace!(target: "onnxruntime", category, location, "{message}"),
    }
}

impl Engine for Onnxruntime {
    fn info(&self) -> EngineInfo {
        EngineInfo {
            name: NAME,
            version: self.runtime.version.clone(),
            device: "cpu".into(),
            library: Some(self.runtime.library.clone()),
        }
    }

    fn load(&self, options: &LoadOptions) -> Result<Arc<dyn Model>, LoadError> {
        let file = onnx::check(&options.path)?;
        let inputs = file.signature(|_| Some((DataType::Fp32, Vec::new())))?.inputs;
        let session = self.session(options, &inputs).map_err(|e| LoadError::Model {
            path: options.path.clone(),
            engine: NAME,
            reason: reason(e.message()),
        })?;
        let signature = file.signature(|output| session::output(&session, output))?;
        Ok(Arc::new(session::SessionModel::new(session, signature, &options.path)?))
    }
}

/// The library's words, with what to do where that is known.
fn reason(message: &str) -> String {
    let message = message.trim();
    let remedy = if message.contains("Unsupported model IR version") || message.contains("is under development") {
        ". Export the model for an older version, or install a newer onnxruntime"
    } else if message.contains("is not a registered function/op") || message.contains("NOT_IMPLEMENTED") {
        ". Export the model with standard ONNX operators, or install a newer onnxruntime"
    } else {
        ""
    };
    format!("{message}{remedy}")
}
