//! The input ring of one tensor in the memory of a device (E²bird §5.1).
//!
//! Requests are decoded into pinned slots on the host. Each written slot is copied to its place on
//! the device, in a stream of the ring's own. The copies therefore overlap the work of the lanes. A
//! launch that reads slots begins after their copies.
//!
//! Behind the last slot the first ones are repeated, so that a run across the end is one piece of
//! memory there too:
//!
//! ```text
//! host     | 0 | 1 | 2 | 3 |
//! device   | 0 | 1 | 2 | 3 | 0 | 1 |     runs of up to three slots
//! ```
//!
//! The device could map its pages twice as the host does ([`downbeat_engine::ring_memory`]), but a page of
//! the device has 2 MiB. Slots would have to fill such pages together, which for most sizes needs
//! rings of gigabytes.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use downbeat_core::device::RingRun;
use downbeat_engine::ring_memory::{RingCopies, RingMemory, RingMemoryError};
use downbeat_engine::tensor::{DeviceBytes, DeviceError};

use super::memory::{DeviceAllocation, DeviceSlice};
use super::pinned::Registration;
use super::{CudaError, Device, Event, Stream};

/// The slots of an input ring on a device, copies of the host's slots.
pub(crate) struct DeviceRing {
    slots: u32,
    slot_bytes: usize,
    /// The number of slots that are repeated behind the last.
    overhang: u32,
    stream: Arc<Stream>,
    /// By slot: the event at the end of its last copy.
    copied: Box<[Event]>,
    /// By slot: the number of its last copy, in the order in which the stream does them.
    order: Box<[AtomicU64]>,
    /// The number of copies so far. Locked while a copy is enqueued.
    begun: Mutex<u64>,
    /// Dropped before its memory on the host is unmapped.
    _pinned: Option<Registration>,
    memory: DeviceAllocation,
}

/// The event at which slots of a ring are copied.
#[derive(Clone)]
pub(crate) struct SlotReady {
    ring: Arc<DeviceRing>,
    slot: u32,
}

impl SlotReady {
    pub(super) fn event(&self) -> &Event {
        &self.ring.copied[self.slot as usize]
    }
}

impl DeviceRing {
    /// A ring for the slots at `host`. Launches read up to `longest` of them at once.
    ///
    /// # Safety
    /// The slots at `host` must stay mapped as long as the ring lives.
    pub(crate) unsafe fn new(
        device: &Arc<Device>,
        host: NonNull<u8>,
        slots: u32,
        slot_bytes: usize,
        longest: u32,
    ) -> Result<DeviceRing, CudaError> {
        let overhang = longest.clamp(1, slots) - 1;
        let bytes = (slots + overhang) as usize * slot_bytes;
        let memory = DeviceAllocation::new(device, bytes, &format!("an input ring of {bytes} bytes"))?;
        // SAFETY: the caller keeps the slots mapped.
        let pinned = unsafe { Registration::new(device, host, slots as usize * slot_bytes) };
        // Copies from unpinned memory go through the driver's own buffer: slower, but correct.
        let pinned = pinned.inspect_err(|error| tracing::warn!("copies of inputs do not overlap: {error}")).ok();
        Ok(DeviceRing {
            slots,
            slot_bytes,
            overhang,
            stream: Stream::new(device)?,
            copied: (0..slots).map(|_| Event::new(device)).collect::<Result<_, _>>()?,
            order: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            begun: Mutex::new(0),
            _pinned: pinned,
            memory,
        })
    }

    /// Enqueues the copies of a run of slots, which are in `host`: the slots up to the last, and
    /// the slots from the first on.
    ///
    /// # Safety
    /// The slots must be those of the host's ring. They must not be written before every launch
    /// that reads them on the device is over, or new copies of them are enqueued.
    pub(crate) unsafe fn upload(&self, run: RingRun, host: [&[u8]; 2]) -> Result<(), CudaError> {
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        *begun += 1;
        let mut slot = run.first;
        for bytes in host {
            let count = (bytes.len() / self.slot_bytes) as u32;
            if count == 0 {
                continue;
            }
            // SAFETY: the caller keeps the slots as they are.
            unsafe { self.memory.upload(&self.stream, slot as usize * self.slot_bytes, bytes)? };
            // The repeated slots.
            let again = self.overhang.min(slot + count).saturating_sub(slot);
            if again > 0 {
                // SAFETY: the ring outlives its stream's work: its memory is given back after the
                // enqueued work, see `drop`.
                unsafe {
                    let behind = (self.slots + slot) as usize * self.slot_bytes;
                    self.memory.upload(&self.stream, behind, &bytes[..again as usize * self.slot_bytes])?;
                }
            }
            slot = (slot + count) % self.slots;
        }
        for slot in self.numbers(run) {
            self.order[slot].store(*begun, Ordering::Relaxed);
            self.stream.record(&self.copied[slot])?;
        }
        Ok(())
    }

    /// A run of slots as one piece; `None` if it is longer than the ring allows. `owner` protects
    /// them from being written.
    pub(crate) fn read(self: &Arc<Self>, run: RingRun, owner: Arc<dyn Any + Send + Sync>) -> Option<DeviceSlice> {
        if run.first + run.count > self.slots + self.overhang {
            return None;
        }
        // The stream makes copies in order: the last one begun is the last one over.
        let last = self.numbers(run).max_by_key(|slot| self.order[*slot].load(Ordering::Relaxed))?;
        let ready = SlotReady { ring: self.clone(), slot: last as u32 };
        let address = self.memory.address() + (run.first as usize * self.slot_bytes) as u64;
        let len = run.count as usize * self.slot_bytes;
        // SAFETY: the memory stays as long as the ring, which `ready` keeps; `owner` protects the
        // slots during the read.
        Some(unsafe { DeviceSlice::new(self.stream.device().clone(), address, len, Some(ready), owner) })
    }

    fn numbers(&self, run: RingRun) -> impl Iterator<Item = usize> + use<> {
        let slots = self.slots as usize;
        (run.first as usize..).take(run.count as usize).map(move |slot| slot % slots)
    }
}

impl Drop for DeviceRing {
    fn drop(&mut self) {
        // Copies from the host's slots may be under way, and the slots are unmapped next.
        let _ = self.stream.finish();
    }
}

/// The copies of a host's ring.
struct Copies(Arc<DeviceRing>);

impl RingCopies for Copies {
    unsafe fn upload(&self, run: RingRun, host: [&[u8]; 2]) -> Result<(), DeviceError> {
        // SAFETY: the caller promises it.
        Ok(unsafe { self.0.upload(run, host) }?)
    }

    fn read(&self, run: RingRun, owner: Arc<dyn Any + Send + Sync>) -> Option<Box<dyn DeviceBytes>> {
        Some(Box::new(self.0.read(run, owner)?))
    }
}

/// An input ring whose slots are copied to a device when they are written. Launches read up to
/// `longest` copies at once.
///
/// # Errors
/// As [`RingMemory::new`], or if the device is lost or out of memory.
pub fn ring_on_device(
    slots: u32,
    slot_bytes: usize,
    device: &Arc<Device>,
    longest: u32,
) -> Result<Arc<RingMemory>, RingMemoryError> {
    RingMemory::with_copies(slots, slot_bytes, |host| {
        // SAFETY: the slots stay mapped until the ring is dropped, which drops the copies first.
        let copies = unsafe { DeviceRing::new(device, host, slots, slot_bytes, longest) }?;
        Ok(Box::new(Copies(Arc::new(copies))))
    })
}
