//! The choice of the engine that runs the models: by name, or the fastest that works.

use std::str::FromStr;
use std::sync::Arc;

use downbeat_engine::emulated::{self, Emulated};
use downbeat_engine::isolation::Wanted;
use downbeat_engine::process::normal_priority::begin_normal_priority;
use downbeat_engine::rten::{self, Rten};
use downbeat_engine::{Engine, EngineInfo, LoadError};

use crate::cuda::{CudaOptions, CudaUnavailable, GpuInfo, Missing, Provider};
use crate::library::{self, FindError};
use crate::onnxruntime::{self, Onnxruntime};
use crate::preflight::{gpus, preflight};
use crate::search::Search;

/// The engine that the user wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preference {
    /// `cuda` if there is a GPU and all that it needs, else `onnxruntime` if it is found, else
    /// `rten`.
    #[default]
    Auto,
    /// `onnxruntime` on NVIDIA GPUs, with its CUDA provider.
    Cuda,
    /// `onnxruntime` on NVIDIA GPUs, with its TensorRT provider.
    Tensorrt,
    /// `onnxruntime` on the CPU, or none.
    Onnxruntime,
    /// `rten`.
    Rten,
    /// `emulated`.
    Emulated,
}

const CUDA: &str = Provider::Cuda.name();
const TENSORRT: &str = Provider::Tensorrt.name();

impl Preference {
    /// The names of engines that a user may write.
    pub const NAMES: [&str; 6] = ["auto", CUDA, TENSORRT, library::NAME, rten::NAME, emulated::NAME];
}

impl FromStr for Preference {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Preference::Auto),
            CUDA => Ok(Preference::Cuda),
            TENSORRT => Ok(Preference::Tensorrt),
            library::NAME => Ok(Preference::Onnxruntime),
            rten::NAME => Ok(Preference::Rten),
            emulated::NAME => Ok(Preference::Emulated),
            other => Err(format!(
                "unknown engine '{}'; expected one of {}",
                other.chars().take(64).collect::<String>(),
                Preference::NAMES.join(", ")
            )),
        }
    }
}

/// The engine to use.
pub struct Choice {
    /// The engine.
    pub engine: Arc<dyn Engine>,
    /// The GPUs that it runs on; none: it runs on the CPU.
    pub gpus: Vec<GpuInfo>,
    /// A line for the user, if a faster engine could be installed or was passed over.
    pub hint: Option<String>,
    /// A line for the user, if the engine is not the wanted engine.
    pub warning: Option<String>,
}

impl Choice {
    fn cpu(engine: impl Engine + 'static) -> Choice {
        Choice { engine: Arc::new(engine), gpus: Vec::new(), hint: None, warning: None }
    }
}

/// The reason why the wanted engine cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ChooseError {
    /// A library was found, but cannot be used.
    #[error(transparent)]
    Find(#[from] FindError),
    /// No library was found.
    #[error(
        "no onnxruntime library found. Run `downbeat engine install`, or set ORT_DYLIB_PATH to libonnxruntime.so, or use the engine rten"
    )]
    NotFound,
    /// GPUs are wanted and cannot be used.
    #[error("the engine {provider} cannot be used: {reason}")]
    Cuda {
        /// The provider.
        provider: Provider,
        /// The reason.
        reason: CudaUnavailable,
    },
}

/// The engine for `preference`. On GPUs it follows `options`, except for the provider. Threads that
/// engines start later have the priority of the calling thread, even if a load at a low priority
/// starts them.
///
/// # Errors
/// If `onnxruntime` is wanted and not found, or the library that `search.asked` names cannot be
/// used. If a GPU is wanted and none can be used, unless `options.missing` allows the CPU.
pub fn choose(preference: Preference, search: &Search, options: &CudaOptions) -> Result<Choice, ChooseError> {
    begin_normal_priority();
    match preference {
        Preference::Emulated => Ok(Choice::cpu(Emulated::new())),
        Preference::Rten => Ok(Choice::cpu(Rten::with_threads(search.threads))),
        Preference::Onnxruntime => Ok(Choice::cpu(Onnxruntime::find(search)?.ok_or(ChooseError::NotFound)?)),
        Preference::Cuda => wanted_gpus(Provider::Cuda, search, options),
        Preference::Tensorrt => wanted_gpus(Provider::Tensorrt, search, options),
        Preference::Auto => auto(search, options),
    }
}

/// The engine on GPUs; without GPUs as `options.missing` says.
fn wanted_gpus(provider: Provider, search: &Search, options: &CudaOptions) -> Result<Choice, ChooseError> {
    match (on_gpus(provider, search, options), options.missing) {
        (Ok(choice), _) => Ok(choice),
        (Err(reason), Missing::Exit) => Err(ChooseError::Cuda { provider, reason }),
        (Err(reason), Missing::Cpu) => {
            let choice = on_cpu(search)?;
            let engine = choice.engine.info().name;
            let warning =
                format!("models run on the CPU, with the engine {engine}: {provider} cannot be used: {reason}");
            Ok(Choice { warning: Some(warning), ..choice })
        }
    }
}

fn on_gpus(provider: Provider, search: &Search, options: &CudaOptions) -> Result<Choice, CudaUnavailable> {
    let options = CudaOptions { provider, ..options.clone() };
    let ready = preflight(search, &options)?;
    let engine = ready.start(&options, search.threads)?;
    Ok(Choice { engine, gpus: ready.gpus, hint: None, warning: None })
}

/// The engine of an executor process: for [`downbeat_engine::isolation::serve`].
///
/// # Errors
/// In words, if there is no engine of this name, or its library cannot be used.
pub fn of_executor(wanted: Wanted) -> Result<Arc<dyn Engine>, String> {
    let Wanted { engine, library, threads } = wanted;
    let asked = library.map(|library| ("the server".to_owned(), library));
    let search = Search { asked, threads, ..Search::default() };
    let choice = choose(engine.parse()?, &search, &CudaOptions::default());
    choice.map(|choice| choice.engine).map_err(|error| error.to_string())
}

/// The fastest engine that works. Without a GPU the choice has no hint about GPUs.
fn auto(search: &Search, options: &CudaOptions) -> Result<Choice, ChooseError> {
    let Some(gpu) = gpus().into_iter().next() else {
        return on_cpu(search);
    };
    on_gpus(Provider::Cuda, search, options).or_else(|reason| {
        let choice = on_cpu(search)?;
        let engine = choice.engine.info().name;
        let hint = format!("models run on the CPU, with the engine {engine}, and not on {}: {reason}", gpu.name);
        Ok(Choice { hint: Some(hint), ..choice })
    })
}

fn on_cpu(search: &Search) -> Result<Choice, ChooseError> {
    let rten = |reason: &str| {
        let hint = Some(format!("rten is the slower engine: {reason}"));
        Choice { hint, ..Choice::cpu(Rten::with_threads(search.threads)) }
    };
    match Onnxruntime::find(search) {
        Ok(Some(engine)) => Ok(Choice::cpu(engine)),
        Ok(None) => Ok(rten("`downbeat engine install` fetches onnxruntime, 1.1 to 6 times as fast")),
        Err(e) if search.asked.is_some() => Err(e.into()),
        Err(e) => Ok(rten(&e.to_string())),
    }
}

/// The engine on the CPU that may run models which `engine` cannot run; `None`: there is no other.
pub fn other_than(engine: &str) -> Option<Preference> {
    match engine {
        rten::NAME => Some(Preference::Onnxruntime),
        library::NAME => Some(Preference::Rten),
        _ => None,
    }
}

/// Whether another engine may load a model that one engine did not load. A model that onnxruntime
/// finds invalid is invalid for all engines.
pub fn may_load_elsewhere(error: &LoadError) -> bool {
    match error {
        LoadError::File { .. } => false,
        LoadError::Model { engine, reason, .. } | LoadError::Died { engine, reason, .. } => {
            *engine == rten::NAME || onnxruntime::lacks(reason)
        }
    }
}

/// The engines on the CPU that can be used here, the fastest first. [`crate::preflight::survey`] describes the
/// GPUs.
pub fn available(search: &Search) -> Vec<EngineInfo> {
    let onnxruntime = Onnxruntime::find(search).ok().flatten().map(|e| e.info());
    onnxruntime.into_iter().chain([Rten::new().info(), Emulated::new().info()]).collect()
}
