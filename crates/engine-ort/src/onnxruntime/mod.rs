//! ONNX Runtime, by a dynamic library found at run time.
//!
//! A process has one environment, with one thread pool for all models: separate pools spin against
//! each other. A model with one thread runs on the calling thread, without the pool.

pub mod cuda;
mod cut;
mod measure;
mod runtime;
mod session;
mod value;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use downbeat_core::tensor::DataType;
use downbeat_engine::cut::Cut;
use downbeat_engine::onnx;
use downbeat_engine::process::scratch;
use downbeat_engine::run_memory::RunMemory;
use downbeat_engine::{Engine, EngineInfo, LoadError, LoadOptions, Model};

use crate::cuda::{CudaError, CudaOptions};
use crate::library::{FindError, Library, LibraryPlace, NAME};
use crate::search::Search;
pub use cuda::OnnxruntimeCuda;
use runtime::{Runtime, commit_file, keep_floats8, reason, start};

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

/// ONNX Runtime on the CPU. Clones share the process's one library and environment.
#[derive(Clone)]
pub struct Onnxruntime {
    runtime: Arc<Runtime>,
}

/// The library and its environment. A process cannot load a second one, and cannot unload it.
static RUNTIME: Mutex<Option<Arc<Runtime>>> = Mutex::new(None);

impl Onnxruntime {
    /// Searches the places of [`Search`], in order, and loads the first usable library. If the
    /// process has already loaded one, it returns that one without a search. `Ok(None)` if no place
    /// has one. If it passes over a library that cannot be used, it logs the reason.
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
                    if let Some(passed) = unusable {
                        tracing::warn!("{passed}. Until then, {} serves", runtime.library.display());
                    }
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
            let session = builder().and_then(|builder| commit_file(builder, &options.path));
            let session = session.map_err(library_error)?;
            let signature = file.signature(|output| session::output(&session, output))?;
            let model = session::SessionModel::whole(&session, signature, &options.path)?;
            return Ok(Arc::new(model.loaded(options, memory, file.has_graphs())));
        }
        let folder = scratch::folder().map_err(|e| error(format!("no temporary folder to cut it in: {e}")))?;
        let session = builder().and_then(|b| cut::optimise(b, &options.path, folder.path())).map_err(library_error)?;
        let signature = file.signature(|output| session::output(&session, output))?;
        drop(session);
        let model = cut::load(&self.runtime, options, signature, folder.path()).map_err(error)?;
        Ok(Arc::new(model.loaded(options, memory, file.has_graphs())))
    }
}
