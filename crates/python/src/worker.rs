//! The worker that runs in a model's Python, and the way to start it.

use std::ffi::OsString;
use std::sync::{Arc, LazyLock};

use downbeat_engine::isolation::{ExecutorProgram, Worker};

use crate::environment::Interpreter;

/// The name of the engine.
pub const NAME: &str = "python";

/// Reads the modules of the worker from its socket, and runs them.
const BOOT: &str = include_str!("worker/boot.py");

/// The modules of the worker, in the order in which they are imported.
const MODULES: [(&str, &str); 3] = [
    ("triton_python_backend_utils", include_str!("worker/triton_python_backend_utils.py")),
    ("downbeat_side", include_str!("worker/downbeat_side.py")),
    ("downbeat_worker", include_str!("worker/downbeat_worker.py")),
];

static SOURCE: LazyLock<Arc<str>> = LazyLock::new(|| serde_json::json!(MODULES).to_string().into());

/// The program of the processes of `model`.
pub fn program(interpreter: &Interpreter, model: &str) -> ExecutorProgram {
    let arguments: [OsString; 3] = ["-u".into(), "-c".into(), BOOT.into()];
    ExecutorProgram {
        program: interpreter.program.clone(),
        arguments: arguments.into(),
        worker: Some(Worker {
            source: SOURCE.clone(),
            environment: interpreter.environment.clone(),
            model: model.to_owned(),
        }),
    }
}
