//! ONNX Runtime, by a dynamic library found at run time.
//!
//! A process has one environment, with one thread pool for all models: separate pools spin against
//! each other. A model with one thread runs on the calling thread, without the pool.

pub mod cuda;
mod cut;
mod measure;
mod search;
mod session;
mod value;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use downbeat_core::tensor::{DataType, TensorSpec};
use ort::environment::{Environment, GlobalThreadPoolOptions, ThreadManager};
use ort::logging::LogLevel;
use ort::session::builder::{GraphOptimizationLevel, LoadCanceler, SessionBuilder};
use ort::session::{RunOptions, Session};

use crate::cores::{CoreSet, Pinned};
use crate::cuda::{CudaError, CudaOptions};
use crate::normal_priority::at_normal_priority;
use crate::onnx;
use crate::run_memory::RunMemory;
use crate::segment::Cut;
use crate::stop::{self, Interrupt};
use crate::traits::{Engine, EngineInfo, LoadError, LoadOptions, Model, Share};
pub use cuda::OnnxruntimeCuda;
pub use search::{FindError, Search};
use search::{Library, LibraryPlace};
pub(crate) use search::{loader_words, newest_in, provider_file};

pub(crate) const NAME: &str = "onnxruntime";
/// Phrases in the library's errors about a valid model with an operator, a datatype or a version
/// that the library lacks.
const LACKS: [&str; 4] = [
    "Could not find an implementation",
    "is not a registered function/op",
    "ValidateOpsetForDomain",
    "Unsupported model IR version",
];

/// Whether the library refused a model because it lacks a feature, and not because the model is
/// wrong.
pub(crate) fn lacks(reason: &str) -> bool {
    LACKS.iter().any(|said| reason.contains(said))
}
/// The oldest minor version of the library that has every function used by this crate.
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

/// The library and its environment. A process cannot load a second one, and cannot unload it.
static RUNTIME: Mutex<Option<Arc<Runtime>>> = Mutex::new(None);

impl Onnxruntime {
    /// Searches the places of [`Search`], in order, and loads the first usable library. If the
    /// process has already loaded one, it returns that one without a search. `Ok(None)` if no place
    /// has one.
    ///
    /// # Errors
    /// If a library that the user named cannot be used, or places have libraries but none can be
    /// used.
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
                Err(error) if error.is_missing && place == LibraryPlace::System => {}
                Err(e) if matches!(place, LibraryPlace::Asked(_)) => return Err(e),
                Err(e) => {
                    unusable.get_or_insert(e);
                }
            }
        }
        unusable.map_or(Ok(None), Err)
    }

    /// The library for GPUs at `library`, with its providers beside it. From then on the engine on
    /// the CPU uses it, too.
    ///
    /// # Errors
    /// If the library cannot be used, or the process has loaded another one.
    pub(crate) fn with_gpu_library(library: &Path, threads: usize) -> Result<Onnxruntime, FindError> {
        let mut loaded = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = &*loaded {
            return if runtime.library == library {
                Ok(Onnxruntime { runtime: runtime.clone() })
            } else {
                Err(FindError::another(&runtime.library, library))
            };
        }
        let runtime = Arc::new(start(Library::check(library, &LibraryPlace::Gpu)?, threads)?);
        *loaded = Some(runtime.clone());
        Ok(Onnxruntime { runtime })
    }

    /// The engine on these GPUs, with the same library. The driver must be loaded and initialised.
    /// The library must have its providers beside it, and the libraries that they need must be
    /// loaded.
    ///
    /// # Errors
    /// If one of the GPUs is lost, out of memory or missing.
    pub fn on_gpus(&self, devices: &[u32], options: &CudaOptions) -> Result<OnnxruntimeCuda, CudaError> {
        OnnxruntimeCuda::new(self.runtime.clone(), devices, options)
    }

    /// The library in use.
    pub fn library(&self) -> &Path {
        &self.runtime.library
    }
}

impl Runtime {
    /// A builder of sessions for a model with these inputs. Models that have the whole CPU share
    /// the environment's pool. Other models have a pool of their own, whose threads are bound to
    /// the cores of the share.
    fn builder(&self, threads: usize, share: &Share, inputs: &[TensorSpec]) -> ort::Result<SessionBuilder> {
        let builder = self.pool_builder(inputs)?;
        match (threads, share.cores()) {
            // No pool at all: operators run on the calling thread, without a wake-up.
            (1, _) => own_threads(builder, 1, None),
            (0, Some(cores)) => own_threads(builder, cores.len(), Some(*cores)),
            (0, None) => Ok(builder),
            (n, None) if n == self.threads => Ok(builder),
            (n, cores) => own_threads(builder, n, cores.copied()),
        }
    }

    /// A builder of sessions that run on the environment's pool.
    fn pool_builder(&self, inputs: &[TensorSpec]) -> ort::Result<SessionBuilder> {
        // The library keeps a memory plan for each combination of shapes, for good. So it plans
        // only if no size but the batch's varies.
        let few_shapes = inputs.iter().all(|i| i.dims.iter().skip(1).all(|d| *d >= 0));
        SessionBuilder::new(&self.environment)?
            .with_optimization_level(GraphOptimizationLevel::All)?
            .with_memory_pattern(few_shapes)?
            .with_log_level(LogLevel::Warning)
            .map_err(Into::into)
    }

    /// A builder of sessions for parts of a model that is optimised already. The parts share one
    /// arena, so that a part finds the memory of the part before in the caches. They have no
    /// threads of their own, unless the threads must be bound to cores: a pool for each part is
    /// slow.
    fn part_builder(
        &self,
        threads: usize,
        share: &Share,
        inputs: &[TensorSpec],
        weights: &Path,
    ) -> ort::Result<SessionBuilder> {
        let shared = if threads == 1 { 1 } else { 0 };
        self.builder(if share.cores().is_some() { threads } else { shared }, share, inputs)?
            .with_optimization_level(GraphOptimizationLevel::Disable)?
            .with_env_allocators()?
            .with_config_entry("session.model_external_initializers_file_folder_path", weights.to_string_lossy())
            .map_err(Into::into)
    }
}

/// Leaves 8-bit floats between `QuantizeLinear` and `DequantizeLinear` as they are. The library's
/// optimiser takes them for integers, makes operators that do not exist, and leaves out a `Relu`
/// before them.
fn keep_floats8(builder: SessionBuilder, has_floats8: bool) -> ort::Result<SessionBuilder> {
    if !has_floats8 {
        return Ok(builder);
    }
    Ok(builder
        .with_config_entry("session.disable_quant_qdq", "1")?
        .with_config_entry("optimization.disable_specified_optimizers", "ReluQuantRewrite;ClipQuantRewrite")?)
}

/// Makes a session. Stopping the thread ends the load early.
fn commit(
    mut builder: SessionBuilder,
    make: impl FnOnce(&mut SessionBuilder) -> ort::Result<Session>,
) -> ort::Result<Session> {
    let _call = stop::load(Some(Arc::new(builder.canceler()))).map_err(ort::Error::new)?;
    make(&mut builder)
}

impl Interrupt for LoadCanceler {
    fn interrupt(&self) {
        // The call fails if the library lacks this function: then the load goes on to its end.
        let _ = self.cancel();
    }
}

/// The library checks the flag between operators, even inside of a loop.
impl Interrupt for RunOptions {
    fn interrupt(&self) {
        // The call sets a flag and cannot fail.
        let _ = self.terminate();
    }

    fn clear(&self) {
        let _ = self.unterminate();
    }
}

/// A pool of this many threads, the calling one included, which are bound to these cores. With one
/// thread there is no pool: operators run without a wake-up.
fn own_threads(builder: SessionBuilder, threads: usize, cores: Option<CoreSet>) -> ort::Result<SessionBuilder> {
    Ok(builder
        .with_thread_manager(PoolThreads { cores })?
        .with_independent_thread_pool()?
        .with_intra_threads(threads)?
        .with_inter_threads(1)?
        .with_intra_op_spinning(false)?
        .with_inter_op_spinning(false)?)
}

/// Starts the threads of a session's pool.
struct PoolThreads {
    /// The cores that the threads are bound to; `None`: any core.
    cores: Option<CoreSet>,
}

impl ThreadManager for PoolThreads {
    type Thread = JoinHandle<()>;

    fn create(&self, work: impl FnOnce() + Send + 'static) -> ort::Result<Self::Thread> {
        let cores = self.cores;
        let life = move || {
            // If the thread cannot be bound, neither can the calling thread. Then the run of the
            // calling thread gives the error.
            let _pinned = cores.as_ref().map(Pinned::to);
            work();
        };
        let name = std::thread::current().name().unwrap_or("onnxruntime").to_owned();
        let start = || std::thread::Builder::new().name(name).spawn(life);
        at_normal_priority(start).map_err(|e| ort::Error::new(format!("no thread for a pool: {e}")))
    }

    fn join(thread: Self::Thread) -> ort::Result<()> {
        thread.join().map_err(|_| ort::Error::new("a thread of a pool panicked"))
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
    value::share_arena(&environment).map_err(unusable)?;
    Ok(Runtime { environment, library: library.path, version: library.version, threads })
}

/// Passes the library's own log on. The library logs each error that it also returns, so its errors
/// are only debug messages.
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
        let error = |reason: String| LoadError::Model { path: options.path.clone(), engine: NAME, reason };
        let library_error = |e: ort::Error| error(reason(e.message()));
        // The library's threads inherit the binding of this thread.
        let _pinned = options.share.pin().map_err(error)?;
        // The estimate comes before the library computes the values that depend on weights alone.
        let memory = RunMemory::of(&options.path, options.memory.as_ref()).map_err(error)?.map(Arc::new);
        let builder =
            || keep_floats8(self.runtime.builder(options.threads, &options.share, &inputs)?, file.has_floats8());
        if options.cut == Cut::Whole {
            let session = builder().and_then(|b| commit(b, |b| b.commit_from_file(&options.path)));
            let session = session.map_err(library_error)?;
            let signature = file.signature(|output| session::output(&session, output))?;
            let model = session::SessionModel::whole(&session, signature, &options.path)?;
            return Ok(Arc::new(model.loaded(options, memory, file.has_graphs())));
        }
        let folder = crate::scratch::folder().map_err(|e| error(format!("no temporary folder to cut it in: {e}")))?;
        let session = builder().and_then(|b| cut::optimise(b, &options.path, folder.path())).map_err(library_error)?;
        let signature = file.signature(|output| session::output(&session, output))?;
        drop(session);
        let model = cut::load(&self.runtime, options, signature, folder.path()).map_err(error)?;
        Ok(Arc::new(model.loaded(options, memory, file.has_graphs())))
    }
}

/// The library's words, with a remedy if it is known.
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
