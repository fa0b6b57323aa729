//! Isolation: a model in a process of its own, an executor process, which a server starts and
//! watches. A fault that ends or blocks that process, such as a segmentation fault in an engine's
//! library, costs this model and no other.
//!
//! ```text
//! server                                        executor process
//! lane  --- socket: run these segments --->  thread --- the engine's lane
//!    \----- memory of both: tensors -----/
//! thread --- control socket: load, open a lane, end a run
//! ```
//!
//! Each lane has a socket of its own, so that lanes do not wait for each other. Weights are in the
//! executor process alone. A batch comes back with its tensors even between two segments, so that
//! splitting and joining batches works as without isolation. A process that has ended is started
//! again, with its lanes. The lanes repeat their first runs before they serve.

mod child;
mod executor;
mod instance;
mod lane;
mod message;
mod model;
mod output;
mod side;

use std::sync::Arc;

pub use child::{Wanted, serve};
pub use executor::{ExecutorProgram, Worker};
pub use instance::{Instance, InstanceStarter, LoadedInstance, OnMetering};
pub use message::{TrialLimits, read_as_process};
pub use side::{AnswerTable, Side};

use crate::emulated;
use crate::memory::run_memory::RunMemory;
use crate::traits::division::{Division, DivisionError};
use crate::traits::{DeviceMemory, Engine, EngineInfo, LoadError, LoadOptions, Model, Share};
use executor::{Spawner, Supervisor};
use message::LoadCall;
use model::{Handle, IsolatedModel};

/// An engine on the CPU whose models run in processes of their own.
pub struct Isolated {
    engine: Arc<dyn Engine>,
    /// Threads of the pool that runs share.
    pool: usize,
    program: ExecutorProgram,
    spawner: Spawner,
    limits: Option<TrialLimits>,
}

impl Isolated {
    /// Makes the same engine in processes that run `program`, whose pools have `threads` threads
    /// (0: one a core). Call it on a thread of normal priority: the processes inherit its niceness.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn new(engine: Arc<dyn Engine>, threads: usize, program: ExecutorProgram) -> std::io::Result<Self> {
        Ok(Isolated { engine, pool: threads, program, spawner: Spawner::start()?, limits: None })
    }

    /// The same engine for trials. Each process has these limits and smaller stacks than this
    /// process. It dumps no core, and is not started again after its end.
    #[must_use]
    pub fn for_trials(self, limits: TrialLimits) -> Self {
        Isolated { limits: Some(limits), ..self }
    }
}

impl Engine for Isolated {
    fn info(&self) -> EngineInfo {
        let info = self.engine.info();
        // Measurements of a model include the way to its process and back.
        EngineInfo { device: format!("{} in a process", info.device), ..info }
    }

    fn load(&self, options: &LoadOptions) -> Result<Arc<dyn Model>, LoadError> {
        let EngineInfo { name, library, .. } = self.engine.info();
        let LoadOptions { path, threads, share, cut, memory, cache, operators, .. } = options;
        let refused = |reason: String| LoadError::Model { path: path.clone(), engine: name, reason };
        let cores = match share {
            Share::Whole => None,
            Share::Cores(cores) => Some(cores.to_string()),
            Share::Units(_) | Share::AllBut(_) | Share::Part(_) => {
                return Err(refused(
                    "a model on compute units of a device cannot have a process of its own".to_owned(),
                ));
            }
        };
        let call = LoadCall {
            engine: name.to_owned(),
            library,
            pool: self.pool,
            path: path.clone(),
            threads: *threads,
            cores,
            cut: cut.clone(),
            cache: cache.clone(),
            operators: operators.as_deref().cloned(),
            limits: self.limits,
            settings: serde_json::Value::Null,
        };
        let memory = match name {
            emulated::NAME => None,
            _ => RunMemory::of(path, memory.as_ref()).map_err(refused)?,
        };
        let executor = Supervisor::new(self.program.clone(), call, name, None);
        let handle = Arc::new(Handle { executor, engine: name });
        let loaded = handle.executor.start(&self.spawner)?;
        Ok(Arc::new(IsolatedModel::new(handle, loaded, operators.as_ref(), memory)))
    }

    fn lost(&self) -> Option<String> {
        self.engine.lost()
    }

    fn divide(&self, parts: &[String]) -> Result<Division, DivisionError> {
        self.engine.divide(parts)
    }

    fn divide_freely(&self, parts: &[String]) -> Result<Division, DivisionError> {
        self.engine.divide_freely(parts)
    }

    fn weight_copies(&self) -> u64 {
        self.engine.weight_copies()
    }

    fn device_memory(&self, device: usize) -> Option<DeviceMemory> {
        self.engine.device_memory(device)
    }
}
