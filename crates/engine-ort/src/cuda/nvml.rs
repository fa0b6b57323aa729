//! NVML, NVIDIA's library to manage GPUs: the power and memory that they use, and the driver's
//! reports about them (Xids).
//!
//! Loaded at run time: drivers bring it and containers may lack it. Serving does not need it.

use std::ffi::{CStr, CString, c_char, c_uint, c_ulonglong};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use downbeat_core::Duration;
use nvml_wrapper_sys::bindings::{self as sys, NvmlLib, nvmlDevice_t, nvmlEventSet_t, nvmlReturn_t};

use super::libcuda::FOLDERS;

/// The library's file name, common to all its users.
const NAME: &str = "libnvidia-ml.so.1";
/// Room for a UUID as text, with the zero at its end: NVML's own figure.
const UUID_BYTES: usize = 96;
/// The version of `nvmlMemory_v2_t`, as NVML composes it. The first version counts the driver's
/// reserve as used.
const MEMORY_V2: c_uint = size_of::<sys::nvmlMemory_v2_t>() as c_uint | (2 << 24);

/// The reason why NVML refuses or fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{words}")]
pub struct NvmlError {
    words: String,
    /// Whether the GPU is gone, or must be reset.
    is_lost: bool,
}

impl NvmlError {
    fn new(words: String) -> NvmlError {
        NvmlError { words, is_lost: false }
    }

    fn no_function(name: &str) -> NvmlError {
        NvmlError::new(format!("{NAME} has no function {name}"))
    }
}

/// The library, loaded and initialised.
pub struct Nvml {
    library: NvmlLib,
}

/// Calls a function of the library, or fails if the library lacks the function.
macro_rules! call {
    ($nvml:expr, $function:ident($($argument:expr),*)) => {
        match &$nvml.library.$function {
            // SAFETY: the library is initialised, and the caller is responsible for the arguments.
            Ok(function) => $nvml.answer(stringify!($function), unsafe { function($($argument),*) }),
            Err(_) => Err(NvmlError::no_function(stringify!($function))),
        }
    };
}

impl Nvml {
    /// Loads and initialises NVML.
    ///
    /// # Errors
    /// If the library is missing, or finds no driver.
    pub fn start() -> Result<Arc<Nvml>, NvmlError> {
        let folders = FOLDERS.iter().map(|folder| Path::new(folder).join(NAME)).filter(|path| path.exists());
        let mut reason = String::new();
        for path in std::iter::once(PathBuf::from(NAME)).chain(folders) {
            // SAFETY: runs the initialisers of a library of the machine's driver; the functions
            // that it has have the types of the bindings.
            match unsafe { NvmlLib::new(&path) } {
                Ok(library) => {
                    let nvml = Nvml { library };
                    return match call!(nvml, nvmlInit_v2()) {
                        Ok(()) => Ok(Arc::new(nvml)),
                        Err(error) => {
                            // A library that was not initialised must not be shut down.
                            std::mem::forget(nvml);
                            Err(error)
                        }
                    };
                }
                Err(error) => reason = error.to_string(),
            }
        }
        Err(NvmlError::new(format!("{NAME} does not load: {reason}")))
    }

    fn answer(&self, what: &'static str, code: nvmlReturn_t) -> Result<(), NvmlError> {
        if code == sys::nvmlReturn_enum_NVML_SUCCESS {
            return Ok(());
        }
        let words = match &self.library.nvmlErrorString {
            // SAFETY: the function takes any code, and answers with a constant of the library.
            Ok(text) => match unsafe { text(code) } {
                text if text.is_null() => format!("error {code}"),
                // SAFETY: not null, so C text.
                text => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            },
            Err(_) => format!("error {code}"),
        };
        let is_lost = matches!(
            code,
            sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST | sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED
        );
        Err(NvmlError { words: format!("{what} failed: {words}"), is_lost })
    }

    fn uuid(&self, device: nvmlDevice_t) -> Result<String, NvmlError> {
        let mut text = [0 as c_char; UUID_BYTES];
        call!(self, nvmlDeviceGetUUID(device, text.as_mut_ptr(), UUID_BYTES as c_uint - 1))?;
        // SAFETY: NVML could not write the last byte, which is zero.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // A failure now does no harm.
        let _ = call!(self, nvmlShutdown());
    }
}

/// A GPU as NVML sees it.
pub struct NvmlGpu {
    nvml: Arc<Nvml>,
    handle: nvmlDevice_t,
    uuid: String,
}

// SAFETY: a handle is a name for the library, which may be called from any thread.
unsafe impl Send for NvmlGpu {}

/// The measurements of a GPU; `None`: the GPU cannot measure the value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NvmlSample {
    /// The part of the last moments in which some work ran, from 0 to 1.
    pub utilization: Option<f64>,
    /// Its present power, watts.
    pub power: Option<f64>,
    /// The limit of its power, watts.
    pub power_limit: Option<f64>,
    /// Its energy since the driver was loaded, joules.
    pub energy: Option<f64>,
    /// Its whole memory, bytes.
    pub memory: Option<u64>,
    /// Memory that processes have taken, bytes.
    pub memory_used: Option<u64>,
}

impl NvmlGpu {
    /// The GPU with this UUID, as in [`super::GpuInfo::uuid`]: a whole one, or an instance of one
    /// (MIG).
    ///
    /// # Errors
    /// If NVML knows no such GPU.
    pub fn find(nvml: &Arc<Nvml>, uuid: &str) -> Result<NvmlGpu, NvmlError> {
        let mut handle = std::ptr::null_mut();
        let mut find = |kind: &str| {
            let text = CString::new(format!("{kind}-{uuid}")).unwrap_or_default();
            call!(nvml, nvmlDeviceGetHandleByUUID(text.as_ptr(), &raw mut handle))
        };
        find("GPU").or_else(|error| find("MIG").map_err(|_| error))?;
        Ok(NvmlGpu { uuid: nvml.uuid(handle)?, nvml: nvml.clone(), handle })
    }

    /// Its UUID as `nvidia-smi` writes it.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Measures the GPU. Takes some milliseconds, and may take longer if the GPU is faulty.
    ///
    /// # Errors
    /// If the GPU is lost.
    pub fn sample(&self) -> Result<NvmlSample, NvmlError> {
        let Self { nvml, handle, .. } = self;
        let mut busy = sys::nvmlUtilization_t { gpu: 0, memory: 0 };
        let (mut power, mut limit, mut energy): (c_uint, c_uint, c_ulonglong) = (0, 0, 0);
        let mut memory = sys::nvmlMemory_v2_t { version: MEMORY_V2, total: 0, reserved: 0, free: 0, used: 0 };
        let busy_known = known(call!(nvml, nvmlDeviceGetUtilizationRates(*handle, &raw mut busy)))?;
        let power_known = known(call!(nvml, nvmlDeviceGetPowerUsage(*handle, &raw mut power)))?;
        let limit_known = known(call!(nvml, nvmlDeviceGetPowerManagementLimit(*handle, &raw mut limit)))?;
        let energy_known = known(call!(nvml, nvmlDeviceGetTotalEnergyConsumption(*handle, &raw mut energy)))?;
        let memory_known = known(call!(nvml, nvmlDeviceGetMemoryInfo_v2(*handle, &raw mut memory)))?;
        Ok(NvmlSample {
            utilization: busy_known.then_some(f64::from(busy.gpu) / 100.0),
            power: power_known.then_some(f64::from(power) / 1e3),
            power_limit: limit_known.then_some(f64::from(limit) / 1e3),
            energy: energy_known.then_some(energy as f64 / 1e3),
            memory: memory_known.then_some(memory.total),
            memory_used: memory_known.then_some(memory.used),
        })
    }
}

/// Whether a value is known; an error only if the GPU is lost.
fn known(answer: Result<(), NvmlError>) -> Result<bool, NvmlError> {
    match answer {
        Err(error) if error.is_lost => Err(error),
        answer => Ok(answer.is_ok()),
    }
}

/// A report of the driver about a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvmlEvent {
    /// An error with this number of NVIDIA's catalogue.
    Xid(u64),
    /// A memory error that could not be corrected. An Xid reports it too.
    DoubleBitError,
}

/// The driver's reports about some GPUs from now on.
pub struct NvmlEvents {
    nvml: Arc<Nvml>,
    set: nvmlEventSet_t,
}

// SAFETY: as for `NvmlGpu`.
unsafe impl Send for NvmlEvents {}

impl NvmlEvents {
    /// Reports about no GPU yet.
    ///
    /// # Errors
    /// If NVML does not support reports.
    pub fn new(nvml: &Arc<Nvml>) -> Result<NvmlEvents, NvmlError> {
        let mut set = std::ptr::null_mut();
        call!(nvml, nvmlEventSetCreate(&raw mut set))?;
        Ok(NvmlEvents { nvml: nvml.clone(), set })
    }

    /// Adds a GPU.
    ///
    /// # Errors
    /// If the driver has no reports about it, for example about an instance of a GPU.
    pub fn add(&self, gpu: &NvmlGpu) -> Result<(), NvmlError> {
        let mut supported: c_ulonglong = 0;
        call!(self.nvml, nvmlDeviceGetSupportedEventTypes(gpu.handle, &raw mut supported))?;
        let wanted = c_ulonglong::from(sys::nvmlEventTypeXidCriticalError | sys::nvmlEventTypeDoubleBitEccError);
        call!(self.nvml, nvmlDeviceRegisterEvents(gpu.handle, wanted & supported, self.set))
    }

    /// Waits for the next report, `limit` at most, to the millisecond. Returns it with the UUID of
    /// its GPU as in [`NvmlGpu::uuid`].
    ///
    /// # Errors
    /// If NVML cannot wait, for example because a GPU is lost.
    pub fn wait(&self, limit: Duration) -> Result<Option<(String, NvmlEvent)>, NvmlError> {
        let millis = c_uint::try_from(limit.as_nanos() / 1_000_000).unwrap_or(c_uint::MAX);
        let mut data = sys::nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        };
        let wait = self.nvml.library.nvmlEventSetWait_v2.as_ref();
        let wait = wait.map_err(|_| NvmlError::no_function("nvmlEventSetWait_v2"))?;
        // SAFETY: the set is alive, and there is room for the report.
        match unsafe { wait(self.set, &raw mut data, millis) } {
            sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => return Ok(None),
            code => self.nvml.answer("nvmlEventSetWait_v2", code)?,
        }
        let event = match u32::try_from(data.eventType) {
            Ok(sys::nvmlEventTypeXidCriticalError) => NvmlEvent::Xid(data.eventData),
            Ok(sys::nvmlEventTypeDoubleBitEccError) => NvmlEvent::DoubleBitError,
            // Not requested.
            _ => return Ok(None),
        };
        Ok(Some((self.nvml.uuid(data.device)?, event)))
    }
}

impl Drop for NvmlEvents {
    fn drop(&mut self) {
        let _ = call!(self.nvml, nvmlEventSetFree(self.set));
    }
}
