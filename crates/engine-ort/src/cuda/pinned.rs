//! Pinned host memory, which a device copies from and to by itself.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE};
use downbeat_engine::tensor::Lent;

use super::{CudaError, Device};

/// Smallest block, bytes.
const SMALLEST: usize = 1 << 12;
/// The most bytes that are kept for later: the system cannot use pinned memory for anything else.
const MOST_KEPT: usize = 1 << 30;

/// A pool of pinned memory that keeps its blocks: pinning takes longer than most launches.
pub(crate) struct PinnedPool {
    device: Arc<Device>,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// The blocks by their size.
    blocks: BTreeMap<usize, Vec<PinnedBlock>>,
    bytes: usize,
}

/// Pinned memory; freed when dropped.
struct PinnedBlock {
    device: Arc<Device>,
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: a block owns its memory alone.
unsafe impl Send for PinnedBlock {}
// SAFETY: shared references only read.
unsafe impl Sync for PinnedBlock {}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        // SAFETY: taken from the driver, given back once.
        self.device.release(|| unsafe { result::free_host(self.start.as_ptr().cast::<c_void>()) });
    }
}

impl PinnedPool {
    pub(crate) fn new(device: &Arc<Device>) -> Arc<PinnedPool> {
        Arc::new(PinnedPool { device: device.clone(), kept: Mutex::default() })
    }

    /// `len` bytes, with any contents.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Result<PinnedBytes, CudaError> {
        let size = class(len);
        let kept = {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let block = kept.blocks.get_mut(&size).and_then(Vec::pop);
            kept.bytes -= block.as_ref().map_or(0, |block| block.size);
            block
        };
        let block = match kept {
            Some(block) => block,
            None => self.pin(size)?,
        };
        Ok(PinnedBytes { pool: self.clone(), block: Some(block), len })
    }

    fn pin(&self, size: usize) -> Result<PinnedBlock, CudaError> {
        self.device.bind()?;
        // SAFETY: given back by `PinnedBlock`.
        let start = unsafe { result::malloc_host(size, CU_MEMHOSTALLOC_PORTABLE) };
        let start = self.device.check("pinning host memory for copies", start)?.cast::<u8>();
        // SAFETY: the block has `size` bytes. Later code reads them as bytes, so that they need a
        // value.
        unsafe { start.write_bytes(0, size) };
        match NonNull::new(start) {
            Some(start) => Ok(PinnedBlock { device: self.device.clone(), start, size }),
            None => {
                let (device, what) = (self.device.ordinal(), "pinning host memory for copies".to_owned());
                Err(CudaError::OutOfMemory { device, what })
            }
        }
    }
}

/// The size of the block for `len` bytes. There are few sizes, and each is at most a third more
/// than needed.
fn class(len: usize) -> usize {
    let power = len.max(SMALLEST).next_power_of_two();
    if len.max(SMALLEST) <= power / 4 * 3 { power / 4 * 3 } else { power }
}

/// Bytes of a [`PinnedPool`]; a drop gives them back.
pub(crate) struct PinnedBytes {
    pool: Arc<PinnedPool>,
    /// `None` only during the drop.
    block: Option<PinnedBlock>,
    len: usize,
}

impl PinnedBytes {
    /// The number of bytes of its block.
    pub(crate) fn capacity(&self) -> usize {
        self.block.as_ref().map_or(0, |block| block.size)
    }

    /// Makes it `len` bytes long. New bytes have any contents.
    ///
    /// # Panics
    /// If its block is smaller.
    pub(crate) fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "as long as its block at most");
        self.len = len;
    }
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        let mut kept = self.pool.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.bytes + block.size <= MOST_KEPT {
            kept.bytes += block.size;
            kept.blocks.entry(block.size).or_default().push(block);
        }
    }
}

impl Lent for PinnedBytes {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the block has at least `len` bytes, written at the latest when it was pinned, and
        // belongs to this value alone.
        self.block.as_ref().map_or(&[], |block| unsafe { std::slice::from_raw_parts(block.start.as_ptr(), self.len) })
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        let slice = |block: &mut PinnedBlock| unsafe { std::slice::from_raw_parts_mut(block.start.as_ptr(), self.len) };
        self.block.as_mut().map_or(&mut [], slice)
    }

    fn grow(&mut self, more: usize) -> Option<&mut [u8]> {
        let len = self.len;
        let longer = len.checked_add(more).filter(|longer| *longer <= self.capacity())?;
        self.set_len(longer);
        self.bytes_mut().get_mut(len..)
    }

    fn is_pinned(&self) -> bool {
        true
    }
}

/// Memory of another owner, pinned until this is dropped.
pub(super) struct Registration {
    device: Arc<Device>,
    start: *mut c_void,
}

// SAFETY: the pointer is only a name for the driver.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Pins the memory.
    ///
    /// # Safety
    /// The memory must stay mapped until the registration is dropped.
    pub(super) unsafe fn new(device: &Arc<Device>, start: NonNull<u8>, len: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let start = start.as_ptr().cast::<c_void>();
        // SAFETY: the caller keeps it mapped.
        let pinned = unsafe { sys::cuMemHostRegister_v2(start, len, CU_MEMHOSTREGISTER_PORTABLE).result() };
        device.check("pinning an input ring", pinned)?;
        Ok(Registration { device: device.clone(), start })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: registered by this type, unregistered once.
        self.device.release(|| unsafe { sys::cuMemHostUnregister(self.start).result() });
    }
}
