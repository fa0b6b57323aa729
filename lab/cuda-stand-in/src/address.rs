//! Device addresses: a window of address space that cannot be read. Beside it, at a fixed distance,
//! lies a second window, through which the stand-in and the functions that play kernels see the
//! memory.
//!
//! A host that follows a device address dies, as on a machine with a GPU. No address is handed out
//! twice, so that every use of freed memory is noticed.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pwrite;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

/// Size of each window, bytes. It is only address space: memory exists only where a block is
/// mapped.
const WINDOW: usize = 1 << 40;
/// The value of every byte of unwritten memory.
pub const FRESH: u8 = 0xCD;
/// The number of bytes of a block that are filled with [`FRESH`]. The rest of a larger block is
/// zero, so that a test can ask for tens of GiB.
const FILLED: usize = 64 << 20;
/// The grain of device memory blocks, bytes, as `cuMemGetAllocationGranularity` reports it.
pub const GRAIN: usize = 2 << 20;
const PAGE: usize = 4096;

struct Windows {
    device: usize,
    view: usize,
    next: AtomicUsize,
}

static WINDOWS: LazyLock<Option<Windows>> = LazyLock::new(|| {
    let reserve = || {
        // SAFETY: asks the kernel for a fresh range at a place of its choice; nothing of ours is
        // replaced.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                WINDOW + GRAIN,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        start.ok().map(|start| (start as usize).next_multiple_of(GRAIN))
    };
    Some(Windows { device: reserve()?, view: reserve()?, next: AtomicUsize::new(GRAIN) })
});

/// Takes `len` bytes of device address space that were never taken before; `None` where the window
/// is used up.
pub fn take(len: usize, alignment: usize) -> Option<u64> {
    let windows = WINDOWS.as_ref()?;
    let alignment = alignment.max(PAGE);
    let mut start = 0;
    windows
        .next
        .try_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
            start = next.checked_next_multiple_of(alignment)?;
            // One page between two blocks, so that an overrun of one block never lands in the next.
            let end = start.checked_add(len.checked_next_multiple_of(PAGE)?)?.checked_add(PAGE)?;
            (end <= WINDOW).then_some(end)
        })
        .ok()?;
    Some((windows.device + start) as u64)
}

/// Returns the view of the memory behind a device address, whether or not any is mapped; null
/// outside the window.
pub fn view(address: u64) -> *mut u8 {
    match WINDOWS.as_ref() {
        Some(windows) if (windows.device..windows.device + WINDOW).contains(&(address as usize)) => {
            (address as usize - windows.device + windows.view) as *mut u8
        }
        _ => std::ptr::null_mut(),
    }
}

/// Memory that can be mapped at several addresses, filled with [`FRESH`].
pub fn block(len: usize) -> io::Result<OwnedFd> {
    let file = memfd_create("cuda-stand-in", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, len.next_multiple_of(PAGE) as u64)?;
    let fill = vec![FRESH; len.min(1 << 20)];
    let mut at = 0;
    while at < len.min(FILLED) {
        let part = &fill[..fill.len().min(len - at)];
        at += pwrite(&file, part, at as u64)?;
    }
    Ok(file)
}

/// Maps `len` bytes of a block at a device address from [`take`]: into the view, and if `readable`,
/// at the address itself too.
pub fn map(address: u64, len: usize, block: impl AsFd, readable: bool) -> io::Result<()> {
    let len = len.next_multiple_of(PAGE);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    for (place, wanted) in [(view(address), true), (address as *mut u8, readable)] {
        if wanted && !place.is_null() {
            // SAFETY: the range lies in a window of ours that holds no Rust object. `take` handed
            // out the range, so no other mapping lies in it.
            unsafe { mmap(place.cast(), len, protection, MapFlags::SHARED | MapFlags::FIXED, &block, 0)? };
        }
    }
    Ok(())
}

/// Unmaps the memory of a device address; the address space stays reserved.
pub fn unmap(address: u64, len: usize) {
    let len = len.next_multiple_of(PAGE);
    for place in [view(address), address as *mut u8] {
        if !place.is_null() {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
            // SAFETY: the range lies in a window of ours that holds no Rust object. A thread that
            // still looks there must die. A failure leaves the memory mapped, which only hides a
            // mistake.
            let _ = unsafe { mmap_anonymous(place.cast(), len, ProtFlags::empty(), flags) };
        }
    }
}
