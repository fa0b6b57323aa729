//! The stand-in as a test sees it.

use std::ffi::{CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, OnceLock};

use crate::control::Functions;
use crate::trace::Work;

/// Something the stand-in counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Count {
    /// Bytes of device memory given out.
    Bytes,
    /// Allocations of device memory alive.
    Allocations,
    /// Operations enqueued that have not run.
    Waiting,
    /// Green contexts alive.
    GreenContexts,
    /// Ranges of pinned host memory.
    Pinned,
}

/// The order in which work of different streams runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Only what somebody waits for, only when they wait.
    Lazy,
    /// As soon as possible, the stream drawn from this seed each time, by one thread.
    Random(u64),
}

static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
static TURN: Mutex<()> = Mutex::new(());

fn loaded() -> &'static Functions {
    match FUNCTIONS.get_or_init(Functions::load) {
        Ok(functions) => functions,
        Err(error) => panic!("the CUDA stand-in: {error}"),
    }
}

/// What plays a kernel.
type Body = Box<dyn FnOnce() + Send>;

unsafe extern "C" fn play(data: *mut c_void) {
    // SAFETY: the box that `StandIn::kernel` has given away, and a stream runs each function once.
    let body = unsafe { Box::from_raw(data.cast::<Body>()) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(body)) {
        let said = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        let what = CString::new(format!("a kernel panicked: {}", said.unwrap_or("?"))).unwrap_or_default();
        // SAFETY: C text that lives until the call returns.
        unsafe { (loaded().note)(what.as_ptr()) };
    }
}

/// The stand-in, loaded as this process's driver and in the hands of one test.
///
/// There is one machine in a process, so the tests of one binary take turns. Codes are those of `CUresult`; a code or a name that
/// the stand-in does not know is a mistake in the test and panics.
pub struct StandIn {
    pub(crate) functions: &'static Functions,
    _turn: MutexGuard<'static, ()>,
}

impl StandIn {
    /// Waits for the turn, loads the library if it is not, and sets everything back to the beginning.
    ///
    /// # Panics
    /// If the library is not found, or a real driver would be found instead of it.
    pub fn lock() -> Self {
        // A test that failed while it had the turn leaves nothing that the reset does not clear.
        let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let functions = loaded();
        // SAFETY: it has no conditions.
        unsafe { (functions.reset)() };
        Self { functions, _turn: turn }
    }

    /// Sets the devices: `count` alike ones of compute capability 9.0 with so many multiprocessors and bytes.
    pub fn set_devices(&self, count: u32, multiprocessors: u32, memory: u64) {
        self.set_devices_of(count, multiprocessors, memory, (9, 0), "NVIDIA H100 80GB HBM3 (stand-in)");
    }

    /// Sets the devices: `count` alike ones of this compute capability and name. None: `cuInit` says that there is no device.
    pub fn set_devices_of(&self, count: u32, multiprocessors: u32, memory: u64, capability: (i32, i32), name: &str) {
        let name = CString::new(name).unwrap_or_default();
        let (major, minor) = capability;
        // SAFETY: the name is C text that lives until the call returns.
        unsafe { (self.functions.set_devices)(count, multiprocessors, memory, major, minor, name.as_ptr()) };
    }

    /// Sets the order of work, [`Order::Lazy`] at first. A random one prints its seed, which a failed test then shows.
    pub fn set_order(&self, order: Order) {
        // SAFETY: they have no conditions.
        match order {
            Order::Lazy => unsafe { (self.functions.set_lazy)() },
            Order::Random(seed) => {
                println!("the CUDA stand-in runs streams in a random order: seed {seed}");
                // SAFETY: it has no conditions.
                unsafe { (self.functions.set_random)(seed) }
            }
        }
    }

    /// Makes `cuInit` fail.
    pub fn fail_init(&self, code: u32) {
        // SAFETY: it has no conditions.
        assert!(unsafe { (self.functions.fail_init)(code) }, "{code} is no code of an error");
    }

    /// Makes the `nth` call of an entry point, such as `cuMemcpyHtoDAsync_v2`, fail.
    pub fn fail_call(&self, name: &str, nth: u64, code: u32) {
        let text = CString::new(name).unwrap_or_default();
        // SAFETY: the name is C text that lives until the call returns.
        let known = unsafe { (self.functions.fail_call)(text.as_ptr(), nth, code) };
        assert!(known, "{name} is no entry point of the stand-in, or {code} no code of an error");
    }

    /// Makes the `nth` operation that a stream runs from now fail, and with it the device, as by a fault of a kernel (700).
    /// `None`: of any stream.
    pub fn fail_work(&self, stream: Option<u64>, nth: u64, code: u32) {
        // SAFETY: it has no conditions.
        assert!(unsafe { (self.functions.fail_work)(stream.unwrap_or(0), nth, code) }, "{code} is no code of an error");
    }

    /// Loses a device with a code such as 46 (DEVICE_UNAVAILABLE) or 214 (ECC_UNCORRECTABLE), for good.
    pub fn lose_device(&self, device: i32, code: u32) {
        // SAFETY: it has no conditions.
        assert!(
            unsafe { (self.functions.lose_device)(device, code) },
            "no device {device}, or {code} is no code of an error"
        );
    }

    /// Brings a lost or failed device back.
    pub fn revive_device(&self, device: i32) {
        self.lose_device(device, 0);
    }

    /// How often an entry point was called. `pageable upload` and `pageable download` count copies of memory that is not pinned.
    pub fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the name is C text that lives until the call returns.
        unsafe { (self.functions.calls)(name.as_ptr()) }
    }

    /// The green contexts that are alive in the order in which they were made: their handles, as [`Work::context`] has them, and the numbers of their
    /// multiprocessors, ascending.
    pub fn partitions(&self) -> Vec<(u64, Vec<u64>)> {
        // SAFETY: there is room for `room` values at `to`, or it is null.
        let values = fill(|to, room| unsafe { (self.functions.partitions)(to, room) });
        let (mut partitions, mut rest) = (Vec::new(), &values[..]);
        while let [handle, count, after @ ..] = rest {
            let (numbers, others) = after.split_at(*count as usize);
            partitions.push((*handle, numbers.to_vec()));
            rest = others;
        }
        partitions
    }

    /// What has run, in the order in which it ran.
    pub fn trace(&self) -> Vec<Work> {
        fill(|to, room| {
            // SAFETY: there is room for `room` entries at `to`, or it is null.
            unsafe { (self.functions.trace)(to, room) }
        })
    }

    /// What the program should not have done, in the order in which it did so.
    pub fn mistakes(&self) -> Vec<String> {
        // SAFETY: there is room for `room` bytes at `to`, or it is null.
        lines(fill(|to, room| unsafe { (self.functions.mistakes)(to, room) }))
    }

    /// What is alive: to be nothing at the end of a test.
    pub fn leaks(&self) -> Vec<String> {
        // SAFETY: there is room for `room` bytes at `to`, or it is null.
        lines(fill(|to, room| unsafe { (self.functions.leaks)(to, room) }))
    }

    /// Fails the test if there were mistakes or something is still alive.
    ///
    /// # Panics
    /// Then, with what it was.
    pub fn assert_clean(&self) {
        assert_eq!(self.mistakes(), Vec::<String>::new(), "mistakes in the use of CUDA");
        assert_eq!(self.leaks(), Vec::<String>::new(), "left over on the device");
    }

    /// Enqueues something that plays a kernel, in a stream of the current context. If it panics, that is a mistake that
    /// [`Self::mistakes`] tells.
    ///
    /// # Errors
    /// The code of `cuLaunchHostFunc`; 801 (NOT_SUPPORTED) in a stream that captures, as it can be played only once.
    ///
    /// # Panics
    /// If the library is not loaded.
    pub fn kernel(stream: u64, body: impl FnOnce() + Send + 'static) -> Result<(), u32> {
        let mut captures = 0;
        // SAFETY: the driver checks the stream, and there is room for the answer.
        if unsafe { (loaded().is_capturing)(stream as *mut c_void, &raw mut captures) } == 0 && captures != 0 {
            return Err(801);
        }
        let body: Box<Body> = Box::new(Box::new(body));
        let data = Box::into_raw(body);
        // SAFETY: the driver checks the stream, and calls the function at most once with the box.
        let code = unsafe { (loaded().launch)(stream as *mut c_void, Some(play), data.cast()) };
        if code == 0 {
            return Ok(());
        }
        // SAFETY: refused, so it is still only ours.
        drop(unsafe { Box::from_raw(data) });
        Err(code)
    }

    /// Says that the kernel enqueued next in a stream reads, or `writes`, these bytes of device memory: they must be memory when it
    /// runs, and be ordered with what else touches them.
    ///
    /// # Errors
    /// The error's code, as of an entry point of the driver.
    ///
    /// # Panics
    /// If the library is not loaded.
    pub fn touch(stream: u64, address: u64, len: u64, writes: bool) -> Result<(), u32> {
        // SAFETY: it has no conditions.
        match unsafe { (loaded().touch)(stream as *mut c_void, address, len, writes) } {
            0 => Ok(()),
            code => Err(code),
        }
    }

    /// Where a function that plays a kernel sees the memory behind a device address. Nothing says that memory is there: only what
    /// was allocated may be touched, only from a function that a stream runs.
    ///
    /// # Panics
    /// If the library is not loaded or this is no device address.
    pub fn view(address: u64) -> *mut u8 {
        // SAFETY: it has no conditions.
        let view = unsafe { (loaded().view)(address) };
        assert!(!view.is_null(), "{address:#x} is no address of device memory");
        view.cast()
    }

    /// Says how long the kernel that this thread plays takes, nanoseconds of virtual time; 10 us if nothing is said.
    ///
    /// # Panics
    /// If the library is not loaded.
    pub fn spend(nanoseconds: u64) {
        // SAFETY: it has no conditions.
        unsafe { (loaded().spend)(nanoseconds) };
    }
}

/// Values that a C function copies out.
fn fill<T: Copy>(copy: impl Fn(*mut T, usize) -> usize) -> Vec<T> {
    let mut values: Vec<T> = Vec::new();
    loop {
        let room = values.capacity();
        let count = copy(values.as_mut_ptr(), room);
        if count <= room {
            // SAFETY: the function has written `count` values, for which there was room.
            unsafe { values.set_len(count) };
            return values;
        }
        values.reserve(count);
    }
}

fn lines(bytes: Vec<u8>) -> Vec<String> {
    String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
}
