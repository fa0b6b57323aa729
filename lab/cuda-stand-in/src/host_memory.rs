//! Pinned host memory: allocated by the driver, or registered with it.

use std::collections::BTreeMap;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::address;
use crate::result::{CUresult::*, Outcome};

/// A range of pinned memory.
#[derive(Debug)]
pub struct Pinned {
    pub len: usize,
    /// True if the driver allocated it; false if it was registered.
    pub allocated: bool,
}

/// All pinned memory, by its start.
#[derive(Debug, Default)]
pub struct HostMemory {
    pub ranges: BTreeMap<usize, Pinned>,
}

impl HostMemory {
    /// Frees the memory that the driver allocated, and forgets the rest.
    pub fn clear(&mut self) {
        for (start, pinned) in std::mem::take(&mut self.ranges) {
            if pinned.allocated {
                release(start, pinned.len);
            }
        }
    }

    /// Returns true if a range of host memory is pinned. Fails if only a part of it is, as the
    /// driver does.
    pub fn is_pinned(&self, start: usize, len: usize) -> Outcome<bool> {
        let end = start.saturating_add(len);
        match self.ranges.range(..end.max(start + 1)).next_back() {
            Some((at, pinned)) if *at <= start && end <= at + pinned.len => Ok(true),
            Some((at, pinned)) if at + pinned.len > start => Err(CUDA_ERROR_INVALID_VALUE),
            _ => Ok(false),
        }
    }

    /// Allocates pinned memory, filled with [`address::FRESH`].
    pub fn allocate(&mut self, len: usize) -> Outcome<usize> {
        if len == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: a fresh mapping at a place of the kernel's choice; `len` is not 0.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        let start = start.map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        // SAFETY: just mapped, writable, and no other thread has its address.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), address::FRESH, len) };
        self.ranges.insert(start as usize, Pinned { len, allocated: true });
        Ok(start as usize)
    }

    /// Frees memory of [`Self::allocate`]. Returns false for other memory.
    pub fn free(&mut self, start: usize) -> bool {
        match self.ranges.get(&start) {
            Some(Pinned { len, allocated: true }) => {
                release(start, *len);
                self.ranges.remove(&start);
                true
            }
            _ => false,
        }
    }

    /// Pins the program's own memory.
    pub fn register(&mut self, start: usize, len: usize) -> Outcome {
        let Some(end) = start.checked_add(len) else { return Err(CUDA_ERROR_INVALID_VALUE) };
        if start == 0 || len == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if self.ranges.range(..end).next_back().is_some_and(|(at, pinned)| at + pinned.len > start) {
            return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.ranges.insert(start, Pinned { len, allocated: false });
        Ok(())
    }

    /// Unpins memory of [`Self::register`]. Returns false for other memory.
    pub fn unregister(&mut self, start: usize) -> bool {
        let registered = matches!(self.ranges.get(&start), Some(Pinned { allocated: false, .. }));
        if registered {
            self.ranges.remove(&start);
        }
        registered
    }

    pub fn leaks(&self) -> Vec<String> {
        let say = |(start, pinned): (&usize, &Pinned)| {
            let what = if pinned.allocated { "allocated" } else { "registered" };
            format!("{} bytes of {what} host memory at {start:#x}", pinned.len)
        };
        self.ranges.iter().map(say).collect()
    }
}

fn release(start: usize, len: usize) {
    // SAFETY: mapped by `allocate` with this length and not yet given back; the program no longer
    // uses it.
    let _ = unsafe { munmap(start as *mut _, len) };
}
