//! The first contact with NVIDIA's driver library: whether it exists, whether it is a driver and no
//! stub to link with, and its GPUs.
//!
//! This module loads the library by itself. The bindings, which make all other calls, panic if the
//! library or a function is missing.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};

use super::unavailable::CudaUnavailable;
use crate::loader::loader_words;

/// The driver library's file name, common to all its users.
const NAME: &str = "libcuda.so.1";
/// Folders of drivers that the loader does not know: Kubernetes' device plugin, WSL, NixOS.
pub(super) const FOLDERS: [&str; 4] =
    ["/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/wsl/lib", "/run/opengl-driver/lib"];
/// The oldest driver that CUDA 13 works with.
pub const OLDEST_DRIVER: DriverVersion = DriverVersion(13_000);
/// The oldest NVIDIA driver with that version.
const DRIVER: u32 = 580;
const CONTAINER: &str = "a container must be started with the GPUs (docker run --gpus all)";
const STUBS: &str = "Take the folder of stubs out of LD_LIBRARY_PATH";
/// The oldest GPUs that the libraries of CUDA 13 have kernels for (Turing).
pub(crate) const OLDEST_CAPABILITY: (u32, u32) = (7, 5);

/// The functions of the driver that the engine calls through the bindings, which panic if one is
/// missing. A recent driver has them all, and many more. Another library under the driver's name
/// may not.
pub const DRIVER_FUNCTIONS: &[&str] = &[
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetCurrent",
    "cuDevResourceGenerateDesc",
    "cuDevSmResourceSplitByCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetDevResource",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphGetNodes",
    "cuGraphInstantiateWithFlags",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphLaunch",
    "cuGraphMemAllocNodeGetParams",
    "cuGraphMemFreeNodeGetParams",
    "cuGraphMemcpyNodeGetParams",
    "cuGraphNodeGetType",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate",
    "cuInit",
    "cuIpcCloseMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuLaunchHostFunc",
    "cuMemAllocAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetAddressRange_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemPoolSetAttribute",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuPointerGetAttribute",
    "cuStreamBeginCapture_v2",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// The newest CUDA that a driver supports, as `cuDriverGetVersion` counts: 1000 times the major
/// plus 10 times the minor version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverVersion(pub i32);

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// The driver's number of the GPU, among the GPUs that `CUDA_VISIBLE_DEVICES` allows.
    pub ordinal: u32,
    /// The GPU's name, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// The whole memory, bytes.
    pub memory: u64,
    /// The number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// The UUID, as `nvidia-smi` writes it, without its prefix `GPU-` or, of an instance, `MIG-`.
    pub uuid: String,
}

impl fmt::Display for GpuInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GpuInfo { ordinal, name, capability: (major, minor), memory, multiprocessors, .. } = self;
        let gib = *memory as f64 / f64::from(1 << 30);
        write!(f, "GPU {ordinal}: {name}, {gib:.0} GiB, {multiprocessors} SMs, compute capability {major}.{minor}")
    }
}

/// The driver, initialised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverInfo {
    /// The newest CUDA that the driver supports.
    pub version: DriverVersion,
    /// All GPUs that it sees, by ordinal.
    pub gpus: Vec<GpuInfo>,
}

/// Loads the driver's library for good, initialises it and asks for its GPUs; makes no context.
pub(crate) fn driver() -> Result<DriverInfo, CudaUnavailable> {
    let library = open()?;
    let driver = look(&library);
    // The library may have threads from now on, and the bindings will open it again.
    std::mem::forget(library);
    driver
}

fn open() -> Result<Library, CudaUnavailable> {
    let folders = FOLDERS.iter().map(|folder| Path::new(folder).join(NAME)).filter(|path| path.exists());
    let mut reason = String::new();
    for path in std::iter::once(PathBuf::from(NAME)).chain(folders) {
        // SAFETY: runs the initialisers of the machine's driver. Global, as onnxruntime opens it by
        // its bare name.
        match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => return one_only(library),
            // The last reason is the most useful: it is about an existing file.
            Err(e) => reason = loader_words(&e),
        }
    }
    Err(CudaUnavailable::new(
        format!("no NVIDIA driver: libcuda.so.1 does not load ({reason})"),
        format_args!("Install the NVIDIA driver {DRIVER} or newer; {CONTAINER}"),
    ))
}

/// Checks that `libcuda.so`, which the bindings open first, is the same library. A folder of stubs
/// has another library.
fn one_only(library: Library) -> Result<Library, CudaUnavailable> {
    let address = |library: &Library| {
        // SAFETY: the symbol is not called; only its address is compared.
        unsafe { library.get::<*const ()>(b"cuInit\0") }.ok().map(|symbol| symbol.into_raw())
    };
    // SAFETY: as in `open`.
    if let Ok(other) = unsafe { Library::open(Some("libcuda.so"), RTLD_NOW) }
        && address(&other) != address(&library)
    {
        let what = "libcuda.so and libcuda.so.1 are different libraries here: one may be a stub";
        return Err(CudaUnavailable::new(what, STUBS));
    }
    Ok(library)
}

/// A function of the driver. All of them return a status.
fn function<T>(library: &Library, name: &'static str) -> Result<Symbol<T>, CudaUnavailable> {
    // SAFETY: each caller names the function's signature, which has been the same in all versions.
    unsafe { library.get::<T>(name.as_bytes()) }.map_err(|_| {
        CudaUnavailable::new(
            format!(
                "the libcuda.so.1 that was loaded is no NVIDIA driver, or too old a one: it has no function {name}"
            ),
            format_args!(
                "Install the NVIDIA driver {DRIVER} or newer, or take another libcuda.so.1 out of LD_LIBRARY_PATH"
            ),
        )
    })
}

type Init = unsafe extern "C" fn(c_uint) -> c_int;
type GetInt = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetDevice = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
type GetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
type GetUuid = unsafe extern "C" fn(*mut [u8; 16], c_int) -> c_int;
type TotalMemory = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
type ErrorText = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

const MULTIPROCESSOR_COUNT: c_int = 16;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;
const ERROR_STUB_LIBRARY: c_int = 34;
const ERROR_NO_DEVICE: c_int = 100;
const ERROR_SYSTEM_NOT_READY: c_int = 802;
const ERROR_SYSTEM_DRIVER_MISMATCH: c_int = 803;

/// Initialises the driver, and checks its version, its functions and its GPUs.
fn look(library: &Library) -> Result<DriverInfo, CudaUnavailable> {
    let init: Symbol<Init> = function(library, "cuInit")?;
    let get_version: Symbol<GetInt> = function(library, "cuDriverGetVersion")?;
    let queries = GpuQueries::of(library)?;
    let mut version = 0;
    // SAFETY: the driver's functions with its own types. A driver that is not initialised can tell
    // its version, and an old one does so before it fails for another reason.
    check(library, unsafe { get_version(&mut version) })?;
    let version = DriverVersion(version);
    // A stub, and a driver without its kernel module, report 0.
    let too_old = || {
        CudaUnavailable::new(
            format!("the NVIDIA driver supports CUDA {version}; CUDA {OLDEST_DRIVER} is needed"),
            format_args!("Install the NVIDIA driver {DRIVER} or newer"),
        )
    };
    if version.0 > 0 && version < OLDEST_DRIVER {
        return Err(too_old());
    }
    // SAFETY: as above.
    check(library, unsafe { init(0) })?;
    if version < OLDEST_DRIVER {
        return Err(too_old());
    }
    DRIVER_FUNCTIONS.iter().try_for_each(|name| function::<*const ()>(library, name).map(|_| ()))?;
    let gpus = queries.gpus()?;
    if gpus.is_empty() {
        return Err(no_gpu());
    }
    Ok(DriverInfo { version, gpus })
}

/// The driver's functions that describe its GPUs.
struct GpuQueries<'a> {
    library: &'a Library,
    get_count: Symbol<GetInt>,
    get_device: Symbol<GetDevice>,
    get_name: Symbol<GetName>,
    get_uuid: Symbol<GetUuid>,
    get_memory: Symbol<TotalMemory>,
    get_attribute: Symbol<GetAttribute>,
}

impl<'a> GpuQueries<'a> {
    fn of(library: &'a Library) -> Result<Self, CudaUnavailable> {
        Ok(GpuQueries {
            library,
            get_count: function(library, "cuDeviceGetCount")?,
            get_device: function(library, "cuDeviceGet")?,
            get_name: function(library, "cuDeviceGetName")?,
            get_uuid: function(library, "cuDeviceGetUuid_v2")?,
            get_memory: function(library, "cuDeviceTotalMem_v2")?,
            get_attribute: function(library, "cuDeviceGetAttribute")?,
        })
    }

    /// All GPUs of an initialised driver, by ordinal.
    fn gpus(&self) -> Result<Vec<GpuInfo>, CudaUnavailable> {
        let mut count = 0;
        // SAFETY: the driver's function with its own types.
        check(self.library, unsafe { (self.get_count)(&mut count) })?;
        (0..count).map(|ordinal| self.gpu(ordinal)).collect()
    }

    fn gpu(&self, ordinal: c_int) -> Result<GpuInfo, CudaUnavailable> {
        let done = |status| check(self.library, status);
        let (mut device, mut memory, mut name, mut uuid) = (0, 0_usize, [0; 256], [0; 16]);
        // SAFETY: the driver's functions with its own types. The call gets the name's length, and
        // the driver ends the name with a zero before it.
        unsafe {
            done((self.get_device)(&mut device, ordinal))?;
            done((self.get_name)(name.as_mut_ptr(), name.len() as c_int - 1, device))?;
            done((self.get_memory)(&mut memory, device))?;
            done((self.get_uuid)(&mut uuid, device))?;
        }
        let attribute = |which| -> Result<u32, CudaUnavailable> {
            let mut value = 0;
            // SAFETY: as above.
            done(unsafe { (self.get_attribute)(&mut value, which, device) })?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        // SAFETY: the driver could not write the last byte, which is zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        Ok(GpuInfo {
            ordinal: ordinal as u32,
            name,
            capability: (attribute(CAPABILITY_MAJOR)?, attribute(CAPABILITY_MINOR)?),
            memory: memory as u64,
            multiprocessors: attribute(MULTIPROCESSOR_COUNT)?,
            uuid: hyphenated(uuid),
        })
    }
}

/// Turns a status of the driver into a result.
fn check(library: &Library, status: c_int) -> Result<(), CudaUnavailable> {
    if status == 0 { Ok(()) } else { Err(failure(library, status)) }
}

/// The text form of a UUID.
fn hyphenated(uuid: [u8; 16]) -> String {
    let mut text = String::new();
    for (place, byte) in uuid.iter().enumerate() {
        let hyphen = if matches!(place, 4 | 6 | 8 | 10) { "-" } else { "" };
        text += &format!("{hyphen}{byte:02x}");
    }
    text
}

fn no_gpu() -> CudaUnavailable {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let visible = visible.map_or(String::new(), |v| format!(" (CUDA_VISIBLE_DEVICES is '{v}')"));
    let advice = format_args!("See what nvidia-smi lists; {CONTAINER}");
    CudaUnavailable::new(format!("the NVIDIA driver sees no GPU{visible}"), advice)
}

/// The error for a status, with advice.
fn failure(library: &Library, status: c_int) -> CudaUnavailable {
    let advice = match status {
        ERROR_NO_DEVICE => return no_gpu(),
        ERROR_STUB_LIBRARY => {
            return CudaUnavailable::new("the libcuda.so.1 that was loaded is a stub to link with", STUBS);
        }
        ERROR_SYSTEM_NOT_READY => "Start the machine's NVIDIA fabric manager or persistence service",
        ERROR_SYSTEM_DRIVER_MISMATCH => {
            "The library and the kernel's module are of different drivers: restart the machine, or install the driver anew"
        }
        _ => "See whether nvidia-smi works, and restart the machine or install the NVIDIA driver anew if it does not",
    };
    let word = |name| {
        let get: Symbol<ErrorText> = function(library, name).ok()?;
        let mut text = std::ptr::null();
        // SAFETY: the driver points `text` at a constant of its own, or leaves it null.
        unsafe { (get(status, &mut text) == 0 && !text.is_null()).then(|| CStr::from_ptr(text)) }
            .map(|text| text.to_string_lossy().into_owned())
    };
    let said = [word("cuGetErrorName"), word("cuGetErrorString")].into_iter().flatten().collect::<Vec<_>>().join(": ");
    CudaUnavailable::new(format!("the NVIDIA driver does not start: error {status} ({said})"), advice)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use cudarc::driver::result;

    use super::*;
    use crate::cuda::{Device, Event, Stream};

    fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).expect("is there") {
            let path = entry.expect("reads").path();
            if path.is_dir() { sources(&path, into) } else { into.push(path) }
        }
    }

    /// The functions behind the bindings' wrappers that are in use: wrapper, function.
    const WRAPPERS: &str = "
        ctx::set_current cuCtxSetCurrent, device::get cuDeviceGet, device::get_attribute cuDeviceGetAttribute,
        device::get_default_mem_pool cuDeviceGetDefaultMemPool, device::get_name cuDeviceGetName, device::total_mem cuDeviceTotalMem_v2,
        event::destroy cuEventDestroy_v2, event::elapsed cuEventElapsedTime_v2, event::query cuEventQuery, event::record cuEventRecord,
        event::synchronize cuEventSynchronize, free_async cuMemFreeAsync, free_host cuMemFreeHost, free_sync cuMemFree_v2,
        graph::destroy cuGraphDestroy, graph::exec_destroy cuGraphExecDestroy, graph::instantiate cuGraphInstantiateWithFlags,
        graph::launch cuGraphLaunch, init cuInit, malloc_async cuMemAllocAsync, malloc_host cuMemHostAlloc, malloc_sync cuMemAlloc_v2,
        mem_get_info cuMemGetInfo_v2, memcpy_dtod_async cuMemcpyDtoDAsync_v2, memcpy_dtoh_async cuMemcpyDtoHAsync_v2,
        memcpy_dtoh_sync cuMemcpyDtoH_v2, memcpy_htod_async cuMemcpyHtoDAsync_v2, memset_d8_async cuMemsetD8Async, primary_ctx::release cuDevicePrimaryCtxRelease_v2,
        primary_ctx::retain cuDevicePrimaryCtxRetain, stream::begin_capture cuStreamBeginCapture_v2, stream::create_with_priority cuStreamCreateWithPriority,
        stream::destroy cuStreamDestroy_v2, stream::end_capture cuStreamEndCapture, stream::get_priority_range cuCtxGetStreamPriorityRange, stream::launch_host_function cuLaunchHostFunc,
        stream::synchronize cuStreamSynchronize, stream::wait_event cuStreamWaitEvent";

    /// Methods of the bindings' errors that call the driver: method, function.
    const OF_ERRORS: [(&str, &str); 2] = [(".error_name()", "cuGetErrorName"), (".error_string()", "cuGetErrorString")];

    #[test]
    fn the_functions_that_are_called_are_those_that_are_looked_for() {
        let wrappers: BTreeMap<&str, &str> =
            WRAPPERS.split(',').filter_map(|pair| pair.trim().split_once(' ')).collect();
        let mut files = Vec::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda"), &mut files);
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/onnxruntime"), &mut files);
        let mut called = BTreeSet::new();
        for file in files.iter().filter(|file| !file.ends_with("libcuda.rs")) {
            let text = std::fs::read_to_string(file).expect("reads");
            let name_at = |rest: &str| -> String {
                rest.chars().take_while(|c| c.is_alphanumeric() || matches!(c, '_' | ':')).collect()
            };
            let direct = text.split("sys::cu").skip(1).filter(|rest| rest.starts_with(char::is_uppercase));
            let direct = direct.map(|rest| format!("cu{}", name_at(rest)));
            let wrapped =
                text.split("result::").skip(1).map(name_at).filter(|name| name.starts_with(char::is_lowercase));
            let wrapped = wrapped.map(|name| wrappers.get(name.as_str()).map_or(name, ToString::to_string));
            let of_errors = OF_ERRORS.iter().filter(|(method, _)| text.contains(method));
            let of_errors = of_errors.map(|(_, function)| (*function).to_owned());
            for name in direct.chain(wrapped).chain(of_errors) {
                assert!(DRIVER_FUNCTIONS.contains(&name.as_str()), "{name} is called in {}", file.display());
                called.insert(name);
            }
        }
        let idle: Vec<_> = DRIVER_FUNCTIONS.iter().filter(|name| !called.contains(**name)).collect();
        assert!(idle.is_empty(), "{idle:?} are not called");
    }

    /// A wrapper may call one of two functions, depending on the version of the bindings that is
    /// built. The sources do not show which, so this test counts calls.
    #[test]
    fn times_and_words_come_from_the_functions_that_are_looked_for() {
        let stand_in = cuda_stand_in::StandIn::lock();
        result::init().expect("the stand-in is loaded");
        let device = Device::open(0).expect("it has one");
        let stream = Stream::new(&device).expect("made");
        let (begin, end) = (Event::timed(&device).expect("made"), Event::timed(&device).expect("made"));
        assert!(end.since(&begin).is_err_and(|error| error.to_string().contains("CUDA_ERROR")), "not recorded");
        for event in [&begin, &end] {
            stream.record(event).and_then(|()| event.wait()).expect("recorded");
        }
        assert!(end.since(&begin).is_ok());
        for (name, calls) in
            [("cuEventElapsedTime_v2", 2), ("cuEventElapsedTime", 0), ("cuGetErrorName", 1), ("cuGetErrorString", 1)]
        {
            assert_eq!(stand_in.calls(name), calls, "{name}");
            assert_eq!(DRIVER_FUNCTIONS.contains(&name), calls > 0, "{name}");
        }
        drop((begin, end, stream, device));
        stand_in.assert_clean();
    }

    #[test]
    fn the_names_are_a_drivers() {
        let path = cuda_stand_in::library().expect("is built");
        // SAFETY: the library was built for this test.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW) }.expect("loads");
        for name in DRIVER_FUNCTIONS {
            assert!(function::<*const ()>(&library, name).is_ok(), "{name}");
        }
    }
}
