//! The engine on a real GPU, with the real provider: `cargo test -p downbeat-engine --test it --
//! --ignored gpu_device`. Each test has the GPU to itself. If the driver is the stand-in
//! (`LD_LIBRARY_PATH`), the tests leave out the checks that need real kernels.

mod faults;
mod lanes;
mod memory;
mod partitions;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use downbeat_engine::{Cut, Engine, Lane, LoadError, LoadOptions, Model, Span, State, Tensor};
use downbeat_engine_ort::{Choice, CudaOptions, Preference, Search, choose};

use crate::engines::onnxruntime;
use crate::model;
use crate::support::Random;

static TURN: Mutex<()> = Mutex::new(());

/// The engine on the first GPU, which this test has to itself.
struct Gpu {
    engine: Arc<dyn Engine>,
    _turn: MutexGuard<'static, ()>,
}

impl Gpu {
    fn new() -> Gpu {
        Gpu::with(&CudaOptions::default())
    }

    fn with(options: &CudaOptions) -> Gpu {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let options = CudaOptions { devices: vec![0], ..options.clone() };
        let search = Search { threads: 2, ..Search::from_env() };
        match choose(Preference::Cuda, &search, &options) {
            Ok(Choice { engine, .. }) => Gpu { engine, _turn: turn },
            Err(reason) => panic!("this test needs a GPU: {reason}"),
        }
    }

    fn load(&self, path: &Path, cut: Cut) -> Arc<dyn Model> {
        self.try_load(path, cut).unwrap_or_else(|e| panic!("{e}"))
    }

    fn try_load(&self, path: &Path, cut: Cut) -> Result<Arc<dyn Model>, LoadError> {
        self.engine.load(&LoadOptions::new(path, 1).with_cut(cut))
    }

    /// The same model on the CPU, by the same library.
    fn on_host(&self, path: &Path) -> Arc<dyn Model> {
        let host = onnxruntime().expect("the library is loaded");
        host.load(&LoadOptions::new(path, 2)).unwrap_or_else(|e| panic!("{e}"))
    }
}

/// Whether the driver is the stand-in, whose kernels run on the host. A caller must hold a [`Gpu`].
fn stands_in() -> bool {
    // SAFETY: a driver is loaded; the test only asks whether the symbol is present.
    unsafe { cudarc::driver::sys::culib().get::<unsafe extern "C" fn()>(b"stand_in_view\0") }.is_ok()
}

/// Runs all segments.
fn run(lane: &mut dyn Lane, segments: usize, tensors: Vec<Tensor>) -> Vec<Tensor> {
    let mut state = State { tensors };
    lane.run(0..segments, &mut state).unwrap_or_else(|e| panic!("{e}"));
    state.tensors
}

fn span(lane: &dyn Lane) -> Span {
    lane.last_run().expect("it has run")
}

/// The time of a lane's last launch on the device, microseconds.
fn micros(lane: &dyn Lane) -> u64 {
    span(lane).took().expect("the device is there").as_nanos() / 1000
}

/// `layers` products of `[n, width]` with weights of `[width, width]`, each with ReLU; with one
/// weight for all if `shared`.
fn products(folder: &Path, width: usize, layers: usize, shared: bool) -> std::path::PathBuf {
    let mut random = Random::new("products");
    let scale = (6.0 / width as f32).sqrt();
    let mut weight = |name: &str| {
        let elements: Vec<f32> = (0..width * width).map(|_| random.float() * scale).collect();
        model::floats(name, &[width as i64, width as i64], &elements)
    };
    let weights: Vec<_> = (0..if shared { 1 } else { layers }).map(|index| weight(&format!("w{index}"))).collect();
    let mut nodes = Vec::new();
    let mut value = "x".to_owned();
    for layer in 0..layers {
        let name = &weights[layer % weights.len()].name;
        let (product, next) = (format!("p{layer}"), if layer + 1 == layers { "y".into() } else { format!("r{layer}") });
        nodes.push(model::node("MatMul", &[&value, name], &[&product]));
        nodes.push(model::node("Relu", &[&product], &[&next]));
        value = next;
    }
    let dims = [-1, width as i64];
    let (input, output) = (model::value("x", model::FLOAT, &dims), model::value("y", model::FLOAT, &dims));
    model::write(folder, "products.onnx", &model::model(nodes, weights, vec![input], vec![output]))
}
