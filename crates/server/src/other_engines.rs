//! The engines on the CPU beside the engine of most models. Each is made when the first model needs it.

use std::sync::mpsc;
use std::sync::{Arc, OnceLock};

use downbeat_engine::{CudaOptions, Engine, ExecutorProgram, Isolated, Preference, Search, choose};
use parking_lot::Mutex;

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

type Answer = Result<Made, String>;
type Request = (Preference, mpsc::SyncSender<Answer>);

/// Makes engines, on a thread of its own: threads of an engine inherit the priority of the thread that starts them, and loads run at a low one.
pub struct OtherEngines {
    requests: Mutex<mpsc::Sender<Request>>,
    rten: OnceLock<Answer>,
    onnxruntime: OnceLock<Answer>,
}

impl OtherEngines {
    /// None is made yet. `isolated`: as of [`Made::new`].
    ///
    /// # Errors
    /// If the operating system has no thread left.
    pub fn new(search: Search, isolated: Option<usize>) -> std::io::Result<Self> {
        let (sender, requests) = mpsc::channel::<Request>();
        let make = move |preference| {
            let engine = choose(preference, &search, &CudaOptions::default()).map_err(|e| e.to_string())?.engine;
            Made::new(engine, isolated).map_err(|e| e.to_string())
        };
        let serve = move || {
            for (preference, answer) in requests {
                // Who asked has gone only if the process ends.
                let _ = answer.send(make(preference));
            }
        };
        std::thread::Builder::new().name("other-engines".to_owned()).spawn(serve)?;
        Ok(OtherEngines { requests: Mutex::new(sender), rten: OnceLock::new(), onnxruntime: OnceLock::new() })
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
        let ask = || {
            let (answer, made) = mpsc::sync_channel(1);
            self.requests.lock().send((preference, answer)).map_err(|e| e.to_string())?;
            made.recv().map_err(|e| e.to_string())?
        };
        place.get_or_init(ask).as_ref().map_err(Clone::clone)
    }
}
