//! Errors of the CUDA driver.

use std::ffi::CStr;

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use downbeat_engine::ring_memory::RingMemoryError;
use downbeat_engine::tensor::DeviceError;
use downbeat_engine::tensor::state::StateError;

/// The reason why a step on a GPU failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The device has too little free memory.
    #[error("GPU {device} is out of memory: {what}. Serve fewer or smaller models on it, or smaller batches")]
    OutOfMemory {
        /// The GPU's ordinal.
        device: u32,
        /// The purpose of the memory.
        what: String,
    },
    /// The device cannot do any more work for this process.
    #[error("GPU {device} is lost ({name}: {words}, {what}); nothing can run on it until the server is started again")]
    Lost {
        /// The GPU's ordinal.
        device: u32,
        /// The step that failed.
        what: String,
        /// The driver's name of the error.
        name: String,
        /// The driver's words.
        words: String,
    },
    /// The driver refuses.
    #[error("GPU {device}: {what} failed: {words} ({name})")]
    Refused {
        /// The GPU's ordinal.
        device: u32,
        /// The step that failed.
        what: String,
        /// The driver's name of the error.
        name: String,
        /// The driver's words.
        words: String,
    },
}

impl CudaError {
    /// The error for the driver's answer to the step `what` on `device`.
    pub(super) fn new(device: u32, what: impl Into<String>, error: DriverError) -> CudaError {
        let text = |text: Result<&CStr, DriverError>| match text {
            Ok(text) => text.to_string_lossy().into_owned(),
            Err(_) => format!("error {}", error.0 as u32),
        };
        let (what, name, words) = (what.into(), text(error.error_name()), text(error.error_string()));
        match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => CudaError::OutOfMemory { device, what },
            code if is_final(code) => CudaError::Lost { device, what, name, words },
            _ => CudaError::Refused { device, what, name, words },
        }
    }
}

/// The text that libraries and lanes report for a failure.
impl From<CudaError> for String {
    fn from(error: CudaError) -> String {
        error.to_string()
    }
}

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> DeviceError {
        DeviceError::new(error)
    }
}

impl From<CudaError> for StateError {
    fn from(error: CudaError) -> StateError {
        DeviceError::from(error).into()
    }
}

impl From<CudaError> for RingMemoryError {
    fn from(error: CudaError) -> RingMemoryError {
        DeviceError::from(error).into()
    }
}

/// Whether the context is useless after this error. The driver then answers every later call with
/// the same error ("the process must be terminated and relaunched", as its documentation says of
/// each).
fn is_final(code: CUresult) -> bool {
    use CUresult as E;
    matches!(
        code,
        E::CUDA_ERROR_DEVICE_UNAVAILABLE
            // The error of a device that has fallen off the bus.
            | E::CUDA_ERROR_UNKNOWN
            | E::CUDA_ERROR_NO_DEVICE
            | E::CUDA_ERROR_ECC_UNCORRECTABLE
            | E::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | E::CUDA_ERROR_CONTAINED
            | E::CUDA_ERROR_ILLEGAL_ADDRESS
            | E::CUDA_ERROR_LAUNCH_TIMEOUT
            | E::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | E::CUDA_ERROR_ASSERT
            | E::CUDA_ERROR_HARDWARE_STACK_ERROR
            | E::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | E::CUDA_ERROR_MISALIGNED_ADDRESS
            | E::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | E::CUDA_ERROR_INVALID_PC
            | E::CUDA_ERROR_LAUNCH_FAILED
            | E::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | E::CUDA_ERROR_EXTERNAL_DEVICE
    )
}
