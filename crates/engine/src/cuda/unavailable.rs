//! Why no GPU can be used: one line for each reason, with what to do.

use std::path::PathBuf;

use super::libcuda::{DriverVersion, GpuInfo, OLDEST_CAPABILITY, OLDEST_DRIVER};
use crate::onnxruntime::FindError;

/// Why no GPU can be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CudaUnavailable {
    /// The driver's library does not load.
    #[error(
        "no NVIDIA driver: libcuda.so.1 does not load ({reason}). Install the NVIDIA driver 580 or newer; a container must be started with the GPUs (docker run --gpus all)"
    )]
    NoDriver {
        /// The loader's words.
        reason: String,
    },
    /// What is loaded as the driver is none.
    #[error(
        "the libcuda.so.1 that was loaded is no NVIDIA driver, or too old a one: it has no function {name}. Install the NVIDIA driver 580 or newer, or take another libcuda.so.1 out of LD_LIBRARY_PATH"
    )]
    NoFunction {
        /// The function.
        name: &'static str,
    },
    /// The library is the one that programs are linked with.
    #[error("the libcuda.so.1 that was loaded is a stub to link with. Take the folder of stubs out of LD_LIBRARY_PATH")]
    Stub,
    /// There is a second driver library.
    #[error(
        "libcuda.so and libcuda.so.1 are different libraries here: one may be a stub. Take the folder of stubs out of LD_LIBRARY_PATH"
    )]
    TwoDrivers,
    /// The driver is too old.
    #[error(
        "the NVIDIA driver supports CUDA {found}; CUDA {OLDEST_DRIVER} is needed. Install the NVIDIA driver 580 or newer"
    )]
    DriverTooOld {
        /// What it supports.
        found: DriverVersion,
    },
    /// The driver fails.
    #[error("the NVIDIA driver does not start: error {status} ({said}). {advice}")]
    Driver {
        /// Its status, a `CUresult`.
        status: i32,
        /// What the driver says of it.
        said: String,
        /// What to do.
        advice: &'static str,
    },
    /// The driver sees no GPU.
    #[error(
        "the NVIDIA driver sees no GPU{visible}. See what nvidia-smi lists; a container must be started with the GPUs (docker run --gpus all)"
    )]
    NoGpu {
        /// What the environment lets it see.
        visible: String,
    },
    /// A GPU that was asked for does not exist.
    #[error("GPU {asked} was asked for, and {there}. Correct the GPUs (--gpus, or gpus in [cuda])", there = there(*count))]
    UnknownGpu {
        /// The ordinal.
        asked: u32,
        /// How many there are.
        count: usize,
    },
    /// A GPU was asked for twice.
    #[error("GPU {asked} was asked for twice. Name each once (--gpus, or gpus in [cuda])")]
    Twice {
        /// The ordinal.
        asked: u32,
    },
    /// A GPU is too old.
    #[error(
        "{gpu}: {major}.{minor} or newer is needed by the libraries of CUDA 13. Use another GPU (--gpus), or an engine on the CPU",
        major = OLDEST_CAPABILITY.0, minor = OLDEST_CAPABILITY.1
    )]
    GpuTooOld {
        /// The GPU, or the first of those that there are.
        gpu: GpuInfo,
    },
    /// There is no onnxruntime for CUDA.
    #[error(
        "no onnxruntime with the CUDA provider found (looked {looked}). Run `downbeat engine install --cuda`, or set ORT_DYLIB_PATH to the libonnxruntime.so of a CUDA build"
    )]
    NoLibrary {
        /// Where it was looked for.
        looked: String,
    },
    /// The library has no code that a GPU can run.
    #[error(
        "GPU {} ({}, compute capability {}.{}): this onnxruntime has code for {architectures} only ({}). Use other GPUs (--gpus, or gpus in [cuda]), or set ORT_DYLIB_PATH to the libonnxruntime.so of a build for this one",
        gpu.ordinal, gpu.name, gpu.capability.0, gpu.capability.1, library.display()
    )]
    NoCode {
        /// The GPU.
        gpu: GpuInfo,
        /// What there is code for, in words.
        architectures: String,
        /// The provider's file.
        library: PathBuf,
    },
    /// The library that was named is one for the CPU.
    #[error(
        "the onnxruntime library at {path} (named by {who}) is not for GPUs: there is no {provider} beside it. Correct the path, or run `downbeat engine install --cuda` and leave it out",
        path = path.display()
    )]
    NoProvider {
        /// The library.
        path: PathBuf,
        /// Who named it.
        who: String,
        /// The file that is missing.
        provider: &'static str,
    },
    /// One of NVIDIA's libraries is missing.
    #[error("{name} is missing: no {file} found (looked {looked}). {advice}")]
    Missing {
        /// Which.
        name: &'static str,
        /// Its file.
        file: &'static str,
        /// Where it was looked for.
        looked: String,
        /// What to do.
        advice: &'static str,
    },
    /// Part of one of NVIDIA's libraries is missing.
    #[error("{name} in {folder} is not whole: there is no {file}. {advice}", folder = folder.display())]
    Incomplete {
        /// Which.
        name: &'static str,
        /// Where the rest of it is.
        folder: PathBuf,
        /// The file that is missing.
        file: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// One of NVIDIA's libraries does not load.
    #[error("{name} does not load: {reason}. {advice}")]
    Broken {
        /// Which.
        name: &'static str,
        /// The loader's words, with the file.
        reason: String,
        /// What to do.
        advice: &'static str,
    },
    /// The library does not start, or another one has been loaded by this process.
    #[error(transparent)]
    Library(#[from] FindError),
    /// The engine itself does not start.
    #[error("the engine on the GPU does not start: {0}")]
    Engine(String),
}

impl CudaUnavailable {
    /// The same without what to do, for who does it.
    pub(crate) fn what_is_missing(&self) -> String {
        match self {
            CudaUnavailable::Missing { name, file, looked, .. } => {
                format!("{name} is missing: no {file} found (looked {looked})")
            }
            CudaUnavailable::Incomplete { name, folder, file, .. } => {
                format!("{name} in {} is not whole: there is no {file}", folder.display())
            }
            CudaUnavailable::Broken { name, reason, .. } => format!("{name} does not load: {reason}"),
            other => other.to_string(),
        }
    }
}

fn there(count: usize) -> String {
    match count {
        1 => "the only one is GPU 0".to_owned(),
        count => format!("there are {count}, from GPU 0 to GPU {}", count - 1),
    }
}
