//! A world that stands still: time passes when this program says so, and nothing begins by itself.
//!
//! The functions below take the place of libc's in this program, as the linker finds a program's
//! own functions first. Our crates and our dependencies all get their time here, and no line of the
//! server was changed for that. Before [`stand_still`] the functions do what libc does.
//!
//! From then on the clocks show the time that [`pass`] has set. An emulated launch sleeps briefly:
//! time passes, and the thread goes on. A thread that sleeps longer, or waits with a limit, waits
//! until another thread wakes it. So the watchdog, the alarms and the rehearsal run nothing and add
//! to no count.

use std::cell::Cell;
use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::gate::counters::{self, Counter, count, is_client};
use crate::gate::part;

/// The longest sleep that is a launch, nanoseconds.
const BRIEF: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
/// The most threads that the gate's own wake-up wakes. No other wake-up has this number, so that a
/// list of system calls tells them apart.
pub const HANDSHAKE: u32 = 77_777;
/// The clock of the day is ahead of the other clocks by this, nanoseconds.
const START: u64 = 1_700_000_000 * SECOND;

/// Threads that one call wakes at most, as they are counted.
const MOST_WOKEN: i32 = 64;

static STILL: AtomicBool = AtomicBool::new(false);
static NOW: AtomicU64 = AtomicU64::new(0);
/// Threads that do not wait, the client's not among them.
static BUSY: AtomicU32 = AtomicU32::new(0);
static NEVER: AtomicU32 = AtomicU32::new(0);

/// Stops time, except for [`pass`].
pub fn stand_still() {
    let monotonic = raw_clock(libc::CLOCK_MONOTONIC);
    NOW.store(monotonic, Ordering::SeqCst);
    STILL.store(true, Ordering::SeqCst);
}

fn is_still() -> bool {
    STILL.load(Ordering::Relaxed)
}

/// Lets this many nanoseconds pass.
pub fn pass(nanos: u64) {
    NOW.store(NOW.load(Ordering::Relaxed) + nanos, Ordering::Relaxed);
}

/// Waits until no thread has any work, so that no request meets the end of the one before.
pub fn wait_until_idle() {
    loop {
        let busy = BUSY.load(Ordering::SeqCst);
        if busy == 0 {
            return;
        }
        futex(&BUSY, libc::FUTEX_WAIT, busy);
    }
}

/// Marks a thread that has waited before. From its first wait to its end the thread is counted
/// while it is busy.
struct Known;

impl Drop for Known {
    fn drop(&mut self) {
        add_busy(-1);
    }
}

thread_local! {
    static KNOWN: Cell<Option<Known>> = const { Cell::new(None) };
}

/// Records that the thread begins to wait.
fn begin_wait() {
    if is_client() {
        return;
    }
    // A thread that is ending is no longer counted.
    let was_known = KNOWN.try_with(|known| known.replace(Some(Known)).map(std::mem::forget).is_some());
    if was_known != Ok(false) {
        add_busy(-1);
    }
}

/// Makes the calling thread a client, which is not counted.
pub fn be_client() {
    drop(KNOWN.take());
    counters::be_client();
}

/// Adds to the number of busy threads.
fn add_busy(more: i32) {
    let before = BUSY.fetch_add(more as u32, Ordering::SeqCst);
    if before.wrapping_add(more as u32) == 0 {
        futex(&BUSY, libc::FUTEX_WAKE, HANDSHAKE);
    }
}

fn end_wait() {
    if !is_client() {
        add_busy(1);
    }
}

fn raw_clock(clock: c_int) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec there.
    unsafe { raw(libc::SYS_clock_gettime, [clock as usize, &raw mut time as usize, 0, 0, 0, 0]) };
    time.tv_sec as u64 * SECOND + time.tv_nsec as u64
}

fn futex(word: &AtomicU32, operation: c_int, value: u32) {
    let operation = (operation | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: the word lives for ever, and there is no limit to read.
    unsafe { raw(libc::SYS_futex, [word.as_ptr() as usize, operation, value as usize, 0, 0, 0]) };
}

fn sleep_for_good() -> ! {
    begin_wait();
    loop {
        futex(&NEVER, libc::FUTEX_WAIT, 0);
    }
}

/// Makes a system call.
///
/// # Safety
/// As for the system call.
unsafe fn raw(number: c_long, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: the kernel changes RCX and R11 beside the result, and memory as the call says.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// Returns a system call's result as libc does.
fn result(result: isize) -> isize {
    if (-4095..0).contains(&result) {
        // SAFETY: the place of errno is the thread's own.
        unsafe { *libc::__errno_location() = -result as c_int };
        return -1;
    }
    result
}

#[unsafe(no_mangle)]
extern "C" fn clock_gettime(clock: c_int, time: *mut libc::timespec) -> c_int {
    count(Counter::ClockReads, 1);
    let shown = match clock {
        libc::CLOCK_PROCESS_CPUTIME_ID | libc::CLOCK_THREAD_CPUTIME_ID => None,
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE => Some(START + NOW.load(Ordering::Relaxed)),
        _ => Some(NOW.load(Ordering::Relaxed)),
    };
    let nanos = shown.filter(|_| is_still()).unwrap_or_else(|| raw_clock(clock));
    let shown = libc::timespec { tv_sec: (nanos / SECOND) as i64, tv_nsec: (nanos % SECOND) as i64 };
    // SAFETY: the caller has a timespec there.
    unsafe { time.write(shown) };
    0
}

/// Sleeps this long in a world that stands still.
fn sleep_still(nanos: u64) -> c_int {
    if nanos > BRIEF {
        sleep_for_good();
    }
    pass(nanos);
    part::launched();
    0
}

/// # Safety
/// `time` points to a timespec.
unsafe fn nanos(time: *const libc::timespec) -> u64 {
    // SAFETY: the caller's promise.
    let time = unsafe { time.read() };
    time.tv_sec as u64 * SECOND + time.tv_nsec as u64
}

#[unsafe(no_mangle)]
extern "C" fn nanosleep(asked: *const libc::timespec, left: *mut libc::timespec) -> c_int {
    if is_still() {
        // SAFETY: the caller has a timespec there.
        return sleep_still(unsafe { nanos(asked) });
    }
    // SAFETY: the caller's promise to libc.
    result(unsafe { raw(libc::SYS_nanosleep, [asked as usize, left as usize, 0, 0, 0, 0]) }) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn clock_nanosleep(
    clock: c_int,
    flags: c_int,
    asked: *const libc::timespec,
    left: *mut libc::timespec,
) -> c_int {
    if is_still() {
        // SAFETY: the caller has a timespec there.
        let asked = unsafe { nanos(asked) };
        let now = if flags & libc::TIMER_ABSTIME != 0 { NOW.load(Ordering::Relaxed) } else { 0 };
        return sleep_still(asked.saturating_sub(now));
    }
    let arguments = [clock as usize, flags as usize, asked as usize, left as usize, 0, 0];
    // SAFETY: the caller's promise to libc. This function returns the error itself.
    -unsafe { raw(libc::SYS_clock_nanosleep, arguments) } as c_int
}

/// libc's function has any number of arguments; the calling convention is the same as long as none
/// is a floating-point number.
#[unsafe(no_mangle)]
extern "C" fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    let arguments = [a, b, c, d, e, f];
    match number {
        libc::SYS_futex => result(futex_call(arguments)) as c_long,
        libc::SYS_getrandom => getrandom(a as *mut c_void, b, 0) as c_long,
        // SAFETY: the caller's promise to libc.
        number => result(unsafe { raw(number, arguments) }) as c_long,
    }
}

/// Lets a thread wait for another, or wakes some.
fn futex_call(mut arguments: [usize; 6]) -> isize {
    count(Counter::Futexes, 1);
    let waits = match arguments[1] as c_int & 0x7f {
        libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET => true,
        libc::FUTEX_WAKE => false,
        // SAFETY: the caller's promise to libc.
        _ => return unsafe { raw(libc::SYS_futex, arguments) },
    };
    if is_client() {
        // SAFETY: as above.
        return unsafe { raw(libc::SYS_futex, arguments) };
    }
    if !waits {
        // The threads are counted before they wake, so that every busy thread is counted.
        let most = (arguments[2] as i32).clamp(0, MOST_WOKEN);
        add_busy(most);
        // SAFETY: as above.
        let woken = unsafe { raw(libc::SYS_futex, arguments) };
        add_busy(woken.max(0) as i32 - most);
        return woken;
    }
    if is_still() {
        arguments[3] = 0;
    }
    begin_wait();
    // SAFETY: as above.
    let waited = unsafe { raw(libc::SYS_futex, arguments) };
    // The waking thread has counted this one as busy.
    if waited != 0 {
        end_wait();
    }
    waited
}

/// Returns seeds that are the same in each run.
#[unsafe(no_mangle)]
extern "C" fn getrandom(bytes: *mut c_void, length: usize, _flags: u32) -> isize {
    for index in 0..length {
        // SAFETY: the caller has this many bytes there.
        unsafe { bytes.cast::<u8>().add(index).write((index as u8).wrapping_mul(151) ^ 0x5a) };
    }
    length as isize
}

#[unsafe(no_mangle)]
extern "C" fn epoll_wait(epoll: c_int, events: *mut libc::epoll_event, most: c_int, limit: c_int) -> c_int {
    let limit = if is_still() && limit > 0 { -1 } else { limit };
    if limit != 0 {
        begin_wait();
    }
    let arguments = [epoll as usize, events as usize, most as usize, limit as usize, 0, 0];
    // SAFETY: the caller's promise to libc.
    let ready = result(unsafe { raw(libc::SYS_epoll_wait, arguments) });
    if limit != 0 {
        end_wait();
    }
    ready as c_int
}
