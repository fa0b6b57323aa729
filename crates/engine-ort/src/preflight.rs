//! Checks whether the GPUs can be used, before onnxruntime starts on them: its errors say less, and
//! come later.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use downbeat_engine::Engine;

use crate::cuda::libcuda::{self, OLDEST_CAPABILITY};
use crate::cuda::{
    self, Architectures, CudaError, CudaOptions, CudaUnavailable, DriverInfo, DriverVersion, FoundLibrary, GpuInfo,
    Provider,
};
use crate::onnxruntime::Onnxruntime;
use crate::search::Search;

/// The state from which an engine on GPUs starts: the driver is initialised, and all libraries but
/// onnxruntime are loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The newest CUDA that the driver supports.
    pub driver: DriverVersion,
    /// The GPUs to use, in the requested order; at least one.
    pub gpus: Vec<GpuInfo>,
    /// The onnxruntime library, with its providers beside it.
    pub library: PathBuf,
    /// NVIDIA's libraries in loading order.
    pub libraries: Vec<FoundLibrary>,
}

/// Finds and loads the parts that the GPUs need: the driver and NVIDIA's libraries, but not
/// onnxruntime. Makes no context on any GPU.
///
/// # Errors
/// The first part that is missing or does not work, with its remedy.
pub fn preflight(search: &Search, options: &CudaOptions) -> Result<Ready, CudaUnavailable> {
    let driver = libcuda::driver()?;
    let gpus = choose(&driver, &options.devices)?;
    if cuda::stands_in() && search.gpu_library(options.provider).is_err() {
        // The stand-in runs the kernels of any library for the host.
        let none = || CudaUnavailable::new("the engine on the GPU does not start", "No onnxruntime library was found");
        let library = Onnxruntime::find(search)?.ok_or_else(none)?;
        let library = library.library().to_owned();
        return Ok(Ready { driver: driver.version, gpus, library, libraries: Vec::new() });
    }
    let library = search.gpu_library(options.provider)?;
    let gpus = with_code(gpus, !options.devices.is_empty(), &library)?;
    let libraries = search.nvidia_places(Some(&library)).libraries(options.provider)?;
    for found in &libraries {
        tracing::debug!(path = %found.path.display(), "loading {}", found.component);
        found.load()?;
    }
    Ok(Ready { driver: driver.version, gpus, library, libraries })
}

impl Ready {
    /// Starts the engine on the GPUs. `threads` is the size of the pool for models that run on the
    /// CPU, the calling thread included; 0: one a core.
    ///
    /// # Errors
    /// If the library does not start, or a GPU is lost or out of memory.
    pub fn start(&self, options: &CudaOptions, threads: usize) -> Result<Arc<dyn Engine>, CudaUnavailable> {
        let library = Onnxruntime::with_gpu_library(&self.library, threads)?;
        let ordinals: Vec<u32> = self.gpus.iter().map(|gpu| gpu.ordinal).collect();
        let failed = |error: CudaError| CudaUnavailable::new("the engine on the GPU does not start", error);
        let engine = library.on_gpus(&ordinals, options).map_err(failed)?;
        Ok(Arc::new(engine))
    }
}

/// The GPUs to use among the driver's: the requested ones, or else all that are new enough.
fn choose(driver: &DriverInfo, asked: &[u32]) -> Result<Vec<GpuInfo>, CudaUnavailable> {
    let usable = |gpu: &&GpuInfo| gpu.capability >= OLDEST_CAPABILITY;
    if asked.is_empty() {
        let gpus: Vec<GpuInfo> = driver.gpus.iter().filter(usable).cloned().collect();
        return match driver.gpus.first() {
            Some(gpu) if gpus.is_empty() => Err(too_old(gpu)),
            _ => Ok(gpus),
        };
    }
    let mut gpus: Vec<GpuInfo> = Vec::new();
    for &asked in asked {
        let count = driver.gpus.len();
        let gpu = driver.gpus.iter().find(|gpu| gpu.ordinal == asked);
        let gpu = gpu.ok_or_else(|| {
            let there = match count {
                1 => "the only one is GPU 0".to_owned(),
                count => format!("there are {count}, from GPU 0 to GPU {}", count - 1),
            };
            let what = format!("GPU {asked} was asked for, and {there}");
            CudaUnavailable::new(what, "Correct the GPUs (--gpus, or gpus in [cuda])")
        })?;
        if gpus.contains(gpu) {
            let what = format!("GPU {asked} was asked for twice");
            return Err(CudaUnavailable::new(what, "Name each once (--gpus, or gpus in [cuda])"));
        }
        if !usable(&gpu) {
            return Err(too_old(gpu));
        }
        gpus.push(gpu.clone());
    }
    Ok(gpus)
}

fn too_old(gpu: &GpuInfo) -> CudaUnavailable {
    let (major, minor) = OLDEST_CAPABILITY;
    let what = format!("{gpu}: {major}.{minor} or newer is needed by the libraries of CUDA 13");
    CudaUnavailable::new(what, "Use another GPU (--gpus), or an engine on the CPU")
}

/// The GPUs that the CUDA provider beside `library` has code for; all if that is unknown. It is an
/// error if the provider has no code for a requested GPU, or for any GPU.
fn with_code(gpus: Vec<GpuInfo>, asked: bool, library: &Path) -> Result<Vec<GpuInfo>, CudaUnavailable> {
    let library = library.with_file_name(Provider::Cuda.library_file());
    let all = |found: &Architectures| gpus.iter().all(|gpu| found.includes(gpu.capability));
    let architectures = match Architectures::read(&library, all) {
        Ok(architectures) => architectures,
        Err(error) => {
            tracing::debug!(path = %library.display(), %error, "it is not known which GPUs it has code for");
            return Ok(gpus);
        }
    };
    let (usable, others): (Vec<_>, Vec<_>) = gpus.into_iter().partition(|gpu| architectures.includes(gpu.capability));
    let mut reasons = others.iter().map(|GpuInfo { ordinal, name, capability: (major, minor), .. }| {
        let what = format!(
            "GPU {ordinal} ({name}, compute capability {major}.{minor}): this onnxruntime has code for {architectures} only ({})",
            library.display()
        );
        let advice = "Use other GPUs (--gpus, or gpus in [cuda]), or set ORT_DYLIB_PATH to the libonnxruntime.so of a build for this one";
        CudaUnavailable::new(what, advice)
    });
    match reasons.next() {
        Some(reason) if asked || usable.is_empty() => Err(reason),
        first => {
            first.into_iter().chain(reasons).for_each(|reason| tracing::warn!("not used: {reason}"));
            Ok(usable)
        }
    }
}

/// The parts that GPUs need, each with its own result: for people.
#[derive(Debug)]
pub struct Survey {
    /// The driver and its GPUs.
    pub driver: Result<DriverInfo, CudaUnavailable>,
    /// The onnxruntime library for GPUs, if it has code for one of the GPUs.
    pub library: Result<PathBuf, CudaUnavailable>,
    /// NVIDIA's libraries, not loaded.
    pub libraries: Result<Vec<FoundLibrary>, CudaUnavailable>,
}

/// Searches for the parts that `options.provider` needs, and loads only the driver.
pub fn survey(search: &Search, options: &CudaOptions) -> Survey {
    let driver = libcuda::driver();
    let library = search.gpu_library(options.provider);
    let libraries = search.nvidia_places(library.as_deref().ok()).libraries(options.provider);
    let library = library.and_then(|library| match &driver {
        Ok(driver) => with_code(driver.gpus.clone(), false, &library).map(|_| library),
        Err(_) => Ok(library),
    });
    Survey { driver, library, libraries }
}

/// The GPUs of this machine, if it has a driver that works.
pub(crate) fn gpus() -> Vec<GpuInfo> {
    libcuda::driver().map(|driver| driver.gpus).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(ordinal: u32, capability: (u32, u32)) -> GpuInfo {
        GpuInfo {
            ordinal,
            name: "NVIDIA H200".into(),
            capability,
            memory: 141 << 30,
            multiprocessors: 132,
            uuid: String::new(),
        }
    }

    fn chosen(capabilities: &[(u32, u32)], asked: &[u32]) -> Result<Vec<u32>, String> {
        let gpus = capabilities.iter().zip(0..).map(|(c, ordinal)| gpu(ordinal, *c)).collect();
        let driver = DriverInfo { version: DriverVersion(13_000), gpus };
        let chosen = choose(&driver, asked).map_err(|e| e.to_string())?;
        Ok(chosen.iter().map(|gpu| gpu.ordinal).collect())
    }

    #[test]
    fn all_gpus_that_are_new_enough_or_those_asked_for() {
        assert_eq!(chosen(&[(9, 0), (7, 0), (7, 5)], &[]), Ok(vec![0, 2]));
        assert_eq!(chosen(&[(9, 0), (9, 0), (9, 0)], &[2, 0]), Ok(vec![2, 0]), "in the order asked for");
    }

    #[test]
    fn gpus_that_cannot_be_used_are_named() {
        let said = chosen(&[(9, 0)], &[1]).unwrap_err();
        assert!(said.starts_with("GPU 1 was asked for, and the only one is GPU 0. Correct"), "{said}");
        let said = chosen(&[(9, 0), (9, 0)], &[0, 7]).unwrap_err();
        assert!(said.contains("there are 2, from GPU 0 to GPU 1"), "{said}");
        assert!(chosen(&[(9, 0)], &[0, 0]).unwrap_err().contains("GPU 0 was asked for twice"));
        let too_old = "GPU 1: NVIDIA H200, 141 GiB, 132 SMs, compute capability 7.0: 7.5 or newer is needed";
        assert!(chosen(&[(9, 0), (7, 0)], &[1]).unwrap_err().starts_with(too_old));
        assert!(chosen(&[(5, 0), (7, 0)], &[]).unwrap_err().starts_with("GPU 0: "));
    }
}
