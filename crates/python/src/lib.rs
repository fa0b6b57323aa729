//! Python models: a `model.py` as users of Triton write it, in processes of its own.
//!
//! Each instance of a model is a process of the user's Python, which runs a worker
//! (`src/worker/`). The processes are started, watched and started again by
//! [`downbeat_engine::isolation`]. Tensors lie in memory that only the server and the process know.

mod engine;
mod environment;
mod instances;
mod lane;
mod model;
mod side;
mod worker;

pub use engine::{OnMetering, PythonEngine};
pub use side::{CallAnswer, Fault, ModelCall, Named, OnAnswer, OnCall, OpenCall, read_as_process};
pub use worker::NAME;
