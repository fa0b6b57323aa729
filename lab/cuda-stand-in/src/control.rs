//! A test's requests to the stand-in itself: entry points in addition to the driver's, each with
//! the method of [`StandIn`] that calls it.
//!
//! A test is linked to this crate, too, and so has its statics twice. The loaded library's statics
//! count, and only these functions see them.

use std::ffi::{CStr, c_char, c_void};

use libloading::os::unix::Library;

use crate::context::{Context, Device, DeviceConfig};
use crate::nvml::{self, Measured};
use crate::result::{self, CUresult};
use crate::session::{self, Needs, Session, lock};
use crate::stand_in::{Count, StandIn};
use crate::stream::What;
use crate::trace::Work;
use crate::{address, api, library, worker};

/// Reads text that a caller passes; null is empty text.
fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: not null, and the caller has promised C text.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

/// Copies as many values as there is room for. Returns the number of values.
fn copy_out<T: Copy>(values: &[T], to: *mut T, room: usize) -> usize {
    if !to.is_null() {
        // SAFETY: the caller has promised room for `room` values; they cannot overlap with ours.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len().min(room)) };
    }
    values.len()
}

/// Defines entry points: first those that the method calls directly, then those that a separate
/// method wraps.
macro_rules! control {
    (
        methods { $($(#[$doc:meta])* $method:ident = $symbol:ident($($arg:ident: $type:ty),*) $(-> $returns:ty)? $body:block)* }
        wrapped { $($other:ident = $its_symbol:ident($($its_arg:ident: $its_type:ty),*) $(-> $its_returns:ty)? $its_body:block)* }
        driver { $($entry:ident = $its_name:ident($($entry_type:ty),*) -> $entry_returns:ty;)* }
    ) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $symbol($($arg: $type),*) $(-> $returns)? $body
        )*
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $its_symbol($($its_arg: $its_type),*) $(-> $its_returns)? $its_body
        )*

        /// The entry points of the loaded library.
        pub struct Functions {
            $($method: extern "C" fn($($type),*) $(-> $returns)?,)*
            $(pub $other: unsafe extern "C" fn($($its_type),*) $(-> $its_returns)?,)*
            $(pub $entry: unsafe extern "C" fn($($entry_type),*) -> $entry_returns,)*
            // The functions live as long as the library is loaded.
            _library: Library,
        }

        impl Functions {
            pub fn load() -> Result<Self, String> {
                let library = library::load()?;
                macro_rules! find {
                    ($name:ident) => {{
                        // SAFETY: the library is this crate's, where the symbol has the type of the
                        // field.
                        let symbol = unsafe { library.get(stringify!($name).as_bytes()) };
                        *symbol.map_err(|error| format!("{}: {error}", stringify!($name)))?
                    }};
                }
                Ok(Self {
                    $($method: find!($symbol),)*
                    $($other: find!($its_symbol),)*
                    $($entry: find!($its_name),)*
                    _library: library,
                })
            }
        }

        impl StandIn {
            $(
                $(#[$doc])*
                pub fn $method(&self, $($arg: $type),*) $(-> $returns)? {
                    (self.functions.$method)($($arg),*)
                }
            )*
        }
    };
}

control! {
    methods {
        /// Sets the supported version of CUDA that the driver reports, such as 12040.
        set_version = stand_in_set_version(version: i32) {
            lock().version = version;
        }

        /// Sets the number of queries of an unfinished event before its work runs; 3 at first.
        set_patience = stand_in_set_patience(asks: u32) {
            lock().patience = asks;
        }

        /// Sets the host's time to give a kernel to a stream, in nanoseconds of virtual time; 0 at
        /// first. Kernels of a graph begin without this time. From some time on, a graph is faster
        /// than its kernels alone. With 0, a graph is slower if the program makes copies for it.
        set_launch_time = stand_in_set_launch_time(nanoseconds: u64) {
            lock().launch_time = nanoseconds;
        }

        /// Sets whether the host may follow the addresses of device memory allocated from now on;
        /// false at first. Tests use it if code for host memory plays the kernels.
        set_readable = stand_in_set_readable(readable: bool) {
            lock().readable = readable;
        }

        /// Makes the `nth` allocation from now (1: the next), of device or host memory, fail with
        /// OUT_OF_MEMORY.
        fail_allocation = stand_in_fail_allocation(nth: u64) {
            lock().faults.allocation = nth;
        }

        /// Makes allocations above a size fail with OUT_OF_MEMORY.
        fail_allocations_above = stand_in_fail_allocations_above(bytes: u64) {
            lock().faults.above = Some(bytes);
        }

        /// Sets NVML's measurements of a device. Before this, NVML can measure nothing.
        set_measured = stand_in_set_measured(device: u32, measured: Measured) {
            nvml::set_measured(device, measured);
        }

        /// Reports an event of a device through NVML, with the number of its kind (8: an Xid) and
        /// its data. Returns false if the program has not asked for such reports.
        report = stand_in_report(device: u32, kind: u64, data: u64) -> bool {
            nvml::report(device, kind, data)
        }

        /// Returns a count.
        count = stand_in_count(what: Count) -> u64 {
            let machine = lock();
            match what {
                Count::Bytes => machine.devices.iter().map(|device| device.used).sum(),
                Count::Allocations => machine.memory.regions.len() as u64,
                Count::Waiting => machine.streams.values().map(|stream| stream.last - stream.done).sum(),
                Count::GreenContexts => machine.contexts.values().filter(|context| context.partition.is_some()).count() as u64,
                Count::Pinned => machine.host.ranges.len() as u64,
            }
        }

        /// Forgets the trace, the mistakes and the numbers of calls.
        forget = stand_in_forget() {
            let mut session = lock();
            session.trace.clear();
            session.mistakes.clear();
            session.calls.clear();
        }
    }

    wrapped {
        reset = stand_in_reset() {
            lock().reset();
            nvml::reset();
        }

        set_devices = stand_in_set_devices(count: u32, multiprocessors: u32, memory: u64, major: i32, minor: i32, name: *const c_char) {
            let config = DeviceConfig { name: text(name), multiprocessors, memory, capability: (major, minor) };
            lock().devices = (0..count).map(|_| Device::new(config.clone())).collect();
        }

        set_random = stand_in_set_random(seed: u64) {
            worker::start(&mut lock(), seed);
        }

        set_lazy = stand_in_set_lazy() {
            let mut session = lock();
            session.random = None;
            session.order += 1;
            crate::machine::CHANGED.notify_all();
        }

        fail_init = stand_in_fail_init(code: u32) -> bool {
            let code = result::known(code);
            lock().faults.init = code;
            code.is_some()
        }

        fail_call = stand_in_fail_call(name: *const c_char, nth: u64, code: u32) -> bool {
            let name = text(name);
            let code = result::known(code).filter(|_| api::has(&name));
            lock().faults.calls.extend(code.map(|code| (name, nth, code)));
            code.is_some()
        }

        fail_work = stand_in_fail_work(stream: u64, nth: u64, code: u32) -> bool {
            let code = result::known(code);
            lock().faults.work.extend(code.map(|code| (stream, nth, code)));
            code.is_some()
        }

        lose_device = stand_in_lose_device(device: i32, code: u32) -> bool {
            let mut session = lock();
            let (Some(code), Ok(state)) = (result::known(code), session.device(device)) else { return false };
            match code {
                CUresult::CUDA_SUCCESS => state.failed = None,
                code => session.fail(device, code, true),
            }
            true
        }

        touch = stand_in_touch(stream: *mut c_void, at: u64, len: u64, writes: bool) -> u32 {
            let touch = |session: &mut Session| {
                let stream = session.stream(stream as u64)?;
                session.enqueue(stream, What::Touch { at, len, writes }).map(drop)
            };
            session::enter("stand_in_touch", Needs::Context, touch) as u32
        }

        note = stand_in_note(what: *const c_char) {
            lock().mistake(text(what));
        }

        calls = stand_in_calls(name: *const c_char) -> u64 {
            lock().calls.get(text(name).as_str()).copied().unwrap_or(0)
        }

        partitions = stand_in_partitions(to: *mut u64, room: usize) -> usize {
            let session = lock();
            let partition = |(handle, context): (&u64, &Context)| {
                let numbers = context.partition.as_ref()?;
                Some([*handle, numbers.len() as u64].into_iter().chain(numbers.iter().map(|n| u64::from(*n))).collect::<Vec<u64>>())
            };
            copy_out(&session.contexts.iter().filter_map(partition).flatten().collect::<Vec<u64>>(), to, room)
        }

        trace = stand_in_trace(to: *mut Work, room: usize) -> usize {
            copy_out(&lock().trace, to, room)
        }

        mistakes = stand_in_mistakes(to: *mut u8, room: usize) -> usize {
            copy_out(lock().mistakes.join("\n").as_bytes(), to, room)
        }

        leaks = stand_in_leaks(to: *mut u8, room: usize) -> usize {
            copy_out(lock().leaks().join("\n").as_bytes(), to, room)
        }

        view = stand_in_view(address: u64) -> *mut c_void {
            address::view(address).cast()
        }

        spend = stand_in_spend(nanoseconds: u64) {
            session::spend(nanoseconds);
        }
    }

    driver {
        launch = cuLaunchHostFunc(*mut c_void, Option<unsafe extern "C" fn(*mut c_void)>, *mut c_void) -> u32;
        is_capturing = cuStreamIsCapturing(*mut c_void, *mut u32) -> u32;
    }
}
