//! A model on the GPUs of the engine: its segments, its weights on each GPU, and the sessions that lanes make of them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use downbeat_core::Duration;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use ort::{AsPointer, api};
use prost::Message;

use super::super::session::{Names, Source, Wiring};
use super::super::value::check;
use super::super::{Runtime, commit, cut};
use super::gpu::Gpu;
use super::lane::CudaLane;
use super::providers;
use super::weights::Weights;
use crate::activations::Activations;
use crate::cuda::{CudaOptions, Provider, Stream};
use crate::onnx::proto::ModelProto;
use crate::probe;
use crate::ring_memory::{RingMemory, RingMemoryError};
use crate::segment::SegmentInfo;
use crate::state::State;
use crate::tensor::{Buffer, OutOfMemory};
use crate::traits::{Lane, LoadError, Model, Place};

/// Makes sessions of a model.
pub(super) struct SessionMaker {
    pub runtime: Arc<Runtime>,
    pub options: CudaOptions,
    /// Of the whole model.
    pub inputs: Vec<TensorSpec>,
    /// The model's own file.
    pub path: PathBuf,
    /// Where the optimised model is, and its weights: sessions look for the file of weights, also those that have them from us.
    pub folder: tempfile::TempDir,
}

impl SessionMaker {
    /// The name of the engine that the sessions are of.
    pub(super) fn engine(&self) -> &'static str {
        self.options.provider.name()
    }

    /// Loads the whole model and saves it as the library optimised it for the GPU.
    pub(super) fn optimise(&self, gpu: &Gpu) -> ort::Result<Session> {
        let builder = self.on_gpu(self.runtime.builder(1, &self.inputs)?, gpu, None)?;
        let _turn = gpu.turn();
        if self.options.provider == Provider::Tensorrt {
            // What TensorRT compiles cannot be saved: lanes load the file itself.
            return commit(builder, |b| b.commit_from_file(&self.path));
        }
        // What the highest level does beyond this is for the CPU, and the library warns that such a graph may not be saved for another machine.
        let builder = builder.with_optimization_level(GraphOptimizationLevel::Level2)?;
        cut::optimise(builder, &self.path, self.folder.path())
    }

    /// A builder of sessions for what was saved.
    pub(super) fn builder(&self, gpu: &Gpu, stream: Option<&Stream>) -> ort::Result<SessionBuilder> {
        self.on_gpu(self.runtime.part_builder(1, &self.inputs, self.folder.path())?, gpu, stream)
    }

    fn on_gpu(&self, builder: SessionBuilder, gpu: &Gpu, stream: Option<&Stream>) -> ort::Result<SessionBuilder> {
        if gpu.has_host_kernels {
            return Ok(builder);
        }
        // An arena of its own: what it gives back is used again in the order of its stream only.
        let builder = builder.with_config_entry("session.use_env_allocators", "0")?;
        Ok(builder.with_execution_providers(providers(&self.options, gpu, stream))?)
    }

    /// A session of a segment, that enqueues in `stream` and uses `weights`, which have to outlive it.
    pub(super) fn session(
        &self,
        gpu: &Gpu,
        segment: &Blueprint,
        weights: Option<&Weights>,
        stream: Option<&Stream>,
    ) -> Result<Session, String> {
        let error = |e: ort::Error| gpu.explain(e.message().to_owned()).0;
        gpu.enter().map_err(|e| e.to_string())?;
        let _turn = gpu.turn();
        let Some(model) = &segment.model else {
            let builder = self.runtime.builder(1, &self.inputs).and_then(|b| self.on_gpu(b, gpu, stream));
            return builder.and_then(|b| commit(b, |b| b.commit_from_file(&self.path))).map_err(error);
        };
        let mut builder = self.builder(gpu, stream).map_err(error)?;
        for (name, value) in weights.iter().flat_map(|weights| weights.values()) {
            if segment.weights.binary_search(name).is_err() {
                continue;
            }
            let name = std::ffi::CString::new(name.as_str()).map_err(|e| format!("weight '{name}': {e}"))?;
            // SAFETY: the options and the value are alive; the library copies the name.
            check(unsafe { (api().AddInitializer)(builder.ptr_mut(), name.as_ptr(), value.as_raw()) })?;
        }
        commit(builder, |b| b.commit_from_memory(model)).map_err(error)
    }
}

/// A segment, of which each lane makes sessions.
pub(super) struct Blueprint {
    /// The model, encoded; `None`: the whole one as it is in its file.
    model: Option<Vec<u8>>,
    /// The names of its weights, sorted.
    weights: Vec<String>,
    pub names: Arc<Names>,
    pub wiring: Wiring,
    /// Which outputs are left on the host: strings.
    pub on_host: Vec<bool>,
    /// Whether its kernels are set up anew when a batch has another size than the one before: the library keeps what cuDNN planned for one size only.
    pub has_plans: bool,
}

impl Blueprint {
    fn new(segment: cut::Segment) -> Result<Blueprint, String> {
        let cut::Segment { model, inputs, outputs, wiring } = segment;
        let names = Arc::new(Names::new(&inputs, &outputs)?);
        let spec = |index: usize| wiring.gives.iter().find(|(_, source)| *source == Source::Made(index));
        let on_host = (0..outputs.len()).map(|index| spec(index).is_some_and(|(s, _)| s.datatype == DataType::Bytes));
        let on_host = on_host.collect();
        let mut blueprint = Blueprint { model: None, weights: Vec::new(), names, wiring, on_host, has_plans: false };
        if model.is_empty() {
            return Ok(blueprint);
        }
        let proto = ModelProto::decode(model.as_slice()).map_err(|e| format!("the segment cannot be read: {e}"))?;
        let graph = proto.graph.ok_or("the segment has no graph")?;
        blueprint.has_plans = graph.node.iter().any(|node| matches!(node.op_type.as_str(), "Conv" | "ConvTranspose"));
        let names = graph.initializer.iter().map(|bytes| {
            let weight = crate::onnx::proto::WeightProto::decode(bytes.clone());
            weight.map(|weight| weight.name).map_err(|e| format!("a weight cannot be read: {e}"))
        });
        blueprint.weights = names.collect::<Result<_, _>>()?;
        blueprint.weights.sort_unstable();
        blueprint.model = Some(model);
        Ok(blueprint)
    }
}

/// A model on GPUs.
pub(super) struct CudaModel {
    shared: Arc<Shared>,
    infos: Vec<SegmentInfo>,
    activations: Option<Activations>,
}

/// What the lanes of a model share.
pub(super) struct Shared {
    pub maker: Arc<SessionMaker>,
    pub signature: Signature,
    pub blueprints: Vec<Blueprint>,
    /// Whether all inputs and outputs have a first axis that may be the batch.
    may_be_batched: bool,
    /// Whether it is, as whoever serves the model says.
    is_batched: AtomicBool,
    /// Whether launches may be recorded as graphs: nothing but the batch varies.
    pub may_record: bool,
    gpus: Vec<OnGpu>,
}

/// A model on one GPU.
struct OnGpu {
    gpu: Arc<Gpu>,
    /// Copied there when its first lane is made.
    weights: Mutex<Option<Arc<Weights>>>,
}

/// The whole model as one segment.
pub(super) fn whole(maker: &SessionMaker, signature: &Signature) -> Result<cut::CutModel, String> {
    let model = match maker.options.provider {
        Provider::Cuda => cut::read(&maker.folder.path().join(cut::MODEL))?.encode_to_vec(),
        Provider::Tensorrt => Vec::new(),
    };
    let names = |specs: &[TensorSpec]| specs.iter().map(|s| s.name.clone()).collect();
    let segment = cut::Segment {
        model,
        inputs: names(&signature.inputs),
        outputs: names(&signature.outputs),
        wiring: Wiring::whole(signature),
    };
    Ok(cut::CutModel { segments: vec![segment], infos: Vec::new(), activations: Activations::default() })
}

/// What segments take on a GPU, one after another, on a batch of one: the median of some runs.
pub(super) fn time(
    maker: &Arc<SessionMaker>,
    gpu: &Arc<Gpu>,
    signature: &Signature,
    segments: &[cut::Segment],
) -> Result<Vec<Duration>, String> {
    /// Runs, of which the first ones are not counted.
    const RUNS: usize = 7;
    const WARM_UP: usize = 2;
    let plan = cut::CutModel { segments: segments.to_vec(), infos: Vec::new(), activations: Activations::default() };
    let model = CudaModel::new(maker.clone(), vec![gpu.clone()], signature.clone(), plan)?;
    let run = |probe: probe::Probe| {
        let mut lane = model.lane().map_err(|e| e.to_string())?;
        let mut times = vec![Vec::new(); segments.len()];
        for turn in 0..RUNS {
            let mut state = State { tensors: probe.inputs(signature, 1, probe.length)? };
            for (index, times) in times.iter_mut().enumerate() {
                lane.run(index..index + 1, &mut state).map_err(|e| e.reason)?;
                let (begin, end) = lane.last_run().ok_or("a run on a GPU has no times")?;
                if turn >= WARM_UP {
                    times.push(Duration::from_nanos(end.as_nanos().saturating_sub(begin.as_nanos())));
                }
            }
        }
        Ok(times)
    };
    let (_, mut times) = probe::first(signature, run)?;
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    };
    Ok(times.iter_mut().map(median).collect())
}

impl CudaModel {
    /// A model that is cut as `plan` says, on these GPUs.
    pub(super) fn new(
        maker: Arc<SessionMaker>,
        gpus: Vec<Arc<Gpu>>,
        signature: Signature,
        plan: cut::CutModel,
    ) -> Result<CudaModel, String> {
        let cut::CutModel { segments, infos, activations } = plan;
        let blueprints = segments.into_iter().map(Blueprint::new).collect::<Result<_, _>>()?;
        let is_batched =
            |spec: &TensorSpec| spec.dims.first().is_some_and(|d| *d < 0) && spec.datatype != DataType::Bytes;
        let may_be_batched = signature.inputs.iter().chain(&signature.outputs).all(is_batched);
        let is_fixed = |spec: &TensorSpec| spec.dims.iter().skip(1).all(|d| *d >= 0);
        let may_record =
            maker.options.graphs && maker.options.provider == Provider::Cuda && signature.inputs.iter().all(is_fixed);
        let gpus = gpus.into_iter().map(|gpu| OnGpu { gpu, weights: Mutex::default() }).collect();
        let shared = Arc::new(Shared {
            maker,
            signature,
            blueprints,
            may_be_batched,
            is_batched: AtomicBool::new(false),
            may_record,
            gpus,
        });
        let activations = (!infos.is_empty()).then_some(activations);
        Ok(CudaModel { shared, infos, activations })
    }
}

impl Shared {
    /// The model's weights on a GPU.
    fn weights(&self, on: &OnGpu) -> Result<Arc<Weights>, String> {
        let mut weights = on.weights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(weights) = &*weights {
            return Ok(weights.clone());
        }
        let loaded = match self.maker.options.provider {
            Provider::Cuda => {
                let model = cut::read(&self.maker.folder.path().join(cut::MODEL))?;
                Weights::load(&on.gpu, &model, self.maker.folder.path())?
            }
            // What it compiles has weights of its own.
            Provider::Tensorrt => Weights::default(),
        };
        let loaded = Arc::new(loaded);
        tracing::debug!(path = %self.maker.path.display(), gpu = on.gpu.device.ordinal(), bytes = loaded.bytes(), "weights");
        *weights = Some(loaded.clone());
        Ok(loaded)
    }

    fn on_gpu(&self, device: usize) -> Result<&OnGpu, String> {
        self.gpus.get(device).ok_or_else(|| format!("there is no device {device}: {} GPUs are in use", self.gpus.len()))
    }
}

impl Model for CudaModel {
    fn signature(&self) -> &Signature {
        &self.shared.signature
    }

    fn segments(&self) -> usize {
        self.shared.blueprints.len()
    }

    fn segment_info(&self) -> &[SegmentInfo] {
        &self.infos
    }

    fn activations(&self) -> Option<&Activations> {
        self.activations.as_ref()
    }

    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError> {
        let lane = || {
            let on = self.shared.on_gpu(place.device)?;
            let stream = on.gpu.stream(place).map_err(|e| e.to_string())?;
            CudaLane::new(self.shared.clone(), on.gpu.clone(), stream, self.shared.weights(on)?)
        };
        let lane = lane().map_err(|reason| LoadError::Model {
            path: self.shared.maker.path.clone(),
            engine: self.shared.maker.engine(),
            reason,
        });
        Ok(Box::new(lane?))
    }

    fn ring_memory(
        &self,
        device: usize,
        slots: u32,
        slot_bytes: usize,
        longest: u32,
    ) -> Result<Arc<RingMemory>, RingMemoryError> {
        match self.shared.gpus.get(device) {
            Some(on) => RingMemory::on_device(slots, slot_bytes, &on.gpu.device, longest),
            None => RingMemory::new(slots, slot_bytes),
        }
    }

    fn input_buffer(&self, bytes: usize) -> Result<Buffer, OutOfMemory> {
        // Any GPU copies from what one of them has pinned.
        let pinned = self.shared.gpus.first().and_then(|on| on.gpu.pinned.take(bytes).ok());
        pinned.map_or_else(|| Buffer::try_with_capacity(bytes), |pinned| Ok(Buffer::pinned(pinned)))
    }

    fn lost(&self, device: usize) -> Option<String> {
        self.shared.gpus.get(device)?.gpu.device.lost().map(ToString::to_string)
    }

    fn set_batched(&self, is_batched: bool) {
        self.shared.is_batched.store(is_batched, Ordering::Relaxed);
    }

    fn sizes_to_warm(&self, most: usize) -> Vec<usize> {
        let has_plans = self.shared.blueprints.iter().any(|blueprint| blueprint.has_plans);
        // The largest first, so that the memory that is taken for it serves the others.
        match (has_plans, self.shared.may_record) {
            (true, _) => (1..=most).rev().filter(|rows| self.shared.filled(*rows) == *rows || *rows == most).collect(),
            // The last one stands for the sizes that share a session.
            (false, true) => {
                (1..=most).rev().filter(|rows| rows.is_power_of_two()).chain((most > 2).then_some(3)).collect()
            }
            (false, false) => Vec::new(),
        }
    }
}

impl Shared {
    /// Under what a segment's session for batches of `rows` is kept; 0: one for all sizes.
    pub(super) fn session_key(&self, blueprint: &Blueprint, rows: usize) -> usize {
        // What is recorded is for one size; a session for each would take too much memory.
        let is_recorded = self.may_record && rows.is_power_of_two();
        if blueprint.has_plans || is_recorded { rows } else { 0 }
    }

    /// How many rows a batch is filled up to where kernels are set up for each size: few enough sizes to have a session for each, and at most a third more
    /// rows.
    pub(super) fn filled(&self, rows: usize) -> usize {
        if !self.may_be_batched || !self.is_batched.load(Ordering::Relaxed) {
            return rows;
        }
        let power = rows.next_power_of_two();
        if rows <= power / 4 * 3 { (power / 4 * 3).max(rows) } else { power }
    }
}
