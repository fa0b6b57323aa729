//! The interface of the stand-in for tests.

use std::ffi::{CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, OnceLock};

use crate::control::Functions;
use crate::trace::Work;

/// A quantity that the stand-in counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Count {
    /// Bytes of device memory given out.
    Bytes,
    /// Allocations of device memory alive.
    Allocations,
    /// Enqueued operations that have not run.
    Waiting,
    /// Green contexts alive.
    GreenContexts,
    /// Ranges of pinned host memory.
    Pinned,
}

/// The order in which work of different streams runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// An operation runs only when a thread waits for it, and only if the awaited result depends on
    /// it.
    Lazy,
    /// A worker thread runs operations as soon as possible, and draws the stream from this seed
    /// each time.
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

/// A closure that plays a kernel.
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

/// The stand-in, loaded as this process's driver. One test holds it at a time.
///
/// There is one machine in a process, so the tests of one binary take turns. Error codes are those
/// of `CUresult`. An unknown code or name is a mistake in the test and panics.
pub struct StandIn {
    pub(crate) functions: &'static Functions,
    _turn: MutexGuard<'static, ()>,
}

impl StandIn {
    /// Waits for this test's turn, loads the library if necessary, and resets the machine.
    ///
    /// # Panics
    /// If the library is not found, or a real driver would be found instead.
    pub fn lock() -> Self {
        // The reset clears everything that a test left when it failed during its turn.
        let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let functions = loaded();
        // SAFETY: it has no conditions.
        unsafe { (functions.reset)() };
        Self { functions, _turn: turn }
    }

    /// Sets the devices: `count` alike devices of compute capability 9.0 with this many
    /// multiprocessors and bytes.
    pub fn set_devices(&self, count: u32, multiprocessors: u32, memory: u64) {
        self.set_devices_of(count, multiprocessors, memory, (9, 0), "NVIDIA H100 80GB HBM3 (stand-in)");
    }

    /// Sets the devices: `count` alike devices of this compute capability and name. With a count of
    /// 0, `cuInit` reports that there is no device.
    pub fn set_devices_of(&self, count: u32, multiprocessors: u32, memory: u64, capability: (i32, i32), name: &str) {
        let name = CString::new(name).unwrap_or_default();
        let (major, minor) = capability;
        // SAFETY: the name is C text that lives until the call returns.
        unsafe { (self.functions.set_devices)(count, multiprocessors, memory, major, minor, name.as_ptr()) };
    }

    /// Sets the order of work, [`Order::Lazy`] at first. A random order prints its seed, which a
    /// failed test then shows.
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

    /// Makes the `nth` operation that a stream runs from now fail, and with it the device, as by a
    /// kernel's fault (700). `None` counts the operations of all streams.
    pub fn fail_work(&self, stream: Option<u64>, nth: u64, code: u32) {
        // SAFETY: it has no conditions.
        assert!(unsafe { (self.functions.fail_work)(stream.unwrap_or(0), nth, code) }, "{code} is no code of an error");
    }

    /// Loses a device for good, with a code such as 46 (DEVICE_UNAVAILABLE) or 214
    /// (ECC_UNCORRECTABLE).
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

    /// Returns how often an entry point was called. `pageable upload` and `pageable download` count
    /// copies of memory that is not pinned.
    pub fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the name is C text that lives until the call returns.
        unsafe { (self.functions.calls)(name.as_ptr()) }
    }

    /// Returns the living green contexts in the order of their creation: handles, as in
    /// [`Work::context`], and the numbers of their multiprocessors, ascending.
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

    /// Returns the operations that have run, in order.
    pub fn trace(&self) -> Vec<Work> {
        fill(|to, room| {
            // SAFETY: there is room for `room` entries at `to`, or it is null.
            unsafe { (self.functions.trace)(to, room) }
        })
    }

    /// Returns the program's mistakes, in order.
    pub fn mistakes(&self) -> Vec<String> {
        // SAFETY: there is room for `room` bytes at `to`, or it is null.
        lines(fill(|to, room| unsafe { (self.functions.mistakes)(to, room) }))
    }

    /// Returns the living resources. A test should end with none.
    pub fn leaks(&self) -> Vec<String> {
        // SAFETY: there is room for `room` bytes at `to`, or it is null.
        lines(fill(|to, room| unsafe { (self.functions.leaks)(to, room) }))
    }

    /// Fails the test if the program made mistakes or left resources alive.
    ///
    /// # Panics
    /// If so, with a list.
    pub fn assert_clean(&self) {
        assert_eq!(self.mistakes(), Vec::<String>::new(), "mistakes in the use of CUDA");
        assert_eq!(self.leaks(), Vec::<String>::new(), "left over on the device");
    }

    /// Enqueues a closure that plays a kernel, in a stream of the current context. A panic of the
    /// closure is a mistake, which [`Self::mistakes`] reports.
    ///
    /// # Errors
    /// The code of `cuLaunchHostFunc`; 801 (NOT_SUPPORTED) in a capturing stream, as the closure
    /// can be played only once.
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

    /// Declares that the kernel enqueued next in a stream reads, or `writes`, these bytes of device
    /// memory. The bytes must be allocated when the kernel runs, and the accesses ordered with all
    /// others.
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

    /// Returns the host's view of the memory behind a device address, for closures that play
    /// kernels. The view may lie outside an allocation. Only a running closure may touch it, and
    /// only allocated bytes.
    ///
    /// # Panics
    /// If the library is not loaded or `address` is no device address.
    pub fn view(address: u64) -> *mut u8 {
        // SAFETY: it has no conditions.
        let view = unsafe { (loaded().view)(address) };
        assert!(!view.is_null(), "{address:#x} is no address of device memory");
        view.cast()
    }

    /// Sets the duration of the kernel that this thread plays, in nanoseconds of virtual time; the
    /// default is 10 us.
    ///
    /// # Panics
    /// If the library is not loaded.
    pub fn spend(nanoseconds: u64) {
        // SAFETY: it has no conditions.
        unsafe { (loaded().spend)(nanoseconds) };
    }
}

/// Collects the values that a C function copies out.
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
