//! Models, batches and random numbers for tests.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use downbeat_core::tensor::{DataType, Signature};
use downbeat_engine::{Buffer, Engine, Lane, LoadOptions, Model, RunError, State, Tensor};

/// Loads a model with one thread a run.
pub fn load(engine: &dyn Engine, path: &Path) -> Arc<dyn Model> {
    try_load(engine, path).unwrap_or_else(|e| panic!("{}: {e}", engine.info().name))
}

/// As [`load`], for models that may be refused.
pub fn try_load(engine: &dyn Engine, path: &Path) -> Result<Arc<dyn Model>, downbeat_engine::LoadError> {
    engine.load(&LoadOptions::new(path, 1))
}

/// A lane on the model.
pub fn lane(model: &dyn Model) -> Box<dyn Lane> {
    model.lane().unwrap_or_else(|e| panic!("{e}"))
}

/// Runs a whole model.
pub fn run(lane: &mut dyn Lane, tensors: Vec<Tensor>) -> Result<Vec<Tensor>, RunError> {
    let mut state = State { tensors };
    let result = lane.run(0..1, &mut state);
    assert!(result.is_ok() || state.tensors.is_empty(), "the state is empty after an error");
    result.map(|()| state.tensors)
}

/// A tensor of 32-bit floats.
pub fn floats(shape: &[usize], elements: &[f32]) -> Tensor {
    let mut data = Buffer::with_capacity(elements.len() * 4);
    elements.iter().for_each(|f| data.extend_from_slice(&f.to_le_bytes()));
    Tensor { datatype: DataType::Fp32, shape: shape.to_vec(), data }
}

/// The elements of a tensor of 32-bit floats.
pub fn as_floats(tensor: &Tensor) -> Vec<f32> {
    assert_eq!(tensor.datatype, DataType::Fp32);
    let (chunks, rest) = tensor.data.as_slice().as_chunks::<4>();
    assert!(rest.is_empty());
    chunks.iter().map(|c| f32::from_le_bytes(*c)).collect()
}

/// Random numbers by SplitMix64.
pub struct Random(u64);

impl Random {
    /// The seed is `DOWNBEAT_TEST_SEED` or a constant, and printed, so that a failure can be
    /// repeated.
    pub fn new(what: &str) -> Random {
        let seed = std::env::var("DOWNBEAT_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(7);
        println!("{what}: DOWNBEAT_TEST_SEED={seed}");
        Random(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Uniform in 0..n.
    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }

    /// Inputs for a signature, `varying` giving each varying size by input and axis. Integers are
    /// small, as token ids are, and 0 or 1 in masks.
    pub fn inputs(&mut self, signature: &Signature, varying: impl Fn(usize, usize) -> usize) -> Vec<Tensor> {
        let inputs = signature.inputs.iter().enumerate();
        let tensors = inputs.map(|(index, spec)| {
            let sizes = spec.dims.iter().enumerate();
            let shape: Vec<usize> =
                sizes.map(|(axis, d)| usize::try_from(*d).unwrap_or_else(|_| varying(index, axis))).collect();
            let most = if spec.name.contains("mask") { 2 } else { 32 };
            let mut data = Buffer::new();
            for _ in 0..shape.iter().product() {
                match spec.datatype {
                    DataType::Fp32 => data.extend_from_slice(&self.float().to_le_bytes()),
                    DataType::Int64 => data.extend_from_slice(&(self.below(most) as i64).to_le_bytes()),
                    DataType::Int32 => data.extend_from_slice(&(self.below(most) as i32).to_le_bytes()),
                    DataType::Bool => data.extend_from_slice(&[self.below(2) as u8]),
                    other => panic!("no random {other}"),
                }
            }
            Tensor { datatype: spec.datatype, shape, data }
        });
        tensors.collect()
    }
}

/// A copy of tensors, which themselves move with the batch.
pub fn copy(tensors: &[Tensor]) -> Vec<Tensor> {
    let copy =
        |t: &Tensor| Tensor { datatype: t.datatype, shape: t.shape.clone(), data: Buffer::from(t.data.as_slice()) };
    tensors.iter().map(copy).collect()
}

/// Fails unless two sets of outputs are the same but for rounding.
pub fn assert_close(what: &str, a: &[Tensor], b: &[Tensor], tolerance: f32) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (index, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!((a.datatype, &a.shape), (b.datatype, &b.shape), "{what}: output {index}");
        if a.datatype != DataType::Fp32 {
            assert_eq!(a.data.as_slice(), b.data.as_slice(), "{what}: output {index}");
            continue;
        }
        let (a, b) = (as_floats(a), as_floats(b));
        let scale = a.iter().chain(&b).fold(1.0f32, |m, x| m.max(x.abs()));
        for (element, (a, b)) in a.iter().zip(&b).enumerate() {
            assert!((a - b).abs() <= tolerance * scale, "{what}: output {index}, element {element}: {a} and {b}");
        }
    }
}

/// The examples of the repository.
pub fn example(name: &str) -> PathBuf {
    // Cargo sets the variable at run time, too. A user who carries the tests to another machine
    // sets it on that machine.
    let crate_folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_owned());
    Path::new(&crate_folder).join("../../examples/models").join(name).join("1/model.onnx")
}
