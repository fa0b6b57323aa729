//! Memory that tensors live in.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error, realloc};
use std::fmt;
use std::ptr::NonNull;

use bytes::Bytes;

use crate::cuda::{CudaError, DeviceSlice, Pinned};

/// Every buffer that is written here starts on a multiple of this many bytes: a cache line, and as wide as the
/// widest vector load, so that every engine can use the memory in place.
pub const ALIGNMENT: usize = 64;

/// Memory of a tensor: 64-byte aligned and growing while a batch is assembled, or shared with whoever made it
/// (an engine's output, part of a network read). It becomes [`Bytes`] without a copy either way.
///
/// Between the segments of a model on a GPU the memory is there, and its bytes cannot be looked at before [`Buffer::fetch`]; to do so is a defect, and
/// panics. Inputs and outputs of models never are.
pub struct Buffer {
    memory: Memory,
}

enum Memory {
    Owned(Aligned),
    Shared(Bytes),
    /// An engine's, and nobody else's.
    Lent(Box<dyn Lent>),
    /// Host memory that a device copies from, and nobody else's.
    Pinned(Pinned),
    /// On a device, and shared.
    Device(DeviceSlice),
}

/// What a buffer says whose bytes are asked for as if they were here.
const ON_DEVICE: &str = "the bytes are on a device, and were not fetched: this is a defect";

/// Memory of an engine's that this buffer alone may use, and that is given back when it is dropped.
pub(crate) trait Lent: Send + Sync + 'static {
    /// The bytes.
    fn bytes(&self) -> &[u8];

    /// The bytes, for change in place.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// For [`Bytes::from_owner`].
struct LentBytes(Box<dyn Lent>);

impl AsRef<[u8]> for LentBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Buffer::new()
    }
}

impl Buffer {
    /// An empty buffer; allocates nothing.
    pub const fn new() -> Self {
        Buffer { memory: Memory::Owned(Aligned::EMPTY) }
    }

    /// An empty buffer with room for `capacity` bytes.
    pub fn with_capacity(capacity: usize) -> Self {
        let mut memory = Aligned::EMPTY;
        memory.grow_to(capacity);
        Buffer { memory: Memory::Owned(memory) }
    }

    /// A buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        let mut buffer = Buffer::with_capacity(len);
        buffer.resize(len, 0);
        buffer
    }

    /// Takes `bytes` as they are, without a copy; they may be unaligned, see [`Buffer::make_aligned`].
    pub fn from_bytes(bytes: Bytes) -> Self {
        Buffer { memory: Memory::Shared(bytes) }
    }

    /// Takes an engine's memory as it is; see [`Buffer::exclusive`].
    pub(crate) fn from_lent(lent: Box<dyn Lent>) -> Self {
        Buffer { memory: Memory::Lent(lent) }
    }

    /// An empty buffer in pinned memory, with room for as much as that has.
    pub(crate) fn pinned(mut memory: Pinned) -> Self {
        memory.set_len(0);
        Buffer { memory: Memory::Pinned(memory) }
    }

    /// Whether a device copies from it by itself.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.memory, Memory::Pinned(_))
    }

    /// Takes memory of a device.
    pub(crate) fn from_device(slice: DeviceSlice) -> Self {
        Buffer { memory: Memory::Device(slice) }
    }

    /// Where it is on a device, if it is on one.
    pub(crate) fn device(&self) -> Option<&DeviceSlice> {
        match &self.memory {
            Memory::Device(slice) => Some(slice),
            _ => None,
        }
    }

    /// Copies the bytes here if they are on a device. Holds up the caller until the device has written them.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn fetch(&mut self) -> Result<(), CudaError> {
        if let Memory::Device(slice) = &self.memory {
            self.memory = Memory::Shared(slice.fetch()?.into());
        }
        Ok(())
    }

    /// Parts the bytes at these ends, in order, of which the last is their number. The parts share the memory.
    pub(crate) fn split(self, ends: &[usize]) -> Vec<Buffer> {
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let ranges = starts.zip(ends.iter().copied());
        match self.memory {
            Memory::Device(slice) => ranges.map(|(start, end)| Buffer::from_device(slice.part(start, end))).collect(),
            memory => {
                let bytes = Buffer { memory }.into_bytes();
                ranges.map(|(start, end)| Buffer::from_bytes(bytes.slice(start..end))).collect()
            }
        }
    }

    /// The bytes, if nothing else can see them, so that they may be written without a copy.
    pub(crate) fn exclusive(&mut self) -> Option<&mut [u8]> {
        match &mut self.memory {
            Memory::Owned(aligned) => Some(aligned.as_mut_slice()),
            Memory::Lent(lent) => Some(lent.bytes_mut()),
            Memory::Pinned(pinned) => Some(pinned.bytes_mut()),
            Memory::Shared(_) | Memory::Device(_) => None,
        }
    }

    /// Bytes written so far.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.memory {
            Memory::Owned(aligned) => aligned.len,
            Memory::Shared(bytes) => bytes.len(),
            Memory::Lent(lent) => lent.bytes().len(),
            Memory::Pinned(pinned) => pinned.bytes().len(),
            Memory::Device(slice) => slice.len(),
        }
    }

    /// Whether nothing is written.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends the bytes of one request.
    #[inline]
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        match self.room_in_pinned(bytes.len()) {
            Some(room) => room.copy_from_slice(bytes),
            None => self.owned(bytes.len()).extend(bytes),
        }
    }

    /// Makes the buffer `len` bytes long, new bytes being `value`.
    pub fn resize(&mut self, len: usize, value: u8) {
        let more = len.saturating_sub(self.len());
        match self.room_in_pinned(more) {
            Some(room) if more > 0 => room.fill(value),
            _ => self.owned(more).resize(len, value),
        }
    }

    /// Makes pinned memory longer, if it is that and has room; gives what is new of it.
    #[inline]
    fn room_in_pinned(&mut self, more: usize) -> Option<&mut [u8]> {
        let Memory::Pinned(pinned) = &mut self.memory else { return None };
        let len = pinned.bytes().len();
        let longer = len.checked_add(more).filter(|longer| *longer <= pinned.capacity())?;
        pinned.set_len(longer);
        pinned.bytes_mut().get_mut(len..)
    }

    /// The bytes written so far.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        match &self.memory {
            Memory::Owned(aligned) => aligned.as_slice(),
            Memory::Shared(bytes) => bytes,
            Memory::Lent(lent) => lent.bytes(),
            Memory::Pinned(pinned) => pinned.bytes(),
            Memory::Device(_) => panic!("{ON_DEVICE}"),
        }
    }

    /// The bytes written so far, for change in place; copies them first if they are shared.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        if matches!(self.memory, Memory::Shared(_)) {
            self.owned(0);
        }
        self.exclusive().expect("what was shared is copied")
    }

    /// Moves the bytes to aligned memory if they are not at a multiple of `alignment` (at most [`ALIGNMENT`]).
    #[inline]
    pub fn make_aligned(&mut self, alignment: usize) {
        if !self.as_slice().as_ptr().addr().is_multiple_of(alignment) {
            self.owned(0);
        }
    }

    /// The bytes, shared: slices of it can be replies without a copy.
    pub fn into_bytes(self) -> Bytes {
        match self.memory {
            Memory::Owned(aligned) if aligned.len == 0 => Bytes::new(),
            Memory::Owned(aligned) => Bytes::from_owner(aligned),
            Memory::Shared(bytes) => bytes,
            Memory::Lent(lent) => Bytes::from_owner(LentBytes(lent)),
            Memory::Pinned(pinned) => Bytes::from_owner(LentBytes(Box::new(pinned))),
            Memory::Device(_) => panic!("{ON_DEVICE}"),
        }
    }

    /// The memory as this buffer's own, with room for `more` bytes.
    #[inline]
    fn owned(&mut self, more: usize) -> &mut Aligned {
        if !matches!(self.memory, Memory::Owned(_)) {
            let bytes = self.as_slice();
            let mut copy = Aligned::EMPTY;
            copy.grow_to(bytes.len().saturating_add(more));
            copy.extend(bytes);
            self.memory = Memory::Owned(copy);
        }
        match &mut self.memory {
            Memory::Owned(aligned) => aligned,
            _ => unreachable!("replaced just above"),
        }
    }
}

impl From<Bytes> for Buffer {
    fn from(bytes: Bytes) -> Self {
        Buffer::from_bytes(bytes)
    }
}

impl From<&[u8]> for Buffer {
    fn from(bytes: &[u8]) -> Self {
        let mut buffer = Buffer::with_capacity(bytes.len());
        buffer.extend_from_slice(bytes);
        buffer
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}

/// A growing allocation at a multiple of [`ALIGNMENT`].
///
/// Invariant: `len <= capacity`; the first `len` bytes are written; `start` is the start of an allocation of
/// `capacity` bytes with alignment [`ALIGNMENT`], or dangling if `capacity` is 0.
struct Aligned {
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: an `Aligned` owns its allocation alone, and bytes may be used from any thread.
unsafe impl Send for Aligned {}
// SAFETY: shared references only read.
unsafe impl Sync for Aligned {}

impl Aligned {
    const EMPTY: Aligned = Aligned { start: NonNull::<AlignedUnit>::dangling().cast(), len: 0, capacity: 0 };

    fn layout(capacity: usize) -> Layout {
        match Layout::from_size_align(capacity, ALIGNMENT) {
            Ok(layout) => layout,
            // As `Vec` does: more than isize::MAX bytes cannot exist, so no valid input leads here.
            Err(_) => panic!("capacity overflow"),
        }
    }

    /// Makes room for exactly `capacity` bytes, if there is less.
    fn grow_to(&mut self, capacity: usize) {
        if capacity <= self.capacity {
            return;
        }
        let layout = Aligned::layout(capacity);
        let start = if self.capacity == 0 {
            // SAFETY: `capacity` is greater than 0, so the layout is not empty.
            unsafe { alloc(layout) }
        } else {
            // SAFETY: `start` was allocated with `layout(self.capacity)`, and `capacity` is a valid size above 0.
            unsafe { realloc(self.start.as_ptr(), Aligned::layout(self.capacity), capacity) }
        };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        self.start = start;
        self.capacity = capacity;
    }

    #[inline]
    fn reserve(&mut self, more: usize) {
        let needed = self.len.saturating_add(more);
        if needed > self.capacity {
            self.grow_to(needed.max(self.capacity.saturating_mul(2)).max(ALIGNMENT));
        }
    }

    #[inline]
    fn extend(&mut self, bytes: &[u8]) {
        self.reserve(bytes.len());
        // SAFETY: there is room for `bytes` behind `len`, and `bytes` cannot overlap memory that is borrowed mutably.
        unsafe { self.start.as_ptr().add(self.len).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.len += bytes.len();
    }

    fn resize(&mut self, len: usize, value: u8) {
        if len > self.len {
            let more = len - self.len;
            self.reserve(more);
            // SAFETY: there is room for `more` bytes behind `len`.
            unsafe { self.start.as_ptr().add(self.len).write_bytes(value, more) };
        }
        self.len = len;
    }

    #[inline]
    fn as_slice(&self) -> &[u8] {
        // SAFETY: the first `len` bytes are written.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the first `len` bytes are written, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        if self.capacity > 0 {
            // SAFETY: allocated with this layout, and freed once.
            unsafe { dealloc(self.start.as_ptr(), Aligned::layout(self.capacity)) };
        }
    }
}

/// Only for its alignment: a dangling pointer to it is aligned as a tensor of no bytes must be.
#[repr(align(64))]
struct AlignedUnit;

const _: () = assert!(std::mem::align_of::<AlignedUnit>() == ALIGNMENT);
