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
mod blueprint;
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
mod providers;
mod recorded_run;
mod segment_session;
mod session_maker;
mod tensorrt;
mod weights;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use downbeat_core::tensor::DataType;
use downbeat_engine::cut::Cut;
use downbeat_engine::division::{Division, DivisionError};
use downbeat_engine::onnx;
use downbeat_engine::onnx::graph::OperatorGraph;
use downbeat_engine::onnx::proto::ModelProto;
use downbeat_engine::{DeviceMemory, Engine, EngineInfo, LoadError, LoadOptions, Model};

use super::runtime::{Runtime, reason};
use super::{cut, session};
use crate::cuda::{self, CudaError, CudaOptions, Provider};
use gpu::Gpu;
pub(super) use operator_marks::{Marked, OperatorMarks};

/// ONNX Runtime on the GPUs of a process.
#[derive(Clone)]
pub struct OnnxruntimeCuda {
    runtime: Arc<Runtime>,
    gpus: Vec<Arc<Gpu>>,
    options: CudaOptions,
}

impl OnnxruntimeCuda {
    /// The engine on these GPUs, whose driver and libraries are loaded.
    pub(super) fn new(runtime: Arc<Runtime>, devices: &[u32], options: &CudaOptions) -> Result<Self, CudaError> {
        let has_host_kernels =
            cuda::stands_in() && !runtime.library.with_file_name(options.provider.library_file()).exists();
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
        let beside = onnx::data_folder(&options.path);
        let external: BTreeSet<&str> = file.external_locations().collect();
        let files =
            std::iter::once(options.path.clone()).chain(external.into_iter().map(|location| beside.join(location)));
        let EngineInfo { version, device, .. } = self.info();
        let folder = tensorrt::Folder::new(cache, files, &options.tensorrt, &format!("{version}-{device}"));
        let warn = |error| {
            tracing::warn!(path = %options.path.display(), %error, "compiled TensorRT engines are not kept: each start compiles them again");
        };
        folder.map_err(warn).ok()
    }

    fn load_cuda(&self, options: &LoadOptions, gpu: &Arc<Gpu>) -> Result<model::CudaModel, LoadError> {
        let file = onnx::check(&options.path)?;
        let inputs = file.signature(|_| Some((DataType::Fp32, Vec::new())))?.inputs;
        let error = |reason: String| LoadError::Model { path: options.path.clone(), engine: self.name(), reason };
        let folder = downbeat_engine::process::scratch::folder()
            .map_err(|e| error(format!("no temporary folder to cut it in: {e}")))?;
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
                "TensorRT compiles a model as a whole, so it cannot be cut into stages. Use the engine cuda, or another device policy than staged",
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
