//! The engines of this machine.

use std::sync::Arc;

use downbeat_engine::{Engine, Rten};
use downbeat_engine_ort::{Onnxruntime, Search};

/// The engines of this machine: always `rten`, and `onnxruntime` if its library is found. Without
/// the library it prints so, and fails if `DOWNBEAT_REQUIRE_ONNXRUNTIME` is 1, as on CI.
pub fn engines() -> Vec<Arc<dyn Engine>> {
    let mut engines: Vec<Arc<dyn Engine>> = vec![Arc::new(Rten::new())];
    engines.extend(onnxruntime().map(|e| Arc::new(e) as Arc<dyn Engine>));
    engines
}

/// `onnxruntime`, see [`engines`].
pub fn onnxruntime() -> Option<Onnxruntime> {
    let search = Search { python: true, threads: 2, ..Search::from_env() };
    let required = std::env::var("DOWNBEAT_REQUIRE_ONNXRUNTIME").is_ok_and(|v| v == "1");
    match Onnxruntime::find(&search) {
        Ok(Some(engine)) => Some(engine),
        Ok(None) => {
            assert!(!required, "DOWNBEAT_REQUIRE_ONNXRUNTIME is 1, but no onnxruntime library was found");
            println!("skipped: no onnxruntime library found; set ORT_DYLIB_PATH to test it too");
            None
        }
        Err(e) => panic!("{e}"),
    }
}
