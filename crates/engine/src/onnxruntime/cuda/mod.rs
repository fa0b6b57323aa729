//! ONNX Runtime on NVIDIA GPUs, through its CUDA provider.
//!
//! The library optimises a model for the GPU; then it is saved and cut, as on the CPU. Its weights
//! are copied to each GPU once. Each lane has a stream, and a session for each segment, which
//! enqueues its kernels in the stream and uses those weights. A launch is enqueued and ends with an
//! event: lanes overlap, and no call blocks the whole GPU.
//!
//! `docs/results/gpu.md` describes the library's use of CUDA.

mod agreement;
mod binding;
mod division;
mod gpu;
mod graph_log;
mod graph_table;
mod host_kernels;
mod lane;
mod model;
mod operator_marks;
mod pending;
mod placement;
mod recorded_run;
mod segment_session;
mod session_maker;
mod tensorrt;
mod weights;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use downbeat_core::tensor::DataType;
use ort::ep::{self, ArbitrarilyConfigurableExecutionProvider as _};

use super::{Onnxruntime, Runtime, cut, provider_file, reason, session};
use crate::cuda::{self, CudaError, CudaOptions, CudaUnavailable, Provider, Ready, Stream};
use crate::division::{Division, DivisionError};
use crate::onnx;
use crate::onnx::graph::OperatorGraph;
use crate::onnx::proto::ModelProto;
use crate::segment::Cut;
use crate::traits::{DeviceMemory, Engine, EngineInfo, LoadError, LoadOptions, Model};
use gpu::Gpu;
pub(super) use operator_marks::{Marked, OperatorMarks};

/// ONNX Runtime on the GPUs of a process.
#[derive(Clone)]
pub struct OnnxruntimeCuda {
    runtime: Arc<Runtime>,
    gpus: Vec<Arc<Gpu>>,
    options: CudaOptions,
}

/// Starts the engine on the GPUs of `ready`. `threads` is the size of the pool for models that run
/// on the CPU, the calling thread included; 0: one a core.
///
/// # Errors
/// If the library does not start, or a GPU is lost or out of memory.
pub fn start(ready: Ready, options: &CudaOptions, threads: usize) -> Result<Arc<dyn Engine>, CudaUnavailable> {
    let library = Onnxruntime::with_gpu_library(&ready.library, threads)?;
    let ordinals: Vec<u32> = ready.gpus.iter().map(|gpu| gpu.ordinal).collect();
    let failed = |error: CudaError| CudaUnavailable::new("the engine on the GPU does not start", error);
    let engine = library.on_gpus(&ordinals, options).map_err(failed)?;
    Ok(Arc::new(engine))
}

impl OnnxruntimeCuda {
    /// The engine on these GPUs, whose driver and libraries are loaded.
    pub(super) fn new(runtime: Arc<Runtime>, devices: &[u32], options: &CudaOptions) -> Result<Self, CudaError> {
        let has_host_kernels =
            cuda::stands_in() && !runtime.library.with_file_name(provider_file(options.provider)).exists();
        if has_host_kernels {
            tracing::warn!("the NVIDIA driver is the stand-in of the tests: kernels run on the CPU");
        }
        let open = |ordinal: &u32| Gpu::open(*ordinal, has_host_kernels).map(Arc::new);
        let gpus = devices.iter().map(open).collect::<Result<_, _>>()?;
        Ok(OnnxruntimeCuda { runtime, gpus, options: options.clone() })
    }

    fn name(&self) -> &'static str {
        self.options.provider.name()
    }

    /// The library's version, with the options that change the time of a batch. Stored profiles
    /// belong to both.
    fn version(&self) -> String {
        let CudaOptions { tf32, graphs, nhwc, .. } = self.options;
        let option = |is: bool, name: &'static str| if is { name } else { "" };
        let changed = [option(!tf32, "-no-tf32"), option(!graphs, "-no-graphs"), option(nhwc, "-nhwc")];
        format!("{}{}", self.runtime.version, changed.concat())
    }

    /// The folder for TensorRT's results about a model.
    fn tensorrt_folder(&self, options: &LoadOptions, file: &onnx::Checked<'_>) -> Option<tensorrt::Folder> {
        let cache = options.cache.as_ref().filter(|_| self.options.provider == Provider::Tensorrt)?;
        let beside = options.path.parent().unwrap_or(Path::new("."));
        let external: BTreeSet<&str> = file.external_locations().collect();
        let files =
            std::iter::once(options.path.clone()).chain(external.into_iter().map(|location| beside.join(location)));
        let EngineInfo { version, device, .. } = self.info();
        let folder = tensorrt::Folder::new(cache, files, &options.tensorrt, &format!("{version}-{device}"));
        let warn = |error| {
            tracing::warn!(path = %options.path.display(), %error, "what TensorRT compiles is not kept, and compiled again at each start");
        };
        folder.map_err(warn).ok()
    }

    fn load_cuda(&self, options: &LoadOptions, gpu: &Arc<Gpu>) -> Result<model::CudaModel, LoadError> {
        let file = onnx::check(&options.path)?;
        let inputs = file.signature(|_| Some((DataType::Fp32, Vec::new())))?.inputs;
        let error = |reason: String| LoadError::Model { path: options.path.clone(), engine: self.name(), reason };
        let folder = crate::scratch::folder().map_err(|e| error(format!("no temporary folder to cut it in: {e}")))?;
        let library_error = |e: ort::Error| error(gpu.explain(reason(e.message())).0);
        let maker = Arc::new(session_maker::SessionMaker {
            runtime: self.runtime.clone(),
            options: self.options.clone(),
            inputs,
            path: options.path.clone(),
            folder,
            has_floats8: file.has_floats8(),
            tensorrt: options.tensorrt.clone(),
            tensorrt_folder: self.tensorrt_folder(options, &file),
            shapes: Mutex::default(),
            made: Mutex::default(),
        });
        gpu.enter().map_err(|e| error(e.to_string()))?;
        let whole = maker.optimise(gpu).map_err(library_error)?;
        let signature = file.signature(|output| session::output(&whole, output))?;
        {
            let _turn = gpu.turn();
            drop(whole);
        }
        let plan = if options.cut == Cut::Whole {
            model::whole(&maker, &signature)
        } else {
            let measure =
                |model: &ModelProto, graph: &OperatorGraph| model::measure(&maker, gpu, &signature, model, graph);
            cut::cut(&measure, options, &signature, maker.folder.path(), false)
        };
        model::CudaModel::new(maker, self.gpus.clone(), signature, plan.map_err(error)?, options).map_err(error)
    }
}

impl Engine for OnnxruntimeCuda {
    fn info(&self) -> EngineInfo {
        let mut names: Vec<&str> = self.gpus.iter().map(|gpu| gpu.device.name()).collect();
        names.dedup();
        EngineInfo {
            name: self.name(),
            version: self.version(),
            device: match self.gpus.len() {
                1 => names.join(", "),
                count => format!("{count} of {}", names.join(", ")),
            },
            library: Some(PathBuf::from(&self.runtime.library)),
        }
    }

    fn load(&self, options: &LoadOptions) -> Result<Arc<dyn Model>, LoadError> {
        let error = |reason: &str| LoadError::Model {
            path: options.path.clone(),
            engine: self.name(),
            reason: reason.to_owned(),
        };
        if self.options.provider == Provider::Tensorrt && options.cut != Cut::Whole {
            return Err(error(
                "TensorRT compiles a model as a whole, it cannot be cut into stages. Use the engine cuda, or another device policy than staged",
            ));
        }
        let working = self.gpus.iter().find(|gpu| gpu.device.lost().is_none());
        let gpu = match (working, self.gpus.first().and_then(|gpu| gpu.device.lost())) {
            (Some(gpu), _) => gpu,
            (None, Some(lost)) => return Err(error(&lost.to_string())),
            (None, None) => return Err(error("there is no GPU")),
        };
        Ok(Arc::new(self.load_cuda(options, gpu)?))
    }

    fn divide(&self, parts: &[String]) -> Result<Division, DivisionError> {
        division::divide(&self.gpus, parts)
    }

    fn divide_freely(&self, parts: &[String]) -> Result<Division, DivisionError> {
        // Green contexts of one split have no common unit. The interference between contexts of
        // several splits was never measured.
        if parts.is_empty() {
            return Err(DivisionError::none_named());
        }
        self.divide(parts)
    }

    fn lost(&self) -> Option<String> {
        let lost = self.gpus.iter().map(|gpu| gpu.device.lost()).collect::<Option<Vec<_>>>()?;
        lost.first().map(ToString::to_string)
    }

    fn device_memory(&self, device: usize) -> Option<DeviceMemory> {
        let device = &self.gpus.get(device)?.device;
        Some(DeviceMemory { ordinal: device.ordinal(), total: device.memory(), free: device.free_memory().ok()? })
    }
}

/// The providers of a session's operators; the first that can run an operator does. `is_optimised`:
/// the providers have already optimised the graph. `tensorrt`: the options of TensorRT, if the
/// session uses it.
fn providers(
    options: &CudaOptions,
    gpu: &Gpu,
    stream: Option<&Stream>,
    is_optimised: bool,
    tensorrt: Option<&BTreeMap<String, String>>,
) -> Vec<ep::ExecutionProviderDispatch> {
    let device = i32::try_from(gpu.device.ordinal()).unwrap_or(i32::MAX);
    let raw = stream.map(|stream| stream.raw().cast::<()>());
    let mut cuda = ep::CUDA::default()
        .with_device_id(device)
        .with_tf32(options.tf32)
        .with_arena_extend_strategy(ep::ArenaExtendStrategy::SameAsRequested)
        // Trying every algorithm takes seconds for each size of batch.
        .with_conv_algorithm_search(ep::cuda::ConvAlgorithmSearch::Heuristic)
        // Once: a graph with turned layouts would be turned to and fro again, and its values have
        // other shapes.
        .with_prefer_nhwc(options.nhwc && !is_optimised)
        // With channels first cuDNN also adds a tensor. The library clears that tensor in the
        // process's default stream, which has no order with ours.
        .with_fuse_conv_bias(options.nhwc);
    if let Some(limit) = options.memory_limit {
        cuda = cuda.with_memory_limit(usize::try_from(limit).unwrap_or(usize::MAX));
    }
    if let Some(raw) = raw {
        // SAFETY: the stream outlives the session: lanes drop their sessions first.
        cuda = unsafe { cuda.with_compute_stream(raw) };
    }
    let mut providers = Vec::new();
    if let Some(options) = tensorrt {
        let mut tensorrt = ep::TensorRT::default().with_device_id(device);
        for (key, value) in options {
            tensorrt = tensorrt.with_arbitrary_config(key, value);
        }
        if let Some(raw) = raw {
            // SAFETY: as above.
            tensorrt = unsafe { tensorrt.with_compute_stream(raw) };
        }
        providers.push(tensorrt.build().error_on_failure());
    }
    providers.push(cuda.build().error_on_failure());
    providers
}
