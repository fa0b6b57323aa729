//! A model on the engine's GPUs: its segments, its weights on each GPU, and the sessions that its
//! lanes make.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_engine::cut::SegmentInfo;
use downbeat_engine::cut::activations::Activations;
use downbeat_engine::cut::operator_profile::OperatorProfile;
use downbeat_engine::graph_report::GraphReport;
use downbeat_engine::onnx::graph::OperatorGraph;
use downbeat_engine::onnx::proto::ModelProto;
use downbeat_engine::ring_memory::{RingMemory, RingMemoryError};
use downbeat_engine::tensor::{Buffer, OutOfMemory};
use downbeat_engine::{DeviceShare, Lane, LoadError, LoadOptions, Model, Place, ShapeRange, Share, StreamPriority};
use prost::Message;

use super::super::session::Wiring;
use super::super::{cut, measure};
use super::blueprint::Blueprint;
use super::gpu::Gpu;
use super::graph_log::GraphLog;
use super::lane::CudaLane;
use super::operator_marks::OperatorMarks;
use super::session_maker::{SessionMaker, share};
use super::weights::Weights;
use crate::cuda::{CudaBuffer, Provider, ring_on_device};

/// Batches up to this size are all warmed up: small ones are the most frequent, and gain most by
/// graphs.
const ALL_WARM: usize = 8;

/// A model on GPUs.
pub(super) struct CudaModel {
    shared: Arc<CudaShared>,
    infos: Vec<SegmentInfo>,
    activations: Option<Activations>,
    operators: Option<Arc<OperatorProfile>>,
    /// The priority of the lanes' streams.
    priority: StreamPriority,
    /// The share of lanes whose place names none.
    share: Share,
}

/// The parts of a model that its lanes share.
pub(super) struct CudaShared {
    pub maker: Arc<SessionMaker>,
    pub signature: Signature,
    pub blueprints: Vec<Blueprint>,
    /// Whether all inputs and outputs have a first axis that may be the batch.
    may_be_batched: bool,
    /// Whether the first axis is the batch, according to the server.
    is_batched: AtomicBool,
    /// Whether only the batch varies in its inputs.
    is_fixed: bool,
    /// The reason why no launch may become a graph; `None`: launches may.
    pub no_graphs: Option<&'static str>,
    /// The log of each present lane, and the number of lanes so far.
    graphs: Mutex<(Vec<Weak<GraphLog>>, usize)>,
    /// The sizes with memory for graphs, ascending; `None`: all sizes.
    sizes: RwLock<Option<Vec<usize>>>,
    gpus: Vec<OnGpu>,
}

/// A model on one GPU.
struct OnGpu {
    gpu: Arc<Gpu>,
    /// Copied to the GPU when its first lane is made.
    weights: Mutex<Option<Arc<Weights>>>,
}

/// The whole model as one segment.
pub(super) fn whole(maker: &SessionMaker, signature: &Signature) -> Result<cut::CutModel, String> {
    let model = match maker.options.provider {
        Provider::Cuda => cut::read::<ModelProto>(&maker.folder.path().join(cut::MODEL))?.encode_to_vec(),
        Provider::Tensorrt => Vec::new(),
    };
    let names = |specs: &[TensorSpec]| specs.iter().map(|s| s.name.clone()).collect();
    let segment = cut::Segment {
        model,
        inputs: names(&signature.inputs),
        outputs: names(&signature.outputs),
        wiring: Wiring::whole(signature),
    };
    let (infos, activations) = (Vec::new(), Activations::default());
    Ok(cut::CutModel { segments: vec![segment], infos, activations, operators: None })
}

/// Measures the times and values of the whole model's operators on a GPU, in one session.
pub(super) fn measure(
    maker: &SessionMaker,
    gpu: &Arc<Gpu>,
    signature: &Signature,
    model: &ModelProto,
    graph: &OperatorGraph,
) -> Result<OperatorProfile, String> {
    let folder = maker.folder.path();
    if gpu.has_host_kernels {
        // The library's own profile has the times of host kernels.
        return measure::measure(&|| maker.builder(gpu, None), model, graph, signature, folder, None);
    }
    let marks = OperatorMarks::new(gpu)?;
    let weights = Weights::load(gpu, model, folder)?;
    let builder = || {
        let mut builder = marks.register(maker.builder(gpu, Some(marks.stream()))?)?;
        share(&mut builder, weights.values().iter()).map_err(ort::Error::new)?;
        Ok(builder)
    };
    measure::measure(&builder, model, graph, signature, folder, Some(&marks))
}

impl CudaModel {
    /// Makes the model that is cut as `plan` says, on these GPUs, loaded as the options say.
    pub(super) fn new(
        maker: Arc<SessionMaker>,
        gpus: Vec<Arc<Gpu>>,
        signature: Signature,
        plan: cut::CutModel,
        options: &LoadOptions,
    ) -> Result<CudaModel, String> {
        let cut::CutModel { segments, infos, activations, operators } = plan;
        let blueprints = segments.into_iter().map(Blueprint::new).collect::<Result<_, _>>()?;
        let is_batched =
            |spec: &TensorSpec| spec.dims.first().is_some_and(|d| *d < 0) && spec.datatype != DataType::Bytes;
        let may_be_batched = signature.inputs.iter().chain(&signature.outputs).all(is_batched);
        let is_fixed = |spec: &TensorSpec| spec.dims.iter().skip(1).all(|d| *d >= 0);
        let is_fixed = signature.inputs.iter().all(is_fixed);
        let no_graphs = match maker.options.provider {
            Provider::Tensorrt => Some("TensorRT decides where the model runs"),
            Provider::Cuda if maker.options.graphs => None,
            Provider::Cuda => Some("graphs are off (cuda.graphs)"),
        };
        let gpus = gpus.into_iter().map(|gpu| OnGpu { gpu, weights: Mutex::default() }).collect();
        let shared = Arc::new(CudaShared {
            maker,
            signature,
            blueprints,
            may_be_batched,
            is_batched: AtomicBool::new(false),
            is_fixed,
            no_graphs,
            graphs: Mutex::default(),
            sizes: RwLock::default(),
            gpus,
        });
        let activations = (!infos.is_empty()).then_some(activations);
        let (priority, share) = (options.priority, options.share);
        Ok(CudaModel { shared, infos, activations, operators, priority, share })
    }
}

impl CudaShared {
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
            // TensorRT's engines have weights of their own.
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

    fn segment_info(&self) -> &[SegmentInfo] {
        &self.infos
    }

    fn activations(&self) -> Option<&Activations> {
        self.activations.as_ref()
    }

    fn operators(&self) -> Option<&Arc<OperatorProfile>> {
        self.operators.as_ref()
    }

    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError> {
        let lane = || {
            let on = self.shared.on_gpu(place.device)?;
            let stream = on.gpu.stream(place.share.or(self.share), self.priority).map_err(|e| e.to_string())?;
            let graphs = self.shared.graph_log(place.device);
            CudaLane::new(self.shared.clone(), on.gpu.clone(), stream, self.shared.weights(on)?, graphs)
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
            Some(on) => ring_on_device(slots, slot_bytes, &on.gpu.device, longest),
            None => RingMemory::new(slots, slot_bytes),
        }
    }

    fn input_buffer(&self, bytes: usize) -> Result<Buffer, OutOfMemory> {
        // Any GPU can copy from memory that another GPU has pinned.
        let pinned = self.shared.gpus.first().and_then(|on| on.gpu.pinned.take(bytes).ok());
        pinned.map_or_else(|| Buffer::try_with_capacity(bytes), |pinned| Ok(Buffer::pinned(pinned)))
    }

    fn lost(&self, device: usize) -> Option<String> {
        self.shared.gpus.get(device)?.gpu.device.lost().map(ToString::to_string)
    }

    fn filled_length(&self, length: usize) -> usize {
        // A multiple of eight suits products of matrices, and an eighth more costs little beside a
        // graph's gain.
        let has_graphs = self.shared.no_graphs.is_none() && !self.shared.has_plans();
        if has_graphs { length.next_multiple_of((length.next_power_of_two() / 16).max(8)) } else { length }
    }

    fn graphs(&self) -> Vec<GraphReport> {
        let graphs = self.shared.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        graphs.0.iter().filter_map(Weak::upgrade).flat_map(|log| log.reports()).collect()
    }

    fn set_batched(&self, is_batched: bool) {
        self.shared.is_batched.store(is_batched, Ordering::Relaxed);
    }

    fn set_shapes(&self, inputs: Vec<ShapeRange>) {
        *self.shared.maker.shapes.lock().unwrap_or_else(PoisonError::into_inner) = inputs;
    }

    fn device_share(&self, device: usize) -> Option<DeviceShare> {
        let on = self.shared.gpus.get(device)?;
        let weights = on.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let made = self.shared.maker.made.lock().unwrap_or_else(PoisonError::into_inner);
        let (sessions, session_bytes) = made.get(&on.gpu.device.ordinal()).copied().unwrap_or_default();
        let weights = weights.as_ref().map_or(0, |weights| weights.bytes() as u64);
        Some(DeviceShare { weights, sessions, session_bytes })
    }

    fn set_sizes(&self, sizes: &[usize]) {
        let mut sizes = sizes.to_vec();
        sizes.sort_unstable();
        *self.shared.sizes.write().unwrap_or_else(PoisonError::into_inner) = Some(sizes);
    }

    fn sizes_to_warm(&self, most: usize) -> Vec<usize> {
        if self.shared.maker.options.provider == Provider::Tensorrt {
            // Without a profile TensorRT compiles for the range between the sizes that were run.
            return if most > 1 { vec![most, 1] } else { vec![1] };
        }
        // The largest first, so that its memory serves the other sizes.
        let sizes = (1..=most).rev();
        match (self.shared.has_plans(), self.shared.is_fixed && self.shared.no_graphs.is_none()) {
            (true, _) => sizes.filter(|rows| self.shared.filled(*rows) == *rows || *rows == most).collect(),
            // Other sizes become graphs in service, if they come often.
            (false, true) => sizes
                .filter(|rows| *rows <= ALL_WARM || step(*rows) == *rows || *rows == most)
                .filter(|rows| self.shared.has_room(*rows))
                .collect(),
            (false, false) => Vec::new(),
        }
    }
}

impl CudaShared {
    /// Whether some segment prepares its kernels anew for each size.
    fn has_plans(&self) -> bool {
        self.blueprints.iter().any(|blueprint| blueprint.has_plans)
    }

    /// The key of a segment's session for batches of `rows`; 0: one session for all sizes.
    pub(super) fn session_key(&self, blueprint: &Blueprint, rows: usize) -> usize {
        if blueprint.has_plans { rows } else { 0 }
    }

    /// The log for the segments of a new lane.
    fn graph_log(&self, device: usize) -> Arc<GraphLog> {
        let mut graphs = self.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        let (logs, count) = &mut *graphs;
        let log = Arc::new(GraphLog::new(device, *count));
        *count += 1;
        logs.retain(|log| log.strong_count() > 0);
        logs.push(Arc::downgrade(&log));
        log
    }

    /// Whether there is memory at load for a graph of batches of this size.
    fn has_room(&self, rows: usize) -> bool {
        let sizes = self.sizes.read().unwrap_or_else(PoisonError::into_inner);
        sizes.as_ref().is_none_or(|sizes| sizes.binary_search(&rows).is_ok())
    }

    /// The number of rows that a batch is filled up to if kernels are prepared for each size. There
    /// are few enough sizes for a session each, and at most a third more rows.
    pub(super) fn filled(&self, rows: usize) -> usize {
        if !self.may_be_batched || !self.is_batched.load(Ordering::Relaxed) {
            return rows;
        }
        if let Some(sizes) = &*self.sizes.read().unwrap_or_else(PoisonError::into_inner) {
            return sizes.iter().copied().find(|size| *size >= rows).unwrap_or(rows);
        }
        step(rows)
    }
}

/// The smallest of the sizes 1, 2, 3, 4, 6, 8, 12, 16, ... that is at least `rows`.
fn step(rows: usize) -> usize {
    let power = rows.next_power_of_two();
    if rows <= power / 4 * 3 { (power / 4 * 3).max(rows) } else { power }
}
