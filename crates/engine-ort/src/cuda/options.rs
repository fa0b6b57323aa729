//! The options for GPUs.

use std::fmt;
use std::str::FromStr;

/// The options of the engine on NVIDIA GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// Ordinals of the GPUs to use, as the driver numbers them; empty: all.
    pub devices: Vec<u32>,
    /// Whether FP32 products may be rounded to TF32 inside the tensor cores, as onnxruntime's own
    /// default is.
    pub tf32: bool,
    /// Largest arena of one session, bytes; `None`: unbounded.
    pub memory_limit: Option<u64>,
    /// The provider of onnxruntime.
    pub provider: Provider,
    /// The action if no GPU can be used.
    pub missing: Missing,
    /// Whether launches are recorded as CUDA graphs if that makes them faster.
    pub graphs: bool,
    /// Whether convolutions have their channels last: cuDNN then adds the bias in the same kernel.
    /// Each session then has its own copy of the convolutions' weights.
    pub nhwc: bool,
}

impl Default for CudaOptions {
    /// All GPUs, with TF32 and graphs, channels as in the model, without a limit; an error if there
    /// is no GPU.
    fn default() -> CudaOptions {
        CudaOptions {
            devices: Vec::new(),
            tf32: true,
            memory_limit: None,
            provider: Provider::default(),
            missing: Missing::default(),
            graphs: true,
            nhwc: false,
        }
    }
}

/// A provider of onnxruntime, which runs a model's operators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Provider {
    /// onnxruntime's own kernels, cuDNN and cuBLAS.
    #[default]
    Cuda,
    /// TensorRT, with the CUDA provider for the operators that it lacks.
    Tensorrt,
}

impl Provider {
    /// The provider's name, which is also the engine's.
    pub const fn name(self) -> &'static str {
        match self {
            Provider::Cuda => "cuda",
            Provider::Tensorrt => "tensorrt",
        }
    }

    /// The provider's file beside the library.
    pub(crate) const fn library_file(self) -> &'static str {
        match self {
            Provider::Cuda => "libonnxruntime_providers_cuda.so",
            Provider::Tensorrt => "libonnxruntime_providers_tensorrt.so",
        }
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The action if a GPU engine is wanted and no GPU can be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missing {
    /// Report the reason, and exit.
    #[default]
    Exit,
    /// Report the reason, and run on the CPU.
    Cpu,
}

impl Missing {
    /// The names of actions that a user may write.
    pub const NAMES: [&str; 2] = ["exit", "cpu"];
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Missing::Exit => "exit",
            Missing::Cpu => "cpu",
        })
    }
}

impl FromStr for Missing {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "exit" => Ok(Missing::Exit),
            "cpu" => Ok(Missing::Cpu),
            other => Err(format!(
                "'{}' is not a known choice for a machine without a GPU; expected one of {}",
                other.chars().take(64).collect::<String>(),
                Missing::NAMES.join(", ")
            )),
        }
    }
}
