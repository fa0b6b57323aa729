//! The options of a load.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::share::Share;
use crate::cut::Cut;
use crate::cut::operator_profile::OperatorProfile;
use crate::memory::run_memory::MemoryBudget;

/// The model file to load, and the options of the load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The model file.
    pub path: PathBuf,
    /// Threads inside one run; 0: one for each CPU that the run may use.
    pub threads: usize,
    /// The share of a device that the model's lanes have if their place names none. On the CPU the
    /// model's own threads are bound to these cores.
    pub share: Share,
    /// The places where the model is cut into segments.
    pub cut: Cut,
    /// The memory that the model's runs may take, on the CPU; `None`: no limit.
    pub memory: Option<Arc<MemoryBudget>>,
    /// Options of onnxruntime's TensorRT provider from the model's configuration, by the provider's
    /// own names.
    pub tensorrt: BTreeMap<String, String>,
    /// Folder for files that are kept between starts, such as the engines that TensorRT compiles;
    /// `None`: each start makes them.
    pub cache: Option<PathBuf>,
    /// The profile of the operators from the last time that the model was cut, which saves a
    /// measurement. A profile of another file or engine is ignored.
    pub operators: Option<Arc<OperatorProfile>>,
    /// The priority of the lanes' work on a device that models share.
    pub priority: StreamPriority,
    /// The options of a Python model; `None`: the file is no Python model.
    pub python: Option<Arc<PythonOptions>>,
}

/// The options of a Python model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PythonOptions {
    /// The model's name.
    pub model: String,
    /// The model's version.
    pub version: u64,
    /// The model's folder, which has the folders of its versions.
    pub folder: PathBuf,
    /// The model's configuration, as JSON of the protocol.
    pub config: String,
    /// The Python that runs the model, unless the configuration names an environment.
    pub interpreter: PathBuf,
    /// The environment that the configuration names (`EXECUTION_ENV_PATH`).
    pub environment: Option<String>,
    /// The most memory that a process of the model may write to, bytes; `None`: no limit.
    pub memory: Option<u64>,
    /// Whether the model may complete its configuration.
    pub completes: bool,
}

/// The priority of kernels that wait for a GPU's compute units. Running kernels go on, and copies
/// ignore the priority. The CPU has no such priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamPriority {
    /// The driver's default; most devices have no lower one.
    #[default]
    Default,
    /// The highest priority of the device.
    Max,
    /// The lowest priority of the device.
    Min,
}

impl LoadOptions {
    /// The whole model at `path`, with `threads` threads inside one run (0: one a core).
    pub fn new(path: impl Into<PathBuf>, threads: usize) -> Self {
        LoadOptions {
            path: path.into(),
            threads,
            share: Share::Whole,
            cut: Cut::Whole,
            memory: None,
            tensorrt: BTreeMap::new(),
            cache: None,
            operators: None,
            priority: StreamPriority::Default,
            python: None,
        }
    }

    /// The same options, with the model cut into segments.
    #[must_use]
    pub fn with_cut(self, cut: Cut) -> Self {
        LoadOptions { cut, ..self }
    }
}
