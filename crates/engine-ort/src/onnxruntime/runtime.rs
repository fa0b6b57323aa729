//! The library and its environment: builders of sessions, and the threads of their pools.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use downbeat_core::tensor::TensorSpec;
use downbeat_engine::Share;
use downbeat_engine::onnx;
use downbeat_engine::process::normal_priority::at_normal_priority;
use downbeat_engine::stop::{self, Interrupt};
use downbeat_engine::{CoreSet, Pinned};
use ort::environment::{Environment, GlobalThreadPoolOptions, ThreadManager};
use ort::logging::LogLevel;
use ort::session::builder::{GraphOptimizationLevel, LoadCanceler, SessionBuilder};
use ort::session::{RunOptions, Session};

use super::value;
use crate::library::{FindError, Library};

/// The library and its environment.
pub(super) struct Runtime {
    environment: Environment,
    pub(super) library: PathBuf,
    pub(super) version: String,
    /// Threads of the environment's pool, the calling thread included.
    threads: usize,
}

impl Runtime {
    /// A builder of sessions for a model with these inputs. Models that have the whole CPU share
    /// the environment's pool. Other models have a pool of their own, whose threads are bound to
    /// the cores of the share.
    pub(super) fn builder(&self, threads: usize, share: &Share, inputs: &[TensorSpec]) -> ort::Result<SessionBuilder> {
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
    pub(super) fn part_builder(
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
pub(super) fn keep_floats8(builder: SessionBuilder, has_floats8: bool) -> ort::Result<SessionBuilder> {
    if !has_floats8 {
        return Ok(builder);
    }
    Ok(builder
        .with_config_entry("session.disable_quant_qdq", "1")?
        .with_config_entry("optimization.disable_specified_optimizers", "ReluQuantRewrite;ClipQuantRewrite")?)
}

/// Makes a session. Stopping the thread ends the load early.
pub(super) fn commit(
    mut builder: SessionBuilder,
    make: impl FnOnce(&mut SessionBuilder) -> ort::Result<Session>,
) -> ort::Result<Session> {
    let _call = stop::load(Some(Arc::new(EndLoad(builder.canceler())))).map_err(ort::Error::new)?;
    make(&mut builder)
}

/// Makes a session of a model file, with its external data where [`onnx::data_folder`] says.
pub(super) fn commit_file(builder: SessionBuilder, path: &Path) -> ort::Result<Session> {
    let folder = onnx::data_folder(path);
    let builder = if path.parent().is_some_and(|parent| parent == folder || parent.as_os_str().is_empty()) {
        builder
    } else {
        builder.with_config_entry("session.model_external_initializers_file_folder_path", folder.to_string_lossy())?
    };
    commit(builder, |b| b.commit_from_file(path))
}

/// Ends a load.
struct EndLoad(LoadCanceler);

impl Interrupt for EndLoad {
    fn interrupt(&self) {
        // The call fails if the library lacks this function: then the load goes on to its end.
        let _ = self.0.cancel();
    }
}

/// Options with which a run can be ended.
pub(super) struct EndableRun(pub RunOptions);

/// The library checks the flag between operators, even inside of a loop.
impl Interrupt for EndableRun {
    fn interrupt(&self) {
        // The call sets a flag and cannot fail.
        let _ = self.0.terminate();
    }

    fn clear(&self) {
        let _ = self.0.unterminate();
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
pub(super) fn start(library: Library, threads: usize) -> Result<Runtime, FindError> {
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

/// The library's words, with a remedy if it is known.
pub(super) fn reason(message: &str) -> String {
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
