//! The memory that one peer's frames may need at a time, over all of its connections.
//!
//! A peer with the secret may connect as many processes. Each connection alone may announce the
//! largest head, and all of them together could take the memory of the machine. Hence all
//! connections of one address share a budget. A frame that does not fit waits until earlier frames
//! of the address are read. A connection that holds a part and sends nothing is silent, and its link
//! is soon lost.

use tokio::sync::{Semaphore, SemaphorePermit};

/// The most bytes of a head. The largest heads describe a backend's models, with the names of their
/// classes.
pub(super) const LARGEST_HEAD: u32 = 64 << 20;
/// The memory that the lists of any head may need, besides twice the bytes of the head. A refusal
/// of a request takes 3 bytes of a head, and 32 bytes of memory.
pub(super) const LISTS: u64 = 8 << 20;
/// The bytes of a head, and of a frame's tensors, that need no budget. Almost all frames are
/// smaller.
const FREE_HEAD: u64 = 4 << 10;
const FREE_TENSORS: u64 = 64 << 10;
/// The most bytes of lists that a byte of a head decodes to. The least byte is an empty text.
const AMPLIFIED: u64 = 40;
/// The bytes of a permit.
const UNIT: u64 = 1024;

/// The memory of an address's frames while they are read.
#[derive(Debug)]
pub struct ReadBudget {
    most_tensors: u64,
    heads: Semaphore,
    /// Apart from the heads, so that a frame whose head is here gets its tensors in the end.
    tensors: Semaphore,
}

/// The memory of a head and of its lists.
fn memory_of(head: u64) -> u64 {
    head + (2 * head + LISTS).min(AMPLIFIED * head)
}

/// The permits for so many bytes.
fn permits(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

impl ReadBudget {
    /// A budget for one frame of the largest size: with the largest head, and `most_tensors` bytes
    /// of tensors.
    pub fn new(most_tensors: u64) -> Self {
        let of = |bytes| Semaphore::new(permits(bytes) as usize);
        ReadBudget { most_tensors, heads: of(memory_of(LARGEST_HEAD.into())), tensors: of(most_tensors) }
    }

    /// The most bytes of tensors in a frame.
    pub fn most_tensors(&self) -> u64 {
        self.most_tensors
    }

    /// Waits until a head of this length may be read. The frame keeps the permit until it is read.
    pub(super) async fn head(&self, length: u32) -> Option<SemaphorePermit<'_>> {
        let length = u64::from(length);
        if length <= FREE_HEAD { None } else { self.heads.acquire_many(permits(memory_of(length))).await.ok() }
    }

    /// Waits until so many bytes of tensors may be read: at most [`ReadBudget::most_tensors`].
    pub(super) async fn tensors(&self, bytes: u64) -> Option<SemaphorePermit<'_>> {
        if bytes <= FREE_TENSORS { None } else { self.tensors.acquire_many(permits(bytes)).await.ok() }
    }
}
