//! What a test asks the stand-in itself: entry points beside the driver's, found by name in the loaded library.
//!
//! [`StandIn`](crate::StandIn) wraps them; another program may call them from C.

use std::ffi::{CStr, c_char, c_void};

use crate::address;
use crate::context::{Context, Device, DeviceConfig};
use crate::machine::Machine;
use crate::nvml;
use crate::result;
use crate::session::{self, Needs, Session, lock};
use crate::stream::What;
use crate::trace::Work;
use crate::worker;

/// Text that a caller passes; empty where it is null.
fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: not null, and the caller has promised C text.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

/// Copies as many values as there is room for; returns how many there are.
fn copy_out<T: Copy>(values: &[T], to: *mut T, room: usize) -> usize {
    if !to.is_null() {
        // SAFETY: the caller has promised room for `room` values; they cannot overlap with ours.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len().min(room)) };
    }
    values.len()
}

macro_rules! control {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) $(-> $returns:ty)? $body:block)*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $type),*) $(-> $returns)? $body
        )*
    };
}

control! {
    /// Back to the beginning, with one device.
    stand_in_reset() {
        lock().reset();
        nvml::reset();
    }

    /// Sets the devices: `count` alike ones.
    stand_in_set_devices(count: u32, multiprocessors: u32, memory: u64, major: i32, minor: i32, name: *const c_char) {
        let config = DeviceConfig { name: text(name), multiprocessors, memory, capability: (major, minor) };
        let mut session = lock();
        session.devices = (0..count).map(|_| Device::new(config.clone())).collect();
    }

    /// Sets what `cuDriverGetVersion` tells.
    stand_in_set_version(version: i32) {
        lock().version = version;
    }

    /// Sets how often an unfinished stream or event is asked before its work runs.
    stand_in_set_patience(asks: u32) {
        lock().patience = asks;
    }

    /// Sets how long the host takes to give a kernel to a stream, nanoseconds of virtual time.
    stand_in_set_launch_time(nanoseconds: u64) {
        lock().launch_time = nanoseconds;
    }

    /// Sets whether the host may follow addresses of device memory allocated from now on.
    stand_in_set_readable(readable: bool) {
        lock().readable = readable;
    }

    /// Streams run as drawn from a seed, by a thread of their own.
    stand_in_set_random(seed: u64) {
        worker::start(&mut lock(), seed);
    }

    /// Streams run when waited for.
    stand_in_set_lazy() {
        let mut session = lock();
        session.random = None;
        session.order += 1;
        crate::machine::CHANGED.notify_all();
    }

    /// `cuInit` fails with this code; false if it is unknown.
    stand_in_fail_init(code: u32) -> bool {
        let code = result::known(code);
        lock().faults.init = code;
        code.is_some()
    }

    /// The `nth` allocation from now (1: the next) fails.
    stand_in_fail_allocation(nth: u64) {
        lock().faults.allocation = nth;
    }

    /// Allocations of more bytes fail.
    stand_in_fail_allocations_above(bytes: u64) {
        lock().faults.above = Some(bytes);
    }

    /// The `nth` call of an entry point fails; false if the code or the name is unknown.
    stand_in_fail_call(name: *const c_char, nth: u64, code: u32) -> bool {
        let name = text(name);
        match result::known(code) {
            Some(code) if crate::api::symbol(&name).is_some() => {
                lock().faults.calls.push((name, nth, code));
                true
            }
            _ => false,
        }
    }

    /// The `nth` operation of a stream (0: of any) that runs from now fails, and with it the device; false if the code is unknown.
    stand_in_fail_work(stream: u64, nth: u64, code: u32) -> bool {
        let code = result::known(code);
        if let Some(code) = code {
            lock().faults.work.push((stream, nth, code));
        }
        code.is_some()
    }

    /// The device is lost: everything fails with this code, also after a reset of its context. 0 brings it back.
    stand_in_lose_device(device: i32, code: u32) -> bool {
        let mut session = lock();
        match result::known(code) {
            _ if session.device(device).is_err() => return false,
            Some(result::CUresult::CUDA_SUCCESS) => {
                if let Ok(state) = session.device(device) {
                    state.failed = None;
                }
            }
            Some(code) => session.fail(device, code, true),
            None => return false,
        }
        true
    }

    /// The kernel enqueued next in a stream reads or writes these bytes; the error's code.
    stand_in_touch(stream: *mut c_void, at: u64, len: u64, writes: bool) -> u32 {
        let touch = |session: &mut Session| {
            let stream = session.stream(stream as u64)?;
            session.enqueue(stream, What::Touch { at, len, writes }).map(drop)
        };
        session::enter("stand_in_touch", Needs::Context, touch) as u32
    }

    /// Writes down a mistake that the test has found.
    stand_in_note(what: *const c_char) {
        lock().mistake(text(what));
    }

    /// How often an entry point was called.
    stand_in_calls(name: *const c_char) -> u64 {
        let name = text(name);
        lock().calls.get(name.as_str()).copied().unwrap_or(0)
    }

    /// A number, by [`Count`](crate::Count).
    stand_in_count(what: u32) -> u64 {
        count(&lock(), what)
    }

    /// Copies the green contexts that are alive, each as its handle, how many multiprocessors it has, and their numbers; returns how many values that is.
    stand_in_partitions(to: *mut u64, room: usize) -> usize {
        let session = lock();
        let partition = |(handle, context): (&u64, &Context)| {
            let numbers = context.partition.as_ref()?;
            Some([*handle, numbers.len() as u64].into_iter().chain(numbers.iter().map(|n| u64::from(*n))).collect::<Vec<u64>>())
        };
        copy_out(&session.contexts.iter().filter_map(partition).flatten().collect::<Vec<u64>>(), to, room)
    }

    /// Copies what has run; returns how many operations there are.
    stand_in_trace(to: *mut Work, room: usize) -> usize {
        copy_out(&lock().trace, to, room)
    }

    /// Forgets what has run, and the mistakes.
    stand_in_forget() {
        let mut session = lock();
        session.trace.clear();
        session.mistakes.clear();
        session.calls.clear();
    }

    /// Copies the mistakes, one a line; returns how many bytes they are.
    stand_in_mistakes(to: *mut u8, room: usize) -> usize {
        copy_out(lock().mistakes.join("\n").as_bytes(), to, room)
    }

    /// Copies what is alive, one a line; returns how many bytes that is.
    stand_in_leaks(to: *mut u8, room: usize) -> usize {
        copy_out(lock().leaks().join("\n").as_bytes(), to, room)
    }

    /// Where the memory behind a device address is seen; null if it is none.
    stand_in_view(address: u64) -> *mut c_void {
        address::view(address).cast()
    }

    /// The kernel that this thread plays takes so many nanoseconds of virtual time.
    stand_in_spend(nanoseconds: u64) {
        session::spend(nanoseconds);
    }
}

fn count(machine: &Machine, what: u32) -> u64 {
    match what {
        0 => machine.devices.iter().map(|device| device.used).sum(),
        1 => machine.memory.regions.values().filter(|region| region.block.is_none()).count() as u64,
        2 => machine.memory.blocks.len() as u64,
        3 => machine.memory.regions.values().filter(|region| region.block.is_some()).count() as u64,
        4 => machine.streams.values().filter(|stream| !stream.own && !stream.destroyed).count() as u64,
        5 => machine.events.len() as u64,
        6 => machine.streams.values().map(|stream| stream.last - stream.done).sum(),
        7 => machine.contexts.values().filter(|context| context.partition.is_some()).count() as u64,
        8 => machine.host.ranges.len() as u64,
        _ => 0,
    }
}
