//! A `libnvidia-ml.so.1` too: a test sets the measurements of the devices, and the driver's
//! reports.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, c_char, c_uint, c_ulonglong};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlMemory_v2_t,
    nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST as GPU_IS_LOST,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT, nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_enum_NVML_ERROR_TIMEOUT as TIMEOUT,
    nvmlReturn_enum_NVML_SUCCESS as SUCCESS, nvmlReturn_t, nvmlUtilization_t,
};

use crate::session::lock;

/// NVML's measurements of a device, in NVML's units.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Measured {
    /// The share of the last moments with work, in percent.
    pub utilization: u32,
    /// Milliwatts.
    pub power: u32,
    /// Milliwatts.
    pub power_limit: u32,
    /// Millijoules since the driver was loaded.
    pub energy: u64,
    /// True if the device is lost: it answers no call, and a wait for reports of several devices
    /// fails if it is one of these.
    pub lost: bool,
}

struct State {
    /// By device; a device without an entry can measure nothing.
    measured: BTreeMap<usize, Measured>,
    /// By device: the kinds of reports that the program wants.
    wanted: BTreeMap<usize, u64>,
    reports: VecDeque<(usize, u64, u64)>,
}

static STATE: Mutex<State> =
    Mutex::new(State { measured: BTreeMap::new(), wanted: BTreeMap::new(), reports: VecDeque::new() });
static REPORTED: Condvar = Condvar::new();

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Resets everything but the wanted reports.
pub fn reset() {
    let mut state = state();
    state.measured.clear();
    state.reports.clear();
}

/// Returns the UUID of a device, which the driver reports too.
pub fn uuid(device: i32) -> [u8; 16] {
    let mut uuid = [0; 16];
    uuid[0] = device as u8 + 1;
    uuid
}

fn text(device: usize) -> String {
    format!("GPU-{:02x}000000-0000-0000-0000-000000000000\0", device + 1)
}

/// A handle is the device's number and one.
fn device(handle: nvmlDevice_t) -> usize {
    (handle as usize).wrapping_sub(1)
}

/// Answers a call with a measurement.
fn measure<T>(handle: nvmlDevice_t, to: *mut T, value: impl FnOnce(&Measured) -> T) -> nvmlReturn_t {
    match state().measured.get(&device(handle)) {
        None => NOT_SUPPORTED,
        Some(Measured { lost: true, .. }) => GPU_IS_LOST,
        Some(measured) => {
            // SAFETY: the caller of the entry point has promised room for a result of this type.
            unsafe { to.write(value(measured)) };
            SUCCESS
        }
    }
}

macro_rules! nvml {
    ($($name:ident($($arg:ident: $type:ty),*) -> $returns:ty $body:block)*) => {
        $(
            #[allow(non_snake_case)]
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $type),*) -> $returns $body
        )*
    };
}

nvml! {
    nvmlInit_v2() -> nvmlReturn_t { SUCCESS }

    nvmlShutdown() -> nvmlReturn_t { SUCCESS }

    nvmlErrorString(code: nvmlReturn_t) -> *const c_char {
        match code {
            GPU_IS_LOST => c"GPU is lost",
            NOT_FOUND => c"Not Found",
            NOT_SUPPORTED => c"Not Supported",
            _ => c"Unknown Error",
        }.as_ptr()
    }

    nvmlDeviceGetHandleByUUID(uuid: *const c_char, handle: *mut nvmlDevice_t) -> nvmlReturn_t {
        // SAFETY: the caller has promised C text.
        let asked = unsafe { CStr::from_ptr(uuid) }.to_bytes_with_nul();
        let devices = lock().devices.len();
        let Some(device) = (0..devices).find(|device| text(*device).as_bytes() == asked) else { return NOT_FOUND };
        // SAFETY: the caller has promised room.
        unsafe { handle.write((device + 1) as nvmlDevice_t) };
        SUCCESS
    }

    nvmlDeviceGetUUID(handle: nvmlDevice_t, to: *mut c_char, room: c_uint) -> nvmlReturn_t {
        let text = text(device(handle));
        if text.len() > room as usize {
            return INVALID_ARGUMENT;
        }
        // SAFETY: there is room, as the caller has promised.
        unsafe { to.copy_from(text.as_ptr().cast(), text.len()) };
        SUCCESS
    }

    nvmlDeviceGetUtilizationRates(handle: nvmlDevice_t, to: *mut nvmlUtilization_t) -> nvmlReturn_t {
        measure(handle, to, |measured| nvmlUtilization_t { gpu: measured.utilization, memory: 0 })
    }

    nvmlDeviceGetPowerUsage(handle: nvmlDevice_t, to: *mut c_uint) -> nvmlReturn_t {
        measure(handle, to, |measured| measured.power)
    }

    nvmlDeviceGetPowerManagementLimit(handle: nvmlDevice_t, to: *mut c_uint) -> nvmlReturn_t {
        measure(handle, to, |measured| measured.power_limit)
    }

    nvmlDeviceGetTotalEnergyConsumption(handle: nvmlDevice_t, to: *mut c_ulonglong) -> nvmlReturn_t {
        measure(handle, to, |measured| measured.energy)
    }

    nvmlDeviceGetMemoryInfo_v2(handle: nvmlDevice_t, to: *mut nvmlMemory_v2_t) -> nvmlReturn_t {
        // SAFETY: the caller has promised one whose version is set.
        let version = unsafe { (*to).version };
        if version != size_of::<nvmlMemory_v2_t>() as u32 | 2 << 24 {
            return INVALID_ARGUMENT;
        }
        let mut session = lock();
        let Ok(state) = session.device(device(handle) as i32) else { return INVALID_ARGUMENT };
        let (total, used) = (state.config.memory, state.used);
        measure(handle, to, |_| nvmlMemory_v2_t { version, total, reserved: 0, free: total - used, used })
    }

    nvmlEventSetCreate(set: *mut nvmlEventSet_t) -> nvmlReturn_t {
        // SAFETY: the caller has promised room.
        unsafe { set.write(1 as nvmlEventSet_t) };
        SUCCESS
    }

    nvmlEventSetFree(_set: nvmlEventSet_t) -> nvmlReturn_t {
        state().wanted.clear();
        SUCCESS
    }

    nvmlDeviceGetSupportedEventTypes(_handle: nvmlDevice_t, kinds: *mut c_ulonglong) -> nvmlReturn_t {
        // SAFETY: the caller has promised room.
        unsafe { kinds.write(0b1111) };
        SUCCESS
    }

    nvmlDeviceRegisterEvents(handle: nvmlDevice_t, kinds: c_ulonglong, _set: nvmlEventSet_t) -> nvmlReturn_t {
        state().wanted.insert(device(handle), kinds);
        SUCCESS
    }

    nvmlEventSetWait_v2(_set: nvmlEventSet_t, to: *mut nvmlEventData_t, millis: c_uint) -> nvmlReturn_t {
        let limit = Duration::from_millis(millis.into());
        let waited = REPORTED.wait_timeout_while(state(), limit, |state| state.reports.is_empty());
        let (mut state, _) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        if state.wanted.keys().any(|device| state.measured.get(device).is_some_and(|measured| measured.lost)) {
            return GPU_IS_LOST;
        }
        let Some((device, kind, data)) = state.reports.pop_front() else { return TIMEOUT };
        let device = (device + 1) as nvmlDevice_t;
        let data = nvmlEventData_t { device, eventType: kind, eventData: data, gpuInstanceId: !0, computeInstanceId: !0 };
        // SAFETY: the caller has promised room.
        unsafe { to.write(data) };
        SUCCESS
    }
}

/// Sets the measurements of a device.
pub fn set_measured(device: u32, measured: Measured) {
    state().measured.insert(device as usize, measured);
}

/// Reports an event of a device. Returns false if the program has not asked for such reports.
pub fn report(device: u32, kind: u64, data: u64) -> bool {
    let mut state = state();
    let is_wanted = state.wanted.get(&(device as usize)).is_some_and(|kinds| kinds & kind != 0);
    if is_wanted {
        state.reports.push_back((device as usize, kind, data));
        REPORTED.notify_all();
    }
    is_wanted
}
