//! Makes a model's sessions on a GPU, with the library's providers and the shared weights. Only one
//! session at a time is made on a GPU.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use downbeat_core::tensor::TensorSpec;
use downbeat_engine::{ShapeRange, Share};
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use ort::{AsPointer, api};

use super::super::cut;
use super::super::runtime::{Runtime, commit, commit_file, keep_floats8};
use super::super::value::{Value, check};
use super::blueprint::Blueprint;
use super::gpu::Gpu;
use super::providers::providers;
use super::tensorrt;
use super::weights::Weights;
use crate::cuda::{CudaOptions, Provider, Stream};

/// Makes the sessions of a model.
pub(super) struct SessionMaker {
    pub runtime: Arc<Runtime>,
    pub options: CudaOptions,
    /// The inputs of the whole model.
    pub inputs: Vec<TensorSpec>,
    /// The model's own file.
    pub path: PathBuf,
    /// The folder of the optimised model and its weights. Sessions open the file of weights even if
    /// they get the weights from here.
    pub folder: tempfile::TempDir,
    /// Whether the model has 8-bit floats.
    pub has_floats8: bool,
    /// The model's own options for TensorRT.
    pub tensorrt: BTreeMap<String, String>,
    /// The folder for TensorRT's results.
    pub tensorrt_folder: Option<tensorrt::Folder>,
    /// The shapes that the model is served with; empty: unknown.
    pub shapes: Mutex<Vec<ShapeRange>>,
    /// The number of the lanes' sessions so far, and the bytes that they took, by the number of the
    /// GPU.
    pub made: Mutex<BTreeMap<u32, (u64, u64)>>,
}

impl SessionMaker {
    /// The name of the sessions' engine.
    pub(super) fn engine(&self) -> &'static str {
        self.options.provider.name()
    }

    /// Loads the whole model, and saves it as the library optimised it for the GPU.
    pub(super) fn optimise(&self, gpu: &Gpu) -> ort::Result<Session> {
        let builder = keep_floats8(self.runtime.builder(1, &Share::Whole, &self.inputs)?, self.has_floats8)?;
        let builder = self.on_gpu(builder, gpu, None, false, None)?;
        let _turn = gpu.turn();
        if self.options.provider == Provider::Tensorrt {
            // TensorRT's engines cannot be saved: lanes load the file itself, once the shapes are
            // known.
            return commit_file(builder, &self.path);
        }
        // The highest level adds only optimisations for the CPU. The library warns that such a
        // graph may not be saved for another machine.
        let builder = builder.with_optimization_level(GraphOptimizationLevel::Level2)?;
        cut::optimise(builder, &self.path, self.folder.path())
    }

    /// A builder of sessions for the saved model.
    pub(super) fn builder(&self, gpu: &Gpu, stream: Option<&Stream>) -> ort::Result<SessionBuilder> {
        let builder = self.runtime.part_builder(1, &Share::Whole, &self.inputs, self.folder.path())?;
        self.on_gpu(builder, gpu, stream, true, None)
    }

    fn on_gpu(
        &self,
        builder: SessionBuilder,
        gpu: &Gpu,
        stream: Option<&Stream>,
        is_optimised: bool,
        tensorrt: Option<&BTreeMap<String, String>>,
    ) -> ort::Result<SessionBuilder> {
        if gpu.has_host_kernels {
            return Ok(builder);
        }
        // An arena of its own, which reuses memory only in the order of its stream.
        let builder = builder.with_config_entry("session.use_env_allocators", "0")?;
        Ok(builder.with_execution_providers(providers(&self.options, gpu, stream, is_optimised, tensorrt))?)
    }

    /// A session of the whole model on TensorRT that enqueues in `stream`. Its engine is built now,
    /// or read from the folder of the last start.
    fn on_tensorrt(&self, gpu: &Gpu, stream: Option<&Stream>) -> ort::Result<Session> {
        let make = |shapes: &[ShapeRange]| {
            let options = tensorrt::options(&self.tensorrt, self.tensorrt_folder.as_ref(), shapes);
            tracing::debug!(path = %self.path.display(), ?options, "TensorRT");
            let builder = keep_floats8(self.runtime.builder(1, &Share::Whole, &self.inputs)?, self.has_floats8)?;
            commit_file(self.on_gpu(builder, gpu, stream, false, Some(&options))?, &self.path)
        };
        let shapes = self.shapes.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match make(&shapes) {
            Err(error) if tensorrt::wants_other_shapes(error.message()) => {
                tracing::warn!(
                    path = %self.path.display(), reason = error.message(),
                    "TensorRT runs parts of the model only and compiles them in their first runs. Give the shapes of their inputs, too, as trt_profile_min_shapes, \
                     trt_profile_opt_shapes and trt_profile_max_shapes"
                );
                make(&[])
            }
            made => made,
        }
    }

    /// A session of a segment that enqueues in `stream`. It uses `weights`, which must outlive it.
    pub(super) fn session(
        &self,
        gpu: &Gpu,
        segment: &Blueprint,
        weights: Option<&Weights>,
        stream: Option<&Stream>,
    ) -> Result<Session, String> {
        gpu.enter()?;
        let _turn = gpu.turn();
        // During the turn, so that no other session is counted.
        let free = || gpu.device.free_memory().unwrap_or(0);
        let before = free();
        let session = self.make(gpu, segment, weights, stream)?;
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, bytes) = made.entry(gpu.device.ordinal()).or_default();
        *count += 1;
        *bytes += before.saturating_sub(free());
        Ok(session)
    }

    fn make(
        &self,
        gpu: &Gpu,
        segment: &Blueprint,
        weights: Option<&Weights>,
        stream: Option<&Stream>,
    ) -> Result<Session, String> {
        let error = |e: ort::Error| gpu.explain(e.message().to_owned()).0;
        let Some(model) = &segment.model else {
            return self.on_tensorrt(gpu, stream).map_err(error);
        };
        let mut builder = self.builder(gpu, stream).map_err(error)?;
        let values = weights.iter().flat_map(|weights| weights.values());
        share(&mut builder, values.filter(|(name, _)| segment.weights.binary_search(name).is_ok()))?;
        commit(builder, |b| b.commit_from_memory(model)).map_err(error)
    }
}

/// Gives a session the values of weights that it does not load. They must outlive the session.
pub(super) fn share<'a>(
    builder: &mut SessionBuilder,
    weights: impl Iterator<Item = (&'a String, &'a Value)>,
) -> Result<(), String> {
    for (name, value) in weights {
        let name = std::ffi::CString::new(name.as_str()).map_err(|e| format!("weight '{name}': {e}"))?;
        // SAFETY: the options and the value are alive; the library copies the name.
        check(unsafe { (api().AddInitializer)(builder.ptr_mut(), name.as_ptr(), value.as_raw()) })?;
    }
    Ok(())
}
