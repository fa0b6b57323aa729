//! Memory for tensors.

use std::any::Any;
use std::fmt;
use std::mem::MaybeUninit;

use bytes::Bytes;

/// Every buffer that is written here starts on a multiple of this many bytes. That is a cache line,
/// and as wide as the widest vector load, so that every engine can use the memory in place.
pub const ALIGNMENT: usize = 64;

/// Memory of a tensor. Some memory is 64-byte aligned and grows while a batch is assembled. Other
/// memory is shared with its maker, such as an engine's output or part of a network read. Both
/// become [`Bytes`] without a copy.
///
/// Between the segments of a model on a GPU the bytes stay on the device. Reading them before
/// [`Buffer::fetch`] is a defect and panics. Inputs and outputs of models are always on the host.
pub struct Buffer {
    memory: Memory,
}

enum Memory {
    Owned(Aligned),
    Shared(Bytes),
    /// An engine's memory, lent to this buffer alone.
    Lent(Box<dyn Lent>),
    /// Memory of a device, shared.
    Device(Box<dyn DeviceBytes>),
}

/// The allocation of a tensor's memory failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory for a tensor of {bytes} bytes")]
pub struct OutOfMemory {
    /// The bytes that were needed.
    pub bytes: usize,
}

/// The panic message of a buffer on a device whose bytes are read on the host.
const ON_DEVICE: &str = "the bytes are on a device, and were not fetched: this is a defect";

/// A device failed to move a tensor's bytes, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(String);

impl DeviceError {
    /// The error with this text.
    pub fn new(text: impl Into<String>) -> DeviceError {
        DeviceError(text.into())
    }
}

/// Memory of an engine that one buffer alone may use. Dropping it gives the memory back.
pub trait Lent: Send + Sync + 'static {
    /// The bytes of the memory.
    fn bytes(&self) -> &[u8];

    /// The bytes, for change in place.
    fn bytes_mut(&mut self) -> &mut [u8];

    /// Makes the memory longer by `more` bytes, and returns the new bytes. `None`: the memory
    /// cannot grow, or has no room.
    fn grow(&mut self, _more: usize) -> Option<&mut [u8]> {
        None
    }

    /// Whether the memory is pinned, so that a device copies from it by itself.
    fn is_pinned(&self) -> bool {
        false
    }
}

/// Bytes in a device's memory, shared with other owners of the same memory. The engine that made
/// them knows their type.
pub trait DeviceBytes: Any + Send + Sync {
    /// The number of bytes.
    fn byte_size(&self) -> usize;

    /// The bytes from `start` to `end`, which share the memory.
    fn part(&self, start: usize, end: usize) -> Box<dyn DeviceBytes>;

    /// A copy in host memory. Blocks the caller until the device has written the bytes.
    ///
    /// # Errors
    /// If the device is lost.
    fn fetch(&self) -> Result<Vec<u8>, DeviceError>;
}

/// Makes [`Bytes::from_owner`] accept lent memory.
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
    ///
    /// # Panics
    /// If the memory cannot be allocated. Where a file or a peer decides the size, use
    /// [`Buffer::try_with_capacity`].
    pub fn with_capacity(capacity: usize) -> Self {
        Buffer::try_with_capacity(capacity).unwrap_or_else(|error| panic!("{error}"))
    }

    /// An empty buffer with room for `capacity` bytes, which can be written without another
    /// allocation.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    pub fn try_with_capacity(capacity: usize) -> Result<Self, OutOfMemory> {
        let mut memory = Aligned::EMPTY;
        memory.grow_to(capacity)?;
        Ok(Buffer { memory: Memory::Owned(memory) })
    }

    /// A buffer of `len` zero bytes.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    pub fn zeroed(len: usize) -> Result<Self, OutOfMemory> {
        let mut buffer = Buffer::try_with_capacity(len)?;
        buffer.resize(len, 0);
        Ok(buffer)
    }

    /// Takes `bytes` as they are, without a copy; they may be unaligned, see
    /// [`Buffer::make_aligned`].
    #[inline]
    pub fn from_bytes(bytes: Bytes) -> Self {
        Buffer { memory: Memory::Shared(bytes) }
    }

    /// Takes an engine's memory as it is; see [`Buffer::exclusive`].
    #[inline]
    pub fn from_lent(lent: Box<dyn Lent>) -> Self {
        Buffer { memory: Memory::Lent(lent) }
    }

    /// Whether the memory is pinned, so that a device copies from it by itself.
    #[inline]
    pub fn is_pinned(&self) -> bool {
        matches!(&self.memory, Memory::Lent(lent) if lent.is_pinned())
    }

    /// Takes memory of a device.
    pub fn from_device_bytes(bytes: Box<dyn DeviceBytes>) -> Self {
        Buffer { memory: Memory::Device(bytes) }
    }

    /// The bytes' place on a device; `None`: they are on the host.
    #[inline]
    pub fn device_bytes(&self) -> Option<&dyn DeviceBytes> {
        match &self.memory {
            Memory::Device(bytes) => Some(&**bytes),
            _ => None,
        }
    }

    /// Copies the bytes to the host if they are on a device. Blocks the caller until the device has
    /// written them.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn fetch(&mut self) -> Result<(), DeviceError> {
        if let Memory::Device(bytes) = &self.memory {
            self.memory = Memory::Shared(bytes.fetch()?.into());
        }
        Ok(())
    }

    /// Divides the bytes at these ends, in order. The last end is the number of bytes. The parts
    /// share the memory.
    pub fn split(self, ends: &[usize]) -> Vec<Buffer> {
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let ranges = starts.zip(ends.iter().copied());
        match self.memory {
            Memory::Device(whole) => {
                ranges.map(|(start, end)| Buffer::from_device_bytes(whole.part(start, end))).collect()
            }
            memory => {
                let bytes = Buffer { memory }.into_bytes();
                ranges.map(|(start, end)| Buffer::from_bytes(bytes.slice(start..end))).collect()
            }
        }
    }

    /// The bytes, if no other owner can see them, so that they may be written without a copy.
    #[inline]
    pub fn exclusive(&mut self) -> Option<&mut [u8]> {
        match &mut self.memory {
            Memory::Owned(aligned) => Some(aligned.as_mut_slice()),
            Memory::Lent(lent) => Some(lent.bytes_mut()),
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
            Memory::Device(bytes) => bytes.byte_size(),
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
        match self.room_in_lent(bytes.len()) {
            Some(room) => room.copy_from_slice(bytes),
            None => self.owned(bytes.len()).extend(bytes),
        }
    }

    /// Makes the buffer `len` bytes long, new bytes being `value`.
    pub fn resize(&mut self, len: usize, value: u8) {
        let more = len.saturating_sub(self.len());
        match self.room_in_lent(more) {
            Some(room) if more > 0 => room.fill(value),
            _ => self.owned(more).resize(len, value),
        }
    }

    /// Makes an engine's memory longer, and returns the new bytes; `None`: the memory is no
    /// engine's, or has no room.
    #[inline]
    fn room_in_lent(&mut self, more: usize) -> Option<&mut [u8]> {
        let Memory::Lent(lent) = &mut self.memory else { return None };
        lent.grow(more)
    }

    /// The bytes written so far.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        match &self.memory {
            Memory::Owned(aligned) => aligned.as_slice(),
            Memory::Shared(bytes) => bytes,
            Memory::Lent(lent) => lent.bytes(),
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

    /// Moves the bytes to aligned memory if they are not at a multiple of `alignment` (at most
    /// [`ALIGNMENT`]).
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
            Memory::Device(_) => panic!("{ON_DEVICE}"),
        }
    }

    /// The memory as this buffer's own, with room for `more` bytes.
    #[inline]
    fn owned(&mut self, more: usize) -> &mut Aligned {
        if !matches!(self.memory, Memory::Owned(_)) {
            let bytes = self.as_slice();
            let mut copy = Aligned::EMPTY;
            copy.reserve(bytes.len().saturating_add(more));
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

/// Growing memory at a multiple of [`ALIGNMENT`].
///
/// Invariant: the first `len` bytes of the blocks are written.
struct Aligned {
    blocks: Vec<MaybeUninit<Block>>,
    len: usize,
}

/// A block is as wide as it is aligned, and so is a dangling pointer to it, as a tensor of no bytes
/// must be.
#[repr(align(64))]
struct Block(#[expect(dead_code, reason = "only for its size")] [u8; ALIGNMENT]);

const _: () = assert!(align_of::<Block>() == ALIGNMENT && size_of::<Block>() == ALIGNMENT);

impl Aligned {
    const EMPTY: Aligned = Aligned { blocks: Vec::new(), len: 0 };

    fn capacity(&self) -> usize {
        self.blocks.len() * ALIGNMENT
    }

    /// The address of the first byte.
    fn start(&mut self) -> *mut u8 {
        self.blocks.as_mut_ptr().cast()
    }

    /// Makes room for `capacity` bytes, if there is less.
    fn grow_to(&mut self, capacity: usize) -> Result<(), OutOfMemory> {
        let more = capacity.div_ceil(ALIGNMENT).saturating_sub(self.blocks.len());
        self.blocks.try_reserve_exact(more).map_err(|_| OutOfMemory { bytes: capacity })?;
        // SAFETY: there is room for this many blocks, which may be unwritten.
        unsafe { self.blocks.set_len(self.blocks.len() + more) };
        Ok(())
    }

    /// Makes room for `more` bytes. Without memory it panics, and does not abort as `Vec` does: a
    /// panic fails only the run of one batch.
    #[inline]
    fn reserve(&mut self, more: usize) {
        let needed = self.len.saturating_add(more);
        if needed > self.capacity()
            && self.grow_to(needed.max(self.capacity().saturating_mul(2))).is_err()
            && let Err(error) = self.grow_to(needed)
        {
            panic!("{error}");
        }
    }

    #[inline]
    fn extend(&mut self, bytes: &[u8]) {
        self.reserve(bytes.len());
        // SAFETY: there is room for `bytes` behind `len`, and `bytes` cannot overlap memory that is
        // borrowed mutably.
        unsafe { self.start().add(self.len).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.len += bytes.len();
    }

    fn resize(&mut self, len: usize, value: u8) {
        if len > self.len {
            let more = len - self.len;
            self.reserve(more);
            // SAFETY: there is room for `more` bytes behind `len`.
            unsafe { self.start().add(self.len).write_bytes(value, more) };
        }
        self.len = len;
    }

    #[inline]
    fn as_slice(&self) -> &[u8] {
        // SAFETY: the first `len` bytes are written.
        unsafe { std::slice::from_raw_parts(self.blocks.as_ptr().cast(), self.len) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the first `len` bytes are written, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }
}

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}
