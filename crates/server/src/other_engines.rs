//! The engines on the CPU beside the engine of most models. Each is made when the first model needs it.

use std::sync::{Arc, OnceLock};

use downbeat_engine::{CudaOptions, Engine, ExecutorProgram, Isolated, Preference, Search, at_normal_priority, choose};

/// An engine, in this process and where its models have processes of their own.
pub struct Made {
    pub plain: Arc<dyn Engine>,
    /// `None`: no model of the server asks for that.
    pub isolated: Option<Arc<dyn Engine>>,
}

impl Made {
    /// The engine, and with `isolated` executor processes whose pools have so many threads.
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn new(plain: Arc<dyn Engine>, isolated: Option<usize>) -> std::io::Result<Made> {
        let make = |threads| Isolated::new(plain.clone(), threads, ExecutorProgram::default());
        let isolated = isolated.map(make).transpose()?.map(|isolated| Arc::new(isolated) as Arc<dyn Engine>);
        Ok(Made { plain, isolated })
    }
}

/// Makes engines at the priority of the server. Threads of an engine inherit the priority of the thread that makes the engine, and loads have a low priority.
pub struct OtherEngines {
    search: Search,
    /// As of [`Made::new`].
    isolated: Option<usize>,
    rten: OnceLock<Result<Made, String>>,
    onnxruntime: OnceLock<Result<Made, String>>,
}

impl OtherEngines {
    /// None is made yet. `isolated`: as of [`Made::new`].
    pub fn new(search: Search, isolated: Option<usize>) -> Self {
        OtherEngines { search, isolated, rten: OnceLock::new(), onnxruntime: OnceLock::new() }
    }

    /// An engine on the CPU. Slow the first time.
    ///
    /// # Errors
    /// In words, if it cannot be used here.
    pub fn get(&self, preference: Preference) -> Result<&Made, String> {
        let place = match preference {
            Preference::Rten => &self.rten,
            Preference::Onnxruntime => &self.onnxruntime,
            _ => return Err("no single model chooses this engine".to_owned()),
        };
        let make = || {
            let (search, isolated) = (self.search.clone(), self.isolated);
            at_normal_priority(move || {
                let engine = choose(preference, &search, &CudaOptions::default()).map_err(|e| e.to_string())?.engine;
                Made::new(engine, isolated).map_err(|e| e.to_string())
            })
        };
        place.get_or_init(make).as_ref().map_err(Clone::clone)
    }
}
