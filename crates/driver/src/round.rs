//! The mailboxes that a thread must look after.

use crate::handler::Handler;

/// The most shards of a cluster.
pub const MAX_SHARDS: usize = 64;

/// The mailboxes that a thread must look after because it put a message in, and the thread's
/// context.
pub struct Round<'a, H: Handler> {
    pub context: &'a mut H::Context,
    pub shards: u64,
    pub matchmaker: bool,
    /// The shard after the last one visited.
    next: u32,
    /// Whether the last mailbox visited was the matchmaker's.
    pub matched: bool,
}

impl<'a, H: Handler> Round<'a, H> {
    /// No mailbox, for a thread with this context.
    pub fn new(context: &'a mut H::Context) -> Self {
        Round { context, shards: 0, matchmaker: false, next: 0, matched: false }
    }

    pub fn everywhere(self, shards: usize) -> Self {
        Round { shards: u64::MAX >> (MAX_SHARDS - shards), matchmaker: true, ..self }
    }

    pub fn matchmaker(self) -> Self {
        Round { matchmaker: true, ..self }
    }

    pub fn shard(self, index: usize) -> Self {
        Round { shards: self.shards | 1 << index, ..self }
    }

    pub fn next_shard(&mut self) -> Option<usize> {
        if self.shards == 0 {
            return None;
        }
        let index = (self.next + self.shards.rotate_right(self.next).trailing_zeros()) % MAX_SHARDS as u32;
        self.shards &= !(1 << index);
        self.next = (index + 1) % MAX_SHARDS as u32;
        Some(index as usize)
    }
}
